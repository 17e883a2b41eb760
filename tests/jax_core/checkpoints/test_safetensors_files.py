"""Safetensors files, against the package that everyone else reads and writes them with."""

from __future__ import annotations

import io
import json
import random

import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize
from safetensors.numpy import save_file

from jax_core.checkpoints.safetensors_files import (
    INDEX,
    SINGLE,
    SafetensorsFile,
    ShardedSafetensors,
    open_safetensors,
    write_safetensors,
)
from jax_core.checkpoints.tensor_source import read_tensor
from jax_core.checkpoints.write import array_tensor
from schemas.errors import DamagedDataError, UserError
from tests.jax_core.checkpoints import models

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


def numbers(dtype=np.float32) -> np.ndarray:
    return np.arange(-12, 12).reshape(4, 3, 2).astype(dtype) / 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_package_wrote_is_read_as_it_was(tmp_path, dtype):
    save_file({"a": numbers(dtype), "b": numbers(dtype)[0, 0]}, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.infos["a"].shape == (4, 3, 2) and file.infos["a"].dtype == np.dtype(dtype).name
    assert read_tensor(file, "a").dtype == np.dtype(dtype)
    np.testing.assert_array_equal(read_tensor(file, "a"), numbers(dtype))
    np.testing.assert_array_equal(file.rows("a", 1, 3), numbers(dtype)[1:3])
    np.testing.assert_array_equal(read_tensor(file, "b"), numbers(dtype)[0, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_package_reads_what_was_written(dtype):
    arrays = {"a": numbers(dtype), "long name of b": numbers(dtype)[0], "scalar": numbers(dtype)[0, 0, 0]}
    file = io.BytesIO()
    listed = [array_tensor(name, a.shape, a.dtype, lambda a=a: a) for name, a in arrays.items()]
    write_safetensors(file, listed)
    found = dict(deserialize(file.getvalue()))
    assert found.keys() == arrays.keys()
    codes = {np.float32: "F32", np.float16: "F16", ml_dtypes.bfloat16: "BF16"}
    for name, array in arrays.items():
        assert (found[name]["dtype"], found[name]["shape"]) == (codes[dtype], list(array.shape))
        assert bytes(found[name]["data"]) == array.tobytes()


def test_a_written_file_says_that_it_is_in_pytorchs_format_and_aligns_its_data():
    file = io.BytesIO()
    write_safetensors(file, [array_tensor("a", (3,), np.dtype(np.float32), lambda: np.zeros(3, np.float32))])
    length = int.from_bytes(file.getvalue()[:8], "little")
    assert json.loads(file.getvalue()[8 : 8 + length])["__metadata__"] == {"format": "pt"}
    assert length % 8 == 0


def test_reading_a_row_is_a_view_of_the_file_and_cannot_change_it(tmp_path):
    save_file({"a": numbers()}, tmp_path / "x.safetensors")
    rows = SafetensorsFile(tmp_path / "x.safetensors").rows("a", 0, 4)
    assert not rows.flags.owndata and not rows.flags.writeable


def test_shards_named_by_an_index_are_one_source(tmp_path):
    tensors = models.tensors()
    source = open_safetensors(models.write_sharded(tmp_path, models.halves(tensors)))
    assert source.infos.keys() == tensors.keys()
    assert len({info.file for info in source.infos.values()}) == 2
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read_tensor(source, name), tensor)


def test_a_missing_shard_is_named(tmp_path):
    models.write_sharded(tmp_path, models.halves(models.tensors()))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors: is missing"):
        open_safetensors(tmp_path)


def test_a_shard_without_a_tensor_that_the_index_places_there_is_named(tmp_path):
    tensors = models.tensors()
    models.write_sharded(tmp_path, models.halves(tensors))
    save_file({"other": numbers()}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(DamagedDataError, match=r"places .* in model-00001-of-00002.safetensors, which does not hold"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "", 3, ["a"]])
def test_an_index_cannot_lead_out_of_its_folder(tmp_path, file):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(DamagedDataError, match="no name of a file beside it"):
        ShardedSafetensors(tmp_path / INDEX)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds neither"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 20, 200, -1])
def test_a_truncated_file_is_named(tmp_path, kept):
    path = tmp_path / SINGLE
    save_file({"a": numbers(), "b": numbers()}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DamagedDataError, match=SINGLE):
        open_safetensors(tmp_path)


def test_a_file_with_bytes_behind_its_end_is_named(tmp_path):
    path = tmp_path / SINGLE
    save_file({"a": numbers()}, path)
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(DamagedDataError, match="it was cut or altered"):
        open_safetensors(tmp_path)


def file_with(header: object, data: bytes = b"\0" * 8) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def entry(dtype="F32", shape=(2,), data_offsets=(0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[" * 100_000,
        b"[]",
        b"\xff\xfe",
        {"a": 3},
        {"a": {}},
        {"a": entry(dtype="F31")},
        {"a": entry(dtype=["F32"])},
        {"a": entry(shape=3)},
        {"a": entry(shape=[-2])},
        {"a": entry(shape=[2.0])},
        {"a": entry(shape=[True, 2])},
        {"a": entry(shape=[2**63])},
        {"a": entry(shape=[2**32, 2**32])},
        {"a": entry(shape=[3])},
        {"a": entry(data_offsets=[0])},
        {"a": entry(data_offsets=[0, 2**62], shape=[2**60])},
        {"a": entry(data_offsets=[8, 0])},
        {"a": entry(data_offsets=[-8, 0])},
        {"a": entry(data_offsets=[4, 12])},
        {"a": entry(), "b": entry()},
    ],
    ids=str,
)
def test_a_header_that_cannot_be_true_is_refused(tmp_path, header):
    (tmp_path / SINGLE).write_bytes(file_with(header))
    with pytest.raises(DamagedDataError, match=SINGLE):
        open_safetensors(tmp_path)


def test_a_header_longer_than_the_file_is_refused(tmp_path):
    (tmp_path / SINGLE).write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(DamagedDataError, match="promises a header"):
        open_safetensors(tmp_path)


def test_whatever_bytes_are_altered_the_file_is_refused_or_reads_within_itself(tmp_path):
    path = tmp_path / SINGLE
    save_file({"a": numbers(), "b": numbers(np.float16)}, path)
    whole, rng = path.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(300):
        altered = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            altered[rng.randrange(200)] = rng.randrange(256)
        path.write_bytes(altered)
        try:
            file = SafetensorsFile(path)
            readable = [name for name, info in file.infos.items() if info.dtype in ("float32", "float16", "bfloat16")]
            assert all(read_tensor(file, name).nbytes == file.infos[name].nbytes for name in readable)
        except DamagedDataError:
            refused += 1
    assert refused > 100

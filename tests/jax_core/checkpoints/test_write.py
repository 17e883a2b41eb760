"""Writing: what was written comes back bit for bit, in Hugging Face's layout, whole or not at all."""

from __future__ import annotations

import json
import os

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from jax_core.checkpoints import write
from jax_core.checkpoints.checkpoint import open_checkpoint
from jax_core.checkpoints.load import load_params
from jax_core.checkpoints.tokenizer_files import copied_files
from jax_core.checkpoints.write import write_checkpoint
from jax_core.models.families import read_config
from schemas.errors import UserError
from tests.jax_core.checkpoints import models


def loaded(folder, config=models.CONFIG):
    tensors = models.tensors(config)
    return tensors, load_params(open_checkpoint(models.write_folder(folder, tensors, config)))


def export(folder, params, config=models.CONFIG, **arguments):
    return write_checkpoint(folder, read_config(config), params, **{"config_json": config, **arguments})


@pytest.mark.parametrize("tied", [True, False])
def test_a_float32_model_comes_back_bit_for_bit(tmp_path, tied):
    config = {**models.CONFIG, "tie_word_embeddings": tied}
    tensors, params = loaded(tmp_path / "in", config)
    export(tmp_path / "out", params, config)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert written[name].tobytes() == tensor.tobytes()
    again = load_params(open_checkpoint(tmp_path / "out"))
    assert jax.tree.all(jax.tree.map(lambda *same: bool((same[0] == same[1]).all()), params, again))


def test_numbers_that_are_none_come_back_too(tmp_path):
    _, params = loaded(tmp_path / "in")
    odd = np.array([np.nan, np.inf, -0.0, 1e-45] * 16, np.float32)
    params["final_norm"]["scale"] = odd
    export(tmp_path / "out", params)
    assert load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"].tobytes() == odd.tobytes()


def test_above_a_size_the_model_is_sharded_with_an_index(tmp_path):
    tensors, params = loaded(tmp_path / "in")
    files = export(tmp_path / "out", params, max_shard_bytes=60_000)
    shards = [name for name in files if name.endswith(".safetensors")]
    assert shards == [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    assert len(shards) > 3
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    found = {}
    for shard in shards:
        held = load_file(tmp_path / "out" / shard)
        assert sum(tensor.nbytes for tensor in held.values()) <= 60_000
        assert {name for name, file in index["weight_map"].items() if file == shard} == held.keys()
        found |= held
    assert all(found[name].tobytes() == tensor.tobytes() for name, tensor in tensors.items())
    again = load_params(open_checkpoint(tmp_path / "out"))
    assert jax.tree.all(jax.tree.map(lambda *same: bool((same[0] == same[1]).all()), params, again))


def test_a_tensor_larger_than_a_shard_may_be_is_alone_in_one(tmp_path):
    tensors, params = loaded(tmp_path / "in")
    files = export(tmp_path / "out", params, max_shard_bytes=1)
    assert len([name for name in files if name.endswith(".safetensors")]) == len(tensors)


@pytest.mark.parametrize("dtype, code", [("bfloat16", "BF16"), ("float16", "F16")])
def test_another_type_is_what_the_tensors_and_the_config_say(tmp_path, dtype, code):
    _, params = loaded(tmp_path / "in")
    export(tmp_path / "out", params, dtype=dtype)
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {code}  # noqa: SIM118
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**models.CONFIG, "torch_dtype": dtype}


def test_without_a_config_of_its_own_the_model_gets_one_that_is_read_as_the_same_model(tmp_path):
    _, params = loaded(tmp_path / "in")
    export(tmp_path / "out", params, config_json=None)
    assert open_checkpoint(tmp_path / "out").config == read_config(models.CONFIG)


def test_generation_config_and_tokenizer_files_come_along(tmp_path):
    _, params = loaded(tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_bytes(b'{"a": "\xc3\xbc"}')
    (tmp_path / "in" / "chat_template.jinja").write_text("{{ x }}")
    (tmp_path / "in" / "notes.txt").write_text("private")
    said = {"eos_token_id": [2, 7], "temperature": 0.6}
    files = copied_files(tmp_path / "in")
    written = export(tmp_path / "out", params, generation_json=said, files=files)
    assert written == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b'{"a": "\xc3\xbc"}'
    assert open_checkpoint(tmp_path / "out").generation.stop_ids == (2, 7)


@pytest.mark.parametrize("occupant", ["file in it", "is a file"])
def test_a_folder_that_holds_something_is_left_alone(tmp_path, occupant):
    _, params = loaded(tmp_path / "in")
    out = tmp_path / "out"
    if occupant == "is a file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "mine").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        export(out, params)
    assert (out if out.is_file() else out / "mine").read_text() == "mine"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in", "out"]


def test_an_empty_folder_is_filled(tmp_path):
    _, params = loaded(tmp_path / "in")
    (tmp_path / "out").mkdir()
    assert "model.safetensors" in export(tmp_path / "out", params)


def test_what_fails_midway_leaves_nothing_behind(tmp_path, monkeypatch):
    _, params = loaded(tmp_path / "in")

    def full(file, tensors):
        file.write(b"torn")
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(write, "write_safetensors", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        export(tmp_path / "out", params)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in"]

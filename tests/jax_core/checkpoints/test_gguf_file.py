"""GGUF files, written by the gguf package; and quantized blocks, worked out number by number."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import quantize

from jax_core.checkpoints.gguf_file import GGUFFile
from schemas.errors import DamagedDataError, UserError
from tests.jax_core.checkpoints import gguf_models, models

Q = GGMLQuantizationType
WRITTEN = [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1]  # the package quantizes to these
STEPS = {Q.F32: 0, Q.F16: 2e-3, Q.BF16: 2e-2, Q.Q8_0: 0.03, Q.Q4_0: 0.55, Q.Q4_1: 0.35}  # of normal numbers, most


def one_tensor(path, data, kind):
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("x", data, raw_dtype=kind)
    return GGUFFile(gguf_models.close(writer, path))


@pytest.mark.parametrize("kind", WRITTEN, ids=lambda kind: kind.name)
def test_a_quantized_tensor_is_near_what_it_was_made_of(tmp_path, kind):
    numbers = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    file = one_tensor(tmp_path / "x.gguf", quantize(numbers, kind), kind)
    assert file.infos["x"].shape == (6, 64)
    found = file.lines("x", 0, 6)
    assert np.abs(found.astype(np.float32) - numbers).max() <= STEPS[kind]
    np.testing.assert_array_equal(file.lines("x", 2, 5), found[2:5])


def halves(*numbers: float) -> bytes:
    return np.array(numbers, "<f2").tobytes()


def test_q8_0_is_a_scale_and_32_signed_bytes(tmp_path):
    block = halves(0.5) + np.arange(-16, 16, dtype=np.int8).tobytes()
    file = one_tensor(tmp_path / "x.gguf", np.frombuffer(block, np.uint8).reshape(1, -1), Q.Q8_0)
    np.testing.assert_array_equal(file.lines("x", 0, 1)[0], np.arange(-16, 16) / 2)


def test_q4_0_is_a_scale_and_32_nibbles_of_which_8_is_zero_low_halves_first(tmp_path):
    block = halves(2.0) + bytes(low | (15 - low) << 4 for low in range(16))
    file = one_tensor(tmp_path / "x.gguf", np.frombuffer(block, np.uint8).reshape(1, -1), Q.Q4_0)
    expected = [2 * (q - 8) for q in [*range(16), *reversed(range(16))]]
    np.testing.assert_array_equal(file.lines("x", 0, 1)[0], expected)


def test_q4_1_is_a_scale_a_least_value_and_32_nibbles(tmp_path):
    block = halves(2.0, -3.0) + bytes(low | (15 - low) << 4 for low in range(16))
    file = one_tensor(tmp_path / "x.gguf", np.frombuffer(block, np.uint8).reshape(1, -1), Q.Q4_1)
    expected = [2 * q - 3 for q in [*range(16), *reversed(range(16))]]
    np.testing.assert_array_equal(file.lines("x", 0, 1)[0], expected)


def six_bits(scales: bytes, j: int) -> tuple[int, int]:
    """Scale and minimum of the j-th of the 8 parts of a Q4_K or Q5_K block, out of its 12 bytes."""
    if j < 4:
        return scales[j] & 63, scales[j + 4] & 63
    return scales[j + 4] & 15 | scales[j - 4] >> 6 << 4, scales[j + 4] >> 4 | scales[j] >> 6 << 4


def q4_k(block: bytes) -> list[float]:
    d, least = np.frombuffer(block[:4], "<f2").astype(float)
    scales, nibbles = block[4:16], block[16:]
    found = []
    for part in range(8):
        scale, minimum = six_bits(scales, part)
        for i in range(32):
            q = nibbles[part // 2 * 32 + i] >> 4 * (part % 2) & 15
            found.append(d * scale * q - least * minimum)
    return found


def q5_k(block: bytes) -> list[float]:
    d, least = np.frombuffer(block[:4], "<f2").astype(float)
    scales, high, nibbles = block[4:16], block[16:48], block[48:]
    found = []
    for part in range(8):
        scale, minimum = six_bits(scales, part)
        for i in range(32):
            q = nibbles[part // 2 * 32 + i] >> 4 * (part % 2) & 15 | (high[i] >> part & 1) << 4
            found.append(d * scale * q - least * minimum)
    return found


def q6_k(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8)
    d = float(np.frombuffer(block[208:], "<f2")[0])
    found = []
    for i in range(256):
        half, within = divmod(i, 128)
        quarter, at = divmod(within, 32)
        nibble = low[half * 64 + quarter % 2 * 32 + at] >> 4 * (quarter // 2) & 15
        two = high[half * 32 + at] >> 2 * quarter & 3
        found.append(d * float(scales[i // 16]) * ((nibble | two << 4) - 32))
    return found


@pytest.mark.parametrize("kind, worked_out", [(Q.Q4_K, q4_k), (Q.Q5_K, q5_k), (Q.Q6_K, q6_k)], ids=lambda k: str(k))
def test_k_quantizations_are_what_their_bits_say_one_by_one(tmp_path, kind, worked_out):
    size = GGML_QUANT_SIZES[kind][1]
    blocks = np.random.default_rng(1).integers(0, 256, (3, 2, size), dtype=np.uint8)
    where = slice(208, 210) if kind == Q.Q6_K else slice(0, 4)  # the float16 scales: finite ones
    blocks[..., where] = np.frombuffer(halves(0.125, -0.5)[: where.stop - where.start], np.uint8)
    file = one_tensor(tmp_path / "x.gguf", blocks.reshape(3, 2 * size), kind)
    assert file.infos["x"].shape == (3, 512) and file.infos["x"].dtype == kind.name
    expected = [[number for block in line for number in worked_out(block.tobytes())] for line in blocks]
    np.testing.assert_array_equal(file.lines("x", 0, 3), np.array(expected, np.float32))
    np.testing.assert_array_equal(file.lines("x", 1, 2), np.array(expected[1:2], np.float32))


def test_metadata_is_what_the_package_reads(tmp_path):
    path = tmp_path / "x.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_string("text", "héllo 🦙")
    writer.add_array("texts", ["a", "", "ü"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("parts", [0.5, 0.25])
    writer.add_bool("yes", True)
    writer.add_uint64("large", 2**63)
    writer.add_float64("real", 0.1)
    gguf_models.close(writer, path)
    found = GGUFFile(path).metadata
    assert found["text"] == "héllo 🦙" and found["texts"] == ["a", "", "ü"] and found["yes"] is True
    reader = GGUFReader(path)
    for name, value in found.items():
        assert reader.fields[name].contents() == value


def test_a_type_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match=r"holds x in type Q2_K\. .*Q4_K"):
        one_tensor(tmp_path / "x.gguf", np.zeros((1, GGML_QUANT_SIZES[Q.Q2_K][1]), np.uint8), Q.Q2_K)


def test_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"PK\3\4" + b"\0" * 100)
    with pytest.raises(UserError, match="is no GGUF file"):
        GGUFFile(tmp_path / "x.gguf")


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_a_version_that_cannot_be_read_is_named(tmp_path, version):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(UserError, match="is GGUF version"):
        GGUFFile(tmp_path / "x.gguf")


def header(tensors: int = 0, entries: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + rest


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(shape=(4,), kind=0, offset=0, axes=None) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return (
        text("x") + struct.pack("<I", len(shape) if axes is None else axes) + sizes + struct.pack("<IQ", kind, offset)
    )


@pytest.mark.parametrize(
    "data",
    [
        header(entries=2**64 - 1),
        header(tensors=2**64 - 1),
        header(entries=1, rest=struct.pack("<Q", 2**64 - 1)),
        header(entries=1, rest=text("k") + struct.pack("<I", 77)),
        header(entries=1, rest=text("k") + struct.pack("<IIQ", 9, 4, 2**63)),
        header(entries=1, rest=text("k") + struct.pack("<IIQ", 9, 8, 2**63)),
        header(entries=1, rest=text("k") + struct.pack("<IIQ", 9, 9, 2**63)),
        header(entries=1, rest=text("k") + struct.pack("<IIQ", 9, 9, 1) * 50),
        header(entries=1, rest=text("k") + struct.pack("<IQ", 8, 2) + b"\xff\xff"),
        header(entries=2, rest=(text("k") + struct.pack("<IB", 0, 1)) * 2),
        header(tensors=1, rest=tensor(axes=0)),
        header(tensors=1, rest=tensor(axes=2**31)),
        header(tensors=1, rest=tensor(shape=(2**62, 2**62))),
        header(tensors=1, rest=tensor(shape=(0, 4))),
        header(tensors=1, rest=tensor(offset=2**63)),
        header(tensors=1, rest=tensor(shape=(33,), kind=8) + b"\0" * 99),
        header(tensors=2, rest=tensor() * 2 + b"\0" * 99),
        header(1, 1, text("general.alignment") + struct.pack("<II", 4, 3) + tensor() + b"\0" * 99),
        header(1, 1, text("general.alignment") + struct.pack("<II", 4, 0) + tensor() + b"\0" * 99),
    ],
    ids=lambda data: str(data[24:50]),
)
def test_a_header_that_cannot_be_true_is_refused_at_once(tmp_path, data):
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(DamagedDataError, match=r"x\.gguf"):
        GGUFFile(tmp_path / "x.gguf")


def test_wherever_a_file_is_cut_it_is_named(tmp_path):
    path = gguf_models.write_gguf(tmp_path / "x.gguf", models.tensors())
    whole = path.read_bytes()
    for kept in [*range(24, 2000, 61), len(whole) // 2, len(whole) - 64]:
        path.write_bytes(whole[:kept])
        with pytest.raises(DamagedDataError, match=r"x\.gguf"):
            GGUFFile(path)


def test_whatever_bytes_are_altered_the_file_is_refused_or_reads_within_itself(tmp_path):
    path = gguf_models.write_gguf(tmp_path / "x.gguf", models.tensors(), kind=Q.Q4_1)
    whole, rng = path.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(300):
        altered = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            altered[rng.randrange(1800)] = rng.randrange(256)
        path.write_bytes(altered)
        try:
            file = GGUFFile(path)
            for name, info in file.infos.items():
                lines = int(np.prod(info.shape[:-1]))
                assert file.lines(name, 0, lines).size == np.prod(info.shape)
        except UserError:
            refused += 1
    assert refused > 100

"""Loading: the right numbers in the right leaves, every misfit by name, and no more memory than the model needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import save_file

from jax_core.checkpoints.checkpoint import open_checkpoint
from jax_core.checkpoints.load import Leaf, load_params, to_shardings
from jax_core.checkpoints.safetensors_files import SafetensorsFile
from jax_core.models.families import tensor_rules
from jax_core.models.tensor_rules import TensorRule
from schemas.errors import DamagedDataError, UserError
from tests.jax_core.checkpoints import gguf_models, models

REPOSITORY = Path(__file__).parents[3]
LAYER_1 = "model.layers.1"


def load(folder, tensors, config=models.CONFIG, **arguments):
    return load_params(open_checkpoint(models.write_folder(folder, tensors, config)), **arguments)


def leaf(params, path):
    for key in path:
        params = params[key]
    return np.asarray(params)


def assert_holds(params, tensors, config, dtype=np.float32):
    for rule in tensor_rules(config):
        expected = tensors[rule.name].astype(dtype)
        found = leaf(params, rule.path)[rule.index]
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.T if rule.transpose else found, expected)


def test_each_tensor_is_in_its_layers_place_transposed_to_in_by_out(tmp_path):
    tensors = models.tensors()
    params = load(tmp_path, tensors)
    expected = tensors["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(params["blocks"]["mlp"]["down"][1], expected.T)
    assert_holds(params, tensors, open_checkpoint(tmp_path).config)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_any_stored_type_is_loaded_as_the_type_that_was_asked_for(tmp_path, stored, dtype):
    tensors = {name: tensor.astype(stored) for name, tensor in models.tensors().items()}
    params = load(tmp_path, tensors, dtype=dtype)
    assert_holds(params, tensors, open_checkpoint(tmp_path).config, dtype)


def test_one_file_shards_and_gguf_give_the_same_parameters(tmp_path):
    tensors = models.tensors()
    single = load(tmp_path / "single", tensors)
    sharded = load_params(open_checkpoint(models.write_sharded(tmp_path / "sharded", models.halves(tensors))))
    gguf = load_params(open_checkpoint(gguf_models.write_gguf(tmp_path / "x.gguf", tensors)))
    assert jax.tree.all(jax.tree.map(lambda *same: bool((same[0] == same[1]).all()), single, sharded))
    assert jax.tree.all(jax.tree.map(lambda *same: bool((same[0] == same[1]).all()), single, gguf))


def test_a_device_reads_its_own_part_of_a_leaf(tmp_path):
    params = load(tmp_path, models.tensors(), put=lambda leaf: leaf)
    for path in [("blocks", "mlp", "up"), ("blocks", "attention", "q"), ("embedding",), ("head",)]:
        unread: Leaf = params
        for key in path:
            unread = unread[key]
        whole = unread.read()
        assert whole.shape == unread.shape
        first, *rest = (slice(size // 3, size - size // 4) for size in unread.shape)
        for index in [(first,), (slice(None), *rest), (first, *rest), (Ellipsis, rest[-1])[1:]]:
            np.testing.assert_array_equal(unread.read(index), whole[index])


def test_parameters_lie_where_their_sharding_says(tmp_path):
    sharding = SingleDeviceSharding(jax.devices()[0])
    asked = []

    def sharding_of(path, shape):
        asked.append((path, shape))
        return sharding

    plain = load(tmp_path, models.tensors())
    params = load_params(open_checkpoint(tmp_path), put=to_shardings(sharding_of))
    assert (("blocks", "mlp", "up"), (2, 64, 96)) in asked
    assert all(each.sharding == sharding for each in jax.tree.leaves(params))
    assert jax.tree.all(jax.tree.map(lambda *same: bool((same[0] == same[1]).all()), plain, params))


FOUR_DEVICES = """
import sys, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax_core.checkpoints import load_params, open_checkpoint, to_shardings
checkpoint = open_checkpoint(sys.argv[1])
mesh = Mesh(np.array(jax.devices()).reshape(4), "x")
split = lambda path, shape: NamedSharding(mesh, PartitionSpec(*[None] * (len(shape) - 1), "x"))
sharded, plain = load_params(checkpoint, put=to_shardings(split)), load_params(checkpoint)
assert sharded["blocks"]["mlp"]["up"].addressable_shards[1].data.shape == (2, 64, 24)
assert jax.tree.all(jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), sharded, plain))
print("the same")
"""


def run(script: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=REPOSITORY,
        env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_four_devices_each_hold_a_quarter_of_the_same_parameters(tmp_path):
    models.write_folder(tmp_path, models.tensors())
    flags = "--xla_force_host_platform_device_count=4"
    assert "the same" in run(FOUR_DEVICES, str(tmp_path), XLA_FLAGS=flags)


def test_a_part_of_a_fused_tensor_is_cut_out(tmp_path):
    fused = np.arange(24, dtype=np.float32).reshape(6, 4)
    save_file({"fused": fused}, tmp_path / "x.safetensors")
    source = SafetensorsFile(tmp_path / "x.safetensors")
    rows = TensorRule("fused", (6, 4), ("w",), (1,), True, (0, 2, 5))
    read = Leaf(("w",), (2, 4, 3), np.dtype(np.float32), (rows,), source).read()
    np.testing.assert_array_equal(read[1], fused[2:5].T)
    columns = TensorRule("fused", (6, 4), ("w",), (), False, (1, 1, 3))
    unread = Leaf(("w",), (6, 2), np.dtype(np.float32), (columns,), source)
    np.testing.assert_array_equal(unread.read(), fused[:, 1:3])
    np.testing.assert_array_equal(unread.read((slice(2, 4), slice(1, 2))), fused[2:4, 2:3])


def refusal(folder, tensors, config=models.CONFIG) -> str:
    with pytest.raises(UserError) as refused:
        load(folder, tensors, config)
    assert not isinstance(refused.value, DamagedDataError)
    return str(refused.value)


def test_everything_that_does_not_fit_is_named_at_once(tmp_path):
    tensors = models.tensors()
    del tensors[f"{LAYER_1}.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((96, 64), np.float32)
    tensors[f"{LAYER_1}.self_attn.q_proj.weight"] = np.zeros((64, 65), np.float32)
    text = refusal(tmp_path, tensors)
    assert "missing: model.norm.weight [64], model.layers.1.mlp.up_proj.weight [96, 64]" in text
    assert "not of this model: model.layers.2.mlp.up_proj.weight" in text
    assert "model.layers.1.self_attn.q_proj.weight is [64, 65] and should be [64, 64]" in text


def test_of_very_many_names_the_first_are_listed_and_the_others_counted(tmp_path):
    extra = {f"extra.{i}": np.zeros(1, np.float32) for i in range(50)}
    assert "extra.1," in (text := refusal(tmp_path, models.tensors() | extra)) and "and 30 more" in text


def test_a_tensor_of_a_type_that_cannot_be_read_is_named(tmp_path):
    name = "model.norm.weight"
    text = refusal(tmp_path, models.tensors() | {name: np.zeros(64, np.int64)})
    assert "of a type that cannot be read: model.norm.weight (I64)" in text


def test_tables_of_rotary_frequencies_are_passed_over(tmp_path):
    tables = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32) for i in range(2)}
    load(tmp_path, models.tensors() | tables)


def test_the_layers_that_deepseek_predicts_several_tokens_with_are_passed_over(tmp_path):
    config = {**models.CONFIG, "num_nextn_predict_layers": 1}
    load(tmp_path, models.tensors() | {"model.layers.2.eh_proj.weight": np.zeros((4, 8), np.float32)}, config)


TIED = {**models.CONFIG, "tie_word_embeddings": True}


def test_a_second_copy_of_a_tied_embedding_is_passed_over(tmp_path):
    tensors = models.tensors(TIED)
    params = load(tmp_path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, TIED)
    assert params.get("head") is None


def test_a_head_that_is_not_the_embedding_that_it_is_tied_to_is_refused(tmp_path):
    tensors = models.tensors(TIED)
    head = tensors["model.embed_tokens.weight"].copy()
    head[-1, -1] += 1
    text = refusal(tmp_path, tensors | {"lm_head.weight": head}, TIED)
    assert "lm_head.weight (differs from model.embed_tokens.weight" in text


def test_a_truncated_shard_is_named(tmp_path):
    models.write_sharded(tmp_path, models.halves(models.tensors()))
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(DamagedDataError, match=r"model-00002-of-00002\.safetensors: .*cut or altered"):
        open_checkpoint(tmp_path)


PEAK = """
import sys, jax, numpy as np
from jax_core.checkpoints import load_params, open_checkpoint
from jax_core.checkpoints.load import to_default_device

def memory(name):  # MB
    [line] = [line for line in open("/proc/self/status") if line.startswith(name)]
    return int(line.split()[1]) / 1000

jax.numpy.zeros(1).block_until_ready()
dtype = np.dtype(getattr(jax.numpy, sys.argv[2]))
checkpoint = open_checkpoint(sys.argv[1])
load_params(checkpoint, dtype, put=lambda leaf: None)  # whatever reading the shapes takes
before = memory("VmRSS")
params = jax.block_until_ready(load_params(checkpoint, dtype))
print((memory("VmHWM") - before) / (sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 1e6))
"""
LARGE = {**models.CONFIG, "vocab_size": 16_000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2}


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
@pytest.mark.parametrize("stored, dtype", [("F32", "float32"), ("F16", "bfloat16"), ("gguf", "float32")])
def test_loading_takes_at_most_a_fifth_more_memory_than_the_model(tmp_path, stored, dtype):
    """A model of 60 M parameters, 240 MB in float32; half of it embedding and head, the worst case."""
    tensors = models.tensors(LARGE)
    if stored == "gguf":
        from gguf import GGMLQuantizationType

        path = gguf_models.write_gguf(tmp_path / "x.gguf", tensors, LARGE, GGMLQuantizationType.Q8_0)
    else:
        numbers = np.float16 if stored == "F16" else np.float32
        path = models.write_folder(tmp_path, {name: tensor.astype(numbers) for name, tensor in tensors.items()}, LARGE)
    peak = float(run(PEAK, str(path), dtype))
    assert 0.9 < peak <= 1.2

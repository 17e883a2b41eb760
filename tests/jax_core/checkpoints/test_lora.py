"""LoRA adapters merged and exported: both are the same model."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jax_core.checkpoints.checkpoint import open_checkpoint
from jax_core.checkpoints.load import load_params
from jax_core.checkpoints.lora import write_adapter
from jax_core.lora import adapted_paths, merge_lora
from jax_core.models.families import read_config
from schemas.errors import UserError
from tests.jax_core.checkpoints import models

CONFIG = read_config(models.CONFIG)


def pair(rows: int, columns: int, rank: int = 3, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((2, rows, rank)), rng.standard_normal((2, rank, columns))
    return {"a": a.astype(np.float32), "b": b.astype(np.float32)}


ADAPTERS = {"blocks": {"attention": {"q": pair(64, 64)}, "mlp": {"down": pair(96, 64, seed=1)}}}


@pytest.fixture
def params(tmp_path):
    return load_params(open_checkpoint(models.write_folder(tmp_path / "in", models.tensors())))


def test_merging_adds_a_b_scaled_by_alpha_over_rank_layer_by_layer(params):
    merged = merge_lora(params, ADAPTERS, alpha=6.0)
    for layer in range(2):
        a, b = (ADAPTERS["blocks"]["attention"]["q"][name][layer] for name in ("a", "b"))
        expected = np.asarray(params["blocks"]["attention"]["q"][layer]) + 2.0 * a @ b
        np.testing.assert_allclose(merged["blocks"]["attention"]["q"][layer], expected, rtol=1e-5, atol=1e-5)


def test_merging_leaves_the_base_and_all_other_leaves_as_they_are(params):
    before = jax.tree.map(np.array, params)
    merged = merge_lora(params, ADAPTERS, alpha=6.0)
    assert jax.tree.all(jax.tree.map(lambda *same: bool((same[0] == same[1]).all()), before, params))
    assert merged["embedding"] is params["embedding"]
    assert merged["blocks"]["mlp"]["up"] is params["blocks"]["mlp"]["up"]
    assert jax.tree.structure(merged) == jax.tree.structure(params)


def test_an_adapter_whose_b_is_zero_changes_nothing(params):
    zero = jax.tree.map_with_path(lambda path, x: x * (path[-1].key == "a"), ADAPTERS)
    merged = merge_lora(params, zero, alpha=16.0)
    assert jax.tree.all(jax.tree.map(lambda *same: bool((same[0] == same[1]).all()), merged, params))


def test_a_bfloat16_weight_stays_one_and_is_summed_in_float32():
    params = {"w": jnp.full((2, 2), 256, jnp.bfloat16)}
    tiny = {"a": np.full((2, 1), 1.001, np.float32), "b": np.ones((1, 2), np.float32)}
    merged = merge_lora(params, {"w": tiny}, alpha=1.0)["w"]
    assert merged.dtype == jnp.bfloat16
    np.testing.assert_array_equal(merged.astype(np.float32), 258)  # 257.001 is; in bfloat16 1.001 is 1, and 257 256


def test_experts_are_merged_each_with_its_own_adapter():
    rng = np.random.default_rng(0)
    w, a, b = (rng.standard_normal(shape).astype(np.float32) for shape in [(2, 3, 4, 5), (2, 3, 4, 1), (2, 3, 1, 5)])
    merged = merge_lora({"w": w}, {"w": {"a": a, "b": b}}, alpha=0.5)["w"]
    np.testing.assert_allclose(merged[1, 2], w[1, 2] + 0.5 * np.outer(a[1, 2], b[1, 2]), rtol=1e-5)


def test_every_adapted_weight_is_found_with_its_path():
    assert [path for path, _ in adapted_paths(ADAPTERS)] == [("blocks", "attention", "q"), ("blocks", "mlp", "down")]


def test_the_export_has_pefts_names_and_orientation(tmp_path):
    files = write_adapter(tmp_path / "out", CONFIG, ADAPTERS, alpha=6.0, base="base/model")
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    modules = [f"model.layers.{layer}.{m}" for layer in range(2) for m in ("self_attn.q_proj", "mlp.down_proj")]
    assert found.keys() == {f"base_model.model.{m}.lora_{ab}.weight" for m in modules for ab in "AB"}
    down = ADAPTERS["blocks"]["mlp"]["down"]
    prefix = "base_model.model.model.layers.1.mlp.down_proj"
    np.testing.assert_array_equal(found[f"{prefix}.lora_A.weight"], down["a"][1].T)
    np.testing.assert_array_equal(found[f"{prefix}.lora_B.weight"], down["b"][1].T)


def test_what_peft_adds_to_a_checkpoints_weight_is_what_merging_adds(tmp_path, params):
    """PEFT's linear layer computes with W + lora_alpha / r * B @ A, W as the checkpoint stores it."""
    write_adapter(tmp_path / "out", CONFIG, ADAPTERS, alpha=6.0, base="")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    said = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    merged = merge_lora(params, ADAPTERS, alpha=6.0)
    prefix = "base_model.model.model.layers.1.mlp.down_proj"
    delta = said["lora_alpha"] / said["r"] * found[f"{prefix}.lora_B.weight"] @ found[f"{prefix}.lora_A.weight"]
    expected = models.tensors()["model.layers.1.mlp.down_proj.weight"] + delta
    np.testing.assert_allclose(merged["blocks"]["mlp"]["down"][1].T, expected, rtol=1e-5, atol=1e-5)


def test_the_configuration_says_what_peft_needs(tmp_path):
    write_adapter(tmp_path / "out", CONFIG, ADAPTERS, alpha=6.0, base="base/model")
    said = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (said["peft_type"], said["task_type"], said["r"], said["lora_alpha"]) == ("LORA", "CAUSAL_LM", 3, 6.0)
    assert said["base_model_name_or_path"] == "base/model"
    assert said["target_modules"] == ["down_proj", "q_proj"]


def test_an_adapter_of_the_embedding_is_refused_by_name(tmp_path):
    adapters = {"embedding": {"a": np.zeros((96, 2), np.float32), "b": np.zeros((2, 64), np.float32)}}
    with pytest.raises(UserError, match=r"embedding: is no linear layer of its own.*merged"):
        write_adapter(tmp_path / "out", CONFIG, adapters, alpha=1.0, base="")


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        write_adapter(tmp_path, CONFIG, ADAPTERS, alpha=1.0, base="")

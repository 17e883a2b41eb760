"""Each family's golden checkpoint through the files: read, written again, and out of a GGUF file of the same model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jax_core.checkpoints import load_params, open_checkpoint, write_checkpoint
from jax_core.checkpoints.gguf_model import llama3_divisors
from jax_core.checkpoints.load import verified_rules
from schemas.errors import UserError
from tests.jax_core.checkpoints import gguf_models, models

GOLDEN = Path(__file__).parents[1] / "golden_models"
FAMILIES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())
GGUF = {
    "llama": "llama",
    "llama3_rope_scaling_tied": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3": "gemma3",
}


def test_every_golden_family_is_here():
    assert {*GGUF, "gemma4_moe"} <= set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_each_family_is_written_as_it_was_read(tmp_path, family):
    checkpoint = open_checkpoint(GOLDEN / family)
    assert checkpoint.generation.stop_ids == (2,)
    write_checkpoint(tmp_path / "out", checkpoint.config, load_params(checkpoint))
    original, written = (load_file(folder / "model.safetensors") for folder in (GOLDEN / family, tmp_path / "out"))
    assert original.keys() == written.keys()
    assert all(original[name].tobytes() == tensor.tobytes() for name, tensor in written.items())
    assert open_checkpoint(tmp_path / "out").config == checkpoint.config


def older_spelling(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters", config)
    theta = rope["full_attention"]["rope_theta"] if "full_attention" in rope else rope["rope_theta"]
    return config | {"rope_theta": theta}


@pytest.mark.parametrize("family", GGUF)
def test_a_gguf_file_of_each_family_is_the_same_model(tmp_path, family):
    checkpoint = open_checkpoint(GOLDEN / family)
    config = older_spelling(checkpoint.config_json)
    tensors = load_file(GOLDEN / family / "model.safetensors")
    extra = {}
    if family == "llama3_rope_scaling_tied":  # 3 of its 8 waves turn less than once in 64 positions
        extra["rope_freqs.weight"] = llama3_divisors(500_000.0, 16, 8.0, 64).astype(np.float32)
    path = gguf_models.write_gguf(tmp_path / "x.gguf", tensors, config, architecture=GGUF[family], extra=extra)
    gguf = open_checkpoint(path)
    assert gguf.config == checkpoint.config
    found, expected = load_params(gguf), load_params(checkpoint)
    tolerance = 1e-6 if family == "gemma3" else 0  # 1 was added to its norms and taken off again
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(np.allclose(a, b, rtol=0, atol=tolerance)), found, expected))


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3"])
def test_whatever_bytes_of_a_gguf_header_are_altered_it_is_the_model_still_or_is_refused(tmp_path, family):
    config = older_spelling(open_checkpoint(GOLDEN / family).config_json)
    tensors = load_file(GOLDEN / family / "model.safetensors")
    path = gguf_models.write_gguf(tmp_path / "x.gguf", tensors, config, architecture=GGUF[family])
    whole, rng = path.read_bytes(), random.Random(1)
    refused = 0
    for _ in range(150):
        altered = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            altered[rng.randrange(24, 1200)] = rng.randrange(256)
        path.write_bytes(altered)
        try:
            verified_rules(open_checkpoint(path))
        except UserError:
            refused += 1
    assert 50 < refused < 150


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "num_experts", "vocab_size", "hidden_size", "num_attention_heads"]
)
def test_a_config_of_a_billion_is_refused_at_once(tmp_path, key):
    config = json.loads((GOLDEN / "qwen3_moe" / "config.json").read_text()) | {key: 10**9}
    models.write_folder(tmp_path, load_file(GOLDEN / "qwen3_moe" / "model.safetensors"), config)
    with pytest.raises(UserError):
        verified_rules(open_checkpoint(tmp_path))


MIXTRAL: dict[str, Any] = {
    **models.CONFIG,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}


def mixtral_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tensors = {name: tensor for name, tensor in models.tensors().items() if ".mlp." not in name}
    shapes = {"w1": (96, 64), "w2": (64, 96), "w3": (96, 64)}
    for layer in range(2):
        prefix = f"model.layers.{layer}.block_sparse_moe"
        tensors[f"{prefix}.gate.weight"] = rng.standard_normal((3, 64)).astype(np.float32)
        for expert in range(3):
            for name, shape in shapes.items():
                tensors[f"{prefix}.experts.{expert}.{name}.weight"] = rng.standard_normal(shape).astype(np.float32)
    return tensors


def test_mixtral_is_a_llama_with_experts_to_gguf_and_the_same_model(tmp_path):
    checkpoint = open_checkpoint(models.write_folder(tmp_path / "in", mixtral_tensors(), MIXTRAL))
    gguf = open_checkpoint(gguf_models.write_gguf(tmp_path / "x.gguf", mixtral_tensors(), MIXTRAL))
    assert gguf.config == checkpoint.config
    same = jax.tree.map(lambda a, b: bool((a == b).all()), load_params(gguf), load_params(checkpoint))
    assert jax.tree.all(same)
    write_checkpoint(tmp_path / "out", gguf.config, load_params(gguf), config_json=gguf.config_json)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(written[name].tobytes() == tensor.tobytes() for name, tensor in mixtral_tensors().items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["MixtralForCausalLM"]

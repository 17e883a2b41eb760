"""Small Llama models and the files that hold them, which the tests of checkpoints share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


def shapes(config: Mapping[str, Any] = CONFIG) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama checkpoint, spelled here independently of the product's rules."""
    d, f, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, k = (config[heads] * config["head_dim"] for heads in ("num_attention_heads", "num_key_value_heads"))
    found = {"model.embed_tokens.weight": (vocab, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocab, d)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, shape in {"q": (q, d), "k": (k, d), "v": (k, d), "o": (d, q)}.items():
            found[f"{prefix}.self_attn.{name}_proj.weight"] = shape
        for name, shape in {"gate": (f, d), "up": (f, d), "down": (d, f)}.items():
            found[f"{prefix}.mlp.{name}_proj.weight"] = shape
        found[f"{prefix}.input_layernorm.weight"] = (d,)
        found[f"{prefix}.post_attention_layernorm.weight"] = (d,)
    return found


def tensors(config: Mapping[str, Any] = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes(config).items()}


def write_folder(folder: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any] = CONFIG) -> Path:
    """A checkpoint as the safetensors package writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_sharded(folder: Path, parts: Mapping[str, Mapping[str, np.ndarray]]) -> Path:
    """The same, of several files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for file, part in parts.items():
        save_file(dict(part), folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def halves(tensors: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    names = sorted(tensors)
    middle = len(names) // 2
    return {
        "model-00001-of-00002.safetensors": {name: tensors[name] for name in names[:middle]},
        "model-00002-of-00002.safetensors": {name: tensors[name] for name in names[middle:]},
    }

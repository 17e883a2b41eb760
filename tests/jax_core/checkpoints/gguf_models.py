"""Hugging Face models as llama.cpp's conversion writes them: its names (of the gguf package), permutations and sums."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize

from tests.jax_core.checkpoints import models

ARCHITECTURES = {name: architecture for architecture, name in MODEL_ARCH_NAMES.items()}


def permuted(tensor: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q's and k's rows: row 2 i + j of a head is row i + j * h / 2 of Hugging Face's."""
    height = len(tensor) // heads
    order = [head * height + i + j * height // 2 for head in range(heads) for i in range(height // 2) for j in (0, 1)]
    return tensor[order]


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, Any] = models.CONFIG,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str = "llama",
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Vectors in float32, everything else in `kind`. `extra` tensors under their own names."""
    writer = writer_of(path, config, architecture)
    names = get_tensor_name_map(ARCHITECTURES.get(architecture, MODEL_ARCH.LLAMA), config["num_hidden_layers"])
    for name, tensor in experts_together(tensors).items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        if architecture == "llama" and ".q_proj" in name:
            tensor = permuted(tensor, config["num_attention_heads"])
        if architecture == "llama" and ".k_proj" in name:
            tensor = permuted(tensor, config["num_key_value_heads"])
        if architecture.startswith("gemma") and "norm" in name:
            tensor = tensor + 1
        if tensor.ndim == 1:
            writer.add_tensor(theirs, tensor)
        else:
            writer.add_tensor(theirs, quantize(tensor, kind), raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    return close(writer, path)


def experts_together(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With each layer's experts in one tensor."""
    together: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():  # in order of the experts, if there are fewer than ten
        together.setdefault(re.sub(r"experts\.\d", "experts", name), []).append(tensor)
    return {name: np.stack(parts) if len(parts) > 1 else parts[0] for name, parts in together.items()}


def writer_of(path: Path, config: Mapping[str, Any], architecture: str) -> GGUFWriter:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("sliding_window") and "layer_types" in config:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    return writer


def close(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

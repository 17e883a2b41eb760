"""The small models of `models` as llama.cpp's conversion writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from tests.jax_core.checkpoints import models

LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    if module in OUTER_NAMES:
        return f"{OUTER_NAMES[module]}.{kind}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest]}.{kind}"


def permuted(tensor: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q's and k's rows: row 2 i + j of a head is row i + j * h / 2 of Hugging Face's."""
    height = len(tensor) // heads
    order = [head * height + i + j * height // 2 for head in range(heads) for i in range(height // 2) for j in (0, 1)]
    return tensor[order]


def write_llama(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, Any] = models.CONFIG,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str = "llama",
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Norms in float32, everything else in `kind`."""
    writer = writer_of(path, config, architecture)
    for name, tensor in tensors.items():
        if architecture == "llama" and ".q_proj" in name:
            tensor = permuted(tensor, config["num_attention_heads"])
        if architecture == "llama" and ".k_proj" in name:
            tensor = permuted(tensor, config["num_key_value_heads"])
        if tensor.ndim == 1:
            writer.add_tensor(gguf_name(name), tensor)
        else:
            writer.add_tensor(gguf_name(name), quantize(tensor, kind), raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    return close(writer, path)


def writer_of(path: Path, config: Mapping[str, Any], architecture: str) -> GGUFWriter:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    return writer


def close(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

"""What a GGUF file holds, told as Hugging Face tells it: config.json from the metadata, and tensors by their names.

llama.cpp stores three things otherwise than Hugging Face, and each is undone here:

* In the llama architecture (Llama, Mistral, Mixtral, SmolLM), rows of q and k are permuted so that channels which turn
  together lie side by side. Qwen and Gemma files are not permuted.
* Gemma's norm weights have 1 added.
* The experts of a layer are one tensor; here they are many, as in Hugging Face's checkpoints.

Left out on purpose: architectures other than `ARCHITECTURES`, refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jax_core.checkpoints.gguf_file import GGUFFile
from jax_core.checkpoints.tensor_source import TensorInfo, damaged
from schemas.errors import UserError

ARCHITECTURES = {  # GGUF's name: Hugging Face's class, model_type
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
_GEMMA = ("gemma2", "gemma3")

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}


class Metadata:
    """A file's metadata, of which some keys begin with the architecture's name."""

    def __init__(self, values: Mapping[str, Any], path: Path):
        self.values = values
        self.path = path
        self.architecture = str(values.get("general.architecture", ""))
        if self.architecture not in ARCHITECTURES:
            reason = f"holds a model of architecture {self.architecture!r}."
            raise UserError(str(path), reason, f"Those that can be read are {', '.join(ARCHITECTURES)}.")

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: float | None = None) -> Any:
        """A number that must be there if there is no default."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            reason = f"has {self.architecture}.{key} {value!r} where a number is needed."
            raise damaged(self.path, reason)
        return value

    def positive(self, key: str, default: float) -> float:
        value = self.number(key, default)
        if not value:
            raise damaged(self.path, f"has {self.architecture}.{key} 0.")
        return _float32(value)

    def whole(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))


def config_of(file: GGUFFile, path: Path) -> dict[str, Any]:
    """The config.json of the same model.

    Raises:
      UserError: an architecture or a switch that cannot be told.
      DamagedDataError: an entry that every such file has is missing or no number.
    """
    metadata = Metadata(file.metadata, path)
    if "token_embd.weight" not in file.infos:
        raise damaged(path, "holds no token_embd.weight.")
    architecture, model_type = ARCHITECTURES[metadata.architecture]
    if metadata.architecture == "llama" and metadata.whole("expert_count", 0):
        architecture, model_type = "MixtralForCausalLM", "mixtral"
    heads = metadata.whole("attention.head_count")
    width = metadata.whole("embedding_length")
    if not heads:
        raise damaged(path, "has an attention.head_count of 0.")
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": file.infos["token_embd.weight"].shape[0],
        "hidden_size": width,
        "num_hidden_layers": metadata.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.whole("attention.head_count_kv", heads),
        "head_dim": metadata.whole("attention.key_length", width // heads),
        "intermediate_size": metadata.whole("feed_forward_length", 0),
        "max_position_embeddings": metadata.whole("context_length", 2048),
        "rms_norm_eps": _float32(metadata.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": metadata.positive("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in file.infos,
        "torch_dtype": "float32",
    }
    config |= _switches(metadata, file)
    config |= _scaling(metadata, file)
    config |= {f"{name}_token_id": file.metadata[key] for name, key in _TOKEN_IDS.items() if key in file.metadata}
    return config


_TOKEN_IDS = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
}


def _float32(value: float) -> float:
    """The shortest decimal number that is this float32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _switches(metadata: Metadata, file: GGUFFile) -> dict[str, Any]:
    """What only some families have."""
    window = metadata.whole("attention.sliding_window", 0)
    match metadata.architecture:
        case "llama" if metadata.whole("expert_count", 0):
            return {
                "hidden_act": "silu",
                "num_local_experts": metadata.whole("expert_count"),
                "num_experts_per_tok": metadata.whole("expert_used_count"),
                "sliding_window": window or None,
            }
        case "llama":
            bias = "blk.0.attn_q.bias" in file.infos
            return {"hidden_act": "silu", "attention_bias": bias, "mlp_bias": "blk.0.ffn_up.bias" in file.infos}
        case "qwen2" | "qwen3":
            return {"hidden_act": "silu", "use_sliding_window": False}
        case "qwen3moe":
            return {
                "hidden_act": "silu",
                "use_sliding_window": False,
                "num_experts": metadata.whole("expert_count"),
                "num_experts_per_tok": metadata.whole("expert_used_count"),
                "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
                "norm_topk_prob": True,  # llama.cpp runs this architecture so
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        case "gemma2":
            return _gemma(metadata, window) | {
                "layer_types": _layer_types(metadata, every=2),
                "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
                "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
            }
        case _:
            return _gemma(metadata, window) | {
                "layer_types": _layer_types(metadata, every=6),
                "rope_local_base_freq": metadata.positive("rope.freq_base_swa", 10_000.0),
            }


def _gemma(metadata: Metadata, window: int) -> dict[str, Any]:
    """Gemma's scale of queries is that of the head's width, except in the two models of 27 B, where llama.cpp knows it
    from the number of layers and so does this."""
    heads, width = metadata.whole("attention.head_count"), metadata.whole("embedding_length")
    of_27b = {"gemma2": 46, "gemma3": 62}[metadata.architecture] == metadata.whole("block_count")
    scale = width // heads if of_27b else metadata.whole("attention.key_length", width // heads)
    return {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": window, "query_pre_attn_scalar": scale}


def _layer_types(metadata: Metadata, every: int) -> list[str]:
    """Each `every`-th layer attends to everything, the others to a window; unless the file says which."""
    layers, pattern = metadata.whole("block_count"), metadata.get("attention.sliding_window_pattern", every)
    if isinstance(pattern, int) and pattern > 0:
        pattern = [(layer + 1) % pattern != 0 for layer in range(layers)]
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise damaged(metadata.path, f"has attention.sliding_window_pattern {pattern!r} for {layers} layers.")
    return ["sliding_attention" if windowed else "full_attention" for windowed in pattern]


def _scaling(metadata: Metadata, file: GGUFFile) -> dict[str, Any]:
    """The `rope_scaling` entry, if the file has one."""
    if "rope_freqs.weight" in file.infos:
        return _llama3_scaling(metadata, file)
    kind = metadata.get("rope.scaling.type", "none")
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": metadata.positive("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata.whole("rope.scaling.original_context_length")
    elif kind != "linear":
        raise UserError(str(metadata.path), f"scales RoPE by {kind!r}.", "Scalings that can be read: linear, yarn.")
    return {"rope_scaling": scaling}


def _llama3_scaling(metadata: Metadata, file: GGUFFile) -> dict[str, Any]:
    """Llama 3's scaling, of which GGUF keeps only what each frequency is divided by.

    The factor is the largest of these, the low and the high frequency are those of every published Llama 3 model, and
    the original context is the power of two whose divisors are the file's.
    """
    found = file.lines("rope_freqs.weight", 0, 1)[0].astype(np.float32)
    theta, factor = metadata.positive("rope.freq_base", 10_000.0), _float32(float(found.max(initial=1.0)))
    for context in (2**13, *(2**n for n in range(5, 21))):
        if np.allclose(found, llama3_divisors(theta, 2 * len(found), factor, context), rtol=1e-4):
            scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            return {"rope_scaling": scaling | {"original_max_position_embeddings": context}}
    reason = "divides its RoPE frequencies (rope_freqs.weight) otherwise than Llama 3 does."
    raise UserError(str(metadata.path), reason, "Use the model's safetensors files.")


def llama3_divisors(theta: float, head_width: int, factor: float, context: int) -> np.ndarray:
    """What Llama 3's scaling divides each of the h/2 frequencies by: from 1 for waves that turn 4 times within the
    original context to `factor` for those that do not turn once."""
    turns = context * theta ** (-np.arange(0, head_width, 2) / head_width) / (2 * math.pi)
    smooth = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    return 1.0 / (smooth + (1.0 - smooth) / factor)


@dataclass(frozen=True)
class _Stored:
    """Where a Hugging Face tensor lies in the file, and what is undone when it is read."""

    name: str
    expert: int | None = None
    heads: int = 0  # rows of so many heads are permuted
    added: float = 0.0  # to every number


class GGUFTensors:
    """The tensors of a GGUF model under their Hugging Face names. See `TensorSource`."""

    def __init__(self, file: GGUFFile, config: Mapping[str, Any], path: Path):
        self._file = file
        self._stored = dict(_stored(file, config, Metadata(file.metadata, path)))
        self.infos: Mapping[str, TensorInfo] = {name: self._info(stored) for name, stored in self._stored.items()}

    def _info(self, stored: _Stored) -> TensorInfo:
        info = self._file.infos[stored.name]
        if stored.heads and info.shape[0] % (2 * stored.heads):
            raise damaged(info.file, f"holds {stored.name} of {info.shape[0]} rows for {stored.heads} heads.")
        if stored.expert is None:
            return info
        return replace(info, shape=info.shape[1:], nbytes=info.nbytes // info.shape[0])

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        stored = self._stored[name]
        rows = self._permuted_rows(stored, start, stop) if stored.heads else self._plain_rows(stored, start, stop)
        return rows - np.float32(stored.added) if stored.added else rows

    def _plain_rows(self, stored: _Stored, start: int, stop: int) -> np.ndarray:
        shape = self._file.infos[stored.name].shape
        if len(shape) == 1:
            return self._file.lines(stored.name, 0, 1)[0, start:stop]
        if stored.expert is not None:  # [experts, out, in]: its own lines are its rows
            before = stored.expert * shape[1]
            return self._file.lines(stored.name, before + start, before + stop)
        inner = math.prod(shape[1:-1])
        return self._file.lines(stored.name, start * inner, stop * inner).reshape(stop - start, *shape[1:])

    def _permuted_rows(self, stored: _Stored, start: int, stop: int) -> np.ndarray:
        """Of all the heads that the rows belong to."""
        height = self._file.infos[stored.name].shape[0] // stored.heads
        first, last = start // height, -(-stop // height)
        heads = unpermuted(self._plain_rows(stored, first * height, last * height), last - first)
        return heads[start - first * height : stop - first * height]

    def release(self, name: str) -> None:
        self._file.release(self._stored[name].name)


def unpermuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows in Hugging Face's order of those in llama.cpp's: of each head, the even ones and then the odd ones."""
    halves = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _stored(file: GGUFFile, config: Mapping[str, Any], metadata: Metadata) -> Iterator[tuple[str, _Stored]]:
    layer_names = dict(_LAYER)
    if metadata.architecture in _GEMMA:
        layer_names |= _GEMMA_NORMS
    layer_names |= _MIXTRAL if config["model_type"] == "mixtral" else _QWEN_EXPERTS
    permuted = {}
    if metadata.architecture == "llama":
        permuted = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, info in file.infos.items():
        if name == "rope_freqs.weight":  # told as rope_scaling
            continue
        part, _, kind = name.rpartition(".")
        layer = ""
        if part.startswith("blk.") and part.count(".") >= 2:
            _, layer, part = part.split(".", 2)
        ours = layer_names.get(part) if layer else _OUTER.get(part)
        if ours is None:  # unknown: keeps its name, so that loading lists it as one too many
            yield name, _Stored(name)
            continue
        prefix = f"model.layers.{layer}." if layer else ""
        if "{}" in ours:
            if len(info.shape) != 3:
                raise damaged(info.file, f"holds the experts of {name} in shape {info.shape}.")
            for expert in range(info.shape[0]):
                yield f"{prefix}{ours.format(expert)}.{kind}", _Stored(name, expert=expert)
        else:
            is_norm = part.endswith("norm") and metadata.architecture in _GEMMA
            yield f"{prefix}{ours}.{kind}", _Stored(name, heads=permuted.get(part, 0), added=1.0 if is_norm else 0.0)

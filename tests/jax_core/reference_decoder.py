"""Decoders written again, to check ours where there is no golden checkpoint: NumPy, float64, one token at a time.

Nothing here is taken from the product: it reads a config.json's own keys and a checkpoint's own tensors, loops over
tokens, heads and experts, and follows the families' papers and the semantics of transformers. It shares no trick with
the product (latent attention is not absorbed, experts are not grouped, nothing is stacked or cached).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Config = Mapping[str, Any]


def reference_logits(c: Config, tensors: Mapping[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Logits float64 [T, V] of one sequence."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    x = w["model.embed_tokens.weight"][ids]
    if _is_gemma(c):
        x = x * math.sqrt(c["hidden_size"])
    for layer in range(c["num_hidden_layers"]):
        x = _block(c, _Under(w, f"model.layers.{layer}."), layer, x)
    x = _norm(c, x, w["model.norm.weight"])
    logits = x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T
    return _capped(logits, c.get("final_logit_softcapping"))


class _Under:
    """Tensors below a prefix; a bias that does not exist is 0."""

    def __init__(self, tensors: Mapping[str, np.ndarray], prefix: str):
        self.tensors, self.prefix = tensors, prefix

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[self.prefix + name]

    def has(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        bias = self[f"{name}.bias"] if self.has(f"{name}.bias") else 0.0
        return x @ self[f"{name}.weight"].T + bias


def _is_gemma(c: Config) -> bool:
    return c["model_type"].startswith("gemma")


def _norm(c: Config, x: np.ndarray, weight: np.ndarray | float, epsilon: float | None = None) -> np.ndarray:
    epsilon = c["rms_norm_eps"] if epsilon is None else epsilon
    offset = 1.0 if c["model_type"] in ("gemma2", "gemma3_text") else 0.0
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * (offset + weight)


def _capped(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else cap * np.tanh(x / cap)


def _block(c: Config, w: _Under, layer: int, x: np.ndarray) -> np.ndarray:
    attention = _latent_attention if c["model_type"] == "deepseek_v3" else _attention
    added = attention(c, w, layer, _norm(c, x, w["input_layernorm.weight"]))
    if not _is_gemma(c):
        x = x + added
        return x + np.stack([_feed_forward(c, w, t) for t in _norm(c, x, w["post_attention_layernorm.weight"])])
    x = x + _norm(c, added, w["post_attention_layernorm.weight"])
    added = _gated(c, w, "mlp", _norm(c, x, w["pre_feedforward_layernorm.weight"]))
    x = x + _norm(c, added, w["post_feedforward_layernorm.weight"])
    return x * w["layer_scalar"] if w.has("layer_scalar") else x


def _feed_forward(c: Config, w: _Under, x: np.ndarray) -> np.ndarray:
    """x [D] of one token."""
    if w.has("mlp.gate_proj.weight"):
        return _gated(c, w, "mlp", x)
    if c["model_type"] == "mixtral":
        scores = _softmax(w["block_sparse_moe.gate.weight"] @ x)
        chosen = np.argsort(-scores)[: c["num_experts_per_tok"]]
        weights = scores[chosen] / scores[chosen].sum()
        expert = lambda e: f"block_sparse_moe.experts.{e}"
        return sum(p * _gated(c, w, expert(e), x, "w1", "w3", "w2") for e, p in zip(chosen, weights, strict=True))
    if c["model_type"] == "qwen3_moe":
        scores = _softmax(w["mlp.gate.weight"] @ x)
        chosen = np.argsort(-scores)[: c["num_experts_per_tok"]]
        weights = scores[chosen] / (scores[chosen].sum() if c["norm_topk_prob"] else 1.0)
        return sum(p * _gated(c, w, f"mlp.experts.{e}", x) for e, p in zip(chosen, weights, strict=True))
    return _deepseek_experts(c, w, x)


def _deepseek_experts(c: Config, w: _Under, x: np.ndarray) -> np.ndarray:
    scores = 1 / (1 + np.exp(-(w["mlp.gate.weight"] @ x)))
    choice = scores + w["mlp.gate.e_score_correction_bias"]
    size = c["n_routed_experts"] // c["n_group"]
    by_group = [sorted(choice[g * size : (g + 1) * size])[-2:] for g in range(c["n_group"])]
    groups = np.argsort([-sum(best) for best in by_group])[: c["topk_group"]]
    allowed = [e for e in range(c["n_routed_experts"]) if e // size in groups]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: c["num_experts_per_tok"]]
    total = scores[chosen].sum() if c["norm_topk_prob"] else 1.0
    routed = sum(scores[e] / total * _gated(c, w, f"mlp.experts.{e}", x) for e in chosen)
    return routed * c["routed_scaling_factor"] + _gated(c, w, "mlp.shared_experts", x)


def _gated(c, w: _Under, name: str, x: np.ndarray, gate="gate_proj", up="up_proj", down="down_proj") -> np.ndarray:
    activation = _gelu_tanh if _is_gemma(c) else lambda a: a / (1 + np.exp(-a))
    return w.linear(f"{name}.{down}", activation(w.linear(f"{name}.{gate}", x)) * w.linear(f"{name}.{up}", x))


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def _is_sliding(c: Config, layer: int) -> bool:
    if "layer_types" in c:
        return c["layer_types"][layer] == "sliding_attention"
    match c["model_type"]:
        case "gemma2":
            return layer % 2 == 0
        case "gemma3_text":
            return (layer + 1) % c["sliding_window_pattern"] != 0
        case "mixtral":
            return c.get("sliding_window") is not None
    return c.get("use_sliding_window", False) and layer >= c["max_window_layers"]


def _attention(c: Config, w: _Under, layer: int, x: np.ndarray) -> np.ndarray:
    """x [T, D] -> [T, D]."""
    sliding, gemma4 = _is_sliding(c, layer), c["model_type"] == "gemma4_text"
    head_dim, kv_heads = c["head_dim"], c["num_key_value_heads"]
    shared = gemma4 and not sliding and c["attention_k_eq_v"]
    if gemma4 and not sliding:
        head_dim = c["global_head_dim"]
        kv_heads = c["num_global_key_value_heads"] if shared else kv_heads
    heads, length = c["num_attention_heads"], len(x)
    q = w.linear("self_attn.q_proj", x).reshape(length, heads, head_dim)
    k = w.linear("self_attn.k_proj", x).reshape(length, kv_heads, head_dim)
    v = k if shared else w.linear("self_attn.v_proj", x).reshape(length, kv_heads, head_dim)
    if w.has("self_attn.q_norm.weight"):
        q, k = _norm(c, q, w["self_attn.q_norm.weight"]), _norm(c, k, w["self_attn.k_norm.weight"])
    if gemma4:
        v = _norm(c, v, 1.0)
    q, k = (_turn(c, part, sliding) for part in (q, k))
    scale = 1.0 if gemma4 else c.get("query_pre_attn_scalar", head_dim) ** -0.5
    window = c["sliding_window"] if sliding else None
    return w.linear("self_attn.o_proj", _mixed(q, k, v, scale, window, c.get("attn_logit_softcapping")))


def _mixed(q, k, v, scale: float, window: int | None = None, cap: float | None = None) -> np.ndarray:
    """[T, H * h] of q [T, H, h], k and v [T, K, h]."""
    length, heads, _ = q.shape
    out = np.zeros((length, heads, v.shape[-1]))
    for t in range(length):
        first = 0 if window is None else max(0, t - window + 1)
        for h in range(heads):
            g = h // (heads // k.shape[1])
            out[t, h] = _softmax(_capped(k[first : t + 1, g] @ q[t, h] * scale, cap)) @ v[first : t + 1, g]
    return out.reshape(length, -1)


def _latent_attention(c: Config, w: _Under, layer: int, x: np.ndarray) -> np.ndarray:
    length, heads = len(x), c["num_attention_heads"]
    nope, turning, rank = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
    if c["q_lora_rank"] is None:
        q = w.linear("self_attn.q_proj", x)
    else:
        down = w.linear("self_attn.q_a_proj", x)
        q = w.linear("self_attn.q_b_proj", _norm(c, down, w["self_attn.q_a_layernorm.weight"], 1e-6))
    q = q.reshape(length, heads, nope + turning)
    down = w.linear("self_attn.kv_a_proj_with_mqa", x)
    latent = _norm(c, down[:, :rank], w["self_attn.kv_a_layernorm.weight"], 1e-6)
    kv = w.linear("self_attn.kv_b_proj", latent).reshape(length, heads, nope + c["v_head_dim"])
    k_turning = np.repeat(_turn(c, down[:, None, rank:], False, interleaved=True), heads, axis=1)
    q = np.concatenate([q[..., :nope], _turn(c, q[..., nope:], False, interleaved=True)], axis=-1)
    k = np.concatenate([kv[..., :nope], k_turning], axis=-1)
    scale = (nope + turning) ** -0.5
    scaling = c.get("rope_scaling") or {}
    if scaling.get("mscale_all_dim"):
        scale *= (0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1) ** 2
    return w.linear("self_attn.o_proj", _mixed(q, k, kv[..., nope:], scale))


def _turn(c: Config, x: np.ndarray, sliding: bool, interleaved: bool = False) -> np.ndarray:
    """RoPE of x [T, n, h] as complex numbers; channel i is paired with i + h/2, or 2i with 2i + 1."""
    speeds, factor = _speeds(c, x.shape[-1], sliding)
    turns = factor * np.exp(1j * np.arange(len(x))[:, None] * np.array(speeds))[:, None]
    rotated = 2 * len(speeds)
    low, high = (x[..., 0:rotated:2], x[..., 1:rotated:2]) if interleaved else np.split(x[..., :rotated], 2, axis=-1)
    turned = (low + 1j * high) * turns
    out = x.copy()
    if interleaved:
        out[..., 0:rotated:2], out[..., 1:rotated:2] = turned.real, turned.imag
    else:
        out[..., : rotated // 2], out[..., rotated // 2 : rotated] = turned.real, turned.imag
    return out


def _speeds(c: Config, width: int, sliding: bool) -> tuple[list[float], float]:
    """Radians a position of each pair of channels, and the factor of YaRN."""
    if c["model_type"] == "gemma4_text":
        if sliding:
            return [1e4 ** (-2 * i / width) for i in range(width // 2)], 1.0
        turning = int(0.25 * width) // 2
        return [1e6 ** (-2 * i / width) if i < turning else 0.0 for i in range(width // 2)], 1.0
    local = sliding and c["model_type"] == "gemma3_text"
    theta = c["rope_local_base_freq"] if local else c["rope_theta"]
    rotated = int(width * c.get("partial_rotary_factor", 1.0))
    plain = [theta ** (-2 * i / rotated) for i in range(rotated // 2)]
    scaling = None if local else c.get("rope_scaling")
    if scaling is None:
        return plain, 1.0
    if scaling["rope_type"] == "linear":
        return [speed / scaling["factor"] for speed in plain], 1.0
    assert scaling["rope_type"] == "yarn"
    return _yarn(scaling, plain, theta, rotated)


def _yarn(scaling: Config, plain: list[float], theta: float, width: int) -> tuple[list[float], float]:
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    bound = lambda turns: width * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))
    low = max(math.floor(bound(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(bound(scaling.get("beta_slow", 1))), width - 1)
    speeds = []
    for i, speed in enumerate(plain):
        slowed = min(1.0, max(0.0, (i - low) / ((high - low) or 0.001)))
        speeds.append(slowed * speed / factor + (1 - slowed) * speed)
    temperature = lambda scale: 0.1 * scale * math.log(factor) + 1
    if "attention_factor" in scaling:
        return speeds, scaling["attention_factor"]
    if "mscale" in scaling:
        return speeds, temperature(scaling["mscale"]) / temperature(scaling["mscale_all_dim"])
    return speeds, temperature(1.0)

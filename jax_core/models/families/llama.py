"""Llama and those that differ from it in a switch or two: Qwen 2, Qwen 3, Qwen 3 MoE, Mixtral."""

from __future__ import annotations

from typing import Any

from jax_core.models.config import AttentionConfig, BlockConfig, ExpertsConfig, MlpConfig, ModelConfig, Rope
from jax_core.models.families.family import Family
from jax_core.models.families.fields import ACTIVATION_NAMES, Fields, require, rope_fields
from jax_core.models.tensor_rules import Names

DENSE_NAMES: Names = {
    "attention_norm.scale": "input_layernorm.weight",
    "attention.q": "self_attn.q_proj.weight",
    "attention.k": "self_attn.k_proj.weight",
    "attention.v": "self_attn.v_proj.weight",
    "attention.out": "self_attn.o_proj.weight",
    "attention.q_bias": "self_attn.q_proj.bias",
    "attention.k_bias": "self_attn.k_proj.bias",
    "attention.v_bias": "self_attn.v_proj.bias",
    "attention.out_bias": "self_attn.o_proj.bias",
    "attention.q_norm.scale": "self_attn.q_norm.weight",
    "attention.k_norm.scale": "self_attn.k_norm.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
    "mlp.gate": "mlp.gate_proj.weight",
    "mlp.up": "mlp.up_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
    "mlp.gate_bias": "mlp.gate_proj.bias",
    "mlp.up_bias": "mlp.up_proj.bias",
    "mlp.down_bias": "mlp.down_proj.bias",
}
QWEN_MOE_NAMES: Names = {
    **DENSE_NAMES,
    "experts.router": "mlp.gate.weight",
    "experts.gate": "mlp.experts.{expert}.gate_proj.weight",
    "experts.up": "mlp.experts.{expert}.up_proj.weight",
    "experts.down": "mlp.experts.{expert}.down_proj.weight",
}
MIXTRAL_NAMES: Names = {
    **DENSE_NAMES,
    "experts.router": "block_sparse_moe.gate.weight",
    "experts.gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "experts.up": "block_sparse_moe.experts.{expert}.w3.weight",
    "experts.down": "block_sparse_moe.experts.{expert}.w2.weight",
}


def read_llama(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    attention = grouped_query(fields, fields.rope(), qkv_bias=bias, out_bias=bias)
    return model_of(fields, "llama", [BlockConfig(attention, dense_mlp(fields))] * layers_of(fields))


def read_qwen2(fields: Fields) -> ModelConfig:
    of_window = lambda window: grouped_query(fields, fields.rope(), qkv_bias=True, window=window)
    mlp = dense_mlp(fields)
    return model_of(fields, "qwen2", [BlockConfig(of_window(window), mlp) for window in qwen_windows(fields)])


def read_qwen3(fields: Fields) -> ModelConfig:
    mlp = dense_mlp(fields)
    return model_of(
        fields, "qwen3", [BlockConfig(_qwen3_attention(fields, window), mlp) for window in qwen_windows(fields)]
    )


def read_qwen3_moe(fields: Fields) -> ModelConfig:
    layers = layers_of(fields)
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window", False) else None
    windowed = fields.windowed_layers(layers, [window is not None] * layers)
    experts = ExpertsConfig(
        experts=fields.integer("num_experts", 128),
        per_token=fields.integer("num_experts_per_tok", 8),
        width=fields.integer("moe_intermediate_size", 768),
        activation=fields.activation("hidden_act", default="silu"),
        normalize=fields.flag("norm_topk_prob", False),
    )
    dense_layers = fields.values.get("mlp_only_layers") or []
    sparse_step = fields.integer("decoder_sparse_step", 1)
    blocks = []
    for layer, has_window in enumerate(windowed):
        attention = _qwen3_attention(fields, _window(window, has_window))
        is_sparse = experts.experts > 0 and layer not in dense_layers and (layer + 1) % sparse_step == 0
        blocks.append(BlockConfig(attention, experts=experts) if is_sparse else BlockConfig(attention, dense_mlp(fields)))
    return model_of(fields, "qwen3_moe", blocks)


def read_mixtral(fields: Fields) -> ModelConfig:
    fields.refuse("router_jitter_noise", 0, why="would make the router random, which is not supported.")
    attention = grouped_query(fields, fields.rope(1e6), window=fields.optional_integer("sliding_window"))
    experts = ExpertsConfig(
        experts=fields.integer("num_local_experts", 8),
        per_token=fields.integer("num_experts_per_tok", 2),
        width=fields.integer("intermediate_size"),
        activation=fields.activation("hidden_act", default="silu"),
    )
    return model_of(fields, "mixtral", [BlockConfig(attention, experts=experts)] * layers_of(fields))


def _qwen3_attention(fields: Fields, window: int | None) -> AttentionConfig:
    bias = fields.flag("attention_bias", False)
    width = fields.integer("head_dim", 128)
    return grouped_query(
        fields, fields.rope(), head_width=width, qkv_bias=bias, out_bias=bias, qk_norm=True, window=window
    )


def qwen_windows(fields: Fields) -> list[int | None]:
    """Each layer's window: of those `layer_types` names, or from `max_window_layers` on."""
    layers = layers_of(fields)
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window", False) else None
    first = fields.integer("max_window_layers", 28)
    windowed = fields.windowed_layers(layers, [window is not None and layer >= first for layer in range(layers)])
    return [_window(window, has_window) for has_window in windowed]


def _window(window: int | None, has_window: bool) -> int | None:
    require(not has_window or window is not None, "layer_types", "has sliding layers, but sliding_window is off.")
    return window if has_window else None


def layers_of(fields: Fields) -> int:
    return fields.integer("num_hidden_layers")


def dense_mlp(fields: Fields) -> MlpConfig:
    return MlpConfig(
        fields.integer("intermediate_size"),
        fields.activation("hidden_act", default="silu"),
        fields.flag("mlp_bias", False),
    )


def grouped_query(
    fields: Fields, rope: Rope, *, head_width: int | None = None, scale: float | None = None, **switches: Any
) -> AttentionConfig:
    """Attention in the usual fields; a head is as wide as they say, or the model's width over its heads."""
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    width = head_width or fields.integer("head_dim", fields.integer("hidden_size") // heads)
    return checked(AttentionConfig(heads, kv_heads, width, rope, scale or width**-0.5, **switches))


def checked(attention: AttentionConfig) -> AttentionConfig:
    shape = f"num_attention_heads = {attention.heads}, num_key_value_heads = {attention.kv_heads}"
    require(attention.kv_heads > 0 and attention.heads % attention.kv_heads == 0, shape, "do not divide.")
    require(attention.head_width % 2 == 0, f"head_dim = {attention.head_width}", "is odd: RoPE turns pairs of channels.")
    return attention


def model_of(fields: Fields, family: str, blocks: list[BlockConfig], **more: Any) -> ModelConfig:
    for experts in {block.experts for block in blocks if block.experts}:
        chosen = f"{experts.per_token} experts a token of {experts.experts}"
        require(0 < experts.per_token <= experts.experts, chosen, "cannot be chosen.")
    tied = more.pop("tied_head", False)
    return ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        width=fields.integer("hidden_size"),
        blocks=tuple(blocks),
        norm_epsilon=fields.real("rms_norm_eps", 1e-6),
        tied_head=fields.flag("tie_word_embeddings", tied),
        positions=fields.integer("max_position_embeddings", 2048),
        family=family,
        parameters_dtype=fields.dtype(),
        **more,
    )


def write_llama(config: ModelConfig) -> dict[str, Any]:
    block = config.blocks[0]
    assert block.mlp is not None
    fields = attention_fields(block.attention) | mlp_fields(block.mlp) | rope_fields(block.attention.rope)
    return fields | {"attention_bias": block.attention.qkv_bias, "mlp_bias": block.mlp.bias}


def write_qwen(config: ModelConfig) -> dict[str, Any]:
    attention = config.blocks[0].attention
    fields = attention_fields(attention) | rope_fields(attention.rope) | _qwen_window_fields(config)
    mlp = next((block.mlp for block in config.blocks if block.mlp), None)
    if mlp is not None:
        fields |= mlp_fields(mlp)
    return fields | ({"attention_bias": attention.qkv_bias} if attention.qk_norm else {})


def write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    experts = next(block.experts for block in config.blocks if block.experts)
    return {"intermediate_size": experts.width} | write_qwen(config) | {
        "hidden_act": ACTIVATION_NAMES[experts.activation],
        "num_experts": experts.experts,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.width,
        "norm_topk_prob": experts.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, block in enumerate(config.blocks) if block.experts is None],
    }


def write_mixtral(config: ModelConfig) -> dict[str, Any]:
    attention, experts = config.blocks[0].attention, config.blocks[0].experts
    assert experts is not None
    return attention_fields(attention) | rope_fields(attention.rope) | {
        "intermediate_size": experts.width,
        "hidden_act": ACTIVATION_NAMES[experts.activation],
        "num_local_experts": experts.experts,
        "num_experts_per_tok": experts.per_token,
        "sliding_window": attention.window,
    }


def attention_fields(attention: AttentionConfig) -> dict[str, Any]:
    return {
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_width,
    }


def mlp_fields(mlp: MlpConfig) -> dict[str, Any]:
    return {"intermediate_size": mlp.width, "hidden_act": ACTIVATION_NAMES[mlp.activation]}


def layer_types(config: ModelConfig) -> list[str]:
    kinds = {True: "sliding_attention", False: "full_attention"}
    return [kinds[block.attention.window is not None] for block in config.blocks]


def _qwen_window_fields(config: ModelConfig) -> dict[str, Any]:
    windows = [block.attention.window for block in config.blocks]
    used = [window for window in windows if window is not None]
    first = next((layer for layer, window in enumerate(windows) if window is not None), config.layers)
    return {
        "use_sliding_window": bool(used),
        "sliding_window": used[0] if used else None,
        "max_window_layers": first,
        "layer_types": layer_types(config),
    }


LLAMA = Family("LlamaForCausalLM", "llama", DENSE_NAMES, read_llama, write_llama)
QWEN2 = Family("Qwen2ForCausalLM", "qwen2", DENSE_NAMES, read_qwen2, write_qwen)
QWEN3 = Family("Qwen3ForCausalLM", "qwen3", DENSE_NAMES, read_qwen3, write_qwen)
QWEN3_MOE = Family("Qwen3MoeForCausalLM", "qwen3_moe", QWEN_MOE_NAMES, read_qwen3_moe, write_qwen3_moe)
MIXTRAL = Family("MixtralForCausalLM", "mixtral", MIXTRAL_NAMES, read_mixtral, write_mixtral)

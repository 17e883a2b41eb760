"""Gemma 2, Gemma 3 (text) and Gemma 4 (text: dense, and the mixture of the 26B-A4B kind).

Left out of Gemma 4: per-layer embeddings and keys shared between layers (the E2B and E4B models).
"""

from __future__ import annotations

from typing import Any

from jax_core.models.config import AttentionConfig, BlockConfig, ExpertsConfig, MlpConfig, ModelConfig, Rope
from jax_core.models.families.family import Family
from jax_core.models.families.fields import ACTIVATION_NAMES, Fields, require, rope_fields, rope_parameters
from jax_core.models.families.llama import (
    DENSE_NAMES,
    attention_fields,
    checked,
    grouped_query,
    layer_types,
    layers_of,
    model_of,
)
from jax_core.models.tensor_rules import Fused, Names

GEMMA_NAMES: Names = {
    **DENSE_NAMES,
    "attention_output_norm.scale": "post_attention_layernorm.weight",
    "mlp_norm.scale": "pre_feedforward_layernorm.weight",
    "mlp_output_norm.scale": "post_feedforward_layernorm.weight",
}
GEMMA4_NAMES: Names = {
    **GEMMA_NAMES,
    "dense_part_norm.scale": "post_feedforward_layernorm_1.weight",
    "experts_norm.scale": "pre_feedforward_layernorm_2.weight",
    "experts_part_norm.scale": "post_feedforward_layernorm_2.weight",
    "experts.router": "router.proj.weight",
    "experts.router_input_scale": "router.scale",
    "experts.expert_scale": "router.per_expert_scale",
    "experts.gate": Fused("experts.gate_up_proj", 0, 2),
    "experts.up": Fused("experts.gate_up_proj", 1, 2),
    "experts.down": "experts.down_proj",
    "output_scale": "layer_scalar",
}
_LAYERS_A_PATTERN = 6  # of Gemma 3 and 4: five with a window, one without


def read_gemma2(fields: Fields) -> ModelConfig:
    layers = layers_of(fields)
    windowed = fields.windowed_layers(layers, [layer % 2 == 0 for layer in range(layers)])
    window = fields.integer("sliding_window", 4096)
    cap = fields.values.get("attn_logit_softcapping", 50.0)
    blocks = [
        _block(fields, _attention(fields, fields.rope(), window if has_window else None, soft_cap=cap))
        for has_window in windowed
    ]
    return _gemma(fields, "gemma2", blocks, fields.values.get("final_logit_softcapping", 30.0), norm_offset=1.0)


def read_gemma3(fields: Fields) -> ModelConfig:
    layers = layers_of(fields)
    pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", _LAYERS_A_PATTERN))
    windowed = fields.windowed_layers(layers, [(layer + 1) % pattern != 0 for layer in range(layers)])
    window = fields.integer("sliding_window", 4096)
    cap = fields.optional_real("attn_logit_softcapping")
    ropes = {False: fields.rope(1e6), True: _local_rope(fields)}
    blocks = [
        _block(fields, _attention(fields, ropes[has], window if has else None, soft_cap=cap, qk_norm=True))
        for has in windowed
    ]
    return _gemma(fields, "gemma3_text", blocks, fields.optional_real("final_logit_softcapping"), norm_offset=1.0)


def read_gemma4(fields: Fields) -> ModelConfig:
    fields.refuse("hidden_size_per_layer_input", 0)
    fields.refuse("num_kv_shared_layers", 0)
    fields.refuse("use_double_wide_mlp", False)
    layers = layers_of(fields)
    default = [(layer + 1) % _LAYERS_A_PATTERN != 0 and layer != layers - 1 for layer in range(layers)]
    windowed = fields.windowed_layers(layers, default)
    require(not windowed[-1], "layer_types", "ends with a sliding layer; the last one of Gemma 4 sees everything.")
    experts = _gemma4_experts(fields) if fields.flag("enable_moe_block", False) else None
    blocks = [
        _block(fields, _gemma4_attention(fields, layer, has), experts=experts, output_scale=True)
        for layer, has in enumerate(windowed)
    ]
    return _gemma(fields, "gemma4_text", blocks, fields.optional_real("final_logit_softcapping"))


def _gemma4_attention(fields: Fields, layer: int, has_window: bool) -> AttentionConfig:
    """Layers without a window may have heads of their own width and number, and one projection for keys and values."""
    shared = fields.flag("attention_k_eq_v", False) and not has_window
    own = _gemma4_overrides(fields, layer, has_window, shared)
    width = own.integer("head_dim", fields.integer("head_dim", 256))
    kv_heads = own.integer("num_key_value_heads", fields.integer("num_key_value_heads", 4))
    bias = fields.flag("attention_bias", False)
    return checked(
        AttentionConfig(
            fields.integer("num_attention_heads", 8),
            kv_heads,
            width,
            _gemma4_rope(fields, has_window),
            scale=1.0,
            window=fields.integer("sliding_window", 512) if has_window else None,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
            value_norm=True,
            keys_are_values=shared,
        )
    )


def _gemma4_overrides(fields: Fields, layer: int, has_window: bool, shared: bool) -> Fields:
    if fields.has("per_layer_config"):
        given = fields.values["per_layer_config"]
        own = given.get(str(layer), given.get(layer)) or {}
        for key in own:
            require(key in ("head_dim", "num_key_value_heads"), f"per_layer_config: {key}", "is not supported.")
        return Fields(own)
    if has_window:
        return Fields({})
    kv_heads = fields.values.get("num_global_key_value_heads") if shared else None
    return Fields({"head_dim": fields.integer("global_head_dim", 512), "num_key_value_heads": kv_heads})


def _gemma4_rope(fields: Fields, has_window: bool) -> Rope:
    if not fields.has("rope_parameters"):
        return Rope(1e4) if has_window else Rope(1e6, partial=0.25, proportional=True)
    return fields.rope(kind="sliding_attention" if has_window else "full_attention", supported=("proportional",))


def _gemma4_experts(fields: Fields) -> ExpertsConfig:
    return ExpertsConfig(
        experts=fields.integer("num_experts"),
        per_token=fields.integer("top_k_experts"),
        width=fields.integer("moe_intermediate_size"),
        activation=fields.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        scaled=True,
    )


def _local_rope(fields: Fields) -> Rope:
    """Of the layers with a window: never scaled in the older spelling."""
    if fields.has("rope_parameters"):
        return fields.rope(kind="sliding_attention")
    return Rope(fields.real("rope_local_base_freq", 1e4))


def _attention(fields: Fields, rope: Rope, window: int | None, **switches: Any) -> AttentionConfig:
    bias = fields.flag("attention_bias", False)
    scale = fields.real("query_pre_attn_scalar", 256) ** -0.5
    width = fields.integer("head_dim", 256)
    return grouped_query(
        fields, rope, head_width=width, scale=scale, window=window, qkv_bias=bias, out_bias=bias, **switches
    )


def _block(fields: Fields, attention: AttentionConfig, **more: Any) -> BlockConfig:
    activation = fields.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh")
    mlp = MlpConfig(fields.integer("intermediate_size"), activation)
    return BlockConfig(attention, mlp, output_norms=True, **more)


def _gemma(fields: Fields, family: str, blocks: list[BlockConfig], cap: float | None, **more: Any) -> ModelConfig:
    scale = fields.integer("hidden_size") ** 0.5
    return model_of(fields, family, blocks, tied_head=True, embedding_scale=scale, logit_soft_cap=cap, **more)


def write_gemma2(config: ModelConfig) -> dict[str, Any]:
    attention = config.blocks[0].attention
    return _shared_fields(config) | rope_fields(attention.rope)


def write_gemma3(config: ModelConfig) -> dict[str, Any]:
    ropes = {block.attention.window is not None: block.attention.rope for block in config.blocks}
    full, local = ropes.get(False, Rope(1e6)), ropes.get(True, Rope(1e4))
    fields = _shared_fields(config)
    if local.scaling is None and local.partial == full.partial == 1.0:
        return fields | rope_fields(full) | {"rope_local_base_freq": local.theta}
    return fields | {"rope_parameters": _ropes(config)}


def write_gemma4(config: ModelConfig) -> dict[str, Any]:
    fields = _shared_fields(config)
    del fields["query_pre_attn_scalar"], fields["attn_logit_softcapping"]
    sliding = next((b.attention for b in config.blocks if b.attention.window is not None), None)
    usual = sliding or config.blocks[0].attention
    own = {
        str(layer): {"head_dim": block.attention.head_width, "num_key_value_heads": block.attention.kv_heads}
        for layer, block in enumerate(config.blocks)
    }
    experts = config.blocks[0].experts
    fields |= attention_fields(usual) | {
        "attention_k_eq_v": any(block.attention.keys_are_values for block in config.blocks),
        "per_layer_config": own,
        "global_head_dim": config.blocks[-1].attention.head_width,
        "num_global_key_value_heads": config.blocks[-1].attention.kv_heads,
        "rope_parameters": _ropes(config),
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": experts is not None,
    }
    if experts is None:
        return fields
    return fields | {
        "num_experts": experts.experts,
        "top_k_experts": experts.per_token,
        "moe_intermediate_size": experts.width,
    }


def _ropes(config: ModelConfig) -> dict[str, Any]:
    kinds = zip(layer_types(config), config.blocks, strict=True)
    return {kind: rope_parameters(block.attention.rope) for kind, block in kinds}


def _shared_fields(config: ModelConfig) -> dict[str, Any]:
    block = config.blocks[0]
    assert block.mlp is not None
    window = next((b.attention.window for b in config.blocks if b.attention.window is not None), None)
    return attention_fields(block.attention) | {
        "intermediate_size": block.mlp.width,
        "hidden_activation": ACTIVATION_NAMES[block.mlp.activation],
        "attention_bias": block.attention.qkv_bias,
        "query_pre_attn_scalar": _whole(round(block.attention.scale**-2, 6)),
        "attn_logit_softcapping": block.attention.soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
        "sliding_window": window,
        "layer_types": layer_types(config),
    }


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number


GEMMA2 = Family("Gemma2ForCausalLM", "gemma2", GEMMA_NAMES, read_gemma2, write_gemma2)
GEMMA3 = Family("Gemma3ForCausalLM", "gemma3_text", GEMMA_NAMES, read_gemma3, write_gemma3)
GEMMA4 = Family("Gemma4ForCausalLM", "gemma4_text", GEMMA4_NAMES, read_gemma4, write_gemma4)

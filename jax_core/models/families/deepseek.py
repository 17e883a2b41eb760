"""DeepSeek-V3: latent attention; shared and routed experts, chosen within groups by corrected sigmoid scores.

Left out: the layers that predict several tokens at once, and 8-bit weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax_core.models.config import (
    AttentionConfig,
    BlockConfig,
    ExpertsConfig,
    Latent,
    ModelConfig,
    YarnScaling,
    yarn_temperature,
)
from jax_core.models.families.family import Family
from jax_core.models.families.fields import Fields, require, rope_fields
from jax_core.models.families.llama import DENSE_NAMES, QWEN_MOE_NAMES, dense_mlp, layers_of, mlp_fields, model_of
from jax_core.models.tensor_rules import Names

DEEPSEEK_NAMES: Names = {
    **DENSE_NAMES,
    **QWEN_MOE_NAMES,
    "attention.q_down": "self_attn.q_a_proj.weight",
    "attention.q_down_bias": "self_attn.q_a_proj.bias",
    "attention.q_norm.scale": "self_attn.q_a_layernorm.weight",
    "attention.q_up": "self_attn.q_b_proj.weight",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_down_bias": "self_attn.kv_a_proj_with_mqa.bias",
    "attention.kv_norm.scale": "self_attn.kv_a_layernorm.weight",
    "attention.kv_up": "self_attn.kv_b_proj.weight",
    "experts.correction_bias": "mlp.gate.e_score_correction_bias",
    "experts.shared.gate": "mlp.shared_experts.gate_proj.weight",
    "experts.shared.up": "mlp.shared_experts.up_proj.weight",
    "experts.shared.down": "mlp.shared_experts.down_proj.weight",
}


def read_deepseek_v3(fields: Fields) -> ModelConfig:
    fields.refuse("scoring_func", "sigmoid")
    fields.refuse("topk_method", "noaux_tc")
    fields.refuse("moe_layer_freq", 1)
    attention, mlp, experts = _attention(fields), dense_mlp(fields), _experts(fields)
    first_sparse = fields.integer("first_k_dense_replace", 3)
    dense, sparse = BlockConfig(attention, mlp), BlockConfig(attention, experts=experts)
    blocks = [dense if layer < first_sparse else sparse for layer in range(layers_of(fields))]
    return model_of(fields, "deepseek_v3", blocks)


def _attention(fields: Fields) -> AttentionConfig:
    q_rank = fields.optional_integer("q_lora_rank") if "q_lora_rank" in fields.values else 1536
    latent = Latent(
        q_rank=q_rank,
        kv_rank=fields.integer("kv_lora_rank", 512),
        nope_width=fields.integer("qk_nope_head_dim", 128),
        rope_width=fields.integer("qk_rope_head_dim", 64),
        value_width=fields.integer("v_head_dim", 128),
    )
    require(latent.rope_width % 2 == 0, f"qk_rope_head_dim = {latent.rope_width}", "is odd: RoPE turns pairs.")
    rope = replace(fields.rope(), interleaved=fields.flag("rope_interleave", True))
    width = latent.nope_width + latent.rope_width
    scale = width**-0.5
    if isinstance(rope.scaling, YarnScaling) and rope.scaling.mscale_all_dim:
        scale *= yarn_temperature(rope.scaling.factor, rope.scaling.mscale_all_dim) ** 2
    bias = fields.flag("attention_bias", False)
    heads = fields.integer("num_attention_heads")
    return AttentionConfig(heads, heads, width, rope, scale, qkv_bias=bias, out_bias=bias, latent=latent)


def _experts(fields: Fields) -> ExpertsConfig:
    width = fields.integer("moe_intermediate_size", 2048)
    experts = ExpertsConfig(
        experts=fields.integer("n_routed_experts", 256),
        per_token=fields.integer("num_experts_per_tok", 8),
        width=width,
        activation=fields.activation("hidden_act", default="silu"),
        scores="sigmoid",
        normalize=fields.flag("norm_topk_prob", True),
        scaling=fields.real("routed_scaling_factor", 2.5),
        groups=fields.integer("n_group", 8),
        groups_per_token=fields.integer("topk_group", 4),
        correction_bias=True,
        shared_width=width * fields.integer("n_shared_experts", 1),
    )
    require(experts.experts % experts.groups == 0, f"n_group = {experts.groups}", "does not divide the experts.")
    in_groups = experts.experts // experts.groups * experts.groups_per_token
    require(
        experts.groups_per_token <= experts.groups and experts.per_token <= in_groups,
        f"topk_group = {experts.groups_per_token}",
        f"leaves no {experts.per_token} experts to choose.",
    )
    return experts


def write_deepseek_v3(config: ModelConfig) -> dict[str, Any]:
    attention = config.blocks[0].attention
    latent = attention.latent
    assert latent is not None
    fields = rope_fields(attention.rope) | {
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.heads,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_width,
        "qk_rope_head_dim": latent.rope_width,
        "v_head_dim": latent.value_width,
        "attention_bias": attention.qkv_bias,
        "rope_interleave": attention.rope.interleaved,
    }
    mlp = next((block.mlp for block in config.blocks if block.mlp), None)
    experts = next((block.experts for block in config.blocks if block.experts), None)
    fields |= {"first_k_dense_replace": sum(block.mlp is not None for block in config.blocks)}
    if mlp is not None:
        fields |= mlp_fields(mlp)
    if experts is None:
        return fields
    return {"intermediate_size": experts.width} | fields | {
        "hidden_act": fields.get("hidden_act", "silu"),
        "moe_intermediate_size": experts.width,
        "n_routed_experts": experts.experts,
        "n_shared_experts": (experts.shared_width or 0) // experts.width,
        "num_experts_per_tok": experts.per_token,
        "n_group": experts.groups,
        "topk_group": experts.groups_per_token,
        "norm_topk_prob": experts.normalize,
        "routed_scaling_factor": experts.scaling,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


DEEPSEEK_V3 = Family("DeepseekV3ForCausalLM", "deepseek_v3", DEEPSEEK_NAMES, read_deepseek_v3, write_deepseek_v3)

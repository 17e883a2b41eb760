"""Families of models: Hugging Face's config.json to and from `ModelConfig`, and the names of tensors.

The code of the decoder knows no family. A new one is one `Family` here; docs/models.md shows how.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_core.models.config import ModelConfig
from jax_core.models.families.deepseek import DEEPSEEK_V3
from jax_core.models.families.family import Family, common_fields
from jax_core.models.families.fields import Fields
from jax_core.models.families.gemma import GEMMA2, GEMMA3, GEMMA4
from jax_core.models.families.llama import LLAMA, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE
from jax_core.models.tensor_rules import TensorRule, make_rules
from schemas.errors import UserError

__all__ = ["FAMILIES", "read_config", "tensor_rules", "write_config"]

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    MIXTRAL,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    DEEPSEEK_V3,
)


def read_config(config_json: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes, in either spelling.

    Raises:
      UserError: its architecture, or one of its switches, is not supported; a value is missing or senseless.
    """
    family = _family_of(config_json)
    fields = Fields(config_json)
    fields.refuse("quantization_config", why="says that the weights are quantized, which is not supported.")
    fields.refuse("use_bidirectional_attention", False, "vision", why="lets a token see those behind it.")
    fields.refuse("is_encoder_decoder", False)
    return family.read(fields)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """A config.json that transformers loads as the same model, in the older spelling where there is one."""
    family = _by_model_type(config.family)
    return common_fields(config, family) | family.write(config)


def tensor_rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """Where every tensor of the model's checkpoint goes; each leaf of the parameters is covered exactly once."""
    return make_rules(config, _by_model_type(config.family).names)


def _family_of(config_json: Mapping[str, Any]) -> Family:
    named = config_json.get("architectures")
    if named:
        architecture = str(named[0])
        for family in FAMILIES:
            if family.architecture == architecture:
                return family
        raise _unknown(f"config.json: architecture {architecture}")
    if "model_type" not in config_json:
        raise _unknown("config.json: neither architectures nor model_type")
    return _by_model_type(str(config_json["model_type"]))


def _by_model_type(model_type: str) -> Family:
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    raise _unknown(f"config.json: model_type {model_type}")


def _unknown(offender: str) -> UserError:
    return UserError(offender, "is not supported.", f"Known: {', '.join(f.architecture for f in FAMILIES)}.")

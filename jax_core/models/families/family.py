"""What makes a family: how its config.json is read and written, and what its tensors are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax_core.models.config import ModelConfig
from jax_core.models.families.fields import Fields
from jax_core.models.tensor_rules import Names


@dataclass(frozen=True)
class Family:
    """
    `read` gets the fields of a config.json, `write` makes those that `common_fields` does not.
    """

    architecture: str  # "LlamaForCausalLM"
    model_type: str  # "llama"
    names: Names  # of a block's leaves
    read: Callable[[Fields], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]


def common_fields(config: ModelConfig, family: Family) -> dict[str, Any]:
    """What every family's config.json has."""
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "rms_norm_eps": config.norm_epsilon,
        "max_position_embeddings": config.positions,
        "tie_word_embeddings": config.tied_head,
        "torch_dtype": config.parameters_dtype,
    }

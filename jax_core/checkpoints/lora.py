"""LoRA adapters (`jax_core.lora`) written in PEFT's layout.

Adapters are a nested dict like `Params`, of some of its leaves only. In the place of a weight [.., in, out] stands

    {"a": [.., in, r], "b": [.., r, out]}

stacked on leading axes (layers, experts) as the weight is. The adapted weight is W + alpha / r * a @ b
(Hu et al. 2021, equation 3, transposed as our weights are).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jax_core.checkpoints.safetensors_files import write_safetensors
from jax_core.checkpoints.write import Tensor, array_tensor, whole_folder, write_json
from jax_core.lora import Adapters, adapted_paths
from jax_core.models.config import ModelConfig
from jax_core.models.families import tensor_rules
from jax_core.models.tensor_rules import TensorRule
from schemas.errors import UserError

ADAPTER_CONFIG, ADAPTER_MODEL = "adapter_config.json", "adapter_model.safetensors"


def write_adapter(folder: Path, config: ModelConfig, adapters: Adapters, *, alpha: float, base: str) -> list[str]:
    """Writes adapters so that PEFT loads them onto the base model, in float32.

    Args:
      folder: must not exist, or be empty.
      base: name or path of the base model, for adapter_config.json.

    Raises:
      UserError: a weight is adapted that PEFT cannot adapt (it is a part of a fused tensor, or no linear layer), ranks
        differ, or the folder cannot be written.
    """
    pairs = dict(adapted_paths(adapters))
    rules = [rule for rule in tensor_rules(config) if rule.path in pairs]
    for rule in rules:
        if not rule.transpose or rule.part is not None or len(rule.shape) != 2:
            reason = "is no linear layer of its own in the checkpoint, so PEFT has no adapter for it."
            raise UserError("/".join(rule.path), reason, "Export the merged model instead.")
    ranks = {pair["a"].shape[-1] for pair in pairs.values()}
    if len(ranks) != 1:
        raise UserError("the adapters", f"have ranks {sorted(ranks)}.", "Export the merged model instead.")
    described = _peft_config(config, rules, ranks.pop(), alpha, base)
    tensors = [tensor for rule in rules for tensor in _pair_tensors(rule, pairs[rule.path])]
    with whole_folder(folder) as partial:
        with (partial / ADAPTER_MODEL).open("wb") as file:
            write_safetensors(file, tensors)
        write_json(partial / ADAPTER_CONFIG, described)
        return sorted(file.name for file in partial.iterdir())


def _pair_tensors(rule: TensorRule, pair: Mapping[str, Any]) -> Iterator[Tensor]:
    """lora_A [r, in] and lora_B [out, r] of one linear layer."""
    for name, key in (("lora_A", "a"), ("lora_B", "b")):
        array = np.asarray(pair[key][rule.index], np.float32).T
        full = f"base_model.model.{_module(rule)}.{name}.weight"
        yield array_tensor(full, array.shape, array.dtype, partial(np.asarray, array))


def _module(rule: TensorRule) -> str:
    return rule.name.removesuffix(".weight")


def _peft_config(config: ModelConfig, rules: list[TensorRule], rank: int, alpha: float, base: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": _targets(config, rules),
    }


def _targets(config: ModelConfig, rules: list[TensorRule]) -> list[str]:
    """Modules by their last names where all of that name are adapted, and else by their full names."""
    adapted = {_module(rule) for rule in rules}
    linear = {_module(rule) for rule in tensor_rules(config) if len(rule.shape) == 2}
    partly = {module.rpartition(".")[2] for module in linear - adapted}
    short = {module.rpartition(".")[2] for module in adapted} - partly
    return sorted(short | {module for module in adapted if module.rpartition(".")[2] in partly})

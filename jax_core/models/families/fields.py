"""Reading a `config.json`: each value by name and type, in the older and the newer spelling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from jax_core.models.config import (
    Activation,
    Dtype,
    LinearScaling,
    Llama3Scaling,
    Rope,
    YarnScaling,
)
from schemas.errors import UserError

T = TypeVar("T")

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
ACTIVATION_NAMES: dict[Activation, str] = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
_WINDOWED = {"full_attention": False, "sliding_attention": True}
SUPPORTED_ROPES = ("default", "linear", "llama3", "yarn")


class Fields:
    """The values of one model's config.json. What is missing or null has the family's default."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        return self._typed(key, int, default)

    def real(self, key: str, default: float | None = None) -> float:
        return float(self._typed(key, (int, float), default))

    def flag(self, key: str, default: bool) -> bool:
        return self._typed(key, bool, default)

    def optional_real(self, key: str) -> float | None:
        return self.real(key) if self.has(key) else None

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if self.has(key) else None

    def _typed(self, key: str, kind: Any, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise UserError(f"config.json: {key}", "is missing.", "Take the checkpoint's own config.json.")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UserError(f"config.json: {key} = {value!r}", "has the wrong type.", "Correct it.")
        return value

    def refuse(self, key: str, *harmless: Any, why: str = "is not supported.") -> None:
        """Refuses a switch that is set to anything else than what the decoder does."""
        value = self.values.get(key)
        if value is not None and value not in harmless:
            raise UserError(f"config.json: {key} = {value!r}", why, _WAY_OUT)

    def activation(self, *keys: str, default: str) -> Activation:
        key = next((key for key in keys if self.has(key)), keys[0])
        value = self.values.get(key) or default
        if value not in _ACTIVATIONS:
            raise UserError(
                f"config.json: {key} = {value!r}", "is not supported.", f"Known: {', '.join(_ACTIVATIONS)}."
            )
        return _ACTIVATIONS[value]

    def dtype(self) -> Dtype:
        """What the checkpoint was saved in; float16 becomes float32, which holds all of its numbers."""
        value = str(self.values.get("dtype") or self.values.get("torch_dtype") or "float32").removeprefix("torch.")
        return "bfloat16" if value == "bfloat16" else "float32"

    def windowed_layers(self, layers: int, default: list[bool]) -> list[bool]:
        """For each layer, whether it has a sliding window: `layer_types`, or the family's default."""
        kinds = self.values.get("layer_types")
        if kinds is None:
            return default
        for kind in kinds:
            if kind not in _WINDOWED:
                raise UserError(f"config.json: layer_types has {kind!r}", "is not supported.", _WAY_OUT)
        if len(kinds) != layers:
            reason = f"names {len(kinds)} layers of {layers}."
            raise UserError("config.json: layer_types", reason, "Name each layer once.")
        return [_WINDOWED[kind] for kind in kinds]

    def rope(self, theta: float = 10_000.0, kind: str = "full_attention", supported: tuple[str, ...] = ()) -> Rope:
        """RoPE of the layers of one kind, from `rope_parameters` or from `rope_theta` and `rope_scaling`.

        Args:
          theta: the family's default.
          supported: types beyond the usual ones.
        """
        if self.has("rope_parameters"):
            key = "rope_parameters"
            given = self.values[key]
            given = given.get(kind, {}) if any(isinstance(v, Mapping) for v in given.values()) else given
        else:
            key = "rope_scaling"
            given = {"rope_theta": self.values.get("rope_theta"), **(self.values.get(key) or {})}
        rope = Fields({k: v for k, v in given.items() if v is not None})
        name = rope.values.get("rope_type") or rope.values.get("type") or "default"
        if name not in (*SUPPORTED_ROPES, *supported):
            known = ", ".join((*SUPPORTED_ROPES, *supported))
            raise UserError(f"config.json: {key} of type {name!r}", "is not supported.", f"Known: {known}.")
        partial = rope.real("partial_rotary_factor", self.real("partial_rotary_factor", 1.0))
        plain = Rope(rope.real("rope_theta", self.real("rope_theta", theta)), partial)
        match name:
            case "linear":
                return replace(plain, scaling=LinearScaling(rope.real("factor")))
            case "llama3":
                low, high = rope.real("low_freq_factor"), rope.real("high_freq_factor")
                return replace(plain, scaling=Llama3Scaling(rope.real("factor"), low, high, self._original(rope)))
            case "yarn":
                return replace(plain, scaling=self._yarn(rope))
            case "proportional":
                factor = rope.real("factor", 1.0)
                return replace(plain, proportional=True, scaling=LinearScaling(factor) if factor != 1.0 else None)
        return plain

    def _original(self, rope: Fields) -> int:
        key = "original_max_position_embeddings"
        return rope.integer(key, self.integer(key, self.integer("max_position_embeddings")))

    def _yarn(self, rope: Fields) -> YarnScaling:
        original = self._original(rope)
        return YarnScaling(
            factor=rope.real("factor", self.integer("max_position_embeddings") / original),
            original_positions=original,
            beta_fast=rope.real("beta_fast", 32.0),
            beta_slow=rope.real("beta_slow", 1.0),
            truncate=rope.flag("truncate", True),
            attention_factor=rope.optional_real("attention_factor"),
            mscale=rope.optional_real("mscale"),
            mscale_all_dim=rope.optional_real("mscale_all_dim"),
        )


_WAY_OUT = "docs/models.md lists the families and switches that are."


def require(holds: bool, offender: str, reason: str) -> None:
    if not holds:
        raise UserError(f"config.json: {offender}", reason, "Take the checkpoint's own config.json.")


def rope_fields(rope: Rope) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`: the older spelling, which old and new readers take."""
    fields: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": _scaling_fields(rope)}
    return fields if rope.partial == 1.0 else fields | {"partial_rotary_factor": rope.partial}


def rope_parameters(rope: Rope) -> dict[str, Any]:
    """The newer spelling, for models of which older readers know nothing."""
    fields = {"rope_type": "default", **(_scaling_fields(rope) or {}), "rope_theta": rope.theta}
    if rope.proportional:
        fields["rope_type"] = "proportional"
    return fields if rope.partial == 1.0 else fields | {"partial_rotary_factor": rope.partial}


def _scaling_fields(rope: Rope) -> dict[str, Any] | None:
    match rope.scaling:
        case LinearScaling(factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3Scaling() as s:
            return {
                "rope_type": "llama3",
                "factor": s.factor,
                "low_freq_factor": s.low_frequency,
                "high_freq_factor": s.high_frequency,
                "original_max_position_embeddings": s.original_positions,
            }
        case YarnScaling() as s:
            fields = {
                "rope_type": "yarn",
                "factor": s.factor,
                "original_max_position_embeddings": s.original_positions,
                "beta_fast": s.beta_fast,
                "beta_slow": s.beta_slow,
                "truncate": s.truncate,
                "attention_factor": s.attention_factor,
                "mscale": s.mscale,
                "mscale_all_dim": s.mscale_all_dim,
            }
            return {key: value for key, value in fields.items() if value is not None}
    return None

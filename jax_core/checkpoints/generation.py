"""How a model's makers would have it sampled: the stop tokens and defaults that come with a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.errors import UserError


@dataclass(frozen=True)
class GenerationDefaults:
    """What generation_config.json says; a recipe may say otherwise."""

    stop_ids: tuple[int, ...] = ()  # any of these ends an answer
    temperature: float = 1.0
    top_k: int = 0  # 0: among all tokens
    top_p: float = 1.0


def generation_defaults(generation: Mapping[str, Any], config: Mapping[str, Any], origin: Path) -> GenerationDefaults:
    """Of generation_config.json, and the stop ids of config.json where the former names none. `null` is not said.

    Raises:
      UserError: a value that cannot be, naming its key.
    """
    stop_ids = _token_ids(generation.get("eos_token_id"), origin)
    return GenerationDefaults(
        stop_ids or _token_ids(config.get("eos_token_id"), origin),
        _number(generation, "temperature", 1.0, 0.0, float("inf"), origin),
        int(_number(generation, "top_k", 0, 0, 2**31, origin)),
        _number(generation, "top_p", 1.0, 0.0, 1.0, origin),
    )


def gguf_defaults(metadata: Mapping[str, Any], origin: Path) -> GenerationDefaults:
    """Of a GGUF file: its ends of text, turn and message, and the sampling that newer files recommend."""
    keys = [f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom")]
    names = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p"}
    generation = {ours: metadata.get(f"general.sampling.{theirs}") for ours, theirs in names.items()}
    generation["eos_token_id"] = [metadata[key] for key in keys if key in metadata]
    return generation_defaults(generation, {}, origin)


def _token_ids(value: Any, origin: Path) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise UserError(f"{origin}: eos_token_id", f"{value!r} is no list of token ids.", "Mend it.")
    return tuple(dict.fromkeys(ids))


def _number(values: Mapping[str, Any], key: str, default: float, least: float, most: float, origin: Path) -> float:
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise UserError(f"{origin}: {key}", f"{value!r} is not between {least:g} and {most:g}.", "Mend it.")
    return value

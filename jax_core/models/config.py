"""The shape of a decoder, as data: families differ here, not in code."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.recipe import ModelSection


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-like decoder. D = width, H = heads, K = kv_heads, h = head_width, F = mlp_width, V = vocab_size."""

    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    rope_theta: float
    norm_epsilon: float
    tied_head: bool

    @classmethod
    def from_recipe(cls, section: ModelSection, vocab_size: int) -> ModelConfig:
        return cls(vocab_size=vocab_size, **section.model_dump(exclude={"family", "checkpoint"}))

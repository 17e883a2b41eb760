"""The shape of a decoder, as data: families differ here, not in code.

A model is a sequence of blocks, and every block says everything about itself. Blocks that are equal, or that repeat in
a pattern, are found and stacked by `stacks.py`; nothing here needs to know.

D = width, V = vocab_size, H = heads, K = kv_heads, h = head_width, F = mlp width, E = experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from schemas.recipe import ModelSection

Dtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "blocks", "dots"]
Activation = Literal["silu", "gelu_tanh", "gelu"]

_SHAPE = {
    *("layers", "width", "heads", "kv_heads", "head_width", "mlp_width"),
    *("rope_theta", "norm_epsilon", "tied_head"),
}


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies are divided by `factor`, high ones kept, those between interpolated."""

    factor: float
    low_frequency: float  # turns within `original_positions`, below which a frequency is low
    high_frequency: float
    original_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): frequencies by their turns in the original context, and a temperature of the scores."""

    factor: float
    original_positions: int
    beta_fast: float = 32.0  # turns, above which a frequency is kept
    beta_slow: float = 1.0  # turns, below which it is divided by `factor`
    truncate: bool = True  # the channels between are whole numbers
    attention_factor: float | None = None  # of cosine and sine; None: from mscale and mscale_all_dim
    mscale: float | None = None
    mscale_all_dim: float | None = None  # DeepSeek's: of the scores, squared


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021) of the first `partial` part of a head's channels."""

    theta: float = 10_000.0
    partial: float = 1.0
    proportional: bool = False  # Gemma 4: frequencies of the whole head, of which the last 1 - partial are 0
    interleaved: bool = False  # channel 2i turns with 2i + 1 (DeepSeek), instead of i with i + h/2
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI 2024): keys and values are made from one small vector a token."""

    q_rank: int | None  # None: queries are made from the hidden state directly
    kv_rank: int
    nope_width: int  # channels of a head without position
    rope_width: int  # channels with position; of the key, shared by all heads
    value_width: int
    norm_epsilon: float = 1e-6  # of the norms of the latents


@dataclass(frozen=True)
class AttentionConfig:
    """Causal grouped-query attention, or latent attention where `latent` is set."""

    heads: int
    kv_heads: int
    head_width: int
    rope: Rope
    scale: float  # of the scores
    window: int | None = None  # a token sees itself and the window - 1 before it; None: all before it
    soft_cap: float | None = None  # scores become cap * tanh(score / cap)
    qkv_bias: bool = False  # of latent attention: of the projections down to the latents
    out_bias: bool = False
    qk_norm: bool = False  # RMS norm of each head's query and key, before RoPE
    value_norm: bool = False  # RMS norm of each head's value, without a scale
    keys_are_values: bool = False  # one projection makes both, before norm and RoPE
    latent: Latent | None = None

    @property
    def key_shape(self) -> tuple[int, int]:
        """Heads and width of what a cache keeps as a token's key."""
        return (1, self.latent.kv_rank + self.latent.rope_width) if self.latent else (self.kv_heads, self.head_width)

    @property
    def value_shape(self) -> tuple[int, int]:
        return (1, self.latent.kv_rank) if self.latent else (self.kv_heads, self.head_width)


@dataclass(frozen=True)
class MlpConfig:
    """A gated MLP (Shazeer 2020): activation(x W_gate) * (x W_up) W_down."""

    width: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts: each token is sent to `per_token` of `experts`, and no token is ever dropped."""

    experts: int
    per_token: int
    width: int  # F of one expert
    activation: Activation = "silu"
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True  # the chosen experts' weights sum to 1 (before `scaling`)
    scaling: float = 1.0  # of the chosen experts' weights
    groups: int = 1  # experts are chosen within the best `groups_per_token` of these (DeepSeek)
    groups_per_token: int = 1
    correction_bias: bool = False  # added to the scores to choose, not to weigh (DeepSeek)
    scaled: bool = False  # Gemma 4: the router norms and scales its own input, and each expert has an output scale
    shared_width: int | None = None  # F of the MLP that every token also goes through


@dataclass(frozen=True)
class BlockConfig:
    """One decoder block: attention, then an MLP, experts, or both side by side (Gemma 4)."""

    attention: AttentionConfig
    mlp: MlpConfig | None = None
    experts: ExpertsConfig | None = None
    output_norms: bool = False  # what attention and MLP add is normed too (Gemma)
    output_scale: bool = False  # the block's result is multiplied by one number of its own (Gemma 4)


@dataclass(frozen=True)
class ModelConfig:
    """A whole decoder."""

    vocab_size: int
    width: int
    blocks: tuple[BlockConfig, ...]
    norm_epsilon: float
    tied_head: bool
    norm_offset: float = 0.0  # Gemma 2 and 3: a norm multiplies by 1 + scale
    embedding_scale: float = 1.0
    logit_soft_cap: float | None = None
    known_tokens: int | None = None  # ids from here on only fill the embedding up, and are never predicted; None: no id
    positions: int = 2048  # longest context that the model was made for; for information
    family: str = "llama"  # model_type of its config.json
    parameters_dtype: Dtype = "float32"
    compute_dtype: Dtype = "float32"  # of activations and caches; norms, softmax, router and logits are float32
    remat: Remat = "none"  # what the backward pass computes again
    router_balance: float = 0.0  # weight of the routers' load-balancing loss in training

    @property
    def layers(self) -> int:
        return len(self.blocks)

    @classmethod
    def llama(
        cls,
        vocab_size: int,
        layers: int,
        width: int,
        heads: int,
        kv_heads: int,
        head_width: int,
        mlp_width: int,
        rope_theta: float,
        norm_epsilon: float,
        tied_head: bool,
    ) -> ModelConfig:
        """A plain Llama: all blocks alike."""
        attention = AttentionConfig(heads, kv_heads, head_width, Rope(rope_theta), head_width**-0.5)
        blocks = (BlockConfig(attention, MlpConfig(mlp_width)),) * layers
        return cls(vocab_size, width, blocks, norm_epsilon, tied_head)

    @classmethod
    def from_recipe(cls, section: ModelSection, vocab_size: int) -> ModelConfig:
        """The model of a recipe without a checkpoint: random weights in the section's shape."""
        shape = section.model_dump(include=_SHAPE)
        return cls.llama(vocab_size, **shape).with_recipe(section)

    def with_recipe(self, section: ModelSection) -> ModelConfig:
        """This model with what a recipe decides, and no checkpoint: dtypes, remat policy, the routers' balance."""
        return replace(
            self,
            parameters_dtype=section.parameters_dtype,
            compute_dtype=section.compute_dtype,
            remat=section.remat,
            router_balance=section.router_balance,
        )

    def with_tokens(self, known: int) -> ModelConfig:
        """This model under a tokenizer of `known` ids: checkpoints often have rows for more, to make a round number."""
        return replace(self, known_tokens=known if known < self.vocab_size else None)


def yarn_temperature(factor: float, mscale: float = 1.0) -> float:
    """0.1 mscale ln(factor) + 1 (Peng et al. 2023, eq. 22; mscale is DeepSeek's)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def windows(blocks: Sequence[BlockConfig]) -> tuple[int | None, ...]:
    """The distinct windows of the blocks, in order."""
    return tuple(dict.fromkeys(block.attention.window for block in blocks))

"""Small checkpoints in Hugging Face's layout: the golden ones, and random ones made for a config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from jax_core.models.config import ModelConfig
from jax_core.models.decoder import Params, bind, param_shapes
from jax_core.models.families import read_config, tensor_rules
from jax_core.models.passes import packed
from jax_core.sampling.engine import Engine
from jax_core.tokenizers import CharacterTokenizer
from schemas.records import SamplingRecord

GOLDEN = Path(__file__).parent / "golden_models"
ROWS, PROMPT_TOKENS, ROW_TOKENS = 3, 12, 40  # of the golden inputs, and of whatever else is compared
Tensors = dict[str, np.ndarray]


@lru_cache
def golden(name: str) -> tuple[ModelConfig, Params, Mapping[str, np.ndarray]]:
    """Configuration, weights and the reference implementation's outputs."""
    folder = GOLDEN / name
    config = read_config(json.loads((folder / "config.json").read_text()))
    return config, place(config, load_file(folder / "model.safetensors")), np.load(folder / "expected.npz")


def place(config: ModelConfig, tensors: Tensors) -> Params:
    """Parameters from a checkpoint's tensors, by the rules alone; all tensors are used and all leaves filled."""
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, np.float32), param_shapes(config))
    rules = tensor_rules(config)
    assert {rule.name for rule in rules} == set(tensors)
    for rule in rules:
        tensor = tensors[rule.name]
        assert tensor.shape == rule.shape, rule
        leaf = params
        for key in rule.path:
            leaf = leaf[key]
        leaf[rule.index] = _ours(rule, tensor)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    return jax.tree.map(jnp.asarray, params)


def _ours(rule, tensor: np.ndarray) -> np.ndarray:
    if rule.part is not None:
        axis, start, stop = rule.part
        tensor = np.take(tensor, range(start, stop), axis)
    return np.swapaxes(tensor, -1, -2) if rule.transpose else tensor


def random_checkpoint(config_json: Mapping[str, Any], seed: int = 0) -> tuple[ModelConfig, Tensors]:
    """Random tensors of every name and shape that the rules ask for, norms and biases included."""
    config = read_config(config_json)
    rng = np.random.default_rng(seed)
    shapes = {rule.name: rule.shape for rule in tensor_rules(config)}
    tensors = {}
    for name, shape in shapes.items():
        drawn = rng.standard_normal(shape)
        if len(shape) == 1:
            is_norm = "norm" in name or "scal" in name
            drawn = drawn * 0.2 + (1.0 if is_norm else 0.0)
        else:
            drawn = drawn * shape[-1] ** -0.5
        tensors[name] = drawn.astype(np.float32)
    return config, tensors


def logits(config: ModelConfig, params: Params, rows: list[np.ndarray], prompt_length: int = 0) -> list[np.ndarray]:
    """Logits [T, V] of each sequence behind its first `prompt_length` tokens.

    Every call is one padded batch of the same shape, an empty row where a sequence is alone: compiling is what takes
    time, and so a model is compiled once.
    """
    prompts = np.zeros((ROWS, PROMPT_TOKENS), np.int32)
    tokens = np.zeros((ROWS, ROW_TOKENS), np.int32)
    segments = np.zeros_like(tokens)
    for i, row in enumerate(rows):
        own = row[prompt_length:]
        prompts[i, :prompt_length] = row[:prompt_length]
        tokens[i, : len(own)], segments[i, : len(own)] = own, 1
    positions = np.broadcast_to(prompt_length + np.arange(ROW_TOKENS), tokens.shape)
    lengths = np.full(ROWS, prompt_length)
    out = _logits(config, params, prompts, lengths, np.arange(ROWS), tokens, segments, positions)
    return [np.asarray(one)[: len(row) - prompt_length] for one, row in zip(out, rows, strict=False)]


@partial(jax.jit, static_argnums=0)
def _logits(config, params, *batch):
    model = bind(config, params)
    return model.logits(packed(model, *batch))


class Letters(CharacterTokenizer):
    """As many tokens as a model has, none of which stops."""

    stop_ids = ()

    def __init__(self, vocab_size: int):
        super().__init__("".join(chr(0x4E00 + i) for i in range(vocab_size - 2)))


def greedy(
    config: ModelConfig, params: Params, prompts: list[np.ndarray], tokens: int, answer_tokens: int
) -> list[tuple[list[int], np.ndarray]]:
    """Greedy tokens and their log-probs after each prompt, through the real engine, `answer_tokens` a turn."""
    engine = Engine(
        config,
        Letters(config.vocab_size),
        SamplingRecord(1.0),
        answer_tokens=answer_tokens,
        prompt_tokens=max(len(prompt) for prompt in prompts) + 3,
        branch_tokens=tokens + 1,
        greedy=True,
    )
    rows = range(2 * len(prompts))
    session = engine.begin(params, prompts, 2, np.zeros((len(rows), 2), np.uint32))
    made: dict[int, tuple[list[int], list[float]]] = {row: ([], []) for row in rows}
    while len(made[0][0]) < tokens:
        for row, answer in session.answer({row: np.zeros(0, np.int32) for row in rows}).items():
            made[row][0].extend(answer.tokens.tolist())
            made[row][1].extend(answer.logprobs.tolist())
    assert all(made[row][0] == made[row + 1][0] for row in rows if row % 2 == 0)
    return [(made[row][0][:tokens], np.array(made[row][1][:tokens])) for row in rows if row % 2 == 0]

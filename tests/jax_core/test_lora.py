"""Adapters: which matrices get them, what they start as, and their gradient. Merging and export are tested beside the
checkpoints (`checkpoints/test_lora.py`)."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from jax_core.lora import adapted_paths, full_weights, init_adapters
from jax_core.models.config import ModelConfig
from jax_core.models.decoder import Params, param_shapes
from jax_core.models.families import read_config
from jax_core.trainer import Trainer
from schemas.errors import UserError
from schemas.recipe import LoraSection
from tests.jax_core.small_checkpoints import GOLDEN
from tests.jax_core.tiny import CONFIG, content, params, random_groups, recipe

ALPHA, RANK = 6.0, 3


def named(name: str) -> ModelConfig:
    return read_config(json.loads((GOLDEN / name / "config.json").read_text()))


def section(*targets: str, rank: int = RANK) -> LoraSection:
    return LoraSection(rank=rank, alpha=ALPHA, targets=targets or ("*",))


def weights(config: ModelConfig, seed: int = 0) -> Params:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), param_shapes(config))


def adapted(config: ModelConfig, *targets: str) -> set[str]:
    """Paths of the matrices that get adapters."""
    return {"/".join(path) for path, _ in adapted_paths(init_adapters(param_shapes(config), section(*targets), 0))}


def trained_a_little(adapters, seed: int = 0):
    """With a second factor that is no longer zero, so that every part of a gradient shows."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape).astype(np.float32), adapters)


def same(tree, other) -> bool:
    return jax.tree.all(jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), tree, other))


def trainer(base) -> Trainer:
    return Trainer(CONFIG, recipe(lora={"rank": RANK, "alpha": ALPHA}), base)


CONTENTS = [content(random_groups(np.random.default_rng(0)))]


def test_new_adapters_change_no_bit_of_any_weight():
    for config in (CONFIG, named("qwen3_moe")):
        base = weights(config)
        adapters = init_adapters(base, section(), 0)
        assert all(np.any(pair["a"]) for _, pair in adapted_paths(adapters))
        assert same(jax.jit(full_weights)(base, adapters, ALPHA), base)


def test_without_a_base_the_weights_are_what_is_trained():
    trained = params()
    assert full_weights(None, trained, ALPHA) is trained


def test_an_adapters_gradient_is_the_weights_gradient_by_the_chain_rule():
    """W' = W + s a b, so dL/da = s dL/dW' b^T and dL/db = s a^T dL/dW'; the gradient of W' is full fine-tuning's."""
    base = params()
    adapters = trained_a_little(init_adapters(base, section(), 0))
    loss, gradient = trainer(base).loss_and_gradient(adapters, CONTENTS, step=0)
    merged = jax.jit(full_weights)(base, adapters, ALPHA)
    full_loss, full = trainer(None).loss_and_gradient(merged, CONTENTS, step=0)
    assert loss == pytest.approx(full_loss, rel=1e-6) and loss != 0.0
    pairs, found = dict(adapted_paths(adapters)), dict(adapted_paths(gradient))
    assert pairs.keys() == found.keys() and len(pairs) == 7
    for path, pair in pairs.items():
        of_weight = np.asarray(full["blocks"][path[1]][path[2]], np.float64)  # [layers, in, out]
        a, b = (np.asarray(pair[name], np.float64) for name in ("a", "b"))
        for got, want in (
            (found[path]["a"], ALPHA / RANK * of_weight @ b.swapaxes(-1, -2)),
            (found[path]["b"], ALPHA / RANK * a.swapaxes(-1, -2) @ of_weight),
        ):
            assert np.abs(want).max() > 0
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-6 * np.abs(want).max())


def test_an_update_of_adapters_leaves_the_base_as_it_was():
    base = params()
    before = jax.tree.map(np.array, base)
    tuner = trainer(base)
    state = tuner.init(init_adapters(base, section(), 0))
    moved, _ = tuner.update(state, CONTENTS)
    assert same(base, before)
    assert jax.tree.structure(moved.params) == jax.tree.structure(state.params)
    assert not same(moved.params, state.params)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*/attention/*", {"attention/q", "attention/k", "attention/v", "attention/out"}),
        ("*/q", {"attention/q"}),
        ("*/mlp/*", {"mlp/gate", "mlp/up", "mlp/down"}),
        ("*/mlp/[ug]*", {"mlp/up", "mlp/gate"}),
    ],
)
def test_only_the_matrices_that_a_pattern_names_get_adapters(pattern, names):
    assert adapted(CONFIG, pattern) == {f"blocks/{name}" for name in names}


def test_several_patterns_add_up():
    assert adapted(CONFIG, "*/q", "*/down") == {"blocks/attention/q", "blocks/mlp/down"}


def test_every_matrix_of_every_block_has_one_by_default_but_no_norm_bias_embedding_or_router():
    experts = {"experts/gate", "experts/up", "experts/down"}
    attention = {"attention/q", "attention/k", "attention/v", "attention/out"}
    assert adapted(named("qwen3_moe")) == {f"blocks/{name}" for name in attention | experts}
    assert adapted(named("qwen2")) == adapted(CONFIG)  # biases of q, k, v have none
    mixture = adapted(named("gemma4_moe"))
    assert {"blocks/experts/up", "blocks/mlp/up", "blocks_1/attention/k"} <= mixture
    assert not [path for path in mixture if path.endswith(("scale", "bias", "router"))]


def test_each_expert_of_each_layer_has_factors_of_its_own():
    adapters = init_adapters(param_shapes(named("qwen3_moe")), section("*/experts/up"), 0)
    pair = adapters["blocks"]["experts"]["up"]
    assert (pair["a"].shape, pair["b"].shape) == ((3, 8, 64, RANK), (3, 8, RANK, 48))
    assert len(np.unique(np.asarray(pair["a"])[..., 0, 0])) == 3 * 8


def test_a_router_is_adapted_where_a_pattern_names_it():
    experts = {f"blocks/experts/{name}" for name in ("gate", "up", "down")}
    assert adapted(named("qwen3_moe"), "*/experts/*") == experts
    assert adapted(named("qwen3_moe"), "*/router") == {"blocks/experts/router"}


def test_a_pattern_that_names_nothing_is_refused_with_what_there_is():
    with pytest.raises(UserError) as caught:
        init_adapters(param_shapes(CONFIG), section("*/attention/*", "*/q_proj"), 0)
    assert caught.value.offender == "lora.targets: '*/q_proj'"
    assert "attention/q" in caught.value.way_out and "mlp/down" in caught.value.way_out


def test_adapters_are_a_pure_function_of_the_seed_and_of_their_own_weight():
    base = weights(CONFIG)
    made = init_adapters(base, section(), 5)
    assert same(made, init_adapters(weights(CONFIG, seed=1), section(), 5))  # of paths and shapes, not of the weights
    assert not same(made, init_adapters(base, section(), 6))
    alone = init_adapters(base, section("*/q"), 5)["blocks"]["attention"]["q"]
    assert same(alone, made["blocks"]["attention"]["q"])  # whatever else is adapted
    firsts = [np.asarray(pair["a"])[0, 0, 0] for _, pair in adapted_paths(made)]
    assert len(set(firsts)) == len(firsts)


def test_a_new_first_factor_keeps_the_size_of_what_it_multiplies():
    """Entries of a have the variance 1 / in, so x @ a is as large as x."""
    a = init_adapters({"blocks": {"q": np.zeros((1, 400, 8))}}, section(rank=200), 0)["blocks"]["q"]["a"]
    assert float(np.std(a)) == pytest.approx(400**-0.5, rel=0.02)

"""A mixture of experts: every token reaches its experts, whatever else is in the batch; and what is counted."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_core.models.config import ExpertsConfig, ModelConfig
from jax_core.models.decoder import init_params
from jax_core.models.experts import Load, Routing, balance_loss, load_of, mix_experts, route
from jax_core.models.families import read_config
from jax_core.trainer import Trainer
from tests.jax_core.tiny import CONFIG, VOCAB, content, random_groups, recipe
from tests.jax_core.tiny import params as dense_params

RNG = np.random.default_rng(3)
E, D, F = 5, 6, 7
WEIGHTS = [RNG.standard_normal(shape).astype(np.float32) for shape in ((E, D, F), (E, D, F), (E, F, D))]
MIXTURE = read_config(
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    }
)


def mix(x, chosen, weights):
    return np.asarray(jax.jit(mix_experts, static_argnums=6)(x, chosen, weights, *WEIGHTS, jax.nn.silu))


def one_by_one(x, chosen, weights):
    gate, up, down = (w.astype(np.float64) for w in WEIGHTS)
    out = np.zeros(x.shape)
    for token in range(len(x)):
        for expert, weight in zip(chosen[token], weights[token], strict=True):
            g = x[token] @ gate[expert]
            out[token] += weight * ((g / (1 + np.exp(-g)) * (x[token] @ up[expert])) @ down[expert])
    return out


def tokens(n: int, k: int = 2):
    x = RNG.standard_normal((n, D)).astype(np.float32)
    chosen = np.stack([RNG.permutation(E)[:k] for _ in range(n)]).astype(np.int32)
    return x, chosen, RNG.random((n, k)).astype(np.float32)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 2), (9, 2), (40, 5)])
def test_grouped_matmuls_are_each_tokens_own_experts(n, k):
    given = tokens(n, k)
    np.testing.assert_allclose(mix(*given), one_by_one(*given), atol=2e-5)


def test_no_token_is_dropped_when_all_choose_the_same_expert():
    x, _, weights = tokens(64, 1)
    chosen = np.full((64, 1), 3, np.int32)
    np.testing.assert_allclose(mix(x, chosen, weights), one_by_one(x, chosen, weights), atol=2e-5)


def test_a_token_gets_the_same_whichever_others_are_in_the_batch():
    x, chosen, weights = tokens(16)
    others = tokens(48)
    together = mix(*(np.concatenate(pair) for pair in zip((x, chosen, weights), others, strict=True)))
    np.testing.assert_allclose(together[:16], mix(x, chosen, weights), atol=1e-6)
    order = RNG.permutation(16)
    np.testing.assert_allclose(mix(x[order], chosen[order], weights[order]), mix(x, chosen, weights)[order], atol=1e-6)


def test_gradients_reach_tokens_weights_and_only_the_experts_that_were_chosen():
    x, _, weights = tokens(8, 1)
    chosen = np.array([[0], [2]] * 4, np.int32)
    loss = lambda x, weights, gate: jnp.sum(mix_experts(x, chosen, weights, gate, *WEIGHTS[1:], jax.nn.silu) ** 2)
    of_x, of_weights, of_gate = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, weights, WEIGHTS[0])
    assert (np.abs(of_x).sum(-1) > 0).all() and (np.abs(of_weights) > 0).all()
    assert [bool(np.abs(g).any()) for g in np.asarray(of_gate)] == [True, False, True, False, False]


def test_groups_limit_the_choice_and_the_correction_moves_it_without_weighing():
    #                 group 0     group 1     group 2
    logits = jnp.array([[2.0, 1.9, -9.0, 3.0, -9.0, -9.0]])
    config = ExpertsConfig(
        6, 2, 1, scores="sigmoid", normalize=False, groups=3, groups_per_token=1, correction_bias=True
    )
    _, weights, chosen = route(logits, config, jnp.zeros(6))
    assert sorted(chosen[0].tolist()) == [0, 1]  # the two best of group 0, though expert 3 is the best of all
    _, weights, chosen = route(logits, config, jnp.array([0.0, 0.0, 0.0, 0.0, 5.0, 0.0]))
    assert chosen[0].tolist() == [4, 5]
    np.testing.assert_allclose(weights[0], jax.nn.sigmoid(jnp.array([-9.0, -9.0])), rtol=1e-6)


def test_a_load_counts_real_tokens_alone():
    probabilities = jnp.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    chosen = jnp.array([[0, 1], [0, 1], [2, 0]])
    load = load_of(Routing(probabilities, chosen), jnp.array([True, True, False]))
    assert load.tokens == 2
    assert load.chosen.tolist() == [2, 2, 0]
    assert load.probability.tolist() == [1.5, 0.5, 0.0]
    np.testing.assert_allclose(load.entropy, np.log(2), rtol=1e-6)


def test_the_balance_loss_is_one_when_even_and_the_number_of_experts_when_all_go_to_one():
    even = Load(jnp.float32(8), jnp.full(4, 4.0), jnp.full(4, 2.0), jnp.float32(0))
    one = Load(jnp.float32(8), jnp.array([8.0, 0, 0, 0]), jnp.array([8.0, 0, 0, 0]), jnp.float32(0))
    assert balance_loss(even) == 1.0
    assert balance_loss(one) == 4.0


def trainer(config: ModelConfig = MIXTURE, **sections) -> Trainer:
    return Trainer(config, recipe(**sections))


def test_the_trainer_measures_its_routers_whatever_the_micro_batches():
    contents = [content(random_groups(np.random.default_rng(0)))]
    params = init_params(MIXTURE, 0)
    seen = []
    for rows in (2, 32):
        one = trainer(trainer={"micro_batch_rows": rows})
        seen.append(one.update(one.init(params), contents)[1])
    few, many = ({k: v for k, v in metrics.items() if "router_load" in k or "router_dropped" in k} for metrics in seen)
    assert many["trainer/router_dropped_tokens"] == 0
    assert few["trainer/router_dropped_tokens"] == 0
    assert 1 < many["trainer/router_load/max"] <= 2
    assert seen[1]["trainer/router_idle_experts/fraction"] == 0
    assert 0 < seen[1]["trainer/router_entropy_nats/mean"] < np.log(4)
    assert seen[1]["trainer/router_balance/mean"] >= 0.9


def test_a_dense_model_has_no_router_metrics():
    one = trainer(CONFIG)
    _, metrics = one.update(one.init(dense_params()), [content(random_groups(np.random.default_rng(0)))])
    assert [name for name in metrics if "router" in name] == []


def test_the_balance_loss_evens_the_routers():
    groups = random_groups(np.random.default_rng(0))
    params = init_params(MIXTURE, 0)
    first, last = {}, {}
    for weight in (0.0, 10.0):
        section = {"micro_batch_rows": 32, "optimizer": {"learning_rate": 0.01, "schedule": "constant"}}
        one = trainer(replace(MIXTURE, router_balance=weight), trainer=section)
        state = one.init(params)
        for _ in range(8):
            state, metrics = one.update(state, [content(groups)])
            first.setdefault(weight, metrics)
        last[weight] = metrics
    name = "trainer/router_balance/mean"
    assert first[0.0][name] == first[10.0][name]
    np.testing.assert_allclose(
        first[10.0]["trainer/loss"] - first[0.0]["trainer/loss"], 10 * first[0.0][name], rtol=1e-4
    )
    assert last[10.0][name] < first[10.0][name]
    assert last[10.0][name] < last[0.0][name]


def test_an_update_of_a_mixture_is_the_same_for_any_packing():
    groups = random_groups(np.random.default_rng(0))
    params = init_params(MIXTURE, 0)
    one_a_row = trainer().loss_and_gradient(params, [content(groups, one_a_row=True)], 0)
    dense = trainer().loss_and_gradient(params, [content(groups)], 0)
    np.testing.assert_allclose(dense[0], one_a_row[0], rtol=2e-6)
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(dense[1]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6 * scale), dense[1], one_a_row[1])

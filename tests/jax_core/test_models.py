"""The decoder against a reference implementation (golden/tiny_llama.npz: Hugging Face Llama, float32)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_core.models.config import ModelConfig
from jax_core.models.decoder import bind, init_params
from jax_core.models.passes import packed
from schemas.recipe import ModelSection
from tests.jax_core.small_checkpoints import greedy, logits

GOLDEN = np.load(Path(__file__).parent / "golden" / "tiny_llama.npz")
CONFIG = ModelConfig.llama(64, 2, 32, 4, 2, 8, 64, 1e6, 1e-5, True)
_PARTS = {
    ("attention", "q"): "self_attn.q_proj",
    ("attention", "k"): "self_attn.k_proj",
    ("attention", "v"): "self_attn.v_proj",
    ("attention", "out"): "self_attn.o_proj",
    ("mlp", "gate"): "mlp.gate_proj",
    ("mlp", "up"): "mlp.up_proj",
    ("mlp", "down"): "mlp.down_proj",
    ("attention_norm", "scale"): "input_layernorm",
    ("mlp_norm", "scale"): "post_attention_layernorm",
}


def golden_params(kind: str) -> dict:
    """Reference weights ("w") or gradients ("g") in our layout: matrices transposed, layers stacked."""
    blocks: dict = {}
    for (part, name), theirs in _PARTS.items():
        layers = [GOLDEN[f"{kind}/model.layers.{i}.{theirs}.weight"].T for i in range(CONFIG.layers)]
        blocks.setdefault(part, {})[name] = np.stack(layers)
    return {
        "embedding": GOLDEN[f"{kind}/model.embed_tokens.weight"],
        "blocks": blocks,
        "final_norm": {"scale": GOLDEN[f"{kind}/model.norm.weight"]},
    }


def real_tokens(row: int) -> np.ndarray:
    return GOLDEN["input_ids"][row][GOLDEN["attention_mask"][row] > 0]


@pytest.mark.parametrize("prompt_length", [0, 1, 4])
def test_logits_are_those_of_the_reference_with_and_without_a_shared_prompt(prompt_length):
    found = logits(CONFIG, golden_params("w"), [real_tokens(row) for row in range(3)], prompt_length)
    for row in range(3):
        expected = GOLDEN["logits"][row][GOLDEN["attention_mask"][row] > 0]
        np.testing.assert_allclose(found[row], expected[prompt_length:], atol=2e-5)


def test_gradients_are_those_of_the_reference():
    rows = [real_tokens(row) for row in range(3)]
    real = np.arange(max(map(len, rows))) < np.array([len(row) for row in rows])[:, None]
    ids = np.zeros(real.shape, np.int32)
    ids[real] = np.concatenate(rows)
    no_prompts = np.zeros((3, 1), np.int32), np.zeros(3, np.int32), np.arange(3)
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)

    def nll(params):
        model = bind(CONFIG, params)
        hidden = packed(model, *no_prompts, jnp.asarray(ids), jnp.asarray(real, jnp.int32), positions)
        logprobs = jax.nn.log_softmax(model.logits(hidden)[:, :-1])
        losses = -jnp.take_along_axis(logprobs, ids[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(losses, where=real[:, 1:])

    loss, gradient = jax.jit(jax.value_and_grad(nll))(jax.tree.map(jnp.asarray, golden_params("w")))
    np.testing.assert_allclose(loss, GOLDEN["nll"], atol=1e-6)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-6), gradient, golden_params("g"))


@pytest.mark.parametrize("answer_tokens", [1, 20])
def test_greedy_tokens_are_those_of_the_reference_batched_and_padded(answer_tokens):
    prompts = [real_tokens(row) for row in range(3)]
    made = greedy(CONFIG, golden_params("w"), prompts, 20, answer_tokens)
    assert [tokens for tokens, _ in made] == GOLDEN["greedy20"].tolist()


def test_random_weights_are_a_pure_function_of_the_seed():
    config = ModelConfig.from_recipe(ModelSection(), vocab_size=22)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), init_params(config, 3), init_params(config, 3))
    assert all(jax.tree.leaves(same))
    assert not (init_params(config, 3)["embedding"] == init_params(config, 4)["embedding"]).all()


@pytest.mark.parametrize("tied", [True, False])
def test_an_untied_head_is_a_matrix_of_its_own(tied):
    config = ModelConfig.from_recipe(ModelSection(tied_head=tied), vocab_size=22)
    assert ("head" in init_params(config, 0)) is not tied

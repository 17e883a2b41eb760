"""The decoder against a reference implementation (golden/tiny_llama.npz: Hugging Face Llama, float32)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_core.models.config import ModelConfig
from jax_core.models.decoder import bind, init_params
from jax_core.models.passes import packed
from jax_core.sampling.engine import Engine
from jax_core.tokenizers import CharacterTokenizer
from schemas.recipe import ModelSection
from schemas.records import SamplingRecord

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


def logits(params: dict, tokens: np.ndarray, prompt_length: int = 0) -> jax.Array:
    """Logits [T, V] of one sequence, its first tokens as a shared prompt."""
    shared, own = tokens[:prompt_length], tokens[prompt_length:]
    model = bind(CONFIG, params)
    padded = np.zeros((1, max(1, prompt_length)), np.int32)
    padded[0, :prompt_length] = shared
    hidden = packed(
        model,
        jnp.asarray(padded),
        jnp.array([prompt_length]),
        jnp.array([0]),
        jnp.asarray(own)[None],
        jnp.ones((1, len(own)), jnp.int32),
        jnp.arange(prompt_length, len(tokens))[None],
    )
    return model.logits(hidden)[0]


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("prompt_length", [0, 1, 4])
def test_logits_are_those_of_the_reference_with_and_without_a_shared_prompt(row, prompt_length):
    tokens = real_tokens(row)
    expected = GOLDEN["logits"][row][GOLDEN["attention_mask"][row] > 0]
    np.testing.assert_allclose(logits(golden_params("w"), tokens, prompt_length), expected[prompt_length:], atol=2e-5)


def test_gradients_are_those_of_the_reference():
    def nll(params):
        losses = []
        for row in range(3):
            tokens = real_tokens(row)
            logprobs = jax.nn.log_softmax(logits(params, tokens))
            losses.append(-logprobs[jnp.arange(len(tokens) - 1), tokens[1:]])
        return jnp.mean(jnp.concatenate(losses))

    loss, gradient = jax.jit(jax.value_and_grad(nll))(jax.tree.map(jnp.asarray, golden_params("w")))
    np.testing.assert_allclose(loss, GOLDEN["nll"], atol=1e-6)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-6), gradient, golden_params("g"))


@pytest.mark.parametrize("answer_tokens", [1, 20])
def test_greedy_tokens_are_those_of_the_reference_batched_and_padded(answer_tokens):
    class NoStops(CharacterTokenizer):
        stop_ids = ()

    tokenizer = NoStops("".join(chr(65 + i) for i in range(62)))
    engine = Engine(
        CONFIG,
        tokenizer,
        SamplingRecord(1.0),
        answer_tokens=answer_tokens,
        prompt_tokens=14,
        branch_tokens=32,
        greedy=True,
    )
    session = engine.begin(golden_params("w"), [real_tokens(r) for r in range(3)], 2, np.zeros((6, 2), np.uint32))
    got = {row: [] for row in range(6)}
    while len(got[0]) < 20:
        for row, answer in session.answer({row: np.zeros(0, np.int32) for row in range(6)}).items():
            got[row] += answer.tokens.tolist()
    assert [got[2 * r] for r in range(3)] == [got[2 * r + 1] for r in range(3)] == GOLDEN["greedy20"].tolist()


def test_random_weights_are_a_pure_function_of_the_seed():
    config = ModelConfig.from_recipe(ModelSection(), vocab_size=22)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), init_params(config, 3), init_params(config, 3))
    assert all(jax.tree.leaves(same))
    assert not (init_params(config, 3)["embedding"] == init_params(config, 4)["embedding"]).all()


@pytest.mark.parametrize("tied", [True, False])
def test_an_untied_head_is_a_matrix_of_its_own(tied):
    config = ModelConfig.from_recipe(ModelSection(tied_head=tied), vocab_size=22)
    assert ("head" in init_params(config, 0)) is not tied

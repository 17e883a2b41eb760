"""Every golden checkpoint against transformers 5.24 (float32, eager attention), in all the ways that we run a model."""

import jax
import numpy as np
import pytest

from tests.jax_core.small_checkpoints import GOLDEN, golden, greedy, logits

pytestmark = pytest.mark.usefixtures("hardly_optimized")

NAMES = sorted(path.name for path in GOLDEN.iterdir())


def real_rows(expected) -> list[np.ndarray]:
    return [ids[mask] for ids, mask in zip(expected["input_ids"], expected["attention_mask"], strict=True)]


def real_logits(expected) -> list[np.ndarray]:
    return [row[mask] for row, mask in zip(expected["logits"], expected["attention_mask"], strict=True)]


def test_there_is_a_golden_checkpoint_of_these_families():
    assert NAMES == ["gemma3", "gemma4_moe", "llama", "llama3_rope_scaling_tied", "qwen2", "qwen3", "qwen3_moe"]


@pytest.mark.parametrize("prompt_length", [0, 12])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_reference_batched_padded_and_with_a_shared_prompt(name, prompt_length):
    config, params, expected = golden(name)
    rows = real_rows(expected)
    for got, want in zip(logits(config, params, rows, prompt_length), real_logits(expected), strict=True):
        np.testing.assert_allclose(got, want[prompt_length:], atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_alone_has_the_logits_that_it_has_in_a_batch(name):
    config, params, expected = golden(name)
    want = real_logits(expected)[1]
    np.testing.assert_allclose(logits(config, params, real_rows(expected)[1:])[0], want, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_next_token_logprobs_are_those_of_the_reference(name):
    config, params, expected = golden(name)
    ids = expected["input_ids"][0]
    scores = jax.nn.log_softmax(logits(config, params, [ids])[0])
    got = np.take_along_axis(np.asarray(scores)[:-1], ids[1:, None], axis=1)[:, 0]
    np.testing.assert_allclose(got, expected["next_token_logprobs"][0], atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_the_reference_in_several_answers_of_a_ragged_batch(name):
    """And the log-probs are those that training computes: the importance ratio of an on-policy token is 1."""
    config, params, expected = golden(name)
    prompt, want = expected["greedy_from_12"][0][:12], expected["greedy_from_12"][0][12:].tolist()
    others = [expected["input_ids"][1][:15], expected["input_ids"][0][:2]]
    tokens, logprobs = greedy(config, params, [others[0], prompt, others[1]], 16, answer_tokens=6)[1]
    assert tokens == want
    whole = np.array([*prompt, *tokens])
    scores = np.asarray(jax.nn.log_softmax(logits(config, params, [whole[:-1]], prompt_length=11)[0]))
    np.testing.assert_allclose(scores[np.arange(16), tokens], logprobs, atol=2e-5)

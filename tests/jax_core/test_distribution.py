"""The distribution that a token is drawn from, and the draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_core.sampling.distribution import draw, sampling_logprobs
from schemas.identity import seed_words
from schemas.records import SamplingRecord

PROBABILITIES = np.array([0.5, 0.2, 0.2, 0.06, 0.04])
LOGITS = jnp.log(jnp.array(PROBABILITIES))


def kept(**sampling) -> list[int]:
    logprobs = sampling_logprobs(LOGITS, SamplingRecord(1.0, **sampling))
    return np.flatnonzero(np.isfinite(logprobs)).tolist()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_temperature_divides_the_logits(temperature):
    expected = PROBABILITIES ** (1 / temperature)
    got = np.exp(sampling_logprobs(LOGITS, SamplingRecord(temperature)))
    np.testing.assert_allclose(got, expected / expected.sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"top_k": 1}, [0]),
        ({"top_k": 2}, [0, 1, 2]),  # a tie at the k-th: neither is more likely, so both stay
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.01}, [0]),  # never empty
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.95}, [0, 1, 2, 3]),
        ({"min_p": 0.3}, [0, 1, 2]),
        ({"min_p": 0.1}, [0, 1, 2, 3]),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.45}, [0]),
    ],
)
def test_truncation_keeps_the_right_tokens_and_renormalises(sampling, expected):
    assert kept(**sampling) == expected
    probabilities = np.exp(sampling_logprobs(LOGITS, SamplingRecord(1.0, **sampling)))
    np.testing.assert_allclose(probabilities.sum(), 1.0, rtol=1e-6)
    np.testing.assert_allclose(
        probabilities[expected] / PROBABILITIES[expected], 1 / PROBABILITIES[expected].sum(), 1e-5
    )


def test_draws_follow_the_distribution():
    draws = 20_000
    seeds = np.array([seed_words("tokens", i) for i in range(draws)], np.uint32)
    tokens = draw(jnp.broadcast_to(LOGITS, (draws, 5)), seeds, jnp.zeros(draws, jnp.int32))
    frequencies = np.bincount(tokens, minlength=5) / draws
    assert np.abs(frequencies - PROBABILITIES).max() < 4 * np.sqrt(0.25 / draws)


def test_a_draw_depends_on_its_own_seed_and_position_alone():
    seeds = np.array([seed_words("tokens", i) for i in range(64)], np.uint32)
    positions = jnp.arange(64, dtype=jnp.int32)
    logprobs = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (64, 5)))
    together = draw(logprobs, seeds, positions)
    backwards = draw(logprobs[::-1], seeds[::-1], positions[::-1])[::-1]
    alone = [int(draw(logprobs[i : i + 1], seeds[i : i + 1], positions[i : i + 1])[0]) for i in range(64)]
    assert together.tolist() == backwards.tolist() == alone
    assert together.tolist() != draw(logprobs, seeds, positions + 1).tolist()

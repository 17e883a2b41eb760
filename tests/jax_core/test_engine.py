"""Sampling: what a row says depends on nothing but its own words, its seed and the weights."""

import jax
import numpy as np
import pytest

from jax_core.sampling import engine as decoding
from jax_core.sampling.engine import Engine
from jax_core.tokenizers import CharacterTokenizer
from jax_core.trainer import Trainer
from schemas.records import SamplingRecord
from tests.jax_core.tiny import ALPHABET, CONFIG, content, params, recipe, rollout, seeds

TOKENIZER = CharacterTokenizer(ALPHABET)
NOTHING = np.zeros(0, np.int32)
PROMPTS = [np.array(p, np.int32) for p in ([2, 3, 4, 5, 6], [7], [9, 8, 9, 8, 9, 8, 9, 8])]


def engine(temperature=1.0, answer_tokens=3, **options) -> Engine:
    options = {"prompt_tokens": 12, "branch_tokens": 64} | options
    return Engine(CONFIG, TOKENIZER, SamplingRecord(temperature), answer_tokens=answer_tokens, **options)


def converse(sampler, weights, prompts, samples, row_seeds, words):
    """Episodes that end when `words(row, turn)` is None. Per row: branch ids, mask and log-probs."""
    session = sampler.begin(weights, prompts, samples, row_seeds)
    rows = {row: ([], [], []) for row in range(len(prompts) * samples)}
    pending = {row: NOTHING for row in rows}
    turn = 0
    while pending:
        for row, answer in session.answer(pending).items():
            ids, mask, logprobs = rows[row]
            ids += [*pending[row], *answer.tokens]
            mask += [False] * len(pending[row]) + [True] * len(answer.tokens)
            logprobs += [0.0] * len(pending[row]) + answer.logprobs.tolist()
        turn += 1
        said = {row: words(row, turn) for row in pending}
        pending = {row: np.asarray(text, np.int32) for row, text in said.items() if text is not None}
    return rows


def ragged(row: int, turn: int):
    """Environment text of uneven lengths; rows leave at different turns."""
    return None if turn >= 1 + row % 4 else [2 + (row + turn) % 18] * ((row + turn) % 3)


@pytest.mark.parametrize(("temperature", "answer_tokens"), [(0.5, 3), (1.0, 1), (1.3, 3)])
def test_on_policy_the_ratio_of_every_token_is_one_over_several_turns(temperature, answer_tokens):
    weights = params()
    rows = converse(engine(temperature, answer_tokens), weights, PROMPTS, 4, seeds(12), ragged)
    groups = [
        [(rollout(PROMPTS[g], *rows[4 * g + s], group=g, sample=s), 0.0) for s in range(4)] for g in range(len(PROMPTS))
    ]
    trainer = Trainer(CONFIG, recipe(sampling={"temperature": temperature}, rollout={"branch_tokens": 24}))
    scored = trainer.score(weights, [content(groups)])
    for logprobs, (made, _) in zip(scored, [sample for group in groups for sample in group], strict=True):
        assert made.loss_mask.any()
        np.testing.assert_allclose(np.exp(logprobs - made.sampler_logprobs), 1.0, atol=1e-5)


def test_rows_do_not_see_each_other():
    weights = params()
    together = converse(engine(), weights, PROMPTS, 4, seeds(12), ragged)
    for prompt in range(len(PROMPTS)):
        own = seeds(12)[4 * prompt : 4 * prompt + 4]
        alone = converse(engine(), weights, [PROMPTS[prompt]], 4, own, lambda r, t, p=prompt: ragged(4 * p + r, t))
        for sample in range(4):
            ids, mask, logprobs = together[4 * prompt + sample]
            assert alone[sample][:2] == (ids, mask)
            np.testing.assert_allclose(alone[sample][2], logprobs, atol=1e-5)


def test_a_run_repeats_bit_for_bit_and_samples_of_a_group_differ():
    first, again, other = (converse(engine(), params(), PROMPTS, 8, seeds(24, run), ragged) for run in (0, 0, 1))
    assert first == again
    assert first != other
    assert len({tuple(first[row][0][:3]) for row in range(8)}) > 1


def test_retiring_rows_changes_no_other_row():
    """512 rows, of which ever fewer stay, so that they are moved together twice."""
    stays = lambda row, turn: NOTHING if turn < 6 and row % 2**turn == 0 else None
    everyone = lambda row, turn: NOTHING if turn < 6 else None
    few = converse(engine(), params(), PROMPTS[:2], 256, seeds(512), stays)
    all_rows = converse(engine(), params(), PROMPTS[:2], 256, seeds(512), everyone)
    for row in range(512):
        n = len(few[row][0])
        assert few[row][0] == all_rows[row][0][:n]
        np.testing.assert_allclose(few[row][2], all_rows[row][2][:n], atol=1e-5)


def test_a_retired_row_cannot_come_back():
    session = engine().begin(params(), PROMPTS[:1], 2, seeds(2))
    session.answer({0: NOTHING})
    with pytest.raises(ValueError, match="retired"):
        session.answer({0: NOTHING, 1: NOTHING})


def test_long_answers_are_the_same_tokens_as_many_short_ones():
    go_on = lambda row, turn: NOTHING
    stop_after = lambda turns: lambda row, turn: go_on(row, turn) if turn < turns else None
    sampler = {n: NoStops(n) for n in (1, 2, 6)}
    got = [converse(sampler[n], params(), PROMPTS, 2, seeds(6), stop_after(6 // n)) for n in (1, 2, 6)]
    for row in range(6):
        assert got[0][row][0] == got[1][row][0] == got[2][row][0]
        np.testing.assert_allclose(got[0][row][2], got[2][row][2], atol=1e-5)


def NoStops(answer_tokens: int) -> Engine:
    class Tokenizer(CharacterTokenizer):
        stop_ids = ()

    return Engine(
        CONFIG,
        Tokenizer(ALPHABET),
        SamplingRecord(1.0),
        answer_tokens=answer_tokens,
        prompt_tokens=12,
        branch_tokens=64,
    )


def test_a_sampled_eos_ends_the_answer_and_is_part_of_it():
    rows = 256
    answers = (
        engine(answer_tokens=8)
        .begin(params(), PROMPTS[:1], rows, seeds(rows))
        .answer(dict.fromkeys(range(rows), NOTHING))
    )
    stopped = [a for a in answers.values() if a.stop == "stop_token"]
    assert stopped and len(stopped) < rows
    for answer in answers.values():
        assert len(answer.tokens) == len(answer.logprobs)
        assert (answer.tokens == TOKENIZER.eos_id).sum() == (answer.stop == "stop_token")
        assert answer.stop == ("stop_token" if answer.tokens[-1] == TOKENIZER.eos_id else "max_tokens")
        assert answer.stop == "stop_token" or len(answer.tokens) == 8


def test_a_stop_string_ends_the_answer_and_what_was_sampled_behind_it_is_forgotten():
    sampler = engine(answer_tokens=6, stop_strings=("a", "bc"))
    go_on = lambda row, turn: NOTHING if turn < 3 else None
    rows = converse(sampler, params(), PROMPTS, 16, seeds(48), go_on)
    first = sampler.begin(params(), PROMPTS, 16, seeds(48)).answer(dict.fromkeys(range(48), NOTHING))
    cut = [row for row, answer in first.items() if answer.stop == "stop_string" and len(answer.tokens) < 6]
    assert cut
    for row in cut:
        text = TOKENIZER.decode(first[row].tokens)
        assert text.endswith(("a", "bc")) and "a" not in text[:-1] and "bc" not in text[:-1]
    made = [[(rollout(PROMPTS[r // 16], *rows[r], group=r // 16, sample=r % 16), 0.0) for r in cut]]
    for row, one in zip(cut, made[0], strict=True):
        scored = Trainer(CONFIG, recipe()).score(params(), [content([[one]])])[0]
        np.testing.assert_allclose(scored, one[0].sampler_logprobs, atol=1e-5, err_msg=f"row {row}")


def test_new_weights_give_new_logprobs_of_the_same_prompt():
    sampler = engine()
    old, new = (converse(sampler, params(seed), PROMPTS[:1], 4, seeds(4), lambda r, t: None) for seed in (0, 1))
    fresh = converse(engine(), params(1), PROMPTS[:1], 4, seeds(4), lambda r, t: None)
    assert old != new
    assert new == fresh


def test_greedy_takes_the_most_likely_token_of_every_row():
    rows = converse(engine(greedy=True), params(), PROMPTS, 3, seeds(9), lambda r, t: NOTHING if t < 3 else None)
    for group in range(3):
        assert rows[3 * group][0] == rows[3 * group + 1][0] == rows[3 * group + 2][0]


def test_a_prompt_that_is_too_long_is_refused_rather_than_cut():
    with pytest.raises(ValueError, match="the engine takes 1 to 12"):
        engine().begin(params(), [np.arange(2, 15, dtype=np.int32)], 1, seeds(1))


def test_a_prompt_is_computed_once_a_group_and_an_answer_is_one_compiled_call(monkeypatch):
    calls = []

    def counted(name):
        compiled = getattr(decoding, name)
        monkeypatch.setattr(decoding, name, lambda *given: (calls.append((name, given)), compiled(*given))[1])

    counted("_prefill")
    counted("_decode")
    session = engine().begin(params(), PROMPTS, 4, seeds(12))
    for _ in range(2):
        session.answer(dict.fromkeys(range(12), NOTHING))
    assert [name for name, _ in calls] == ["_prefill", "_decode", "_decode"]
    assert calls[0][1][2].shape[0] == len(PROMPTS), "not once for each of the 12 rows"


def test_swapping_weights_compiles_nothing_again():
    sampler = engine()
    run = lambda seed: converse(sampler, params(seed), PROMPTS, 4, seeds(12), ragged)
    run(0)
    compiled = decoding._decode._cache_size()
    run(1)
    assert decoding._decode._cache_size() == compiled
    assert jax.tree.leaves(params(0))[0].shape == jax.tree.leaves(params(1))[0].shape

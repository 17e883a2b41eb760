"""Sessions decoded together: each says what it would say alone, and nobody waits for anybody but a call in progress."""

import gc
import random
import threading
import time
import weakref

import jax
import numpy as np
import pytest

from jax_core.sampling import engine as decoding
from jax_core.sampling.engine import Engine
from jax_core.sampling.shared import SharedEngine, _Shape, _Shapes
from jax_core.trainer import Trainer
from schemas.records import SamplingRecord
from tests.jax_core.test_engine import NOTHING, PROMPTS, TOKENIZER, converse, ragged
from tests.jax_core.tiny import CONFIG, content, params, recipe, rollout, seeds

SAMPLES = 4
AMPLE = 240.0  # seconds a test may take where something hangs, not what it takes


class Watched(Engine):
    """Notes how many rows each call decodes, and lets a test do something before the call."""

    def __init__(self, answer_tokens=3, **options):
        options = {"prompt_tokens": 12, "branch_tokens": 64} | options
        super().__init__(CONFIG, TOKENIZER, SamplingRecord(1.0), answer_tokens=answer_tokens, **options)
        self.calls: list[int] = []
        self.before_call = lambda number: None

    def decode(self, params, prefix, cache, column, chunk, lengths, *state):
        self.calls.append(int((lengths > 0).sum()))
        self.before_call(len(self.calls))
        return super().decode(params, prefix, cache, column, chunk, lengths, *state)


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for row, (ids, mask, logprobs) in expected.items():
        assert got[row][:2] == (ids, mask), f"row {row}"
        np.testing.assert_allclose(got[row][2], logprobs, atol=1e-5)


class Talk:
    """One session's conversation, turn by turn, so that a test can interleave several in one thread."""

    def __init__(self, sampler, weights, prompts, row_seeds, words, samples=SAMPLES):
        self._words = words
        self._turn = 0
        self.session = sampler.begin(weights, prompts, samples, row_seeds)
        self.rows = {row: ([], [], []) for row in range(len(prompts) * samples)}
        self.pending = dict.fromkeys(self.rows, NOTHING)

    def turn(self) -> bool:
        """Takes a turn; whether there is another."""
        for row, answer in self.session.answer(self.pending).items():
            ids, mask, logprobs = self.rows[row]
            ids += [*self.pending[row], *answer.tokens]
            mask += [False] * len(self.pending[row]) + [True] * len(answer.tokens)
            logprobs += [0.0] * len(self.pending[row]) + answer.logprobs.tolist()
        self._turn += 1
        said = {row: self._words(row, self._turn) for row in self.pending}
        self.pending = {row: np.asarray(text, np.int32) for row, text in said.items() if text is not None}
        return bool(self.pending)

    def finish(self):
        while self.turn():
            pass
        self.session.close()
        return self.rows


def in_threads(jobs):
    """What each job returned, or raised; all at once."""
    results = [None] * len(jobs)

    def work(index):
        try:
            results[index] = jobs[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(AMPLE)
        assert not thread.is_alive(), "hangs"
    return results


def wait_until(condition):
    give_up_at = time.monotonic() + AMPLE
    while not condition():
        assert time.monotonic() < give_up_at, "waited in vain"
        time.sleep(0.001)


def waiting(shared):
    """Sessions that wait for an answer while a call is decoded."""
    return sum(len(batch._waiting) for batch in list(shared._batches.values()))


def hold_first_call_until(engine, condition):
    engine.before_call = lambda number: wait_until(condition) if number == 1 else None


# Tokens


@pytest.mark.parametrize("answer_tokens", [1, 3])
def test_a_session_alone_says_what_a_plain_one_says(answer_tokens):
    plain = converse(Watched(answer_tokens), params(), PROMPTS, SAMPLES, seeds(12), ragged)
    assert_same(Talk(SharedEngine(Watched(answer_tokens)), params(), PROMPTS, seeds(12), ragged).finish(), plain)


def test_what_a_stop_string_cuts_off_is_forgotten():
    options = {"answer_tokens": 6, "stop_strings": ("a", "bc")}
    go_on = lambda row, turn: NOTHING if turn < 3 else None
    plain = converse(Watched(**options), params(), PROMPTS, SAMPLES, seeds(12), go_on)
    assert_same(Talk(SharedEngine(Watched(**options)), params(), PROMPTS, seeds(12), go_on).finish(), plain)


def test_the_few_rows_that_are_left_of_many_say_the_same_without_the_others():
    stays = lambda row, turn: NOTHING if turn < 5 and row % 3**turn == 0 else None
    plain = converse(Watched(), params(), PROMPTS[:2], 32, seeds(64), stays)
    assert_same(Talk(SharedEngine(Watched()), params(), PROMPTS[:2], seeds(64), stays, samples=32).finish(), plain)


def words_of(session):
    """Environment text of other lengths in each session; its rows leave at different turns."""
    return lambda row, turn: ragged(row + 3 * session, turn)


def test_sessions_join_in_the_middle_rest_and_leave_early_and_each_says_what_it_says_alone():
    weights, draw = params(), random.Random(0)
    alone = [converse(Watched(), weights, PROMPTS, SAMPLES, seeds(12, s), words_of(s)) for s in range(6)]
    shared = SharedEngine(Watched())
    to_come, talking, said = list(range(6)), {}, {}
    while to_come or talking:
        if to_come and (not talking or draw.random() < 0.4):
            session = to_come.pop(0)
            talking[session] = Talk(shared, weights, PROMPTS, seeds(12, session), words_of(session))
        session = draw.choice(list(talking))  # the others rest meanwhile
        if not talking[session].turn():
            said[session] = talking.pop(session).rows
    for session in range(6):
        assert_same(said[session], alone[session])


def test_many_threads_get_the_same_tokens_in_fewer_calls():
    weights = params()
    alone = [converse(Watched(), weights, PROMPTS, SAMPLES, seeds(12, s), words_of(s)) for s in range(6)]
    engine = Watched()
    shared = SharedEngine(engine)
    asked = []

    def play(session):
        def turns():
            draw = random.Random(session)
            talk = Talk(shared, weights, PROMPTS, seeds(12, session), words_of(session))
            hold_first_call_until(engine, lambda: waiting(shared) >= 2)
            while True:
                asked.append(session)
                if not talk.turn():
                    talk.session.close()
                    return talk.rows
                time.sleep(draw.random() / 100)  # an environment that takes its time

        return turns

    for session, rows in enumerate(in_threads([play(session) for session in range(6)])):
        assert_same(rows, alone[session])
    assert len(engine.calls) < len(asked)


@pytest.mark.parametrize("answer_tokens", [1, 3])
def test_on_policy_the_ratio_of_every_token_is_one_whoever_was_in_the_call(answer_tokens):
    weights = params()
    shared = SharedEngine(Watched(answer_tokens))
    talks = [Talk(shared, weights, PROMPTS, seeds(12, session), words_of(session)) for session in range(3)]
    trainer = Trainer(CONFIG, recipe(rollout={"branch_tokens": 24}))
    for rows in in_threads([talk.finish for talk in talks]):
        groups = [
            [(rollout(PROMPTS[g], *rows[SAMPLES * g + s], group=g, sample=s), 0.0) for s in range(SAMPLES)]
            for g in range(len(PROMPTS))
        ]
        scored = trainer.score(weights, [content(groups)])
        for logprobs, (made, _) in zip(scored, [sample for group in groups for sample in group], strict=True):
            assert made.loss_mask.any()
            np.testing.assert_allclose(np.exp(logprobs - made.sampler_logprobs), 1.0, atol=1e-5)


# Calls


def test_sessions_that_ask_while_a_call_is_decoded_are_the_next_call_together():
    engine = Watched()
    shared = SharedEngine(engine)
    weights = params()
    sessions = [shared.begin(weights, PROMPTS, SAMPLES, seeds(12, number)) for number in range(5)]
    hold_first_call_until(engine, lambda: waiting(shared) == 4)
    everyone = dict.fromkeys(range(12), NOTHING)
    in_threads([lambda session=session: session.answer(everyone) for session in sessions])
    assert engine.calls == [12, 4 * 12]
    assert sorted(session.sessions_in_call for session in sessions) == [1, 4, 4, 4, 4]


def test_rows_that_wait_for_their_environment_hold_nobody_up_and_are_not_computed():
    engine = Watched()
    shared = SharedEngine(engine)
    weights = params()
    resting, going_on = (shared.begin(weights, PROMPTS, SAMPLES, seeds(12, number)) for number in range(2))
    everyone = dict.fromkeys(range(12), NOTHING)
    resting.answer(everyone)
    for _ in range(3):
        going_on.answer(everyone)
    assert engine.calls == [12] * 4


def test_an_error_of_a_call_reaches_every_session_in_it_and_no_other():
    def fail(number):
        if number == 1:
            wait_until(lambda: waiting(shared) == 2)
        if number == 2:
            raise MemoryError("out of device memory")

    engine = Watched()
    shared = SharedEngine(engine)
    weights = params()
    everyone = dict.fromkeys(range(12), NOTHING)
    sessions = [shared.begin(weights, PROMPTS, SAMPLES, seeds(12, number)) for number in range(3)]
    engine.before_call = fail
    outcomes = in_threads([lambda session=session: session.answer(everyone) for session in sessions])
    failed = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, MemoryError)]
    (unhurt,) = set(range(3)) - set(failed)
    assert len(failed) == 2
    plain = Watched().begin(weights, PROMPTS, SAMPLES, seeds(12, unhurt))
    for answers in (outcomes[unhurt], sessions[unhurt].answer(everyone)):
        expected = plain.answer(everyone)
        assert {row: a.tokens.tolist() for row, a in answers.items()} == {
            row: a.tokens.tolist() for row, a in expected.items()
        }


def test_a_retired_row_cannot_come_back_nor_can_any_of_a_closed_session():
    session = SharedEngine(Watched()).begin(params(), PROMPTS[:1], 2, seeds(2))
    session.answer({0: NOTHING})
    with pytest.raises(ValueError, match="retired"):
        session.answer({0: NOTHING, 1: NOTHING})
    session.close()
    session.close()
    with pytest.raises(ValueError, match="retired"):
        session.answer({0: NOTHING})


def test_a_prompt_that_is_too_long_is_refused_and_takes_no_place():
    shared = SharedEngine(Watched())
    with pytest.raises(ValueError, match="the engine takes 1 to 12"):
        shared.begin(params(), [np.arange(2, 15, dtype=np.int32)], 1, seeds(1))
    assert not shared._batches


# Weights and memory


def test_each_weights_have_a_batch_of_their_own_which_goes_with_its_last_session():
    shared = SharedEngine(Watched())
    weights = [params(0), params(1)]
    alone = [converse(Watched(), each, PROMPTS, SAMPLES, seeds(12), ragged) for each in weights]
    assert alone[0] != alone[1]
    talks = [Talk(shared, each, PROMPTS, seeds(12), ragged) for each in weights]
    pools = [weakref.ref(batch.pool) for batch in list(shared._batches.values())]
    assert len(pools) == 2
    for rows, expected in zip(in_threads([talk.finish for talk in talks]), alone, strict=True):
        assert_same(rows, expected)
    gc.collect()
    assert not shared._batches and [pool() for pool in pools] == [None, None]


def test_over_hundreds_of_turns_the_pool_keeps_its_size_and_nothing_is_compiled_again():
    shared = SharedEngine(Watched(branch_tokens=24))
    weights, draw = params(), random.Random(1)
    talking, sizes, compiled, number, turns = [], [], [], 0, 0
    keeps_the_batch = shared.begin(weights, PROMPTS, SAMPLES, seeds(12))
    (batch,) = list(shared._batches.values())
    while turns < 400:
        while len(talking) < 3:
            talking.append(Talk(shared, weights, PROMPTS, seeds(12, number), words_of(number)))
            number += 1
        talk = draw.choice(talking)
        turns += 1
        if not talk.turn():
            if draw.random() < 0.5:
                talk.session.close()  # the other half is left to the garbage collector
            talking.remove(talk)
        del talk
        sizes.append(batch.pool.shape)
        compiled.append(decoding._decode._cache_size())
    assert number > 60
    blocks, columns = sizes[-1]
    assert sizes[-1] == sizes[len(sizes) // 2] and blocks <= 16 and columns <= 64
    assert compiled[-1] == compiled[len(compiled) // 2]
    keeps_the_batch.close()


def test_blocks_are_given_back_when_their_last_row_is_retired():
    shared = SharedEngine(Watched())
    weights = params()
    first = shared.begin(weights, PROMPTS, SAMPLES, seeds(12))
    (batch,) = list(shared._batches.values())
    first.answer({0: NOTHING})
    second = shared.begin(weights, PROMPTS[1:], SAMPLES, seeds(8))  # where the first one's other two prompts were
    assert batch.pool.shape[0] == 4
    assert set(second._slots // SAMPLES) == {1, 2} and set(first._slots[:1] // SAMPLES) == {0}


def test_swapping_weights_compiles_nothing_again():
    shared = SharedEngine(Watched())
    run = lambda seed: Talk(shared, params(seed), PROMPTS, seeds(12), ragged).finish()
    run(0)
    compiled = decoding._decode._cache_size()
    run(1)
    assert decoding._decode._cache_size() == compiled
    assert jax.tree.leaves(params(0))[0].shape == jax.tree.leaves(params(1))[0].shape


# Shapes


def test_shapes_have_room_for_what_is_asked_and_are_few():
    draw = random.Random(2)
    shapes = _Shapes(prompt_tokens=32)
    found = set()
    for _ in range(2000):
        rows_of_block, chunk, used = draw.choice([1, 8]), draw.choice([2, 3, 4]), draw.randrange(48)
        needed = _Shape(draw.randrange(1, 64) * (8 // rows_of_block), rows_of_block, used + chunk, chunk)
        shape = shapes.fitting(needed)
        assert shape.rows_of_block == needed.rows_of_block
        assert shape.blocks >= needed.blocks and shape.chunk >= chunk and shape.columns >= used + shape.chunk
        found.add(shape)
    assert len(found) <= 30, "of twice as many powers of two"


def test_a_shape_that_is_at_least_half_full_is_not_compiled_anew():
    shapes = _Shapes(prompt_tokens=32)
    large = shapes.fitting(_Shape(16, 8, 60, 4))
    assert shapes.fitting(_Shape(8, 8, 60, 4)) == large
    assert shapes.fitting(_Shape(16, 8, 30, 2)) == large
    assert shapes.fitting(_Shape(4, 8, 60, 4)) == _Shape(4, 8, 64, 4)
    assert shapes.fitting(_Shape(17, 8, 60, 4)).blocks == 32

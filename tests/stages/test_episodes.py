"""Episodes: what a trajectory holds, how it ends, and what becomes of one that goes wrong."""

import dataclasses
import logging
import random
import signal
import threading
import time

import numpy as np
import pytest

from jax_core.chat import ChatTemplate, Conversation
from schemas.identity import TrajectoryId
from schemas.records import Turn, VersionSpan
from stages.rollout.environments.base import Transition
from stages.rollout.episodes import find_answer_problem, run_episodes, split_in_cohorts
from tests.stages.rollout_fakes import (
    AMPLE,
    DIALOGUE,
    LIMIT,
    TOKENIZER,
    EchoEnvironments,
    FakeAnswer,
    FakeEngine,
    environment_seed,
    make_batch,
    make_recipe,
    token_seed,
    tokens_of,
)


def play(batch, engine=None, environments=None, recipe=None, dialogue=DIALOGUE):
    environments = environments or EchoEnvironments()
    return run_episodes(
        engine or FakeEngine(),
        "weights",
        environments,
        dialogue,
        batch,
        recipe=recipe or make_recipe(),
        generator="me:1",
    )


def by_id(rolled):
    return {(r.id.group_index, r.id.sample_index): r for r in rolled.rollouts}


def content(rollout):
    """All of a rollout but its clocks."""
    names = ["id", "prompt_id", "prompt_length", "versions", "stop_reason", "status", "error", "environment"]
    return {
        "arrays": [a.tobytes() for a in (rollout.tokens, rollout.loss_mask, rollout.sampler_logprobs)],
        "turns": [(turn.role, turn.start, turn.end) for turn in rollout.turns],
        **{name: getattr(rollout, name) for name in names},
    }


def raise_(error):
    raise error


# What a trajectory holds.


def test_a_two_turn_episode_token_by_token():
    # tokens  P P P a0 a0 E1 E1 a1
    # text    a b c  d  $  D  D  e          the environment heard "d", whose <eos> has no text, and says it twice
    seeds = {token_seed(10, 0): ["d$", "e"]}
    twice = {(environment_seed(10, 0), "step", 0): lambda answer: Transition(answer.upper() * 2, 0.0, False, False, {})}
    environments = EchoEnvironments(twice)
    rollout = by_id(play(make_batch("abc", turns=2), FakeEngine(script=seeds), environments))[10, 0]
    assert rollout.tokens.tolist() == [2, 3, 4, 5, 1, 13, 13, 6] == tokens_of("abcd$DDe")
    assert rollout.loss_mask.tolist() == [False, False, False, True, True, False, False, True]
    assert (rollout.sampler_logprobs < 0).tolist() == rollout.loss_mask.tolist()
    assert rollout.prompt_length == 3
    assert rollout.versions == (VersionSpan(3, 5, 6), VersionSpan(7, 8, 6))
    assert [dataclasses.replace(turn, seconds=0.0) for turn in rollout.turns] == [
        Turn("prompt", 0, 3, 0.0),
        Turn("policy", 3, 5, 0.0),
        Turn("environment", 5, 7, 0.0),
        Turn("policy", 7, 8, 0.0),
    ]
    assert environments.heard()[environment_seed(10, 0)] == ["d", "e"]


def test_a_trajectory_says_where_it_comes_from():
    batch = make_batch("abc")
    rollout = by_id(play(batch, recipe=make_recipe(temperature=0.5)))[10, 1]
    assert rollout.id == TrajectoryId(7, 10, 1)
    assert (rollout.prompt_id, rollout.task, rollout.generator) == ("p0", "echo", "me:1")
    assert (rollout.sampling.temperature, rollout.sampling.top_k, rollout.sampling.top_p) == (0.5, 0, 1.0)
    assert (rollout.status, rollout.error) == ("ok", None)
    assert 0 < rollout.started_at <= time.time() and rollout.seconds >= 0


def test_arrays_are_of_one_length_and_of_the_recorded_types():
    for rollout in play(make_batch("ab", "cdef", "g")).rollouts:
        assert [a.dtype for a in (rollout.tokens, rollout.loss_mask, rollout.sampler_logprobs)] == [
            np.int32,
            np.bool_,
            np.float32,
        ]
        assert len(rollout.tokens) == len(rollout.loss_mask) == len(rollout.sampler_logprobs) == rollout.turns[-1].end


def test_arrays_cannot_be_changed_by_who_gets_them():
    (rollout, *_) = play(make_batch("ab")).rollouts
    for array in (rollout.tokens, rollout.loss_mask, rollout.sampler_logprobs):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_rollouts_come_in_order_of_group_and_sample():
    rolled = play(make_batch("ab", "cd", "ef"))
    assert list(by_id(rolled)) == [(g, s) for g in (10, 11, 12) for s in (0, 1)]
    assert rolled.failures == () and set(rolled.seconds) == {"total", "decode", "environment"}


def test_what_the_policy_was_shown_is_what_the_trajectory_holds():
    engine = FakeEngine()
    rolled = play(make_batch("ab", "cdef"), engine, recipe=make_recipe(cohorts=1))
    (session,) = engine.sessions
    assert [r.tokens.tolist() for r in rolled.rollouts] == session.histories
    assert session.seeds == [token_seed(g, s) for g in (10, 11) for s in (0, 1)]


def test_the_same_prompt_twice_is_two_groups_that_differ():
    rolled = play(make_batch("abc", "abc"))
    assert len({r.tokens.tobytes() for r in rolled.rollouts}) == 4


def test_no_prompts_make_no_rollouts():
    assert play(make_batch()).rollouts == ()


# Under a chat template. This one writes A and B for user and assistant, and C behind each turn; it drops every h.

TEMPLATE = (
    "{% for m in messages %}{{ 'A' if m.role == 'user' else 'B' }}{{ m.content | replace('h', '') }}C{% endfor %}"
    "{% if add_generation_prompt %}B{% endif %}"
)


def chat(**settings):
    return Conversation(ChatTemplate(TEMPLATE), TOKENIZER, **settings)


def test_an_episode_under_a_template_token_by_token():
    # text  A a b C B d | e  $ | C  A  E  C  B d | f        "d" is a prefill: the environment hears "e" alone
    engine = FakeEngine(script={token_seed(10, 0): ["e$", "f"], token_seed(10, 1): ["a", "b"]})
    environments = EchoEnvironments()
    rolled = by_id(play(make_batch("ab", turns=2), engine, environments, dialogue=chat(prefill="d")))
    rollout = rolled[10, 0]
    assert rollout.tokens.tolist() == tokens_of("AabCBde$CAECBdf")
    assert np.flatnonzero(rollout.loss_mask).tolist() == [6, 7, 14]
    assert rollout.prompt_length == 6
    assert environments.heard()[environment_seed(10, 0)] == ["e", "f"]
    # An answer that was cut off is closed by the glue alone, which the policy is not trained on.
    assert rolled[10, 1].tokens.tolist() == tokens_of("AabCBdaCAACBdb")
    assert np.flatnonzero(rolled[10, 1].loss_mask).tolist() == [6, 13]


def test_environments_may_speak_in_messages_where_there_is_a_template():
    said = [("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": content} for role, content in said]
    faults = {(environment_seed(10, sample), "reset", 0): lambda _: list(messages) for sample in (0, 1)}
    environments, recipe = EchoEnvironments(faults), make_recipe(prompt_tokens=10)
    rolled = play(make_batch("-"), environments=environments, dialogue=chat(), recipe=recipe)
    assert not rolled.failures
    for rollout in rolled.rollouts:
        assert rollout.tokens[: rollout.prompt_length].tolist() == tokens_of("AaCBbCAcCB")
    raw = play(make_batch("-"), environments=EchoEnvironments(faults))
    assert len(raw.failures) == 2
    assert all("messages: need a chat template" in failure.error for failure in raw.failures)


@pytest.mark.parametrize(
    ("history", "said"), [("append", "the assistant's turn 0 (message 1)"), ("split", "one branch")]
)
def test_a_sample_whose_past_the_template_rewrites_fails_alone(history, said):
    engine = FakeEngine(script={token_seed(10, 0): ["h$", "e"], token_seed(10, 1): ["e$", "f"]})
    rolled = play(make_batch("ab", turns=2), engine, dialogue=chat(history=history))
    (failure,) = rolled.failures
    assert failure.id == TrajectoryId(7, 10, 0)
    assert failure.error.startswith("text of step 0: ") and said in failure.error
    assert list(failure.attempt_tokens) == tokens_of("AabCBh$")
    assert by_id(rolled)[10, 1].tokens.tolist() == tokens_of("AabCBe$CAECBf")


# Nothing depends on how the work is cut, or on time.


def test_cohorts_are_whole_prompts_in_order():
    assert [list(c) for c in split_in_cohorts(5, 3)] == [[0, 1], [2, 3], [4]]
    assert [list(c) for c in split_in_cohorts(2, 5)] == [[0], [1]]
    assert split_in_cohorts(0, 2) == []


@pytest.mark.parametrize("cohorts", [2, 3, 4, 9])
def test_the_number_of_cohorts_changes_nothing(cohorts):
    batch = make_batch("ab", "cdef", "g", "ab")
    expected = [content(r) for r in play(batch, recipe=make_recipe(cohorts=1)).rollouts]
    assert [content(r) for r in play(batch, recipe=make_recipe(cohorts=cohorts)).rollouts] == expected


@pytest.mark.parametrize("jitter_seed", range(3))
def test_thread_timing_changes_nothing(jitter_seed):
    jitter = random.Random(jitter_seed)
    slow = lambda _: time.sleep(jitter.choice([0, 0, 0.002]))
    batch = make_batch("ab", "cdef", "g", "h")
    expected = [content(r) for r in play(batch).rollouts]
    shaken = play(
        batch,
        FakeEngine(before_answer=slow),
        EchoEnvironments(before_step=slow),
        make_recipe(cohorts=3),
    )
    assert [content(r) for r in shaken.rollouts] == expected


def test_one_cohort_decodes_while_the_environments_of_another_step():
    decoded = threading.Event()

    def answer(session):
        if session == other_session():
            decoded.set()

    engine = FakeEngine(before_answer=answer)
    first, second = environment_seed(10, 0), token_seed(11, 0)

    def other_session():
        return next((s.number for s in engine.sessions if second in s.seeds), None)

    def wait_for_the_other_cohort(seed):
        if seed == first:
            assert decoded.wait(AMPLE)

    environments = EchoEnvironments(before_step=wait_for_the_other_cohort)
    rolled = play(make_batch("a", "b"), engine, environments, make_recipe(cohorts=2))
    assert not rolled.failures and decoded.is_set()


# How an episode ends.


def ending(fault=None, turns=8, recipe=None, script=("ab", "cd", "ef", "gh")):
    """Sample 10/0 with scripted answers; its first step is replaced by `fault`."""
    seed = environment_seed(10, 0)
    environments = EchoEnvironments({} if fault is None else {(seed, "step", 0): fault})
    engine = FakeEngine(script={token_seed(10, 0): script})
    return by_id(play(make_batch("abc", turns=turns), engine, environments, recipe))[10, 0]


def test_an_episode_that_its_environment_ends_is_terminated():
    rollout = ending(turns=2)
    assert rollout.stop_reason == "terminated"
    assert rollout.tokens.tolist() == tokens_of("abcabABcd")
    assert rollout.environment == {
        "heard": 4,
        "success": True,
        "return": 0.25,
        "steps": 2,
        "invalid_answers": 0,
        "stopped": False,
    }


def test_an_episode_that_its_environment_cuts_off_is_truncated():
    rollout = ending(lambda answer: Transition("XYZ?", np.float32(0.5), np.False_, True, {"invalid_answers": 1}))
    assert rollout.stop_reason == "truncated"
    assert rollout.environment == {"invalid_answers": 1, "return": 0.5, "steps": 1, "stopped": False}
    assert rollout.tokens.tolist() == tokens_of("abcab")  # text that nobody answers is not trained on, nor encoded


def test_an_episode_has_at_most_max_turns_answers():
    rollout = ending(recipe=make_recipe(max_turns=2))
    assert rollout.stop_reason == "max_turns"
    assert rollout.tokens.tolist() == tokens_of("abcabABcd") and rollout.environment["steps"] == 2


def test_an_observation_that_leaves_no_room_for_an_answer_is_not_appended():
    # After the prompt: "ab" + "AB" + "cd" are 6 tokens. "CD" and an answer of at most 2 need 4 more.
    roomy, tight = make_recipe(branch_tokens=10, max_turns=3), make_recipe(branch_tokens=9, max_turns=3)
    assert ending(recipe=roomy).tokens.tolist() == tokens_of("abcabABcdCDef")
    cut = ending(recipe=tight)
    assert (cut.stop_reason, cut.status) == ("max_tokens", "ok")
    assert cut.tokens.tolist() == tokens_of("abcabABcd")
    assert cut.loss_mask[-1] and cut.environment["steps"] == 2


def test_no_branch_outgrows_its_limit():
    recipe = make_recipe(branch_tokens=7, answer_tokens=3)
    rolled = play(make_batch("ab", "cdef", "g", turns=9), FakeEngine(answer_tokens=3), recipe=recipe)
    assert {r.stop_reason for r in rolled.rollouts} == {"max_tokens"}
    assert max(len(r.tokens) - r.prompt_length for r in rolled.rollouts) <= 7


def test_an_environment_that_says_nothing_is_answered_again():
    rollout = ending(lambda answer: Transition("", 0.0, False, False, {}), turns=2)
    assert rollout.tokens.tolist() == tokens_of("abcabcd")
    assert [turn.role for turn in rollout.turns] == ["prompt", "policy", "policy"]


def test_the_return_is_the_sum_of_the_rewards():
    rollout = ending(lambda answer: Transition("A", -0.5, False, False, {"return": 99, "steps": 99}), turns=2)
    assert rollout.environment["return"] == -0.25 and rollout.environment["steps"] == 2


def test_facts_are_json_values():
    facts = {"array": np.arange(2), "pair": (1, 2), "none": None, "nan": float("nan"), 3: "three"}
    rollout = ending(lambda answer: Transition("", 0.0, True, False, facts))
    expected = {"array": [0, 1], "pair": [1, 2], "none": None, "nan": None, "3": "three"}
    assert {key: rollout.environment[key] for key in expected} == expected


# What goes wrong with one sample. The odd one is sample 0 of group 11.

ODD, ODD_TOKENS = environment_seed(11, 0), token_seed(11, 0)
GATE = threading.Event()  # never set: what hangs, hangs


@dataclasses.dataclass
class NoTransition:
    text: str = ""
    reward: float = 0.0


def step_gives(transition, at=0):
    return {(ODD, "step", at): lambda answer: transition}


ENVIRONMENT_FAULTS = {
    "reset raises": ({(ODD, "reset", 0): lambda _: raise_(ValueError("boom"))}, "reset: ValueError: boom"),
    "reset hangs": ({(ODD, "reset", 0): lambda _: GATE.wait()}, "reset: TimeoutError: took longer than 0.2 s"),
    "reset gives no text": ({(ODD, "reset", 0): lambda _: None}, "reset: TypeError: the prompt must be a str"),
    "step raises": ({(ODD, "step", 0): lambda _: raise_(OSError("gone"))}, "step: OSError: gone"),
    "second step raises": ({(ODD, "step", 1): lambda _: 1 / 0}, "step: ZeroDivisionError"),
    "step exits": ({(ODD, "step", 1): lambda _: raise_(SystemExit(1))}, "step: SystemExit: 1"),
    "step hangs": ({(ODD, "step", 1): lambda _: GATE.wait()}, "step: TimeoutError: took longer than 0.2 s"),
    "step gives nothing": (step_gives(None), "step: AttributeError"),
    "step gives a part": (step_gives(NoTransition()), "step: AttributeError"),
    "text is bytes": (step_gives(Transition(b"A", 0.0, False, False, {})), "step: TypeError: Transition.text"),
    "reward is text": (step_gives(Transition("A", "1", False, False, {})), "step: TypeError: Transition.reward"),
    "reward is none": (step_gives(Transition("A", None, False, False, {})), "step: TypeError: Transition.reward"),
    "reward is NaN": (
        step_gives(Transition("A", float("nan"), True, False, {})),
        "step: ValueError: Transition.reward",
    ),
    "end is none": (step_gives(Transition("A", 0.0, None, False, {})), "step: TypeError: Transition.terminated"),
    "facts are a list": (step_gives(Transition("A", 0.0, True, False, [])), "step: TypeError: Transition.facts"),
    "facts are not JSON": (
        step_gives(Transition("A", 0.0, True, False, {"x": object()})),
        "facts of step 0: TypeError",
    ),
    "unknown character": (step_gives(Transition("A~", 0.0, False, False, {}), at=1), "text of step 1: "),
    "half an emoji": (step_gives(Transition("\ud83d", 0.0, False, False, {})), "text of step 0: "),
}


@pytest.mark.parametrize("fault", ENVIRONMENT_FAULTS)
def test_a_fault_of_an_environment_fails_its_sample_alone(fault):
    faults, error = ENVIRONMENT_FAULTS[fault]
    environments = EchoEnvironments(faults)
    recipe = make_recipe(step_seconds_limit=LIMIT if "hangs" in fault else AMPLE)
    assert_only_one_fails((11, 0), error, play(make_batch("ab", "cdef", "g"), None, environments, recipe))
    assert {environment.closed for environment in environments.made} <= {0, 1}
    hung = [environment for environment in environments.made if not environment.closed]
    assert len(hung) == ("hangs" in fault)  # it is closed by the call that is in it, should that come back


def assert_only_one_fails(odd, error, rolled):
    expected, got = by_id(play(make_batch("ab", "cdef", "g"))), by_id(rolled)
    assert {key: content(got[key]) for key in got if key != odd} == {
        key: content(expected[key]) for key in expected if key != odd
    }
    failed = got[odd]
    assert (failed.status, failed.stop_reason) == ("failed", "failed") and failed.error.startswith(error)
    assert failed.tokens[: failed.prompt_length].tolist() == tokens_of("cdef")
    assert not failed.loss_mask.any() and not failed.sampler_logprobs.any() and failed.versions == ()
    (failure,) = rolled.failures
    assert (failure.id, failure.stage, failure.error) == (failed.id, "rollout", failed.error)
    assert "\n" not in failure.error
    failure.error.encode()


def test_a_sample_that_starts_from_another_prompt_than_its_group_fails_alone():
    environments = EchoEnvironments({(environment_seed(11, 1), "reset", 0): lambda _: "ab"})
    rolled = play(make_batch("ab", "cdef", "g"), None, environments)
    assert_only_one_fails((11, 1), "prompt: differs from that of sample 0", rolled)


@pytest.mark.parametrize("fault", ["raises", "hangs"])
def test_a_fault_in_making_an_environment_fails_its_sample_alone(fault):
    def make_fault(number):
        if number == 0:
            raise_(ValueError("no sandbox")) if fault == "raises" else GATE.wait()

    # One cohort makes its environments in order of its samples, unless they are slow.
    environments = EchoEnvironments(make_fault=make_fault)
    recipe = make_recipe(cohorts=1, step_seconds_limit=LIMIT if fault == "hangs" else AMPLE)
    rolled = play(make_batch("ab", "cdef"), None, environments, recipe)
    expected, got = by_id(play(make_batch("ab", "cdef"))), by_id(rolled)
    assert [key for key in got if got[key].status == "failed"] == [(10, 0)]
    assert rolled.failures[0].error.startswith("make: ")
    assert all(content(got[key]) == content(expected[key]) for key in got if key != (10, 0))
    assert [environment.closed for environment in environments.made] == [0, 1, 1, 1]


ANSWER_FAULTS = {
    "NaN": lambda answer: FakeAnswer(answer.tokens, np.full(len(answer.tokens), np.nan, np.float32)),
    "-inf": lambda answer: FakeAnswer(answer.tokens, np.full(len(answer.tokens), -np.inf, np.float32)),
    "above 0": lambda answer: FakeAnswer(answer.tokens, np.full(len(answer.tokens), 0.5, np.float32)),
    "one short": lambda answer: FakeAnswer(answer.tokens, answer.logprobs[:-1]),
    "no tokens": lambda answer: FakeAnswer(answer.tokens[:0], answer.logprobs[:0]),
    "foreign ids": lambda answer: FakeAnswer(answer.tokens + 1000, answer.logprobs),
}


@pytest.mark.parametrize("fault", ANSWER_FAULTS)
def test_an_answer_that_cannot_be_trained_on_fails_its_sample_alone(fault):
    environments = EchoEnvironments()
    rolled = play(make_batch("ab", "cdef", "g"), FakeEngine(faults={ODD_TOKENS: ANSWER_FAULTS[fault]}), environments)
    assert_only_one_fails((11, 0), "answer 0: has ", rolled)
    assert environments.heard()[ODD] == [] and {environment.closed for environment in environments.made} == {1}


def test_a_certain_token_has_log_probability_zero_and_is_fine():
    assert find_answer_problem(np.array([2], np.int32), np.array([-0.0], np.float32), 18) is None


def test_a_failure_holds_all_that_is_needed_to_try_it_again():
    batch = make_batch("ab", "cdef")
    engine = FakeEngine(script={ODD_TOKENS: ["a$", "b"]})
    environments = EchoEnvironments({(ODD, "step", 1): lambda _: raise_(ValueError("boom"))})
    (failure,) = play(batch, engine, environments).failures
    assert failure.id == TrajectoryId(7, 11, 0)
    assert (failure.prompt, failure.policy_version, failure.seed) == (batch.prompts[1], 6, ODD_TOKENS)
    assert list(failure.attempt_tokens) == tokens_of("cdefa$Ab")
    assert "raise error" in failure.traceback


# What goes wrong with a whole group.


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("abcdefg", "prompt: ValueError: has 7 tokens, must have 1 to 6 (rollout.prompt_tokens); nothing is cut"),
        ("", "prompt: ValueError: has 0 tokens"),
        ("ab~", "prompt: schemas.errors.UserError: character '~'"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused_and_never_cut(text, error):
    batch = make_batch("ab", text, "abcdef")
    engine, environments = FakeEngine(), EchoEnvironments()
    got = by_id(play(batch, engine, environments, make_recipe(cohorts=1)))
    expected = by_id(play(make_batch("ab", "cd", "abcdef")))
    for sample in (0, 1):
        refused = got[11, sample]
        assert refused.status == "failed" and refused.error.startswith(error)
        assert len(refused.tokens) == 0 and refused.prompt_length == 0 and refused.turns == ()
        assert content(got[10, sample]) == content(expected[10, sample])
        assert got[12, sample].tokens.tolist() == expected[12, sample].tokens.tolist()
    assert len(engine.sessions[0].seeds) == 6  # the shapes that the engine is compiled for are those of any element
    assert {environment.closed for environment in environments.made} == {1}


@pytest.mark.parametrize("call", ["reset", "step"])
def test_that_all_samples_fail_is_survived(call):
    faults = {(environment_seed(g, s), call, 0): lambda _: raise_(SystemExit()) for g in (10, 11) for s in range(4)}
    environments = EchoEnvironments(faults)
    engine = FakeEngine()
    rolled = play(make_batch("ab", "cd"), engine, environments, make_recipe(samples_per_prompt=4))
    assert [r.status for r in rolled.rollouts] == ["failed"] * 8 and len(rolled.failures) == 8
    assert [environment.closed for environment in environments.made] == [1] * 8
    assert len(engine.sessions) == (0 if call == "reset" else 2)


def test_that_all_samples_hang_is_survived():
    faults = {(environment_seed(g, s), "step", 0): lambda _: GATE.wait() for g in (10, 11) for s in range(4)}
    recipe = make_recipe(samples_per_prompt=4, step_seconds_limit=LIMIT)
    rolled = play(make_batch("ab", "cd"), None, EchoEnvironments(faults), recipe)
    assert [r.status for r in rolled.rollouts] == ["failed"] * 8
    assert [r.tokens[: r.prompt_length].tolist() for r in rolled.rollouts] == [tokens_of("ab")] * 4 + [
        tokens_of("cd")
    ] * 4


# Environments are closed, whatever happens.


@pytest.mark.parametrize("call", ["reset", "step"])
def test_an_environment_that_hung_is_closed_by_its_own_thread_when_it_comes_back(call):
    gate, closed_by = threading.Event(), []
    closing = threading.Event()

    def close(_):
        closed_by.append(threading.get_ident())
        closing.set()

    def hang(_):
        gate.wait()
        hung_in.append(threading.get_ident())

    hung_in = []
    environments = EchoEnvironments({(ODD, call, 0): hang, (ODD, "close", 0): close})
    play(make_batch("ab", "cd"), None, environments, make_recipe(step_seconds_limit=LIMIT))
    assert closed_by == []
    gate.set()
    assert closing.wait(AMPLE) and closed_by == hung_in
    assert [environment.closed for environment in environments.made] == [1] * 4


@pytest.mark.parametrize("fault", ["raises", "hangs"])
def test_an_environment_that_fails_to_close_costs_no_trajectory(fault, caplog):
    faults = {(ODD, "close", 0): lambda _: raise_(OSError("stuck")) if fault == "raises" else GATE.wait()}
    with caplog.at_level(logging.WARNING):
        recipe = make_recipe(step_seconds_limit=LIMIT if fault == "hangs" else AMPLE)
        rolled = play(make_batch("ab", "cdef", "g"), None, EchoEnvironments(faults), recipe)
    assert [content(r) for r in rolled.rollouts] == [content(r) for r in play(make_batch("ab", "cdef", "g")).rollouts]
    assert "trajectory 7/11/0, close: " in caplog.text


def test_a_fault_of_the_engine_is_raised_once_environments_are_closed():
    environments = EchoEnvironments()
    engine = FakeEngine(before_answer=lambda session: raise_(MemoryError("out of device memory")))
    with pytest.raises(MemoryError):
        play(make_batch("ab", "cd", "ef"), engine, environments, make_recipe(cohorts=3))
    assert [environment.closed for environment in environments.made] == [1] * 6


@pytest.mark.parametrize("end", ["done", "fault"])
def test_every_session_of_the_engine_is_closed_however_its_cohort_ends(end):
    engine = FakeEngine(before_answer=lambda session: raise_(MemoryError("full")) if end == "fault" else None)
    try:
        play(make_batch("ab", "cd", "ef"), engine, recipe=make_recipe(cohorts=3))
    except MemoryError:
        assert end == "fault"
    # A cohort that was told to stop before it began a session has none.
    assert engine.sessions and [session.closed for session in engine.sessions] == [1] * len(engine.sessions)
    assert end == "fault" or len(engine.sessions) == 3


def test_calls_of_the_engine_and_the_sessions_in_them_are_counted_over_the_cohorts():
    rolled = play(make_batch("ab", "cd", "ef", turns=2), recipe=make_recipe(cohorts=3))
    assert rolled.counts == {"decode_calls": 3 * 2, "decoded_sessions": 3 * 2}


def test_an_interrupted_caller_does_not_wait_for_what_hangs():
    gate = threading.Event()

    def interrupt_and_hang(_):
        signal.raise_signal(signal.SIGINT)  # as Ctrl-C does, in whichever thread
        gate.wait()

    environments = EchoEnvironments({(ODD, "step", 0): interrupt_and_hang})
    with pytest.raises(KeyboardInterrupt):
        play(make_batch("ab", "cdef", "g"), None, environments)
    others = [e.closed for e in environments.made if e.seed != ODD]  # the other cohort may not have made its own yet
    assert others and others == [1] * len(others)
    gate.set()

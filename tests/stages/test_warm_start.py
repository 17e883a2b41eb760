"""Version 0 is published once; demonstrations are what the agent would have seen and said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jax_core.policies import tree_digest
from schemas.errors import UserError
from schemas.metrics import read_metrics
from schemas.records import Prompt
from schemas.store import RunStore
from stages.rollout.environments import ENVIRONMENTS, EnvironmentKind
from stages.runtime import Runtime
from stages.warm_start import demonstration, demonstrations, untrained, warm_start
from tests.pipelines.tiny_runs import share_parts, tiny_recipe

WARM = tiny_recipe(warm_start={"steps": 2, "demonstrations": 8, "batch": 4})
# One way only: down, down, right, right.
LAKE = Prompt("lake", "frozen_lake", {"map": "SHH\nFHH\nFFG"})


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    share_parts(monkeypatch)


def nothing(step: int, values: object) -> None:
    raise AssertionError("nothing is reported where nothing is trained")


def shown(tokens: np.ndarray, mask: np.ndarray) -> str:
    """Characters, answers in brackets."""
    tokenizer = Runtime("unused", WARM).tokenizer
    pieces = [tokenizer.token_text(int(token)) for token in tokens]
    return "".join(f"[{piece}]" if trained else piece for piece, trained in zip(pieces, mask, strict=True))


def demonstrated(**rollout_or_sampling: dict[str, int]) -> str | None:
    recipe = tiny_recipe(**rollout_or_sampling)
    sequence = demonstration(LAKE, Runtime("unused", recipe).dialogue, recipe)
    return None if sequence is None else shown(sequence.tokens, sequence.mask)


def test_a_demonstration_is_the_conversation_with_only_its_answers_trained() -> None:
    assert demonstrated() == "^aⓑⓒ\ndⓔⓕ\nghi*\na[D]d[D]g[R]h[R]"


def test_an_answer_that_may_be_longer_is_ended_by_eos() -> None:
    assert demonstrated(sampling={"answer_tokens": 2}) == (
        "^aⓑⓒ\ndⓔⓕ\nghi*\na[D][<eos>]d[D][<eos>]g[R][<eos>]h[R][<eos>]"
    )


def test_under_a_chat_template_a_demonstration_is_the_conversation_as_the_template_has_it() -> None:
    template = (
        "{% for m in messages %}{{ 'U' if m.role == 'user' else 'L' }}{{ m.content }}?{% endfor %}"
        "{% if add_generation_prompt %}L{% endif %}"
    )
    rollout = {"prompt_tokens": 18, "max_turns": 2}
    assert demonstrated(chat={"template": template}, sampling={"answer_tokens": 2}, rollout=rollout) == (
        "U^aⓑⓒ\ndⓔⓕ\nghi*\na?L[D][<eos>]?Ud?L[D][<eos>]"
    )


def test_what_leads_astray_is_seen_and_not_taught() -> None:
    # The only dead end is the cell d, below the start: the way there, D, is not taught.
    lake = Prompt("lake", "frozen_lake", {"map": "SFF\nFHF\nHHG"})
    recipe = tiny_recipe(task={"options": {"names_grid": 3, "dead_ends_shown": 1.0}})
    sequence = demonstration(lake, Runtime("unused", recipe).dialogue, recipe)
    assert sequence is not None
    assert shown(sequence.tokens, sequence.mask) == "^abc\ndⓔf\nⓖⓗi*\naDd[U]a[R]b[R]c[D]f[D]"
    assert sequence.prompt_length == len("^abc\ndⓔf\nⓖⓗi*\na")


def test_a_demonstration_ends_where_no_answer_has_room_any_more() -> None:
    # D d D g: four tokens, and the next answer would be the fifth.
    assert demonstrated(rollout={"branch_tokens": 4}) == "^aⓑⓒ\ndⓔⓕ\nghi*\na[D]d[D]"
    assert demonstrated(rollout={"branch_tokens": 5}) == "^aⓑⓒ\ndⓔⓕ\nghi*\na[D]d[D]g[R]"
    assert demonstrated(rollout={"max_turns": 1}) == "^aⓑⓒ\ndⓔⓕ\nghi*\na[D]"


def test_a_prompt_that_is_too_long_is_not_demonstrated() -> None:
    assert demonstrated(rollout={"prompt_tokens": 15}) == "^aⓑⓒ\ndⓔⓕ\nghi*\na[D]d[D]g[R]h[R]"
    assert demonstrated(rollout={"prompt_tokens": 14}) is None


def test_demonstrations_are_of_training_prompts_as_many_as_asked_for_and_the_same_each_time(tmp_path: Path) -> None:
    shared = Runtime(tmp_path, WARM)
    first, second = demonstrations(shared), demonstrations(shared)
    assert len(first) == 8
    prompts = {shown(d.tokens[: d.prompt_length], d.mask[: d.prompt_length]) for d in first}
    lake = ENVIRONMENTS["frozen_lake"].make(WARM.task.options)
    assert prompts <= {lake.reset(shared.prompts[i], 0) for i in range(len(shared.prompts))}
    for once, again in zip(first, second, strict=True):
        np.testing.assert_array_equal(once.tokens, again.tokens)
        np.testing.assert_array_equal(once.mask, again.mask)


def test_where_no_demonstration_fits_the_recipe_is_told_so(tmp_path: Path) -> None:
    recipe = tiny_recipe(rollout={"prompt_tokens": 3}, warm_start={"steps": 1})
    with pytest.raises(UserError, match="none of 40 demonstrations fits"):
        demonstrations(Runtime(tmp_path, recipe))


def test_an_environment_that_nobody_can_demonstrate_refuses_a_warm_start(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = ENVIRONMENTS["frozen_lake"]
    monkeypatch.setitem(ENVIRONMENTS, "frozen_lake", EnvironmentKind(kind.options_model, kind.make, None))
    with pytest.raises(UserError, match="no demonstrations"):
        demonstrated()


def test_without_a_warm_start_version_0_is_the_random_weights(tmp_path: Path) -> None:
    shared = Runtime(tmp_path, tiny_recipe())
    commit = warm_start(shared, nothing)
    assert (commit.version, commit.source) == (0, "random")
    assert commit.digest == tree_digest(untrained(shared))
    assert read_metrics(shared.store, "warm_start") == []


def test_a_warm_start_is_made_once_recorded_and_the_same_in_every_run(tmp_path: Path) -> None:
    told: list[int] = []
    shared = Runtime(tmp_path / "a", WARM)
    commit = warm_start(shared, lambda step, values: told.append(step))
    assert commit.source == "warm_start"
    assert commit.digest != tree_digest(untrained(shared))
    assert warm_start(Runtime(tmp_path / "a", WARM), nothing) == commit
    again = warm_start(Runtime(tmp_path / "b", WARM), lambda step, values: None)
    assert again.digest == commit.digest
    assert told == [0, 1]
    events = read_metrics(RunStore.open(tmp_path / "a"), "warm_start")
    assert [event.step for event in events] == [0, 1]
    assert events[1].values["warm_start/loss"] < events[0].values["warm_start/loss"]
    # What the run began from is recorded, so that nobody need trust that it can be made again.
    recorded = (tmp_path / "a" / "metrics" / "warm_start.jsonl").read_text()
    assert recorded.count(tree_digest(untrained(shared))) == 2

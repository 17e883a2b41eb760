"""Warm start: makes policy version 0, from random weights and, if the recipe says so, some demonstrations.

A demonstration is an episode as the agent would have seen it, with good answers in the place of sampled ones:

    tokens  ^ a b \n f G \n a   R   b   D          (the prompt, then answer, position, answer)
    mask    . . . .  . . .  .   x   .   x          x: trained

It may begin with answers that lead astray: these are seen and not trained, so a policy learns to recover from a mistake
without learning to make it.

The environment writes its own text, so a policy that was warmed up meets nothing new when it starts to sample.

Left out on purpose: demonstrations from files, and validation (the learning curve's first point is version 0).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import apache_beam as beam
import numpy as np
from apache_beam.pvalue import PBegin

from jax_core.chat import Dialogue
from jax_core.lora import init_adapters
from jax_core.models.decoder import Params
from jax_core.policies import tree_digest
from jax_core.warm_start import DemonstratedEpisode, supervised
from schemas.errors import UserError
from schemas.identity import seed_int
from schemas.manifest import PolicyCommit
from schemas.metrics import MetricsWriter
from schemas.recipe import Recipe
from schemas.records import Prompt
from stages.counters import count
from stages.prompts.datasets import training_prompts
from stages.rollout.environments import Demonstration, Environment, environment_kind
from stages.runtime import Runtime, runtime

Report = Callable[[int, Mapping[str, float]], None]


def warm_start(shared: Runtime, report: Report) -> PolicyCommit:
    """Publishes policy version 0, unless it is there.

    Args:
      report: called with (step, metrics) after each supervised step, if there are any.

    Returns:
      The commit of version 0: this call's, or an earlier one's.

    Raises:
      UserError: the task has no demonstrations, or none fits the recipe's lengths.
    """
    if shared.policies.latest() is not None:
        return shared.policies.commit(0)
    params = untrained(shared)
    if not shared.recipe.warm_start.steps:
        return shared.policies.publish(0, params, source="checkpoint" if shared.recipe.model.checkpoint else "random")
    metered = _metered(shared, report)
    trained = supervised(shared.model_config, shared.recipe, params, demonstrations(shared), metered, shared.base)
    return shared.policies.publish(0, trained, source="warm_start")


def untrained(shared: Runtime) -> Params:
    """What is trained, before it is: all of the model's first weights, or new adapters of them."""
    recipe = shared.recipe
    if shared.base is None:
        return shared.initial_weights()
    return init_adapters(shared.base, recipe.lora, recipe.seed)


def _metered(shared: Runtime, report: Report) -> Report:
    """Writes each step's metrics, with the digest of the random weights that they started from, and passes them on."""
    metrics = MetricsWriter(shared.store, "warm_start")
    random_digest = tree_digest(untrained(shared))
    last = time.monotonic()

    def write(step: int, values: Mapping[str, float]) -> None:
        nonlocal last
        now = time.monotonic()
        timed = {**values, "warm_start/seconds": now - last}
        last = now
        metrics.write(step, timed, random_weights=random_digest)
        report(step, timed)

    return write


def demonstrations(shared: Runtime) -> list[DemonstratedEpisode]:
    """Demonstrated episodes of training prompts.

    The prompts are drawn without repeats, in an order of their own: not those that training begins with.

    Raises:
      UserError: see `warm_start`.
    """
    recipe = shared.recipe
    wanted = min(recipe.warm_start.demonstrations, len(shared.prompts))
    prompts = training_prompts(shared.prompts, seed_int("warm_start", recipe.seed), 0, wanted)
    drawn = [demonstration(prompt, shared.dialogue, recipe) for prompt in prompts]
    fitting = [sequence for sequence in drawn if sequence is not None]
    if not fitting:
        raise UserError(
            f"rollout.prompt_tokens={recipe.rollout.prompt_tokens}, branch_tokens={recipe.rollout.branch_tokens}",
            f"none of {wanted} demonstrations fits.",
            "Raise them, or set warm_start.steps=0.",
        )
    return fitting


def demonstration(prompt: Prompt, dialogue: Dialogue, recipe: Recipe) -> DemonstratedEpisode | None:
    """One demonstrated episode, or None if its prompt is longer than the recipe allows, or no taught answer fits.

    It ends where an agent's episode would: at the environment's end, or where no longest answer has room any more.
    """
    kind = environment_kind(recipe.task.environment)
    if kind.demonstrate is None:
        raise UserError(
            f"task.environment={recipe.task.environment!r}", "it has no demonstrations.", "Set warm_start.steps=0."
        )
    shown = kind.demonstrate(prompt, recipe.task.options)
    environment = kind.make(recipe.task.options)
    try:
        return _play(environment, prompt, shown, dialogue.fork(), recipe)
    finally:
        environment.close()


def _play(
    environment: Environment, prompt: Prompt, shown: Demonstration, dialogue: Dialogue, recipe: Recipe
) -> DemonstratedEpisode | None:
    text = environment.reset(prompt, seed_int("demonstration", prompt.prompt_id))
    parts = [dialogue.start(text)]
    if len(parts[0]) > recipe.rollout.prompt_tokens:
        return None
    branch = 0  # tokens after the prompt
    for answer in shown.answers[: recipe.rollout.max_turns]:
        answer_tokens = _answer_tokens(answer, dialogue, recipe)
        if answer_tokens is None or branch + recipe.sampling.answer_tokens > recipe.rollout.branch_tokens:
            break
        transition = environment.step(answer)
        parts.append(answer_tokens)
        if transition.over:
            break
        parts.append(dialogue.reply(answer_tokens, transition.text))
        branch += len(parts[-2]) + len(parts[-1])
    return _with_mask(parts, shown.first_taught)


def _with_mask(parts: Sequence[np.ndarray], first_taught: int) -> DemonstratedEpisode | None:
    """Joins prompt, answer, text, answer, text, ...; what the environment wrote after the last answer is left out."""
    parts = parts[: len(parts) // 2 * 2]
    taught = [i % 2 == 1 and i // 2 >= first_taught for i in range(len(parts))]
    if not any(taught):
        return None
    mask = np.concatenate([np.full(len(part), teach) for part, teach in zip(parts, taught, strict=True)])
    return DemonstratedEpisode(np.concatenate(parts), mask, len(parts[0]))


def _answer_tokens(answer: str, dialogue: Dialogue, recipe: Recipe) -> np.ndarray | None:
    """An answer as a policy would have to sample it, with the token that ends it early; None if it is too long."""
    tokens = dialogue.tokenizer.encode_inside(answer)
    stopped = any(stop in answer for stop in recipe.sampling.stop_strings)
    if len(tokens) < recipe.sampling.answer_tokens and not stopped:
        tokens = np.concatenate([tokens, np.array(dialogue.end_ids, np.int32)])
    return tokens if len(tokens) <= recipe.sampling.answer_tokens else None


@dataclass
class WarmStart(beam.PTransform):
    """Start -> one element, the number 0, once policy version 0 is published; see `warm_start`.

    The signal that sampling may begin, so `AdmitPrompts` follows it.

    Args:
      recipe: the run's recipe.
      run: location of the run directory.
    """

    recipe: Recipe
    run: str

    def expand(self, start: PBegin) -> beam.PCollection[int]:
        do = beam.ParDo(_WarmStartFn(self.recipe, self.run)).with_output_types(int)
        return start | "Start" >> beam.Impulse() | "PublishFirstPolicy" >> do


class _WarmStartFn(beam.DoFn):
    def __init__(self, recipe: Recipe, run: str):
        self._recipe = recipe
        self._run = run

    def process(self, start: bytes) -> Iterator[int]:
        shared = runtime(self._run, self._recipe)
        count(WarmStart, "published", int(shared.policies.latest() is None))
        commit = warm_start(shared, shared.warm_start_report)
        for hook in shared.after_warm_start:
            hook(commit)
        shared.idle_since = time.monotonic()  # until now nobody waited for shards
        yield commit.version

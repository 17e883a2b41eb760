"""How often a policy succeeds on held-out prompts, and how sure that number is.

The first half is arithmetic on counts and knows no model. The second half samples the episodes, through the same
engine and the same environments as training, in chunks of prompts.

Left out on purpose: Beam. An evaluation is a few hundred episodes of one policy in one process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jax_core.models.decoder import Params
from jax_core.policies import tree_digest
from jax_core.sampling.engine import Engine
from schemas import run_layout
from schemas.errors import UserError
from schemas.identity import seed_int
from schemas.manifest import PolicyCommit
from schemas.metrics import MetricsWriter, read_metrics
from schemas.recipe import Recipe
from schemas.recipe_io import recipe_from_json
from schemas.records import Prompt, PromptBatch, SamplingRecord, ScoredRollout
from schemas.store import RunStore
from stages.prompts.datasets import open_prompts
from stages.reward.kinds import make_reward
from stages.reward.reward import score_batch
from stages.rollout.environments import ScriptedRule, environment_kind, environment_options
from stages.rollout.episodes import run_episodes
from stages.runtime import Runtime, runtime
from stages.train import StepReport

Z_95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution
WILSON = "Wilson"
CLUSTERED = "Wilson, clustered by prompt"
ROWS_IN_FLIGHT = 512  # episodes played at once


@dataclass(frozen=True)
class Interval:
    """A 95 % confidence interval of a share. `method` says how it was made."""

    low: float
    high: float
    method: str


@dataclass(frozen=True)
class PromptOutcome:
    """What came of one prompt: `successes` of `samples` episodes. A failed episode is one that did not succeed."""

    prompt_id: str
    stratum: str  # what results are split by (the size of a lake); "" where the task has nothing to split by
    samples: int
    successes: int
    failed: int  # episodes that broke (tombstones); each counts as no success
    reward: float  # mean over the samples


@dataclass(frozen=True)
class Summary:
    """Success over some prompts. `pass_at[k]` is the chance that at least one of k samples of a prompt succeeds."""

    prompts: int
    samples: int  # of each prompt
    success: float
    interval: Interval
    pass_at: dict[int, float]
    reward: float
    failed: int


def wilson_interval(successes: float, trials: float) -> Interval:
    """Wilson's score interval of `successes` in `trials` independent trials, at 95 %.

    It stays inside [0, 1] and has a width at 0 and at 1, where the textbook's normal interval is wrong by most.

    >>> wilson_interval(0, 10).high > 0.2
    True
    """
    if trials <= 0:
        return Interval(0.0, 1.0, WILSON)
    share = successes / trials
    shrink = 1.0 + Z_95**2 / trials
    centre = (share + Z_95**2 / (2 * trials)) / shrink
    half = Z_95 * math.sqrt(share * (1 - share) / trials + Z_95**2 / (4 * trials**2)) / shrink
    # Exactly 0 and 1 at the ends, where rounding would leave 3e-17.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return Interval(low, high, WILSON)


def clustered_interval(successes: Sequence[int], samples: int) -> Interval:
    """Wilson's interval for P prompts with `samples` each, where samples of one prompt are alike.

    Sixteen samples of an easy prompt are not sixteen independent trials. The variance is taken between prompts, and
    Wilson's formula gets as many trials as independent ones of that variance would be ("effective sample size"):
    at least about P, at most P * samples. Where every sample has the same outcome nothing can be estimated, and
    each prompt counts once. With one sample a prompt it is the plain Wilson interval.

    Args:
      successes: [P], of 0..samples each.
    """
    prompts = len(successes)
    if samples == 1 or not prompts:
        return wilson_interval(sum(successes), prompts)
    shares = np.asarray(successes, np.float64) / samples
    share = float(shares.mean())
    variance = float(shares.var(ddof=1)) / prompts if prompts > 1 else math.inf
    if share in (0.0, 1.0) or prompts == 1:
        trials = float(prompts)
    elif variance == 0.0:
        trials = float(prompts * samples)
    else:
        trials = min(share * (1 - share) / variance, float(prompts * samples))
    plain = wilson_interval(share * trials, trials)
    return Interval(plain.low, plain.high, CLUSTERED)


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """The unbiased estimate, from `successes` of `samples`, that at least one of k fresh samples succeeds.

    1 - C(n - c, k) / C(n, k): the share of all k-subsets of the samples that hold a success. The biased
    1 - (1 - c/n)^k is too low.

    >>> pass_at_k(4, 1, 2)
    0.5

    Raises:
      ValueError: k is not in 1..samples, or successes is not in 0..samples.
    """
    if not 1 <= k <= samples or not 0 <= successes <= samples:
        raise ValueError(f"k={k}, successes={successes} of samples={samples}: both must lie within the samples")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def powers_of_two_up_to(samples: int) -> tuple[int, ...]:
    """The k that pass@k is shown for: 1, 2, 4, ... and `samples` itself.

    >>> powers_of_two_up_to(6)
    (1, 2, 4, 6)
    """
    powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return tuple(sorted({*powers, samples}))


def summarize(outcomes: Sequence[PromptOutcome]) -> Summary:
    """One line of a table of results. All prompts have the same number of samples.

    Raises:
      ValueError: no outcome, or unequal numbers of samples.
    """
    if len({o.samples for o in outcomes}) != 1:
        raise ValueError(
            f"{len(outcomes)} prompts with samples {sorted({o.samples for o in outcomes})}: need one number"
        )
    samples = outcomes[0].samples
    successes = [o.successes for o in outcomes]
    return Summary(
        prompts=len(outcomes),
        samples=samples,
        success=sum(successes) / (samples * len(outcomes)),
        interval=clustered_interval(successes, samples),
        pass_at={
            k: float(np.mean([pass_at_k(samples, c, k) for c in successes])) for k in powers_of_two_up_to(samples)
        },
        reward=float(np.mean([o.reward for o in outcomes])),
        failed=sum(o.failed for o in outcomes),
    )


def summarize_by_stratum(outcomes: Sequence[PromptOutcome]) -> dict[str, Summary]:
    """A summary of each stratum, in order of its name; empty where there is only one."""
    strata = sorted({o.stratum for o in outcomes})
    if len(strata) < 2:
        return {}
    return {stratum: summarize([o for o in outcomes if o.stratum == stratum]) for stratum in strata}


# Playing the episodes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Results of one way of sampling ("sampled at temperature 1", "greedy")."""

    title: str
    total: Summary
    by_stratum: dict[str, Summary]


@dataclass(frozen=True)
class Evaluation:
    """What `rollstream evaluate` reports: which weights, on which prompts, how well."""

    run: str
    version: int
    digest: str
    split: str
    prompts: int
    seconds: float
    parts: tuple[Part, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Player:
    """Plays a fixed set of prompts with any weights, always with the same seeds: two policies meet the same luck.

    Args:
      shared: the run's tokenizer, model shape and recipe; its own engine is left alone.
      split: the split that prompts come from.
      most_prompts: how many prompts at most, spread evenly over the split (splits may be sorted, by size say); None
        for all.
      samples: episodes of each prompt.
      sampling: the distribution that tokens are drawn from.
      greedy: the most likely token instead of a drawn one.

    Raises:
      UserError: no such data set or split.
    """

    def __init__(
        self,
        shared: Runtime,
        split: str,
        *,
        most_prompts: int | None,
        samples: int,
        sampling: SamplingRecord,
        greedy: bool = False,
    ):
        data = open_prompts(shared.recipe.data, shared.recipe.task, split)
        self.prompts = [data[i] for i in evenly_spread(len(data), most_prompts)]
        self.recipe = evaluation_recipe(shared.recipe, split, samples, sampling)
        self._shared = shared
        self._kind = environment_kind(shared.recipe.task.environment)
        self._reward = make_reward(shared.recipe)
        self._engine = Engine(
            shared.model_config,
            shared.tokenizer,
            sampling,
            answer_tokens=self.recipe.sampling.answer_tokens,
            stop_strings=self.recipe.sampling.stop_strings,
            prompt_tokens=self.recipe.rollout.prompt_tokens,
            branch_tokens=self.recipe.rollout.branch_tokens,
            greedy=greedy,
        )

    def play(self, params: Params, version: int) -> list[PromptOutcome]:
        """What came of each prompt, in order. `version` only labels the trajectories."""
        return [
            outcome
            for chunk in chunks(len(self.prompts), max(1, ROWS_IN_FLIGHT // self.recipe.rollout.samples_per_prompt))
            for outcome in self._play_chunk(params, version, chunk)
        ]

    def _play_chunk(self, params: Params, version: int, chunk: range) -> list[PromptOutcome]:
        prompts = tuple(self.prompts[i] for i in chunk)
        batch = PromptBatch(
            run_id="evaluation",
            step=0,
            element_index=0,
            policy_version=version,
            first_group_index=chunk.start,
            prompts=prompts,
        )
        options = environment_options(self.recipe.task)
        rollouts = run_episodes(
            self._engine, params, partial(self._kind.make, options), self._shared.dialogue, batch, recipe=self.recipe
        )
        scored = score_batch(rollouts, self._reward, self.recipe.task.reward_seconds_limit).rollouts
        samples = self.recipe.rollout.samples_per_prompt
        return [prompt_outcome(p, scored[i * samples : (i + 1) * samples]) for i, p in enumerate(prompts)]


def prompt_outcome(prompt: Prompt, scored: Sequence[ScoredRollout]) -> PromptOutcome:
    """Counts the samples of one prompt. An episode succeeds by its component "success", else by a reward above 0."""
    return PromptOutcome(
        prompt_id=prompt.prompt_id,
        stratum=stratum_of(prompt),
        samples=len(scored),
        successes=sum(s.components.get("success", s.reward) > 0 for s in scored),
        failed=sum(s.rollout.status == "failed" for s in scored),
        reward=float(np.mean([s.reward for s in scored])),
    )


def stratum_of(prompt: Prompt) -> str:
    """What results are split by: the "size" that the prompt's example says, if it says one."""
    return f"size {prompt.payload['size']}" if "size" in prompt.payload else ""


def evaluation_recipe(recipe: Recipe, split: str, samples: int, sampling: SamplingRecord) -> Recipe:
    """`recipe` with its sampling changed for an evaluation, and seeds that no training episode has.

    Not validated again: a recipe refuses one sample a prompt, or truncated sampling, because nothing could be trained
    on them, and here nothing is.
    """
    return recipe.model_copy(
        update={
            "seed": seed_int("evaluation", recipe.seed, split),
            "rollout": recipe.rollout.model_copy(update={"samples_per_prompt": samples}),
            "sampling": recipe.sampling.model_copy(update=asdict(sampling)),
        }
    )


def evenly_spread(length: int, most: int | None) -> list[int]:
    """Indices of at most `most` of `length` items, evenly spread.

    >>> evenly_spread(10, 3), evenly_spread(2, 5)
    ([0, 3, 6], [0, 1])
    """
    count = length if most is None else min(length, most)
    return [i * length // count for i in range(count)]


def chunks(length: int, most: int) -> list[range]:
    """0..length in as few stretches of at most `most` as it takes, as equal as they can be: fewer shapes to compile.

    >>> chunks(10, 4)
    [range(0, 4), range(4, 7), range(7, 10)]
    """
    count = -(-length // most)
    ends = [-(-length * (i + 1) // count) for i in range(count)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def evaluation_sampling(recipe: Recipe) -> SamplingRecord:
    """The distribution that the recipe judges policies by."""
    return SamplingRecord(recipe.evaluation.temperature)


def describe_sampling(sampling: SamplingRecord) -> str:
    """
    >>> describe_sampling(SamplingRecord(1.0, top_k=5))
    'sampled at temperature 1, top-k 5'
    """
    cuts = [("top-k", sampling.top_k, 0), ("top-p", sampling.top_p, 1.0), ("min-p", sampling.min_p, 0.0)]
    said = "".join(f", {name} {value:g}" for name, value, off in cuts if value != off)
    return f"sampled at temperature {sampling.temperature:g}{said}"


def open_run(location: str | Path) -> Runtime:
    """The run at `location`, as its own config.json describes it.

    Raises:
      UserError: there is no run, or its recipe cannot be read.
    """
    store = RunStore.open(location)
    if not store.exists(run_layout.CONFIG):
        raise UserError(str(location), f"holds no run: there is no {run_layout.CONFIG}.", "Check the path.")
    name = f"{location}/{run_layout.CONFIG}"
    return runtime(location, recipe_from_json(store.get(run_layout.CONFIG), name))


def evaluate_run(
    shared: Runtime,
    *,
    version: int | None = None,
    split: str | None = None,
    most_prompts: int | None = None,
    samples: int | None = None,
    sampling: SamplingRecord | None = None,
) -> Evaluation:
    """Success of a stored policy: sampled, and greedy.

    Args:
      version: None for the newest.
      split: None for the recipe's test split.
      most_prompts, samples: None for what the recipe's evaluation section says.
      sampling: None for the distribution that the recipe trains with.

    Raises:
      UserError: no such version, split or data set; or its weights are damaged.
    """
    recipe = shared.recipe
    version = newest_version(shared) if version is None else version
    params, digest = shared.policy_cache.get(version), shared.policies.commit(version).digest
    split = split or recipe.data.test_split
    sampling = sampling or evaluation_sampling(recipe)
    most_prompts = recipe.evaluation.test_prompts if most_prompts is None else most_prompts
    ways = [
        (describe_sampling(sampling), samples or recipe.evaluation.samples, False),
        ("greedy: the most likely token", 1, True),
    ]
    started = time.perf_counter()
    parts, prompts = [], 0
    for title, each, greedy in ways:
        player = Player(shared, split, most_prompts=most_prompts, samples=each, sampling=sampling, greedy=greedy)
        outcomes, prompts = player.play(params, version), len(player.prompts)
        parts.append(Part(title, summarize(outcomes), summarize_by_stratum(outcomes)))
    seconds = time.perf_counter() - started
    return Evaluation(shared.run, version, digest, split, prompts, seconds, tuple(parts))


def newest_version(shared: Runtime) -> int:
    version = shared.policies.latest()
    if version is None:
        raise UserError(shared.run, "has no policy yet.", "Wait until its warm start is over, or resume the run.")
    return version


# During a run -----------------------------------------------------------------------------------------------------


class LearningCurve:
    """Points of the learning curve: success on validation prompts, one sample a prompt, at the evaluation temperature.

    Give `first` to a run's after_warm_start and `each` to its after_step. Points go to the metrics of "evaluate", where
    the step is the policy version; a resumed run adds those that are missing.
    """

    def __init__(self, run: str | Path, recipe: Recipe):
        self._run = run
        self._recipe = recipe
        self._player: Player | None = None
        self._measured = {event.step for event in read_metrics(RunStore.open(run), "evaluate")}

    def first(self, commit: PolicyCommit) -> None:
        # A run that was killed at a point has published its policy and will not train that step again.
        for version in runtime(self._run, self._recipe).policies.versions():
            self._measure_if_due(version)

    def each(self, report: StepReport) -> None:
        self._measure_if_due(report.policy_version)

    def _measure_if_due(self, version: int) -> None:
        if version not in self._measured and is_curve_point(version, self._recipe):
            self._measured.add(version)
            self._measure(runtime(self._run, self._recipe), version)

    def _measure(self, shared: Runtime, version: int) -> None:
        started = time.perf_counter()
        if self._player is None:
            self._player = Player(
                shared,
                self._recipe.data.validation_split,
                most_prompts=self._recipe.evaluation.curve_prompts,
                samples=1,
                sampling=evaluation_sampling(self._recipe),
            )
        outcomes = self._player.play(shared.policy_cache.get(version), version)
        values = {
            "evaluate/success/fraction": sum(o.successes for o in outcomes) / len(outcomes),
            "evaluate/prompts": len(outcomes),
            "evaluate/samples": sum(o.samples for o in outcomes),
            "evaluate/seconds": time.perf_counter() - started,
        }
        MetricsWriter(shared.store, "evaluate").write(version, values)


def is_curve_point(version: int, recipe: Recipe) -> bool:
    """Whether the learning curve has a point at `version`: every so many steps, and at the run's last."""
    every = recipe.evaluation.every
    return every > 0 and (version % every == 0 or version == recipe.trainer.steps)


# After a run ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """Success of one policy on the test split, or of a scripted rule."""

    label: str
    version: int | None  # None: it is no policy of the run
    digest: str | None
    total: Summary
    by_stratum: dict[str, Summary]


@dataclass(frozen=True)
class RunResults:
    """Before, between and after: what a run achieved on prompts that it never trained on."""

    split: str
    results: tuple[Result, ...]
    sampled: str = "sampled at temperature 1"  # how

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_results(shared: Runtime) -> RunResults:
    """Success on the test split of the first weights, of version 0, of the newest version and of scripted rules.

    All policies meet the same prompts with the same seeds.
    """
    recipe = shared.recipe
    split = recipe.data.test_split
    player = Player(
        shared,
        split,
        most_prompts=recipe.evaluation.test_prompts,
        samples=recipe.evaluation.samples,
        sampling=evaluation_sampling(recipe),
    )
    newest = newest_version(shared)
    first = "checkpoint" if recipe.model.checkpoint else "random weights"
    # Functions, so that one model after the other is in memory.
    weights: list[tuple[str, int, Callable[[], Params]]] = [(first, 0, shared.initial_weights)]
    if shared.policies.commit(0).source == "warm_start":
        weights.append(("after warm start", 0, partial(shared.policy_cache.get, 0)))
    if newest:
        weights.append((f"after RL ({newest} steps)", newest, partial(shared.policy_cache.get, newest)))
    results = []
    for label, version, load in weights:
        params = load()
        outcomes = player.play(params, version)
        results.append(Result(label, version, tree_digest(params), summarize(outcomes), summarize_by_stratum(outcomes)))
    for label, outcomes in play_scripted(recipe, player.prompts).items():
        results.append(Result(label, None, None, summarize(outcomes), summarize_by_stratum(outcomes)))
    return RunResults(split, tuple(results), describe_sampling(evaluation_sampling(recipe)))


def play_scripted(recipe: Recipe, prompts: Sequence[Prompt]) -> dict[str, list[PromptOutcome]]:
    """What each of the environment's scripted rules makes of each prompt, one episode each, by the rule's label."""
    scripted = environment_kind(recipe.task.environment).scripted
    rules = scripted(recipe) if scripted else ()
    return {rule.label: [_scripted_outcome(prompt, rule) for prompt in prompts] for rule in rules}


def _scripted_outcome(prompt: Prompt, rule: ScriptedRule) -> PromptOutcome:
    share = rule.success(prompt)
    return PromptOutcome(prompt.prompt_id, stratum_of(prompt), 1, round(share), 0, share)

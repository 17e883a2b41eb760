"""The command line: run, its parts (begin, rollout, train), evaluate, replay, inspect, runners.

Nothing heavy is imported up here: `--help`, a typing error and the refusal of a recipe must not wait for JAX and Beam.

Left out on purpose: following another process's run, and flags of Beam (a recipe runs the same on every placement).
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from runners import models
from runners.report import print_error, user_error_behind
from runners.tether import hold_tether
from schemas.errors import UserError

if TYPE_CHECKING:
    from pipelines.replay import ReplayedStep
    from runners.profiles import RunnerProfile
    from schemas.recipe import Recipe
    from schemas.records import SamplingRecord
    from stages.prompts.shares import Share

BAD_USE, INTERRUPTED, NOT_IDENTICAL, DOES_NOT_ADD_UP = 2, 130, 1, 1

Command = TypeVar("Command", bound=Callable[..., None])

app = typer.Typer(
    name="rollstream",
    help="Trains language models by reinforcement learning, and shows what the training did.\n\n"
    "A run is a directory: trajectories, weights, metrics and a learning curve. Start one with "
    "[bold]rollstream run[/], look into it with [bold]rollstream inspect[/].",
    epilog="First steps:  rollstream run recipes/frozen_lake.toml   then   rollstream inspect runs/frozen_lake",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunArgument = Annotated[
    str, typer.Argument(help="The run's directory, such as runs/frozen_lake or s3://bucket/frozen_lake.", metavar="RUN")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Recipe values to change, such as trainer.steps=20.", metavar="KEY=VALUE", show_default=False),
]


def main() -> None:
    """The `rollstream` command."""
    hold_tether()
    quiet_libraries()
    app()


OUR_PACKAGES = ("schemas", "jax_core", "stages", "pipelines", "runners")


def quiet_libraries() -> None:
    """Logs our own warnings, and of other libraries errors only: they greet with warnings that nobody can act on."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    handler.addFilter(lambda r: r.levelno >= logging.ERROR or r.name.split(".")[0] in OUR_PACKAGES)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def console_out() -> Console:
    """Standard output. Not a terminal: as wide as a log may be, so that tables keep their columns."""
    return Console() if sys.stdout.isatty() else Console(width=int(os.environ.get("COLUMNS", 120)))


def reports_errors(command: Command) -> Command:
    """Errors that the user can mend: printed in one panel, exit code 2. Everything else keeps its traceback."""

    # Rich keeps the line breaks of a docstring; a terminal's width should break the lines.
    command.__doc__ = re.sub(r"(?<!\n)\n {4}(?=\S)", " ", command.__doc__ or "")

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            _leave_interrupted("")
        except BrokenPipeError:  # of `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except Exception as error:
            known = user_error_behind(error)
            if known is None:
                raise
            print_error(known, Console(stderr=True))
            raise typer.Exit(BAD_USE) from None

    return wrapped  # type: ignore[return-value]


def _leave_interrupted(way_on: str) -> NoReturn:
    """Ends the process at once: Beam's threads do not end by themselves, and what is committed is on the disk."""
    text = f"interrupted. {way_on}".strip()
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)


def print_json(value: Any) -> None:
    """JSON on standard output, NaN as null, never wrapped or coloured."""
    from schemas.text import to_json

    sys.stdout.write(to_json(value, indent=2) + "\n")


# run ---------------------------------------------------------------------------------------------------------------


RunnerOption = Annotated[
    str, typer.Option("--runner", help="Where it runs: see [bold]rollstream runners[/].", metavar="RUNNER")
]
PrismOption = Annotated[
    str | None,
    typer.Option(
        "--prism-location", help="Prism's program. Default: from the PATH, Go's folder, or downloaded.", metavar="PATH"
    ),
]
RecipeArgument = Annotated[Path, typer.Argument(help="The recipe, a TOML file.", metavar="RECIPE")]
DirectoryOption = Annotated[
    str | None,
    typer.Option("--dir", help="The run's directory, or s3://, gs://, az://. Default: runs/<name of the recipe>."),
]
BeamFlags = Annotated[
    list[str] | None,
    typer.Option("--beam-flag", help="A flag for Beam's runner, such as --parallelism=4. Repeatable.", metavar="FLAG"),
]
AcceleratorOption = Annotated[
    str | None,
    typer.Option(
        "--accelerator",
        help="Dataflow: of the sampling step alone, such as type:nvidia-l4;count:1;install-nvidia-driver.",
        metavar="TYPE",
    ),
]


@app.command(
    epilog="[bold]Examples[/]\n\n"
    "rollstream run recipes/frozen_lake.toml\n\n"
    "rollstream run recipes/frozen_lake.toml trainer.steps=20 seed=1 --dir runs/short\n\n"
    "rollstream run recipes/frozen_lake.toml rollout.max_lag=1 --runner local --generators 2\n\n"
    "rollstream run recipes/frozen_lake.toml --resume     [dim]goes on where it was stopped[/]"
)
@reports_errors
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    directory: DirectoryOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run that is in the directory, from where it stopped.")
    ] = False,
    runner: RunnerOption = "colocated",
    generators: Annotated[
        int, typer.Option(help="Processes that sample, each its share; not with colocated.", min=1)
    ] = 1,
    prism_location: PrismOption = None,
    beam_flags: BeamFlags = None,
    accelerator: AcceleratorOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Dataflow: print the job that would be submitted, and start nothing.")
    ] = False,
) -> None:
    """Trains a policy, and shows how well it does on prompts that it never trained on.

    Everything is written to one directory. It can be interrupted at any time, even killed, and resumed: the weights
    come out as if nothing had happened. A directory that holds another run is never written to.
    """
    from schemas.recipe_io import load_recipe

    resolved = load_recipe(recipe, overrides or [])
    location = directory or f"runs/{resolved.name}"
    placement = _Placement(runner, generators, prism_location, tuple(beam_flags or ()), accelerator)
    if dry_run:
        _show_submission(resolved, location, placement)
        return
    _refuse_early(location, resolved, resume)
    try:
        _run(resolved, location, resume, placement)
    except KeyboardInterrupt:
        options = ["--dir", directory] if directory else []
        options += ["--generators", str(generators)] if generators > 1 else []
        options += ["--runner", runner, *placement.options()] if runner != "colocated" else []
        arguments = shlex.join([str(recipe), *(overrides or []), *options, "--resume"])
        _leave_interrupted(f"Go on with:  rollstream run {arguments}")


@dataclass(frozen=True)
class _Placement:
    """What the command line says of where a run runs."""

    runner: str
    generators: int = 1
    prism_location: str | None = None
    beam_flags: tuple[str, ...] = ()
    accelerator: str | None = None

    def options(self) -> list[str]:
        """What a generator has to be told of it, as on its command line."""
        named = [("--prism-location", self.prism_location), ("--accelerator", self.accelerator)]
        named += [("--beam-flag", flag) for flag in self.beam_flags]
        return [f"{name}={value}" for name, value in named if value is not None]

    def profile(self) -> RunnerProfile:
        """Raises UserError if there is no such runner, or it cannot give what is asked for."""
        from runners.profiles import profile_of

        profile = profile_of(self.runner)
        if self.accelerator is not None:
            from runners.dataflow import with_accelerator

            profile = with_accelerator(profile, self.accelerator, self.beam_flags)
        return profile


def _refuse_early(location: str, recipe: Recipe, resume: bool) -> None:
    """The commonest refusals, before seconds of imports. The run itself decides; this only says it sooner."""
    from schemas.recipe_io import differences, recipe_from_json
    from schemas.run_layout import CONFIG
    from schemas.store import RunStore

    store = RunStore.open(location)
    begun = store.exists(CONFIG)
    if not resume and begun:
        way_out = "Add --resume to go on with it, or name another with --dir."
        raise UserError(location, "already holds a run.", way_out)
    if resume and not begun:
        raise UserError(location, "holds no run to resume.", "Check --dir, or leave out --resume.")
    if resume and (changed := differences(recipe_from_json(store.get(CONFIG), f"{location}/{CONFIG}"), recipe)):
        raise UserError(
            location,
            f"holds a run of another recipe: {'; '.join(changed)}.",
            "Resume with the same recipe and changes that it was begun with, or name another directory with --dir.",
        )


def _run(recipe: Recipe, location: str, resume: bool, placement: _Placement) -> None:
    from runners.progress import Progress
    from schemas.store import RunStore

    profile = placement.profile()
    console = console_out()
    store = RunStore.open(location)
    train = _train_here if profile.trains_itself else _train_in_processes
    console.print(Text(f"run {recipe.name} in {location}"))
    with Progress(store, recipe, console):
        train(recipe, location, resume, profile, placement, console)
    _finish(recipe, location, console)


def _train_here(
    recipe: Recipe, location: str, resume: bool, profile: RunnerProfile, placement: _Placement, console: Console
) -> None:
    from pipelines.evaluate import LearningCurve
    from runners import colocated

    if placement.generators > 1:
        raise UserError(
            f"--generators {placement.generators}",
            f"--runner {profile.name} samples in one process, which also trains.",
            "Leave it out, or add --runner local.",
        )
    if placement.prism_location is not None:
        raise UserError(
            f"--prism-location {placement.prism_location}",
            f"--runner {profile.name} does not use Prism.",
            "Leave it out, or add --runner prism.",
        )
    curve = LearningCurve(location, recipe)
    colocated.run(
        recipe,
        location,
        resume=resume,
        after_warm_start=[curve.first],
        after_step=[curve.each],
        beam_flags=placement.beam_flags,
    )


def _train_in_processes(
    recipe: Recipe, location: str, resume: bool, profile: RunnerProfile, placement: _Placement, console: Console
) -> None:
    from runners import processes

    _check_reachable(profile, location)
    placement = replace(placement, prism_location=_prism(profile, placement.prism_location))
    say = lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)
    processes.run(
        recipe,
        location,
        profile,
        resume=resume,
        generators=placement.generators,
        generator_options=placement.options(),
        say=say,
    )


def _prism(profile: RunnerProfile, location: str | None) -> str | None:
    """Path of Prism's program, if the runner is Prism: found, or downloaded, before anything is started."""
    if profile.beam_runner != "PrismRunner":
        return None
    from runners.prism import get_prism

    return get_prism(location)


def _check_reachable(profile: RunnerProfile, location: str) -> None:
    if profile.beam_runner == "DataflowRunner":
        from runners.dataflow import check_location

        check_location(location)


def _show_submission(recipe: Recipe, location: str, placement: _Placement) -> None:
    profile = placement.profile()
    if profile.beam_runner != "DataflowRunner":
        raise UserError("--dry-run", f"--runner {profile.name} submits nothing.", "Use it with --runner dataflow.")
    from runners.dataflow import translate

    print_json(translate(recipe, location, profile, flags=placement.beam_flags).to_json())


def _finish(recipe: Recipe, location: str, console: Console) -> None:
    """The results on held-out prompts, kept in the run directory, printed and drawn."""
    from pipelines.evaluate import open_run, run_results
    from runners.curve import curve_of, draw
    from runners.report import results_table
    from schemas.run_layout import CURVE, RESULTS
    from schemas.text import to_json

    shared = open_run(location)
    console.print(Text("measuring success on held-out prompts ...", style="dim"))
    results = run_results(shared)
    shared.store.put(RESULTS, to_json(results.to_json(), indent=2).encode() + b"\n")
    shared.store.put(CURVE, draw(curve_of(shared.store, recipe, results)))
    console.print(results_table(results))
    console.print(Text.assemble("\nrun directory   ", (location, "bold"), f"\nlearning curve  {location}/{CURVE}"))
    console.print(Text(f"look into it    rollstream inspect {location}", style="dim"))


# The parts of a run, each alone ------------------------------------------------------------------------------------


@app.command(
    epilog="[bold]Examples[/]\n\n"
    "rollstream begin recipes/frozen_lake.toml --dir /shared/lake     [dim]then, on as many hosts as you like:[/]\n\n"
    "rollstream train /shared/lake\n\n"
    "rollstream rollout /shared/lake --share 1/2"
)
@reports_errors
def begin(recipe: RecipeArgument, overrides: Overrides = None, directory: DirectoryOption = None) -> None:
    """Makes the directory of a run and starts nothing: its parts are started one by one, on this host or on others."""
    from runners.run_directory import prepare_run
    from schemas.recipe_io import load_recipe
    from schemas.store import RunStore

    resolved = load_recipe(recipe, overrides or [])
    location = directory or f"runs/{resolved.name}"
    prepare_run(RunStore.open(location), resolved, resume=False)
    console_out().print(f"run {resolved.name} in {location}", markup=False, highlight=False, soft_wrap=True)


@app.command(
    epilog="[bold]Examples[/]\n\n"
    "rollstream rollout /shared/lake\n\n"
    "rollstream rollout /shared/lake --share 2/4     [dim]every fourth element, from the second on[/]\n\n"
    "rollstream rollout /shared/lake --runner prism"
)
@reports_errors
def rollout(
    run: RunArgument,
    share: Annotated[str, typer.Option(help="Which part of the run to sample: I/N, from 1/N to N/N.")] = "1/1",
    runner: RunnerOption = "local",
    prism_location: PrismOption = None,
    beam_flags: BeamFlags = None,
    accelerator: AcceleratorOption = None,
) -> None:
    """Samples a share of a run, as far ahead of its trainer as the recipe allows, until the run is over.

    Needs the run's directory and nothing else. A share can be started again elsewhere at any time, also while the lost
    one still lives: whoever commits an element first has it.
    """
    from runners.generator import generate

    part = _share(share)
    placement = _Placement(runner, 1, prism_location, tuple(beam_flags or ()), accelerator)
    profile = placement.profile()
    _check_reachable(profile, run)
    prism = _prism(profile, prism_location)
    flags = [f"--prism_location={prism}"] if prism else []
    try:
        generate(run, profile, part, [*flags, *placement.beam_flags])
    except KeyboardInterrupt:
        _leave_interrupted("What is committed stays: start it again at any time.")


def _share(text: str) -> Share:
    from stages.prompts.shares import Share

    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--share {text}", "is no share.", "Write I/N with I from 1 to N, such as 2/4.")
    return Share(int(match[1]) - 1, int(match[2]))


@app.command(epilog="[bold]Examples[/]\n\nrollstream train /shared/lake")
@reports_errors
def train(run: RunArgument) -> None:
    """Trains a run, step by step as its shards come, until it is over.

    Needs the run's directory and nothing else. One process trains a run; started again, it goes on where the last one
    stopped.
    """
    from pipelines.evaluate import LearningCurve
    from runners import trainer
    from runners.run_directory import recipe_of
    from schemas.store import RunStore

    curve = LearningCurve(run, recipe_of(RunStore.open(run)))
    try:
        trainer.train(run, after_warm_start=[curve.first], after_step=[curve.each])
    except KeyboardInterrupt:
        _leave_interrupted("What is committed stays: start it again at any time.")


# evaluate ----------------------------------------------------------------------------------------------------------


@app.command(
    epilog="[bold]Examples[/]\n\n"
    "rollstream evaluate runs/frozen_lake\n\n"
    "rollstream evaluate runs/frozen_lake --version 0 --samples 16\n\n"
    "rollstream evaluate runs/frozen_lake --split validation --temperature 0.5 --json"
)
@reports_errors
def evaluate(
    run: RunArgument,
    version: Annotated[int | None, typer.Option(help="Policy version. Default: the newest.", min=0)] = None,
    split: Annotated[str | None, typer.Option(help="Split of the data set. Default: the recipe's test split.")] = None,
    prompts: Annotated[int | None, typer.Option(help="At most so many prompts, spread over the split.", min=1)] = None,
    samples: Annotated[int | None, typer.Option(help="Samples of each prompt, for pass@k.", min=1)] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Temperature of the samples. Default: the recipe's.", min=1e-6)
    ] = None,
    top_k: Annotated[int, typer.Option(help="Sample among the k most likely tokens only. 0: among all.", min=0)] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample among the most likely tokens of this mass.", min=1e-6, max=1.0)
    ] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Success of a run's policy on prompts that it never trained on.

    Twice: sampled, with pass@k (the chance that at least one of k samples succeeds), and greedy. With 95 % confidence
    intervals, for each size of prompt and for all.
    """
    from pipelines.evaluate import evaluate_run, open_run
    from runners.report import evaluation_report

    shared = open_run(run)
    sampling = _sampling(shared.recipe, temperature, top_k, top_p)
    result = evaluate_run(
        shared, version=version, split=split, most_prompts=prompts, samples=samples, sampling=sampling
    )
    if as_json:
        print_json(result.to_json())
    else:
        console_out().print(evaluation_report(result))


def _sampling(recipe: Recipe, temperature: float | None, top_k: int, top_p: float) -> SamplingRecord:
    from schemas.records import SamplingRecord

    return SamplingRecord(recipe.evaluation.temperature if temperature is None else temperature, top_k, top_p)


# replay ------------------------------------------------------------------------------------------------------------


@app.command(
    epilog="[bold]Examples[/]\n\n"
    "rollstream replay runs/frozen_lake     [dim]must give the same weights, bit for bit[/]\n\n"
    "rollstream replay runs/frozen_lake algorithm.advantage=rloo --to runs/rloo\n\n"
    "rollstream replay runs/frozen_lake trainer.optimizer.learning_rate=1e-3"
)
@reports_errors
def replay(
    run: RunArgument,
    overrides: Overrides = None,
    to: Annotated[
        str | None, typer.Option("--to", help="Keep the new weights and metrics in this empty directory.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Trains a run again from its saved trajectories, without sampling any.

    Unchanged, it must end in the same weights, bit for bit; exit code 1 says that it did not. With changes to
    algorithm.* or trainer.* it trains those on the same frozen trajectories, and says what came out differently.
    """
    from pipelines.evaluate import open_run
    from pipelines.replay import changed_recipe
    from pipelines.replay import replay as replay_run
    from runners.report import replay_report
    from schemas.store import RunStore

    shared = open_run(run)
    recipe, changes = changed_recipe(shared.recipe, overrides or [])
    console = console_out()
    show = (lambda step: None) if as_json else _step_printer(console, recipe)
    try:
        result = replay_run(shared, recipe, to=RunStore.open(to) if to else None, report=show)
    except KeyboardInterrupt:
        _leave_interrupted("A replay is not resumed: start it again" + (f", in an empty {to}." if to else "."))
    if as_json:
        print_json(result.to_json())
    else:
        console.print(replay_report(result))
    if not changes and not result.identical:
        raise typer.Exit(NOT_IDENTICAL)


def _step_printer(console: Console, recipe: Recipe) -> Callable[[ReplayedStep], None]:
    """Says each tenth of the way; a bar would hide what the terminal keeps."""
    each = max(1, recipe.trainer.steps // 10)

    def show(step: ReplayedStep) -> None:
        if step.version % each == 0 or step.version == recipe.trainer.steps:
            same = {True: "same weights", False: "other weights"}[step.same] if step.recorded else "not recorded"
            line = f"version {step.version}/{recipe.trainer.steps}  {step.digest[:16]}  {same}"
            console.print(line, markup=False, highlight=False)

    return show


# inspect -----------------------------------------------------------------------------------------------------------


@app.command(
    epilog="[bold]Examples[/]\n\n"
    "rollstream inspect runs/frozen_lake\n\n"
    "rollstream inspect runs/frozen_lake --trajectory 12/3/0     [dim]step 12, group 3, sample 0[/]\n\n"
    "rollstream inspect runs/frozen_lake --ledger\n\n"
    "rollstream inspect runs/frozen_lake --json"
)
@reports_errors
def inspect(
    run: RunArgument,
    trajectory: Annotated[
        str | None, typer.Option(help="Show one trajectory, token by token.", metavar="STEP/GROUP/SAMPLE")
    ] = None,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="What became of each prompt; exit code 1 if it does not add up.")
    ] = False,
    every_row: Annotated[bool, typer.Option("--all", help="Show every row of long tables.")] = False,
    as_json: JsonOption = False,
) -> None:
    """What a run did: each stage's records, tokens and time, what was dropped and why, shards and policies.

    Reads the directory alone, of a run that is going on, is over or is broken. What is damaged or missing is named.
    """
    from schemas.store import RunStore

    store = RunStore.open(run)
    report: Any
    shown: RenderableType
    adds_up = True
    if trajectory is not None:
        from runners.inspect_trajectory import inspect_trajectory, parse_path, render_trajectory

        report = inspect_trajectory(store, parse_path(trajectory))
        shown = render_trajectory(report)
    elif ledger:
        from runners.ledger import ledger_of, render_ledger

        report = ledger_of(store)
        shown = render_ledger(report, every_row=every_row)
        adds_up = not report.problems
    else:
        from runners.inspect import inspect_run, render

        report = inspect_run(store)
        shown = render(report, every_row=every_row)
    if as_json:
        print_json(report.to_json())
    else:
        console_out().print(shown)
    if not adds_up:
        raise typer.Exit(DOES_NOT_ADD_UP)


# runners -----------------------------------------------------------------------------------------------------------


@app.command(epilog="[bold]Examples[/]\n\nrollstream runners\n\nrollstream runners --json")
@reports_errors
def runners(as_json: JsonOption = False) -> None:
    """Where a recipe can run: which runners are usable on this machine, and how to get the others."""
    from runners.availability import availabilities, render

    rows = availabilities()
    if as_json:
        print_json([row.to_json() for row in rows])
    else:
        console_out().print(render(rows))


models.mount(app)

if __name__ == "__main__":
    main()

"""The placements, as data: what each runner needs of the graph, of Beam, and of the processes around it.

A recipe says what is computed, a profile where. Everything else (stages, trainer, run directory) is the same on all of
them, and `StageBoundary` is the only difference in the graph.

Left out on purpose: what a user decides for one run (how many generators, where a binary lies). That comes by flags.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.online import BOUNDARIES, FUSED, GraphShape
from schemas.errors import UserError
from stages.prompts.source import Deferral


@dataclass(frozen=True)
class RunnerProfile:
    """One placement.

    Attributes:
      name: as `--runner` takes it.
      summary: what it is, in a line.
      beam_runner: Beam's name of the runner that samples.
      trains_itself: the trainer is a stage of the pipeline; else it is a process of its own.
      shape: what the runner asks of the graph.
      flags: Beam's flags that the runner needs, whatever the run.
      elements_at_once: most elements that one generator works on at the same time.
    """

    name: str
    summary: str
    beam_runner: str
    trains_itself: bool
    shape: GraphShape
    flags: tuple[str, ...] = ()
    elements_at_once: int = 1


PROFILES = {
    profile.name: profile
    for profile in (
        RunnerProfile(
            name="colocated",
            summary="sampling and training take turns in one process",
            beam_runner="FnApiRunner",
            trains_itself=True,
            shape=FUSED,
        ),
        RunnerProfile(
            name="local",
            summary="generators and the trainer are processes of this machine",
            beam_runner="FnApiRunner",
            trains_itself=False,
            shape=FUSED,
        ),
        RunnerProfile(
            name="prism",
            summary="Beam's streaming runner on this machine, and the trainer a process beside it",
            beam_runner="PrismRunner",
            trains_itself=False,
            # The first boundary lets the source go on while elements are sampled; the second keeps more of them in
            # flight, because Prism runs all that waits before a stage as one bundle, one element after another.
            shape=GraphShape(
                boundaries=frozenset({"AfterAdmitPrompts", "AfterRollout"}),
                # Prism keeps to delays. A checkpoint of the source costs it some 40 ms.
                deferral=Deferral(delay_seconds=0.1, hold_seconds=0.0),
                decode_together=True,
            ),
            flags=("--environment_type=LOOPBACK", "--streaming"),
            elements_at_once=8,
        ),
        RunnerProfile(
            name="flink",
            summary="Apache Flink, and the trainer a process beside it",
            beam_runner="FlinkRunner",
            trains_itself=False,
            # Flink tries bundles again. What a stage with side effects is given must be the same each time.
            shape=GraphShape(boundaries=frozenset(BOUNDARIES), deferral=Deferral(delay_seconds=0.5, hold_seconds=0.0)),
            # One SDK process for each task manager: it holds one engine, which all slots share.
            flags=("--streaming", "--checkpointing_interval=10000", "--parallelism=1", "--sdk_worker_parallelism=1"),
        ),
        RunnerProfile(
            name="dataflow",
            summary="Google Cloud Dataflow, and the trainer on a machine beside it",
            beam_runner="DataflowRunner",
            trains_itself=False,
            shape=GraphShape(
                boundaries=frozenset(BOUNDARIES),
                deferral=Deferral(delay_seconds=1.0, hold_seconds=0.0),
                decode_together=True,
            ),
            flags=(
                "--streaming",
                "--sdk_location=container",  # the image has everything; nothing is installed when a worker starts
                "--experiments=no_use_multiple_sdk_containers",  # one process, and so one engine, for each worker
                "--number_of_worker_harness_threads=8",
            ),
            elements_at_once=8,
        ),
    )
}


def profile_of(name: str) -> RunnerProfile:
    """Raises UserError if there is no such runner."""
    if name not in PROFILES:
        raise UserError(f"--runner {name}", "there is no such runner.", f"Runners: {', '.join(PROFILES)}.")
    return PROFILES[name]

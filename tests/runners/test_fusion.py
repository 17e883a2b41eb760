"""What breaks the fused loop on FnApiRunner is refused by name; what the check lets pass is fused by the runner."""

from __future__ import annotations

from collections.abc import Callable

import apache_beam as beam
import pytest
from apache_beam.coders import VarIntCoder
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.transforms.core import RestrictionProvider
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec, TimerSpec, on_timer

from runners.fusion import check_fusion
from schemas.errors import UserError


class Numbers(beam.DoFn, RestrictionProvider):
    def initial_restriction(self, element):
        return OffsetRange(0, 3)

    def create_tracker(self, restriction):
        return OffsetRestrictionTracker(restriction)

    def restriction_size(self, element, restriction):
        return restriction.size()

    @beam.DoFn.unbounded_per_element()
    def process(self, element, tracker=beam.DoFn.RestrictionParam()):  # noqa: B008
        start = tracker.current_restriction().start
        if tracker.try_claim(start):
            yield (start % 2, start)
            tracker.defer_remainder()


class WithState(beam.DoFn):
    SEEN = ReadModifyWriteStateSpec("seen", VarIntCoder())

    def process(self, pair, seen=beam.DoFn.StateParam(SEEN)):  # noqa: B008
        seen.write((seen.read() or 0) + 1)
        yield pair


class WithTimer(beam.DoFn):
    LATER = TimerSpec("later", TimeDomain.WATERMARK)

    def process(self, pair, later=beam.DoFn.TimerParam(LATER)):  # noqa: B008
        later.set(0)
        yield pair

    @on_timer(LATER)
    def fire(self):
        yield (0, 0)


def add_side(pair, side):
    return (pair[0], pair[1] + side)


def identity(pair):
    return pair


def windowed(pairs: beam.PCollection) -> beam.PCollection:
    # Beam itself refuses to group an endless collection in the one global window.
    return pairs | "Minutes" >> beam.WindowInto(beam.window.FixedWindows(60))


Break = Callable[[beam.PCollection], beam.PCollection]

BARRIERS: dict[str, tuple[str, Break]] = {
    "Reshuffle": ("Shuffled", lambda pairs: pairs | "Shuffled" >> beam.Reshuffle()),
    "GroupByKey": ("Grouped", lambda pairs: windowed(pairs) | "Grouped" >> beam.GroupByKey()),
    "a combiner": ("Summed", lambda pairs: windowed(pairs) | "Summed" >> beam.CombinePerKey(sum)),
    "a resource hint": (
        "Hinted",
        lambda pairs: pairs | "Hinted" >> beam.Map(identity).with_resource_hints(min_ram="4GB"),
    ),
    "a side input from the loop": (
        "Sided",
        lambda pairs: (
            pairs
            | "Sided"
            >> beam.Map(add_side, beam.pvalue.AsSingleton(pairs | "Values" >> beam.Values() | "F" >> beam.Filter(bool)))
        ),
    ),
    "a second splittable step": ("Split", lambda pairs: pairs | "Split" >> beam.ParDo(Numbers())),
    "Flatten": ("Merged", lambda pairs: (pairs, pairs | "Copy" >> beam.Map(identity)) | "Merged" >> beam.Flatten()),
}
# FnApiRunner would fuse these, and then do something else than what they say, or than what another runner does.
UNSOUND: dict[str, tuple[str, Break]] = {
    "a timer": ("Timed", lambda pairs: pairs | "Timed" >> beam.ParDo(WithTimer())),
    "state": ("Stateful", lambda pairs: pairs | "Stateful" >> beam.ParDo(WithState())),
}


def loop(broken_by: Break | None) -> beam.Pipeline:
    pipeline = beam.Pipeline(runner=FnApiRunner())
    pairs = (
        pipeline
        | beam.Impulse()
        | "Source" >> beam.ParDo(Numbers()).with_output_types(tuple[int, int])
        | "Rollout" >> beam.Map(identity).with_output_types(tuple[int, int])
    )
    pairs = broken_by(pairs) if broken_by else pairs
    _ = pairs | "Train" >> beam.Map(identity)
    return pipeline


def stages_from_the_source_on(pipeline: beam.Pipeline) -> int:
    """How many stages the runner itself makes of the steps behind the source, the source's own included."""
    _, stages = FnApiRunner().create_stages(pipeline.to_runner_api())
    # One comes before: the impulse, and the source's restriction.
    return sum(not any(step.unique_name == "Source/PairWithRestriction" for step in s.transforms) for s in stages)


@pytest.mark.parametrize("name", [*BARRIERS, *UNSOUND])
def test_what_breaks_the_loop_is_refused_by_the_name_of_its_step(name: str) -> None:
    label, broken_by = (BARRIERS | UNSOUND)[name]
    with pytest.raises(UserError) as refusal:
        check_fusion(loop(broken_by))
    assert label in refusal.value.offender


@pytest.mark.parametrize("name", BARRIERS)
def test_the_runner_does_cut_the_loop_where_the_check_says_so(name: str) -> None:
    assert stages_from_the_source_on(loop(BARRIERS[name][1])) > 1


def test_a_loop_of_plain_steps_passes_and_the_runner_makes_one_stage_of_it() -> None:
    pipeline = loop(None)
    check_fusion(pipeline)
    assert stages_from_the_source_on(pipeline) == 1


def test_tagged_outputs_and_static_windows_do_not_break_the_loop() -> None:
    def branch(pairs: beam.PCollection) -> beam.PCollection:
        kept, _ = pairs | "Route" >> beam.ParDo(Route()).with_outputs("dead", main="kept")
        return kept | "Window" >> beam.WindowInto(beam.window.GlobalWindows())

    pipeline = loop(branch)
    check_fusion(pipeline)
    assert stages_from_the_source_on(pipeline) == 1


class Route(beam.DoFn):
    def process(self, pair):
        yield pair if pair[1] else beam.pvalue.TaggedOutput("dead", pair)


def test_a_barrier_before_the_source_is_nobodys_business() -> None:
    pipeline = beam.Pipeline(runner=FnApiRunner())
    _ = (
        pipeline
        | beam.Create([1])
        | "Shuffled" >> beam.Reshuffle()
        | "Source" >> beam.ParDo(Numbers()).with_output_types(tuple[int, int])
        | "Train" >> beam.Map(identity)
    )
    check_fusion(pipeline)


def test_a_step_beside_the_loop_that_is_not_behind_its_source_may_group() -> None:
    pipeline = loop(None)
    _ = pipeline | "Beside" >> beam.Create([(1, 1)]) | "Grouped" >> beam.GroupByKey()
    check_fusion(pipeline)

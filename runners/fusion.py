"""Whether FnApiRunner can run the closed loop: everything behind the prompt source must be one fused stage.

FnApiRunner is a batch runner. It interleaves the source with what is fused to it, element by element; what lies behind
a barrier runs when everything before it is done. In a closed loop the source waits for the trainer, so one barrier
between them and nothing ever moves again. This check finds the barrier before the run does.

Left out on purpose: asking the runner's own optimizer, which is internal and names no step (the tests ask it, and hold
its answer and this one together).
"""

from __future__ import annotations

from collections.abc import Iterator

import apache_beam as beam
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2

from schemas.errors import UserError

_PAR_DO = common_urns.primitives.PAR_DO.urn
_GROUP_BY_KEY = common_urns.primitives.GROUP_BY_KEY.urn
_WINDOW = common_urns.primitives.ASSIGN_WINDOWS.urn
_NAMED_BARRIERS = {
    common_urns.composites.RESHUFFLE.urn: "is a Reshuffle, which runs only after everything before it",
    common_urns.composites.COMBINE_PER_KEY.urn: "combines by key, which runs only after everything before it",
}


def check_fusion(pipeline: beam.Pipeline) -> None:
    """Passes if every step behind each splittable source fuses with it.

    Raises:
      UserError: naming the first step, by its label, that does not, and why.
    """
    graph = _Graph(pipeline.to_runner_api())
    for source in graph.sources():
        for step in graph.behind(source):
            problem = graph.problem_of(step, source)
            if problem is not None:
                raise UserError(
                    f"step {graph.label(step)!r}",
                    f"{problem}. The prompt source waits for the trainer, so behind a barrier nothing would ever move.",
                    "Leave it out, or use a placement whose trainer is another process.",
                )


class _Graph:
    """A pipeline as its runner gets it: primitive steps and the collections between them."""

    def __init__(self, proto: beam_runner_api_pb2.Pipeline):
        self._steps = proto.components.transforms
        self._parent = {child: name for name, step in self._steps.items() for child in step.subtransforms}
        self._consumers: dict[str, list[str]] = {}
        for name in self._primitives():
            for collection in self._steps[name].inputs.values():
                self._consumers.setdefault(collection, []).append(name)

    def _primitives(self) -> Iterator[str]:
        # A step without steps of its own that returns its input (an identity) does nothing, and is no primitive.
        return (n for n, step in self._steps.items() if not step.subtransforms and step.spec.urn)

    def sources(self) -> list[str]:
        return [name for name in self._primitives() if self._par_do(name).restriction_coder_id]

    def behind(self, source: str) -> list[str]:
        """Primitive steps that anything from `source` reaches, nearest first."""
        found: list[str] = []
        frontier = [source]
        while frontier:
            for collection in self._steps[frontier.pop(0)].outputs.values():
                new = [step for step in self._consumers.get(collection, []) if step not in found]
                found += new
                frontier += new
        return found

    def problem_of(self, name: str, source: str) -> str | None:
        """Why a step behind `source` does not fuse with it, or None."""
        step = self._steps[name]
        if step.spec.urn == _GROUP_BY_KEY:
            return self._named_barrier(name) or "groups by key, which runs only after everything before it"
        if step.spec.urn not in (_PAR_DO, _WINDOW):
            return f"is no ParDo but {step.spec.urn}, which is not fused"
        if step.environment_id != self._steps[source].environment_id:
            return "has other resource hints, or another environment, than the source"
        return self._par_do_problem(name)

    def _named_barrier(self, name: str) -> str | None:
        urns = [self._steps[n].spec.urn for n in self._ancestors(name)]
        return next((_NAMED_BARRIERS[urn] for urn in urns if urn in _NAMED_BARRIERS), None)

    def _par_do_problem(self, name: str) -> str | None:
        payload = self._par_do(name)
        if payload.restriction_coder_id:
            return "is splittable itself, and a splittable step begins a stage of its own"
        if payload.timer_family_specs:
            return "sets timers, which this runner fires at once or not at all"
        if payload.state_specs:
            return "keeps state across elements, which not every runner keeps whole"
        if payload.side_inputs:
            return "has side inputs, which must be complete before it starts"
        return None

    def _par_do(self, name: str) -> beam_runner_api_pb2.ParDoPayload:
        spec = self._steps[name].spec
        payload = spec.payload if spec.urn == _PAR_DO else b""
        return beam_runner_api_pb2.ParDoPayload.FromString(payload)

    def label(self, name: str) -> str:
        """The step as its author knows it: for the insides of a Reshuffle or the like, the whole of it."""
        named = [n for n in self._ancestors(name) if self._steps[n].spec.urn in _NAMED_BARRIERS]
        return self._steps[named[-1] if named else name].unique_name

    def _ancestors(self, name: str) -> Iterator[str]:
        while name in self._parent:
            name = self._parent[name]
            yield name

"""Boundaries between stages: where a placement may cut the graph, and where it leaves it whole.

A boundary that is on is a Reshuffle, which runners know by two effects. What lies behind it is another stage: it runs
beside the one before, on other threads or machines. And what has passed it is stable: where a runner tries a bundle
again, it starts from there, with the same elements. A boundary that is off is nothing at all, so that on a runner which
needs one fused stage the graph has one.

Left out on purpose: deciding. Which boundaries are on is data of a placement.
"""

from __future__ import annotations

from dataclasses import dataclass

import apache_beam as beam


@dataclass
class StageBoundary(beam.PTransform):
    """Elements -> the same elements, in any order; a Reshuffle if `on`, else no step of the graph."""

    on: bool

    def expand(self, elements: beam.PCollection) -> beam.PCollection:
        return elements | "Reshuffle" >> beam.Reshuffle() if self.on else elements

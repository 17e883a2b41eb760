"""A boundary between stages: where a placement cuts the graph.

It is a Reshuffle, which runners know by two effects. What lies behind it is another stage: it runs beside the one
before, on other threads or machines. And what has passed it is stable: where a runner tries a bundle again, it starts
from there, with the same elements. A runner that needs one fused stage has no boundary.

Left out on purpose: deciding. Which boundaries a graph has is data of a placement.
"""

from __future__ import annotations

from dataclasses import dataclass

import apache_beam as beam


@dataclass
class StageBoundary(beam.PTransform):
    """Elements -> the same elements, in any order, in another stage."""

    def expand(self, elements: beam.PCollection) -> beam.PCollection:
        return elements | "Reshuffle" >> beam.Reshuffle()

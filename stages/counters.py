"""What a stage counts for Beam: names that any runner's page shows, under the stage's class as namespace.

Only from the thread that runs the bundle: Beam silently loses what other threads count. So a stage collects numbers
while it works, and counts them afterwards.

Left out on purpose: gauges and distributions (several runners have none). The run's own metrics (`schemas/metrics.py`)
are the ones to plot; these are for seeing that a job moves.
"""

from __future__ import annotations

from collections.abc import Mapping

from apache_beam.metrics import Metrics


def count(transform_class: type, name: str, n: int = 1) -> None:
    """Adds `n` to the counter `name` of a stage. NumPy integers are fine."""
    Metrics.counter(transform_class, name).inc(int(n))


def count_all(transform_class: type, counts: Mapping[str, int]) -> None:
    """Adds to several counters of a stage. A count of 0 makes the counter appear."""
    for name, n in counts.items():
        count(transform_class, name, n)

"""Counters: what a stage counts is what a runner reports under the stage's class."""

import apache_beam as beam
import numpy as np
from apache_beam.metrics import MetricsFilter

from stages.counters import count, count_all


class Eggs(beam.PTransform):
    def expand(self, numbers):
        return numbers | beam.Map(count_eggs)


def count_eggs(number):
    count(Eggs, "in-numbers")
    count_all(Eggs, {"eggs": np.int64(number), "broken-eggs": 0})


def test_counts_add_up_over_elements_under_the_name_of_their_stage():
    pipeline = beam.Pipeline(runner="FnApiRunner")
    pipeline | beam.Create([2, 3, 7]) | Eggs()
    result = pipeline.run()
    result.wait_until_finish()
    counters = result.metrics().query(MetricsFilter().with_namespace(Eggs))["counters"]
    assert {c.key.metric.name: c.committed for c in counters} == {"in-numbers": 3, "eggs": 12, "broken-eggs": 0}

"""The `rollstream` command, but for Prism's graph: without boundaries it is one stage, in which one element follows
another. For `benchmarks.waiting`, which asks what the boundaries are worth.

    python -m benchmarks.one_at_a_time rollout RUN --runner prism
"""

from __future__ import annotations

from dataclasses import replace

from runners.cli import main
from runners.profiles import PROFILES

if __name__ == "__main__":
    prism = PROFILES["prism"]
    PROFILES["prism"] = replace(prism, shape=replace(prism.shape, boundaries=frozenset()))
    main()

"""What all tests share: compiled programs, kept from one test run to the next, and how they are compiled.

Most of the time of these tests is XLA's. A kept program is found again only for the same source, flags and versions of
JAX and XLA; here also only on the same kind of processor. One that a kill has torn is compiled again, with a warning of
JAX's. `make clean` removes them all.
"""

from __future__ import annotations

import gc
import hashlib
import os
import platform
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROCESSOR_FACTS = ("model name", "flags", "Features")  # in /proc/cpuinfo, of x86 and of ARM


MAPPINGS = Path("/proc/self/maps")  # of Linux; elsewhere there is no such limit
MAPPINGS_KEPT = 20_000  # one module's tests add some 15,000 at most


def pytest_configure(config: pytest.Config) -> None:
    """Tells JAX where, before anything imports it. By environment, so that processes which tests start share it."""
    # A shell's background jobs ignore interrupts, and so would all that the tests start to interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cache = getattr(config, "cache", None)
    if cache is not None:  # it is, with -p no:cacheprovider
        folder = cache.mkdir(f"jax-{_processor()}")
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")


def _processor() -> str:
    """A name for this kind of processor: machine code for another may not run here, or give other bits."""
    facts = {platform.machine(), platform.processor()}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        facts |= {line for line in cpuinfo.read_text().splitlines() if line.startswith(PROCESSOR_FACTS)}
    return hashlib.sha256("\n".join(sorted(facts)).encode()).hexdigest()[:12]


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_are_let_go() -> Iterator[None]:
    """Each compiled program keeps a few mappings of memory, and Linux gives a process 65,530.

    The thousands that all tests compile go beyond that; the next compilation then ends the process without a word.
    """
    yield
    jax = sys.modules.get("jax")  # only where a test has imported it
    if jax and MAPPINGS.exists() and len(MAPPINGS.read_bytes().splitlines()) > MAPPINGS_KEPT:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def hardly_optimized() -> Iterator[None]:
    """XLA leaves most optimizations out, and compiles in half the time. Forgotten again when the module's tests end.

    For modules that compile many models to run each once, and compare with numbers from elsewhere. Not where our own
    programs are compared with each other: these are to agree as they are optimized for users.
    """
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()

import os
import signal
import subprocess
import sys

import pytest

from jax_core.faults import VARIABLE, crash_point

PASS_THREE_TIMES = """
from jax_core.faults import crash_point
for passing in (1, 2, 3):
    crash_point("here")
    crash_point("there")
    print(passing, flush=True)
"""


def run(crash_at: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if crash_at is not None:
        environment[VARIABLE] = crash_at
    return subprocess.run([sys.executable, "-c", PASS_THREE_TIMES], env=environment, capture_output=True, text=True)


def test_a_process_dies_at_the_asked_passing_of_the_asked_point():
    finished = run("there:2")
    assert finished.returncode == -signal.SIGKILL
    assert finished.stdout.split() == ["1"]


def test_a_point_that_is_not_asked_for_does_nothing():
    for crash_at in (None, "elsewhere:1", "here:4"):
        finished = run(crash_at)
        assert finished.returncode == 0, finished.stderr
        assert finished.stdout.split() == ["1", "2", "3"]


@pytest.mark.parametrize("text", ["", "here", "here:", ":1", "here:0", "here:-1", "here:x"])
def test_a_request_that_could_never_fire_is_refused(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match="<name>:<n>"):
        crash_point("elsewhere")

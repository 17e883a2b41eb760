"""Apache Flink: where its job server is, which takes Beam's pipelines to a Flink cluster.

It is a program in Java that comes with Beam's releases, as a jar. Beam starts one that it is given, or talks to one
that is at work already.

Left out on purpose: starting a cluster. Without an address the job server runs a small one inside itself.
"""

from __future__ import annotations

import os
from pathlib import Path

from schemas.errors import UserError

VARIABLE = "ROLLSTREAM_FLINK_JOB_SERVER"  # the jar's path, or host:port
HOW_TO_GET_IT = (
    f"set {VARIABLE} to the jar of Beam's job server (org.apache.beam:beam-runners-flink-<version>-job-server at Maven "
    "Central; needs Java), or to host:port where one is at work"
)


def job_server() -> str | None:
    """What the environment says of the job server: a jar's path or an address; None if it says nothing."""
    return os.environ.get(VARIABLE) or None


def job_server_flags() -> list[str]:
    """Beam's flags for it.

    Raises:
      UserError: the environment names none, or a file that is not there.
    """
    named = job_server()
    if named is None:
        raise UserError("--runner flink", "needs a job server, and none is named.", f"To have one, {HOW_TO_GET_IT}.")
    if Path(named).is_file():
        return [f"--flink_job_server_jar={named}"]
    host, colon, port = named.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise UserError(f"{VARIABLE}={named}", "is neither a file nor host:port.", f"To have one, {HOW_TO_GET_IT}.")
    return [f"--job_endpoint={named}"]

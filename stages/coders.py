"""How records travel between stages on runners that serialise them, and what Beam may think they weigh.

Beam samples the size of what passes between fused stages by encoding it. A batch is a hundred thousand Python objects,
so with Beam's default coder this costs a tenth of a step, for a number that nobody reads.

Left out on purpose: a wire format of our own. Records that must outlive a process are shards (`schemas.trajectory`).
"""

from __future__ import annotations

import pickle
from typing import Any

from apache_beam import coders

from schemas.manifest import ShardManifest
from schemas.records import GroupedBatch, PackedBatch, PromptBatch, RolloutBatch, ScoredBatch


class RecordCoder(coders.Coder):
    """Pickles a record; its size is estimated as a constant."""

    def encode(self, value: Any) -> bytes:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)

    def decode(self, encoded: bytes) -> Any:
        return pickle.loads(encoded)

    def estimate_size(self, value: Any) -> int:
        return 1

    def is_deterministic(self) -> bool:
        return False

    def to_type_hint(self) -> type:
        return object

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


def register_record_coders() -> None:
    """Makes RecordCoder the coder of every record that passes between stages, for pipelines built from now on."""
    for record in (PromptBatch, RolloutBatch, ScoredBatch, GroupedBatch, PackedBatch, ShardManifest):
        coders.registry.register_coder(record, RecordCoder)

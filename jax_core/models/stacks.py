"""Which blocks are stacked: a model of any depth is traced as few times as it has unlike blocks.

A stack is a pattern of blocks that repeats; its position j in the pattern is a *slot*, whose weights are stacked over
the repeats. So 26 Gemma 3 layers (five with a window, one without, ...) are the 6 slots of one stack of 4 repeats, and
one more slot of 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jax_core.models.config import BlockConfig, ModelConfig


@dataclass(frozen=True)
class Stack:
    """Layers `start` to `start + repeats * period`, of which every period is alike."""

    start: int
    period: int
    repeats: int
    first_slot: int

    @property
    def slots(self) -> range:
        return range(self.first_slot, self.first_slot + self.period)


@dataclass(frozen=True)
class Place:
    """Where a layer's weights are: parameters[slot][..][index]."""

    slot: str
    index: int


def slot_name(slot: int) -> str:
    """Key of a slot's stacked weights in the parameters; a model of equal blocks has only `blocks`."""
    return "blocks" if slot == 0 else f"blocks_{slot}"


def stacks_of(config: ModelConfig) -> tuple[Stack, ...]:
    """The model's stacks, in order: those with the fewest slots together."""
    kinds: dict[BlockConfig, int] = {}
    return _stacks(tuple(kinds.setdefault(block, len(kinds)) for block in config.blocks))


@lru_cache(maxsize=64)
def _stacks(kinds: tuple[int, ...]) -> tuple[Stack, ...]:
    total = len(kinds)
    best: list[tuple[int, int, tuple[tuple[int, int], ...]]] = [(0, 0, ())] * (total + 1)  # slots, stacks, cuts
    for start in reversed(range(total)):
        choices = []
        for period, repeats in _repetitions(kinds[start:]):
            slots, count, cuts = best[start + period * repeats]
            choices.append((slots + period, count + 1, ((period, repeats), *cuts)))
        best[start] = min(choices, key=_preference)
    made: list[Stack] = []
    start = slot = 0
    for period, repeats in best[0][2]:
        made.append(Stack(start, period, repeats, slot))
        start, slot = start + period * repeats, slot + period
    return tuple(made)


def _preference(choice: tuple[int, int, tuple[tuple[int, int], ...]]) -> tuple[Any, ...]:
    slots, count, cuts = choice
    return slots, count, [-period * repeats for period, repeats in cuts]


def _repetitions(kinds: tuple[int, ...]) -> list[tuple[int, int]]:
    """(period, repeats) of every pattern that the layers begin with, a single layer included."""
    found = [(1, 1)]
    for period in range(1, len(kinds) // 2 + 1):
        repeats = 1
        while kinds[repeats * period : (repeats + 1) * period] == kinds[:period]:
            repeats += 1
            found.append((period, repeats))
    return found


def slot_blocks(config: ModelConfig) -> list[tuple[BlockConfig, int]]:
    """Each slot's block and how many layers it stacks."""
    stacks = stacks_of(config)
    return [(config.blocks[s.start + j], s.repeats) for s in stacks for j in range(s.period)]


def layer_places(config: ModelConfig) -> list[Place]:
    """Each layer's place in the parameters."""
    return [
        Place(slot_name(stack.first_slot + j), repeat)
        for stack in stacks_of(config)
        for repeat in range(stack.repeats)
        for j in range(stack.period)
    ]

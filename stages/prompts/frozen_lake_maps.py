"""The data set frozen_lake_maps: random solvable FrozenLake maps, split by content.

A map belongs to train, validation or test by the hash of its own letters, whatever the seed and the options. So no
build of this data set, and no two builds together, ever hold a map in training and in a held-out split at once. Maps of
2 x 2 are all in training: there are three.

Train draws maps as they come and may repeat them. Validation and test hold each map at most once.

A map is distributed as gymnasium's `generate_random_map(size, p)` makes it: every cell but start and goal is frozen
with probability p, and unsolvable maps are drawn again with the same p; p is uniform in `frozen_share`, a new one a
map. The generator is our own because it makes a thousand maps at once. Left out: symmetries (a mirrored map is another
map).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import tensorflow_datasets as tfds
from pydantic import Field, field_validator

from schemas.identity import seed_int
from schemas.recipe import Section

Split: TypeAlias = Literal["train", "validation", "test"]
HELD_OUT_SHARE = 0.15  # of all possible maps, for validation and for test each
BATCH_MAPS = 1024
# A held-out split gives up on a size after so many draws a map asked for: there are few small maps.
DRAWS_PER_HELD_OUT_MAP = 20

Size = Annotated[int, Field(ge=2, le=9)]
HeldOutSize = Annotated[int, Field(ge=3, le=9)]
FrozenProbability = Annotated[float, Field(ge=0.5, le=1.0)]


class FrozenLakeMapOptions(Section):
    """Options of the data set (`data.options` of a recipe)."""

    seed: Annotated[int, Field(ge=0)] = Field(0, description="which maps are drawn; not which split a map belongs to")
    frozen_share: tuple[FrozenProbability, FrozenProbability] = Field(
        (0.6, 0.85), description="a map's cells are frozen with a probability drawn uniformly from this range"
    )
    train_maps: Annotated[int, Field(ge=1)] = Field(20_000, description="maps of the training split, repeats included")
    train_sizes: dict[Size, Annotated[float, Field(gt=0.0)]] = Field(
        default={2: 0.02, 3: 0.13, 4: 0.3, 5: 0.55}, min_length=1, description="side of a training map -> its weight"
    )
    validation_maps: dict[HeldOutSize, Annotated[int, Field(ge=1)]] = Field(
        default={3: 100, 4: 100, 5: 100},
        min_length=1,
        description="side -> distinct maps; what a small side lacks is made up by the larger ones",
    )
    test_maps: dict[HeldOutSize, Annotated[int, Field(ge=1)]] = Field(
        default={3: 100, 4: 100, 5: 100}, min_length=1, description="the same for the test split"
    )

    @field_validator("frozen_share")
    @classmethod
    def _range_is_ordered(cls, frozen_share: tuple[float, float]) -> tuple[float, float]:
        if frozen_share[0] > frozen_share[1]:
            raise ValueError(f"{list(frozen_share)} is no range from low to high")
        return frozen_share


@dataclass(frozen=True)
class LakeMap:
    """A solvable map: rows of S, F, H, G joined by newlines, and the length of a shortest path."""

    text: str
    optimal_steps: int

    @property
    def size(self) -> int:
        return self.text.index("\n")

    @property
    def prompt_id(self) -> str:
        return f"frozen_lake/{self.size}/{_digest(self.text)[:12]}"


def home_split(text: str) -> Split:
    """The one split that a map belongs to, by its content alone."""
    if text.index("\n") == 2:
        return "train"
    place = int(_digest(text)[-8:], 16) / 2**32
    if place < HELD_OUT_SHARE:
        return "test"
    return "validation" if place < 2 * HELD_OUT_SHARE else "train"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def train_maps(options: FrozenLakeMapOptions) -> Iterator[LakeMap]:
    """`options.train_maps` maps with sizes drawn by weight; repeats are left in."""
    sizes = sorted(options.train_sizes)
    bounds = np.cumsum([options.train_sizes[size] for size in sizes])
    draws = _uniform(_bits(options.seed, "sizes"), (options.train_maps,)) * bounds[-1]
    streams = {size: _maps_at_home(options, "train", size) for size in sizes}
    for index in np.searchsorted(bounds[:-1], draws, side="right"):
        yield next(streams[sizes[index]])


def held_out_maps(options: FrozenLakeMapOptions, split: Split) -> Iterator[LakeMap]:
    """Distinct maps of `split`, smaller sizes first. A size with too few leaves its lack to the larger ones."""
    wanted = options.test_maps if split == "test" else options.validation_maps
    lacking = 0
    for place, size in enumerate(sorted(wanted)):
        share = -(-lacking // (len(wanted) - place))
        maps = _distinct_maps(options, split, size, wanted[size] + share)
        lacking += wanted[size] - len(maps)
        yield from maps
    if lacking:
        logging.getLogger(__name__).warning("frozen_lake_maps: %s has %d maps fewer than asked for", split, lacking)


def _distinct_maps(options: FrozenLakeMapOptions, split: Split, size: int, most: int) -> list[LakeMap]:
    found: dict[str, LakeMap] = {}
    for lake_map in itertools.islice(_maps_at_home(options, split, size), DRAWS_PER_HELD_OUT_MAP * most):
        found.setdefault(lake_map.text, lake_map)
        if len(found) == most:
            break
    return list(found.values())


def _maps_at_home(options: FrozenLakeMapOptions, split: Split, size: int) -> Iterator[LakeMap]:
    """Endless maps of one size that belong to `split`."""
    bits = _bits(options.seed, split, size)
    while True:
        for lake_map in draw_maps(bits, size, BATCH_MAPS, options.frozen_share):
            if home_split(lake_map.text) == split:
                yield lake_map


def draw_maps(bits: np.random.PCG64, size: int, count: int, frozen_share: tuple[float, float]) -> list[LakeMap]:
    """`count` solvable maps of `size`; `bits` moves on."""
    low, high = frozen_share
    shares = low + (high - low) * _uniform(bits, (count,))
    frozen = np.zeros((count, size, size), bool)
    optimal_steps = np.zeros(count, int)
    unsolved = np.arange(count)
    while unsolved.size:
        frozen[unsolved] = _uniform(bits, (unsolved.size, size, size)) < shares[unsolved, None, None]
        frozen[:, 0, 0] = frozen[:, -1, -1] = True
        optimal_steps[unsolved] = path_lengths(frozen[unsolved])
        unsolved = unsolved[optimal_steps[unsolved] < 0]
    return [LakeMap(text, steps) for text, steps in zip(_texts(frozen), optimal_steps.tolist(), strict=True)]


def path_lengths(frozen: np.ndarray) -> np.ndarray:
    """Moves of a shortest path from the first to the last cell of each board; -1 if there is none.

    Args:
      frozen: [N, size, size] bool, the cells that can be stood on.

    Returns:
      [N] int.
    """
    lengths = np.full(len(frozen), -1)
    reached = np.zeros_like(frozen)
    reached[:, 0, 0] = frozen[:, 0, 0]
    for moves in itertools.count(1):
        grown = reached.copy()
        grown[:, 1:] |= reached[:, :-1]
        grown[:, :-1] |= reached[:, 1:]
        grown[:, :, 1:] |= reached[:, :, :-1]
        grown[:, :, :-1] |= reached[:, :, 1:]
        grown &= frozen
        lengths[grown[:, -1, -1] & (lengths < 0)] = moves
        if np.array_equal(grown, reached):
            break
        reached = grown
    return lengths


def _texts(frozen: np.ndarray) -> list[str]:
    count, size, _ = frozen.shape
    letters = np.full((count, size, size + 1), ord("\n"), np.uint8)
    letters[:, :, :size] = np.where(frozen, ord("F"), ord("H"))
    letters[:, 0, 0], letters[:, -1, -2] = ord("S"), ord("G")
    return [board.tobytes()[:-1].decode() for board in letters]


def _bits(seed: int, *parts: int | str) -> np.random.PCG64:
    return np.random.PCG64(seed_int("frozen_lake_maps", seed, *parts))


def _uniform(bits: np.random.PCG64, shape: tuple[int, ...]) -> np.ndarray:
    # From the raw bits, because numpy promises the same ones in every version; it does not promise Generator's draws.
    return (bits.random_raw(int(np.prod(shape))) >> np.uint64(11)).reshape(shape) * 2.0**-53


@dataclasses.dataclass(eq=False, kw_only=True)
class FrozenLakeMapsConfig(tfds.core.BuilderConfig):
    """A builder config that is named by the digest of its options, so that other options are another folder."""

    name: str = ""
    options: FrozenLakeMapOptions = dataclasses.field(default_factory=FrozenLakeMapOptions)

    def __post_init__(self) -> None:
        self.name = self.name or f"options-{_digest(self.options.model_dump_json())[:12]}"


class FrozenLakeMaps(tfds.core.GeneratorBasedBuilder):
    """Random solvable FrozenLake maps, split by content. Bump VERSION whenever the same options give other maps."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS: list[tfds.core.BuilderConfig] = [FrozenLakeMapsConfig(name="default")]  # noqa: RUF012

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(
            {
                "prompt_id": tfds.features.Text(),
                "map": tfds.features.Text(),
                "size": np.int32,
                "optimal_steps": np.int32,
            }
        )
        return tfds.core.DatasetInfo(builder=self, description=__doc__, features=features)

    def _split_generators(self, dl_manager: Any) -> Mapping[str, Iterator[tuple[int, dict[str, Any]]]]:
        options = self.builder_config.options
        return {
            "train": self._generate_examples(train_maps(options)),
            "validation": self._generate_examples(held_out_maps(options, "validation")),
            "test": self._generate_examples(held_out_maps(options, "test")),
        }

    def _generate_examples(self, maps: Iterator[LakeMap]) -> Iterator[tuple[int, dict[str, Any]]]:
        for index, lake_map in enumerate(maps):
            yield (
                index,
                {
                    "prompt_id": lake_map.prompt_id,
                    "map": lake_map.text,
                    "size": lake_map.size,
                    "optimal_steps": lake_map.optimal_steps,
                },
            )

"""FrozenLake as a conversation: gymnasium's lake, read and answered in text.

The map SFF/FHF/FFG reads, on a grid of names 5 cells wide:

    prompt ^abc     answer D    environment f    answer D    environment k    ...
           fⓖh
           klm*
           a

Every cell is written by a name of its own, one character: plain where one can stand, circled where there is a hole,
with a star behind the goal's. The prompt is the map once, then the name of the agent's cell; every later turn is that
name only. Names are laid row by row on a grid of `names_grid` x `names_grid`, so that a cell has one name in maps of
every size. So whatever is to be known about a neighbour is under one of two tokens, always the same two: a small policy
learns this several times faster than digits for row and column, which have to be counted out, and than holes that are
all alike, which it sees only by finding no name (docs/experiments.md).

With `show_ways`, a sign behind each name of the agent's cell shows the ways that are open from there, as an agent that
stands there would see them: a╷ (down only), f│ (down and up). Which of them leads to the goal is still for it to find.

An answer is a move if it is one of L, D, R, U. Anything else leaves the agent where it is, uses up a move, and is
answered by '?' before the name. Data sets and payloads keep gymnasium's letters S, F, H, G. Left out: rendering, reward
for getting nearer, demonstrations on a slippery lake.
"""

from __future__ import annotations

import copy
import functools
import json
import string
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from pydantic import Field

from schemas.errors import UserError
from schemas.identity import seed_int
from schemas.recipe import Recipe, Section
from schemas.records import Prompt
from stages.options import checked_options
from stages.rollout.environments.base import Demonstration, ScriptedRule, Transition

MOVES = "LDRU"  # index is gymnasium's action
OFFSETS = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
OPPOSITE = {"L": "R", "R": "L", "U": "D", "D": "U"}
LARGEST_GRID = 9
# Names of cells, and of the holes in their place: 81 of each, so that letters of moves are no names.
NAMES = string.ascii_lowercase + string.digits + "ABCEFGHIJKMNOPQSTVWXYZ" + "αβγδεζηθικλμνξοπρστυφχψ"
HOLES = "ⓐⓑⓒⓓⓔⓕⓖⓗⓘⓙⓚⓛⓜⓝⓞⓟⓠⓡⓢⓣⓤⓥⓦⓧⓨⓩ" + "⓪①②③④⑤⑥⑦⑧⑨" + "ⒶⒷⒸⒺⒻⒼⒽⒾⒿⓀⓂⓃⓄⓅⓆⓈⓉⓋⓌⓍⓎⓏ" + "ΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡΣΤΥΦΧΨ"
SIGNS = "\n*^LDRU?"  # whatever else prompts, turns and answers are written in
WAYS = "·╴╷┐╶─┌┬╵┘│┤└┴├┼"  # by the sum of 1 if left is open, 2 if down, 4 if right, 8 if up

Rows: TypeAlias = tuple[str, ...]
Cell: TypeAlias = tuple[int, int]


class FrozenLakeOptions(Section):
    """Options of the frozen_lake environment."""

    moves_per_size: Annotated[int, Field(ge=1)] = Field(
        4, description="an episode is truncated after moves_per_size x (longer side of the map) moves"
    )
    slippery: bool = Field(
        False, description="a move goes to either side of its direction with probability 1/3 each (gymnasium's rule)"
    )
    hole_reward: Annotated[float, Field(le=0.0, allow_inf_nan=False)] = Field(
        0.0, description="reward of falling into a hole; below 0, a policy in a dead end learns to turn back"
    )
    show_ways: bool = Field(
        False,
        description="the agent's cell is followed by a sign of the ways that are open from it: no hole, no edge. The "
        "tokenizer's alphabet needs the signs, ·╴╷┐╶─┌┬╵┘│┤└┴├┼",
    )
    dead_ends_shown: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.0,
        description="share of the demonstrations that first walk into a dead end; only the way out of it, and on to "
        "the goal, is taught",
    )
    names_grid: Annotated[int, Field(ge=2, le=LARGEST_GRID)] = Field(
        5,
        description="side of the grid that cells are named on; a larger map is refused. Above 5 the tokenizer needs "
        "more names than its default alphabet has",
    )


RawOptions: TypeAlias = Mapping[str, Any] | FrozenLakeOptions


def alphabet(names_grid: int, show_ways: bool = False) -> str:
    """The `tokenizer.alphabet` that lakes on a grid of this side need: the recipe's default up to 5 and without ways.

    >>> alphabet(5)
    '\\n*^LDRU?abcdefghijklmnopqrstuvwxyzⓐⓑⓒⓓⓔⓕⓖⓗⓘⓙⓚⓛⓜⓝⓞⓟⓠⓡⓢⓣⓤⓥⓦⓧⓨⓩ'
    """
    names = max(len(string.ascii_lowercase), names_grid**2)
    return SIGNS + NAMES[:names] + HOLES[:names] + WAYS * show_ways


def cell_name(cell: Cell, names_grid: int) -> str:
    """The name of the cell at (row, column).

    >>> cell_name((1, 2), 5)
    'h'
    """
    return NAMES[cell[0] * names_grid + cell[1]]


def named_cell(name: str, names_grid: int) -> Cell:
    """The (row, column) of the cell called `name`."""
    return divmod(NAMES.index(name), names_grid)


def ways_sign(rows: Rows, cell: Cell) -> str:
    """The sign of the ways that lead from `cell` neither into a hole nor off the map.

    >>> ways_sign(("SFF", "FHF", "FFG"), (0, 1))
    '─'
    """
    free = _free_cells(rows)
    return WAYS[sum(1 << i for i, (_, neighbour) in enumerate(_neighbours(cell)) if neighbour in free)]


def make(options: RawOptions) -> FrozenLake:
    """An environment with `options` (as written in a recipe, or checked)."""
    return FrozenLake(checked_options(FrozenLakeOptions, options, "task.options"))


class FrozenLake:
    """One episode on one map: reward 1.0 on reaching the goal, `hole_reward` in a hole, else 0.0. See `Environment`.

    Facts: "return" (float), "success" (bool), "invalid_answers", "steps", "size" (longer side), "optimal_steps" (length
    of a shortest path without slips; None if there is no path).
    """

    def __init__(self, options: FrozenLakeOptions):
        self._options = options
        self._lake: FrozenLakeEnv | None = None

    def reset(self, prompt: Prompt, seed: int) -> str:
        rows = map_rows(prompt, self._options)
        self._rows = rows
        self._lake = _new_lake(rows, self._options.slippery)
        state, _ = self._lake.reset(seed=seed)
        self._position = divmod(state, len(rows[0]))
        self._size = max(len(rows), len(rows[0]))
        self._optimal_steps = shortest_path_length(rows)
        self._steps = self._invalid_answers = 0
        self._return = 0.0
        return f"^{_named_map(rows, self._options.names_grid)}\n{self._position_name()}"

    def step(self, answer: str) -> Transition:
        if self._lake is None:
            raise RuntimeError("step() without an episode: call reset() first, and again after an episode's end.")
        move = parse_move(answer)
        reward, terminated = (0.0, False) if move is None else self._move(self._lake, move)
        self._steps += 1
        self._invalid_answers += move is None
        self._return += reward
        truncated = not terminated and self._steps >= self._options.moves_per_size * self._size
        if terminated or truncated:
            self._lake = None
            text = ""
        else:
            text = ("?" if move is None else "") + self._position_name()
        return Transition(text, reward, terminated, truncated, self._facts())

    def close(self) -> None:
        self._lake = None

    def _move(self, lake: FrozenLakeEnv, move: str) -> tuple[float, bool]:
        state, reward, terminated, _, _ = lake.step(MOVES.index(move))
        self._position = divmod(state, lake.ncol)
        drowned = terminated and lake.desc[self._position] == b"H"
        return self._options.hole_reward if drowned else float(reward), bool(terminated)

    def _position_name(self) -> str:
        name = cell_name(self._position, self._options.names_grid)
        return name + _ways_signs(self._rows)[self._position] if self._options.show_ways else name

    def _facts(self) -> dict[str, Any]:
        return {
            "return": self._return,
            "success": self._return > 0.0,
            "invalid_answers": self._invalid_answers,
            "steps": self._steps,
            "size": self._size,
            "optimal_steps": self._optimal_steps,
        }


def parse_move(answer: str) -> str | None:
    """The move that `answer` is, or None. Case matters; white space around it does not."""
    stripped = answer.strip()
    return stripped if len(stripped) == 1 and stripped in MOVES else None


def map_rows(prompt: Prompt, options: FrozenLakeOptions) -> Rows:
    """The map of a prompt, from the payload's "map": rows of S, F, H, G, joined by newlines.

    Raises:
      UserError: there is no map, or it is none that this environment plays, or it is larger than the grid of names.
    """
    text = prompt.payload.get("map")
    fault = "its payload has no text 'map'" if not isinstance(text, str) else _map_fault(text)
    if fault:
        raise UserError(
            f"prompt {prompt.prompt_id}",
            f"{fault}, so FrozenLake cannot play it.",
            "Choose a data set with a text feature 'map', such as frozen_lake_maps, or another task.environment.",
        )
    rows = tuple(str(text).split("\n"))
    _refuse_larger(prompt, rows, options)
    return rows


def _refuse_larger(prompt: Prompt, rows: Rows, options: FrozenLakeOptions) -> None:
    side, names_grid = max(len(rows), len(rows[0])), options.names_grid
    if side <= names_grid:
        return
    written = json.dumps(alphabet(side, options.show_ways), ensure_ascii=False)  # as TOML writes it, too
    enough = f"Set task.options.names_grid={side} and tokenizer.alphabet={written}."
    raise UserError(
        f"prompt {prompt.prompt_id}",
        f"its map of {len(rows)} x {len(rows[0])} is larger than names_grid={names_grid}: cells outside have no name.",
        enough if side <= LARGEST_GRID else f"Leave out maps above {LARGEST_GRID} x {LARGEST_GRID}: names end there.",
    )


@functools.lru_cache(maxsize=1024)
def _map_fault(text: str) -> str | None:
    rows = text.split("\n")
    if len({len(row) for row in rows}) != 1:
        return "the rows of its map differ in length"
    if set(text) - set("SFHG\n"):
        return "its map has letters other than S, F, H, G"
    if text.count("S") != 1 or "G" not in text:
        return "its map needs exactly one S and at least one G"
    return None


# What follows from a map alone is kept for the other samples of its prompt: all are read-only.


@functools.lru_cache(maxsize=1024)
def _ways_signs(rows: Rows) -> Mapping[Cell, str]:
    """`ways_sign` of every cell that one can stand on."""
    return {cell: ways_sign(rows, cell) for cell in _free_cells(rows)}


@functools.lru_cache(maxsize=1024)
def _named_map(rows: Rows, names_grid: int) -> str:
    """The map as a prompt shows it."""
    named = [[_shown(letter, (r, c), names_grid) for c, letter in enumerate(row)] for r, row in enumerate(rows)]
    return "\n".join("".join(row) for row in named)


def _shown(letter: str, cell: Cell, names_grid: int) -> str:
    name = cell_name(cell, names_grid)
    return HOLES[NAMES.index(name)] if letter == "H" else name + "*" * (letter == "G")


def _new_lake(rows: Rows, slippery: bool) -> FrozenLakeEnv:
    # A lake's transition table takes most of its construction and is only read, so samples of one prompt share it. The
    # copy is an episode of its own, because reset(seed) gives it its own state and random generator.
    return copy.copy(_lake_of(rows, slippery))


@functools.lru_cache(maxsize=1024)
def _lake_of(rows: Rows, slippery: bool) -> FrozenLakeEnv:
    return FrozenLakeEnv(desc=list(rows), is_slippery=slippery)


@functools.lru_cache(maxsize=1024)
def shortest_path_length(rows: Rows) -> int | None:
    """Moves of a shortest path from S to the nearest G around the holes; None if there is no path."""
    return _distances(rows).get(_start(rows))


def demonstrate(prompt: Prompt, options: RawOptions) -> Demonstration:
    """One shortest path, drawn uniformly among all of them by a seed that derives from the prompt's id.

    For a share `dead_ends_shown` of the prompts it begins in a dead end, and the way there is walked first, untaught.
    Shortest paths alone never turn back, so a policy that only knows them drowns wherever it went wrong.

    Raises:
      UserError: the lake is slippery, so no fixed list of moves reaches the goal; or the map has no path.
    """
    checked = checked_options(FrozenLakeOptions, options, "task.options")
    if checked.slippery:
        raise UserError(
            "task.options.slippery=true",
            "a demonstration is a fixed list of moves, and slips would carry it off its path.",
            "Use slippery=false, or warm_start.steps=0.",
        )
    rows = map_rows(prompt, checked)
    if shortest_path_length(rows) is None:
        raise UserError(f"prompt {prompt.prompt_id}", "its map has no path to the goal.", "Leave such maps out.")
    bits = np.random.PCG64(seed_int("demonstration", prompt.prompt_id))
    path = _draw_shortest_path(rows, bits)
    if int(bits.random_raw()) / 2**64 >= checked.dead_ends_shown:
        return Demonstration(tuple(path))
    end = _draw_dead_end(rows, bits)
    if end is None:
        return Demonstration(tuple(path))
    astray = _draw_shortest_path(_redrawn(rows, {end: "G"}, goals="H"), bits)
    back = _draw_shortest_path(_redrawn(rows, {_start(rows): "F", end: "S"}), bits)
    return Demonstration((*astray, *back), first_taught=len(astray))


def _draw_dead_end(rows: Rows, bits: np.random.PCG64) -> Cell | None:
    """A cell from which no way leads nearer to a goal, as the crow flies; where there is none, any cell but the start.
    None if the start leads nowhere but to goals. One can walk there and back without crossing a goal."""
    start = _start(rows)
    walked = sorted(_distances(_redrawn(rows, {start: "G"}, goals="H")).keys() - {start})
    ends = [cell for cell in walked if not _ways_nearer(rows, cell)] or walked
    return ends[int(bits.random_raw()) % len(ends)] if ends else None


def _ways_nearer(rows: Rows, cell: Cell) -> list[str]:
    free, goals = _free_cells(rows), [cell for cell, letter in _cells(rows).items() if letter == "G"]

    def crow_flies(c: Cell) -> int:
        return min(abs(c[0] - goal[0]) + abs(c[1] - goal[1]) for goal in goals)

    return [move for move, c in _neighbours(cell) if c in free and crow_flies(c) < crow_flies(cell)]


def _redrawn(rows: Rows, letters: Mapping[Cell, str], goals: str = "G") -> Rows:
    """The map with `goals` in the place of every G, and then `letters` in their cells."""
    grid = [list(row.replace("G", goals)) for row in rows]
    for (r, c), letter in letters.items():
        grid[r][c] = letter
    return tuple("".join(row) for row in grid)


def scripted_rule(rows: Rows, row: int, col: int, moves: Sequence[str]) -> str:
    """The next move by common sense alone; a policy that scores no better has not been shown to plan.

    Never into a hole, down if possible, else right, else up, else left, and not straight back unless nothing else is
    left. It looks one cell ahead, and takes for granted that the goal is to the lower right.

    Args:
      rows: the map.
      row: where the agent stands.
      col: where the agent stands.
      moves: the moves so far, for the last one.
    """
    back = OPPOSITE[moves[-1]] if moves else ""
    for move in "DRUL":
        r, c = row + OFFSETS[move][0], col + OFFSETS[move][1]
        inside = 0 <= r < len(rows) and 0 <= c < len(rows[0])
        if inside and rows[r][c] != "H" and move != back:
            return move
    return back or "D"


def scripted_rules(recipe: Recipe) -> list[ScriptedRule]:
    """`scripted_rule`, as an opponent; it needs no training prompts."""
    return [ScriptedRule("scripted rule", lambda prompt: float(_scripted_episode(prompt, recipe.task.options)))]


def _scripted_episode(prompt: Prompt, options: RawOptions) -> bool:
    checked = checked_options(FrozenLakeOptions, options, "task.options")
    environment, rows = make(checked), map_rows(prompt, checked)
    moves: list[str] = []
    text: Any = environment.reset(prompt, seed_int("scripted", prompt.prompt_id))
    while True:
        name = text[-2 if checked.show_ways else -1]
        moves.append(scripted_rule(rows, *named_cell(name, checked.names_grid), moves))
        transition = environment.step(moves[-1])
        if transition.over:
            return bool(transition.facts["success"])
        text = transition.text


def _draw_shortest_path(rows: Rows, bits: np.random.PCG64) -> list[str]:
    distances = _distances(rows)
    paths = _path_counts(distances)
    cell = _start(rows)
    moves: list[str] = []
    while distances[cell] > 0:
        closer = [(move, c) for move, c in _neighbours(cell) if distances.get(c) == distances[cell] - 1]
        # Weighing each move by the number of shortest paths behind it makes every path equally likely. random_raw,
        # unlike Generator's methods, is promised to give the same draws in every numpy version.
        drawn = int(bits.random_raw()) % sum(paths[c] for _, c in closer)
        move, cell = _weighted(closer, paths, drawn)
        moves.append(move)
    return moves


def _weighted(closer: Sequence[tuple[str, Cell]], paths: Mapping[Cell, int], drawn: int) -> tuple[str, Cell]:
    """The move whose paths hold number `drawn`, counting the paths through move after move."""
    for move, cell in closer:
        if drawn < paths[cell]:
            return move, cell
        drawn -= paths[cell]
    raise AssertionError("drawn is below the number of paths")


def _distances(rows: Rows) -> dict[Cell, int]:
    """Moves from each cell to the nearest goal, over cells that are no holes; unreachable cells are absent."""
    cells = _free_cells(rows)
    distances = {cell: 0 for cell, letter in _cells(rows).items() if letter == "G"}
    frontier = deque(distances)
    while frontier:
        cell = frontier.popleft()
        for _, neighbour in _neighbours(cell):
            if neighbour in cells and neighbour not in distances:
                distances[neighbour] = distances[cell] + 1
                frontier.append(neighbour)
    return distances


def _path_counts(distances: Mapping[Cell, int]) -> dict[Cell, int]:
    """Number of shortest paths from each cell to a nearest goal."""
    counts: dict[Cell, int] = {}
    for cell in sorted(distances, key=distances.__getitem__):
        closer = (c for _, c in _neighbours(cell) if distances.get(c) == distances[cell] - 1)
        counts[cell] = sum(counts[c] for c in closer) if distances[cell] else 1
    return counts


def _cells(rows: Rows) -> dict[Cell, str]:
    return {(r, c): letter for r, row in enumerate(rows) for c, letter in enumerate(row)}


def _free_cells(rows: Rows) -> set[Cell]:
    """Where one can stand."""
    return {cell for cell, letter in _cells(rows).items() if letter != "H"}


def _neighbours(cell: Cell) -> list[tuple[str, Cell]]:
    return [(move, (cell[0] + down, cell[1] + right)) for move, (down, right) in OFFSETS.items()]


def _start(rows: Rows) -> Cell:
    return next((r, row.index("S")) for r, row in enumerate(rows) if "S" in row)

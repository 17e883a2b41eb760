"""Sessions of many threads that use the same weights, decoded together in one compiled call.

    engine = SharedEngine(Engine(...))
    session = engine.begin(params, prompts, samples, seeds)     # as of Engine, in any thread
    answers = session.answer({row: environment_tokens, ...})    # waits; whoever else waits is in the same call

A thread that asks while no call is running runs one, for itself and all that wait; those that ask meanwhile are the
next call. Rows whose environments still think hold nobody up, but for the tenth of a call that one waits for company.

The keys and values of all sessions lie in one pool of blocks: a prompt, and the rows that branch from it. A call
gathers the rows that were asked for, decodes them, and puts what is new behind what each row has. So a row's columns
have no holes, a pool needs no more of them than a branch has tokens, and a call costs what it decodes. A pool is of one
params object: other weights have another, and it goes with the last of its sessions.

Tokens are those of `Engine`: a function of weights, prompt and seed. Log-probabilities may differ in their last bits,
because how many rows are computed together depends on time.

Left out: prefill across sessions, prompts that groups share with each other, joining a call in the midst of an answer,
several devices.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_core.models.config import ModelConfig
from jax_core.models.decoder import Params
from jax_core.models.passes import Cache, Layers, Prefix, empty_cache
from jax_core.sampling.engine import Answer, Engine, round_up

_FEWEST_ROWS = 32
_FEWEST_COLUMNS = 32
# Of a call's seconds: how long the next one waits for sessions between two turns. Without, those that come back quickly
# split into halves that take turns, each in calls of its own. Waiting longer gains nothing more.
_PATIENCE = 0.1
_DROPPED = np.int32(2**30)  # a column that no pool has: what is written there is written nowhere


class SharedEngine:
    """Samples as `engine` does, for any number of threads; has no weights, and no memory while it has no session."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._shapes = _Shapes(engine.prompt_tokens)
        self._lock = threading.Lock()
        self._batches: weakref.WeakValueDictionary[tuple[int, int], _Batch] = weakref.WeakValueDictionary()

    def begin(self, params: Params, prompts: Sequence[np.ndarray], samples: int, seeds: np.ndarray) -> SharedSession:
        """As `Engine.begin`. Sessions with the same `params` object and `samples` are decoded together."""
        return SharedSession(self._batch(params, samples), prompts, seeds)

    def _batch(self, params: Params, samples: int) -> _Batch:
        with self._lock:
            # A batch holds its params, so that no other object can have their id while it lives.
            batch = self._batches.get((id(params), samples))
            if batch is None:
                batch = _Batch(self.engine, params, samples, self._shapes)
                self._batches[id(params), samples] = batch
            return batch


class SharedSession:
    """Conversations in flight. Use from one thread.

    Attributes:
      sessions_in_call: how many sessions the last answers' call decoded, this one included.
    """

    def __init__(self, batch: _Batch, prompts: Sequence[np.ndarray], seeds: np.ndarray):
        samples = batch.samples
        prefix = batch.engine.prefill(batch.params, prompts)
        blocks = batch.pool.insert(prefix)
        # What frees the blocks must work from the garbage collector, at any moment: no lock, only a deque.
        self._blocks = set(blocks.tolist())
        self._give_back = weakref.finalize(self, batch.pool.given_back.extend, self._blocks)
        self._give_back.atexit = False
        batch.sessions.add(self)
        self._batch: _Batch | None = batch
        self._alive = np.ones(len(blocks) * samples, bool)
        self._slots = (blocks[:, None] * samples + np.arange(samples)).ravel()
        self._prompt_ends = np.repeat([len(p) - 1 for p in prompts], samples).astype(np.int32)
        self._pending = np.repeat([p[-1] for p in prompts], samples).astype(np.int32)  # seen, not yet run
        self._used = np.zeros(len(self._slots), np.int32)  # columns
        self._seeds = np.asarray(seeds, np.uint32)
        self.sessions_in_call = 0

    def answer(self, environment_tokens: Mapping[int, np.ndarray]) -> dict[int, Answer]:
        """As `Session.answer`.

        Raises:
          ValueError: a retired or unknown row was named.
          Exception: whatever the engine raised, in each session that the call decoded.
        """
        batch = self._retire(environment_tokens)
        rows = np.flatnonzero(self._alive)
        if batch is None or not len(rows):
            return {}
        chunks = [np.append(self._pending[row], environment_tokens[int(row)]).astype(np.int32) for row in rows]
        asked = _Asked(self._slots[rows], self._prompt_ends[rows], self._used[rows], self._seeds[rows], chunks)
        said = batch.answer(asked)
        self.sessions_in_call = said.sessions
        answers = {}
        for i, row in enumerate(rows.tolist()):
            answer = batch.engine.finish(said.tokens[i, : said.counts[i]], said.logprobs[i, : said.counts[i]])
            # The last token is sampled but not yet run. What was cut lies behind the used columns, and is written over.
            self._used[row] += len(chunks[i]) + len(answer.tokens) - 1
            self._pending[row] = answer.tokens[-1]
            answers[row] = answer
        return answers

    def close(self) -> None:
        """Retires all rows and gives back their memory. Once more does nothing."""
        if self._batch is not None:
            self._batch.sessions.discard(self)
        self._alive[:] = False
        self._give_back()
        self._batch = None

    def _retire(self, going_on: Mapping[int, np.ndarray]) -> _Batch | None:
        self._alive &= np.isin(np.arange(len(self._alive)), list(going_on))
        if self._alive.sum() != len(going_on):
            raise ValueError("a retired or unknown row was named; rows that sit out a turn are retired for good")
        if self._batch is not None:
            left = self._blocks - set((self._slots[self._alive] // self._batch.samples).tolist())
            self._blocks -= left
            self._batch.pool.given_back.extend(left)
        return self._batch


@dataclass(eq=False)
class _Asked:
    """Rows of one session that want an answer."""

    slots: np.ndarray  # int [r], in the pool
    prompt_ends: np.ndarray  # int32 [r], tokens of the prefix
    used: np.ndarray  # int32 [r], columns of the row's own
    seeds: np.ndarray  # uint32 [r, 2]
    chunks: list[np.ndarray]  # int32 [>= 1] each: what was not yet run
    said: Future[_Said] = field(default_factory=Future)


class _Said(NamedTuple):
    tokens: np.ndarray  # int32 [r, N]
    logprobs: np.ndarray  # float32 [r, N]
    counts: np.ndarray  # int32 [r]
    sessions: int  # that the call decoded


class _Batch:
    """Sessions with the same weights: their pool, and the queue of those that wait for an answer."""

    def __init__(self, engine: Engine, params: Params, samples: int, shapes: _Shapes):
        self.engine = engine
        self.params = params
        self.samples = samples
        self.pool = _Pool(engine.config, samples)
        self.sessions: weakref.WeakSet[SharedSession] = weakref.WeakSet()
        self._shapes = shapes
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._answered = threading.Condition(self._lock)
        self._waiting: list[_Asked] = []
        self._leader: _Asked | None = None
        self._call_seconds = 0.0

    def answer(self, asked: _Asked) -> _Said:
        """Waits for an answer, and runs the call itself if nobody else does."""
        together = self._wait(asked)
        if together:
            self._answer_all(together)
        return asked.said.result()

    def _wait(self, asked: _Asked) -> list[_Asked]:
        """Waits for a call of others to end. Whom the next one decodes, if this thread is to run it."""
        with self._lock:
            self._waiting.append(asked)
            self._arrived.notify()
            try:
                self._answered.wait_for(lambda: asked.said.done() or self._leader is None)
                if asked.said.done():
                    return []
                self._leader = asked
                self._arrived.wait_for(lambda: len(self._waiting) >= len(self.sessions), _PATIENCE * self._call_seconds)
            except BaseException:
                self._leave(asked)
                raise
            together, self._waiting = self._waiting, []
            return together

    def _leave(self, asked: _Asked) -> None:
        """For a thread that was interrupted. Its slots must not be given back while a call reads them."""
        if asked not in self._waiting:
            self._answered.wait_for(asked.said.done)
            return
        self._waiting.remove(asked)
        if self._leader is asked:
            self._leader = None
            self._answered.notify_all()

    def _answer_all(self, together: Sequence[_Asked]) -> None:
        started = time.perf_counter()
        try:
            for asked, said in zip(together, self._decode(together), strict=True):
                asked.said.set_result(said)
        except BaseException as error:
            for asked in together:
                asked.said.set_exception(error)
        with self._lock:
            self._call_seconds = time.perf_counter() - started
            self._leader = None
            self._answered.notify_all()

    def _decode(self, together: Sequence[_Asked]) -> list[_Said]:
        call = lay_out(together, self.samples, self.engine.answer_tokens, self._shapes, self.engine.tokenizer.pad_id)
        shape = call.shape
        layers = self.pool.gather(call)
        prefix = Prefix(layers.prefix, jnp.asarray(call.prompt_ends))
        cache = Cache(layers.own, np.arange(shape.columns)[None] < call.used[:, None])
        column = int(call.used.max())
        positions = (np.repeat(call.prompt_ends, shape.rows_of_block) + call.used).astype(np.int32)
        state = (prefix, cache, column, call.chunk, call.lengths, positions, call.seeds)
        tokens, logprobs, counts, grown = self.engine.decode(self.params, *state)
        self.pool.scatter(call, grown, column, _new_columns(call, counts, self.engine.answer_tokens))
        return [_Said(tokens[p], logprobs[p], counts[p], len(together)) for p in call.places]


class _Shape(NamedTuple):
    """What a compiled call is specialised to."""

    blocks: int  # n: prompts
    rows_of_block: int  # B / n: 1 where the prompt is copied to each row
    columns: int  # S, those that the call adds included
    chunk: int  # C

    @property
    def rows(self) -> int:
        return self.blocks * self.rows_of_block

    def has_room_for(self, other: _Shape) -> bool:
        # A wider chunk takes columns, so that it is what is left of them that must be enough.
        fits = self.blocks >= other.blocks and self.chunk >= other.chunk
        return fits and self.columns - self.chunk >= other.columns - other.chunk


class _Shapes:
    """The shapes that calls were compiled for. Compiling takes seconds, so one that is half empty is used again."""

    def __init__(self, prompt_tokens: int):
        self._prompt_tokens = prompt_tokens
        self._lock = threading.Lock()
        self._known: set[_Shape] = set()

    def fitting(self, needed: _Shape) -> _Shape:
        """The cheapest known shape with room for `needed`, if it costs at most twice as much; else a new one."""
        fewest = -(-_FEWEST_ROWS // needed.rows_of_block)
        new = needed._replace(
            blocks=_power_of_two(max(needed.blocks, fewest)),
            columns=_power_of_two(max(needed.columns, _FEWEST_COLUMNS)),
        )
        with self._lock:
            alike = (known for known in self._known if known.rows_of_block == needed.rows_of_block)
            best = min((known for known in alike if known.has_room_for(needed)), key=self._cost, default=new)
            if self._cost(best) > 2 * self._cost(new):
                best = new
            self._known.add(best)
            return best

    def _cost(self, shape: _Shape) -> int:
        """Keys that the rows look at, more or less."""
        return shape.rows * (self._prompt_tokens + shape.columns + shape.chunk)


@dataclass(frozen=True, eq=False)
class Call:
    """Rows of several sessions side by side. B rows in n blocks; places that nobody asked for have length 0."""

    shape: _Shape
    places: list[np.ndarray]  # of each session's rows, int [r]: their row in the call
    blocks: np.ndarray  # int32 [n], in the pool
    prompt_ends: np.ndarray  # int32 [n]
    slots: np.ndarray  # int32 [B], in the pool
    used: np.ndarray  # int32 [B]
    chunk: np.ndarray  # int32 [B, C]
    lengths: np.ndarray  # int32 [B]
    seeds: np.ndarray  # uint32 [B, 2]


def lay_out(together: Sequence[_Asked], samples: int, answer_tokens: int, shapes: _Shapes, pad_id: int) -> Call:
    """Places the rows: in whole blocks that share a prompt, where half of their rows are there; else each alone."""
    slots = np.concatenate([asked.slots for asked in together])
    used = np.concatenate([asked.used for asked in together])
    chunks = [chunk for asked in together for chunk in asked.chunks]
    lengths = np.array([len(chunk) for chunk in chunks], np.int32)
    blocks = np.unique(slots // samples)
    whole = len(blocks) * samples <= 2 * len(slots)
    rows_of_block = samples if whole else 1
    places = np.searchsorted(blocks, slots // samples) * samples + slots % samples if whole else np.arange(len(slots))
    width = round_up(int(lengths.max()))
    columns = int(used.max()) + width + answer_tokens - 1
    shape = shapes.fitting(_Shape(len(blocks) if whole else len(slots), rows_of_block, columns, width))
    chunk = np.full((shape.rows, shape.chunk), pad_id, np.int32)
    for place, tokens in zip(places, chunks, strict=True):
        chunk[place, : len(tokens)] = tokens
    block_places = places // rows_of_block
    ends = np.cumsum([len(asked.slots) for asked in together])[:-1]
    return Call(
        shape=shape,
        places=np.split(places, ends),
        blocks=_placed(slots // samples, block_places, shape.blocks),
        prompt_ends=_placed(np.concatenate([asked.prompt_ends for asked in together]), block_places, shape.blocks),
        slots=_placed(slots, places, shape.rows),
        used=_placed(used, places, shape.rows),
        chunk=chunk,
        lengths=_placed(lengths, places, shape.rows),
        seeds=_placed(np.concatenate([asked.seeds for asked in together]), places, shape.rows, np.uint32),
    )


def _placed(values: np.ndarray, places: np.ndarray, size: int, dtype: type = np.int32) -> np.ndarray:
    array = np.zeros((size, *values.shape[1:]), dtype)
    array[places] = values
    return array


def _new_columns(call: Call, counts: np.ndarray, answer_tokens: int) -> np.ndarray:
    """int32 [B, C + N - 1]: the row's own column that each new one becomes; none for what is no token."""
    width = call.shape.chunk
    in_chunk, in_answer = np.arange(width)[None], np.arange(answer_tokens - 1)[None]
    used, lengths = call.used[:, None], call.lengths[:, None]
    fed = np.where(call.lengths > 0, counts - 1, 0)[:, None]
    chunk = np.where(in_chunk < lengths, used + in_chunk, _DROPPED)
    answer = np.where(in_answer < fed, used + lengths + in_answer, _DROPPED)
    return np.concatenate([chunk, answer], axis=1).astype(np.int32)


class _Gathered(NamedTuple):
    prefix: Layers  # [.., n, Tp, ..]
    own: Layers  # [.., B, S, ..]


class _Pool:
    """Keys and values of blocks of `samples` rows, in arrays that grow by doubling.

    Attributes:
      given_back: blocks that are free again, put here by any thread.
    """

    def __init__(self, config: ModelConfig, samples: int):
        self.given_back: deque[int] = deque()
        self._config = config
        self._samples = samples
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._prefix: Layers = ()  # [.., blocks, Tp, ..]
        self._own: Layers = ()  # [.., blocks * samples, S, ..]

    @property
    def shape(self) -> tuple[int, int]:
        """Blocks that there is room for, and columns of a row."""
        with self._lock:
            return self._sizes()

    def insert(self, prefix: Prefix) -> np.ndarray:
        """Blocks, int32 [P], for these prompts."""
        with self._lock:
            count, padded = prefix.shape
            self._make_blocks(count, padded)
            blocks = np.array(sorted(self._free)[:count], np.int32)
            self._free = sorted(self._free)[count:]
            self._prefix = _put_blocks(self._prefix, prefix.layers, blocks)
            return blocks

    def gather(self, call: Call) -> _Gathered:
        """Copies of what the call's rows have."""
        with self._lock:
            columns = self._sizes()[1]
            if call.shape.columns > columns:
                self._own = _resized(self._own, 0, call.shape.columns - columns)
            return _gather(call.shape.columns, self._prefix, self._own, call.blocks, call.slots)

    def scatter(self, call: Call, grown: Layers, column: int, to: np.ndarray) -> None:
        """Keeps the columns of `grown` from `column` on: each row's new ones in its own columns `to`."""
        with self._lock:
            self._own = _scatter(self._own, grown, column, call.slots, to)

    def _sizes(self) -> tuple[int, int]:
        return (self._prefix[0].k.shape[1], self._own[0].k.shape[2]) if self._prefix else (0, _FEWEST_COLUMNS)

    def _make_blocks(self, count: int, padded: int) -> None:
        while self.given_back:
            self._free.append(self.given_back.popleft())
        have, columns = self._sizes()
        more = _power_of_two(have + max(0, count - len(self._free))) - have
        if not have:
            self._prefix = empty_cache(self._config, more, padded).layers
            self._own = empty_cache(self._config, more * self._samples, columns).layers
        elif more:
            self._prefix = _resized(self._prefix, more, 0)
            self._own = _resized(self._own, more * self._samples, 0)
        self._free.extend(range(have, have + more))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


@partial(jax.jit, static_argnums=(1, 2))
def _resized(layers: Layers, rows: int, columns: int) -> Layers:
    """With so many more rows and columns."""
    return jax.tree.map(lambda a: jnp.pad(a, [(0, 0), (0, rows), (0, columns), (0, 0), (0, 0)]), layers)


@partial(jax.jit, donate_argnums=0)
def _put_blocks(pool: Layers, new: Layers, blocks: jax.Array) -> Layers:
    return jax.tree.map(lambda a, b: a.at[:, blocks].set(b), pool, new)


@partial(jax.jit, static_argnums=0)
def _gather(columns: int, prefix: Layers, own: Layers, blocks: jax.Array, slots: jax.Array) -> _Gathered:
    take = partial(jnp.take, axis=1, mode="clip")
    prefix = jax.tree.map(lambda a: take(a, blocks), prefix)
    return _Gathered(prefix, jax.tree.map(lambda a: take(a[:, :, :columns], slots), own))


@partial(jax.jit, donate_argnums=0)
def _scatter(pool: Layers, grown: Layers, column: jax.Array, slots: jax.Array, to: jax.Array) -> Layers:
    def put(a: jax.Array, b: jax.Array) -> jax.Array:
        new = jax.lax.dynamic_slice_in_dim(b, column, to.shape[1], axis=2)
        return a.at[:, slots[:, None], to].set(new, mode="drop")

    return jax.tree.map(put, pool, grown)

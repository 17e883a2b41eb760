"""What the stages of one process share: the run's stores, and one engine, trainer, dialogue and prompt set.

A stage's transform carries only the recipe and the run's location, which travel to any worker; the heavy things are
looked up here when a worker first needs them, once a process, whatever number of DoFn instances the runner makes.

Left out on purpose: truth. Everything here can be thrown away and built again from the run directory, except
`train_state`, which `stages.train` restores from it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import numpy as np

from jax_core.chat import Dialogue, make_dialogue
from jax_core.checkpoints import Checkpoint, load_params, open_checkpoint
from jax_core.checkpoints.load import verified_rules
from jax_core.lora import adapted_matrices, merge
from jax_core.models.config import ModelConfig
from jax_core.models.decoder import Params, init_params, param_shapes
from jax_core.policies import PolicyCache, PolicyStore, TrainerStore
from jax_core.sampling.engine import Engine
from jax_core.sampling.shared import SharedEngine
from jax_core.tokenizers import Tokenizer, make_tokenizer
from jax_core.trainer import Trainer, TrainState
from schemas import run_layout
from schemas.manifest import PolicyCommit
from schemas.recipe import Recipe
from schemas.recipe_io import recipe_to_json
from schemas.records import SamplingRecord
from schemas.store import RunStore
from stages.prompts.datasets import PromptData, open_prompts
from stages.shards import RecentContents

if TYPE_CHECKING:
    from stages.train import StepReport

T = TypeVar("T")


class built_once(Generic[T]):
    """functools.cached_property, built by one thread while others wait. Assigning to the attribute replaces it."""

    def __init__(self, build: Callable[[Any], T]):
        self._build = build
        self.__doc__ = build.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> built_once[T]: ...
    @overload
    def __get__(self, instance: Any, owner: type) -> T: ...
    def __get__(self, instance: Any, owner: type) -> built_once[T] | T:
        if instance is None:
            return self
        with instance.lock:
            if self._name not in instance.__dict__:
                instance.__dict__[self._name] = self._build(instance)
            return instance.__dict__[self._name]


class Runtime:
    """The shared parts of one run in this process, each built when it is first asked for. Safe from many threads.

    Args:
      run: location of the run directory.
      recipe: the run's recipe.

    Attributes:
      run_id: which run data belongs to; a function of the recipe as the run was begun with it, see `run_id_of`.
      warm_start_report: called with (step, metrics) after each supervised step of the warm start.
      after_warm_start: called in order with the commit of version 0, each time that a pipeline starts and it is there.
      after_step: called in order with each StepReport, on the trainer's thread, once the step's policy is published.
      train_state: the trainer's weights and optimizer state after its last step; None before the first one.
      train_lock: held by whoever trains.
      idle_since: when the trainer began to wait for shards, on the monotonic clock.
      recent_shards: what this process committed and no trainer has taken yet.
    """

    def __init__(self, run: str | Path, recipe: Recipe):
        self.run = str(run)
        self.recipe = recipe
        self.lock = threading.RLock()
        self.store = RunStore.open(run)
        self.run_id = _own_run_id(self.store, recipe)
        self.warm_start_report: Callable[[int, Mapping[str, float]], None] = _ignore
        self.after_warm_start: list[Callable[[PolicyCommit], None]] = []
        self.after_step: list[Callable[[StepReport], None]] = []
        self.train_lock = threading.Lock()
        self.recent_shards = RecentContents()
        self.train_state: TrainState | None = None
        self.idle_since = time.monotonic()

    @built_once
    def policies(self) -> PolicyStore:
        return PolicyStore(self.store)

    @built_once
    def policy_cache(self) -> PolicyCache:
        """Whole weights by version, whatever a policy stores."""
        if self.base is None:
            return PolicyCache(self.policies)
        return PolicyCache(self.policies, weights_of=partial(_merged, self.base, self.recipe.lora.alpha))

    @built_once
    def trainer_states(self) -> TrainerStore:
        return TrainerStore(self.store)

    @built_once
    def dialogue(self) -> Dialogue:
        """A conversation that has not begun: each sample's is forked from it."""
        return make_dialogue(self.recipe, make_tokenizer(self.recipe))

    @property
    def tokenizer(self) -> Tokenizer:
        return self.dialogue.tokenizer

    @built_once
    def model_config(self) -> ModelConfig:
        return _model_config(self.recipe, self.checkpoint, self.tokenizer)

    @built_once
    def prompts(self) -> PromptData:
        """The training split."""
        return open_prompts(self.recipe.data, self.recipe.task, self.recipe.data.train_split)

    @built_once
    def engine(self) -> Engine:
        """Samples training rollouts."""
        sampling, rollout = self.recipe.sampling, self.recipe.rollout
        return Engine(
            self.model_config,
            self.tokenizer,
            SamplingRecord(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p),
            answer_tokens=sampling.answer_tokens,
            stop_strings=sampling.stop_strings,
            prompt_tokens=rollout.prompt_tokens,
            branch_tokens=rollout.branch_tokens,
        )

    @built_once
    def shared_engine(self) -> SharedEngine:
        """The same engine, for elements that are sampled at the same time."""
        return SharedEngine(self.engine)

    @built_once
    def trainer(self) -> Trainer:
        return Trainer(self.model_config, self.recipe, self.base)

    @built_once
    def checkpoint(self) -> Checkpoint | None:
        """What the run's model starts from, opened; None: from random weights."""
        return _open_checkpoint(self.recipe)

    def initial_weights(self) -> Params:
        """The model before any training: the checkpoint's, or random ones. A pure function of the recipe and its files,
        so nothing stores them after a warm start."""
        if self.checkpoint is None:
            return init_params(self.model_config, self.recipe.seed)
        return load_params(self.checkpoint, np.dtype(self.recipe.model.parameters_dtype))

    @built_once
    def base(self) -> Params | None:
        """The weights that adapters are merged into; None where all weights are trained."""
        return self.initial_weights() if self.recipe.lora.rank else None


def check_model(recipe: Recipe) -> None:
    """Refuses a model that a run could not begin with, before there is one. Reads no weights.

    Raises:
      UserError: the checkpoint is not there, not whole or not supported; it has no tokenizer or chat template, where
        the recipe takes them from it; or `lora.targets` name nothing.
    """
    checkpoint = _open_checkpoint(recipe)
    if checkpoint is not None:
        verified_rules(checkpoint)
    tokenizer = make_dialogue(recipe, make_tokenizer(recipe)).tokenizer
    if recipe.lora.rank:
        adapted_matrices(param_shapes(_model_config(recipe, checkpoint, tokenizer)), recipe.lora.targets)


def _open_checkpoint(recipe: Recipe) -> Checkpoint | None:
    return open_checkpoint(recipe.model.checkpoint) if recipe.model.checkpoint else None


def _model_config(recipe: Recipe, checkpoint: Checkpoint | None, tokenizer: Tokenizer) -> ModelConfig:
    if checkpoint is not None:
        return checkpoint.config.with_recipe(recipe.model).with_tokens(tokenizer.vocab_size)
    return ModelConfig.from_recipe(recipe.model, tokenizer.vocab_size)


def _merged(base: Params, alpha: float, adapters: Params) -> Params:
    return merge(base, adapters, alpha)


def _ignore(step: int, values: Mapping[str, float]) -> None:
    """A report that nobody wants."""


def run_id_of(name: str, config: bytes) -> str:
    """A run's identity: its name, and a digest of its config.json, which decides what it computes.

    So shards that another recipe left in a directory are told from the run's own, and a moved run stays itself.
    """
    return f"{name}-{hashlib.sha256(config).hexdigest()[:12]}"


def _own_run_id(store: RunStore, recipe: Recipe) -> str:
    # By the bytes that were stored: a later release that knows one more setting would write the recipe differently.
    stored = store.exists(run_layout.CONFIG)
    return run_id_of(recipe.name, store.get(run_layout.CONFIG) if stored else recipe_to_json(recipe))


_LOCK = threading.Lock()
_RUNTIMES: dict[tuple[str, str], Runtime] = {}


def runtime(run: str | Path, recipe: Recipe) -> Runtime:
    """This process's Runtime of the run at `run`; the same one at every call."""
    with _LOCK:
        key = (str(run), run_id_of(recipe.name, recipe_to_json(recipe)))
        if key not in _RUNTIMES:
            _RUNTIMES[key] = Runtime(run, recipe)
        return _RUNTIMES[key]


def release(run: str | Path) -> None:
    """Forgets the Runtime of the run at `run`: the next call of `runtime` starts from what is in the directory."""
    with _LOCK:
        for key in [key for key in _RUNTIMES if key[0] == str(run)]:
            del _RUNTIMES[key]

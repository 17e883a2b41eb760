"""A checkpoint, opened: what model it is and where each of its tensors lies. Nothing of the weights is read yet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jax_core.checkpoints.generation import GenerationDefaults, generation_defaults, gguf_defaults
from jax_core.checkpoints.gguf_file import GGUFFile
from jax_core.checkpoints.gguf_model import GGUFTensors, config_of
from jax_core.checkpoints.locations import resolve
from jax_core.checkpoints.safetensors_files import open_safetensors, parse_json
from jax_core.checkpoints.tensor_source import TensorSource
from jax_core.models.config import ModelConfig
from jax_core.models.families import read_config
from schemas.errors import UserError

CONFIG, GENERATION = "config.json", "generation_config.json"

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # each has a row of the router


@dataclass(frozen=True)
class Checkpoint:
    location: str  # as it was named
    path: Path  # of the folder or the file
    config_json: dict[str, Any]  # config.json; of a GGUF file, what it would be
    generation: GenerationDefaults
    tensors: TensorSource
    generation_json: dict[str, Any]  # generation_config.json; {} if there is none

    @cached_property
    def config(self) -> ModelConfig:
        """Raises UserError for an architecture or a switch that is not supported."""
        self._refuse_absurd_counts()
        return read_config(self.config_json)

    def _refuse_absurd_counts(self) -> None:
        """What a damaged config says must not make names of a billion layers or experts."""
        infos = self.tensors.infos
        rows = sum(math.prod(info.shape) for info in infos.values()) // max(1, _count(self.config_json, "hidden_size"))
        most = {"num_hidden_layers": max(1000, len(infos)), **dict.fromkeys(_EXPERTS, max(1000, rows))}
        for key, bound in most.items():
            if _count(self.config_json, key) > bound:
                reason = f"says {key} = {self.config_json[key]}, for which it has too few tensors ({len(infos)})."
                raise UserError(self.location, reason, "Use the model's own files, whole and unmixed.")


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else 0


def open_checkpoint(location: str | Path) -> Checkpoint:
    """Opens a folder with config.json and safetensors, a .gguf file, or `package:PACKAGE/FILE`.

    Raises:
      UserError: nothing is there, or it is none of these.
      DamagedDataError: naming the file that is torn, truncated or altered.
    """
    path = resolve(location)
    if path.is_dir():
        return _open_folder(str(location), path)
    return _open_gguf(str(location), path)


def _open_folder(location: str, folder: Path) -> Checkpoint:
    if not (folder / CONFIG).is_file():
        way_out = "Name a folder of a model in Hugging Face's layout, or a .gguf file."
        raise UserError(location, f"holds no {CONFIG}.", way_out)
    config = parse_json(folder / CONFIG, (folder / CONFIG).read_bytes())
    generation_file = folder / GENERATION
    generation = parse_json(generation_file, generation_file.read_bytes()) if generation_file.is_file() else {}
    defaults = generation_defaults(generation, config, generation_file if generation else folder / CONFIG)
    return Checkpoint(location, folder, config, defaults, open_safetensors(folder), generation)


def _open_gguf(location: str, path: Path) -> Checkpoint:
    file = GGUFFile(path)
    config = config_of(file, path)
    return Checkpoint(location, path, config, gguf_defaults(file.metadata, path), GGUFTensors(file, config, path), {})

"""Where a checkpoint keeps what its tokenizer and its chat template need: the files of a folder, or a GGUF's metadata.

Left out: downloads, and tokenizers without a tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_core.checkpoints.gguf_file import GGUFFile
from jax_core.checkpoints.locations import resolve
from schemas.errors import DamagedDataError, UserError

_DEFAULT = "default"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GGUF_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclass(frozen=True)
class TokenFiles:
    """What was found. `templates` are chat templates by name, the one without a name as "default"."""

    name: str
    tokenizer_json: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)  # tokenizer_config.json
    generation: Mapping[str, Any] = field(default_factory=dict)  # generation_config.json over config.json
    gguf: Mapping[str, Any] | None = None
    templates: Mapping[str, str] = field(default_factory=dict)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of special tokens by the names that chat templates call them."""
        if self.gguf is None:
            texts = {name: _content(self.config.get(name)) for name in _SPECIAL}
            return {name: text for name, text in texts.items() if text is not None}
        ids = {name: self.gguf.get(f"tokenizer.ggml.{key}_token_id") for name, key in _GGUF_SPECIAL.items()}
        return {name: self.gguf["tokenizer.ggml.tokens"][i] for name, i in ids.items() if i is not None}


def _content(token: Any) -> str | None:
    """The text of a token as tokenizer_config.json writes it: a string, or an object with `content`."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def read_token_files(location: str | Path) -> TokenFiles:
    """Reads a folder, a .gguf file, or `package:PACKAGE/PATH`: either of them inside an installed Python package.

    Raises:
      UserError: there is nothing there, or it is neither.
      DamagedDataError: a file is no JSON.
    """
    path = resolve(location)
    if path.is_dir():
        return _of_folder(path)
    if path.suffix == ".gguf":
        metadata = GGUFFile(path).metadata
        return TokenFiles(str(location), gguf=metadata, templates=_gguf_templates(metadata))
    raise UserError(str(location), "is neither a folder nor a .gguf file.", "Name a checkpoint's folder or its GGUF.")


def _of_folder(folder: Path) -> TokenFiles:
    file = folder / "tokenizer.json"
    config = _json(folder / "tokenizer_config.json")
    return TokenFiles(
        str(folder),
        tokenizer_json=file.read_text("utf-8") if file.exists() else None,
        config={**_json(folder / "special_tokens_map.json"), **config},
        generation={**_json(folder / "config.json"), **_json(folder / "generation_config.json")},
        templates=_folder_templates(folder, config),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise DamagedDataError(str(path), f"is no JSON: {error}.", "Fetch the checkpoint again.") from error
    if not isinstance(content, dict):
        raise DamagedDataError(str(path), "is no JSON object.", "Fetch the checkpoint again.")
    return content


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """A template in a file of its own wins over one in tokenizer_config.json."""
    written = config.get("chat_template") or {}
    if isinstance(written, str):
        written = {_DEFAULT: written}
    if isinstance(written, list):
        written = {entry["name"]: entry["template"] for entry in written}
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        files[_DEFAULT] = folder / "chat_template.jinja"
    return {**written, **{name: path.read_text("utf-8") for name, path in files.items()}}


def _gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    named = {name.removeprefix(key + "."): text for name, text in metadata.items() if name.startswith(key + ".")}
    return {**named, **({_DEFAULT: metadata[key]} if key in metadata else {})}

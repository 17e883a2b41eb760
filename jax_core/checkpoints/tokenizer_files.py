"""The files that make a written checkpoint's tokenizer load elsewhere: copied, or made where there were none.

Left out on purpose: SentencePiece's tokenizer.model, which is copied but never made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schemas.errors import UserError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def copied_files(folder: Path) -> dict[str, bytes]:
    """The files of a checkpoint's tokenizer and chat template, as they are."""
    return {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}


def gguf_files(location: str | Path) -> dict[str, bytes]:
    """The tokenizer and chat template that a GGUF file carries, as Hugging Face's files."""
    from jax_core.chat.template import load_template
    from jax_core.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(location)
    try:
        template = load_template(location).source
    except UserError:  # it has none
        template = None
    return _files(tokenizer.to_json(), tokenizer.special_tokens, template)


def character_files(alphabet: str) -> dict[str, bytes]:
    """One token a character, as Hugging Face's files; there, a character that is not in the alphabet is <pad>."""
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise UserError("the tokenizer's file", "needs tokenizers.", "pip install 'rollstream[models]'") from error
    special = ("<pad>", "<eos>")
    pieces = [*special, *alphabet]
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=special[0]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    return _files(backend.to_str(), {"pad_token": special[0], "eos_token": special[1]}, None)


def _files(tokenizer_json: str, special_tokens: Mapping[str, str], template: str | None) -> dict[str, bytes]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special_tokens,
    }
    files = {"tokenizer.json": tokenizer_json.encode(), "tokenizer_config.json": _json(config)}
    return files if template is None else {**files, "chat_template.jinja": template.encode()}


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"

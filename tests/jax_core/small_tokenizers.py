"""Tokenizers small enough to hold in the head, and the checkpoints' folders that would bring them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jax_core.tokenizers import SubwordTokenizer


def byte_level(special: Sequence[str], merges: Sequence[str] = ()) -> Tokenizer:
    """A token a byte (in the order of their characters), then one each merge, then the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [tuple(merge.split()) for merge in merges]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in pairs)])}
    backend = Tokenizer(models.BPE(vocabulary, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return backend


def sentencepiece(special: Sequence[str], letters: str, merges: Sequence[str]) -> Tokenizer:
    """The special tokens, a token a byte, "▁" for a space, which also begins a text, the letters, the merges."""
    pairs = [tuple(merge.split()) for merge in merges]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters, *("".join(pair) for pair in pairs)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, pairs, unk_token=special[0], byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return backend


def subword(backend: Tokenizer, eos: str, **settings: Any) -> SubwordTokenizer:
    return SubwordTokenizer(backend, eos_id=backend.token_to_id(eos), **settings)


def write_folder(folder: Path, backend: Tokenizer | None = None, **files: Mapping[str, Any] | str) -> Path:
    """A checkpoint's folder of a tokenizer and other files: `config={...}` is written as config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    if backend is not None:
        backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        if isinstance(content, str):
            (folder / f"{name}.jinja").write_text(content, "utf-8")
        else:
            (folder / f"{name}.json").write_text(json.dumps(content), "utf-8")
    return folder

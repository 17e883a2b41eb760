"""Text to token ids and back: one token a character, or the subword tokenizer that a checkpoint brings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_core.tokenizers.base import Tokenizer
from jax_core.tokenizers.character import CharacterTokenizer
from jax_core.tokenizers.files import TokenFiles, read_token_files
from jax_core.tokenizers.subword import SubwordTokenizer
from schemas.errors import DamagedDataError, UserError
from schemas.recipe import Recipe

__all__ = ["CharacterTokenizer", "SubwordTokenizer", "Tokenizer", "load_tokenizer", "make_tokenizer"]


def make_tokenizer(recipe: Recipe) -> Tokenizer:
    """The tokenizer that a recipe asks for."""
    if recipe.tokenizer.kind == "character":
        return CharacterTokenizer(recipe.tokenizer.alphabet)
    return load_tokenizer(recipe.model.checkpoint)


def load_tokenizer(location: str | Path) -> SubwordTokenizer:
    """The tokenizer of a folder with tokenizer.json, of a .gguf file, or of either in `package:PACKAGE/PATH`.

    Tokens that end an answer are the tokenizer's own EOS and those of generation_config.json (else config.json).

    Raises:
      UserError: there is none that can be read, or no token is said to end a text.
    """
    files = read_token_files(location)
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise UserError(files.name, "needs `tokenizers`.", "pip install 'rollstream[models]'") from error
    if files.gguf is not None:
        from jax_core.tokenizers.gguf_bpe import gguf_tokenizer

        return gguf_tokenizer(files.gguf, files.name, files.special_tokens)
    return _of_folder(files)


def _of_folder(files: TokenFiles) -> SubwordTokenizer:
    from tokenizers import Tokenizer as Backend

    if files.tokenizer_json is None:
        raise UserError(
            files.name,
            "has no tokenizer.json.",
            "Write one: transformers' AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) does.",
        )
    try:
        backend = Backend.from_str(files.tokenizer_json)
    except Exception as error:  # the library raises nothing narrower
        raise DamagedDataError(f"{files.name}/tokenizer.json", f"{error}.", "Fetch the checkpoint again.") from error
    named = {name: backend.token_to_id(text) for name, text in files.special_tokens.items()}
    stops = [i for i in (named.get("eos_token"), *_ids(files.generation, "eos_token_id")) if i is not None]
    if not stops:
        raise UserError(
            files.name,
            "no token is said to end a text: no eos_token in tokenizer_config.json, no eos_token_id in "
            "generation_config.json or config.json.",
            "Add one.",
        )
    pads = [i for i in (named.get("pad_token"), *_ids(files.generation, "pad_token_id")) if i is not None]
    return SubwordTokenizer(
        backend,
        eos_id=stops[0],
        pad_id=pads[0] if pads else None,
        stop_ids=stops,
        bos_ids=[i for i in backend.encode("", add_special_tokens=True).ids if i == named.get("bos_token")],
        special_tokens=files.special_tokens,
    )


def _ids(config: Mapping[str, Any], key: str) -> list[int]:
    """The ids under a key that holds one, a list of them, or null; negative ones stand for none."""
    value = config.get(key)
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int) and i >= 0]

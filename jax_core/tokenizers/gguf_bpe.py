"""The byte-level BPE that a GGUF file carries in its metadata, built with the `tokenizers` library.

(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "Tokenizer")

Left out: SentencePiece and WordPiece vocabularies in GGUF (`tokenizer.ggml.model` other than "gpt2"), and splitting
rules that are not in the table: each is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jax_core.tokenizers.subword import SubwordTokenizer
from schemas.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from tokenizers.pre_tokenizers import PreTokenizer

# How text is cut before it is merged, by `tokenizer.ggml.pre`: as GPT-2 does; so, with each digit apart; by a pattern.
_GPT2 = frozenset({"default", "gpt-2"})
_GPT2_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_PATTERNS = {
    "llama-bpe": _CL100K % 3,
    "llama3": _CL100K % 3,
    "llama-v3": _CL100K % 3,
    "dbrx": _CL100K % 3,
    "smaug-bpe": _CL100K % 3,
    "qwen2": _CL100K % 1,
    "deepseek-r1-qwen": _CL100K % 1,
    "stablelm2": _CL100K % 1,
}
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3"})  # a word of the vocabulary is taken, unmerged
_COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen"})  # text is brought to Unicode's NFC before
_BEGIN_WITH_BOS = frozenset({"llama-bpe", "llama3", "llama-v3"})  # unless the file says otherwise

_CONTROL, _USER_DEFINED = 3, 4  # `tokenizer.ggml.token_type`: these two are never split


def gguf_tokenizer(metadata: Mapping[str, Any], name: str, special_tokens: Mapping[str, str]) -> SubwordTokenizer:
    """The tokenizer of a GGUF file with this metadata.

    Args:
      name: the file, for errors.
      special_tokens: by the names that chat templates call them.

    Raises:
      UserError: its kind of vocabulary or its splitting rule is none of those that are known here.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        reason = f"its tokenizer is of kind {kind!r}; byte-level BPE ('gpt2') can be read."
        raise UserError(name, reason, "Use a folder with tokenizer.json.")
    bos, eos, end_of_turn, pad = (
        metadata.get(f"tokenizer.ggml.{what}_token_id") for what in ("bos", "eos", "eot", "padding")
    )
    if eos is None:
        raise UserError(name, "names no token that ends a text (tokenizer.ggml.eos_token_id).", "Convert it again.")
    begins = metadata.get("tokenizer.ggml.add_bos_token", pre in _BEGIN_WITH_BOS)
    return SubwordTokenizer(
        _backend(metadata, pre, name),
        eos_id=eos,
        pad_id=pad,
        stop_ids=() if end_of_turn is None else (end_of_turn,),
        bos_ids=[bos] if begins and bos is not None else [],
        special_tokens=special_tokens,
    )


def _backend(metadata: Mapping[str, Any], pre: str, name: str) -> Backend:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    backend.pre_tokenizer = _splitter(pre, name)
    backend.decoder = decoders.ByteLevel()
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    types = metadata.get("tokenizer.ggml.token_type", ())
    backend.add_tokens(
        [
            AddedToken(token, special=type_ == _CONTROL, normalized=False)
            for token, type_ in zip(tokens, types, strict=False)
            if type_ in (_CONTROL, _USER_DEFINED)
        ]
    )
    return backend


def _splitter(pre: str, name: str) -> PreTokenizer:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if pre in _GPT2:
        return ByteLevel(add_prefix_space=False)
    if pre in _GPT2_DIGITS_APART:
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    if pre in _PATTERNS:
        split = Split(Regex(_PATTERNS[pre]), "isolated")
        return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    known = sorted({*_GPT2, *_GPT2_DIGITS_APART, *_PATTERNS})
    raise UserError(
        name,
        f"its tokenizer splits text by the rule {pre!r} (tokenizer.ggml.pre); known are {', '.join(known)}.",
        "Use a folder with tokenizer.json.",
    )

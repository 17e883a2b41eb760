"""Subword tokenizers of real models, on the `tokenizers` library: what the library leaves open is decided here.

Truncation and padding that a tokenizer.json asks for are switched off: a text that is too long is refused where its
length is known, and never cut. Nothing of the library's object is changed after that, which is what makes it safe from
many threads (a change while another thread encodes is its "Already borrowed").

Left out: training, and tokenizers that are no tokenizer.json and no GGUF (tokenizer.model, vocab.json with merges.txt).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_ANCHORS = ("\n", ".", "a")  # texts to stand before another one; one of them merges with nothing behind it


class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library. Immutable, so safe from many threads.

    Args:
      backend: the library's object; it must not be changed by others from now on.
      eos_id: the token that ends a document or a turn.
      pad_id: None if the model has none: then `eos_id`, since padding is masked by place and not by id.
      stop_ids: further tokens that end an answer.
      bos_ids: what stands before a document that no chat template begins.
      special_tokens: texts of special tokens, by the names that chat templates call them.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_id: int,
        pad_id: int | None = None,
        stop_ids: Sequence[int] = (),
        bos_ids: Sequence[int] = (),
        special_tokens: Mapping[str, str] = MappingProxyType({}),
    ):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.eos_id = eos_id
        self.pad_id = eos_id if pad_id is None else pad_id
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([eos_id, *stop_ids]))
        self.bos_ids = tuple(bos_ids)
        self.special_tokens = MappingProxyType(dict(special_tokens))
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content for i, token in added.items()}
        self._byte_of = _byte_of_character() if _is_byte_level(backend) else None
        self._spaced = self._puts_a_space_first()

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._backend.encode(encodable(text), add_special_tokens=False).ids, np.int32)

    def encode_inside(self, text: str) -> np.ndarray:
        for anchor in _ANCHORS if self._spaced else ():
            before, whole = self.encode(anchor), self.encode(anchor + text)
            if np.array_equal(whole[: len(before)], before):
                return whole[len(before) :]
        return self.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def token_text(self, token: int) -> str:
        """What a person sees of one token: special tokens by name, bytes that are no UTF-8 as \\xf0."""
        piece = self._backend.id_to_token(token)
        if piece is None:
            return f"<{token}?>"
        if token in self._added:
            return self._added[token]
        if self._byte_of is None:
            return piece.replace("▁", " ")
        return bytes(self._byte_of[c] for c in piece).decode("utf-8", "backslashreplace")

    def to_json(self) -> str:
        """The text of its tokenizer.json."""
        return self._backend.to_str()

    def with_stop_id(self, token: int) -> SubwordTokenizer:
        other = copy.copy(self)
        other.stop_ids = (*self.stop_ids, token)
        return other

    def _puts_a_space_first(self) -> bool:
        line, both = self.encode("\n"), self.encode("\na")
        return not np.array_equal(both[len(line) :], self.encode("a"))


def encodable(text: str) -> str:
    """`text` as UTF-8 can hold it: two halves of a character put together, a lone half as U+FFFD.

    >>> encodable("\\ud83d\\ude00 \\ud83d")
    '😀 \ufffd'
    """
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _is_byte_level(backend: Backend) -> bool:
    decoder = json.loads(backend.to_str())["decoder"] or {}
    return "ByteLevel" in {part["type"] for part in [decoder, *decoder.get("decoders", ())] if "type" in part}


def _byte_of_character() -> Mapping[str, int]:
    """Byte-level BPE writes a byte as a character: a visible one as itself, the others, in order, from U+0100 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}

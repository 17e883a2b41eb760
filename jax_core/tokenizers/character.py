"""One token a character: for models that are trained from nothing on texts of a small alphabet."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np

from schemas.errors import UserError


class CharacterTokenizer:
    """One token a character of `alphabet`, after <pad> (0) and <eos> (1). Immutable, so safe from many threads.

    >>> tokenizer = CharacterTokenizer("abc")
    >>> tokenizer.encode("cab")
    array([4, 2, 3], dtype=int32)
    >>> tokenizer.decode([4, 2, 3, 1])
    'cab'
    """

    pad_id = 0
    eos_id = 1
    stop_ids: tuple[int, ...] = (1,)
    special_ids = frozenset({0, 1})
    bos_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = MappingProxyType({})  # no text stands for one
    _SPECIAL = ("<pad>", "<eos>")

    def __init__(self, alphabet: str):
        self.alphabet = alphabet
        self._id_of = {character: i + len(self._SPECIAL) for i, character in enumerate(alphabet)}
        self._piece_of = [*self._SPECIAL, *alphabet]

    @property
    def vocab_size(self) -> int:
        return len(self._piece_of)

    def encode(self, text: str) -> np.ndarray:
        """Ids, int32 [T], of `text`.

        Raises:
          UserError: a character is not in the alphabet. Dropping it silently would train on another text than the
            environment wrote.
        """
        try:
            return np.array([self._id_of[character] for character in text], np.int32)
        except KeyError as unknown:
            raise UserError(
                f"character {unknown.args[0]!r}",
                f"is not in the tokenizer's alphabet {self.alphabet!r}.",
                "Add it to tokenizer.alphabet in the recipe.",
            ) from None

    encode_inside = encode

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special tokens have no text."""
        return "".join(self._piece_of[i] for i in ids if i >= len(self._SPECIAL))

    def token_text(self, token: int) -> str:
        """What a person sees of one token, special tokens by name."""
        return self._piece_of[token]

    def with_stop_id(self, token: int) -> CharacterTokenizer:
        other = copy.copy(self)
        other.stop_ids = (*self.stop_ids, token)
        return other

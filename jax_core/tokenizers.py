"""Text to token ids and back. One token a character; the ids, not the text, are the source of truth everywhere.

Left out: byte-pair tokenizers and chat templates.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from schemas.errors import UserError
from schemas.recipe import TokenizerSection


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
    _SPECIAL = ("<pad>", "<eos>")

    def __init__(self, alphabet: str):
        self.alphabet = alphabet
        self._id_of = {character: i + len(self._SPECIAL) for i, character in enumerate(alphabet)}
        self._piece_of = [*self._SPECIAL, *alphabet]

    @property
    def vocab_size(self) -> int:
        return len(self._piece_of)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end an answer."""
        return (self.eos_id,)

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

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special tokens have no text."""
        return "".join(self._piece_of[i] for i in ids if i >= len(self._SPECIAL))

    def piece(self, token: int) -> str:
        """What a person sees of one token, special tokens by name."""
        return self._piece_of[token]


def make_tokenizer(section: TokenizerSection) -> CharacterTokenizer:
    return CharacterTokenizer(section.alphabet)

"""What every tokenizer does. The ids, not the text, are the source of truth everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """Text to token ids and back. Immutable, so safe from many threads at once.

    A mask never comes from ids: `pad_id` may be `eos_id`, and in many checkpoints is.
    """

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def pad_id(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end an answer."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text but for a place in it: the end of a turn, the beginning of a document."""
        ...

    @property
    def bos_ids(self) -> tuple[int, ...]:
        """What stands before a document that no chat template begins; () if nothing does."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of special tokens by the names that chat templates call them: {"bos_token": "<s>", ...}."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Ids, int32 [T]. Special tokens in the text are parsed; none is added."""
        ...

    def encode_inside(self, text: str) -> np.ndarray:
        """Ids, int32 [T], of text that something stands before, where `encode` might put a space at its beginning."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Bytes that are no UTF-8, say half an emoji, become U+FFFD."""
        ...

    def token_text(self, token: int) -> str:
        """What a person sees of one token, special tokens by name."""
        ...

    def with_stop_id(self, token: int) -> Tokenizer:
        """The same tokenizer, where `token` ends an answer too."""
        ...

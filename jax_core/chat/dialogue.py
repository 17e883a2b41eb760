"""What a policy and its surroundings say to each other, as token ids: with a chat template or as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from jax_core.chat.template import Message
from jax_core.tokenizers.base import Tokenizer
from schemas.errors import UserError

Said = str | Sequence[Message]  # a text, which is one user message where there is a template; or messages
Supervised = tuple[np.ndarray, np.ndarray]  # ids int32 [T], mask bool [T]: what there is to learn


class Dialogue(Protocol):
    """One sample's conversation while it goes on. What the policy sampled is never encoded again.

        ids = dialogue.start(said)              the prompt
        ids = dialogue.reply(sampled, said)     what stands between the sampled ids and the policy's next ones

    Use from one thread. `fork` gives an independent conversation that goes on from here.
    """

    @property
    def tokenizer(self) -> Tokenizer:
        """With every token that ends a turn among its `stop_ids`."""
        ...

    @property
    def end_ids(self) -> tuple[int, ...]:
        """What ends a turn of the policy, if it ends it itself."""
        ...

    @property
    def branches(self) -> tuple[Supervised, ...]:
        """Earlier parts that a template has rewritten since, closed: ids, and which of them the policy sampled."""
        ...

    def fork(self) -> Dialogue: ...

    def start(self, said: Said) -> np.ndarray:
        """Ids, int32 [T], of the prompt."""
        ...

    def answer_text(self, sampled: Sequence[int] | np.ndarray) -> str:
        """What the policy said in words, without the token that ended it."""
        ...

    def reply(self, sampled: np.ndarray, said: Said) -> np.ndarray:
        """Ids, int32 [T], of what follows the policy's `sampled` ids, up to where it speaks again."""
        ...

    def supervised(self, messages: Sequence[Message]) -> Supervised:
        """A whole conversation as data to learn from: true on the assistant's words and on what ends its turns."""
        ...


class RawText:
    """Text without a template: every text is encoded as it is, and nothing stands between. It has no state."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.end_ids: tuple[int, ...] = (tokenizer.eos_id,)
        self.branches: tuple[Supervised, ...] = ()

    def fork(self) -> RawText:
        return self

    def start(self, said: Said) -> np.ndarray:
        ids = self.tokenizer.encode(plain_text(said))
        return np.concatenate([np.array(self.tokenizer.bos_ids, np.int32), ids]) if self.tokenizer.bos_ids else ids

    def answer_text(self, sampled: Sequence[int] | np.ndarray) -> str:
        return self.tokenizer.decode(without_stop(sampled, self.tokenizer.stop_ids))

    def reply(self, sampled: np.ndarray, said: Said) -> np.ndarray:
        return self.tokenizer.encode_inside(plain_text(said))

    def supervised(self, messages: Sequence[Message]) -> Supervised:
        """The contents one after another; an EOS ends each of the assistant's."""
        parts = [(np.array(self.tokenizer.bos_ids, np.int32), False)]
        for i, message in enumerate(messages):
            encode = self.tokenizer.encode_inside if i else self.tokenizer.encode
            parts.append((encode(message["content"]), message["role"] == "assistant"))
            if message["role"] == "assistant":
                parts.append((np.array(self.end_ids, np.int32), True))
        return join(parts)


def plain_text(said: Said) -> str:
    if not isinstance(said, str):
        raise UserError("messages", "need a chat template, and chat.template is 'none'.", "Set chat.template='model'.")
    return said


def without_stop(sampled: Sequence[int] | np.ndarray, stop_ids: Sequence[int]) -> list[int]:
    """`sampled` without the stop token at its end, if it has one."""
    ids: list[int] = np.asarray(sampled).tolist()
    return ids[:-1] if ids and ids[-1] in stop_ids else ids


def join(parts: Iterable[tuple[np.ndarray, bool]]) -> Supervised:
    """Pieces of ids, each with its mask, as ids int32 [T] and mask bool [T]."""
    ids, masks = [np.zeros(0, np.int32)], [np.zeros(0, np.bool_)]
    for piece, mask in parts:
        ids.append(piece)
        masks.append(np.full(len(piece), mask))
    return np.concatenate(ids), np.concatenate(masks)

"""Conversations under a chat template, append only: ids are only ever added behind those that are there.

A template writes whole conversations, and policies sample ids. Between two turns of the policy the template writes a
glue, which ends the one, holds what others say, and begins the next:

    text   <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n | hello | <|im_end|>\\n<|im_start|>user\\n ...
           start: the prompt                                        sampled   reply: the glue

The glue is what the rendered conversation has behind the policy's words, and only it is encoded. That holds while a
template, given more messages, leaves the text before them as it was. Some do not: they drop earlier reasoning, or trim
what was said. A policy would then be trained on a past that the model never meets again, so such a turn is refused, by
its number; or, with history="split", what there was is closed as a branch of its own, and a new one begins with the
template's version of the past as its prompt.

Left out: contents in parts, such as images; and telling special tokens in what others say from the template's own,
which no template does: a tool that writes "<|im_end|>" ends its turn.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from jax_core.chat.dialogue import Said, Supervised, join, without_stop
from jax_core.chat.template import ChatTemplate, Message
from jax_core.tokenizers.base import Tokenizer
from schemas.errors import UserError

_SENTINEL = "QxSentinelxQ"  # an answer that no template has a reason to touch, or holds itself
_SHOWN = 40  # characters of a text in an error


class Conversation:
    """One sample's conversation under a template; see `Dialogue`. Forking is cheap: nothing in it is changed in place.

    Args:
      system: a system message to begin with, where the messages begin with none; "" for none.
      prefill: how each answer begins. It is part of the prompt, never trained.
      options: further variables of the template; "tools" are those that it lists.
      history: what to do where the template rewrites earlier turns: "append" refuses, "split" begins a new branch.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        *,
        system: str = "",
        prefill: str = "",
        options: Mapping[str, Any] | None = None,
        history: Literal["append", "split"] = "append",
    ):
        self._template = template
        self._system = system
        self._prefill = prefill
        self._options = dict(options or {})
        self._history = history
        self._closing = self._find_closing()
        closing = tokenizer.encode_inside(self._closing)
        ends = special_end(closing, tokenizer)
        self._written_end, self._behind_end = tuple(closing[:ends].tolist()), closing[ends:]
        self.end_ids = self._written_end or (tokenizer.eos_id,)
        known = self.end_ids[-1] in tokenizer.stop_ids
        self.tokenizer = tokenizer if known else tokenizer.with_stop_id(self.end_ids[-1])
        self.branches: tuple[Supervised, ...] = ()
        self._messages: tuple[Message, ...] = ()
        self._text = ""  # the template's, up to where the policy speaks
        self._turns: tuple[tuple[int, int], ...] = ()  # of the policy: the end in the text, the number of the message
        self._pieces: tuple[tuple[np.ndarray, bool], ...] = ()  # of the branch that is going on, True: sampled

    def fork(self) -> Conversation:
        return copy.copy(self)

    def start(self, said: Said) -> np.ndarray:
        """Ids, int32 [T], of the prompt: the messages, the beginning of the policy's turn, and its prefill.

        Raises:
          UserError: the template refuses the messages, or they end with the assistant's own.
        """
        self._messages = self._with_system(messages_of(said))
        if not self._messages or self._messages[-1]["role"] == "assistant":
            reason = "it has no message, or its last one is the assistant's own."
            raise UserError(
                "prompt", reason, "End it where the assistant is to speak; chat.prefill begins each answer."
            )
        self._text = self._prompt(self._messages)
        self._turns, self.branches = (), ()
        return self._begin_branch()

    def answer_text(self, sampled: Sequence[int] | np.ndarray) -> str:
        """The policy's own words, without the prefill and without the token that ended them."""
        return self.tokenizer.decode(without_stop(sampled, self.tokenizer.stop_ids))

    def reply(self, sampled: np.ndarray, said: Said) -> np.ndarray:
        """Ids, int32 [T], between the policy's `sampled` ids and its next ones.

        They close its turn, unless it has, with any of its stop tokens. With history="split" and a rewritten past they
        are the whole prompt of a new branch, and `branches` has one more.

        Raises:
          UserError: the template refuses the messages, or writes an earlier turn otherwise than it was; it names the
            turn. The conversation is left as it was.
        """
        answer = self._prefill + self.answer_text(sampled)
        turn = {"role": "assistant", "content": answer}
        return self._go_on(turn, answer, np.asarray(sampled, np.int32), messages_of(said))

    def supervised(self, messages: Sequence[Message]) -> Supervised:
        """A conversation as one sequence to learn from: true on the assistant's words and on what ends its turns.

        Each answer is encoded apart from the text before it, as a policy would sample it. An answer that begins with
        the prefill is trained from behind it. What others say after the last answer is left out.

        Raises:
          UserError: as `reply`; or the template changes an answer's words; or history="split" and it makes several.
        """
        branches = self.supervised_branches(messages)
        if len(branches) > 1:
            reason = f"splits the conversation into {len(branches)} branches, which are sequences of their own."
            raise UserError(f"the {self._template.name}", reason, "Use another as chat.template.")
        return branches[0]

    def supervised_branches(self, messages: Sequence[Message]) -> tuple[Supervised, ...]:
        """As `supervised`; with history="split", a sequence for each part of the past that the template let stand.

        Each answer is trained in one of them, the one that ends with it or goes on after it.
        """
        given = self._with_system(tuple(messages))
        places = [i for i, message in enumerate(given) if message["role"] == "assistant"]
        if not places or not places[0]:
            raise UserError("messages", "nobody says anything that the assistant answers.", "Leave them out.")
        talk = self.fork()
        if not all(str(given[place].get("content") or "").startswith(self._prefill) for place in places):
            talk._prefill = ""
        talk.start(given[: places[0]])
        for place, next_place in pairwise(places):
            between = given[place + 1 : next_place]
            words = talk._words_of(given[place], between)
            talk._go_on(given[place], words, talk._as_sampled(words), between)
        last = talk._as_sampled(talk._words_of(given[places[-1]], ()))
        return (*talk.branches, join([*talk._pieces, (last, True), (self._behind_end, False)]))

    # One turn more.

    def _go_on(self, turn: Message, words: str, sampled: np.ndarray, said: tuple[Message, ...]) -> np.ndarray:
        """Takes the policy's turn, `words` in the text and `sampled` in ids, and what the others say to it."""
        messages = (*self._messages, turn, *said)
        text, before = self._prompt(messages), self._text + words
        turns = (*self._turns, (len(before), len(self._messages)))
        rewritten = not text.startswith(before)
        if rewritten and self._history == "append":
            raise self._rewritten(turns, before, text)
        pieces = (*self._pieces, (sampled, True))
        self._messages, self._text, self._turns = messages, text, turns
        if rewritten:
            self.branches = (*self.branches, join(pieces))
            return self._begin_branch()
        glue = self._without_end(sampled, self.tokenizer.encode_inside(text[len(before) :] + self._prefill))
        self._pieces = (*pieces, (glue, False))
        return glue

    def _begin_branch(self) -> np.ndarray:
        ids = self.tokenizer.encode(self._text + self._prefill)
        self._pieces = ((ids, False),)
        return ids

    def _without_end(self, sampled: np.ndarray, glue: np.ndarray) -> np.ndarray:
        """The glue; without its end token if the policy has ended its turn itself, so that a turn has one end."""
        end = self._written_end
        ended = len(sampled) > 0 and int(sampled[-1]) in self.tokenizer.stop_ids
        return glue[len(end) :] if ended and tuple(glue[: len(end)].tolist()) == end else glue

    def _as_sampled(self, words: str) -> np.ndarray:
        """The ids that a policy would say a turn's words with, and end it."""
        ids = self.tokenizer.encode_inside(words.removeprefix(self._prefill))
        return np.concatenate([ids, np.array(self._written_end, np.int32)])

    def _words_of(self, turn: Message, following: tuple[Message, ...]) -> str:
        """What the template writes as the assistant's own words of a turn that is given as a message."""
        alone = self._render((*self._messages, turn), False)
        written = [text for key in ("reasoning_content", "content") if isinstance(text := turn.get(key), str)]
        content = "".join(written[-1:])
        turn_number, place = len(self._turns), len(self._messages)
        if not (alone.startswith(self._text) and alone.endswith(self._closing)):
            before = self._text + content
            same = common_length(before, alone)
            raise self._refusal(turn_number, place, before[same:], alone[same:])
        words = alone[len(self._text) :].removesuffix(self._closing)
        if self._history == "split":
            return words
        for text in written:
            if text not in words:
                raise self._refusal(turn_number, place, text, words)
        # Some templates write more while a turn is the last, such as an empty place for reasoning.
        followed = self._prompt((*self._messages, turn, *following)) if following else alone
        return words if followed.startswith(self._text + words) else content

    # The template's text.

    def _render(self, messages: Sequence[Message], generate: bool) -> str:
        return self._template.render(messages, add_generation_prompt=generate, **self._options)

    def _prompt(self, messages: Sequence[Message]) -> str:
        return self._render(messages, True)

    def _with_system(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        if not self._system or (messages and messages[0]["role"] in ("system", "developer")):
            return messages
        return ({"role": "system", "content": self._system}, *messages)

    def _find_closing(self) -> str:
        """What the template writes behind the assistant's words: "<|im_end|>\\n"."""
        asked = self._with_system(({"role": "user", "content": "?"}, {"role": "assistant", "content": _SENTINEL}))
        _, found, closing = self._render(asked, False).rpartition(_SENTINEL)
        if not found:
            reason = "does not write what the assistant says."
            raise UserError(f"the {self._template.name}", reason, "Use another as chat.template.")
        return closing

    # What is refused.

    def _rewritten(self, turns: Sequence[tuple[int, int]], before: str, text: str) -> UserError:
        same = common_length(before, text)
        turn, place = next((turn, place) for turn, (end, place) in enumerate(turns) if same < end)
        return self._refusal(turn, place, before[same:], text[same:])

    def _refusal(self, turn: int, place: int, was: str, became: str) -> UserError:
        return UserError(
            f"the assistant's turn {turn} (message {place})",
            f"the {self._template.name} rewrites it: {was[:_SHOWN]!r} becomes {became[:_SHOWN]!r}, so a model that was "
            "trained on the one would meet the other.",
            "Use a chat.template that leaves earlier turns as they were, or set chat.history='split'.",
        )


def messages_of(said: Said) -> tuple[Message, ...]:
    """The messages; a text is one of the user."""
    return ({"role": "user", "content": said},) if isinstance(said, str) else tuple(said)


def common_length(one: str, other: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def special_end(closing: np.ndarray, tokenizer: Tokenizer) -> int:
    """How many ids of a closing there are through its first special token; 0 if it has none."""
    special = tokenizer.special_ids.union(tokenizer.stop_ids)
    return next((i + 1 for i, token in enumerate(closing.tolist()) if token in special), 0)

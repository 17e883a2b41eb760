"""Chat templates: a model's own jinja, which turns messages into the text that it was trained on.

Templates come with checkpoints from anywhere and are not trusted: they run in jinja2's immutable sandbox, which keeps
them from attributes that lead out of it and from changing what they are given.

Left out on purpose: limits on time and memory (a template that loops over a huge range is refused by the sandbox, one
that builds a huge string is not), and today's date: a template that asks for it is told the recipe's, so that a run
does not depend on the day.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_core.tokenizers.files import read_token_files
from schemas.errors import UserError

if TYPE_CHECKING:
    from jinja2 import Environment

Message = Mapping[str, Any]  # "role" and "content", and what else templates read: "tool_calls", "name", ...

DEFAULT_DATE = date(2025, 1, 1)
_PLACE = "<template>"  # the file name that jinja2 gives to lines of a template


class ChatTemplate:
    """A compiled template; `render` is safe from many threads.

    Args:
      source: jinja2 text.
      name: what errors call it.
      special_tokens: further variables of the template: {"bos_token": "<s>", ...}.
      today: the date that its strftime_now tells.

    Raises:
      UserError: the source is no jinja2; it names the line.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str = "chat template",
        special_tokens: Mapping[str, str] | None = None,
        today: date = DEFAULT_DATE,
    ):
        environment = _sandbox(name)
        environment.globals["strftime_now"] = datetime(today.year, today.month, today.day).strftime
        self.source = source
        self.name = name
        self._special_tokens = dict(special_tokens or {})
        self._template = _guarded(name, lambda: environment.from_string(source))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """The text of `messages`, and of the beginning of the assistant's next turn if that is asked for.

        Raises:
          UserError: the template fails or refuses the messages; it names the line.
        """
        variables = {
            **self._special_tokens,
            **options,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None if tools is None else [dict(tool) for tool in tools],
        }
        return _guarded(self.name, lambda: self._template.render(variables))


def load_template(location: str | Path, *, name: str = "default", today: date = DEFAULT_DATE) -> ChatTemplate:
    """The chat template that a checkpoint's folder or .gguf file brings; see `read_token_files`.

    Args:
      name: which one, where it brings several.

    Raises:
      UserError: it brings none of this name.
    """
    files = read_token_files(location)
    if name not in files.templates:
        there = f"it has {', '.join(sorted(files.templates))}" if files.templates else "it has none"
        raise UserError(
            files.name,
            f"has no chat template {name!r}: {there}.",
            "Write one into the recipe as chat.template, or set chat.template='none'.",
        )
    title = f"chat template of {files.name}"
    return ChatTemplate(files.templates[name], name=title, special_tokens=files.special_tokens, today=today)


def _sandbox(name: str) -> Environment:
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise UserError(name, "needs `jinja2`.", "pip install 'rollstream[models]'") from error
    from jax_core.chat.generation_blocks import GenerationBlocks

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models have seen it: in the keys' own order, not escaped for HTML as jinja2's, letters as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _RefusedError(Exception):
    """A template called raise_exception."""


def _refuse(message: str) -> None:
    raise _RefusedError(message)


def _guarded(name: str, call: Callable[[], Any]) -> Any:
    """What `call` returns; whatever the template raises in it becomes a UserError."""
    try:
        return call()
    except Exception as error:  # a template can make any operation fail that Python has
        line = getattr(error, "lineno", None) or _line_in_template(error)
        place = name if line is None else f"{name}, line {line}"
        way_out = "Give it other messages, or another template as chat.template."
        raise UserError(place, f"{error or type(error).__name__}.".replace("..", "."), way_out) from error


def _line_in_template(error: Exception) -> int | None:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _PLACE]
    return lines[-1] if lines else None

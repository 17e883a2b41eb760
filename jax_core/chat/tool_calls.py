"""Tool calls in what a policy said, as Hermes and Qwen write them.

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>

Calls that cannot be read are not an error of the run: the answer is a turn like any other, with `parse_error` saying
why, and its environment decides what that costs.

Left out: the formats of other families (Llama's bare JSON, Gemma's Python).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ParsedAnswer:
    """Content: what stands outside the calls; the whole answer if a call cannot be read."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    parse_error: str | None = None


def parse_tool_calls(answer: str) -> ParsedAnswer:
    """Never raises.

    >>> parse_tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>').tool_calls
    (ToolCall(name='add', arguments={'a': 1}),)
    >>> parse_tool_calls('<tool_call>{"name": "ad').parse_error
    'call 0 is not closed by </tool_call>'
    """
    before, *parts = answer.split(_OPEN)
    outside, calls = [before], []
    for i, part in enumerate(parts):
        written, closed, after = part.partition(_CLOSE)
        call = _read(written) if closed else f"is not closed by {_CLOSE}"
        if isinstance(call, str):
            return ParsedAnswer(answer, parse_error=f"call {i} {call}")
        calls.append(call)
        outside.append(after)
    return ParsedAnswer("".join(outside).strip() if calls else answer, tuple(calls))


def _read(written: str) -> ToolCall | str:
    """The call, or why it is none."""
    try:
        call = json.loads(written)
    except (ValueError, RecursionError) as error:
        return f"is no JSON: {error}"
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return "is no object with a name"
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return "has arguments that are no object"
    return ToolCall(call["name"], arguments)

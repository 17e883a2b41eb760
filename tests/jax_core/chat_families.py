"""Chat templates in the styles of model families, each with a small tokenizer that knows its special tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax_core.chat import ChatTemplate, Conversation
from jax_core.tokenizers import SubwordTokenizer
from tests.jax_core.small_tokenizers import byte_level, subword

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# The header of a turn is a line of its own; contents are trimmed; nothing stands behind the end of a turn.
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# The assistant is called model; there is no system role, and turns alternate.
GEMMA = """\
{{ bos_token }}
{%- if messages[0].role == 'system' %}
    {{- raise_exception('there is no system role') }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""

# Reasoning stays only behind the last question of the user; results of tools are no question.
QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(question=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > last.question and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

# Words only, no special token anywhere.
PLAIN = """\
{% for message in messages %}
{{ message.role }}: {{ message.content }}
{% endfor %}
{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}
"""

_MERGES = ("a b", "h i", "1 2")


@dataclass(frozen=True)
class Family:
    name: str
    source: str
    special: tuple[str, ...]
    end: str  # what ends a turn
    behind: str = ""  # what the template writes behind it
    other_stop: str = ""  # ends a document, and with it an answer

    @property
    def tokenizer(self) -> SubwordTokenizer:
        backend = byte_level(self.special, _MERGES)
        return subword(backend, self.other_stop or self.end, special_tokens={"bos_token": self.special[0]})

    @property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.source, name=f"{self.name} template", special_tokens=self.tokenizer.special_tokens)

    def conversation(self, **settings: Any) -> Conversation:
        return Conversation(self.template, self.tokenizer, **settings)


_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML_STYLE = Family("ChatML", CHATML, _IM, "<|im_end|>", "\n", "<|endoftext|>")
LLAMA3_STYLE = Family(
    "Llama 3",
    LLAMA3,
    ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "<|eot_id|>",
    other_stop="<|end_of_text|>",
)
GEMMA_STYLE = Family(
    "Gemma", GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", "\n", "<eos>"
)
QWEN3_STYLE = Family("Qwen3", QWEN3, _IM, "<|im_end|>", "\n", "<|endoftext|>")
FAMILIES = (CHATML_STYLE, LLAMA3_STYLE, GEMMA_STYLE, QWEN3_STYLE)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def tool(content: str) -> dict[str, str]:
    return {"role": "tool", "content": content}

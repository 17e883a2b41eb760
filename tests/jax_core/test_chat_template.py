"""Templates: where they are found, what they may use, and what becomes of those that fail or try to get out."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from jax_core.chat import ChatTemplate, Conversation, RawText, load_template, make_dialogue, make_template
from jax_core.tokenizers import CharacterTokenizer, load_tokenizer
from schemas.errors import UserError
from schemas.recipe import Recipe
from tests.jax_core.chat_families import CHATML, CHATML_STYLE, GEMMA_STYLE, assistant, user
from tests.jax_core.small_tokenizers import write_folder


def rendered(source: str, *messages: Any, generate: bool = False, **options: Any) -> str:
    return ChatTemplate(source).render(messages or [user("hi")], add_generation_prompt=generate, **options)


# What templates may use.


def test_blocks_leave_no_line_behind() -> None:
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    assert rendered(source, user("a"), user("b")) == "a\nb\n"


def test_json_keeps_its_letters_its_order_and_its_brackets() -> None:
    said = {"b": "漢字 <&>", "a": [1, None, True]}
    assert rendered("{{ x | tojson }}", x=said) == '{"b": "漢字 <&>", "a": [1, null, true]}'
    assert rendered("{{ x | tojson(indent=1) }}", x={"a": 1}) == '{\n "a": 1\n}'
    assert rendered("{{ x | tojson(ensure_ascii=true) }}", x="é") == '"\\u00e9"'


def test_loops_can_be_left_and_generation_blocks_are_as_if_they_were_not_there() -> None:
    source = "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    assert rendered(source, user("a"), user("b")) == "a"
    marked = "{% set x = 1 %}{% generation %}{% set x = 2 %}<{{ messages[0].content }}>{% endgeneration %}{{ x }}"
    assert rendered(marked) == "<hi>2"


def test_variables_are_messages_tools_special_tokens_and_options() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ messages[0]['content'] }}{{ tools }}{{ deep }}", special_tokens={"bos_token": "<s>"}
    )
    assert template.render([user("hi")], add_generation_prompt=False) == "<s>hiNone"
    assert template.render([user("hi")], add_generation_prompt=False, deep=1, tools=[{"a": 1}]) == "<s>hi[{'a': 1}]1"


def test_the_date_is_the_recipes_and_not_todays() -> None:
    source = "{{ strftime_now('%d %b %Y') }}"
    assert rendered(source) == "01 Jan 2025"
    assert (
        ChatTemplate(source, today=datetime.date(2024, 7, 26)).render([], add_generation_prompt=False) == "26 Jul 2024"
    )
    recipe = Recipe.model_validate({"name": "test", "chat": {"template": source, "date": "2026-02-03"}})
    template = make_template(recipe, CharacterTokenizer("a"))
    assert template is not None and template.render([], add_generation_prompt=False) == "03 Feb 2026"


# What they may not.


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox_or_change_what_it_is_given(source: str) -> None:
    messages = [user("hi")]
    with pytest.raises(UserError, match="chat template, line 2"):
        ChatTemplate("\n" + source).render(messages, add_generation_prompt=False)
    assert messages == [user("hi")]


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception.__globals__ }}",
        "{{ raise_exception.__code__ }}",
        "{{ strftime_now.__self__ }}",
        "{{ strftime_now | attr('__self__') }}",
        "{{ messages['__class__'] }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ ('{m.__class__}').format_map({'m': messages}) }}",
        "{{ bos_token.__class__ }}",
    ],
)
def test_what_leads_out_of_the_sandbox_is_as_if_it_were_not_there(source: str) -> None:
    assert rendered(source, bos_token="<s>") == ""


def test_a_template_that_fails_is_named_with_its_line() -> None:
    name = "chat template of model"
    with pytest.raises(UserError, match=r"chat template of model, line 3: .*Unexpected end"):
        ChatTemplate("a\nb\n{% for m in messages %}", name=name)
    template = ChatTemplate("a\n{{ raise_exception('system comes first') }}\nc", name=name)
    with pytest.raises(UserError, match="chat template of model, line 2: system comes first"):
        template.render([user("hi")], add_generation_prompt=False)
    with pytest.raises(UserError, match="chat template, line 3: 'a' is undefined"):
        rendered("a\n\n{{ a.a.b }}")
    with pytest.raises(UserError, match=r"chat template, line 2: .*concatenate str"):
        rendered("\n{{ 'x' + messages[0].content }}", {"role": "user", "content": None})
    with pytest.raises(UserError, match=r"Gemma template, line 7: user and assistant must take turns"):
        GEMMA_STYLE.template.render([user("a"), user("b")], add_generation_prompt=True)


def test_a_template_that_drops_what_the_assistant_says_is_refused() -> None:
    with pytest.raises(UserError, match="does not write what the assistant says"):
        Conversation(ChatTemplate("{{ messages[0].content }}"), CharacterTokenizer("abc"))


# Where they are found.


def test_a_folder_brings_its_template_in_any_of_several_places(tmp_path: Path) -> None:
    def found(name: str, which: str = "default", **files: Any) -> str:
        folder = write_folder(tmp_path / name, **files)
        return load_template(folder, name=which).render([], add_generation_prompt=False)

    assert (
        found("a", tokenizer_config={"chat_template": "one {{ eos_token }}", "eos_token": {"content": "</s>"}})
        == "one </s>"
    )
    several = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    assert found("b", tokenizer_config={"chat_template": several}) == "two"
    assert found("b", "tool_use") == "three"
    assert found("c", tokenizer_config={"chat_template": "one"}, chat_template="of its own") == "of its own"
    write_folder(tmp_path / "d" / "additional_chat_templates", rag="four")
    assert found("d", "rag", chat_template="five") == "four"
    with pytest.raises(UserError, match="has no chat template 'rag': it has default, tool_use"):
        found("b", "rag")
    with pytest.raises(UserError, match="has no chat template 'default': it has none"):
        found("e")


def test_a_gguf_file_brings_its_template(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_token_list(["<s>", "</s>"])
    writer.add_eos_token_id(1)
    writer.add_chat_template(
        [{"name": "default", "template": "one {{ eos_token }}"}, {"name": "tool_use", "template": "two"}]
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert load_template(tmp_path / "a.gguf").render([], add_generation_prompt=False) == "one </s>"
    assert load_template(tmp_path / "a.gguf", name="tool_use").render([], add_generation_prompt=False) == "two"


def test_a_recipe_takes_the_models_template_or_brings_its_own_or_has_none(tmp_path: Path) -> None:
    from tests.jax_core.small_tokenizers import byte_level

    names = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    folder = write_folder(tmp_path / "model", byte_level(CHATML_STYLE.special), tokenizer_config=names)
    tokenizer = load_tokenizer(folder)
    (tmp_path / "own.jinja").write_text(CHATML.replace("assistant", "helper"), "utf-8")

    def prompt(template: str) -> str:
        base = {"name": "test", "model": {"checkpoint": str(folder)}, "tokenizer": {"kind": "checkpoint"}}
        dialogue = make_dialogue(Recipe.model_validate({**base, "chat": {"template": template}}), tokenizer)
        assert isinstance(dialogue, RawText) is (template == "none")
        return tokenizer.decode(dialogue.start("hi"))

    assert prompt("none") == "hi"
    assert prompt("model") == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(str(tmp_path / "own.jinja")) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>helper\n"
    assert prompt("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}") == "hi<|im_end|>"
    with pytest.raises(UserError, match=r"chat\.template='nowhere\.jinja'.*nor a file that exists"):
        prompt("nowhere.jinja")


def test_what_an_assistant_said_before_may_be_part_of_a_prompt() -> None:
    talk = CHATML_STYLE.conversation()
    assert talk.tokenizer.decode(talk.start([user("a"), assistant("b"), user("c")])) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )

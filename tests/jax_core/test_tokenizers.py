"""Characters to ids and back."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from jax_core.tokenizers import CharacterTokenizer, make_tokenizer
from schemas.errors import UserError
from schemas.recipe import TokenizerSection


def test_every_character_is_one_token_and_comes_back():
    tokenizer = make_tokenizer(TokenizerSection(alphabet="^SF\n🙂"))
    ids = tokenizer.encode("^F🙂\n")
    assert ids.tolist() == [2, 4, 6, 5]
    assert tokenizer.decode(ids) == "^F🙂\n"
    assert tokenizer.vocab_size == 7


def test_special_tokens_have_no_text_but_a_name():
    tokenizer = CharacterTokenizer("ab")
    assert tokenizer.decode([2, 1, 0, 3]) == "ab"
    assert tokenizer.piece(tokenizer.eos_id) == "<eos>"


def test_an_unknown_character_is_refused_by_name_and_never_dropped():
    with pytest.raises(UserError, match=r"'c'.*tokenizer\.alphabet"):
        CharacterTokenizer("ab").encode("abc")


def test_threads_share_a_tokenizer():
    tokenizer = CharacterTokenizer("abc")
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: tuple(tokenizer.encode("cab" * 50)), range(200))) == {(4, 2, 3) * 50}

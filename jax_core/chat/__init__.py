"""Conversations in token ids: chat templates, the glue between turns, and masks that are true by construction."""

from __future__ import annotations

from pathlib import Path

from jax_core.chat.conversation import Conversation
from jax_core.chat.dialogue import Dialogue, RawText, Said
from jax_core.chat.template import ChatTemplate, Message, load_template
from jax_core.tokenizers.base import Tokenizer
from schemas.errors import UserError
from schemas.recipe import Recipe

__all__ = [
    "ChatTemplate",
    "Conversation",
    "Dialogue",
    "Message",
    "RawText",
    "Said",
    "load_template",
    "make_dialogue",
    "make_template",
]


def make_dialogue(recipe: Recipe, tokenizer: Tokenizer) -> Dialogue:
    """A conversation that has not begun, to fork one of each sample from.

    Raises:
      UserError: the recipe's template cannot be found or used.
    """
    template = make_template(recipe, tokenizer)
    if template is None:
        return RawText(tokenizer)
    chat = recipe.chat
    return Conversation(
        template, tokenizer, system=chat.system, prefill=chat.prefill, options=chat.options, history=chat.history
    )


def make_template(recipe: Recipe, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template that a recipe names; None if it names none."""
    written, today = recipe.chat.template, recipe.chat.date
    if written == "none":
        return None
    if written == "model":
        return load_template(recipe.model.checkpoint, today=today)
    if "{{" in written or "{%" in written:
        name, source = "chat template of the recipe", written
    else:
        if not Path(written).is_file():
            reason = "is neither 'none', 'model', jinja text, nor a file that exists."
            raise UserError(f"chat.template={written!r}", reason, "Write one of these.")
        name, source = f"chat template {written}", Path(written).read_text("utf-8")
    return ChatTemplate(source, name=name, special_tokens=tokenizer.special_tokens, today=today)

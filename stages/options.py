"""Options that come as a plain table of a recipe, checked by the pydantic model of whoever they are for."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from schemas.errors import UserError

Model = TypeVar("Model", bound=BaseModel)


def checked_options(model: type[Model], options: Mapping[str, Any] | Model, where: str) -> Model:
    """`options` as a `model`; options that are one already pass through.

    Args:
      model: what the options have to be; closed to unknown keys.
      options: as written in the recipe.
      where: the recipe's key that holds them, for the message.

    Raises:
      UserError: unknown keys (the nearest known one is named) and wrong values, all in one message.
    """
    if isinstance(options, model):
        return options
    try:
        return model.model_validate(dict(options))  # type: ignore[arg-type]
    except ValidationError as error:
        problems = [_problem(model, where, detail["loc"], detail["msg"]) for detail in error.errors()]
        known = ", ".join(model.model_fields)
        raise UserError(where, "; ".join(problems) + ".", f"Known options: {known}.") from None


def _problem(model: type[BaseModel], where: str, location: tuple[int | str, ...], message: str) -> str:
    key = ".".join([where, *map(str, location)])
    if len(location) == 1 and location[0] not in model.model_fields:
        nearest = difflib.get_close_matches(str(location[0]), model.model_fields, n=1)
        return f"{key} is unknown" + (f" (did you mean {nearest[0]}?)" if nearest else "")
    return f"{key}: {message.removeprefix('Value error, ').rstrip('.')}"

"""The reward `json_schema`: the answer is JSON, and fits a schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from schemas.errors import UserError
from schemas.recipe import Recipe
from stages.reward.base import AnswerOptions, AnswerReward, Scored, need_package


class JsonSchemaOptions(AnswerOptions):
    """Options of the reward `json_schema`."""

    json_schema: dict[str, Any] | None = Field(None, description="the schema itself")
    schema_file: str = Field("", description="or: a JSON file that holds it")
    schema_key: str = Field("", description="or: where in a prompt's row its own schema is")

    @model_validator(mode="after")
    def _one_schema(self) -> JsonSchemaOptions:
        if sum((self.json_schema is not None, bool(self.schema_file), bool(self.schema_key))) != 1:
            raise ValueError("set one of json_schema, schema_file and schema_key")
        return self


def make(options: JsonSchemaOptions, recipe: Recipe) -> AnswerReward:
    """The reward.

    Raises:
      UserError: jsonschema is not installed, the file cannot be read, or the schema is none.
    """
    need_package("jsonschema", recipe)
    fixed = _fixed_schema(options)
    validator = None if fixed is None else make_validator(fixed, "task.reward_options")

    def scorer(answer: str, payload: Mapping[str, Any]) -> Scored:
        return score_json(answer, validator or make_validator(payload[options.schema_key], options.schema_key))

    return AnswerReward(scorer, options)


def score_json(answer: str, validator: Any) -> Scored:
    """1.0 where the answer is JSON that fits; the component "json" says whether it is JSON at all."""
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return 0.0, {"success": 0.0, "json": 0.0}
    try:
        fits = validator.is_valid(value)
    except RecursionError:  # nested deeper than anyone means
        fits = False
    return float(fits), {"success": float(fits), "json": 1.0}


def make_validator(schema: Any, where: str) -> Any:
    """A validator that looks nothing up on the network.

    Raises:
      UserError: `schema` is no JSON schema.
    """
    import jsonschema
    import referencing

    try:
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
    except (jsonschema.SchemaError, TypeError, AttributeError) as error:
        said = str(getattr(error, "message", error))
        raise UserError(where, f"holds no JSON schema ({said}).", "Mend the schema.") from None
    return kind(schema, registry=referencing.Registry(), format_checker=kind.FORMAT_CHECKER)


def _fixed_schema(options: JsonSchemaOptions) -> Any:
    if not options.schema_file:
        return options.json_schema
    try:
        return json.loads(Path(options.schema_file).read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(options.schema_file, f"holds no JSON ({error}).", "See reward_options.schema_file.") from None

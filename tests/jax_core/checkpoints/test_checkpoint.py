"""What a location holds, and how its makers would have it sampled."""

from __future__ import annotations

import json

import pytest

from jax_core.checkpoints.checkpoint import open_checkpoint
from jax_core.checkpoints.generation import GenerationDefaults
from jax_core.checkpoints.locations import resolve
from schemas.errors import DamagedDataError, UserError
from tests.jax_core.checkpoints import models


def with_generation(folder, generation, config=models.CONFIG):
    models.write_folder(folder, {}, config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return open_checkpoint(folder).generation


def test_generation_config_gives_all_stop_ids_and_the_sampling(tmp_path):
    said = {"eos_token_id": [5, 7, 5], "temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True}
    assert with_generation(tmp_path, said) == GenerationDefaults((5, 7), 0.6, 20, 0.95)


def test_one_stop_id_may_stand_without_a_list(tmp_path):
    assert with_generation(tmp_path, {"eos_token_id": 0}).stop_ids == (0,)


@pytest.mark.parametrize("generation", [None, {}, {"eos_token_id": None, "temperature": None, "top_k": None}])
def test_what_generation_config_leaves_out_is_config_jsons_stop_id_and_plain_sampling(tmp_path, generation):
    assert with_generation(tmp_path, generation) == GenerationDefaults((2,), 1.0, 0, 1.0)


@pytest.mark.parametrize(
    "key, value",
    [
        ("eos_token_id", "</s>"),
        ("eos_token_id", [1, None]),
        ("eos_token_id", True),
        ("temperature", -1),
        ("top_p", 1.5),
    ],
)
def test_a_value_that_cannot_be_is_named(tmp_path, key, value):
    with pytest.raises(UserError, match=rf"generation_config\.json: {key}"):
        with_generation(tmp_path, {key: value})


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds no config\.json"):
        open_checkpoint(tmp_path)


def test_a_torn_config_is_named(tmp_path):
    models.write_folder(tmp_path, {})
    (tmp_path / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(DamagedDataError, match=r"config\.json: holds no whole JSON"):
        open_checkpoint(tmp_path)


def test_an_unsupported_architecture_is_named(tmp_path):
    models.write_folder(tmp_path, {}, {**models.CONFIG, "architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    with pytest.raises(UserError, match=r"(?i)mamba"):
        _ = open_checkpoint(tmp_path).config


def test_a_place_where_nothing_is_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")


def test_a_file_in_an_installed_package_is_found_without_importing_the_package():
    assert resolve("package:schemas/errors.py").read_text().startswith('"""Errors that a user can mend')


@pytest.mark.parametrize(
    "location", ["package:schemas", "package:../x", "package:schemas/../jax_core/rows.py", "package:"]
)
def test_what_is_no_place_in_a_package_is_refused(location):
    with pytest.raises(UserError, match="is no package:PACKAGE/FILE"):
        resolve(location)


def test_a_package_that_is_not_installed_is_named_with_the_way_to_install_it():
    with pytest.raises(UserError, match=r"no installed package 'no_such_package'\. pip install no-such-package"):
        resolve("package:no_such_package/model.gguf")

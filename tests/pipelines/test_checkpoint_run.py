"""A run that starts from a checkpoint: its weights, its tokenizer and its stop ids, from the first token on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models
from typer.testing import CliRunner

from jax_core.checkpoints import load_params, open_checkpoint
from jax_core.checkpoints.write import write_checkpoint
from jax_core.models.config import ModelConfig
from jax_core.models.decoder import init_params
from jax_core.policies import tree_digest
from pipelines.evaluate import evaluate_run, open_run, run_results
from pipelines.replay import replay
from runners import colocated
from runners.cli import app
from schemas.errors import UserError
from schemas.metrics import read_metrics
from schemas.recipe import Recipe
from schemas.records import Rollout
from stages.runtime import Runtime, release
from stages.shards import list_manifests, read_shard
from tests.pipelines.tiny_runs import Killed, kill_at, outcome

STEPS = 3
TEMPLATE = """\
{%- for message in messages %}<|turn|>{{ message.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|turn|>{% endif %}"""
LETTERS = "0123456789?"


def small_tokenizer() -> Tokenizer:
    """A token a character, one for "12", and the special ones."""
    vocabulary = {token: i for i, token in enumerate([*LETTERS, "12"])}
    backend = Tokenizer(models.BPE(vocabulary, [("1", "2")]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<|turn|>", "<|end|>", "<|also|>")])
    return backend


BACKEND = small_tokenizer()
KNOWN = BACKEND.get_vocab_size()
TURN, END, ALSO = (BACKEND.token_to_id(token) for token in ("<|turn|>", "<|end|>", "<|also|>"))
CONFIG = ModelConfig.llama(
    vocab_size=4 * KNOWN,  # as real ones have, though fewer: sampled from at random, most ids would be none
    layers=1,
    width=16,
    heads=2,
    kv_heads=1,
    head_width=8,
    mlp_width=24,
    rope_theta=10_000.0,
    norm_epsilon=1e-5,
    tied_head=False,
)


def write_model(folder: Path) -> Path:
    """A small Llama in Hugging Face's layout, with two tokens that end an answer."""
    tokens = {"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    files = {"tokenizer.json": BACKEND.to_str().encode(), "tokenizer_config.json": json.dumps(tokens).encode()}
    stops = {"eos_token_id": [END, ALSO]}
    write_checkpoint(folder, CONFIG, init_params(CONFIG, 7), generation_json=stops, files=files)
    return folder


def recipe_of(folder: Path, **sections: dict[str, Any]) -> Recipe:
    rows = [{"prompt": f"12{a}?"} for a in range(40)]
    (folder.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, dict[str, Any]] = {
        "model": {"checkpoint": str(folder)},
        "tokenizer": {"kind": "checkpoint"},
        "chat": {"template": TEMPLATE},
        "data": {"source": "files", "name": "rows", "options": {"files": [str(folder.parent / "rows.jsonl")]}},
        "task": {
            "environment": "question",
            "reward": "regex",
            "reward_options": {"expression": "[0-4]", "where": "first", "require_stop": False},
        },
        "sampling": {"answer_tokens": 6},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "prompt_tokens": 7,
            "branch_tokens": 6,
            "cohorts": 1,
            "max_lag": 0,
        },
        "trainer": {
            "steps": STEPS,
            "micro_batch_rows": 8,
            "row_tokens": 12,
            "checkpoint_every": 2,
            "optimizer": {"schedule": "constant", "learning_rate": 1e-2},
        },
        "algorithm": {"equal_groups": "train"},
        "evaluation": {"every": 0, "test_prompts": 4, "samples": 2},
    }
    for name, section in sections.items():
        settings[name] = settings.get(name, {}) | section
    return Recipe.model_validate({"name": "tuned", **settings})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture(scope="module")
def finished(model: Path) -> Path:
    run = model.parent / "run"
    colocated.run(recipe_of(model), run)
    return run


@pytest.fixture
def shared(finished: Path) -> Runtime:
    release(finished)
    return open_run(finished)


def rollouts(shared: Runtime) -> list[Rollout]:
    contents = [read_shard(shared.store, manifest) for manifest in list_manifests(shared.store)]
    return [s.rollout for content in contents for group in content.groups for s in group.samples]


def answer_of(rollout: Rollout) -> list[int]:
    return rollout.tokens[rollout.loss_mask].tolist()


def same(tree: Any, other: Any) -> bool:
    return jax.tree.all(jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), tree, other))


def exported(run: Path, to: Path, *options: str) -> Path:
    result = CliRunner().invoke(app, ["export", str(run), "--to", str(to), *options])
    assert result.exit_code == 0, result.output
    return to


def test_version_0_is_the_checkpoint_bit_for_bit(model: Path, shared: Runtime) -> None:
    assert shared.policies.commit(0).source == "checkpoint"
    assert shared.policies.commit(0).digest == tree_digest(load_params(open_checkpoint(model)))


def test_an_export_of_the_first_policy_is_the_checkpoint_again(model: Path, tmp_path: Path) -> None:
    colocated.run(recipe_of(model, trainer={"steps": 1}), tmp_path / "run")
    out = exported(tmp_path / "run", tmp_path / "out", "--version", "0")
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    assert {file.name for file in out.iterdir()} == {file.name for file in model.iterdir()}
    assert not same(load_file(exported(tmp_path / "run", tmp_path / "newest") / "model.safetensors"), before)


def test_a_prompt_is_written_by_the_template_in_the_checkpoints_own_tokens(shared: Runtime) -> None:
    for rollout in rollouts(shared):
        asked = ["12", *rollout.environment["payload"]["prompt"].removeprefix("12")]  # "12" is one token
        ids = [BACKEND.token_to_id(token) for token in asked]
        assert rollout.tokens[: rollout.prompt_length].tolist() == [TURN, *ids, END, TURN]


def test_either_stop_id_ends_an_answer_and_nothing_is_sampled_behind_it(shared: Runtime) -> None:
    played = rollouts(shared)
    assert len(played) == STEPS * 16 and all(r.status == "ok" for r in played)
    ends = Counter(answer_of(r)[-1] for r in played)
    assert ends[END] and ends[ALSO]
    for rollout in played:
        *before, last = answer_of(rollout)
        assert not {END, ALSO} & set(before)
        assert last in (END, ALSO) or len(before) == 5


def test_it_trains_on_ratios_of_one(shared: Runtime) -> None:
    trained = [event.values for event in read_metrics(shared.store, "train")]
    assert len(trained) == STEPS
    assert all(values["trainer/grad_norm"] > 0 for values in trained)
    assert all(values["trainer/sampler_logprob_gap_nats/max"] <= 1e-5 for values in trained)
    assert len({shared.policies.commit(version).digest for version in range(STEPS + 1)}) == STEPS + 1


def test_ids_that_only_fill_the_embedding_up_are_neither_sampled_nor_trained(shared: Runtime) -> None:
    assert all(r.tokens.max() < KNOWN for r in rollouts(shared))
    trained = [event.values for event in read_metrics(shared.store, "train")]
    assert all(0 < values["trainer/entropy_nats/mean"] < np.log(KNOWN) for values in trained)
    first, last = (np.asarray(shared.policy_cache.get(version)["head"]) for version in (0, STEPS))
    moved = (first != last).any(axis=0)
    assert moved[:KNOWN].any() and not moved[KNOWN:].any()


def test_it_is_replayed_bit_for_bit_and_evaluated(shared: Runtime) -> None:
    assert replay(shared, shared.recipe).identical
    assert [part.total.failed for part in evaluate_run(shared).parts] == [0, 0]
    labels = [result.label for result in run_results(shared).results]
    assert labels[:2] == ["checkpoint", f"after RL ({STEPS} steps)"]


def test_adapters_of_a_checkpoint_are_trained_and_exported_merged(model: Path, tmp_path: Path) -> None:
    recipe = recipe_of(model, lora={"rank": 2, "alpha": 8.0})
    colocated.run(recipe, tmp_path / "run")
    shared = open_run(tmp_path / "run")
    merged = load_params(open_checkpoint(exported(tmp_path / "run", tmp_path / "merged")))
    assert same(merged, shared.policy_cache.get(STEPS)) and not same(merged, shared.base)
    first = exported(tmp_path / "run", tmp_path / "first", "--version", "0")
    assert same(load_params(open_checkpoint(first)), load_params(open_checkpoint(model)))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_in_bfloat16_trains_and_a_killed_one_ends_in_the_same_bits(
    rank: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = {"parameters_dtype": "bfloat16", "compute_dtype": "bfloat16"}
    recipe = recipe_of(model, model=halves, lora={"rank": rank})
    colocated.run(recipe, tmp_path / "run")
    shared = open_run(tmp_path / "run")
    weights = shared.policy_cache.get(STEPS)
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype(jnp.bfloat16)}
    stored = {leaf.dtype for leaf in jax.tree.leaves(shared.policies.load(STEPS))}
    assert stored == {jnp.dtype(jnp.float32 if rank else jnp.bfloat16)}  # adapters stay float32
    assert not same(weights, shared.initial_weights())
    assert replay(shared, recipe).identical
    disarm = kill_at(monkeypatch, "policy-before-commit", 4)  # behind the trainer's state of step 2
    with pytest.raises(Killed):
        colocated.run(recipe, tmp_path / "killed")
    disarm()
    colocated.run(recipe, tmp_path / "killed", resume=True)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "run")


def test_a_model_that_a_run_cannot_begin_with_is_refused_before_there_is_a_run(model: Path, tmp_path: Path) -> None:
    def refused(recipe: Recipe, reason: str) -> None:
        with pytest.raises(UserError, match=reason):
            colocated.run(recipe, tmp_path / "run")
        assert not (tmp_path / "run" / "config.json").exists()

    refused(recipe_of(tmp_path / "nowhere"), "does not exist")
    refused(recipe_of(model, chat={"template": "model"}), "template")  # it brings none
    torn = write_model(tmp_path / "torn")
    tensors = load_file(torn / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, torn / "model.safetensors")
    refused(recipe_of(torn), "missing: model.norm.weight")

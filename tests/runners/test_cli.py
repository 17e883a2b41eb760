"""The commands, as a user types them: what they print, what they refuse, and how they end."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from runners.cli import app
from runners.report import print_error, user_error_behind
from schemas.errors import DamagedDataError, UserError
from schemas.run_layout import CURVE, RESULTS
from stages.prompts.datasets import DATA_VARIABLE
from stages.runtime import release
from tests.pipelines.placed import processes_of
from tests.pipelines.tiny_runs import ALPHABET, LARGEST_LAKE, copied, share_parts
from tests.runners.written_run import write_run

COMMANDS = ("run", "begin", "rollout", "train", "evaluate", "replay", "inspect", "export")

RECIPE = """
name = "tiny"
seed = 1
[tokenizer]
alphabet = ALPHABET
[task.options]
names_grid = LARGEST_LAKE
hole_reward = -1.0
[model]
layers = 2
width = 16
heads = 2
kv_heads = 2
head_width = 8
mlp_width = 32
[data.options]
train_maps = 40
train_sizes = {2 = 1.0}
validation_maps = {3 = 4}
test_maps = {3 = 4}
[rollout]
prompts_per_step = 4
samples_per_prompt = 4
prompt_tokens = 16
branch_tokens = 24
cohorts = 1
max_turns = 8
[trainer]
steps = 2
micro_batch_rows = 8
row_tokens = 24
optimizer = {schedule = "constant", learning_rate = 1e-2}
[algorithm]
equal_groups = "train"
[evaluation]
every = 2
curve_prompts = 2
test_prompts = 2
samples = 2
""".replace("ALPHABET", json.dumps(ALPHABET)).replace("LARGEST_LAKE", str(LARGEST_LAKE))


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(result: Result) -> str:
    """What a refusal said: on standard error, exit code 2, no traceback."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.stderr.split())


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


# Without JAX and Beam


def test_the_command_line_imports_nothing_heavy() -> None:
    heavy = ("apache_beam", "jax", "tensorflow_datasets", "matplotlib", "orbax", "pyarrow", "numpy")
    code = f"import sys, runners.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_a_sentence_options_and_examples(command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"rollstream {command}" in result.output.split("Examples")[1]
    assert "Options" in result.output and "Arguments" in result.output


def test_help_lists_every_command() -> None:
    output = invoke("--help").output
    assert all(re.search(rf"^│ {command} ", output, re.MULTILINE) for command in COMMANDS)


def test_a_run_can_be_begun_without_starting_anything(recipe: Path, tmp_path: Path) -> None:
    assert invoke("begin", recipe, "seed=5", "--dir", tmp_path / "run").exit_code == 0
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]
    assert '"seed": 5' in (tmp_path / "run/config.json").read_text()
    assert "already holds a run" in refused(invoke("begin", recipe, "--dir", tmp_path / "run"))


@pytest.mark.parametrize("share", ["0/2", "3/2", "2", "a/b", "1/0"])
def test_a_share_that_is_none_is_refused(tmp_path: Path, share: str) -> None:
    assert "such as 2/4" in refused(invoke("rollout", tmp_path, "--share", share))


def test_an_unknown_runner_is_refused_with_the_known_ones(recipe: Path, tmp_path: Path) -> None:
    said = refused(invoke("run", recipe, "--runner", "spark", "--dir", tmp_path / "run"))
    assert "spark" in said and "colocated, local, prism, flink, dataflow" in said
    assert not (tmp_path / "run").exists()


def test_flags_for_beam_reach_the_placement_of_one_process(recipe: Path, tmp_path: Path) -> None:
    said = refused(invoke("run", recipe, "--beam-flag=--direct_num_workers=2", "--dir", tmp_path / "run"))
    assert "direct_num_workers=2" in said and "Leave these flags out" in said


def test_a_placement_without_prism_refuses_a_place_of_prism(recipe: Path, tmp_path: Path) -> None:
    said = refused(invoke("run", recipe, "--prism-location", "prism", "--dir", tmp_path / "run"))
    assert "--prism-location prism" in said and "--runner prism" in said


def test_a_placement_of_one_process_refuses_generators(recipe: Path, tmp_path: Path) -> None:
    said = refused(invoke("run", recipe, "--generators", 2, "--dir", tmp_path / "run"))
    assert "--generators 2" in said and "--runner local" in said
    assert "trains where it samples" in refused(invoke("rollout", tmp_path, "--runner", "colocated"))
    assert not (tmp_path / "run").exists()


def test_a_prism_that_is_not_where_the_user_says_is_refused_with_the_way_to_build_one(
    recipe: Path, tmp_path: Path
) -> None:
    where = tmp_path / "no-prism"
    said = refused(invoke("run", recipe, "--runner", "prism", "--prism-location", where, "--dir", tmp_path / "run"))
    assert str(where) in said and "go install github.com/apache/beam" in said
    assert not (tmp_path / "run").exists()


def test_runners_says_what_is_usable_here_and_how_to_get_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "prism"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("GOPATH", str(tmp_path / "go"))
    monkeypatch.setattr("apache_beam.runners.portability.prism_runner.PrismJobServer.BIN_CACHE", str(tmp_path / "none"))
    prism = lambda: {row["runner"]: row for row in json.loads(invoke("runners", "--json").stdout)}["prism"]
    assert not prism()["usable"] and "go install" in prism()["how"]
    program.touch(mode=0o755)
    assert prism()["usable"] and prism()["how"] == str(program)
    assert "colocated" in invoke("runners").output


def test_a_misspelt_option_is_refused_with_the_nearest() -> None:
    result = invoke("evaluate", "runs/x", "--versoin", "3")
    assert "--version" in refused(result)


def test_a_missing_recipe_is_refused_with_its_neighbours(recipe: Path) -> None:
    said = refused(invoke("run", recipe.with_name("tinny.toml")))
    assert "there is no such recipe" in said and "tiny.toml" in said


def test_all_problems_of_a_recipe_are_said_at_once(recipe: Path, tmp_path: Path) -> None:
    said = refused(invoke("run", recipe, "trainer.stepz=3", "seed=-1", "--dir", tmp_path / "run"))
    assert "trainer.stepz" in said and "trainer.steps" in said and "seed" in said
    assert not (tmp_path / "run").exists()


def test_resuming_where_there_is_no_run_is_refused(recipe: Path, tmp_path: Path) -> None:
    said = refused(invoke("run", recipe, "--resume", "--dir", tmp_path / "run"))
    assert "no run to resume" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arguments", [("inspect",), ("evaluate",), ("replay",), ("inspect", "--json")])
def test_a_folder_without_a_run_is_refused_and_not_made(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    command, *options = arguments
    assert "holds no run" in refused(invoke(command, tmp_path / "nowhere", *options))
    assert not (tmp_path / "nowhere").exists()


def test_the_ledger_ends_with_exit_code_1_where_it_does_not_add_up(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    assert invoke("inspect", tmp_path / "run", "--ledger").exit_code == 0
    assert json.loads(invoke("inspect", tmp_path / "run", "--ledger", "--json").stdout)["problems"] == []
    (tmp_path / "run/steps/00000001.json").unlink()
    broken = invoke("inspect", tmp_path / "run", "--ledger")
    assert broken.exit_code == 1 and "does not add up" in broken.output


def test_inspect_prints_tables_or_json(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    assert "Shards: 3, 3 whole" in invoke("inspect", tmp_path / "run").output
    report = json.loads(invoke("inspect", tmp_path / "run", "--json").stdout)
    assert report["steps_done"] == 2 and len(report["shards"]) == 3
    view = json.loads(invoke("inspect", tmp_path / "run", "--trajectory", "1/0/1", "--json").stdout)
    assert view["path"] == "1/0/1" and len(view["tokens"]) == 5
    assert "update of step 1" in invoke("inspect", tmp_path / "run", "--trajectory", "1/0/1").output


def test_inspect_of_a_broken_run_reports_and_succeeds(tmp_path: Path) -> None:
    store = write_run(tmp_path / "run")
    store.put("config.json", b"{")
    result = invoke("inspect", tmp_path / "run")
    assert result.exit_code == 0 and "config.json" in result.output and "Problems" in result.output


# Errors


def written(error: UserError, *, terminal: bool) -> str:
    output = io.StringIO()
    print_error(error, Console(width=60, force_terminal=terminal, color_system=None, file=output))
    return output.getvalue()


def test_an_error_is_a_panel_on_a_terminal_and_whole_lines_elsewhere() -> None:
    error = UserError("trainer.steps=0 [x]", "is below 1, " * 8, "Set it to 1 or more.")
    panel, lines = written(error, terminal=True), written(error, terminal=False)
    assert panel.startswith("╭─ error") and "trainer.steps=0 [x]" in panel and "Set it to 1" in panel
    assert lines.splitlines() == [f"error: trainer.steps=0 [x]: {error.reason}", "Set it to 1 or more."]


def test_an_error_without_a_way_out_has_no_empty_line() -> None:
    assert written(UserError("a", "b.", ""), terminal=False) == "error: a: b.\n"


def test_a_user_error_is_found_behind_what_beam_makes_of_it() -> None:
    original = DamagedDataError("shard", "is torn.", "Restore it.")
    try:
        try:
            raise original
        except DamagedDataError as error:
            raise RuntimeError("[while running 'Train']") from error
    except RuntimeError as wrapped:
        assert user_error_behind(wrapped) is original
    assert user_error_behind(ValueError("ours")) is None


def test_beams_words_are_taken_out_of_an_error() -> None:
    error = UserError("shard 3 [while running 'Train/TrainReadySteps']", "is torn.", "Restore it.")
    assert written(error, terminal=False).startswith("error: shard 3: is torn.")


# A run from beginning to end


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run's directory, and what was printed on the way."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "tiny.toml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DATA_VARIABLE, str(folder / "data"))
        share_parts(patch)
        result = invoke("run", folder / "tiny.toml", "--dir", folder / "run")
    assert result.exit_code == 0, result.output
    return folder / "run", result.stdout


@pytest.fixture
def run(finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(DATA_VARIABLE, str(finished[0].parent / "data"))
    copy = copied(finished[0], tmp_path / "run")
    release(copy)
    return copy


def test_a_run_ends_with_before_after_the_scripted_rule_and_a_picture(finished: tuple[Path, str]) -> None:
    run, printed = finished
    assert "step 2/2" in printed
    for part in ("random weights", "after RL (2 steps)", "scripted rule", str(run / CURVE)):
        assert part in printed.replace("\n", ""), part
    assert (run / CURVE).read_bytes().startswith(b"\x89PNG")
    labels = [result["label"] for result in json.loads((run / RESULTS).read_bytes())["results"]]
    assert labels == ["random weights", "after RL (2 steps)", "scripted rule"]


def test_a_second_run_never_mixes_into_the_directory_of_the_first(run: Path, recipe: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert "already holds a run" in refused(invoke("run", recipe, "--dir", run))
    said = refused(invoke("run", recipe, "trainer.steps=9", "--dir", run, "--resume"))
    assert "trainer.steps: 2 -> 9" in said
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_evaluate_as_json_has_digest_intervals_and_pass_at_k(run: Path) -> None:
    result = invoke("evaluate", run, "--version", "0", "--samples", "2", "--prompts", "2", "--json")
    report = json.loads(result.stdout)
    commit = json.loads((run / "policies/00000000/COMMIT.json").read_bytes())
    assert (report["version"], report["digest"]) == (0, commit["digest"])
    sampled, greedy = report["parts"]
    assert set(sampled["total"]["pass_at"]) == {"1", "2"} and set(greedy["total"]["pass_at"]) == {"1"}
    assert sampled["total"]["interval"]["low"] <= sampled["total"]["success"] <= sampled["total"]["interval"]["high"]


def test_an_unchanged_replay_says_bit_identical(run: Path) -> None:
    result = invoke("replay", run)
    assert result.exit_code == 0 and "bit-identical: all 2 versions" in result.output


def test_a_replay_that_does_not_come_out_the_same_ends_with_1(run: Path) -> None:
    path = run / "policies/00000002/COMMIT.json"
    commit = json.loads(path.read_bytes())
    path.write_text(json.dumps(commit | {"digest": "0" * 64}))
    for folder in [child for child in path.parent.iterdir() if child.is_dir()]:
        folder.rename(folder.with_name("0" * 64))
    result = invoke("replay", run, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["identical"] is False


def test_a_changed_replay_says_what_differs_and_keeps_it(run: Path, tmp_path: Path) -> None:
    result = invoke("replay", run, "trainer.optimizer.learning_rate=0.001", "--to", tmp_path / "to")
    assert result.exit_code == 0
    for part in ("learning_rate: 0.01 -> 0.001", "other weights from version 1 on", "trainer/learning_rate"):
        assert part in result.output
    assert "replay of" in invoke("inspect", tmp_path / "to").output


def test_a_replay_refuses_to_change_the_sampling(run: Path) -> None:
    assert "sampling.temperature" in refused(invoke("replay", run, "sampling.temperature=0.5"))


# Interrupted


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", [[], pytest.param(["--runner", "local", "--beam-flag=--job_name=a b"], marks=pytest.mark.slow)]
)
def test_an_interrupted_run_ends_with_130_and_says_how_to_go_on(tmp_path: Path, recipe: Path, where: list[str]) -> None:
    arguments = [str(recipe), "trainer.steps=5000", "--dir", "run here", *where]
    command = [sys.executable, "-m", "runners.cli", "run", *arguments]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {DATA_VARIABLE: str(tmp_path / "data"), "PYTHONPATH": str(Path.cwd())},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    commits = tmp_path / "run here/policies/00000003/COMMIT.json"
    deadline = time.monotonic() + 180
    while not commits.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert said.splitlines()[-1] == (f"interrupted. Go on with:  rollstream run {shlex.join([*arguments, '--resume'])}")
    assert processes_of(tmp_path) == []


@pytest.mark.slow
def test_a_run_in_processes_shows_one_progress_and_ends_with_its_results(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    changes = ("rollout.elements_per_step=2", "rollout.max_lag=1")
    result = invoke("run", recipe, *changes, "--runner", "local", "--generators", 2, "--dir", run)
    assert result.exit_code == 0, result.output
    assert "step 2/2" in result.output and "random weights" in result.output
    assert (run / RESULTS).exists() and (run / CURVE).exists()
    assert sorted(log.name for log in (run / "logs").iterdir()) == [
        *("rollout-1-of-2.log", "rollout-2-of-2.log", "trainer.log"),
    ]
    assert invoke("inspect", run, "--ledger").exit_code == 0
    assert processes_of(run) == []

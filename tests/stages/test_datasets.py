"""Prompts from data sets: what frozen_lake_maps holds, how any TFDS data set becomes prompts, and in which order."""

import collections
import itertools
import json
import subprocess
import sys
import threading

import numpy as np
import pytest
import tensorflow_datasets as tfds
from gymnasium.envs.toy_text.frozen_lake import is_valid

from schemas.errors import DamagedDataError, UserError
from schemas.recipe import DataSection, TaskSection
from stages.prompts import frozen_lake_maps
from stages.prompts.datasets import DATA_VARIABLE, open_prompts, training_prompts
from stages.prompts.frozen_lake_maps import FrozenLakeMapOptions, draw_maps, held_out_maps, home_split, train_maps
from stages.rollout.environments.frozen_lake import make, shortest_path_length

SMALL = {
    "train_maps": 50,
    "train_sizes": {"2": 1.0, "3": 2.0, "4": 2.0},
    "validation_maps": {"3": 2, "4": 8},
    "test_maps": {"3": 2, "4": 8},
}
TASK = TaskSection()


class TinyLakes(tfds.core.GeneratorBasedBuilder):
    """Somebody else's data set: other features, and no ids."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "map": tfds.features.Text(),
            "tags": tfds.features.Sequence(tfds.features.Text()),
            "grid": tfds.features.Tensor(shape=(2, 2), dtype=np.int32),
            "difficulty": np.float32,
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(3)}

    def _generate_examples(self, count):
        for i in range(count):
            yield (
                i,
                {
                    "map": "SF\nFG",
                    "tags": ["small", f"number {i}"],
                    "grid": np.full((2, 2), i, np.int32),
                    "difficulty": np.float32(0.5),
                },
            )


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(autouse=True)
def in_the_shared_folder(shared_folder, monkeypatch):
    monkeypatch.setenv(DATA_VARIABLE, str(shared_folder))


def small(split="train", **options):
    return open_prompts(DataSection(options={**SMALL, **options}), TASK, split)


def all_of(data):
    return [data[i] for i in range(len(data))]


def maps_of(data):
    return [prompt.payload["map"] for prompt in all_of(data)]


# --- frozen_lake_maps ---


def test_by_default_300_distinct_maps_are_held_out_for_test_and_300_for_validation():
    for split in ("validation", "test"):
        maps = list(held_out_maps(FrozenLakeMapOptions(), split))
        assert len({lake_map.text for lake_map in maps}) == len(maps) == 300
        assert {lake_map.size for lake_map in maps} == {3, 4, 5}


def test_no_map_is_in_two_splits_whatever_the_seed_and_the_options():
    splits = collections.defaultdict(set)
    for seed, share in [(0, (0.6, 0.85)), (1, (0.6, 0.85)), (0, (0.5, 0.7))]:
        options = FrozenLakeMapOptions(seed=seed, frozen_share=share, train_maps=2000)
        splits["train"] |= {lake_map.text for lake_map in train_maps(options)}
        for split in ("validation", "test"):
            splits[split] |= {lake_map.text for lake_map in held_out_maps(options, split)}
    for one, other in itertools.combinations(splits, 2):
        assert not splits[one] & splits[other], f"{one} and {other} share maps"


def test_the_built_splits_are_disjoint_and_held_out_maps_are_distinct():
    train, validation, test = (maps_of(small(split)) for split in ("train", "validation", "test"))
    assert len(set(validation)) == len(validation) == 10
    assert len(set(test)) == len(test) == 10
    assert len(train) == 50
    assert not set(train) & set(validation) and not set(train) & set(test) and not set(validation) & set(test)


def test_all_maps_of_two_by_two_are_for_training():
    assert {home_split(text) for text in ("SF\nFG", "SH\nFG", "SF\nHG")} == {"train"}


def test_each_split_has_a_fair_share_of_the_3x3_maps():
    homes = collections.Counter(home_split(text) for text in solvable_3x3())
    assert sum(homes.values()) == 51
    assert min(homes["validation"], homes["test"]) >= 5 and homes["train"] > 30


def test_what_a_small_size_lacks_is_made_up_by_the_larger_ones():
    options = FrozenLakeMapOptions(test_maps={3: 50, 4: 10, 5: 10})
    counts = collections.Counter(lake_map.size for lake_map in held_out_maps(options, "test"))
    few = sum(home_split(text) == "test" for text in solvable_3x3())
    assert counts[3] <= few
    assert sum(counts.values()) == 70 and abs(counts[4] - counts[5]) <= 1


def test_training_sizes_are_drawn_by_their_weights():
    options = FrozenLakeMapOptions(train_maps=4000, train_sizes={2: 1.0, 9: 3.0})
    counts = collections.Counter(lake_map.size for lake_map in train_maps(options))
    assert set(counts) == {2, 9}
    assert 850 < counts[2] < 1150  # 1000, with a standard deviation of 27


def test_maps_are_solvable_and_their_shortest_paths_right():
    maps = draw_maps(np.random.PCG64(0), 5, 300, (0.5, 0.7))
    for lake_map in maps:
        assert is_valid([list(row) for row in lake_map.text.split("\n")], 5)
        assert shortest_path_length(tuple(lake_map.text.split("\n"))) == lake_map.optimal_steps
    assert len({lake_map.optimal_steps for lake_map in maps}) > 1


def test_solvable_means_what_it_means_to_gymnasium_for_every_3x3_map():
    accepted = {text for text in every_3x3() if is_valid([list(row) for row in text.split("\n")], 3)}
    assert accepted == set(solvable_3x3())


def test_maps_are_distributed_as_gymnasium_makes_them():
    # Cells are frozen independently with probability p and unsolvable maps rejected, so a solvable 3 x 3 map with k of
    # its 7 free cells frozen has probability p^k (1 - p)^(7 - k) / Z.
    p, draws = 0.7, 20_000
    weights = {text: p ** text.count("F") * (1 - p) ** text.count("H") for text in solvable_3x3()}
    total = sum(weights.values())
    counts = collections.Counter(lake_map.text for lake_map in draw_maps(np.random.PCG64(0), 3, draws, (p, p)))
    for text, weight in weights.items():
        expected = draws * weight / total
        assert abs(counts[text] - expected) < 5 * expected**0.5 + 1, text


def test_two_builds_in_fresh_folders_hold_the_same_prompts_in_the_same_order(tmp_path, monkeypatch):
    here = {split: all_of(small(split)) for split in ("train", "validation", "test")}
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert {split: all_of(small(split)) for split in here} == here


def test_another_seed_draws_other_maps():
    assert maps_of(small(seed=0)) != maps_of(small(seed=1))


def test_the_first_maps_of_this_version_never_change():
    first = [lake_map.text for lake_map in itertools.islice(train_maps(FrozenLakeMapOptions()), 3)]
    assert first == ["SFHF\nHFFH\nFFFF\nFHFG", "SFFF\nFFHF\nFFFF\nFFHG", "SF\nHG"]
    assert home_split("SFF\nFHF\nFFG") == "validation"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sed": 1}, r"data.options.sed is unknown \(did you mean seed\?\)"),
        ({"train_sizes": {"12": 1.0}}, "train_sizes"),
        ({"test_maps": {"2": 5}}, "test_maps"),  # all of them are for training
        ({"train_sizes": {}}, "train_sizes"),
        ({"frozen_share": [0.9, 0.6]}, "frozen_share"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options, message):
    with pytest.raises(UserError, match=message):
        small(**options)


# --- prompts ---


def test_a_prompt_has_a_content_id_and_a_payload_of_json_values():
    for prompt in all_of(small()):
        assert json.loads(json.dumps(prompt.payload)) == prompt.payload
        assert set(prompt.payload) == {"map", "size", "optimal_steps"}
        assert prompt.prompt_id.startswith(f"frozen_lake/{prompt.payload['size']}/")
        assert len(prompt.prompt_id.split("/")[2]) == 12
        assert prompt.task == "frozen_lake"


def test_equal_maps_have_equal_ids_and_different_maps_different_ones():
    prompts = all_of(small())
    maps = {prompt.payload["map"] for prompt in prompts}
    ids = {prompt.prompt_id for prompt in prompts}
    pairs = {(prompt.prompt_id, prompt.payload["map"]) for prompt in prompts}
    assert len(maps) == len(ids) == len(pairs) < len(prompts)  # training maps repeat


def test_any_other_tfds_data_set_takes_the_place_of_ours():
    prompts = all_of(open_prompts(DataSection(name="tiny_lakes"), TASK, "train"))
    by_number = sorted(prompts, key=lambda prompt: prompt.payload["grid"][0][0])
    assert by_number[1].payload == {
        "map": "SF\nFG",
        "tags": ["small", "number 1"],
        "grid": [[1, 1], [1, 1]],
        "difficulty": 0.5,
    }
    assert len({prompt.prompt_id for prompt in prompts}) == 3
    assert all(prompt.prompt_id.startswith("tiny_lakes/") for prompt in prompts)
    assert make({}).reset(prompts[0], 0) == "^ab\nfg*\na"


def test_a_part_of_a_split_can_be_named():
    assert maps_of(small("train[:20%]")) == maps_of(small("train"))[:10]


def test_an_index_outside_the_split_is_an_error():
    data = small()
    for index in (-1, len(data)):
        with pytest.raises(IndexError):
            data[index]


def test_an_unknown_data_set_is_named():
    with pytest.raises(UserError, match="no_such_lakes not found"):
        open_prompts(DataSection(name="no_such_lakes"), TASK, "train")


def test_an_unknown_split_is_refused_with_those_there_are():
    with pytest.raises(UserError, match=r"'tset'.*train, validation, test"):
        small("tset")


def test_a_folder_that_cannot_hold_data_is_named_with_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(UserError, match=DATA_VARIABLE):
        small()


def test_damaged_files_are_named_and_never_half_read(tmp_path, monkeypatch):
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    small()
    (records,) = tmp_path.rglob("*train.array_record*")
    content = bytearray(records.read_bytes())
    content[100:400] = bytes(300)
    records.write_bytes(content)
    with pytest.raises(DamagedDataError, match="prepared again") as caught:
        maps_of(small())
    assert str(records.parent) in str(caught.value)


# --- preparing ---

PROGRAM = """
import json, os, signal, sys
from schemas.recipe import DataSection, TaskSection
from stages.prompts import datasets, frozen_lake_maps
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
if "die" in sys.argv: frozen_lake_maps.held_out_maps = die
data = datasets.open_prompts(DataSection(options=json.loads(sys.argv[1])), TaskSection(), "train")
print(json.dumps([data[i].prompt_id for i in range(len(data))]))
"""


def start(*arguments):
    return subprocess.Popen([sys.executable, "-c", PROGRAM, json.dumps(SMALL), *arguments], stdout=subprocess.PIPE)


def test_two_processes_that_prepare_at_once_read_the_same_prompts(tmp_path, monkeypatch):
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    outputs = [process.communicate() for process in [start(), start()]]
    first, second = (json.loads(output) for output, _ in outputs)
    assert first == second and len(first) == 50
    assert not list(tmp_path.rglob("*incomplete*"))


def test_what_a_killed_process_left_behind_is_not_taken_for_a_data_set(tmp_path, monkeypatch):
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    process = start("die")
    process.communicate()
    assert process.returncode == -9
    assert list(tmp_path.rglob("*")), "it died before it wrote anything"
    assert len(maps_of(small())) == 50


def test_a_data_set_is_prepared_once(monkeypatch):
    small()
    monkeypatch.setattr(frozen_lake_maps, "train_maps", lambda options: pytest.fail("prepared again"))
    assert len(small()) == 50


def test_preparing_and_reading_print_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    maps_of(small())
    assert capfd.readouterr() == ("", "")


# --- the order of training ---


def test_training_prompts_are_a_pure_function_of_seed_and_step():
    data = small()
    later = training_prompts(data, 7, 3, 8)
    training_prompts(data, 7, 0, 8)
    assert training_prompts(data, 7, 3, 8) == later
    assert training_prompts(data, 8, 3, 8) != later
    assert training_prompts(data, 7, 4, 8) != later


def test_every_epoch_visits_each_example_once_in_an_order_of_its_own_even_if_steps_do_not_divide_it():
    data = [f"example {i}" for i in range(10)]
    visited = [example for step in range(10) for example in training_prompts(data, 0, step, 4)]
    epochs = [visited[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == sorted(data) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4


def test_a_step_may_be_larger_than_the_data_set():
    assert collections.Counter(training_prompts(["a", "b", "c"], 0, 0, 6)) == {"a": 2, "b": 2, "c": 2}


def test_threads_read_the_same_prompts():
    data = small()
    expected = maps_of(data)
    results = [None] * 4
    threads = [threading.Thread(target=lambda i=i: results.__setitem__(i, maps_of(small()))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


# --- helpers ---


def every_3x3():
    for cells in itertools.product("FH", repeat=7):
        letters = "S" + "".join(cells) + "G"
        yield "\n".join(letters[i : i + 3] for i in (0, 3, 6))


def solvable_3x3():
    return [text for text in every_3x3() if shortest_path_length(tuple(text.split("\n"))) is not None]

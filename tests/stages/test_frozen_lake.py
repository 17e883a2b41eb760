"""FrozenLake as a conversation: what the policy reads, what its answers do, and who plays well without learning."""

import collections
import subprocess
import sys

import pytest

from schemas.errors import UserError
from schemas.records import Prompt
from stages.prompts.frozen_lake_maps import FrozenLakeMapOptions, train_maps
from stages.rollout.environments import ENVIRONMENTS
from stages.rollout.environments.frozen_lake import (
    demonstrate,
    make,
    parse_move,
    scripted_rule,
    scripted_success,
    shortest_path_length,
)

# S F F
# F H F
# F F G
RING = "SFF\nFHF\nFFG"
OPEN = "SFF\nFFF\nFFG"
WALLED = "SHF\nHHF\nFFG"
DEAD_ENDS = "SFFF\nFHHF\nFFHF\nFHHG"
RANDOM_MAPS = [lake_map.text for lake_map in train_maps(FrozenLakeMapOptions(seed=1, train_maps=60))]


def prompt_of(text, prompt_id="p"):
    return Prompt(prompt_id, "frozen_lake", {"map": text})


def play(text, answers, *, seed=0, **options):
    environment = make(options)
    environment.reset(prompt_of(text), seed)
    return [environment.step(answer) for answer in answers]


def test_the_prompt_is_the_map_and_where_the_agent_stands():
    assert make({}).reset(prompt_of(RING), 0) == "^SFF\nFHF\nFFG\n00"


def test_an_episode_reads_as_positions_and_ends_in_silence_with_reward_one_at_the_goal():
    transitions = play(RING, ["D", "D", "R", "R"])
    assert [t.text for t in transitions] == ["10", "20", "21", ""]
    assert [t.reward for t in transitions] == [0.0, 0.0, 0.0, 1.0]
    assert [t.terminated for t in transitions] == [False, False, False, True]
    assert not any(t.truncated for t in transitions)
    assert transitions[-1].facts == {
        "return": 1.0,
        "success": True,
        "invalid_answers": 0,
        "steps": 4,
        "size": 3,
        "optimal_steps": 4,
    }


def test_a_hole_ends_the_episode_with_reward_zero():
    last = play(RING, ["D", "R"])[-1]
    assert (last.text, last.reward, last.terminated, last.truncated) == ("", 0.0, True, False)
    assert last.facts["success"] is False


@pytest.mark.parametrize(("move", "position"), [("L", "10"), ("D", "21"), ("R", "12"), ("U", "01")])
def test_each_move_goes_one_cell_its_way(move, position):
    to_the_middle = ["D", "R"]
    assert play(OPEN, [*to_the_middle, move])[-1].text == position


def test_a_move_off_the_map_leaves_the_agent_where_it_is_and_counts():
    transition = play(OPEN, ["U"])[0]
    assert (transition.text, transition.facts["steps"], transition.facts["invalid_answers"]) == ("00", 1, 0)


@pytest.mark.parametrize("answer", ["", " ", "d", "DD", "LDRU", "DOWN", "0", "?", "\n"])
def test_an_answer_that_is_no_move_costs_a_move_and_is_answered_by_a_question_mark(answer):
    first, second = play(OPEN, ["R", answer])
    assert (first.text, second.text) == ("01", "?01")
    assert (second.reward, second.terminated) == (0.0, False)
    assert (second.facts["steps"], second.facts["invalid_answers"]) == (2, 1)


def test_white_space_around_a_move_does_not_matter():
    assert [parse_move(answer) for answer in ("D", " R\n", "\tU ")] == ["D", "R", "U"]


@pytest.mark.parametrize("answer", ["U", "nonsense"])
def test_an_episode_is_truncated_in_silence_at_its_limit_of_moves(answer):
    transitions = play(OPEN, [answer] * 6, moves_per_size=2)
    assert [t.truncated for t in transitions] == [False] * 5 + [True]
    assert (transitions[-1].text, transitions[-1].terminated, transitions[-1].reward) == ("", False, 0.0)


def test_reaching_the_goal_with_the_last_move_is_no_truncation():
    last = play(OPEN, ["U", "U", "D", "D", "R", "R"], moves_per_size=2)[-1]
    assert (last.terminated, last.truncated, last.reward) == (True, False, 1.0)


def test_slips_repeat_with_the_seed_and_differ_between_seeds():
    def path(seed):
        return "".join(t.text for t in play("SFFFF\n" + "FFFFF\n" * 3 + "FFFFG", ["U"] * 12, seed=seed, slippery=True))

    paths = [path(seed) for seed in range(8)]
    assert paths == [path(seed) for seed in range(8)]
    assert len(set(paths)) > 4


def test_without_slips_the_seed_changes_nothing():
    assert play(OPEN, ["R", "D"], seed=1) == play(OPEN, ["R", "D"], seed=2)


def test_episodes_on_one_map_do_not_touch_each_other():
    first, second = make({}), make({})
    for environment in (first, second):
        environment.reset(prompt_of(OPEN), 0)
    assert [first.step("R").text, second.step("D").text, first.step("R").text] == ["01", "10", "02"]


def test_an_environment_can_be_reset_to_another_map_in_mid_episode():
    environment = make({})
    environment.reset(prompt_of(OPEN), 0)
    environment.step("nonsense")
    assert environment.reset(prompt_of("SF\nFG"), 0) == "^SF\nFG\n00"
    assert environment.step("D").facts == {
        "return": 0.0,
        "success": False,
        "invalid_answers": 0,
        "steps": 1,
        "size": 2,
        "optimal_steps": 2,
    }


def test_stepping_without_an_episode_is_an_error():
    environment = make({})
    with pytest.raises(RuntimeError, match="reset"):
        environment.step("D")
    environment.reset(prompt_of(RING), 0)
    environment.step("D")
    environment.step("R")
    with pytest.raises(RuntimeError, match="reset"):
        environment.step("R")
    environment.close()
    environment.close()


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ({}, "no text 'map'"),
        ({"map": 3}, "no text 'map'"),
        ({"map": "SF\nFFG"}, "differ in length"),
        ({"map": "SF\nXG"}, "letters"),
        ({"map": "SF\nFF"}, "at least one G"),
        ({"map": "SS\nFG"}, "exactly one S"),
        ({"map": ""}, "exactly one S"),
        ({"map": "S" + "F" * 9 + "G"}, "larger than 10"),
    ],
)
def test_a_prompt_that_is_no_lake_is_refused_by_its_id_with_the_reason(payload, reason):
    with pytest.raises(UserError, match=reason) as caught:
        make({}).reset(Prompt("other_set/abc", "frozen_lake", payload), 0)
    assert "other_set/abc" in caught.value.offender


def test_unknown_options_are_refused_with_the_nearest_known_one():
    with pytest.raises(UserError, match=r"task.options.slipery is unknown \(did you mean slippery\?\)"):
        ENVIRONMENTS["frozen_lake"].make({"slipery": True})


def test_all_wrong_options_are_told_at_once():
    with pytest.raises(UserError, match="moves_per_size") as caught:
        make({"moves_per_size": 0, "slippery": "perhaps"})
    assert "task.options.slippery" in str(caught.value)


@pytest.mark.parametrize("text", RANDOM_MAPS)
def test_a_demonstration_reaches_the_goal_in_the_fewest_moves(text):
    answers = ENVIRONMENTS["frozen_lake"].demonstrate(prompt_of(text), {})
    last = play(text, answers)[-1]
    assert last.facts["success"]
    assert len(answers) == last.facts["steps"] == last.facts["optimal_steps"]


def test_demonstrations_are_the_same_for_one_prompt_id_and_spread_evenly_over_all_shortest_paths():
    # An open 3 x 3 map has 6 shortest paths; 1,200 prompts give each about 200, with a standard deviation of 13.
    paths = [tuple(demonstrate(prompt_of(OPEN, f"p{i}"), {})) for i in range(1200)]
    assert paths[:20] == [tuple(demonstrate(prompt_of(OPEN, f"p{i}"), {})) for i in range(20)]
    counts = collections.Counter(paths)
    assert len(counts) == 6
    assert all(140 < count < 260 for count in counts.values())


def test_a_slippery_lake_has_no_demonstrations():
    with pytest.raises(UserError, match="slips"):
        demonstrate(prompt_of(OPEN), {"slippery": True})


def test_a_map_without_a_path_can_be_played_but_not_demonstrated():
    assert play("SFH\nFHF\nHFG", ["R"])[0].facts["optimal_steps"] is None
    with pytest.raises(UserError, match="no path"):
        demonstrate(prompt_of("SFH\nFHF\nHFG"), {})


def test_the_shortest_path_goes_around_holes():
    assert shortest_path_length(("SHFF", "FHFF", "FHFF", "FFFG")) == 6
    assert shortest_path_length(("SHFFF", "FHFHF", "FFFHF", "HHHHF", "HHHHG")) == 12
    assert shortest_path_length(tuple(WALLED.split("\n"))) is None


@pytest.mark.parametrize(
    ("rows", "position", "moves", "expected"),
    [
        (("SF", "FG"), (0, 0), "", "D"),  # down first
        (("SF", "HG"), (0, 0), "", "R"),  # a hole below: right
        (("SFF", "FHF", "FFG"), (0, 1), "R", "R"),  # never back, never into the hole
        (("SFH", "FHF", "FFG"), (0, 1), "R", "L"),  # a dead end: back after all
    ],
)
def test_the_scripted_rule_prefers_down_and_right_and_avoids_holes_and_turning_back(rows, position, moves, expected):
    assert scripted_rule(rows, *position, list(moves)) == expected


def test_the_scripted_rule_never_dies_on_a_lake_without_slips():
    for text in RANDOM_MAPS:
        assert not died(text), text


def test_the_scripted_rule_does_not_always_arrive():
    assert 0.85 < scripted_success([prompt_of(text) for text in RANDOM_MAPS], {}) <= 1.0
    # Down first, from one dead end into the other until the moves are used up: this map needs a plan.
    assert scripted_success([prompt_of(DEAD_ENDS)], {}) == 0.0
    assert shortest_path_length(tuple(DEAD_ENDS.split("\n"))) == 6


def died(text):
    environment, rows, moves = make({}), text.split("\n"), []
    position = environment.reset(prompt_of(text), 0)
    while True:
        moves.append(scripted_rule(rows, int(position[-2]), int(position[-1]), moves))
        transition = environment.step(moves[-1])
        if transition.over:
            return transition.terminated and not transition.facts["success"]
        position = transition.text


def test_environments_and_data_sets_need_neither_tensorflow_nor_jax():
    program = (
        "import sys, stages.rollout.environments, stages.prompts.datasets;"
        "print([m for m in ('tensorflow', 'jax', 'apache_beam') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output == "[]\n"

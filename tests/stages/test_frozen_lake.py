"""FrozenLake as a conversation: what the policy reads, what its answers do, and who plays well without learning."""

import collections
import itertools
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jax_core.tokenizers import CharacterTokenizer
from schemas.errors import UserError
from schemas.recipe import Recipe, RolloutSection, TokenizerSection, TrainerSection
from schemas.recipe_io import load_recipe
from schemas.records import Prompt
from stages.prompts.frozen_lake_maps import FrozenLakeMapOptions, train_maps
from stages.rollout.environments import ENVIRONMENTS, frozen_lake
from stages.rollout.environments.frozen_lake import (
    LARGEST_GRID,
    NAMES,
    SIGNS,
    alphabet,
    cell_name,
    demonstrate,
    make,
    named_cell,
    parse_move,
    scripted_rule,
    scripted_rules,
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
    assert make({}).reset(prompt_of(RING), 0) == "^abc\nfⓖh\nklm*\na"


def test_an_episode_reads_as_names_of_cells_and_ends_in_silence_with_reward_one_at_the_goal():
    transitions = play(RING, ["D", "D", "R", "R"])
    assert [t.text for t in transitions] == ["f", "k", "l", ""]
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


@pytest.mark.parametrize(("move", "name"), [("L", "f"), ("D", "l"), ("R", "h"), ("U", "b")])
def test_each_move_goes_one_cell_its_way(move, name):
    to_the_middle = ["D", "R"]
    assert play(OPEN, [*to_the_middle, move])[-1].text == name


def test_a_move_off_the_map_leaves_the_agent_where_it_is_and_counts():
    transition = play(OPEN, ["U"])[0]
    assert (transition.text, transition.facts["steps"], transition.facts["invalid_answers"]) == ("a", 1, 0)


@pytest.mark.parametrize("answer", ["", " ", "d", "DD", "LDRU", "DOWN", "b", "H", "?", "\n"])
def test_an_answer_that_is_no_move_costs_a_move_and_is_answered_by_a_question_mark(answer):
    first, second = play(OPEN, ["R", answer])
    assert (first.text, second.text) == ("b", "?b")
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


# Names of cells


def open_lake(size):
    rows = ["F" * size] * size
    return "\n".join(["S" + rows[0][1:], *rows[1:-1], rows[-1][:-1] + "G"])


def tour(size):
    """Moves through every cell of an open lake of `size` that do not reach the goal: each row there and back."""
    back_and_forth = itertools.chain.from_iterable(("R" * (size - 1), "L" * (size - 1), "D") for _ in range(size))
    return list("".join(back_and_forth)[: -size - 1])


def written(size, **options):
    """Everything that the environment writes on an open lake: the prompt, and every cell with and without '?'."""
    environment = make({"moves_per_size": 1000, **options})
    texts = [environment.reset(prompt_of(open_lake(size)), 0)]
    for answer in itertools.chain.from_iterable(("nonsense", move) for move in tour(size)):
        texts.append(environment.step(answer).text)
    return texts


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_the_default_alphabet_and_lengths_hold_every_text_of_the_default_sizes(size):
    tokenizer = CharacterTokenizer(TokenizerSection().alphabet)
    texts = written(size)
    assert set(texts[1:]) >= {cell_name((r, c), 5) for r in range(size) for c in range(size) if r + c < 2 * size - 2}
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("LDRU")) == "LDRU"
    limits = RolloutSection()
    moves = 4 * size
    assert len(tokenizer.encode(texts[0])) <= limits.prompt_tokens
    assert moves + (moves - 1) <= limits.branch_tokens <= TrainerSection().row_tokens  # an answer and a name a move


def test_the_largest_lake_needs_its_own_alphabet():
    texts = written(9, names_grid=9)
    with pytest.raises(UserError, match="alphabet"):
        CharacterTokenizer(TokenizerSection().alphabet).encode(texts[0])
    tokenizer = CharacterTokenizer(alphabet(9))
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in texts)


def test_the_default_alphabet_is_that_of_the_default_grid():
    assert TokenizerSection().alphabet == alphabet(5) == alphabet(2)


def test_ways_need_their_signs_in_the_alphabet_and_the_recipe_that_shows_them_has_them():
    path = Path(__file__).parents[2] / "recipes" / "frozen_lake_ways.toml"
    tokenizer = CharacterTokenizer(load_recipe(path, []).tokenizer.alphabet)
    assert tokenizer.alphabet == alphabet(5, show_ways=True)
    for text in written(5, show_ways=True):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(UserError, match=r"tokenizer\.alphabet"):
        CharacterTokenizer(TokenizerSection().alphabet).encode(make({"show_ways": True}).reset(prompt_of(RING), 0))


def test_names_are_told_apart_from_each_other_and_from_everything_else():
    assert len(NAMES) == len(set(NAMES)) == LARGEST_GRID**2
    assert not set(NAMES) & set(SIGNS + "\"'\\") and not any(name.isspace() for name in NAMES)
    assert [parse_move(name) for name in NAMES] == [None] * len(NAMES)


@pytest.mark.parametrize("grid", [2, 5, 9])
def test_every_cell_of_the_grid_has_a_name_that_leads_back_to_it(grid):
    cells = list(itertools.product(range(grid), repeat=2))
    assert [named_cell(cell_name(cell, grid), grid) for cell in cells] == cells


def test_a_cell_has_one_name_in_maps_of_every_size():
    prompts = [make({}).reset(prompt_of(open_lake(size)), 0) for size in (2, 3, 4, 5)]
    rows = [prompt[1:].split("\n")[:-1] for prompt in prompts]
    for smaller, larger in itertools.pairwise(rows):
        for small, large in zip(smaller, larger, strict=False):
            assert large.startswith(small.removesuffix("*"))


def test_every_cell_and_every_hole_has_a_name_that_is_nothing_else():
    names = frozen_lake.NAMES + frozen_lake.HOLES
    assert len(frozen_lake.NAMES) == len(frozen_lake.HOLES) == 81
    assert len(set(names + frozen_lake.SIGNS)) == len(names) + len(frozen_lake.SIGNS)


def test_a_hole_costs_what_the_option_says():
    for hole_reward in (0.0, -0.5):
        environment = make({"hole_reward": hole_reward})
        environment.reset(prompt_of(RING), 0)
        environment.step("D")
        fallen = environment.step("R")
        assert (fallen.reward, fallen.terminated, fallen.facts["success"]) == (hole_reward, True, False)


@pytest.mark.parametrize("play_it", [lambda prompt: make({}).reset(prompt, 0), lambda prompt: demonstrate(prompt, {})])
def test_a_map_larger_than_the_grid_is_refused_with_the_options_that_would_do(play_it):
    with pytest.raises(UserError, match="6 x 6 is larger than names_grid=5") as caught:
        play_it(prompt_of(open_lake(6)))
    said = caught.value.way_out.removesuffix(".")
    _, tokenizer_alphabet = said.split(" and tokenizer.alphabet=")
    assert said.startswith("Set task.options.names_grid=6 and")
    assert tomllib.loads(f"alphabet = {tokenizer_alphabet}") == {"alphabet": alphabet(6)}
    assert make({"names_grid": 6}).reset(prompt_of(open_lake(6)), 0).startswith("^abcdef\nghijkl\n")


def test_a_map_larger_than_the_largest_grid_cannot_be_played():
    with pytest.raises(UserError, match="Leave out maps above 9 x 9"):
        make({"names_grid": 9}).reset(prompt_of(open_lake(10)), 0)
    with pytest.raises(UserError, match="names_grid"):
        make({"names_grid": 10})


# Slips


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
    assert [first.step("R").text, second.step("D").text, first.step("R").text] == ["b", "f", "c"]


def test_an_environment_can_be_reset_to_another_map_in_mid_episode():
    environment = make({})
    environment.reset(prompt_of(OPEN), 0)
    environment.step("nonsense")
    assert environment.reset(prompt_of("SF\nFG"), 0) == "^ab\nfg*\na"
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
        ({"map": "SFFFFG"}, r"map of 1 x 6 is larger than names_grid=5"),
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
    answers = ENVIRONMENTS["frozen_lake"].demonstrate(prompt_of(text), {}).answers
    last = play(text, answers)[-1]
    assert last.facts["success"]
    assert len(answers) == last.facts["steps"] == last.facts["optimal_steps"]


def test_demonstrations_are_the_same_for_one_prompt_id_and_spread_evenly_over_all_shortest_paths():
    # An open 3 x 3 map has 6 shortest paths; 1,200 prompts give each about 200, with a standard deviation of 13.
    paths = [demonstrate(prompt_of(OPEN, f"p{i}"), {}).answers for i in range(1200)]
    assert paths[:20] == [demonstrate(prompt_of(OPEN, f"p{i}"), {}).answers for i in range(20)]
    counts = collections.Counter(paths)
    assert len(counts) == 6
    assert all(140 < count < 260 for count in counts.values())


@pytest.mark.parametrize("text", [DEAD_ENDS, *RANDOM_MAPS])
def test_a_demonstrated_dead_end_is_walked_into_untaught_and_left_for_the_goal_by_the_shortest_way(text):
    shown = demonstrate(prompt_of(text), {"dead_ends_shown": 1.0})
    transitions = play(text, shown.answers, moves_per_size=1000)
    assert [t.terminated for t in transitions] == [False] * (len(shown.answers) - 1) + [True]
    assert transitions[-1].facts["success"]
    walked, rows = shown.first_taught, text.split("\n")
    if walked == 0:  # a start that leads nowhere but to the goal
        assert len(rows) == 2
        return
    r, c = named_cell(transitions[walked - 1].text, 5)
    assert rows[r][c] == "F"
    moved = [list(row.replace("S", "F")) for row in rows]
    moved[r][c] = "S"
    assert len(shown.answers) - walked == shortest_path_length(tuple("".join(row) for row in moved))


def test_of_the_cells_that_can_be_walked_to_those_are_dead_ends_from_which_nothing_leads_nearer_to_the_goal():
    # S F F F      From (3, 0) only up is free; from every other cell some way leads right or down.
    # F H H F
    # F F H F
    # F H H G
    ends = set()
    for i in range(50):
        shown = demonstrate(prompt_of(DEAD_ENDS, f"p{i}"), {"dead_ends_shown": 1.0})
        transitions = play(DEAD_ENDS, shown.answers, moves_per_size=1000)
        ends.add(transitions[shown.first_taught - 1].text)
    assert ends == {cell_name((3, 0), 5), cell_name((2, 1), 5)}


def test_dead_ends_are_shown_in_the_share_of_demonstrations_that_the_option_says():
    shown = [demonstrate(prompt_of(DEAD_ENDS, f"p{i}"), {"dead_ends_shown": 0.5}) for i in range(1000)]
    assert 440 < sum(d.first_taught > 0 for d in shown) < 560
    assert {d.first_taught for d in shown if d.first_taught} == {3}


def test_the_agent_sees_which_ways_are_open_where_it_stands():
    assert make({"show_ways": True}).reset(prompt_of(RING), 0) == "^abc\nfⓖh\nklm*\na┌"
    transitions = play(RING, ["D", "x", "D", "R", "R"], show_ways=True)
    assert [t.text for t in transitions] == ["f│", "?f│", "k└", "l─", ""]
    assert play(WALLED, ["U"], show_ways=True)[0].text == "a·"


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
    assert 0.85 < scripted_success(RANDOM_MAPS) <= 1.0
    # Down first, from one dead end into the other until the moves are used up: this map needs a plan.
    assert scripted_success([DEAD_ENDS]) == 0.0
    assert shortest_path_length(tuple(DEAD_ENDS.split("\n"))) == 6


def scripted_success(maps):
    (rule,) = scripted_rules(Recipe(name="test"))
    return sum(rule.success(prompt_of(text)) for text in maps) / len(maps)


def died(text):
    environment, rows, moves = make({}), text.split("\n"), []
    position = environment.reset(prompt_of(text), 0)
    while True:
        moves.append(scripted_rule(rows, *named_cell(position[-1], 5), moves))
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

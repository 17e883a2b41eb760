"""What answers to questions are worth that nobody has to understand a question for.

    always "3"                 the most frequent answer of the training questions
    the second number + 1      the rule over the numbers of a question that is right most often in training

A policy that scores no better has learned to answer like that, and nothing else. Both are chosen on training questions
and judged, like the policy, by the task's reward on those that were held out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction

from schemas.recipe import Recipe
from schemas.records import Prompt
from stages.prompts.datasets import open_prompts
from stages.prompts.reasoning_gym import numbers_in
from stages.reward.base import SUCCESS, AnswerReward
from stages.reward.kinds import make_reward
from stages.reward.matching import is_same
from stages.rollout.environments.base import ScriptedRule
from stages.rollout.environments.question import asked_in

QUESTIONS = 200  # training questions that rules are chosen on
Numbers = Sequence[Fraction]


def scripted_rules(recipe: Recipe) -> list[ScriptedRule]:
    """The majority answer and the best shortcut, as opponents; none where the data knows no answers."""
    reward = make_reward(recipe)
    if not isinstance(reward, AnswerReward):
        return []
    data = open_prompts(recipe.data, recipe.task, recipe.data.train_split)
    count = min(QUESTIONS, len(data))
    prompts = [data[i * len(data) // count] for i in range(count)]
    known = [(question_text(prompt), reward.known_answer(prompt.payload)) for prompt in prompts]
    pairs = [(question, answer) for question, answer in known if answer is not None]
    if not pairs:
        return []
    answer = majority_answer([answer for _, answer in pairs])
    rules = [_opponent(f"always {answer!r}, the commonest answer", reward, lambda question: answer)]
    if (name := best_shortcut(pairs)) is not None:
        rules.append(_opponent(f"{name}, the best shortcut", reward, SHORTCUTS[name]))
    return rules


def _opponent(label: str, reward: AnswerReward, rule: Callable[[str], str]) -> ScriptedRule:
    def success(prompt: Prompt) -> float:
        score, components = reward.score(rule(question_text(prompt)), prompt.payload)
        return float(components.get("success", float(score >= SUCCESS)) > 0)

    return ScriptedRule(label, success)


def question_text(prompt: Prompt) -> str:
    """What the prompt asks, as text: of messages, the last one's."""
    asked = asked_in(prompt)
    return asked if isinstance(asked, str) else str(asked[-1]["content"])


def majority_answer(answers: Sequence[str]) -> str:
    """The most frequent answer; of several, the first by alphabet.

    >>> majority_answer(["3", "2", "3"])
    '3'
    """
    counts = Counter(answers)
    return min(counts, key=lambda answer: (-counts[answer], answer))


def best_shortcut(pairs: Sequence[tuple[str, str]]) -> str | None:
    """Name of the rule of `SHORTCUTS` that is right most often on (question, answer) pairs; None if none ever is.

    >>> best_shortcut([("Ann has 3 cats and 4 dogs.", "5"), ("Bo has 1 cat and 6 dogs.", "7")])
    'the second number + 1'
    """
    right = {name: sum(is_same(rule(q), [a]) for q, a in pairs) for name, rule in SHORTCUTS.items()}
    best = max(right, key=lambda name: right[name])
    return best if right[best] else None


def _written(rule: Callable[[Numbers], Fraction]) -> Callable[[str], str]:
    """`rule` from the text of a question to the text of an answer; empty where the question has too few numbers."""

    def answer(question: str) -> str:
        numbers = [Fraction(text) for text in numbers_in(question)]
        try:
            value = rule(numbers)
        except (IndexError, ValueError):
            return ""
        return str(value.numerator) if value.denominator == 1 else str(float(value))

    return answer


def _numbered(place: int, more: int) -> Callable[[Numbers], Fraction]:
    return lambda numbers: numbers[place] + more


PLACES = {"first": 0, "second": 1, "third": 2, "fourth": 3, "last": -1}
RULES: dict[str, Callable[[Numbers], Fraction]] = {
    f"the {name} number{written}": _numbered(place, more)
    for name, place in PLACES.items()
    for written, more in {"": 0, " + 1": 1, " - 1": -1}.items()
} | {
    "the largest number": lambda numbers: max(numbers),
    "the smallest number": lambda numbers: min(numbers),
    "the largest number + 1": lambda numbers: max(numbers) + 1,
    "the smallest number + 1": lambda numbers: min(numbers) + 1,
    "the first number + the second": lambda numbers: numbers[0] + numbers[1],
    "the first number - the second": lambda numbers: numbers[0] - numbers[1],
    "the first number x the second": lambda numbers: numbers[0] * numbers[1],
    "how many numbers there are": lambda numbers: Fraction(len(numbers)),
}
SHORTCUTS: dict[str, Callable[[str], str]] = {name: _written(rule) for name, rule in RULES.items()}

"""Before a run: does the reward tell right answers from wrong ones?

A verifier that never calls its check gives everybody 100 %, and one that cannot read the data's own answers gives
everybody 0 %: both train a policy all night, to nothing. So on some training prompts the known answer has to succeed,
nonsense must not, and neither must all answers of other prompts. Where the data knows no answers, only nonsense is
tried.
"""

from __future__ import annotations

from collections.abc import Sequence

from schemas.errors import UserError
from schemas.recipe import Recipe
from schemas.records import Prompt
from stages.prompts.datasets import open_prompts
from stages.reward.base import SUCCESS, AnswerReward
from stages.reward.kinds import make_reward
from stages.rollout.environments import environment_options
from stages.rollout.environments.question import asked_in

PROMPTS_TRIED = 8
NONSENSE = "⊥ no answer ⊥"
WAY_OUT = (
    "See task.reward and task.reward_options (answer_key says where the known answer is); self_test=false goes without."
)


def check_task(recipe: Recipe) -> None:
    """Refuses a task whose environment or reward cannot work, or whose held-out data is not there, before anything is
    trained on it.

    Raises:
      UserError: the environment, the data or the reward cannot be opened, or has options that it does not know; or the
        reward fails its test: with an answer that shows it.
    """
    environment_options(recipe.task)
    reward = make_reward(recipe)
    if not isinstance(reward, AnswerReward) or not reward.options.self_test:
        return
    data = open_prompts(recipe.data, recipe.task, recipe.data.train_split)
    count = min(PROMPTS_TRIED, len(data))
    check_reward(recipe.task.reward, reward, [data[i * len(data) // count] for i in range(count)])
    for split in (recipe.data.validation_split, recipe.data.test_split):  # else refused after hours of training
        open_prompts(recipe.data, recipe.task, split)


def check_reward(name: str, reward: AnswerReward, prompts: Sequence[Prompt]) -> None:
    """Tries known answers, none, and nonsense on each prompt.

    Raises:
      UserError: see `check_task`.
    """
    for prompt in prompts:
        asked_in(prompt)
        known = reward.known_answer(prompt.payload)
        if known is None and reward.compares:
            where = f"prompt {prompt.prompt_id}"
            raise UserError(where, f"has no known answer under {reward.options.answer_key!r}.", WAY_OUT)
        if known is not None:
            _try(name, reward, prompt, known.strip(), right=True)
        for answer in ("", NONSENSE):
            _try(name, reward, prompt, answer, right=False)
    _try_others_answers(name, reward, prompts)


def _try_others_answers(name: str, reward: AnswerReward, prompts: Sequence[Prompt]) -> None:
    """Several answers may be right, but not every other prompt's."""
    known = [(prompt, reward.known_answer(prompt.payload)) for prompt in prompts]
    swapped = [
        (prompt, other.strip())
        for (prompt, own), (_, other) in zip(known, [*known[1:], *known[:1]], strict=True)
        if own is not None and other is not None and own != other
    ]
    if swapped and all(_succeeds(reward, prompt, answer) for prompt, answer in swapped):
        prompt, answer = swapped[0]
        raise _refusal(name, prompt, answer, "says right, and to each prompt tried another prompt's answer is")


def _succeeds(reward: AnswerReward, prompt: Prompt, answer: str) -> bool:
    score, components = reward.score(answer, prompt.payload)
    return bool(components.get("success", float(score >= SUCCESS)) > 0)


def _try(name: str, reward: AnswerReward, prompt: Prompt, answer: str, *, right: bool) -> None:
    try:
        succeeded = _succeeds(reward, prompt, answer)
    except UserError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise _refusal(name, prompt, answer, f"raises {type(error).__name__} ({error})") from error
    if right and not succeeded:
        raise _refusal(name, prompt, answer, "says wrong, although the data says it is right")
    if not right and succeeded:
        raise _refusal(name, prompt, answer, "says right, although it is no answer")


def _refusal(name: str, prompt: Prompt, answer: str, said: str) -> UserError:
    return UserError(
        f"task.reward={name!r}", f"for the answer {answer!r} to prompt {prompt.prompt_id} it {said}.", WAY_OUT
    )

"""The recipe: everything that decides what a run computes, as frozen pydantic models.

Written by people as TOML, overridden on the command line as `section.key=value`, resolved once, and stored as
`<run>/config.json`; nothing changes it afterwards. Unknown keys are refused with the nearest known one named.

Left out on purpose: where it runs (runner, hosts, directories). A recipe runs unchanged on every placement.
"""

from __future__ import annotations

import datetime
import difflib
import string
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]


class ConflictsError(ValueError):
    """Settings that do not go together: all of them, each with its reason and way out."""

    def __init__(self, reasons: tuple[str, ...]):
        super().__init__("\n".join(reasons))
        self.reasons = reasons


class Section(BaseModel):
    """A part of a recipe: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelSection(Section):
    """The model: a checkpoint, or a Llama of the given shape with random weights (seeded by the run)."""

    family: Literal["llama"] = Field("llama", description="the decoder's family")
    layers: Positive = Field(2, description="decoder blocks")
    width: Positive = Field(64, description="model width D")
    heads: Positive = Field(4, description="query heads")
    kv_heads: Positive = Field(4, description="key and value heads; heads must be a multiple (grouped-query attention)")
    head_width: Positive = Field(16, description="width of a head; even, for RoPE")
    mlp_width: Positive = Field(192, description="hidden width of the SwiGLU block")
    rope_theta: PositiveFloat = Field(10_000.0, description="base of the rotary frequencies")
    norm_epsilon: PositiveFloat = Field(1e-5, description="RMSNorm epsilon")
    tied_head: bool = Field(True, description="the output head is the transposed embedding")
    checkpoint: str = Field(
        "", description="folder, GGUF file or package:PACKAGE/FILE to start from; its shape replaces the one above"
    )
    parameters_dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the weights")
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="of activations and caches; norms, softmax, routers and logits stay float32"
    )
    remat: Literal["none", "blocks", "dots"] = Field(
        "none",
        description="what a gradient computes again to save memory: nothing, whole blocks, or all but matrix products",
    )
    router_balance: Annotated[float, Field(ge=0.0)] = Field(
        0.0, description="weight of the load-balancing loss of a mixture of experts; 0: none"
    )

    @model_validator(mode="after")
    def _shapes_fit(self) -> ModelSection:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}: each key/value head serves an "
                f"equal share of the query heads. Choose kv_heads that divides {self.heads}."
            )
        if self.head_width % 2:
            raise ValueError(
                f"head_width={self.head_width} is odd: RoPE rotates pairs of channels. Choose an even head_width."
            )
        return self


class LoraSection(Section):
    """Low-rank adapters in the place of all weights: they alone are trained, stored and published."""

    rank: NonNegative = Field(0, description="rank r of each adapter; 0: all weights are trained")
    alpha: PositiveFloat = Field(16.0, description="an adapter adds alpha / rank times its product to the weight")
    targets: tuple[str, ...] = Field(
        ("*",),
        min_length=1,
        description="patterns of the adapted matrices, such as '*/attention/*', '*/mlp/*', '*/experts/up'; '*' is all "
        "but routers",
    )


class TokenizerSection(Section):
    """One token a character of `alphabet`, after the special tokens <pad> and <eos>; or a checkpoint's own."""

    kind: Literal["character", "checkpoint"] = Field(
        "character", description="one token a character, or the tokenizer of model.checkpoint"
    )
    alphabet: str = Field(
        "\n*^LDRU?" + string.ascii_lowercase + "ⓐⓑⓒⓓⓔⓕⓖⓗⓘⓙⓚⓛⓜⓝⓞⓟⓠⓡⓢⓣⓤⓥⓦⓧⓨⓩ",
        min_length=1,
        description="the characters, each once; of kind 'character'",
    )

    @model_validator(mode="after")
    def _no_character_twice(self) -> TokenizerSection:
        twice = sorted({c for c in self.alphabet if self.alphabet.count(c) > 1})
        if twice:
            raise ValueError(f"alphabet has {twice} more than once: a character is one token. Write each once.")
        return self


class ChatSection(Section):
    """How messages become text. Without a template, texts are encoded as they are."""

    template: str = Field(
        "none",
        min_length=1,
        description="'none'; 'model': the one that model.checkpoint brings; or jinja text, or the path of a file of it",
    )
    system: str = Field("", description="system message of conversations that begin with none; '': none")
    prefill: str = Field("", description="how each answer begins; part of the prompt, never trained")
    options: dict[str, Any] = Field(default_factory=dict, description="variables of the template, such as tools")
    history: Literal["append", "split"] = Field(
        "append",
        description="where a template rewrites earlier turns: 'append' refuses; 'split' begins a new branch, but the "
        "sample of a rollout has one, and fails",
    )
    date: datetime.date = Field(
        datetime.date(2025, 1, 1),
        description="the date that a template is told, so that a run does not depend on the day",
    )


OUR_LAKES = "frozen_lake_maps"


class DataSection(Section):
    """Prompts: a TFDS data set, files, or a generator of reasoning-gym; options are the source's own."""

    source: Literal["tfds", "files", "reasoning_gym"] = Field("tfds", description="where prompts come from")
    name: str = Field(
        OUR_LAKES,
        min_length=1,
        description="TFDS data set (frozen_lake_maps is ours), reasoning-gym data set, or a name of your own for files",
    )
    train_split: str = Field("train", description="split that training prompts come from")
    validation_split: str = Field("validation", description="split for the learning curve and for choosing settings")
    test_split: str = Field("test", description="held-out split, read only by `evaluate` and at the end of a run")
    options: dict[str, Any] = Field(
        default_factory=dict, description="the source's options; for TFDS, arguments of the data set's builder config"
    )

    @model_validator(mode="after")
    def _source_has_it(self) -> DataSection:
        if self.source != "tfds" and self.name == OUR_LAKES:
            what = "the name of a reasoning-gym data set" if self.source == "reasoning_gym" else "a name for the files"
            raise ValueError(
                f"source={self.source!r} with name={self.name!r}, which is a TFDS data set: prompts could not be told "
                f"apart. Set name to {what}, or source to 'tfds'."
            )
        if self.source == "files" and "files" not in self.options:
            raise ValueError("source='files' without options.files: there is nothing to read. List the files there.")
        if self.train_split in (self.validation_split, self.test_split):
            raise ValueError(
                f"train_split={self.train_split!r} is a held-out split too: what is trained on measures nothing. "
                "Name different splits; a part of a TFDS split is written 'train[:80%]'."
            )
        splits = (self.train_split, self.validation_split, self.test_split)
        if self.source == "reasoning_gym" and set(splits) - {"train", "validation", "test"}:
            raise ValueError(f"a generator's splits are train, validation and test, and not {splits}. Leave them out.")
        return self


OUR_ENVIRONMENTS = ("frozen_lake", "question")
ANSWER_REWARDS = ("reasoning_gym", "math", "exact", "regex", "json_schema", "python")


class TaskSection(Section):
    """What an episode is: an environment, its options, and its limits."""

    environment: str = Field(
        "frozen_lake",
        description='environment that episodes run in: frozen_lake, question, or "module:name" or "path.py:name" of '
        "your own",
    )
    reward: Literal["environment_return", "reasoning_gym", "math", "exact", "regex", "json_schema", "python"] = Field(
        "environment_return", description="reward function"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="options of the environment")
    reward_options: dict[str, Any] = Field(default_factory=dict, description="options of the reward function")
    step_seconds_limit: PositiveFloat = Field(
        10.0, description="an environment call that takes longer fails its sample"
    )
    reward_seconds_limit: PositiveFloat = Field(10.0, description="a reward that takes longer fails its sample")

    @field_validator("environment")
    @classmethod
    def _is_an_environment(cls, environment: str) -> str:
        if environment not in OUR_ENVIRONMENTS and ":" not in environment:
            near = difflib.get_close_matches(environment, OUR_ENVIRONMENTS, n=1)
            guess = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f'{environment!r} is none of {", ".join(OUR_ENVIRONMENTS)}, nor "module:name" or "path.py:name" of '
                f"one of your own.{guess}"
            )
        return environment

    @model_validator(mode="after")
    def _reward_scores_it(self) -> TaskSection:
        if self.environment == "question" and self.reward == "environment_return":
            raise ValueError(
                "environment='question' gives no rewards of its own, so reward='environment_return' would always be "
                f"0. Choose one of {', '.join(ANSWER_REWARDS)}."
            )
        if self.environment != "question" and self.reward in ANSWER_REWARDS:
            raise ValueError(
                f"reward={self.reward!r} scores the answer to a question, and environment={self.environment!r} gives "
                "rewards of its own. Use environment='question', or reward='environment_return'."
            )
        return self


class SamplingSection(Section):
    """How tokens are drawn in training rollouts."""

    temperature: PositiveFloat = Field(1.0, description="divides the logits, in sampler and trainer alike")
    top_k: NonNegative = Field(0, description="0: not truncated")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(1.0, description="1: not truncated")
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.0, description="0: not truncated")
    answer_tokens: Positive = Field(1, description="most tokens of one answer (one turn)")
    stop_strings: tuple[str, ...] = Field((), description="an answer ends once its text contains one of these")

    @model_validator(mode="after")
    def _trainer_can_score_it(self) -> SamplingSection:
        if self.top_k or self.top_p < 1.0 or self.min_p > 0.0:
            raise ValueError(
                f"top_k={self.top_k}, top_p={self.top_p}, min_p={self.min_p} truncate the distribution that training "
                "data is drawn from: a later policy can give a drawn token probability zero there, and the importance "
                "ratio no longer exists. Train with top_k=0, top_p=1, min_p=0, and truncate in `evaluate` only."
            )
        return self


class RolloutSection(Section):
    """How much is sampled a step, and how."""

    prompts_per_step: Positive = Field(32, description="P, groups of a training step")
    samples_per_prompt: Positive = Field(16, description="G, samples of a group")
    elements_per_step: Positive = Field(1, description="pipeline elements that share a step's prompts equally")
    cohorts: Positive = Field(
        2, description="halves of an element that take turns: one decodes while the other's environments step"
    )
    prompt_tokens: Positive = Field(33, description="longest prompt; a longer one is refused, counted and never cut")
    branch_tokens: Positive = Field(
        48, description="most tokens after the prompt, answers and environment text together"
    )
    max_turns: Positive = Field(64, description="most answers of an episode; the environment may end it sooner")
    max_lag: NonNegative = Field(
        0, description="most steps between the policy that samples and the step that trains; 0 is on-policy"
    )

    @model_validator(mode="after")
    def _elements_share_equally(self) -> RolloutSection:
        if self.prompts_per_step % self.elements_per_step:
            raise ValueError(
                f"prompts_per_step={self.prompts_per_step} is not a multiple of elements_per_step="
                f"{self.elements_per_step}: elements have one fixed shape. Choose a divisor."
            )
        return self


class AlgorithmSection(Section):
    """GRPO and its relatives, as advantage x objective x reduction."""

    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce"] = Field(
        "grpo", description="how rewards of a group become advantages"
    )
    objective: Literal["ppo_clip", "policy_gradient", "cispo"] = Field("ppo_clip", description="loss of one token")
    reduction: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum_norm"] = Field(
        "token_mean", description="how token losses become one number"
    )
    clip_low: PositiveFloat = Field(0.2, description="lower clip range of the ratio")
    clip_high: PositiveFloat = Field(0.2, description="upper clip range of the ratio")
    entropy_bonus: Annotated[float, Field(ge=0.0)] = Field(
        0.0,
        description="entropy of each trained token, nats, that counts as so much less loss; keeps a policy exploring",
    )
    equal_groups: Literal["skip", "count", "train"] = Field(
        "skip",
        description="groups whose advantages are all 0, as their rewards are equal: left out of the update and of its "
        "denominator; counted there without being computed; or computed like all others",
    )

    @model_validator(mode="after")
    def _clip_leaves_one_inside(self) -> AlgorithmSection:
        if self.objective == "ppo_clip" and self.clip_low >= 1.0:
            raise ValueError(f"clip_low={self.clip_low} would allow a ratio of 0 or less. Choose it below 1.")
        return self


class OptimizerSection(Section):
    """AdamW, with a warm-up and a decay to `final_fraction` of the learning rate."""

    learning_rate: PositiveFloat = Field(3e-4, description="peak learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field("linear", description="shape of the decay")
    warmup_steps: NonNegative = Field(0, description="steps of linear warm-up from 0")
    final_fraction: Fraction = Field(0.1, description="learning rate at the last step, as a share of the peak")
    beta1: Fraction = Field(0.9, description="Adam's first-moment decay")
    beta2: Fraction = Field(0.98, description="Adam's second-moment decay")
    epsilon: PositiveFloat = Field(1e-8, description="Adam's epsilon")
    moments_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="that Adam's moments are kept in between updates; an update is computed in float32"
    )
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(0.0, description="decoupled weight decay")
    clip_norm: PositiveFloat = Field(1.0, description="gradients are scaled down to this global norm")


class TrainerSection(Section):
    """Training steps and the shapes that an update is computed in."""

    steps: Positive = Field(200, description="training steps; the run ends with policy version `steps`")
    micro_batch_rows: Positive = Field(32, description="pack rows of one micro-batch")
    micro_batch_prompts: NonNegative = Field(
        0, description="most prompts of one micro-batch, each computed once for its rows; 0: half of its rows"
    )
    row_tokens: Positive = Field(48, description="L, tokens of a pack row; at least rollout.branch_tokens")
    checkpoint_every: Positive = Field(
        25,
        description="steps between saves of the optimizer state; a resume repeats the steps since the last one, "
        "exactly",
    )
    keep_policies: Positive = Field(
        8, description="newest policy versions kept on disk, besides the first and every checkpoint's"
    )
    damaged_shards: Literal["refuse", "skip"] = Field(
        "refuse",
        description="what a step does with a damaged shard: stop and name it, or train without it and count it",
    )
    optimizer: OptimizerSection = Field(default_factory=lambda: OptimizerSection())


class WarmStartSection(Section):
    """A short supervised stage on demonstrations that makes policy version 0. steps = 0 leaves random weights."""

    steps: NonNegative = Field(0, description="optimizer steps; 0: no warm start")
    demonstrations: Positive = Field(
        1000, description="prompts of the training split that are demonstrated, one solution each"
    )
    batch: Positive = Field(64, description="demonstrations of an optimizer step")
    optimizer: OptimizerSection = Field(default_factory=lambda: OptimizerSection(learning_rate=1e-3))


class EvaluationSection(Section):
    """Success on prompts that are never trained on."""

    every: NonNegative = Field(25, description="steps between points of the learning curve (validation split); 0: none")
    temperature: PositiveFloat = Field(
        1.0, description="divides the logits in evaluation, whatever training sampled with"
    )
    curve_prompts: Positive = Field(64, description="validation prompts of one point of the curve, one sample each")
    test_prompts: Positive = Field(300, description="test prompts of the result at the end")
    samples: Positive = Field(4, description="samples a test prompt, for pass@k")


class Recipe(Section):
    """A whole run."""

    name: str = Field(
        min_length=1, pattern=r"^[A-Za-z0-9_.-]+$", description="name of the run's directory, unless one is given"
    )
    seed: NonNegative = Field(0, description="every random draw of the run derives from it")
    model: ModelSection = Field(default_factory=ModelSection)
    lora: LoraSection = Field(default_factory=LoraSection)
    tokenizer: TokenizerSection = Field(default_factory=TokenizerSection)
    chat: ChatSection = Field(default_factory=ChatSection)
    data: DataSection = Field(default_factory=DataSection)
    task: TaskSection = Field(default_factory=TaskSection)
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    warm_start: WarmStartSection = Field(default_factory=WarmStartSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)

    @model_validator(mode="after")
    def _sections_fit(self) -> Recipe:
        if reasons := tuple(self._conflicts()):
            raise ConflictsError(reasons)
        return self

    def _conflicts(self) -> Iterator[str]:
        if self.task.reward == "reasoning_gym" and self.data.source != "reasoning_gym":
            yield (
                f"task.reward='reasoning_gym' with data.source={self.data.source!r}: those scorers know only questions "
                "of their own generators. Set data.source='reasoning_gym', or choose another task.reward."
            )
        if self.trainer.row_tokens < self.rollout.branch_tokens:
            yield (
                f"trainer.row_tokens={self.trainer.row_tokens} is below rollout.branch_tokens="
                f"{self.rollout.branch_tokens}: the longest trajectory would fit no training row and be lost. "
                f"Set trainer.row_tokens to {self.rollout.branch_tokens} or more."
            )
        if self.sampling.answer_tokens > self.rollout.branch_tokens:
            yield (
                f"sampling.answer_tokens={self.sampling.answer_tokens} exceeds rollout.branch_tokens="
                f"{self.rollout.branch_tokens}: one answer may not outgrow its episode. Lower answer_tokens."
            )
        if self.rollout.samples_per_prompt == 1 and self.algorithm.advantage in ("grpo", "dr_grpo", "rloo"):
            yield (
                f"rollout.samples_per_prompt=1 with algorithm.advantage={self.algorithm.advantage!r}: a group of one "
                "has no baseline, every advantage is 0 and nothing is learned. Sample at least 2, or use 'reinforce'."
            )
        yield from self._equal_group_conflicts()
        yield from self._chat_conflicts()

    def _equal_group_conflicts(self) -> Iterator[str]:
        if self.algorithm.equal_groups != "count":
            return
        others = {
            "algorithm.entropy_bonus": self.algorithm.entropy_bonus,
            "model.router_balance": self.model.router_balance,
        }
        for name, weight in others.items():
            if weight:
                yield (
                    f"algorithm.equal_groups='count' with {name}={weight}: that gives tokens a gradient whatever their "
                    "advantage, and those of equal groups would go without. Set equal_groups='train', which computes "
                    "them, or 'skip', which leaves them out of the mean too."
                )

    def _chat_conflicts(self) -> Iterator[str]:
        if self.tokenizer.kind == "checkpoint" and not self.model.checkpoint:
            yield (
                "tokenizer.kind='checkpoint' with no model.checkpoint: there is no checkpoint to take it from. "
                "Set model.checkpoint, or tokenizer.kind='character'."
            )
        if self.chat.template == "model" and self.tokenizer.kind != "checkpoint":
            yield (
                f"chat.template='model' with tokenizer.kind={self.tokenizer.kind!r}: a model's template writes special "
                "tokens that only its own tokenizer knows. Set tokenizer.kind='checkpoint'."
            )
        if self.chat.template == "none":
            unused = [name for name in ("system", "prefill", "options") if getattr(self.chat, name)]
            if unused:
                yield (
                    f"chat.{unused[0]} with chat.template='none': texts are encoded as they are, and it would be "
                    "ignored. Choose a chat.template."
                )

    @property
    def prompts_per_element(self) -> int:
        return self.rollout.prompts_per_step // self.rollout.elements_per_step

    @property
    def positions(self) -> int:
        """Positions of the whole run: position i is element i % elements_per_step of step i // elements_per_step."""
        return self.trainer.steps * self.rollout.elements_per_step

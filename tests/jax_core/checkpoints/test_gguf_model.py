"""GGUF models are the Hugging Face models that they were converted from."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType

from jax_core.checkpoints.checkpoint import open_checkpoint
from jax_core.checkpoints.generation import GenerationDefaults
from jax_core.checkpoints.gguf_model import llama3_divisors, unpermuted
from jax_core.checkpoints.tensor_source import read_tensor
from schemas.errors import DamagedDataError, UserError
from tests.jax_core.checkpoints import gguf_models, models


def llama(tmp_path, **arguments):
    tensors = models.tensors()
    return tensors, open_checkpoint(gguf_models.write_gguf(tmp_path / "x.gguf", tensors, **arguments))


def test_a_llama_has_hugging_faces_names_and_its_own_numbers(tmp_path):
    tensors, checkpoint = llama(tmp_path)
    assert checkpoint.tensors.infos.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read_tensor(checkpoint.tensors, name), tensor)


def test_rows_of_q_and_k_are_put_back_whatever_block_of_them_is_read(tmp_path):
    tensors, checkpoint = llama(tmp_path)
    name = "model.layers.1.self_attn.q_proj.weight"
    for start, stop in [(0, 64), (0, 1), (7, 8), (15, 17), (16, 32), (5, 60)]:
        np.testing.assert_array_equal(checkpoint.tensors.rows(name, start, stop), tensors[name][start:stop])


def test_of_a_head_of_six_rows_llama_cpp_stores_first_and_fourth_side_by_side():
    stored = np.array([0, 3, 1, 4, 2, 5, 10, 13, 11, 14, 12, 15])
    assert unpermuted(stored, 2).tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]


def test_rows_of_other_architectures_are_left_where_they_are(tmp_path):
    tensors, checkpoint = llama(tmp_path, architecture="qwen2")
    name = "model.layers.0.self_attn.k_proj.weight"
    np.testing.assert_array_equal(read_tensor(checkpoint.tensors, name), tensors[name])


def test_the_configuration_is_the_one_that_the_model_was_converted_from(tmp_path):
    _, checkpoint = llama(tmp_path)
    assert {key: checkpoint.config_json[key] for key in models.CONFIG} == models.CONFIG


def test_without_a_head_of_its_own_the_head_is_tied(tmp_path):
    tensors = {name: tensor for name, tensor in models.tensors().items() if name != "lm_head.weight"}
    checkpoint = open_checkpoint(gguf_models.write_gguf(tmp_path / "x.gguf", tensors))
    assert checkpoint.config_json["tie_word_embeddings"] is True


def test_ends_of_text_and_of_turn_both_stop(tmp_path):
    _, checkpoint = llama(tmp_path)
    assert checkpoint.generation == GenerationDefaults(stop_ids=(2, 7))


def test_an_architecture_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match=r"architecture 'novelty'.*llama, qwen2"):
        llama(tmp_path, architecture="novelty")


def test_a_file_without_an_entry_that_all_have_is_named_with_the_entry(tmp_path):
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    with pytest.raises(DamagedDataError, match=r"x\.gguf: has llama\.\S+ None where a number is needed"):
        open_checkpoint(gguf_models.close(writer, tmp_path / "x.gguf"))


def test_llama_3s_scaling_is_found_again_in_the_table_that_gguf_keeps_of_it(tmp_path):
    table = llama3_divisors(10_000.0, 16, 32.0, 8192).astype(np.float32)
    _, checkpoint = llama(tmp_path, extra={"rope_freqs.weight": table})
    assert checkpoint.config_json["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in checkpoint.tensors.infos


def test_llama_3_leaves_fast_waves_and_divides_slow_ones_by_its_factor():
    """Llama 3.1: theta 500000, heads of 128, factor 8. Waves of up to 2048 positions stay, over 8192 they slow."""
    divisors = llama3_divisors(500_000.0, 128, 8.0, 8192)
    waves = 2 * np.pi * 500_000.0 ** (np.arange(0, 128, 2) / 128)
    assert (divisors[waves < 2048] == 1).all() and np.allclose(divisors[waves > 8192], 8)
    between = divisors[(waves > 2048) & (waves < 8192)]
    assert len(between) and ((between > 1) & (between < 8)).all()


def test_a_table_of_frequencies_that_is_not_llama_3s_is_refused(tmp_path):
    with pytest.raises(UserError, match="otherwise than Llama 3"):
        llama(tmp_path, extra={"rope_freqs.weight": np.linspace(1, 5, 8).astype(np.float32)})


def test_yarn_is_read_from_the_metadata(tmp_path):
    writer = gguf_models.writer_of(tmp_path / "x.gguf", models.CONFIG, "qwen2")
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(64)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    checkpoint = open_checkpoint(gguf_models.close(writer, tmp_path / "x.gguf"))
    assert checkpoint.config_json["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0], ids=lambda kind: kind.name)
def test_the_experts_of_a_layer_come_one_by_one(tmp_path, kind):
    from gguf.quants import dequantize, quantize

    writer = gguf_models.writer_of(tmp_path / "x.gguf", models.CONFIG, "qwen3moe")
    writer.add_expert_count(3)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(5)
    experts = np.random.default_rng(0).standard_normal((3, 5, 64)).astype(np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((4, 64), np.float32))
    writer.add_tensor("blk.1.ffn_up_exps.weight", quantize(experts, kind), raw_dtype=kind)
    checkpoint = open_checkpoint(gguf_models.close(writer, tmp_path / "x.gguf"))
    assert checkpoint.config_json["num_experts"] == 3 and checkpoint.config_json["num_experts_per_tok"] == 2
    stored = dequantize(quantize(experts, kind), kind)
    for expert in range(3):
        name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight"
        assert checkpoint.tensors.infos[name].shape == (5, 64)
        np.testing.assert_array_equal(read_tensor(checkpoint.tensors, name), stored[expert])
        np.testing.assert_array_equal(checkpoint.tensors.rows(name, 2, 4), stored[expert, 2:4])


def test_gemmas_norms_have_their_one_taken_off_and_other_weights_are_as_they_are(tmp_path):
    writer = gguf_models.writer_of(tmp_path / "x.gguf", models.CONFIG, "gemma3")
    writer.add_sliding_window(512)
    norm = np.array([0.5, -0.25], np.float32)
    writer.add_tensor("token_embd.weight", np.full((4, 2), 3, np.float32))
    writer.add_tensor("output_norm.weight", norm + 1)
    writer.add_tensor("blk.0.post_ffw_norm.weight", norm + 1)
    writer.add_tensor("blk.0.ffn_norm.weight", norm + 1)
    checkpoint = open_checkpoint(gguf_models.close(writer, tmp_path / "x.gguf"))
    layer = "model.layers.0."
    for name in ("model.norm", f"{layer}post_feedforward_layernorm", f"{layer}pre_feedforward_layernorm"):
        np.testing.assert_array_equal(read_tensor(checkpoint.tensors, f"{name}.weight"), norm)
    assert (read_tensor(checkpoint.tensors, "model.embed_tokens.weight") == 3).all()
    assert checkpoint.config_json["sliding_window"] == 512


def test_a_tensor_with_an_unknown_name_keeps_it_and_is_not_lost(tmp_path):
    _, checkpoint = llama(tmp_path, extra={"blk.0.novelty.weight": np.zeros(3, np.float32)})
    assert "blk.0.novelty.weight" in checkpoint.tensors.infos

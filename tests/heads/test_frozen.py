"""Laws of FrozenTarget: read from files alone, it gives the target's own logits, or says what is missing."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_inputs import assert_raises
from exported import edit_tensors
from matrix import slow, slow_unless
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from headstart.heads.frozen import FrozenTarget, SafetensorsFolder
from headstart.heads.quantised import dequantised, requantised
from headstart.heads.target_config import TargetConfig, locate_target
from headstart.heads.target_ends import TargetEnds, auto_class
from headstart.inference.targets.attention import GROUPED
from headstart.inference.targets.model import TargetModel

TOKENS = torch.tensor([[5, 6, 7, 11, 3, 30], [1, 1, 2, 3, 5, 8]])
MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
MakeModel = Callable[..., LlamaForCausalLM]


def test_reading_the_ends_leaves_the_models_attention_as_it_is(make_model: MakeModel) -> None:
    target = TargetModel(make_model(), ())
    before = target.model.config._attn_implementation
    assert target.frozen
    assert target.model.config._attn_implementation == before == GROUPED


SIZES: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.4,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
PER_LAYER = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 31}  # Gemma 4's second norm, of one size
ENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "a soft cap": ("gemma2", {}),
    "a norm with a bias": ("gpt2", {"n_embd": 32}),
    "other names": ("gpt_neox", {"num_key_value_heads": None, "head_dim": None}),
    "a scale that divides": ("granite", {"logits_scaling": 4.0}),
    "a scale of the same name that multiplies": ("hyperclovax", {"logits_scaling": 4.0}),
    "a scale, and a norm that centres without a bias": ("cohere2", {"logit_scale": 0.25}),
    "a scale of hidden states": ("minicpm3", {"dim_model_base": 8, "num_key_value_heads": 4, **LATENT}),
    "a norm without weights": ("olmo", {}),
    "a norm that centres and adds 1": ("nemotron", {"partial_rotary_factor": 0.5}),
    "a norm that adds 1, in a hybrid": ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"]}),
    "an lm_head with a bias": ("phi", {}),
    "a norm before the layers": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "several residual streams that are weighed, and other names in files": (
        "deepseek_v4",
        {"num_local_experts": 4, "q_lora_rank": 8, "o_lora_rank": 8},
    ),
    "several residual streams, each projected": ("gemma3n_text", {"num_kv_shared_layers": 0, **PER_LAYER}),
    "two norms after the layers": ("gemma4_text", PER_LAYER),
}


SLOW = {  # forms of which another member is fast
    *("other names", "a scale that divides", "a scale of the same name that multiplies"),
    *("a scale of hidden states", "a norm that adds 1, in a hybrid", "several residual streams, each projected"),
}


def assert_logits_over_the_norm(model: PreTrainedModel, folder: Path, shard_size: str = "1GB") -> None:
    model.eval().save_pretrained(folder, max_shard_size=shard_size)
    target = TargetModel(model, ())
    output = target.passes.forward(TOKENS)
    frozen = FrozenTarget.from_folder(folder, torch.float32)
    assert torch.equal(frozen.embedding, model.get_input_embeddings().state_dict()["weight"])
    for found in (frozen, target.frozen):
        torch.testing.assert_close(found.logits(output.last_hidden), output.logits, atol=1e-5, rtol=1e-4)
        assert torch.equal(found.choices(output.last_hidden), output.logits.argmax(-1))


def with_random_norms(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases start as constants, which would hide mistakes
                parameter.add_(torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(("tied", "shard_size"), [(False, "1GB"), (True, "20KB")], ids=["one file", "shards"])
def test_the_frozen_tensors_give_the_targets_own_logits(make_model, tmp_path, tied, shard_size):
    model = make_model(num_hidden_layers=2, vocab_size=31, tie_word_embeddings=tied, rms_norm_eps=0.1)
    assert_logits_over_the_norm(with_random_norms(model), tmp_path, shard_size)
    assert (tmp_path / INDEX).is_file() == tied
    frozen = FrozenTarget.from_folder(tmp_path, torch.float32)
    assert (frozen.lm_head is frozen.embedding) == TargetEnds.from_class(model).is_tied == tied


@pytest.mark.parametrize("ends", slow_unless(ENDS.keys() - SLOW, ENDS))
def test_the_form_of_norm_and_logits_is_read_from_the_models_class(ends: str, tmp_path: Path) -> None:
    model_type, more = ENDS[ends]
    config = AutoConfig.for_model(model_type, **{**SIZES, **more})
    assert_logits_over_the_norm(with_random_norms(AutoModelForCausalLM.from_config(config)), tmp_path)


@pytest.mark.parametrize("causal", [slow(True), False], ids=["that causal models include", "that they do not"])
def test_the_ends_of_a_wrapper_are_those_of_its_language_model(tmp_path: Path, causal: bool) -> None:
    """Its image tower has as many layers, and norms and embeddings of the same size."""
    names = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
    vision: dict[str, Any] = {name: SIZES[name] for name in names} | {"image_size": 8, "patch_size": 4}
    if causal:
        config = AutoConfig.for_model("gemma3", text_config=SIZES, vision_config=vision, mm_tokens_per_image=4)
    else:
        text, vision = {**SIZES, "model_type": "llama"}, {**vision, "model_type": "clip_vision_model"}
        config = AutoConfig.for_model("llava", text_config=text, vision_config=vision)
    assert (type(config) in AutoModelForCausalLM._model_mapping) == causal
    assert_logits_over_the_norm(with_random_norms(auto_class(config).from_config(config)), tmp_path)


def test_a_model_without_a_final_norm_is_refused_by_name() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("openai-gpt", **SIZES))
    assert_raises(lambda: TargetEnds.from_class(model), "OpenAIGPTLMHeadModel has no lm_head over a final norm")


def test_a_class_from_outside_transformers_has_the_usual_names(make_model: MakeModel, tmp_path: Path) -> None:
    make_model(num_hidden_layers=1).save_pretrained(tmp_path)
    known = FrozenTarget.from_folder(tmp_path, torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "of_a_stranger"}))
    found = FrozenTarget.from_folder(tmp_path, torch.float32)
    assert torch.equal(found.lm_head, known.lm_head)
    assert torch.equal(found.norm_weight, known.norm_weight)


@pytest.mark.parametrize(
    ("blocks", "dtype", "suffix"),
    [
        ((1, 1), torch.float8_e4m3fn, "_scale"),
        ((31, 1), torch.int8, "_scale"),
        ((4, 4), torch.float8_e4m3fn, "_scale_inv"),
    ],
    ids=["one scale", "a scale per row", "a scale per block"],
)
def test_a_quantised_lm_head_is_dequantised(make_model, tmp_path, blocks, dtype, suffix):
    make_model(vocab_size=31, num_hidden_layers=1).save_pretrained(tmp_path)
    stored, scale = (10 * torch.randn(31, 32)).to(dtype), torch.rand(blocks)
    edit_tensors(tmp_path, lambda found: found.update({"lm_head.weight": stored, f"lm_head.weight{suffix}": scale}))
    wide = torch.nn.functional.interpolate(scale[None, None], size=(32, 32), mode="nearest")[0, 0, :31]
    wanted = stored.float() * (scale if blocks != (4, 4) else wide)
    assert torch.equal(FrozenTarget.from_folder(tmp_path, torch.float32).lm_head, wanted)


def test_a_last_block_that_is_shorter_got_the_scales_of_others() -> None:
    """DeepSeek-V3 has 576 rows in blocks of 128; they were read as five blocks of 116."""
    stored, scale = torch.ones(576, 200).to(torch.float8_e4m3fn), torch.rand(5, 2)
    wanted = scale.repeat_interleave(128, 0)[:576].repeat_interleave(128, 1)[:, :200]
    assert torch.equal(dequantised(stored, [scale], "weight"), wanted)


HALVES = (torch.bfloat16, torch.float16)  # scales that are rounded, so the second time they may differ


@pytest.mark.each_value
@pytest.mark.parametrize("shape", [(), (1,), (72,), (72, 1), (5, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
@pytest.mark.parametrize("form", [torch.float32, *HALVES, torch.float8_e8m0fnu], ids=str)
def test_quantising_again_keeps_the_form_and_most_of_the_value(shape, dtype, form):
    dense, stored, old = torch.randn(72, 40), torch.zeros(72, 40).to(dtype), (1 + torch.rand(shape)).to(form)
    dense[:16, :16] = 0
    weight, scale = requantised(dense, stored, old)
    assert (weight.dtype, scale.dtype, scale.shape) == (dtype, form, old.shape)
    # The format's largest rounding error, relative to the largest entry of a block.
    step = {torch.int8: 1 / 64, torch.float8_e4m3fn: 1 / 14, torch.float8_e5m2: 1 / 7}[dtype]
    torch.testing.assert_close(dequantised(weight, [scale], "weight"), dense, rtol=0, atol=step * float(dense.max()))
    again = requantised(dequantised(weight, [scale], "weight"), weight, scale)
    assert torch.equal(dequantised(again[0], [again[1]], ""), dequantised(weight, [scale], "")) or form in HALVES
    assert form != torch.float8_e8m0fnu or (torch.frexp(scale.float())[0] == 0.5).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
def test_a_row_of_tiny_weights_became_not_a_number(dtype: torch.dtype) -> None:
    dense = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1e-6, 0.0, 0.0, 2e-6]])
    weight, scale = requantised(dense, dense.to(dtype), torch.ones(2, 1).half())
    assert (scale > 0).all()
    found = dequantised(weight, [scale], "weight")
    torch.testing.assert_close(found, dense, rtol=0.15, atol=1e-3)


def test_a_weight_that_did_not_change_keeps_the_scales_of_another_tool(tmp_path: Path) -> None:
    """Its largest entry may be -128, which our own scales do not give."""
    stored, scale = torch.randint(-128, 128, (64, 32)).to(torch.int8), torch.rand(64, 1) + 0.1
    save_file({"w.weight": stored, "w.weight_scale": scale}, tmp_path / "model.safetensors")
    folder = SafetensorsFolder(tmp_path)
    found = folder.as_stored("w.weight", folder.dense("w.weight"))
    assert torch.equal(found["w.weight"], stored)
    assert torch.equal(found["w.weight_scale"], scale)


@pytest.mark.parametrize(
    ("weight", "more"),
    [
        (torch.zeros(97, 16, dtype=torch.uint8), {}),
        (torch.zeros(97, 32, dtype=torch.int8), {"_scale": torch.ones(97, 1), "_zero_point": torch.ones(97, 1).char()}),
        (torch.zeros(97, 32).to(torch.float8_e4m3fn), {"_scale": torch.ones(97, 1, dtype=torch.uint8)}),
    ],
    ids=["packed", "a zero point", "scales in bytes"],
)
def test_an_lm_head_quantised_in_another_way_is_refused_by_name(make_model, tmp_path, weight, more):
    make_model(num_hidden_layers=1).save_pretrained(tmp_path)
    stored = {f"lm_head.weight{suffix}": tensor for suffix, tensor in {"": weight, **more}.items()}
    edit_tensors(tmp_path, lambda found: found.update(stored))
    with pytest.raises(ValueError, match=rf"lm_head\.weight is stored as {weight.dtype}.*one tensor of scales"):
        FrozenTarget.from_folder(tmp_path, torch.float32)


def test_logits_that_are_not_the_lm_heads_are_refused_with_their_difference(frozen: FrozenTarget) -> None:
    last_hidden = torch.randn(3, 32)
    own = frozen.logits(last_hidden)
    frozen.refuse_other_logits(own + 1e-4, last_hidden, 0.01)
    assert_raises(lambda: frozen.refuse_other_logits(4 * own, last_hidden, 0.01), "'llama' model | differ by 75.0%)")
    with pytest.raises(ValueError, match=r"differ by \d+\.\d%\); such models"):
        frozen.refuse_other_logits(torch.randn_like(own), last_hidden, 0.01)
    assert_raises(lambda: frozen.refuse_other_logits(own[:, :90], last_hidden, 0.01), "there are 90 of 97")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("model.norm.weight", "final norm"),
        ("lm_head.weight", "lm_head"),  # config.json says untied, so the embedding does not replace it
    ],
)
def test_a_missing_tensor_is_named(make_model: MakeModel, tmp_path: Path, name: str, what: str) -> None:
    make_model(num_hidden_layers=1).save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.pop(name))
    assert_raises(lambda: FrozenTarget.from_folder(tmp_path, torch.float32), f"no {what} among its tensors | {name}")


@pytest.mark.parametrize("shard_size", ["20KB", "1GB"], ids=["sharded", "single file"])
def test_a_truncated_or_missing_file_is_refused_by_name(make_model: MakeModel, tmp_path: Path, shard_size: str) -> None:
    make_model(num_hidden_layers=1).save_pretrained(tmp_path, max_shard_size=shard_size)
    name = "model.safetensors"
    if (tmp_path / INDEX).is_file():
        name = json.loads((tmp_path / INDEX).read_text())["weight_map"]["lm_head.weight"]
    written = (tmp_path / name).read_bytes()
    for kept_bytes in (0, 4, 1000, -1):
        (tmp_path / name).write_bytes(written[:kept_bytes])
        with pytest.raises(ValueError, match=f"{name} cannot be read .*copy or download the target again"):
            FrozenTarget.from_folder(tmp_path, torch.float32)
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"{name} cannot be read" if name != MODEL else "neither model.safetensors"):
        FrozenTarget.from_folder(tmp_path, torch.float32)


def test_the_config_read_from_files_equals_that_of_the_loaded_model(deep_target, target_folder):
    assert TargetConfig.from_folder(target_folder) == deep_target.config
    assert locate_target(str(target_folder)) == target_folder


def test_default_taps_are_distinct_ascending_and_exist(target: TargetModel) -> None:
    for num_layers in range(1, 81):
        taps = dataclasses.replace(target.config, num_layers=num_layers).default_taps()
        assert list(taps) == sorted(set(taps))
        assert len(taps) == min(3, num_layers + 1)
        assert 0 <= taps[0] < taps[-1] <= num_layers
        if num_layers >= 7:
            assert taps == (2, num_layers // 2, num_layers - 3)  # every engine's default

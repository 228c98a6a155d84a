"""Laws of the target: which states it taps, what its baseline generates, and which models it refuses."""

import gc
import json
import sys
import weakref
from pathlib import Path

import pytest
import torch
from shared_fixtures import ModelFactory
from tiny_run import build_tokenizer
from transformers import (
    GenerationConfig,
    dynamic_module_utils,
)

from headstart.inference.core.sampling import Sampling
from headstart.inference.kernels import fast_model, has_kernels
from headstart.inference.targets import loading
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.loading import fast_dtype, slow_format
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import TargetSection

TOKENS = torch.tensor([[5, 6, 7, 11, 3, 80], [1, 1, 2, 3, 5, 8]])
NUM_LAYERS = 7


@pytest.mark.parametrize("taps", [(0, 1, 6, 7)], ids=str)
def test_taps_are_the_hidden_states_of_transformers(make_model: ModelFactory, taps: tuple[int, ...]) -> None:
    """Except for the last index: transformers returns that state after the final norm, we return it before the norm."""
    model = make_model()
    hidden_states = model(TOKENS, output_hidden_states=True).hidden_states
    output = TargetModel(model, taps).passes.forward(TOKENS)
    assert output.taps.shape == (2, 6, 32 * len(taps))
    for tap, states in zip(taps, output.taps.split(32, dim=-1), strict=True):
        found = states if tap < NUM_LAYERS else model.model.norm(states)
        torch.testing.assert_close(found, hidden_states[tap], rtol=1e-4, atol=1e-3)
    found = model.model.norm(output.last_hidden)
    torch.testing.assert_close(found, hidden_states[NUM_LAYERS], rtol=1e-4, atol=1e-3)


def test_the_last_logits_are_one_matrix_product_as_all_logits_are(target: TargetModel) -> None:
    """A slice of the hidden states became a batched product, before which a CPU copies a lm_head in bfloat16: 55 ms
    for each prompt of a small chat model."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiled:
        target.passes.forward(TOKENS[:1], last_only=True)
    vocab = target.model.get_input_embeddings().weight.shape[0]
    events = profiled.events()
    assert events is not None
    products = [
        event.name for event in events if event.name in ("aten::mm", "aten::bmm") and vocab in event.input_shapes[1]
    ]
    assert products == ["aten::mm"]


def test_an_unused_target_is_freed_at_once(make_model: ModelFactory) -> None:
    target = TargetModel(make_model(), (2, 7))
    target.passes.forward(TOKENS)
    left = weakref.ref(target), weakref.ref(target.model)
    gc.disable()
    try:
        del target
        assert [each() for each in left] == [None, None]
    finally:
        gc.enable()


def test_the_baseline_generates_the_same_in_a_batch_and_alone(target: TargetModel) -> None:
    prompts = [[5, 6, 7], [1], [9, 8, 7, 6, 5, 4]]
    assert target.generate(prompts, 10) == [target.generate([prompt], 10)[0] for prompt in prompts]


def test_a_sampled_baseline_depends_only_on_its_seed(target: TargetModel) -> None:
    first = target.generate([[5, 6, 7]], 12, Sampling(1.0, seed=3))
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert target.generate([[5, 6, 7]], 12, Sampling(1.0, seed=3)) == first
    assert target.generate([[5, 6, 7]], 12, Sampling(1.0, seed=4)) != first
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_baseline_ignores_the_sampling_fields_of_the_checkpoint(
    make_model: ModelFactory, temperature: float
) -> None:
    """Published models set top_p 0.9 or repetition_penalty 1.05, which transformers' `generate` uses by default."""
    wanted = TargetModel(make_model(), ()).generate([[5, 6, 7]], 20, Sampling(temperature))
    model = make_model()
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.3, repetition_penalty=1.5)
    assert TargetModel(model, ()).generate([[5, 6, 7]], 20, Sampling(temperature)) == wanted


def test_end_tokens_come_from_the_generation_config_or_the_model_config(make_model: ModelFactory) -> None:
    assert TargetModel(make_model(), ()).end_tokens == []
    assert TargetModel(make_model(eos_token_id=7), ()).end_tokens == [7]
    model = make_model(eos_token_id=7)
    model.generation_config.eos_token_id = [8, 9]
    assert TargetModel(model, ()).end_tokens == [8, 9]


def test_a_model_that_is_wrapped_again_keeps_its_own_settings(make_model: ModelFactory) -> None:
    model = make_model(eos_token_id=7)
    model.generation_config = GenerationConfig(eos_token_id=[8, 9], top_k=3)
    first = TargetModel(model, ())
    first.generate([[5, 6, 7]], 2)
    again = TargetModel(first.model, ())
    assert again.end_tokens == [8, 9]
    assert again.generation_config.top_k == 3


@pytest.mark.parametrize(
    ("after_words", "known", "ends"),
    [
        ("<mark>[user]", [], ["<end>", "<mark>"]),
        ("\n<close><mark>\n<other>", [], ["<end>", "<mark>"]),  # the last of those right after the words
        ("<mark><end>", [], ["<end>"]),
        ("<mark><other>", ["<mark>"], ["<end>"]),  # the target's own
        ("[user]<mark>", [], ["<end>"]),
    ],
)
def test_the_mark_that_the_chat_template_writes_after_an_answer_ends_it(
    after_words: str, known: list[str], ends: list[str]
) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<mark>", "<close>", "<other>"]})
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}AFTER{% endfor %}".replace(
        "AFTER", after_words
    )
    found = ChatTemplate(tokenizer).end_tokens(tokenizer.convert_tokens_to_ids(known))
    assert tokenizer.convert_ids_to_tokens(found) == ends


def test_pickled_weights_are_not_loaded(make_model: ModelFactory, tmp_path: Path) -> None:
    model = make_model()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors"):
        TargetModel.load(TargetSection(path=str(tmp_path), dtype="float32", device="cpu"), ())


@pytest.mark.parametrize("trusted", [False, True])
def test_code_of_a_target_runs_only_if_the_recipe_trusts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))  # not the user's own
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder, ran = tmp_path / "target", tmp_path / "ran"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}))
    (folder / "own.py").write_text(
        f"""from pathlib import Path
from transformers import LlamaConfig
Path({str(ran)!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
"""
    )
    section = TargetSection(path=str(folder), dtype="float32", trust_remote_code=trusted)
    with pytest.raises(ValueError, match="Unrecognized configuration class" if trusted else "trust_remote_code"):
        TargetModel.load(section, ())  # trusted or not, the configuration has no model class
    assert ran.exists() == trusted


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({"amx_bf16": True}, "bfloat16"),
        ({"neon": True, "bf16": True}, "bfloat16"),
        ({"avx512_f": True, "avx512_bf16": False}, "float32"),
    ],
)
def test_a_cpu_computes_in_bfloat16_only_if_it_has_instructions_for_it(
    capabilities: dict[str, bool], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(loading, "float32_is_as_fast", lambda eight_bits: False)
    assert fast_dtype(torch.device("cpu")) == dtype
    assert fast_dtype(torch.device("meta")) == "float32"
    assert not has_kernels() or slow_format("target.dtype", "bfloat16", torch.device("cpu")) is None
    monkeypatch.setattr(loading, "has_kernels", lambda: False)
    hint = slow_format("target.dtype", "bfloat16", torch.device("cpu"))
    assert (hint is None) == (dtype == "bfloat16")
    assert hint is None or "target.dtype=float32" in hint
    assert slow_format("target.dtype", "float32", torch.device("cpu")) is None


@pytest.mark.parametrize(("half", "dtype"), [(0.9, "float32"), (1.0, "float32"), (1.2, "bfloat16")])
def test_a_cpu_decodes_in_the_format_whose_products_are_faster(
    half: float, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`half` are the seconds of float32 with weights kept in half precision, over those of bfloat16."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setattr(fast_model, "library", lambda: True)
    seconds = {torch.float32: half, torch.bfloat16: 1.0}
    monkeypatch.setattr(
        fast_model, "seconds_of_products", lambda dtype, eight_bits=False: seconds[dtype] - 0.5 * eight_bits
    )
    fast_model.float32_is_as_fast.cache_clear()
    assert fast_dtype(torch.device("cpu")) == dtype
    assert fast_dtype(torch.device("cpu"), eight_bits=True) == "float32"
    fast_model.float32_is_as_fast.cache_clear()
    assert slow_format("target.dtype", "bfloat16", torch.device("cpu")) is None

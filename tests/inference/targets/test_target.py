"""Laws of the target: which states it taps, what its baseline generates, which models it refuses; and of its attention:
transformers' own sdpa, without a copy of the keys for each query head."""

import gc
import json
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, SOME_FAMILIES
from matrix import slow_unless
from shared_fixtures import ModelFactory
from tiny_run import build_tokenizer
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from transformers import AttentionInterface, GenerationConfig, dynamic_module_utils

from headstart.inference.core.sampling import Sampling
from headstart.inference.core.tree import Tree
from headstart.inference.kernels import fast_model, has_kernels
from headstart.inference.kernels.attention import ordered_attention
from headstart.inference.kernels.products import library
from headstart.inference.targets import loading
from headstart.inference.targets.attention import GROUPED, SDPA, grouped_attention, own_attention_of
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.loading import fast_dtype, slow_format
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import TargetSection

TOKENS = torch.tensor([[5, 6, 7, 11, 3, 80], [1, 1, 2, 3, 5, 8]])
NUM_LAYERS = 3


def test_taps_are_the_hidden_states_of_transformers(make_model: ModelFactory) -> None:
    """Except for the last index: transformers returns that state after the final norm, we return it before the norm."""
    model, taps = make_model(num_hidden_layers=NUM_LAYERS), (0, 1, 3)
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
    events: Any = profiled.events()
    products = [event for event in events if event.name in ("aten::mm", "aten::bmm")]
    assert [event.name for event in products if vocab in event.input_shapes[1]] == ["aten::mm"]


def test_an_unused_target_is_freed_at_once(make_model: ModelFactory) -> None:
    target = TargetModel(make_model(), (0, 2))
    target.passes.forward(TOKENS)
    left = weakref.ref(target), weakref.ref(target.model)
    gc.disable()
    try:
        del target
        assert [each() for each in left] == [None, None]
    finally:
        gc.enable()


def test_the_baseline_generates_the_same_in_a_batch_and_alone_and_sampled_depends_only_on_its_seed(target) -> None:
    prompts = [[5, 6, 7], [1], [9, 8, 7, 6, 5, 4]]
    assert target.generate(prompts, 10) == [target.generate([prompt], 10)[0] for prompt in prompts]
    first = target.generate([[5, 6, 7]], 12, Sampling(1.0, seed=3))
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert target.generate([[5, 6, 7]], 12, Sampling(1.0, seed=3)) == first
    assert target.generate([[5, 6, 7]], 12, Sampling(1.0, seed=4)) != first
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_baseline_ignores_the_sampling_fields_of_the_checkpoint(make_model, temperature) -> None:
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

    model.generation_config = GenerationConfig(eos_token_id=[8, 9], top_k=3)
    first = TargetModel(model, ())
    first.generate([[5, 6, 7]], 2)
    again = TargetModel(first.model, ())  # a model that is wrapped again keeps its own settings
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
def test_the_mark_that_the_chat_template_writes_after_an_answer_ends_it(after_words, known, ends) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<mark>", "<close>", "<other>"]})
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}AFTER{% endfor %}"
    tokenizer.chat_template = template.replace("AFTER", after_words)
    found = ChatTemplate(tokenizer).end_tokens(tokenizer.convert_tokens_to_ids(known))
    assert tokenizer.convert_ids_to_tokens(found) == ends


def test_pickled_weights_are_not_loaded(make_model: ModelFactory, tmp_path: Path) -> None:
    model = make_model()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors"):
        TargetModel.load(TargetSection(path=str(tmp_path), dtype="float32", device="cpu"), ())


@pytest.mark.parametrize("trusted", [False, True])
def test_code_of_a_target_runs_only_if_the_recipe_trusts_it(tmp_path, monkeypatch, trusted) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))  # not the user's own
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder, ran = tmp_path / "target", tmp_path / "ran"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}))
    (folder / "own.py").write_text(
        f"from pathlib import Path\nPath({str(ran)!r}).touch()\nraise ValueError('it ran')\n"
    )
    section = TargetSection(path=str(folder), dtype="float32", trust_remote_code=trusted)
    with pytest.raises(ValueError, match="it ran" if trusted else "trust_remote_code"):
        TargetModel.load(section, ())
    assert ran.exists() == trusted


FAST, SLOW = ({"amx_bf16": True}, {"neon": True, "bf16": True}), {"avx512_f": True, "avx512_bf16": False}


@pytest.mark.parametrize(("capabilities", "dtype"), [*((each, "bfloat16") for each in FAST), (SLOW, "float32")])
def test_a_cpu_computes_in_bfloat16_only_if_it_has_instructions_for_it(capabilities, dtype, monkeypatch) -> None:
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
def test_a_cpu_decodes_in_the_format_whose_products_are_faster(half, dtype, monkeypatch) -> None:
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


needs_kernel = pytest.mark.skipif(library() is None, reason="no C++ compiler")
LOWEST = torch.finfo(torch.float32).min


class Layer(nn.Module):
    num_key_value_groups, is_causal = 3, True


def states(batch: int, seq: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seq)
    sizes = ((9, seq), (3, keys), (3, keys))
    query, key, value = (torch.randn(batch, *size, 16, generator=generator) for size in sizes)
    return query, key, value


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("seq", [1, 7])
def test_grouped_attention_is_that_of_transformers(batch: int, seq: int) -> None:
    query, key, value = states(batch, seq, 40)
    mask = torch.where(torch.rand(batch, 1, seq, 40) < 0.3, LOWEST, 0.0)
    mask[..., 0] = 0
    for given in (mask, mask[:1], mask.bool().logical_not(), None):
        wanted, _ = AttentionInterface()[SDPA](Layer(), query, key, value, given, scaling=0.2)
        found, _ = grouped_attention(Layer(), query, key, value, given, scaling=0.2)
        assert_close(found, wanted)
        assert found.shape == (batch, seq, 9, 16)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "value_size"), [(16, 16), (20, 12), (64, 64)])
@torch.inference_mode()
def test_a_token_attends_with_the_same_bits_whatever_else_the_pass_reads(dtype, size, value_size) -> None:
    """Alone or with others, next to other rows, with hidden slots in between and after, for masks of both kinds."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 6, 90, size), (2, 3, 90, size), (2, 3, 90, value_size))
    query, key, value = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    causal = torch.ones(90, 90, dtype=torch.bool).tril().expand(1, 1, -1, -1)
    found = ordered_attention(query, key, value, None, None)
    wanted = scaled_dot_product_attention(query.double(), key.double(), value.double(), causal, enable_gqa=True)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert_close(found.double(), wanted.transpose(1, 2), rtol=tolerance, atol=tolerance)
    added = torch.zeros(1, 1, 90, 90, dtype=dtype).masked_fill(~causal, torch.finfo(dtype).min)
    assert torch.equal(ordered_attention(query, key, value, causal, None), found)
    assert torch.equal(ordered_attention(query, key, value, added, None), found)
    spread = torch.arange(90) * 2 + (torch.arange(90) % 3 == 0)  # slots with hidden ones in between
    keys, values = key.new_ones(2, 3, 200, size), value.new_ones(2, 3, 200, value_size)
    keys[:, :, spread], values[:, :, spread] = key, value
    mask = torch.full((1, 1, 90, 200), torch.finfo(dtype).min, dtype=dtype)
    mask[..., spread] = added
    for token in (0, 1, 17, 89):
        one, row = query[1:, :, token : token + 1], mask[:, :, token : token + 1]
        assert torch.equal(ordered_attention(one, keys[1:], values[1:], row, None), found[1:, token : token + 1])


@needs_kernel
@torch.inference_mode()
def test_scores_are_capped_and_sinks_take_their_share() -> None:
    query, key, value = states(2, 5, 40)
    mask, sinks = torch.zeros(2, 1, 5, 40), torch.linspace(-1, 2, 9)
    scores = query @ key.repeat_interleave(3, 1).mT * 0.7
    scores = torch.cat([5 * torch.tanh(scores / 5), sinks.view(1, 9, 1, 1).expand(2, -1, 5, -1)], dim=-1)
    wanted = scores.softmax(-1)[..., :-1] @ value.repeat_interleave(3, 1)
    assert_close(ordered_attention(query, key, value, mask, 0.7, cap=5.0, sinks=sinks), wanted.transpose(1, 2))


@pytest.mark.parametrize("name", slow_unless(SOME_FAMILIES, FAMILIES))
def test_a_tree_gets_the_logits_of_transformers_own_attention(name: str) -> None:
    tree = Tree(torch.tensor([[7, 3, 9, 4, 8]]), torch.tensor([[-1, 0, 0, 1, 3]]))
    found = []
    for attention in (nullcontext, own_attention_of):
        target = TargetModel(FAMILIES[name](), ())
        with attention(target.model):
            cache = target.passes.new_cache(32)
            cache.set_lengths([0])
            target.passes.forward(torch.tensor([[5, 6, 7, 11, 2]]), cache=cache)
            cache.set_lengths([5])
            found.append(target.passes.tree(tree, cache).logits)
    assert_close(*found, rtol=1e-4, atol=1e-4)


def test_the_own_attention_of_a_model_with_the_configuration_of_a_running_target_was_not_known(target) -> None:
    copy = TargetModel(type(target.model)(target.model.config), ())
    with own_attention_of(copy.model):
        assert copy.model.config._attn_implementation == SDPA
    assert copy.model.config._attn_implementation == GROUPED


def test_the_baseline_runs_on_transformers_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` is what users compare with, so it must not run on our code."""
    target = TargetModel(FAMILIES["llama"](), ())
    assert target.model.config._attn_implementation == GROUPED
    seen = []
    target.model.register_forward_pre_hook(lambda model, args: seen.append(model.config._attn_implementation))
    target.generate([[5, 6, 7]], 3)
    assert seen == [SDPA] * 3
    assert target.model.config._attn_implementation == GROUPED

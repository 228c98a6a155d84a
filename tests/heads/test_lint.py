"""Laws of heads.formats.lint: it finds each mistake that engines silently ignore, for the engines it concerns."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from exported import EVERY_HEAD, LIMITED, edit_config, files_in_memory
from test_block_files import drop
from torch import Tensor

from headstart.heads.files import HeadFiles
from headstart.heads.formats.convert import convert
from headstart.heads.formats.kinds.eagle import EAGLE3
from headstart.heads.formats.lint import engines_of, lint, violations
from headstart.heads.formats.subject import Violation
from headstart.heads.frozen import FrozenTarget
from headstart.heads.target_config import TargetOrigin

MakeHead = Callable[..., Any]
Config = dict[str, Any]
Tensors = dict[str, Tensor]
IDS = "eagle_aux_hidden_state_layer_ids"
HEADS: dict[str, tuple[str, dict[str, Any]]] = {  # format and arguments of make_head
    "eagle3": ("vllm", {"vocab": LIMITED, "taps": (1, 3, 6)}),
    "full vocabulary": ("vllm", {}),
    "eagle1": ("vllm", {"kind": "eagle1"}),
    "medusa": ("vllm", {"kind": "medusa"}),
    "speculators": ("speculators", {"vocab": LIMITED}),
    "dspark": ("vllm", EVERY_HEAD["dspark limited"]),
    "dspark of speculators": ("speculators", EVERY_HEAD["dspark"]),
}


def lint_in_memory(files: HeadFiles, frozen: FrozenTarget) -> list[Violation]:
    return violations(files, frozen, engines_of(files))


@dataclass(frozen=True)
class Mistake:
    """A mistake planted in a head's files, and what lint must report."""

    head: str  # one of HEADS
    where: str
    engines: str
    config: Callable[[Config], object] = lambda config: None
    tensors: Callable[[Tensors], object] = lambda tensors: None
    text: str = ""

    def __str__(self) -> str:
        return f"{self.head} {self.where} {self.text}".strip()


def put(**keys: Any) -> Callable[[Config], None]:
    return lambda config: config.update(keys)


def without(*keys: str) -> Callable[[dict[str, Any]], object]:
    return lambda section: [section.pop(key) for key in keys]


def tensor(name: str, value: Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: value})


def of_method(**keys: Any) -> Callable[[Config], object]:
    return lambda config: config["speculators_config"]["proposal_methods"][0].update(keys)


def shift_ids(config: Config) -> None:
    """Both lists of ids off by one: they agree, and both are wrong."""
    config[IDS] = [tap - 1 for tap in config[IDS]]
    config["eagle_config"] = {IDS: [layer - 1 for layer in config["eagle_config"][IDS]]}


def absolute_alone(tensors: Tensors) -> None:
    tensors["d2t"] = torch.tensor([2, 5, 11, 12, 20, 40])  # offsets that would fit as well: 2 6 13 15 24 45
    del tensors["t2d"]


def prefixed(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = tensors.pop("norm.weight")


SERVING = "vllm sglang tensorrt_llm"
eagle3 = partial(Mistake, "eagle3")
eagle1 = partial(Mistake, "eagle1")
medusa = partial(Mistake, "medusa", engines="vllm")
speculators = partial(Mistake, "speculators", engines="vllm speculators")
dspark = partial(Mistake, "dspark", engines="vllm sglang")
dspark_of_speculators = partial(Mistake, "dspark of speculators", engines="vllm speculators")
OTHER_ROPE = {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
BY_ROWS = {"rope_type": "mrope", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
EMBEDDING = tensor("embed_tokens.weight", torch.ones(97, 32))
FIRST_NORM = "layers.0.input_layernorm.weight"
MISTAKES = [
    # Mistakes that engines silently ignore
    eagle3("tensor fc.weight", SERVING, tensors=without("fc.weight"), text="missing"),
    eagle3("tensor d2t", SERVING, tensors=tensor("d2t", LIMITED.ids), text="offsets"),
    eagle3("tensor d2t", SERVING, tensors=absolute_alone, text="rise at every step"),
    eagle3(IDS, "vllm sglang", config=shift_ids, text="captures hidden_states [0, 2, 5]"),
    eagle3("tensor midlayer.hidden_norm.weight", SERVING, tensors=without("midlayer.hidden_norm.weight")),
    eagle3("max_position_embeddings", SERVING, config=put(max_position_embeddings=32)),
    # Mistakes at which engines stop
    eagle3("tensor model.norm.weight", SERVING, tensors=prefixed, text="norm.weight is allowed"),
    eagle3("vocab_size", SERVING, config=put(vocab_size=6), text="the target's 97"),
    eagle3("draft_vocab_size", SERVING, config=without("draft_vocab_size")),
    Mistake("full vocabulary", "tensor d2t", "vllm", tensors=tensor("d2t", torch.zeros(97, dtype=torch.long))),
    # The other rules
    eagle3("architectures", "sglang", config=put(architectures=["LlamaForCausalLM"])),
    eagle3("model_type", SERVING, config=put(model_type="qwen3")),
    eagle3("bias", SERVING, config=put(bias=True), text="uninitialised"),
    eagle3("norm_before_residual", "sglang tensorrt_llm", config=put(norm_before_residual=True)),
    eagle3("headstart.target_num_layers", SERVING, config=lambda c: c["headstart"].update(target_num_layers=32)),
    eagle3("headstart.kind", SERVING, config=lambda c: c["headstart"].update(kind="eagle1")),
    eagle3("hidden_size", SERVING, config=without("hidden_size")),
    eagle3("rope_theta", SERVING, config=put(**OTHER_ROPE), text="the target's"),
    eagle3(IDS, "vllm", config=without(IDS), text="captures hidden_states [0, 2, 5]"),
    eagle3(f"eagle_config.{IDS}", "sglang", config=without("eagle_config"), text="hidden_states [2, 3, 4]"),
    eagle3(IDS, "vllm sglang", config=without(IDS, "eagle_config"), text="captures hidden_states [2, 3, 4]"),
    eagle3("tensor fc.weight", "vllm sglang", config=put(num_aux_hidden_states=5)),
    eagle3("tensor norm.weight", SERVING, tensors=tensor("norm.weight", torch.full((32,), torch.nan)), text="finite"),
    eagle3("tensor norm.weight", SERVING, tensors=tensor("norm.weight", torch.ones(31)), text="[31]"),
    eagle3("tensor lm_head.weight", SERVING, tensors=lambda t: t["lm_head.weight"].zero_(), text="trained weights"),
    eagle3("tensor embed_tokens.weight", "sglang tensorrt_llm", tensors=EMBEDDING),
    eagle1(FIRST_NORM, "vllm sglang", tensors=tensor(FIRST_NORM, torch.ones(32))),
    eagle1("tensor fc.bias", "vllm", tensors=tensor("fc.bias", torch.ones(32)), text="silently"),
    eagle1("tensor fc.bias", "sglang", tensors=without("fc.bias"), text="uninitialised"),
    eagle1("architectures", "sglang", config=put(architectures=["EagleLlamaForCausalLM"])),
    eagle1("tensor embed_tokens.weight", "vllm sglang", tensors=EMBEDDING),
    medusa("num_heads", config=put(num_heads=4), text="3 is allowed: the file has tensors for 3 heads"),
    medusa("medusa_num_heads", config=without("num_heads", "medusa_num_heads"), text="missing"),
    medusa("medusa_num_layers", config=put(medusa_num_layers=2)),
    medusa("hidden_size", config=without("hidden_size"), text="the target's 32"),
    medusa("original_lm_head", config=put(original_lm_head=True)),
    medusa("medusa_fc_bias", config=without("medusa_fc_bias"), text="silently"),
    medusa("tensor token_map", tensors=tensor("token_map", LIMITED.ids)),
    medusa("tensor blocks.2.layers.0.bias", tensors=without("blocks.2.layers.0.bias"), text="missing"),
    medusa("tensor lm_heads.0.weight", tensors=tensor("lm_heads.0.weight", torch.ones(6, 32))),
    medusa("blocks.0.layers.0.bias", tensors=lambda t: t["blocks.0.layers.0.bias"].fill_(torch.inf)),
    speculators("norm_before_residual", config=without("norm_before_residual")),
    speculators("verifier.name_or_path", config=lambda c: c["speculators_config"].update(verifier={})),
    speculators("speculative_tokens", config=lambda c: c["speculators_config"].update(proposal_methods=[])),
    speculators("tensor embed_tokens.weight", engines="speculators", tensors=without("embed_tokens.weight")),
    speculators("tensor t2d", engines="speculators", tensors=without("t2d")),
    speculators(IDS, config=put(**{IDS: [1, 2, 3]})),
    # Block heads
    dspark("sample_from_anchor", config=drop("sample_from_anchor"), text="missing"),
    dspark("block_size", config=drop("block_size"), text="without the key SGLang takes 16"),
    dspark("mask_token_id", config=drop("mask_token_id"), text="without the key SGLang takes the token"),
    dspark("mask_token_id", config=put(mask_token_id=50), text="a token outside the draft vocabulary"),
    dspark("block_size", config=put(block_size=5), text="5 found; 2 to the 4 slots that the head was trained with"),
    dspark("target_layer_ids", config=put(target_layer_ids=[2, 3, 4]), text="target_layer_ids: ["),
    dspark("target_layer_ids", config=drop("target_layer_ids"), text="without the key vLLM takes"),
    dspark("layer_types", config=lambda c: c["layer_types"].append("full_attention"), text="3 given, 2 is allowed"),
    dspark("tensor mask_hidden", tensors=tensor("mask_hidden", torch.zeros(1, 1, 96)), text="filled with the embed"),
    dspark("tensor lm_head.weight", tensors=without("lm_head.weight"), text="needs both d2t and lm_head.weight"),
    dspark_of_speculators("aux_hidden_state_layer_ids", config=put(aux_hidden_state_layer_ids=[1, 2, 3])),
    dspark_of_speculators("speculative_tokens", config=of_method(speculative_tokens=3), text="collapses acceptance"),
]


@pytest.mark.parametrize("name", HEADS)
def test_nothing_is_found_in_a_head_without_a_mistake(make_head: MakeHead, frozen: FrozenTarget, name: str) -> None:
    layout, arguments = HEADS[name]
    assert lint_in_memory(files_in_memory(make_head(**arguments), layout), frozen) == []


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_each_planted_mistake_is_found_for_the_engines_it_concerns(make_head, frozen, mistake):
    name, arguments = HEADS[mistake.head]
    files = files_in_memory(make_head(**arguments), name)
    mistake.config(files.config)
    mistake.tensors(files.tensors)
    errors = [each for each in lint_in_memory(files, frozen) if each.severity == "error"]
    hits = {each.engine for each in errors if each.where.endswith(mistake.where) and mistake.text in str(each)}
    assert hits == {each.engine for each in errors} == {*mistake.engines.split()}, [*map(str, errors)]


@pytest.mark.parametrize("is_ours", [True, False])
def test_positions_by_rows_and_columns_give_a_warning_where_they_are_counted_by_index(make_head, frozen, is_ours):
    files = files_in_memory(make_head(vocab=LIMITED, taps=(2, 3, 4)), "vllm")
    engines = engines_of(files)
    files.config.update(rope_parameters=BY_ROWS, rope_scaling=BY_ROWS)
    if not is_ours:
        del files.config["headstart"]
    found = violations(files, frozen, engines)
    warned = [each for each in found if each.where == "config.json mrope_section"]
    assert [each.engine for each in warned] == [*engines] if is_ours else ["vllm"]
    assert all(each.severity == "warning" and "one position a token, its index" in each.allowed for each in warned)
    assert "config.json rope_theta" not in {each.where for each in found}


@pytest.mark.parametrize("name", ["vllm", "speculators"])
def test_mistakes_that_engines_ignore_are_found_in_published_heads(make_head, frozen, name):
    """The files of such a head do not say which taps it was trained on, so wrong ones give a warning only."""
    ids = {IDS: [1, 2, 3], "eagle_config": {IDS: [0, 1, 2]}}
    mistakes: list[Callable[[Config, Tensors], object]] = [
        lambda config, tensors: tensors.pop("fc.weight"),
        lambda config, tensors: tensors.pop("d2t"),
        lambda config, tensors: tensors.pop("lm_head.weight"),
        lambda config, tensors: tensors.update(d2t=LIMITED.ids),
        lambda config, tensors: config.update(ids),
        lambda config, tensors: [tensors.pop(name) for name in [*tensors] if "hidden_norm" in name],
        lambda config, _: config.get("transformer_layer_config", config).update(max_position_embeddings=32),
    ]
    for number, mistake in enumerate(mistakes):
        files = files_in_memory(make_head(vocab=LIMITED), name)
        del files.config["headstart"]
        assert lint_in_memory(files, frozen) == []
        mistake(files.config, files.tensors)
        wanted = "warning" if number == 4 else "error"
        assert wanted in {violation.severity for violation in lint_in_memory(files, frozen)}


def test_a_published_head_is_checked_for_every_engine_that_reads_its_layout(make_head, frozen):
    """A published head may have been trained with a rotary base unlike its target's, so that is only a warning."""
    files = files_in_memory(make_head(norm_before_residual=True), "vllm")
    del files.config["headstart"]
    files.config.update(OTHER_ROPE)
    assert {(each.engine, each.severity) for each in lint_in_memory(files, frozen)} == {
        *((engine, "warning") for engine in SERVING.split()),
        ("sglang", "error"),
        ("tensorrt_llm", "error"),
    }
    [violation] = violations(files, frozen, ["speculators"])
    assert violation.where == "layout"
    assert violation.allowed.endswith(f"only {', '.join(EAGLE3.rules)} can")


@pytest.mark.parametrize("command", [lint, lambda folder, target: convert(folder, folder / "back", target)])
def test_keys_with_values_of_wrong_types_are_named_by_lint_and_by_convert(head, export_as, target_folder, command):
    folder = export_as(head, "vllm")
    edit_config(folder, put(hidden_size="32", architectures=7))
    with pytest.raises(ValueError, match=r"(?s)hidden_size: '32' given.*architectures: 7 given"):
        command(folder, str(target_folder))


def test_lint_found_nothing_in_a_head_for_other_weights(make_head, make_model, export_as, target_folder, tmp_path):
    head = make_head()
    head.origin = TargetOrigin.of(target_folder)
    folder = export_as(head, "vllm")
    assert not lint(folder, str(target_folder), ["vllm"])
    make_model(seed=1).save_pretrained(tmp_path / "other")
    [violation] = lint(folder, str(tmp_path / "other"), ["vllm"])
    assert str(violation).startswith("vllm: warning: config.json headstart.target: 'the model with digest")


@pytest.mark.parametrize(
    ("family", "engines"),
    [("llama", set()), ("qwen3_next", set()), ("gemma2", {"vllm", "sglang"}), ("glm4_moe_lite", {"vllm"})],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_an_engine_that_refuses_the_family_of_the_target_is_named(make_head, frozen, family, engines):
    """The engine would load the weights, and end when it asks the target for hidden states. EAGLE-1 needs none."""
    for_family, place = replace(frozen, config=replace(frozen.config, model_type=family)), "the target's model_type"
    for kind, expected in (("eagle3", engines), ("eagle1", set())):
        reported = violations(files_in_memory(make_head(kind), "vllm"), for_family, ["vllm", "sglang"])
        assert {(each.engine, each.where) for each in reported} == {(each, place) for each in expected}

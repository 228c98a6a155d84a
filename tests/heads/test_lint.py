"""Laws of heads.formats.lint: it finds each mistake that engines silently ignore, for the engines it concerns."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import LIMITED, edit_config, edit_tensors, exported
from torch import Tensor

from headstart.heads.files import HeadFiles
from headstart.heads.formats.convert import convert
from headstart.heads.formats.lint import RULES, lint, main, violations
from headstart.heads.frozen import FrozenTarget
from headstart.heads.target_config import TargetOrigin

MakeHead = Callable[..., Any]
IDS = "eagle_aux_hidden_state_layer_ids"
SERVING = {"vllm", "sglang", "tensorrt_llm"}


def planted(where: str, engines: set[str], config: Any = None, tensors: Any = None, text: str = "") -> Any:
    """A mistake planted in a head's files, and what lint must report: where, for which engines, with which words."""
    return pytest.param(where, engines, config, tensors, text, id=f"{where} {text}".strip())


def without_ids(config: dict[str, Any]) -> None:
    del config[IDS], config["eagle_config"]


def shift_ids(config: dict[str, Any]) -> None:
    """Both lists of ids off by one: they agree, and both are wrong."""
    config[IDS] = [tap - 1 for tap in config[IDS]]
    config["eagle_config"] = {IDS: [layer - 1 for layer in config["eagle_config"][IDS]]}


def spoil(tensors: dict[str, Tensor]) -> None:
    tensors["norm.weight"][3] = float("nan")


def absolute(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = LIMITED.ids.clone()


def absolute_alone(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = torch.tensor([2, 5, 11, 12, 20, 40])  # offsets that would fit as well: 2 6 13 15 24 45
    del tensors["t2d"]


def prefixed(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors.pop("norm.weight")


MISTAKES = [
    # Mistakes that engines silently ignore
    planted("tensor fc.weight", SERVING, tensors=lambda t: t.pop("fc.weight"), text="missing"),
    planted("tensor d2t", SERVING, tensors=lambda t: t.pop("d2t"), text="missing"),
    planted("tensor d2t", SERVING, tensors=absolute, text="offsets"),
    planted("tensor d2t", SERVING, tensors=absolute_alone, text="rise at every step"),
    planted("tensor lm_head.weight", SERVING, tensors=lambda t: t.pop("lm_head.weight"), text="missing"),
    planted(IDS, SERVING - {"tensorrt_llm"}, config=shift_ids, text="captures hidden_states [0, 2, 5]"),
    planted("tensor midlayer.hidden_norm.weight", SERVING, tensors=lambda t: t.pop("midlayer.hidden_norm.weight")),
    planted("max_position_embeddings", SERVING, config=lambda c: c.update(max_position_embeddings=32)),
    # Mistakes at which engines stop
    planted("tensor model.norm.weight", SERVING, tensors=prefixed, text="norm.weight is allowed"),
    planted("vocab_size", SERVING, config=lambda c: c.update(vocab_size=6), text="the target's 97"),
    planted("draft_vocab_size", SERVING, config=lambda c: c.pop("draft_vocab_size")),
    # The other rules
    planted("architectures", {"sglang"}, config=lambda c: c.update(architectures=["LlamaForCausalLM"])),
    planted("model_type", SERVING, config=lambda c: c.update(model_type="qwen3")),
    planted("num_hidden_layers", SERVING, config=lambda c: c.update(num_hidden_layers=2)),
    planted("tie_word_embeddings", SERVING, config=lambda c: c.update(tie_word_embeddings=True)),
    planted("bias", SERVING, config=lambda c: c.update(bias=True), text="uninitialised"),
    planted("norm_before_residual", SERVING - {"vllm"}, config=lambda c: c.update(norm_before_residual=True)),
    planted("target_hidden_size", SERVING, config=lambda c: c.update(target_hidden_size=64)),
    planted("hidden_size", SERVING, config=lambda c: c.pop("hidden_size")),
    planted("rope_theta", SERVING, config=lambda c: c.update(rope_theta=5e5), text="rope_parameters says"),
    planted(
        "rope_theta",
        SERVING,
        config=lambda c: c.update(rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        text="the target's",
    ),
    planted(IDS, {"vllm"}, config=lambda c: c.pop(IDS), text="captures hidden_states [0, 2, 5]"),
    planted(f"eagle_config.{IDS}", {"sglang"}, config=lambda c: c.pop("eagle_config"), text="hidden_states [2, 3, 4]"),
    planted(IDS, {"vllm", "sglang"}, config=without_ids, text="captures hidden_states [2, 3, 4]"),
    planted("tensor fc.weight", SERVING - {"tensorrt_llm"}, config=lambda c: c.update(num_aux_hidden_states=5)),
    planted("tensor norm.weight", SERVING, tensors=spoil, text="finite"),
    planted("tensor norm.weight", SERVING, tensors=lambda t: t.update({"norm.weight": torch.ones(31)}), text="[31]"),
    planted("tensor fc.bias", SERVING, tensors=lambda t: t.update({"fc.bias": torch.ones(32)}), text="no such tensor"),
    planted(
        "tensor embed_tokens.weight",
        SERVING - {"vllm"},
        tensors=lambda t: t.update({"embed_tokens.weight": torch.ones(97, 32)}),
    ),
]


@pytest.mark.parametrize(("where", "engines", "config", "tensors", "text"), MISTAKES)
def test_each_planted_mistake_is_found(
    make_head: MakeHead,
    target_folder: Path,
    tmp_path: Path,
    where: str,
    engines: set[str],
    config: Callable[[dict[str, Any]], object] | None,
    tensors: Callable[[dict[str, Tensor]], object] | None,
    text: str,
) -> None:
    folder = exported(make_head(vocab=LIMITED, taps=(1, 3, 6)), tmp_path, target_folder, "vllm")
    assert lint(folder, str(target_folder)) == []
    if config is not None:
        edit_config(folder, config)
    if tensors is not None:
        edit_tensors(folder, tensors)
    found = [violation for violation in lint(folder, str(target_folder)) if violation.severity == "error"]
    hits = [violation for violation in found if violation.where.endswith(where) and text in str(violation)]
    assert {violation.engine for violation in hits} == engines, [str(violation) for violation in found]
    assert {violation.engine for violation in found} == engines


SILENT: dict[str, Callable[[dict[str, Any], dict[str, Tensor]], object]] = {  # mistakes that engines silently ignore
    "no fc": lambda config, tensors: tensors.pop("fc.weight"),
    "no d2t": lambda config, tensors: tensors.pop("d2t"),
    "d2t of ids": lambda config, tensors: tensors.update(d2t=LIMITED.ids.clone()),
    "no lm_head": lambda config, tensors: tensors.pop("lm_head.weight"),
    "taps off by one": lambda config, tensors: config.update({IDS: [1, 2, 3], "eagle_config": {IDS: [0, 1, 2]}}),
    "no hidden_norm": lambda config, tensors: [tensors.pop(name) for name in list(tensors) if "hidden_norm" in name],
    "32 positions": lambda config, tensors: layer_keys(config).update(max_position_embeddings=32),
}


def layer_keys(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config.get("transformer_layer_config", config)
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("ours", [True, False], ids=["our head", "published head"])
@pytest.mark.parametrize("name", ["vllm", "speculators"])
@pytest.mark.parametrize("mistake", SILENT)
def test_mistakes_that_engines_ignore_are_found_in_every_layout_and_in_published_heads(
    make_head: MakeHead, target_folder: Path, tmp_path: Path, mistake: str, name: str, ours: bool
) -> None:
    folder = exported(make_head(vocab=LIMITED), tmp_path, target_folder, name)
    edit_config(folder, lambda config: None if ours else config.pop("headstart"))
    assert lint(folder, str(target_folder)) == []
    edit_config(folder, lambda config: edit_tensors(folder, lambda tensors: SILENT[mistake](config, tensors)))
    found = {violation.severity for violation in lint(folder, str(target_folder))}
    if mistake == "taps off by one" and not ours:
        assert found == {"warning"}  # the file does not say which taps the head was trained on
    else:
        assert "error" in found


def test_a_d2t_of_a_head_with_the_whole_vocabulary_is_found(
    make_head: MakeHead, target_folder: Path, tmp_path: Path
) -> None:
    """vLLM 0.32 has no parameter of that name and refuses the head."""
    folder = exported(make_head(), tmp_path, target_folder, "vllm")
    edit_tensors(folder, lambda tensors: tensors.update(d2t=torch.zeros(97, dtype=torch.long)))
    [violation] = lint(folder, str(target_folder))
    assert (violation.engine, violation.where) == ("vllm", "tensor d2t")


EAGLE1_MISTAKES = [
    planted("tensor lm_head.weight", {"vllm", "sglang"}, tensors=lambda t: t.update({"lm_head.weight": torch.ones(2)})),
    planted(
        "tensor layers.0.input_layernorm.weight",
        {"vllm", "sglang"},
        tensors=lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(32)}),
    ),
    planted("tensor fc.bias", {"vllm"}, tensors=lambda t: t.update({"fc.bias": torch.ones(32)}), text="silently"),
    planted("tensor fc.bias", {"sglang"}, tensors=lambda t: t.pop("fc.bias"), text="uninitialised"),
    planted("bias", {"vllm", "sglang"}, config=lambda c: c.update(bias=True)),
    planted("architectures", {"sglang"}, config=lambda c: c.update(architectures=["EagleLlamaForCausalLM"])),
    planted("architectures", {"vllm"}, config=lambda c: c.update(architectures=["LlamaForCausalLMEagle"])),
    planted("tensor fc.weight", {"vllm", "sglang"}, tensors=lambda t: t.pop("fc.weight")),
    planted(
        "tensor embed_tokens.weight",
        {"vllm", "sglang"},
        tensors=lambda t: t.update({"embed_tokens.weight": torch.ones(97, 32)}),
    ),
]


@pytest.mark.parametrize(("where", "engines", "config", "tensors", "text"), EAGLE1_MISTAKES)
def test_each_mistake_planted_in_an_eagle_1_head_is_found(
    make_head: MakeHead,
    target_folder: Path,
    tmp_path: Path,
    where: str,
    engines: set[str],
    config: Any,
    tensors: Any,
    text: str,
) -> None:
    folder = exported(make_head("eagle1"), tmp_path, target_folder, "vllm")
    edit_config(folder, config or (lambda c: None))
    edit_tensors(folder, tensors or (lambda t: None))
    found = lint(folder, str(target_folder))
    assert {violation.engine for violation in found} == engines, [str(violation) for violation in found]
    assert all(violation.where.endswith(where) and text in str(violation) for violation in found)


VLLM = {"vllm"}
MEDUSA_MISTAKES = [
    planted(
        "num_heads", VLLM, config=lambda c: c.update(num_heads=4), text="3 is allowed: the file has tensors for 3 heads"
    ),
    planted("num_heads", VLLM, config=lambda c: [c.pop("num_heads"), c.pop("medusa_num_heads")], text="missing"),
    planted("medusa_num_layers", VLLM, config=lambda c: c.update(medusa_num_layers=2)),
    planted("hidden_size", VLLM, config=lambda c: c.pop("hidden_size"), text="the target's 32"),
    planted("vocab_size", VLLM, config=lambda c: c.update(vocab_size=32001)),
    planted("truncated_vocab_size", VLLM, config=lambda c: c.update(truncated_vocab_size=6)),
    planted("original_lm_head", VLLM, config=lambda c: c.update(original_lm_head=True)),
    planted("medusa_fc_bias", VLLM, config=lambda c: c.pop("medusa_fc_bias"), text="silently"),
    planted("architectures", VLLM, config=lambda c: c.update(architectures=["LlamaForCausalLM"])),
    planted("tensor token_map", VLLM, tensors=lambda t: t.update(token_map=LIMITED.ids.clone())),
    planted("tensor lm_heads.1.weight", VLLM, tensors=lambda t: t.pop("lm_heads.1.weight"), text="missing"),
    planted("tensor blocks.2.layers.0.bias", VLLM, tensors=lambda t: t.pop("blocks.2.layers.0.bias"), text="missing"),
    planted("tensor lm_heads.0.weight", VLLM, tensors=lambda t: t.update({"lm_heads.0.weight": torch.ones(6, 32)})),
    planted("tensor extra", VLLM, tensors=lambda t: t.update(extra=torch.ones(2)), text="no such tensor"),
    planted("blocks.0.layers.0.bias", VLLM, tensors=lambda t: t["blocks.0.layers.0.bias"].fill_(float("inf"))),
]


@pytest.mark.parametrize(("where", "engines", "config", "tensors", "text"), MEDUSA_MISTAKES)
def test_each_mistake_planted_in_medusa_heads_is_found(
    make_head: MakeHead,
    target_folder: Path,
    tmp_path: Path,
    where: str,
    engines: set[str],
    config: Any,
    tensors: Any,
    text: str,
) -> None:
    folder = exported(make_head("medusa"), tmp_path, target_folder, "vllm")
    assert lint(folder, str(target_folder)) == []
    edit_config(folder, config or (lambda c: None))
    edit_tensors(folder, tensors or (lambda t: None))
    found = lint(folder, str(target_folder))
    hits = {violation.engine for violation in found if violation.where.endswith(where) and text in str(violation)}
    assert hits == engines, [str(violation) for violation in found]


SERVED = {"vllm", "speculators"}
SPECULATORS_MISTAKES = [
    planted("norm_before_residual", SERVED, config=lambda c: c.pop("norm_before_residual")),
    planted("verifier.name_or_path", SERVED, config=lambda c: c["speculators_config"].update(verifier={})),
    planted("speculative_tokens", SERVED, config=lambda c: c["speculators_config"].update(proposal_methods=[])),
    planted("tensor embed_tokens.weight", {"speculators"}, tensors=lambda t: t.pop("embed_tokens.weight")),
    planted("tensor t2d", {"speculators"}, tensors=lambda t: t.pop("t2d")),
    planted("tensor midlayer.bias", SERVED, tensors=lambda t: t.update({"midlayer.bias": torch.ones(2)})),
    planted(IDS, SERVED, config=lambda c: c.update({IDS: [1, 2, 3]})),
]


@pytest.mark.parametrize(("where", "engines", "config", "tensors", "text"), SPECULATORS_MISTAKES)
def test_each_mistake_planted_in_a_speculators_head_is_found(
    make_head: MakeHead,
    target_folder: Path,
    tmp_path: Path,
    where: str,
    engines: set[str],
    config: Any,
    tensors: Any,
    text: str,
) -> None:
    folder = exported(make_head(vocab=LIMITED), tmp_path, target_folder, "speculators")
    assert lint(folder, str(target_folder)) == []
    edit_config(folder, config or (lambda c: None))
    edit_tensors(folder, tensors or (lambda t: None))
    found = lint(folder, str(target_folder))
    hits = {violation.engine for violation in found if violation.where.endswith(where)}
    assert hits == engines, [str(violation) for violation in found]


def test_a_published_head_is_checked_for_every_engine_that_reads_its_layout(
    make_head: MakeHead, target_folder: Path, tmp_path: Path
) -> None:
    """A published head may have been trained with a rotary base unlike its target's, so that is only a warning."""
    folder = exported(make_head(norm_before_residual=True), tmp_path, target_folder, "vllm")
    assert lint(folder, str(target_folder)) == []
    rope = {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    edit_config(folder, lambda config: [config.pop("headstart"), config.update(rope)])
    found = lint(folder, str(target_folder))
    assert {(violation.engine, violation.severity) for violation in found} == {
        ("vllm", "warning"),
        ("sglang", "warning"),
        ("tensorrt_llm", "warning"),
        ("sglang", "error"),
        ("tensorrt_llm", "error"),
    }
    [violation] = lint(folder, str(target_folder), ["speculators"])
    assert str(violation) == (
        f"speculators: error: layout: 'eagle3' found; speculators cannot read eagle3, "
        f"only {', '.join(RULES['eagle3'])} can"
    )


UNREADABLE: list[tuple[str, Any]] = [
    ("hidden_size", "32"),
    ("hidden_size", True),
    ("rope_theta", None),
    ("rope_parameters", 3),
    ("eagle_aux_hidden_state_layer_ids", [2, "3", 4]),
    ("norm_before_residual", "false"),
    ("headstart", "note"),
    ("speculators_config", {"proposal_methods": 3}),
]


@pytest.mark.parametrize(("key", "value"), UNREADABLE)
def test_a_key_with_a_value_of_a_wrong_type_is_named_by_lint_and_by_convert(
    make_head: MakeHead, target_folder: Path, tmp_path: Path, key: str, value: object
) -> None:
    folder = exported(make_head(), tmp_path, target_folder, "vllm")
    edit_config(folder, lambda config: config.update({key: value, "architectures": 7}))
    named = rf"(?s)architectures: 7 given.*{key}|{key}.*architectures: 7 given"
    with pytest.raises(ValueError, match=named):
        lint(folder, str(target_folder))
    with pytest.raises(ValueError, match=named):
        convert(folder, tmp_path / "back", str(target_folder))


@pytest.mark.parametrize("good", [True, False])
def test_the_exit_code_is_1_if_lint_finds_an_error(
    make_head: MakeHead, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], good: bool
) -> None:
    folder = exported(make_head(), tmp_path, target_folder, "vllm")
    capsys.readouterr()
    if not good:
        edit_tensors(folder, lambda tensors: tensors.pop("fc.weight"))
    with pytest.raises(SystemExit) as ended:
        main([str(folder), "--target", str(target_folder), "--engine", "vllm"])
    assert ended.value.code == (0 if good else 1)
    lines = capsys.readouterr().out.splitlines()
    well = f"{folder}: all is well; nothing was found for vllm"
    assert lines == [well if good else "vllm: error: tensor fc.weight: missing; shape [32, 96] is required"]


def test_lint_found_nothing_in_a_head_that_was_trained_for_other_weights(
    make_head: MakeHead, make_model: Callable[..., Any], target_folder: Path, tmp_path: Path
) -> None:
    head = make_head()
    head.origin = TargetOrigin.of(target_folder)
    folder = exported(head, tmp_path, target_folder, "vllm")
    assert not lint(folder, str(target_folder), ["vllm"])
    make_model(seed=1).save_pretrained(tmp_path / "other")
    [found] = lint(folder, str(tmp_path / "other"), ["vllm"])
    assert str(found).startswith("vllm: warning: config.json headstart.target: 'the model with digest")


@pytest.mark.parametrize(
    ("family", "engines"),
    [("llama", set()), ("qwen3_next", set()), ("gemma2", {"vllm", "sglang"}), ("glm4_moe_lite", {"vllm"})],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_an_engine_that_refuses_the_family_of_the_target_is_named(
    make_head: MakeHead, frozen: FrozenTarget, target_folder: Path, tmp_path: Path, family: str, engines: set[str]
) -> None:
    """The engine would load the weights, and end when it asks the target for hidden states. EAGLE-1 needs none."""
    for_family = replace(frozen, config=replace(frozen.config, model_type=family))
    for kind, expected in (("eagle3", engines), ("eagle1", set())):
        folder = exported(make_head(kind), tmp_path / kind, target_folder, "vllm")
        found = violations(HeadFiles.read(folder), for_family, ["vllm", "sglang"])
        assert {each.engine for each in found if each.where == "the target's model_type"} == expected
        assert not [each for each in found if each.where != "the target's model_type"]

"""Laws of the lint: each mistake that engines pass over in silence is found, for the engines that it concerns."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import LIMITED, edit_config, edit_tensors, exported
from torch import Tensor

from heads.convert import convert
from heads.formats.contracts import RULES
from heads.lint import lint, main

MakeHead = Callable[..., Any]
IDS = "eagle_aux_hidden_state_layer_ids"
SERVING = {"vllm", "sglang", "tensorrt_llm"}


def planted(where: str, engines: set[str], config: Any = None, tensors: Any = None, text: str = "") -> Any:
    """A mistake, and what the lint must say of it."""
    return pytest.param(where, engines, config, tensors, text, id=f"{where} {text}".strip())


def without_ids(config: dict[str, Any]) -> None:
    del config[IDS], config["eagle_config"]


def shift_ids(config: dict[str, Any]) -> None:
    """Both countings off by one: consistent, and wrong."""
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
    # Those of the table of silent mistakes
    planted("tensor fc.weight", SERVING, tensors=lambda t: t.pop("fc.weight"), text="nothing"),
    planted("tensor d2t", SERVING, tensors=lambda t: t.pop("d2t"), text="nothing"),
    planted("tensor d2t", SERVING, tensors=absolute, text="offsets"),
    planted("tensor d2t", SERVING, tensors=absolute_alone, text="rise at every step"),
    planted("tensor lm_head.weight", SERVING, tensors=lambda t: t.pop("lm_head.weight"), text="nothing"),
    planted(IDS, SERVING - {"tensorrt_llm"}, config=shift_ids, text="captures hidden_states [0, 2, 5]"),
    planted("tensor midlayer.hidden_norm.weight", SERVING, tensors=lambda t: t.pop("midlayer.hidden_norm.weight")),
    planted("max_position_embeddings", SERVING, config=lambda c: c.update(max_position_embeddings=32)),
    # The loud ones
    planted("tensor model.norm.weight", SERVING, tensors=prefixed, text="norm.weight is allowed"),
    planted("vocab_size", SERVING, config=lambda c: c.update(vocab_size=6), text="the target's 97"),
    planted("draft_vocab_size", SERVING, config=lambda c: c.pop("draft_vocab_size")),
    # What else the contracts say
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
    planted("tensor fc.bias", SERVING, tensors=lambda t: t.update({"fc.bias": torch.ones(32)}), text="none such"),
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
    found = [finding for finding in lint(folder, str(target_folder)) if finding.severity == "error"]
    hits = [finding for finding in found if finding.where.endswith(where) and text in str(finding)]
    assert {finding.engine for finding in hits} == engines, [str(finding) for finding in found]
    assert {finding.engine for finding in found} == engines


SILENT: dict[str, Callable[[dict[str, Any], dict[str, Tensor]], object]] = {  # the table of silent mistakes, row by row
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


@pytest.mark.parametrize("ours", [True, False], ids=["with our note", "without"])
@pytest.mark.parametrize("name", ["vllm", "speculators", "eagle"])
@pytest.mark.parametrize("mistake", SILENT)
def test_what_engines_pass_over_is_found_in_every_layout_also_in_heads_of_others(
    make_head: MakeHead, target_folder: Path, tmp_path: Path, mistake: str, name: str, ours: bool
) -> None:
    folder = exported(make_head(vocab=LIMITED), tmp_path, target_folder, name)
    engines = ["eagle"] if name == "eagle" else None
    edit_config(folder, lambda config: None if ours else config.pop("headstart"))
    assert lint(folder, str(target_folder), engines) == []
    edit_config(folder, lambda config: edit_tensors(folder, lambda tensors: SILENT[mistake](config, tensors)))
    found = {finding.severity for finding in lint(folder, str(target_folder), engines)}
    if mistake == "taps off by one" and ours:
        assert found == ({"error"} if name != "eagle" else set())  # the reference looks at no ids
    elif mistake == "taps off by one" and name != "eagle":
        assert found == {"warning"}  # which ones it was trained on is not in the file
    else:
        assert "error" in found


def test_a_d2t_where_the_vocabulary_is_whole_is_found(make_head: MakeHead, target_folder: Path, tmp_path: Path) -> None:
    """vLLM 0.32 has no place for it, and stops."""
    folder = exported(make_head(), tmp_path, target_folder, "vllm")
    edit_tensors(folder, lambda tensors: tensors.update(d2t=torch.zeros(97, dtype=torch.long)))
    [finding] = lint(folder, str(target_folder))
    assert (finding.engine, finding.where) == ("vllm", "tensor d2t")


EAGLE1_MISTAKES = [
    planted("tensor lm_head.weight", {"vllm", "sglang"}, tensors=lambda t: t.update({"lm_head.weight": torch.ones(2)})),
    planted(
        "tensor layers.0.input_layernorm.weight",
        {"vllm", "sglang"},
        tensors=lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(32)}),
    ),
    planted("tensor fc.bias", {"vllm"}, tensors=lambda t: t.update({"fc.bias": torch.ones(32)}), text="in silence"),
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
    assert {finding.engine for finding in found} == engines, [str(finding) for finding in found]
    assert all(finding.where.endswith(where) and text in str(finding) for finding in found)


def renamed(tensors: dict[str, Tensor]) -> None:
    tensors["medusa_head.0.0.linear.weight"] = tensors.pop("blocks.0.layers.0.weight")


VLLM = {"vllm"}
MEDUSA_MISTAKES = [
    planted("num_heads", VLLM, config=lambda c: c.update(num_heads=4), text="3, as many as there are tensors"),
    planted("num_heads", VLLM, config=lambda c: [c.pop("num_heads"), c.pop("medusa_num_heads")], text="None"),
    planted("medusa_num_layers", VLLM, config=lambda c: c.update(medusa_num_layers=2)),
    planted("hidden_size", VLLM, config=lambda c: c.pop("hidden_size"), text="the target's 32"),
    planted("vocab_size", VLLM, config=lambda c: c.update(vocab_size=32001)),
    planted("truncated_vocab_size", VLLM, config=lambda c: c.update(truncated_vocab_size=6)),
    planted("original_lm_head", VLLM, config=lambda c: c.update(original_lm_head=True)),
    planted("medusa_fc_bias", VLLM, config=lambda c: c.pop("medusa_fc_bias"), text="in silence"),
    planted("architectures", VLLM, config=lambda c: c.update(architectures=["LlamaForCausalLM"])),
    planted("tensor token_map", VLLM, tensors=lambda t: t.update(token_map=LIMITED.ids.clone())),
    planted("tensor lm_heads.1.weight", VLLM, tensors=lambda t: t.pop("lm_heads.1.weight"), text="nothing"),
    planted("tensor blocks.2.layers.0.bias", VLLM, tensors=lambda t: t.pop("blocks.2.layers.0.bias"), text="nothing"),
    planted("tensor lm_heads.0.weight", VLLM, tensors=lambda t: t.update({"lm_heads.0.weight": torch.ones(6, 32)})),
    planted("tensor medusa_head.0.0.linear.weight", VLLM, tensors=renamed, text="0.0.linear.weight is allowed"),
    planted("tensor extra", VLLM, tensors=lambda t: t.update(extra=torch.ones(2)), text="none such"),
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
    hits = {finding.engine for finding in found if finding.where.endswith(where) and text in str(finding)}
    assert hits == engines, [str(finding) for finding in found]


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_the_medusa_authors_code_takes_absent_keys_for_its_own_numbers(
    make_head: MakeHead, target_folder: Path, tmp_path: Path, prefix: str
) -> None:
    """4 heads of 1 layer; and its loader passes over names with a prefix."""
    folder = exported(make_head("medusa", num_heads=4), tmp_path, target_folder, "medusa")
    edit_config(folder, lambda c: [c.pop("medusa_num_heads"), c.pop("medusa_num_layers")])
    assert lint(folder, str(target_folder), ["medusa"]) == []
    edit_config(folder, lambda c: c.update(medusa_num_heads=2))
    edit_tensors(folder, lambda t: t.update({prefix + name: t.pop(name) for name in list(t)}))
    found = [finding.where for finding in lint(folder, str(target_folder), ["medusa"])]
    assert found[0] == "config.json medusa_num_heads"
    assert len(found) == (13 if prefix else 1)


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
    hits = {finding.engine for finding in found if finding.where.endswith(where)}
    assert hits == engines, [str(finding) for finding in found]


def test_a_head_from_elsewhere_is_held_to_every_engine_of_its_layout(
    make_head: MakeHead, target_folder: Path, tmp_path: Path
) -> None:
    """Without our note a rotary base other than the target's may be what it was trained with: a warning."""
    folder = exported(make_head(norm_before_residual=True), tmp_path, target_folder, "vllm")
    assert lint(folder, str(target_folder)) == []
    rope = {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    edit_config(folder, lambda config: [config.pop("headstart"), config.update(rope)])
    found = lint(folder, str(target_folder))
    assert {(finding.engine, finding.severity) for finding in found} == {
        ("vllm", "warning"),
        ("sglang", "warning"),
        ("tensorrt_llm", "warning"),
        ("sglang", "error"),
        ("tensorrt_llm", "error"),
    }
    [finding] = lint(folder, str(target_folder), ["speculators"])
    assert str(finding) == (
        f"speculators: error: layout: 'eagle3' found, speculators reads no eagle3; {', '.join(RULES['eagle3'])} do"
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
def test_a_key_of_another_type_is_named_by_whoever_reads_the_file(
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
def test_the_exit_code_tells_good_from_bad(
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
    assert lines == ([] if good else ["vllm: error: tensor fc.weight: 'nothing' found, [32, 96] is allowed"])

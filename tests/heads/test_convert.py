"""Laws of heads.formats.convert: heads survive a round trip bit for bit, guesses are printed, the rest is refused."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import (
    EVERY_HEAD,
    LIMITED,
    edit_config,
    edit_tensors,
    exported,
    read_config,
    read_tensors,
    same_bits,
)
from safetensors.torch import save_file

from headstart.heads.formats.convert import convert
from headstart.heads.formats.layouts import FORMATS
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import load_head_for

MakeHead = Callable[..., Any]


def forget(folder: Path) -> None:
    """Remove our own section, so that the head looks like a published one."""
    edit_config(folder, lambda config: config.pop("headstart"))


def medusa_authors_names(tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors of Medusa heads of two layers under the names of the authors' files."""
    renamed = {}
    for name, tensor in tensors.items():
        _, head, *layer = name.split(".")
        renamed[f"{head}.2.weight" if name.startswith("lm_heads.") else f"{head}.{layer[1]}.linear.{layer[2]}"] = tensor
    return renamed


def logits(head: Any) -> Any:
    generator = torch.Generator().manual_seed(7)
    taps = torch.randn(1, 6, len(head.taps) * head.target.hidden_size, generator=generator)
    tokens = torch.randint(97, (1, 6), generator=generator)
    return head.logits(head(head.project(taps), tokens, torch.arange(6)))


ROUND_TRIPS = [
    ("eagle3", ("native", "vllm", "speculators")),
    ("limited", ("native", "vllm", "speculators")),
    ("3.1", ("vllm", "speculators")),
    ("taps", ("vllm", "speculators")),
    ("five taps", ("vllm", "speculators")),
    ("narrow", ("vllm",)),
    ("norm before fc", ("vllm", "speculators")),
    ("eagle1", ("native", "vllm")),
    ("dspark", ("native", "vllm", "speculators")),
    ("dspark limited", ("native", "vllm", "speculators")),
    ("dflash", ("native", "vllm", "speculators")),
    ("jetspec", ("native", "vllm")),
    ("medusa", ("native", "vllm")),
    ("medusa layers", ("native", "vllm")),
    ("medusa limited", ("native",)),
]


@pytest.mark.each_value
@pytest.mark.parametrize("ours", [True, False], ids=["our head", "published head"])
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in ROUND_TRIPS for name in names])
def test_a_head_comes_back_from_every_format_bit_for_bit(
    make_head: MakeHead, target_folder: Path, frozen: FrozenTarget, tmp_path: Path, kind: str, name: str, ours: bool
) -> None:
    head = make_head(**EVERY_HEAD[kind])
    folder = exported(head, tmp_path, target_folder, name)
    if not ours:
        forget(folder)
    convert(folder, tmp_path / "back", str(target_folder))
    assert same_bits(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "head"))
    assert read_config(tmp_path / "back") == read_config(tmp_path / "head")
    again = exported(load_head_for(tmp_path / "back", frozen), tmp_path / "again", target_folder, name)
    assert same_bits(read_tensors(again), read_tensors(folder))


def test_every_format_has_a_round_trip() -> None:
    assert {name for _, names in ROUND_TRIPS for name in names} | {"sglang", "tensorrt_llm", "gguf"} == set(FORMATS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_half_precision_head_keeps_its_dtype(
    make_head: MakeHead, target_folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    name = str(dtype).removeprefix("torch.")
    folder = exported(make_head(vocab=LIMITED), tmp_path, target_folder, "speculators", dtype=name)
    convert(folder, tmp_path / "back", str(target_folder))
    back, sent = read_tensors(tmp_path / "back"), read_tensors(folder)
    assert torch.equal(back["midlayer.mlp.up_proj.weight"], sent["layers.0.mlp.up_proj.weight"])
    assert {tensor.dtype for tensor in back.values() if tensor.is_floating_point()} == {dtype}


def test_a_head_trained_with_another_rotary_base_keeps_it(
    make_head: MakeHead, make_model: Callable[..., Any], frozen: FrozenTarget, tmp_path: Path
) -> None:
    """The EAGLE authors train with base 10000 for every target, and their files name neither base nor epsilon."""
    head, target = make_head(), tmp_path / "target"
    make_model(rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rms_norm_eps=1e-5).save_pretrained(target)
    published = tmp_path / "published"
    published.mkdir()
    keys = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {**keys, "num_hidden_layers": 1, "vocab_size": 97, "draft_vocab_size": 97}
    (published / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes}))
    torch.save(head.state_dict(), published / "pytorch_model.bin")
    inferred = convert(published, tmp_path / "back", str(target))
    assert "rope: no key for it, so base 10000, as every engine assumes" in inferred
    assert "rms_norm_eps: no key for it, so 1e-06, as every engine assumes" in inferred
    assert "head_dim: missing, so 8, hidden_size / num_attention_heads" in inferred
    assert "fc_norm, norm_output, norm_before_fc, norm_before_residual: missing, so false" in inferred
    loaded = load_head_for(tmp_path / "back", FrozenTarget.from_folder(target, torch.float32))
    assert torch.equal(logits(loaded), logits(head))
    folder = exported(loaded, tmp_path / "again", target, "vllm")
    assert read_config(folder)["rope_theta"] == 10000
    assert read_config(folder)["rms_norm_eps"] == 1e-6
    with pytest.raises(ValueError, match="rope: head"):
        load_head_for(tmp_path / "back", frozen)  # converted for the other target


def test_nvidias_ids_count_layer_outputs_and_its_files_have_no_t2d(
    make_head: MakeHead, target_folder: Path, frozen: FrozenTarget, tmp_path: Path
) -> None:
    head = make_head(taps=(1, 3, 6), vocab=LIMITED)
    folder = exported(head, tmp_path, target_folder, "vllm")
    forget(folder)
    edit_config(folder, lambda config: config.pop("eagle_aux_hidden_state_layer_ids"))
    edit_tensors(folder, lambda tensors: tensors.pop("t2d"))
    inferred = convert(folder, tmp_path / "back", str(target_folder))
    assert "taps: hidden_states [1, 3, 6], as eagle_config counts layer outputs [0, 2, 5]" in inferred
    assert "t2d: from d2t" in inferred
    assert torch.equal(logits(load_head_for(tmp_path / "back", frozen)), logits(head))


def test_a_missing_d2t_is_derived_from_t2d(make_head: MakeHead, target_folder: Path, tmp_path: Path) -> None:
    """speculators' own converter drops both if one is missing."""
    folder = exported(make_head(vocab=LIMITED), tmp_path, target_folder, "vllm")
    edit_tensors(folder, lambda tensors: tensors.pop("d2t"))
    assert "d2t: from t2d" in convert(folder, tmp_path / "back", str(target_folder))
    assert read_tensors(tmp_path / "back")["d2t"].tolist() == LIMITED.offsets().tolist()


def test_a_speculators_head_with_its_norm_before_the_residual_is_converted(
    make_head: MakeHead, target_folder: Path, frozen: FrozenTarget, tmp_path: Path
) -> None:
    head = make_head(norm_before_residual=True, vocab=LIMITED)
    folder = exported(head, tmp_path, target_folder, "speculators")
    forget(folder)
    edit_tensors(folder, lambda tensors: tensors.update({"verifier_norm.weight": torch.ones(32)}))
    inferred = convert(folder, tmp_path / "back", str(target_folder))
    assert "verifier_norm.weight: not used in drafting, left out" in inferred
    assert "embed_tokens.weight: a copy of the target's, left out" in inferred
    back = load_head_for(tmp_path / "back", frozen)
    assert torch.equal(logits(back), logits(head))
    assert not torch.equal(logits(back), logits(make_head(vocab=LIMITED)))


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
def test_prefixed_names_and_shards_are_read(
    make_head: MakeHead, target_folder: Path, tmp_path: Path, sharded: bool
) -> None:
    folder = exported(make_head(), tmp_path, target_folder, "vllm")
    tensors = {f"model.{name}" if name != "lm_head.weight" else name: t for name, t in read_tensors(folder).items()}
    save_file(tensors, folder / "model.safetensors")
    if sharded:
        split(folder, tensors)
    assert "names: the prefix `model.` was removed" in convert(folder, tmp_path / "back", str(target_folder))
    assert same_bits(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "head"))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"fc.weight": "gone"}}'])
def test_a_broken_index_of_shards_is_named(
    make_head: MakeHead, target_folder: Path, tmp_path: Path, content: str
) -> None:
    folder = exported(make_head(), tmp_path, target_folder, "vllm")
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index\.json names no shards|gone cannot be read"):
        convert(folder, tmp_path / "back", str(target_folder))


def split(folder: Path, tensors: dict[str, Any]) -> None:
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for part in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == part}, folder / part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_missing_misshapen_and_unknown_tensors_are_named_at_once(
    make_head: MakeHead, target_folder: Path, tmp_path: Path
) -> None:
    folder = exported(make_head(), tmp_path, target_folder, "speculators")

    def damage(tensors: dict[str, Any]) -> None:
        del tensors["layers.0.hidden_norm.weight"], tensors["norm.weight"]
        tensors["layers.0.mlp.up_proj.weight"] = torch.ones(40, 31)
        tensors["layers.0.self_attn.q_norm.weight"] = torch.ones(8)
        tensors["layers.1.mlp.up_proj.weight"] = torch.ones(40, 32)

    edit_tensors(folder, damage)
    with pytest.raises(ValueError, match="hidden_norm") as error:
        convert(folder, tmp_path / "back", str(target_folder))
    for part in (
        "midlayer.hidden_norm.weight is missing",
        "norm.weight is missing",
        "midlayer.mlp.up_proj.weight is [40, 31] but should be [40, 32]",
        "midlayer.self_attn.q_norm.weight is unknown",
        "layers.1.mlp.up_proj.weight is unknown",
    ):
        assert part in str(error.value)
    assert not (tmp_path / "back").exists()


def test_the_refusal_of_a_head_also_names_its_missing_misshapen_and_unknown_tensors(
    make_head: MakeHead, target_folder: Path, tmp_path: Path
) -> None:
    folder = exported(make_head(vocab=LIMITED), tmp_path, target_folder, "vllm")
    edit_config(folder, lambda config: config.update(hidden_act="gelu"))
    edit_tensors(folder, lambda tensors: [tensors.pop("norm.weight"), tensors.update(extra=torch.ones(2))])
    with pytest.raises(ValueError, match="cannot be converted") as error:
        convert(folder, tmp_path / "back", str(target_folder))
    for part in ("hidden_act 'gelu'", "tensor norm.weight: missing; shape [32] is required", "tensor extra: [2] found"):
        assert part in str(error.value)


def test_everything_that_headstart_cannot_represent_is_refused_at_once(
    make_head: MakeHead, target_folder: Path, tmp_path: Path
) -> None:
    folder = exported(make_head(taps=(1, 3, 6)), tmp_path, target_folder, "vllm")
    forget(folder)
    wrong: dict[str, Any] = {
        "hidden_act": "gelu",
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention"],
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4},
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6], "parallel_draft_step": 4},
    }
    edit_config(folder, lambda config: config.update(wrong))
    with pytest.raises(ValueError, match="cannot be converted") as error:
        convert(folder, tmp_path / "back", str(target_folder))
    for part in (
        "hidden_act 'gelu': only 'silu' is allowed",
        "num_hidden_layers 2: only 1 is allowed",
        "layer_types with sliding_attention",
        "rope_type 'longrope'",
        "[1, 3, 6] and eagle_config's [1, 3, 6] name different hidden states",
        "parallel_draft_step 4",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (lambda config: config.pop("norm_before_residual"), "norm_before_residual: missing"),
        (lambda config: config.update(speculators_model_type="mtp"), "speculators_model_type 'mtp'"),
        (lambda config: config.update(pard_token=5), "a P-EAGLE head, which is not supported"),
        (lambda config: config.update(eagle_aux_hidden_state_layer_ids=[2, 3]), "fc.weight reads 96 features"),
        (lambda config: config["transformer_layer_config"].pop("hidden_size"), "hidden_size: missing"),
    ],
)
def test_an_ambiguous_speculators_head_is_refused(
    make_head: MakeHead, target_folder: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], object], part: str
) -> None:
    folder = exported(make_head(), tmp_path, target_folder, "speculators")
    forget(folder)
    edit_config(folder, edit)
    with pytest.raises(ValueError, match=part):
        convert(folder, tmp_path / "back", str(target_folder))


def test_published_medusa_heads_are_converted_even_if_their_config_is_wrong(
    make_head: MakeHead, target_folder: Path, frozen: FrozenTarget, tmp_path: Path
) -> None:
    """Their config.json says little, and may name another number of heads than the file holds."""
    head = make_head("medusa", num_layers=2)
    published = tmp_path / "published"
    published.mkdir()
    (published / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 2}))
    torch.save(medusa_authors_names(head.engine_tensors()), published / "medusa_lm_head.pt")
    inferred = convert(published, tmp_path / "back", str(target_folder))
    assert "names: the Medusa authors', replaced by vLLM's" in inferred
    assert "num_heads: 3, counted from the tensors; config.json says 2" in inferred
    assert "medusa_fc_bias: true, because the blocks have biases" in inferred
    assert same_bits(load_head_for(tmp_path / "back", frozen).state_dict(), head.state_dict())


def test_a_token_map_in_any_order_is_sorted(
    make_head: MakeHead, target_folder: Path, frozen: FrozenTarget, tmp_path: Path
) -> None:
    head = make_head("medusa", vocab=LIMITED)
    folder = exported(head, tmp_path, target_folder, "native")
    backwards = ("token_map", "lm_heads.0.weight", "lm_heads.1.weight", "lm_heads.2.weight")
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name].flip(0) for name in backwards}))
    convert(folder, tmp_path / "back", str(target_folder))
    assert same_bits(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "head"))
    edit_tensors(folder, lambda tensors: tensors.update(token_map=torch.tensor([0, 3, 3, 9, 50, 96])))
    with pytest.raises(ValueError, match="distinct ids among the target's 97 tokens"):
        convert(folder, tmp_path / "again", str(target_folder))


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda tensors: tensors.pop("lm_heads.1.weight"), "lm_heads.1.weight is missing"),
        (lambda tensors: tensors.pop("lm_heads.0.weight"), "lm_heads.0.weight .* a matrix is required"),
        (lambda tensors: tensors.pop("blocks.1.layers.0.bias"), "blocks.1.layers.0.bias is missing"),
        (lambda tensors: tensors.update({"lm_heads.0.weight": torch.ones(97, 31)}), "should be"),
    ],
)
def test_damaged_medusa_heads_are_refused(
    make_head: MakeHead, target_folder: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], object], reason: str
) -> None:
    folder = exported(make_head("medusa"), tmp_path, target_folder, "vllm")
    edit_tensors(folder, edit)
    with pytest.raises(ValueError, match=reason):
        convert(folder, tmp_path / "back", str(target_folder))


class Danger:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt"])
@pytest.mark.parametrize("content", [{"fc.weight": Danger()}, [1, 2], {"fc.weight": 3}], ids=["code", "list", "number"])
def test_a_pickle_of_more_than_tensors_is_refused_and_never_executed(
    target_folder: Path, tmp_path: Path, content: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    torch.save(content, tmp_path / name, pickle_module=pickle)
    with pytest.raises(ValueError, match=f"{name} is refused"):
        convert(tmp_path, tmp_path / "back", str(target_folder))
    assert not (tmp_path / "executed").exists()


def test_a_folder_that_holds_no_known_head_is_refused(target_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the layout of this draft head is unknown"):
        convert(target_folder, tmp_path / "back", str(target_folder))
    with pytest.raises(ValueError, match=r"holds no head \(no config\.json\)"):
        convert(tmp_path, tmp_path / "back", str(target_folder))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no weights"):
        convert(tmp_path, tmp_path / "back", str(target_folder))
    with pytest.raises(ValueError, match="exists already"):
        convert(target_folder, tmp_path, str(target_folder))

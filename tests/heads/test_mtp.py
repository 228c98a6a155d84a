"""A target's own MTP layer as a head: transformers' numbers, the files' names, drafts, training, and exports."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from exported import edit_config, edit_tensors, exported, read_config, read_tensors, same_bits
from families import GROUPED, OTHERS, STATEFUL
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from headstart.heads.formats.convert import convert
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import load_head_for, new_head, save_head
from headstart.heads.kinds.mtp import OLDEST, MtpHead
from headstart.heads.quantised import requantised
from headstart.heads.unroll_attention import UnrollCache
from headstart.heads.vocab import DraftVocab
from headstart.inference.core.request import Request
from headstart.inference.doctor.command import diagnose
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.engine.loop import generate_batch
from headstart.inference.targets.model import TargetModel
from headstart.recipes.other_commands import Options
from headstart.recipes.schema import TargetSection
from headstart.recipes.schema_heads import MtpSection

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
pytestmark = pytest.mark.skipif(VERSION < OLDEST, reason="MTP layers need transformers 5.23")
QWEN = {**GROUPED, **{key: value for key, value in STATEFUL["qwen3_next"][1].items() if "linear" in key}}
Tensors = dict[str, Tensor]
NAMES = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}


def sizes_of(name: str) -> tuple[str, dict[str, Any]]:
    if name == "latent":
        return OTHERS["deepseek_v3"]
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    return "qwen3_5_text", {**QWEN, **layers, "tie_word_embeddings": False}


def published(name: str, mtp: MtpModel, last: int) -> Tensors:
    """The layer's tensors as published files of the family name them."""
    found: Tensors = {}
    for own, tensor in mtp.layers[0].state_dict().items():
        part, _, rest = own.partition(".")
        if name != "latent":
            found[f"mtp.layers.0.{rest}" if part == "mtp_block" else f"mtp.{NAMES[part]}.{rest}"] = tensor.clone()
        elif ".experts." in own:
            columns = ("gate_proj", "up_proj") if "gate_up" in own else ("down_proj",)
            for number, expert in enumerate(tensor):
                for column, matrix in zip(columns, expert.chunk(len(columns)), strict=True):
                    found[f"model.layers.{last}.mlp.experts.{number}.{column}.weight"] = matrix.clone()
        else:
            place = rest if part == "mtp_block" else own.replace("post_norm", "shared_head.norm")
            found[f"model.layers.{last}.{place}"] = tensor.clone()
    return found


@pytest.fixture(scope="module", params=["hybrid", "latent"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a random target with an MTP layer, and its name here."""
    kind, sizes = sizes_of(request.param)
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**sizes, "initializer_range": 0.3})
    model = AutoModelForCausalLM.from_config(config).eval()
    config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    mtp = MtpModel(model, 1)
    for weight in mtp.layers.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.3)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | published(request.param, mtp, model.config.num_hidden_layers), file, {"format": "pt"})
    # Published files of Qwen3.5 name neither key, those of DeepSeek-V3 the first.
    edit_config(folder, lambda config: [config.pop(key, None) for key in ("num_mtp_layers", "mtp_layer_types")])
    return folder, request.param


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("tiny", [name], indirect=True)


def head_of(folder: Path, frozen: FrozenTarget | None = None) -> MtpHead:
    frozen = frozen or FrozenTarget.from_folder(folder, torch.float32)
    head = new_head(MtpSection(kind="mtp"), frozen, DraftVocab.full(97), seed=0).eval().requires_grad_(False)
    assert isinstance(head, MtpHead)
    return head


def in_transformers(folder: Path, name: str) -> tuple[PreTrainedModel, MtpModel]:
    config = AutoConfig.from_pretrained(folder)
    config.num_mtp_layers = 1
    if name != "latent":
        config.mtp_layer_types = ["full_attention"]
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    if name == "latent":  # the class knows the layer's number in the published model alone
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{config.num_hidden_layers}\..*"]
    return model, MtpModel.from_pretrained(model).eval()


@torch.no_grad()
def test_hidden_states_are_those_of_transformers(tiny: tuple[Path, str]) -> None:
    model, mtp = in_transformers(*tiny)
    head, tokens = head_of(tiny[0]), torch.randint(97, (2, 9))
    last = model(tokens, output_hidden_states=True).hidden_states[-1][:, :-1]
    given: dict[str, Any] = {"position_ids": torch.arange(1, 9).expand(2, -1), "mtp_cache": MtpCache(config=mtp.config)}
    wanted = mtp.forward_layer(0, last, input_ids=tokens[:, 1:], **given)
    found = head(last, tokens[:, 1:], torch.arange(8))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(head.logits(found), mtp._project_to_logits(wanted))


def test_tensors_keep_their_names_and_bits(tiny: tuple[Path, str], tmp_path: Path) -> None:
    head, in_file = head_of(tiny[0]), load_file(tiny[0] / "model.safetensors")
    own = head.engine_tensors()
    assert same_bits(own, {name: in_file[name] for name in own})
    outside = in_file.keys() - own.keys()
    assert not [name for name in outside if "mtp" in name or f"layers.{head.target.num_layers}." in name]
    loaded = TargetModel.load(TargetSection(path=str(tiny[0]), dtype="float32"), ())  # as a report loads it
    assert same_bits(head_of(tiny[0], loaded.frozen).state_dict(), head.state_dict())
    save_head(head, tmp_path / "head")
    back = load_head_for(tmp_path / "head", FrozenTarget.from_folder(tiny[0], torch.float32))
    assert back.shape == head.shape
    assert same_bits(back.state_dict(), head.state_dict())


@torch.no_grad()
def test_an_unroll_sees_what_drafting_sees(tiny: tuple[Path, str]) -> None:
    head, features, tokens = head_of(tiny[0]), torch.randn(1, 8, 32), torch.randint(97, (1, 9))
    cache, index = UnrollCache(), 4
    first = head(features, tokens[:, :8], torch.arange(8), cache=cache)
    second = head(head.feedback(first, features), tokens[:, 1:], 1 + torch.arange(8), cache=cache, level=1)
    drafted = torch.cat([features[:, : index + 1], first[:, index : index + 1]], dim=1)
    found = head(drafted, tokens[:, : index + 2], torch.arange(index + 2))
    torch.testing.assert_close(found[:, -1], second[:, index])


def test_texts_are_those_of_plain_decoding(tiny: tuple[Path, str]) -> None:
    model, _ = in_transformers(*tiny)
    target = TargetModel(model, (model.config.num_hidden_layers,))
    head = head_of(tiny[0])
    requests = [Request([5, 7, 11, seed], 6) for seed in range(2)]
    plain = [text.tokens for text in generate_batch(target, requests, None, 2)]
    growth = Dynamic(3, 2, 6) if target.passes.verifies_trees else Dynamic.chain(3)
    found = generate_batch(target, requests, head_drafter(head, growth), 2)
    assert [text.tokens for text in found] == plain


def test_an_export_is_the_target_with_the_tuned_layer(tiny: tuple[Path, str], tmp_path: Path) -> None:
    head, (folder, name) = head_of(tiny[0]), tiny
    for tensor in head.state_dict().values():
        tensor += 0.1
    out = exported(head, tmp_path, folder, "vllm")
    assert read_config(out) == read_config(folder)
    _, mtp = in_transformers(out, name)
    assert same_bits(mtp.layers[0].state_dict(), head.layer.state_dict())
    before, after = read_tensors(folder), read_tensors(out)
    assert before.keys() == after.keys()
    assert {key for key in before if not torch.equal(before[key], after[key])} == head.engine_tensors().keys()
    assert "vllm serve" in (out / "README.md").read_text()
    convert(out, tmp_path / "back", str(folder))
    assert same_bits(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "head"))


@of("hybrid")
def test_a_bfloat16_layer_was_saved_in_float32(tiny: tuple[Path, str], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny[0], tmp_path / "target")
    edit_tensors(folder, lambda tensors: tensors.update({name: each.bfloat16() for name, each in tensors.items()}))
    convert(folder, tmp_path / "head", str(folder))
    assert {tensor.dtype for tensor in read_tensors(tmp_path / "head").values()} == {torch.bfloat16}


@of("hybrid")
def test_the_doctor_knows_an_mtp_head(tiny: tuple[Path, str], tmp_path: Path) -> None:
    save_head(head_of(tiny[0]), tmp_path / "head")
    (tmp_path / "samples.jsonl").write_text(json.dumps({"tokens": [5, 7, 11]}))
    options = Options(samples=tmp_path / "samples.jsonl", new_tokens=8, depth=2)
    found = diagnose(tmp_path / "head", str(tiny[0]), None, options)
    assert len(found.trained) == 2
    assert not {each.category for each in found.findings} - {"accuracy"}  # no guess of random weights is right


def quantised(source: Path, folder: Path, dtype: torch.dtype, suffix: str) -> Path:
    """The same target with the projections of all layers in 8 bits, in blocks of 16 or with a scale for each row."""
    folder.mkdir()
    found, config = read_tensors(source), read_config(source)
    for name in [name for name in found if name.endswith(("_proj.weight", "_mqa.weight", "mtp.fc.weight"))]:
        rows, columns = found[name].shape
        like = torch.ones(-(-rows // 16), -(-columns // 16)) if suffix == "_scale_inv" else torch.ones(rows, 1)
        old = like + torch.rand_like(like)
        found[name], found[name + suffix] = requantised(found[name], torch.zeros(1).to(dtype), old)
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    if suffix == "_scale_inv":
        how = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    else:
        how = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": how}))
    return folder


@pytest.mark.parametrize(
    ("tiny", "dtype", "suffix"),
    [("latent", torch.float8_e4m3fn, "_scale_inv"), ("hybrid", torch.int8, "_scale")],
    ids=["fp8", "int8"],
    indirect=["tiny"],
)
def test_a_layer_stored_in_8_bits_was_refused_at_export(tiny, tmp_path, dtype, suffix):
    """Its new weights get new scales. The head's own folder has dense weights, so no quantization_config."""
    folder = quantised(tiny[0], tmp_path / "target", dtype, suffix)
    head, before = head_of(folder), read_tensors(folder)
    untuned = exported(head, tmp_path / "untuned", folder, "vllm")
    assert same_bits(read_tensors(untuned), before)
    for tensor in head.state_dict().values():
        tensor += 0.1 * torch.randn_like(tensor)
    out = exported(head, tmp_path, folder, "sglang")
    assert read_config(out) == read_config(folder)
    assert "quantization_config" not in read_config(tmp_path / "head")
    after, own = read_tensors(out), head.engine_tensors().keys()
    assert {name: tensor.dtype for name, tensor in after.items()} == {name: old.dtype for name, old in before.items()}
    assert {name.removesuffix(suffix) for name in before if not torch.equal(before[name], after[name])} == own
    back = head_of(out).state_dict()
    for name, tensor in head.state_dict().items():
        torch.testing.assert_close(back[name], tensor, rtol=0, atol=0.05 * float(tensor.abs().max()))


@of("latent")
def test_weights_that_transformers_cannot_convert_ended_with_runtime_error(tiny, tmp_path):
    """A matrix that is no multiple of its blocks, such as DeepSeek-V3's of 576 rows, on a CPU."""
    folder = quantised(tiny[0], tmp_path / "target", torch.float8_e4m3fn, "_scale_inv")
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(3, 3)}))
    with pytest.raises(ValueError, match="transformers cannot convert its weights"):
        TargetModel.load(TargetSection(path=str(folder), dtype="float32"), ())


@of("hybrid")
def test_files_without_the_layer_become_links(tiny: tuple[Path, str], tmp_path: Path) -> None:
    shards, head = tmp_path / "shards", head_of(tiny[0])
    shards.mkdir()
    tensors, own = read_tensors(tiny[0]), head.engine_tensors().keys()
    files = {name: "b.safetensors" if name in own else "a.safetensors" for name in tensors}
    for file in ("a.safetensors", "b.safetensors"):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, shards / file)
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    shutil.copy(tiny[0] / "config.json", shards)
    out = exported(head_of(shards), tmp_path, shards, "sglang")
    assert (out / "a.safetensors").is_symlink()
    assert not (out / "b.safetensors").is_symlink()
    assert not (out / "model.safetensors").exists()


@of("hybrid")
@pytest.mark.parametrize(
    ("edit", "types", "said"),
    [
        (lambda whole: {name: own for name, own in whole.items() if "mtp" not in name}, None, "hold no MTP layer"),
        (lambda whole: whole | {name.replace("s.0", "s.1"): own + 0 for name, own in whole.items()}, None, "2 MTP"),
        (lambda whole: {name: own for name, own in whole.items() if name != "mtp.fc.weight"}, None, "eh_proj"),
        (dict, ["sliding_attention"], "full attention, is allowed"),
    ],
)
def test_other_layers_are_refused(tmp_path, tiny, edit, types, said):
    config = read_config(tiny[0]) | ({"mtp_layer_types": types} if types else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(edit(read_tensors(tiny[0])), tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=said):
        head_of(tmp_path)

"""Laws of heads.formats.convert: heads survive a round trip bit for bit, guesses are printed, the rest is refused."""

import json
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exported import EVERY_HEAD, LIMITED, exported, files_in_memory, logits, read_config, read_tensors, same_bits
from safetensors.torch import save_file

from headstart.heads.files import HeadFiles
from headstart.heads.formats.convert import convert
from headstart.heads.formats.published import import_head
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import head_config, load_head_for
from headstart.heads.kinds.eagle3 import TAPS

MakeHead = Callable[..., Any]
Edit = Callable[[dict[str, Any]], object]


def published(head: Any, name: str) -> HeadFiles:
    files = files_in_memory(head, name)
    del files.config["headstart"]
    return files


def medusa_authors_names(tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors of Medusa heads of two layers under the names of the authors' files."""
    renamed = {}
    for name, tensor in tensors.items():
        _, head, *layer = name.split(".")
        renamed[f"{head}.2.weight" if name.startswith("lm_heads.") else f"{head}.{layer[1]}.linear.{layer[2]}"] = tensor
    return renamed


ROUND_TRIPS = {  # formats -> heads
    ("native", "vllm", "speculators"): ["eagle3", "limited", "dspark", "dspark limited", "dflash"],
    ("vllm", "speculators"): ["3.1", "taps", "five taps", "norm before fc"],
    ("native", "vllm"): ["peagle", "eagle1", "jetspec", "medusa", "medusa layers"],
    ("vllm",): ["narrow", "peagle limited"],
    ("native",): ["medusa limited"],
}
PAIRS = [(kind, name) for names, kinds in ROUND_TRIPS.items() for kind in kinds for name in names]


@pytest.mark.each_value
@pytest.mark.parametrize("ours", [True, False], ids=["our head", "published head"])
@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_a_head_comes_back_from_every_format_bit_for_bit(make_head, frozen, kind, name, ours):
    head = make_head(**EVERY_HEAD[kind])
    files = files_in_memory(head, name) if ours else published(head, name)
    back, _ = import_head(files, frozen)
    assert head_config(back) == head_config(head)
    assert same_bits(back.engine_tensors(), head.engine_tensors())
    assert same_bits(files_in_memory(back, name).tensors, files_in_memory(head, name).tensors)


def test_a_head_trained_with_another_rotary_base_keeps_it(make_head, make_model, frozen, tmp_path):
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
    assert "norm_before_residual, norm_before_fc, fc_norm, norm_output: missing, so false" in inferred
    loaded = load_head_for(tmp_path / "back", FrozenTarget.from_folder(target, torch.float32))
    assert torch.equal(logits(loaded), logits(head))
    folder = exported(loaded, tmp_path / "again", target, "vllm")
    assert read_config(folder)["rope_theta"] == 10000
    assert read_config(folder)["rms_norm_eps"] == 1e-6
    with pytest.raises(ValueError, match="rope: head"):
        load_head_for(tmp_path / "back", frozen)  # converted for the other target


@pytest.mark.parametrize(
    ("key", "missing", "said"),
    [
        (TAPS, "t2d", "taps: hidden_states [1, 3, 6], as eagle_config counts layer outputs [0, 2, 5]"),  # NVIDIA's
        ("eagle_config", "d2t", "d2t: from t2d"),
    ],
)
def test_what_a_published_head_leaves_out_is_inferred(make_head, frozen, key, missing, said):
    head = make_head(taps=(1, 3, 6), vocab=LIMITED)
    files = published(head, "vllm")
    del files.config[key], files.tensors[missing]
    back, inferred = import_head(files, frozen)
    assert said in inferred
    assert torch.equal(logits(back), logits(head))


def test_a_speculators_head_with_its_norm_before_the_residual_is_converted(make_head, frozen):
    head = make_head(norm_before_residual=True, vocab=LIMITED)
    files = published(head, "speculators")
    files.tensors["embed_tokens.weight"] = frozen.embedding
    files.tensors["verifier_norm.weight"] = torch.ones(32)
    back, inferred = import_head(files, frozen)
    assert "verifier_norm.weight: not used in drafting, left out" in inferred
    assert "embed_tokens.weight: a copy of the target's, left out" in inferred
    assert torch.equal(logits(back), logits(head))
    assert not torch.equal(logits(back), logits(make_head(vocab=LIMITED)))


def test_prefixed_names_and_shards_are_read_and_a_broken_index_is_named(head, export_as, target_folder, tmp_path):
    folder = export_as(head, "vllm")
    tensors = {f"model.{name}" if name != "lm_head.weight" else name: t for name, t in read_tensors(folder).items()}
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for part in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == part}, folder / part)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert "names: the prefix `model.` was removed" in convert(folder, tmp_path / "back", str(target_folder))
    assert same_bits(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "head"))
    for content in ("", '{"weight_map": 3}', '{"weight_map": {"fc.weight": "gone"}}'):
        index.write_text(content)
        with pytest.raises(ValueError, match=r"index\.json names no shards|gone cannot be read"):
            convert(folder, tmp_path / "again", str(target_folder))


def damaged(tensors: dict[str, Any]) -> None:
    del tensors["layers.0.hidden_norm.weight"], tensors["norm.weight"]
    tensors["layers.0.mlp.up_proj.weight"] = torch.ones(40, 31)
    tensors["layers.1.mlp.up_proj.weight"] = torch.ones(40, 32)


def unlike_ours(config: dict[str, Any]) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4}
    config.update(hidden_act="gelu", num_hidden_layers=2, layer_types=["sliding_attention"], rope_parameters=rope)
    config.update({TAPS: [2, 3, 4], "eagle_config": {TAPS: [2, 3, 4], "parallel_draft_step": 4}})


def ambiguous(config: dict[str, Any]) -> None:
    del config["norm_before_residual"], config["transformer_layer_config"]["hidden_size"]
    config.update(speculators_model_type="mtp", pard_token=5)


NAMED = """
midlayer.hidden_norm.weight: missing | norm.weight: missing | layers.1.mlp.up_proj.weight: [40, 32], no such tensor
    | midlayer.mlp.up_proj.weight: [40, 31], shape [40, 32] is required | exactly the tensors that config.json
    describes are allowed: copy or export the head again
hidden_act 'gelu' | norm.weight: missing, shape [32] is required | extra: [2], no such tensor is allowed
hidden_act 'gelu': only 'silu' is allowed | num_hidden_layers: 2 in config.json | parallel_draft_step 4
    | layer_types with sliding_attention | rope_type 'longrope' | eagle_config's [2, 3, 4] name different
norm_before_residual: missing | speculators_model_type 'mtp' | a P-EAGLE head, which has both | hidden_size: missing
lm_heads.0.weight | a matrix is required
""".replace("\n    ", " ")
REFUSED: dict[str, tuple[str, Edit, Edit]] = {  # format, edits of config.json and tensors
    "missing, misshapen and unknown tensors": ("speculators", dict, damaged),
    "tensors of a head that is refused for its config.json": (
        "vllm",
        lambda config: config.update(hidden_act="gelu"),
        lambda tensors: [tensors.pop("norm.weight"), tensors.update(extra=torch.ones(2))],
    ),
    "everything that headstart cannot represent": ("vllm", unlike_ours, dict),
    "ambiguous and other kinds": ("speculators", ambiguous, dict),
    "the first lm_head of Medusa is missing": ("medusa", dict, lambda tensors: tensors.pop("lm_heads.0.weight")),
}


@pytest.mark.parametrize(("symptom", "parts"), [*zip(REFUSED, NAMED.strip().splitlines(), strict=True)])
def test_everything_wrong_with_a_head_is_named_at_once(make_head, frozen, symptom, parts):
    name, edit_config, edit_tensors = REFUSED[symptom]
    files = published(make_head("medusa" if name == "medusa" else "eagle3"), name.replace("medusa", "vllm"))
    edit_config(files.config)
    edit_tensors(files.tensors)
    with pytest.raises(ValueError, match=str(files.folder)) as error:
        import_head(files, frozen)
    assert not [part for part in parts.split(" | ") if part not in str(error.value)], str(error.value)


def test_published_medusa_heads_are_converted_even_if_their_config_is_wrong(make_head, target_folder, frozen, tmp_path):
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


class Danger:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


@pytest.mark.parametrize("content", [{"fc.weight": Danger()}, [1, 2], {"fc.weight": 3}], ids=["code", "list", "number"])
def test_a_pickle_of_more_than_tensors_is_refused_and_never_executed(target_folder, tmp_path, content, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    torch.save(content, tmp_path / "medusa_lm_head.pt", pickle_module=pickle)
    with pytest.raises(ValueError, match=r"medusa_lm_head\.pt is refused.*get .*safetensors"):
        convert(tmp_path, tmp_path / "back", str(target_folder))
    assert not (tmp_path / "executed").exists()

"""Table of bad heads: damaged files, heads of another target, and what export, convert, lint, doctor and report say."""

import json
import pickle
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
import yaml
from bad_inputs import Outcome, Says, assert_raises, assert_refused, assert_told, table, type_command
from exported import LIMITED, edit_config, edit_tensors
from safetensors.torch import load_file, save_file
from tiny_run import build_target, build_tokenizer, recipe_values, write_prompts
from torch import Tensor

from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import load_head_for, new_head, save_head
from headstart.heads.vocab import DraftVocab
from headstart.inference.targets.loading import pick_device
from headstart.recipes.schema_heads import Eagle3Section

MakeHead = Callable[..., Any]
Tensors = dict[str, Tensor]
Config = dict[str, Any]
Edit = Callable[[Path], object]  # damages a copy of the head
Type = Callable[..., Outcome]

UP, NAN = "midlayer.mlp.up_proj.weight", float("nan")


@pytest.fixture(autouse=True)
def _as_in_production(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Users have no shape checks, which would refuse some of these files before our code does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory, make_head: MakeHead, frozen: FrozenTarget, target_folder: Path
) -> Path:
    """A folder with a target, an EAGLE-3 head of six tokens, a Medusa head, prompts and a recipe."""
    folder = tmp_path_factory.mktemp("heads")
    build_target(folder / "whole")  # with a tokenizer of its own; that of the other target is too large for it
    shutil.copytree(target_folder, folder / "target")
    build_tokenizer().save_pretrained(folder / "target")
    save_head(make_head(vocab=LIMITED), folder / "head")
    save_head(make_head("medusa", vocab=LIMITED), folder / "medusa")
    save_head(make_head("block", markov_rank=6, vocab=LIMITED, mask_token_id=95), folder / "block")
    other = FrozenTarget.from_folder(folder / "whole", torch.float32)
    foreign = new_head(Eagle3Section(kind="eagle3"), other, DraftVocab.full(other.config.vocab_size), 0)
    save_head(foreign, folder / "foreign")
    write_prompts(folder / "prompts.jsonl", count=14, first=0)
    write_prompts(folder / "heldout.jsonl", count=5, first=100)
    (folder / "samples.jsonl").write_text('{"tokens": [5, 7, 9]}\n')
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe_values(folder)))
    return folder


@pytest.fixture
def copied(place: Path, tmp_path: Path) -> Callable[..., Path]:
    """copied(edit, source="head", name="damaged"): a damaged copy of a head."""

    def copy(edit: Edit, source: str = "head", name: str = "damaged") -> Path:
        shutil.copytree(place / source, tmp_path / name)
        edit(tmp_path / name)
        return tmp_path / name

    return copy


@pytest.fixture
def type_in(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], Outcome]:
    """type_in(line): run `headstart LINE`, in which {place} and {tmp} stand for the folders of the test."""

    def run(line: str) -> Outcome:
        arguments = [word.format(place=place, tmp=tmp_path) for word in shlex.split(line)]
        return type_command(arguments, monkeypatch, capsys)

    return run


def config(edit: Callable[[Config], object]) -> Edit:
    return lambda folder: edit_config(folder, edit)


def own(**keys: Any) -> Edit:
    """Change keys of our own section of config.json."""
    return config(lambda found: found["headstart"].update(keys))


def tensors(edit: Callable[[Tensors], object]) -> Edit:
    def damage(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        edit(found)
        save_file({name: tensor.contiguous().clone() for name, tensor in found.items()}, folder / "model.safetensors")

    return damage


def put(name: str, change: Callable[[Tensor], Tensor]) -> Edit:
    return tensors(lambda found: found.update({name: change(found[name])}))


def write(name: str, content: bytes | str) -> Edit:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def with_value(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed.view(-1)[0] = value
        return changed

    return change


def cut(size: int) -> Edit:
    return lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:size])


def pickled(name: str, content: object) -> Edit:
    def replace(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(pickle.dumps(content))

    return replace


def sharded(index: str) -> Edit:
    """Replace the weights by an index of shards alone."""

    def replace(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(index)

    return replace


def linked(name: str) -> Edit:
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to("/nowhere/at/all")

    return replace


def emptied(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def replaced_by(source: str) -> Edit:
    """Put another folder beside the damaged one in its place."""

    def replace(folder: Path) -> None:
        shutil.rmtree(folder)
        shutil.copytree(folder.parent / source, folder)

    return replace


# Damage to a head's folder, and what loading it says.
DAMAGED: dict[str, tuple[Edit, str]] = {
    "a tensor is missing": (
        tensors(lambda found: found.pop(UP)),
        Says("model.safetensors", f"{UP} is missing", "exactly the tensors", "copy or export the head again"),
    ),
    "a tensor too many": (
        tensors(lambda found: found.update(extra=torch.ones(2))),
        Says("model.safetensors", "extra is unknown", "exactly the tensors", "copy or export the head again"),
    ),
    "a tensor of another shape": (
        put(UP, lambda tensor: tensor[:5]),
        Says(UP, "is [5, 32]", "should be [40, 32]", "copy or export the head again"),
    ),
    "a transposed projection": (
        put("fc.weight", lambda tensor: tensor.T),
        Says("fc.weight", "is [96, 32]", "should be [32, 96]", "copy or export the head again"),
    ),
    "a weight of whole numbers": (
        put(UP, lambda tensor: tensor.int()),
        Says(UP, "is int32", "floating point of 16 bits or more", "copy or export the head again"),
    ),
    "a weight of bools": (
        put(UP, lambda tensor: tensor.bool()),
        Says(UP, "is bool", "floating point", "export the head"),
    ),
    "a weight of 8 bits": (
        put(UP, lambda tensor: tensor.to(torch.float8_e4m3fn)),
        Says(UP, "is float8_e4m3fn", "16 bits or more", "copy or export the head again"),
    ),
    "a weight is NaN": (
        put(UP, with_value(NAN)),
        Says(UP, "NaN or infinity", "only finite numbers", "copy the head again, or train it again"),
    ),
    "an infinite lm_head": (
        put("lm_head.weight", with_value(float("inf"))),
        Says("lm_head.weight", "NaN or infinity", "only finite numbers", "train it again"),
    ),
    "a norm of NaN": (
        put("norm.weight", with_value(NAN)),
        Says("norm.weight", "NaN", "only finite numbers", "train it"),
    ),
    "weights cut short": (
        cut(5000),
        Says("model.safetensors", "cannot be read", "a whole safetensors file", "copy or download the head again"),
    ),
    "weights of no bytes": (
        cut(0),
        Says("model.safetensors", "cannot be read", "a whole safetensors file", "copy or download the head"),
    ),
    "a pointer of git lfs": (
        write("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 1\n"),
        Says("model.safetensors", "cannot be read", "a whole safetensors file", "copy or download the head again"),
    ),
    "no tensors in the file": (
        tensors(lambda found: found.clear()),
        Says("model.safetensors", "fc.weight is missing", "exactly the tensors", "copy or export the head again"),
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        Says("model.safetensors", "No such file", "a whole safetensors file", "copy or download the head again"),
    ),
    "weights are a link to nowhere": (
        linked("model.safetensors"),
        Says("model.safetensors", "cannot be read", "a whole safetensors file", "copy or download the head again"),
    ),
    "a pickle in place of safetensors": (
        pickled("pytorch_model.bin", {}),
        Says("pytorch_model.bin", "holds its weights in", "only model.safetensors is allowed", "headstart convert "),
    ),
    "no config.json": (
        lambda folder: (folder / "config.json").unlink(),
        Says("damaged", "no config.json", "holds no head", "headstart train RECIPE"),
    ),
    "an empty folder": (emptied, Says("damaged", "no config.json", "holds no head", "headstart train RECIPE")),
    "config.json is a link to nowhere": (
        linked("config.json"),
        Says("config.json", "a link to /nowhere/at/all", "a file is allowed", "headstart train RECIPE"),
    ),
    "config.json is no JSON": (write("config.json", "{,"), Says("config.json", "is not JSON", "", "copy or download")),
    "config.json is empty": (
        write("config.json", ""),
        Says("config.json", "is not JSON", "", "copy or download the head"),
    ),
    "config.json is binary": (write("config.json", b"\xff\xfe\0"), Says("config.json", "is not JSON", "", "copy or")),
    "config.json is a list": (
        write("config.json", "[]"),
        Says("config.json", "holds a list", "a JSON object is allowed", "copy or download the head again"),
    ),
    "config.json is null": (
        write("config.json", "null"),
        Says("config.json", "a NoneType", "a JSON object", "copy or"),
    ),
    "config.json has no keys": (
        write("config.json", "{}"),
        Says("hidden_size: head None", "vocab_size: head None", "of these sizes", "headstart convert"),
    ),
    "a searched tree with a chance too few": (
        own(calibration={"greedy": [1.0], "sampled": [1.0], "tree": {"paths": [[0], [1]], "chances": [0.5]}}),
        Says("calibration.tree", "2 paths have 1 chances", "one for each", "correct the file"),
    ),
    "a map of ids": (
        put("d2t", lambda d2t: d2t + torch.arange(len(d2t))),
        Says("d2t", "gives ids 0 to 101", "offsets: target id minus draft id", ""),
    ),
    "a map below zero": (put("d2t", lambda d2t: d2t - 5), Says("d2t", "gives ids -5 to 91", "below 97", "offsets")),
    "a map of floats": (
        put("d2t", lambda d2t: d2t.float()),
        Says("d2t", "float32 of shape [6]", "int64", "write the head's files again"),
    ),
    "a map of two axes": (
        put("d2t", lambda d2t: d2t[None]),
        Says("d2t", "shape [1, 6]", "int64 of shape", "write the head's files again"),
    ),
    "an empty map": (
        put("d2t", lambda d2t: d2t[:0]),
        Says("d2t", "shape [0]", "int64 of shape", "write the head's files"),
    ),
    "a map that was cut short": (put("d2t", lambda d2t: d2t[:3]), Says("d2t and t2d", "name different", "offsets", "")),
    "two maps that disagree": (
        put("t2d", lambda t2d: ~t2d),
        Says("d2t and t2d", "name different target tokens", "offsets", ""),
    ),
    "a lost map": (
        tensors(lambda found: found.pop("d2t")),
        Says("lm_head.weight", "is [6, 32]", "should be [97, 32]", "copy or export the head again"),
    ),
}


# A wrong config.json of a head: a key and its new value, or a key alone, which is then missing.
CONFIGS = table("""
a size is missing | intermediate_size
    config.json | lacks intermediate_size | the sizes of a Llama layer | add them
the vocabulary's size is missing | vocab_size
    vocab_size | head None, target 97 | of these sizes | train one for this target
a size as text | hidden_size = "32"
    hidden_size | '32' given | a valid integer | correct the file
a size as a float | num_attention_heads = 4.0
    num_attention_heads | 4.0 | a valid integer | correct the file
a negative size | num_key_value_heads = -2
    num_key_value_heads | -2 | greater than 0 | correct the file
no attention heads | num_attention_heads = 0
    num_attention_heads | 0 | greater than 0 | correct the file
a size that fills the memory | intermediate_size = 1000000000000
    intermediate_size | 1000000000000 | no tensor is longer than | correct the file
key heads that do not divide | num_key_value_heads = 3
    k_proj.weight | is [16, 64] | should be [24, 64] | copy or export the head again
an epsilon of NaN | rms_norm_eps = NaN
    rms_norm_eps | nan | greater than 0 | correct the file
a rotary base as text | rope_theta = "10000"
    rope_theta | '10000' | a valid number | correct the file
architectures as text | architectures = "LlamaForCausalLMEagle3"
    architectures | 'LlamaForCausalLMEagle3' | a valid list | correct the file
our section is a list | headstart = []
    headstart | [] given | a valid dictionary | correct the file
a kind that does not exist | headstart.kind = "mlp"
    config.json | a head of kind 'mlp' | only eagle1, eagle3, medusa, block, mtp | correct the kind
the kind of another head | headstart.kind = "medusa"
    blocks.0.layers.0.weight | is missing | every Medusa head | headstart convert
a negative tap | headstart.taps = [-2, 3, 4]
    headstart.taps.0 | -2 | greater than or equal to 0 | correct
a tap beyond the target | headstart.taps = [2, 3, 99]
    taps | head [2, 3, 99] | target hidden_states 0 to 7 | train one for this target
a tap too few | headstart.taps = [2, 3]
    fc.weight | is [32, 96] | should be [32, 64] | copy or export
taps as text | headstart.taps = "2,3,4"
    headstart.taps | '2,3,4' | a valid list | correct the file
no taps | headstart.taps = []
    headstart.taps | [] | at least 1 item | correct the file
a target's digest that is none | headstart.target = {"sha256": "unknown"}
    headstart.target.sha256 | 'unknown' | match pattern | correct the file
a target as text | headstart.target = "models/SmolLM2"
    headstart.target | 'models/SmolLM2' | a valid dictionary | correct the file
an empty calibration | headstart.calibration = {"greedy": [], "sampled": [1.0]}
    calibration.greedy | [] | at least 1 item | correct the file
a calibration of NaN | headstart.calibration = {"greedy": [NaN], "sampled": [1.0]}
    calibration.greedy.0 | nan | greater than 0 | correct the file
a searched tree without paths | headstart.calibration = {"greedy": [1.0], "sampled": [1.0], "tree": {"nodes": 1}}
    calibration.tree.paths | {'nodes': 1} | Field required | correct the file
a searched tree as a list | headstart.calibration = {"greedy": [1.0], "sampled": [1.0], "tree": [1]}
    calibration.tree | [1] | a valid dictionary | correct the file
a head of another width | target_hidden_size = 64
    hidden_size | head 64, target 32 | of these sizes | train one for this target
a head of another vocabulary | vocab_size = 32000
    vocab_size | head 32000, target 97 | of these sizes | train one for this target
a head of a deeper target | headstart.target_num_layers = 32
    headstart.target_num_layers | head 32, target 7 | of these sizes | train one for this target
a head of a target with another rope | headstart.target_rope = {"theta": 500000.0, "kind": "default", "scaling": {}}
    rope | 500000.0 | 'theta': 10000.0 | train one for this target
a whole model | num_hidden_layers = 7
    num_hidden_layers | 7 in config.json | a head has 1 layer | train one for this target
""")


def edited(edit: str) -> Edit:
    path, _, value = edit.partition(" = ")
    *sections, key = path.split(".")

    def change(found: Config) -> None:
        for section in sections:
            found = found[section]
        found.pop(key, None)
        if value:
            found[key] = json.loads(value)

    return config(change)


@pytest.mark.parametrize("symptom", [*DAMAGED, *CONFIGS])
def test_a_damaged_head_is_not_loaded(symptom: str, copied: Callable[..., Path], frozen: FrozenTarget) -> None:
    if symptom in DAMAGED:
        edit, says = DAMAGED[symptom]
        folder = copied(edit)
    else:
        [change], says = CONFIGS[symptom]
        folder = copied(edited(change))
    assert_raises(lambda: load_head_for(folder, frozen), says)


MEDUSA: dict[str, tuple[Edit, Says]] = {
    "a token map out of order": (
        put("token_map", lambda ids: ids.flip(0)),
        Says("token_map", "ids 0 to 96", "ascending target ids below 97", "headstart convert"),
    ),
    "a token map beyond the vocabulary": (
        put("token_map", lambda ids: ids + 90),
        Says("token_map", "ids 90 to 186", "ascending target ids below 97", "correct token_map"),
    ),
    "an empty token map": (
        put("token_map", lambda ids: ids[:0]),
        Says("token_map", "shape [0]", "int64 of shape", "write the head's files again"),
    ),
    "a token map of floats": (
        put("token_map", lambda ids: ids.float()),
        Says("token_map", "float32", "int64", "write the head's files again"),
    ),
    "a block is missing": (
        tensors(lambda found: found.pop("blocks.1.layers.0.weight")),
        Says("blocks.1.layers.0.weight", "is missing", "exactly the tensors", "copy or export the head again"),
    ),
    "the first block is missing": (
        tensors(lambda found: found.pop("blocks.0.layers.0.weight")),
        Says("blocks.0.layers.0.weight", "is missing", "exactly the tensors", "copy or export the head again"),
    ),
}


@pytest.mark.parametrize("symptom", MEDUSA)
def test_a_damaged_medusa_head_is_not_loaded(symptom: str, copied: Callable[..., Path], frozen: FrozenTarget) -> None:
    edit, says = MEDUSA[symptom]
    folder = copied(edit, "medusa")
    assert_raises(lambda: load_head_for(folder, frozen), says)


def without(*keys: str) -> Edit:
    """Remove keys of a block head's config.json, at the top level and in DFlash's section."""

    def forget(found: Config) -> None:
        for key in keys:
            found.pop(key, None)
            found["dflash_config"].pop(key, None)

    return config(forget)


def everywhere(key: str, value: Any) -> Edit:
    """Set a key of a block head's config.json wherever it is."""

    def change(found: Config) -> None:
        found[key] = value
        if key in found["dflash_config"]:
            found["dflash_config"][key] = value

    return config(change)


BLOCK: dict[str, tuple[Edit, Says]] = {
    "no slot convention": (
        without("sample_from_anchor"),
        Says("config.json", "lacks sample_from_anchor (vLLM takes false", "a wrong one silently", "add what"),
    ),
    "no block size and no mask token": (
        without("block_size", "mask_token_id"),
        Says("lacks block_size (SGLang takes 16", "mask_token_id (SGLang takes", "costs", "add what the head was"),
    ),
    "a block size above what was trained": (
        everywhere("block_size", 5),
        Says("block_size", "5 given", "2 to the 4 slots that the head was trained with", "correct config.json"),
    ),
    "a mask token beyond the vocabulary": (
        everywhere("mask_token_id", 97),
        Says("mask_token_id", "97 given", "0 to the target's 96", "correct config.json"),
    ),
    "a mask token that is drafted": (
        everywhere("mask_token_id", 50),
        Says("mask_token_id", "50 given", "a token that the head does not draft", "correct mask_token_id or d2t"),
    ),
    "a Markov head with a state": (
        everywhere("markov_head_type", "rnn"),
        Says("markov_head_type", "'rnn' given", "only vanilla and gated", "choose another head"),
    ),
    "a layer type too few": (
        everywhere("layer_types", ["full_attention"]),
        Says("layer_types", "1 given", "2 is allowed", "correct config.json"),
    ),
    "sliding layers without a window": (
        everywhere("layer_types", ["sliding_attention"] * 2),
        Says("config.json", "lacks sliding_window", "the positions that", "add it"),
    ),
    "a block size that is text": (
        everywhere("block_size", "7"),
        Says("block_size", "'7' given", "valid integer", "correct the file"),
    ),
    "a smaller Markov rank than the tensors": (
        everywhere("markov_rank", 5),
        Says("markov_head.markov_w1.weight", "[97, 6]", "[97, 5]", "copy or export the head again"),
    ),
    "taps that the target lacks": (
        own(taps=[2, 9]),
        Says("taps", "[2, 9]", "hidden_states 0 to 7", "train one for this target"),
    ),
}


@pytest.mark.parametrize("symptom", BLOCK)
def test_a_damaged_block_head_is_not_loaded(symptom: str, copied: Callable[..., Path], frozen: FrozenTarget) -> None:
    edit, says = BLOCK[symptom]
    folder = copied(edit, "block")
    assert_raises(lambda: load_head_for(folder, frozen), says)


def nothing(folder: Path) -> None:
    """Damage nothing."""


def from_another_target(folder: Path) -> None:
    """Add a copy of an embedding that has nothing to do with the target's, as published heads carry one."""
    embedding = torch.randn(97, 32, generator=torch.Generator().manual_seed(9))
    edit_tensors(folder, lambda found: found.update({"embed_tokens.weight": embedding}))


def another_head(folder: Path) -> None:
    """Replace every weight, as in an export of another head."""
    generator = torch.Generator().manual_seed(9)

    def draw(found: Tensors) -> None:
        for name, tensor in found.items():
            if tensor.is_floating_point() and tensor.ndim == 2:
                found[name] = 0.3 * torch.randn(tensor.shape, generator=generator)

    edit_tensors(folder, draw)


CONVERT = "convert {tmp}/damaged {tmp}/out --target {place}/target"
LINT = "lint {tmp}/damaged --target {place}/target"
DOCTOR = "doctor {tmp}/damaged {place}/target --samples {place}/samples.jsonl --new-tokens 12 --depth 1"
SERVED = "doctor {place}/head {place}/target {tmp}/damaged --samples {place}/samples.jsonl --new-tokens 12 --depth 1"
EXPORT = "export {place}/recipe.yaml run_dir={tmp}/run decode.head={tmp}/damaged export.format=vllm"
PLAIN = "report {place}/recipe.yaml target.path={place}/whole report.prompts={tmp}/questions.jsonl"
REPORT = "report {place}/recipe.yaml"

# Damage to a head, the command that is then typed, and what it says; every one of them ends with an exit code above 0.
COMMANDS: dict[str, tuple[Edit, str, Says]] = {
    "convert: a weight is NaN": (
        put(UP, with_value(NAN)),
        CONVERT,
        Says(UP, "infinity or NaN", "only finite numbers are allowed", "correct the files"),
    ),
    "convert: a weight of 8 bits": (
        put(UP, lambda tensor: tensor.to(torch.float8_e4m3fn)),
        CONVERT,
        Says(UP, "float8_e4m3fn", "16 bits or more", "correct the files"),
    ),
    "convert: an lm_head of zeros": (
        put("lm_head.weight", torch.zeros_like),
        CONVERT,
        Says("lm_head.weight", "zeros only", "trained weights are required", "train or copy it again"),
    ),
    "convert: the embedding of another target": (
        from_another_target,
        CONVERT,
        Says("embed_tokens.weight", "differs from the target's by", "near the target's", "name the target"),
    ),
    "convert: a head of a deeper target": (
        own(target_num_layers=32),
        CONVERT,
        Says("headstart.target_num_layers", "32", "the target's 7", "trained for another target"),
    ),
    "convert: a head of another vocabulary": (
        config(lambda found: found.update(vocab_size=32000)),
        CONVERT,
        Says("vocab_size", "32000", "the target's 97 is allowed", "name that one"),
    ),
    "convert: a head for another target": (
        replaced_by("foreign"),
        CONVERT,
        Says("vocab_size", "300", "the target's 97 is allowed", "for another target, name that one"),
    ),
    "lint: a head for another target": (
        replaced_by("foreign"),
        LINT,
        Says("vocab_size", "300 found", "the target's 97 is allowed", ""),
    ),
    "doctor: a head for another target": (
        replaced_by("foreign"),
        DOCTOR,
        Says("vocab_size", "300", "the target's 97 is allowed", "correct the files"),
    ),
    "doctor: an export for another target": (
        replaced_by("foreign"),
        SERVED,
        Says(
            "files: EXPORT's weights do not fit", "vocab_size is 300", "the target's 97 is allowed", "fix: export again"
        ),
    ),
    "export: a head for another target": (
        replaced_by("foreign"),
        EXPORT,
        Says("vocab_size", "head 300, target 97", "of these sizes is allowed", "train one for this target"),
    ),
    "convert: the kind of another head": (
        own(kind="eagle1"),
        CONVERT,
        Says("headstart.kind", "'eagle1'", "'eagle3' is allowed", "correct the files"),
    ),
    "convert: a whole model": (
        replaced_by("target"),
        CONVERT,
        Says("damaged", "the layout of this draft head is unknown", "EAGLE-3", "give the folder of such a head"),
    ),
    "convert: no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        CONVERT,
        Says("damaged", "holds no weights", "model.safetensors", "copy or download the head again"),
    ),
    "convert: weights cut short": (
        cut(5000),
        CONVERT,
        Says("model.safetensors", "cannot be read", "", "copy or download"),
    ),
    "convert: a pickle that calls something": (
        pickled("pytorch_model.bin", Path.cwd),
        CONVERT,
        Says("pytorch_model.bin", "is refused", "more than tensors", "get the head as safetensors"),
    ),
    "convert: a pickle of a list": (
        pickled("pytorch_model.bin", [1, 2]),
        CONVERT,
        Says("pytorch_model.bin", "is refused", "", "get the head as safetensors"),
    ),
    "convert: an index without shards": (
        sharded("{}"),
        CONVERT,
        Says("model.safetensors.index.json", "names no shards", "", "copy or download the head again"),
    ),
    "convert: a shard is missing": (
        sharded(json.dumps({"weight_map": {"a": "b.safetensors"}})),
        CONVERT,
        Says("b.safetensors", "cannot be read", "", "copy or download the head again"),
    ),
    "convert: the output exists": (
        lambda folder: (folder.parent / "out").mkdir(),
        CONVERT,
        Says("OUT", "out exists already", "a new folder is allowed", "choose another, or remove this one"),
    ),
    "convert: the head does not exist": (
        nothing,
        "convert {tmp}/none {tmp}/out --target {place}/target",
        Says("none", "no config.json", "holds no head", "give the folder of a saved head"),
    ),
    "convert: the target does not exist": (
        nothing,
        "convert {tmp}/damaged {tmp}/out --target no/where",
        Says("--target", "'no/where'", "a folder with config.json", "or a hub name"),
    ),
    "convert: the head as the target": (
        nothing,
        "convert {tmp}/damaged {tmp}/out --target {place}/head",
        Says("head", "no embedding among its tensors", "looked for", "give the whole target"),
    ),
    "lint: a weight is NaN": (
        put(UP, with_value(NAN)),
        LINT,
        Says(UP, "'infinity or NaN' found", "only finite numbers are allowed", ""),
    ),
    "lint: a weight of whole numbers": (
        put(UP, lambda tensor: tensor.int()),
        LINT,
        Says(UP, "'int32' found", "16 bits or more is required", ""),
    ),
    "lint: an lm_head of zeros": (
        put("lm_head.weight", torch.zeros_like),
        LINT,
        Says("lm_head.weight", "'zeros only' found", "trained weights are required", "train or copy it again"),
    ),
    "lint: a head of a deeper target": (
        own(target_num_layers=32),
        LINT,
        Says("headstart.target_num_layers", "32 found", "the target's 7", "name that one"),
    ),
    "lint: a head of a target with another rope": (
        own(target_rope={"theta": 5e5}),
        LINT,
        Says("headstart.target_rope", "500000.0", "'theta': 10000.0", "trained for another target"),
    ),
    "lint: an empty map": (
        put("d2t", lambda d2t: d2t[:0]),
        LINT,
        Says("d2t", "[0] found", "shape [6] is required", ""),
    ),
    "lint: an engine that does not exist": (
        own(engines=["ollama"]),
        LINT,
        Says("layout", "ollama cannot read", "only vllm, sglang", ""),
    ),
    "lint: an engine that reads other layouts": (
        nothing,
        f"{LINT} --engine speculators",
        Says("layout", "speculators cannot read eagle3", "only vllm, sglang, tensorrt_llm, llama_cpp can", ""),
    ),
    "lint: config.json is a list": (
        write("config.json", "[]"),
        LINT,
        Says("config.json", "holds a list", "a JSON object is allowed", "copy or download the head again"),
    ),
    "lint: the target does not exist": (
        nothing,
        "lint {tmp}/damaged --target no/where",
        Says("--target", "'no/where'", "a folder with config.json", "or a hub name"),
    ),
    "doctor: a weight is NaN": (
        put(UP, with_value(NAN)),
        DOCTOR,
        Says(f"dtype: damaged: tensor {UP}", "infinity or NaN", "only finite numbers", "fix: correct the files"),
    ),
    "doctor: a weight of bools": (
        put(UP, lambda tensor: tensor.bool()),
        DOCTOR,
        Says(f"dtype: damaged: tensor {UP}", "bool", "16 bits or more", "fix: correct the files"),
    ),
    "doctor: no guess is right": (
        put("lm_head.weight", torch.zeros_like),
        DOCTOR,
        Says("accuracy: damaged", "0.000 of", "0.02 or more", "fix: name the target that it was trained for"),
    ),
    "doctor: a head of a deeper target": (
        own(target_num_layers=32),
        DOCTOR,
        Says("headstart.target_num_layers", "32", "the target's 7", "name that one"),
    ),
    "doctor: a size that fills the memory": (
        config(lambda found: found.update(intermediate_size=10**12)),
        DOCTOR,
        Says(UP, "[40, 32]", f"shape [{10**12}, 32] is required", "correct the files"),
    ),
    "doctor: an empty map": (
        put("d2t", lambda d2t: d2t[:0]),
        DOCTOR,
        Says("d2t", "[0]", "shape [6] is required", "correct the files"),
    ),
    "doctor: an export with NaN": (
        put(UP, with_value(NAN)),
        SERVED,
        Says(f"dtype: damaged: tensor {UP}", "infinity or NaN", "only finite numbers", "fix: correct the files"),
    ),
    "doctor: an export of another head": (
        another_head,
        SERVED,
        Says("files: EXPORT's ", "differs from HEAD's by", "HEAD's own weights", "fix: export HEAD again"),
    ),
    "doctor: an export of another kind": (
        replaced_by("medusa"),
        SERVED,
        Says("EXPORT", "do not fit", "HEAD's own weights", "fix: export again"),
    ),
    "doctor: an engine that reads other layouts": (
        nothing,
        f"{SERVED} --engine speculators",
        Says("layout", "eagle3", "speculators cannot read eagle3, only vllm", "fix:"),
    ),
    "doctor: samples that do not exist": (
        nothing,
        "doctor {tmp}/damaged {place}/target --samples {tmp}/none.jsonl",
        Says("--samples", "none.jsonl not found", "a JSONL file", "name a JSONL file"),
    ),
    "doctor: samples that are no JSON": (
        lambda folder: (folder.parent / "samples.jsonl").write_text("hello\n"),
        "doctor {tmp}/damaged {place}/target --samples {tmp}/samples.jsonl",
        Says("samples.jsonl line 1", "is not JSON", "", "fix or remove the line"),
    ),
    "doctor: samples without rows": (
        lambda folder: (folder.parent / "samples.jsonl").write_text("\n"),
        "doctor {tmp}/damaged {place}/target --samples {tmp}/samples.jsonl",
        Says("--samples", "is empty", "a row with tokens or prompt", "add at least one"),
    ),
    "doctor: samples in another vocabulary": (
        lambda folder: (folder.parent / "samples.jsonl").write_text('{"tokens": [5, 97]}\n'),
        "doctor {tmp}/damaged {place}/target --samples {tmp}/samples.jsonl",
        Says("samples.jsonl: row 1", "97", "0 to 96", "encode the text with TARGET's tokenizer"),
    ),
    "doctor: samples of words": (
        lambda folder: (folder.parent / "samples.jsonl").write_text('{"tokens": ["a"]}\n'),
        "doctor {tmp}/damaged {place}/target --samples {tmp}/samples.jsonl",
        Says("samples.jsonl: row 1", "'a'", "token ids 0 to 96", "give it as prompt"),
    ),
    "doctor: an empty sample": (
        lambda folder: (folder.parent / "samples.jsonl").write_text('{"tokens": []}\n'),
        "doctor {tmp}/damaged {place}/target --samples {tmp}/samples.jsonl",
        Says("samples.jsonl: row 1", "tokens are empty", "at least one token id", "leave the row out"),
    ),
    "doctor: more new tokens than positions": (
        nothing,
        "doctor {tmp}/damaged {place}/target --samples {place}/samples.jsonl --new-tokens 1000",
        Says("--new-tokens", "1000", "up to 253 new tokens", "lower --new-tokens"),
    ),
    "doctor: head and target the wrong way round": (
        nothing,
        "doctor {place}/target {tmp}/damaged",
        Says("damaged", "no embedding among its tensors", "looked for", "give the whole target"),
    ),
    "doctor: a depth beyond any head": (
        nothing,
        "doctor {tmp}/damaged {place}/target --depth 100000",
        Says("--depth", "100000", "1 to 64 is allowed", "lower it"),
    ),
    "doctor: the tokenizer of another model": (
        lambda folder: (folder.parent / "samples.jsonl").write_text('{"prompt": "the target writes"}\n'),
        "doctor {tmp}/damaged {place}/target --samples {tmp}/samples.jsonl",
        Says("samples.jsonl: row 1", "tokens hold", "0 to 96", "the tokenizer in TARGET is another model's"),
    ),
    "doctor: no depth": (
        nothing,
        "doctor {tmp}/damaged {place}/target --depth 0",
        Says("--depth", "0 given", "1 or more is allowed", ""),
    ),
    "doctor: a manifest that is no JSON": (
        lambda folder: (folder.parent / "manifest.json").write_text("hello"),
        f"{DOCTOR} --manifest {{tmp}}/manifest.json",
        Says("--manifest", "is not JSON", "manifest.json in a folder of features", "or harvest again"),
    ),
    "doctor: a manifest that does not exist": (
        nothing,
        f"{DOCTOR} --manifest {{tmp}}/manifest.json",
        Says("--manifest", "not found", "", "name the manifest.json"),
    ),
    "doctor: the target does not exist": (
        nothing,
        "doctor {tmp}/damaged no/where",
        Says("TARGET", "'no/where'", "a folder with config.json", "or a hub name"),
    ),
    "export: no head": (
        nothing,
        "export {place}/recipe.yaml",
        Says("run/head", "no config.json", "holds no head", "headstart train RECIPE"),
    ),
    "export: a weight is NaN": (
        put(UP, with_value(NAN)),
        EXPORT,
        Says(UP, "NaN or infinity", "only finite numbers are allowed", "train it again"),
    ),
    "export: config.json is no JSON": (
        write("config.json", "{"),
        EXPORT,
        Says("config.json", "is not JSON", "", "copy or download the head again"),
    ),
    "export: a number format that torch lacks": (
        config(lambda found: found.update(torch_dtype="float3")),
        EXPORT,
        Says("torch_dtype", "'float3'", "float32, bfloat16 or float16", "correct the file, or set export.dtype"),
    ),
    "export: the folder exists": (
        lambda folder: shutil.copytree(folder, folder.parent / "run/export/vllm"),
        EXPORT,
        Says("export/vllm", "exists already", "a new folder only", "rm -r"),
    ),
    "export: the folder is a file": (
        lambda folder: (folder.parent / "run").write_text("mine"),
        EXPORT,
        Says("run_dir", "run is a file", "a folder that exists or can be made is allowed", "choose another"),
    ),
    "report: no head, before it asks for prompts": (
        nothing,
        REPORT,
        Says("decode.head", "run/head holds no head", "a trained head's folder is required", "headstart train RECIPE"),
    ),
    "report: two heads are missing": (
        nothing,
        f"{REPORT} 'report.other_heads={{{{other: nowhere}}}}'",
        Says("report.other_heads.other", "nowhere holds no head", "a trained head's folder", "decode.head=FOLDER"),
    ),
    "report: a whole model as the head": (
        nothing,
        f"{REPORT} decode.head={{place}}/target",
        Says("num_hidden_layers", "7 in config.json", "a head has 1 layer", "train one for this target"),
    ),
    "report: the tokenizer of another model": (
        nothing,
        f"{PLAIN} target.path={{place}}/target 'report.baselines=[plain]'",
        Says("a prompt holds token id", "", "0 to 96 of the target", "the target's own tokenizer"),
    ),
    "report: more new tokens than positions": (
        nothing,
        f"{PLAIN} 'report.baselines=[plain]' decode.max_new_tokens=127",
        Says("decode.max_new_tokens", "127", "new tokens are allowed after this prompt", "lower decode.max_new_"),
    ),
    "report: a draft model that does not exist": (
        nothing,
        f"{PLAIN} 'report.baselines=[draft_model]' decode.draft_model=no/where",
        Says("decode.draft_model", "'no/where'", "a folder with config.json", "or a hub name"),
    ),
    "report: a head as the draft model": (
        nothing,
        f"{PLAIN} 'report.baselines=[draft_model]' decode.draft_model={{place}}/head",
        Says("head", "embed_tokens.weight is missing", "all tensors of a whole model", "give a model's folder"),
    ),
    "report: no prompts": (
        nothing,
        f"{REPORT} 'report.baselines=[plain]'",
        Says("heldout.jsonl", "is missing", "held-out prompts are required", "headstart prompts RECIPE"),
    ),
    "chat: no head": (
        nothing,
        "chat --target {place}/whole --head {place}/none",
        Says("--head", "none holds no head", "a trained head's folder is allowed", "headstart train RECIPE"),
    ),
    "chat: no head in the recipe's run": (
        nothing,
        "chat {place}/recipe.yaml",
        Says("decode.head", "run/head holds no head", "a trained head's folder", "decode.drafter=prompt_lookup"),
    ),
    "chat: the head of another target": (
        nothing,
        "chat --target {place}/whole --head {place}/head",
        Says("vocab_size", "head 97", "target 300", "train one for this target"),
    ),
    "chat: no such target": (
        nothing,
        "chat --target {place}/none --head {place}/foreign",
        Says("target", "none", "neither a local folder nor a model", "give a folder with config.json"),
    ),
    "chat: a recipe and a target": (
        nothing,
        "chat {place}/recipe.yaml --target {place}/whole",
        Says("--target", "whole given", "one of the two is allowed", "write target.path="),
    ),
    "chat: a wrong override": (
        nothing,
        "chat {place}/recipe.yaml decode.growth=bush",
        Says("decode.growth", "bush", "dynamic", ""),
    ),
    "chat: a negative temperature": (
        nothing,
        "chat --target {place}/whole --head {place}/foreign --temperature=-1",
        Says("temperature", "-1", "0 to 100", "leave it out"),
    ),
    "chat: a question longer than the target's positions": (
        nothing,
        "chat --target {place}/whole --head {place}/foreign --dtype float32 --prompt hello --max-new-tokens 128",
        Says("the question is", "tokens long", "are allowed", "lower --max-new-tokens"),
    ),
    "chat: no new tokens": (
        nothing,
        "chat --target {place}/whole --head {place}/foreign --dtype float32 --prompt hello --max-new-tokens 0",
        Says("--max-new-tokens", "0 given", "1 or more is allowed", "raise it"),
    ),
    "calibrate: no head": (
        nothing,
        "calibrate {place}/recipe.yaml",
        Says("decode.head", "run/head holds no head", "a trained head's folder is required", "headstart train RECIPE"),
    ),
}


@pytest.mark.parametrize("symptom", COMMANDS)
def test_a_command_tells_what_is_wrong(
    symptom: str, copied: Callable[..., Path], type_in: Callable[[str], Outcome], place: Path, tmp_path: Path
) -> None:
    edit, line, says = COMMANDS[symptom]
    (tmp_path / "questions.jsonl").write_text('{"text": "the target writes"}\n')
    for name in ("target", "medusa", "foreign"):
        (tmp_path / name).symlink_to(place / name)
    copied(edit)
    assert_refused(type_in(line), says)


TOLD: dict[str, tuple[Edit, str, Says]] = {
    "lint: nothing is found": (nothing, LINT, Says("damaged", "all is well", "vllm, sglang, tensorrt_llm", "")),
    "lint: no engine serves the head": (
        own(engines=[]),
        LINT,
        Says("damaged", "not checked", "no engine serves it", "--engine vllm"),
    ),
    "convert: a draft vocabulary of another size": (
        config(lambda found: found.update(draft_vocab_size=99)),
        CONVERT,
        Says("draft_vocab_size: 6", "config.json says 99", "the number of rows in lm_head", "next: headstart report"),
    ),
}


@pytest.mark.parametrize("symptom", TOLD)
def test_a_command_succeeds_and_says_what_it_did(
    symptom: str, copied: Callable[..., Path], type_in: Callable[[str], Outcome]
) -> None:
    edit, line, says = TOLD[symptom]
    copied(edit)
    assert_told(type_in(line), says)


@pytest.mark.parametrize("name", ["with a space", "it's", 'a "quote"', "$HOME", "semi;colon"])
def test_the_commands_of_an_export_quote_its_folder(
    name: str, place: Path, tmp_path: Path, type_in: Callable[[str], Outcome]
) -> None:
    out = tmp_path / name / "export/vllm"
    line = ["export", "{place}/recipe.yaml", "decode.head={place}/head", "export.format=vllm"]
    line.append(f"run_dir={tmp_path / name}")
    assert type_in(shlex.join(line)).code == 0
    readme = (out / "README.md").read_text()
    commands = [block.strip() for block in readme.split("```")[1::2]]
    served = next(shlex.split(block) for block in commands if block.startswith("vllm serve"))
    assert served[2] == str(place / "target")
    assert json.loads(served[-1])["model"] == str(out)
    python = next(block for block in commands if "from_folders" in block)
    assert arguments_of(python) == [str(place / "target"), str(out)]
    launched = next(shlex.split(block) for block in commands if "sglang" in block)
    assert str(out) in launched
    written = next(block for block in commands if "speculative_config" in block)
    answers = written.partition("<<'END'\n")[2].partition("\nEND")[0]
    assert yaml.safe_load(answers)["speculative_config"]["speculative_model"] == str(out)


def arguments_of(python: str) -> Sequence[str]:
    """The texts that the last call of a Python snippet is given."""
    found: list[str] = yaml.safe_load(f"[{python.rpartition('(')[2].rpartition(')')[0]}]")
    return found


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "cuda:", ""])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    assert_raises(lambda: pick_device(name), Says("target.device", repr(name), "is allowed", "cpu"))

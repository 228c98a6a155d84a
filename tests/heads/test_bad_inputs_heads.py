"""Table of bad heads: damaged files, heads of another target, and what export, convert, lint, doctor and report say."""

import json
import math
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from bad_inputs import Typed, assert_raises, assert_refused, assert_told, table
from exported import LIMITED, edit_config, edit_tensors
from test_block_files import drop
from tiny_run import build_target, build_tokenizer, recipe_values, write_prompts
from torch import Tensor

from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import load_head_for, new_head, save_head
from headstart.heads.vocab import DraftVocab
from headstart.recipes.schema_heads import Eagle3Section

pytestmark = pytest.mark.usefixtures("as_in_production")

Config = dict[str, Any]
Edit = Callable[[Path], object]  # damages a copy of the head
UP = "midlayer.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def place(tmp_path_factory, make_head, target_folder):
    folder = tmp_path_factory.mktemp("heads")
    build_target(folder / "whole")  # with a tokenizer of its own; that of the other target is too large for it
    shutil.copytree(target_folder, folder / "target")
    build_tokenizer().save_pretrained(folder / "target")
    for name, seed in (("head", 1), ("another", 2)):
        save_head(make_head(vocab=LIMITED, seed=seed), folder / name)
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
    def copy(edit: Edit, source: str = "head") -> Path:
        folder = shutil.copytree(place / source, tmp_path / "damaged")
        edit(folder)
        return folder

    return copy


def config(edit: Callable[[Config], object]) -> Edit:
    return lambda folder: edit_config(folder, edit)


def own(**keys: Any) -> Edit:
    return config(lambda found: found["headstart"].update(keys))


def put(name: str, change: Callable[[Tensor], Tensor]) -> Edit:
    return lambda folder: edit_tensors(folder, lambda found: found.update({name: change(found[name])}))


def beside(name: str, content: str) -> Edit:
    return lambda folder: (folder.parent / name).write_text(content)


def linked(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/nowhere/at/all")


def replaced_by(source: str) -> Edit:
    def replace(folder: Path) -> None:
        shutil.rmtree(folder)
        shutil.copytree(folder.parent / source, folder)

    return replace


def everywhere(key: str, value: Any) -> Edit:
    return config(lambda found: [part.update({key: value}) for part in (found, found["dflash_config"]) if key in part])


ONE_CHANCE = {"greedy": [1.0], "sampled": [1.0], "tree": {"paths": [[0], [1]], "chances": [0.5]}}
EDITS: dict[str, Edit] = {
    "nothing": lambda folder: None,
    "UP of 8 bits": put(UP, lambda tensor: tensor.to(torch.float8_e4m3fn)),
    "NaN": put(UP, lambda tensor: torch.full_like(tensor, math.nan)),
    "negated": put("lm_head.weight", torch.neg),
    "weights cut": lambda folder: os.truncate(folder / "model.safetensors", 5000),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "pickle": lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "config linked": linked,
    "config {}": lambda folder: (folder / "config.json").write_text("{}"),
    "one chance": own(calibration=ONE_CHANCE),
    "map of ids": put("d2t", lambda d2t: d2t + torch.arange(len(d2t))),
    "empty map": put("d2t", lambda d2t: d2t[:0]),
    "map cut": put("d2t", lambda d2t: d2t[:3]),
    "ids backwards": put("token_map", lambda ids: ids.flip(0)),
    "no convention": config(drop("sample_from_anchor")),
    "block_size 5": everywhere("block_size", 5),
    "mask 97": everywhere("mask_token_id", 97),
    "mask 50": everywhere("mask_token_id", 50),
    "sliding": everywhere("layer_types", ["sliding_attention"] * 2),
    "ollama": own(engines=["ollama"]),
    "no engines": own(engines=[]),
    "draft vocab 99": config(lambda found: found.update(draft_vocab_size=99)),
    "float3": config(lambda found: found.update(torch_dtype="float3")),
    # Published heads carry a copy of an embedding; this one has nothing to do with the target's.
    "other embedding": lambda folder: edit_tensors(
        folder, lambda found: found.update({"embed_tokens.weight": torch.randn(97, 32)})
    ),
    "another head": replaced_by("another"),
    "foreign": replaced_by("foreign"),
    "target": replaced_by("target"),
    "medusa": replaced_by("medusa"),
    "out exists": lambda folder: (folder.parent / "out").mkdir(),
    "run a file": beside("run", "mine"),
    "samples empty": beside("samples.jsonl", "\n"),
    "samples with 97": beside("samples.jsonl", '{"tokens": [5, 97]}\n'),
    "samples of texts": beside("samples.jsonl", '{"text": "def"}\n'),
    "samples of prompts": beside("samples.jsonl", '{"prompt": "the target writes"}\n'),
}

# A head, an edit of its folder, and what loading it says.
DAMAGED = table("""
a weight of 8 bits | head | UP of 8 bits => UP | is float8_e4m3fn | 16 bits or more | copy or export the head again
a weight is NaN | head | NaN => UP | NaN or infinity | only finite numbers | copy the head again, or train it again
weights cut short | head | weights cut => model.safetensors | cannot be read | a whole safetensors file
no weights | head | no weights => model.safetensors | No such file | a whole safetensors file
a pickle in place of safetensors | head | pickle => pytorch_model.bin | holds its weights in
no config.json | head | no config => damaged | no config.json | holds no head | headstart train RECIPE
config.json is a link to nowhere | head | config linked => config.json | a link to /nowhere/at/all | a file is allowed
config.json has no keys | head | config {} => hidden_size: head None | vocab_size: head None | of these sizes
a searched tree with a chance too few | head | one chance => calibration.tree | 2 paths have 1 chances | one for each
a map of ids | head | map of ids => d2t | gives ids 0 to 101 | offsets: target id minus draft id
an empty map | head | empty map => d2t | shape [0] | int64 of shape | write the head's files again
a map that was cut short | head | map cut => d2t and t2d | name different | offsets
a token map out of order | medusa | ids backwards => token_map | ids 0 to 96 | ascending target ids below 97
no slot convention | block | no convention => sample_from_anchor: None given | vLLM takes false
a block size above the trained one | block | block_size 5 => block_size | 5 given
a mask token beyond the vocabulary | block | mask 97 => mask_token_id | 97 given | 0 to the target's 96
a mask token that is drafted | block | mask 50 => mask_token_id | 50 given | a token that the head does not draft
sliding layers without a window | block | sliding => config.json | lacks sliding_window | the positions that | add it
""")


# A wrong config.json of a head: a key and its new value, or a key alone, which is then missing.
CONFIGS = table("""
a size is missing | intermediate_size => config.json | lacks intermediate_size | the sizes of a Llama layer | add them
a size as text | hidden_size = "32" => hidden_size | '32' given | a valid integer | correct the file
a size that filled the memory | intermediate_size = 1000000000000 => UP | shape [1000000000000, 32] is required
a kind that does not exist | headstart.kind = "mlp" => config.json | a head of kind 'mlp'
the kind of another head | headstart.kind = "medusa" => blocks.0.layers.0.weight | is missing | every Medusa head
a negative tap | headstart.taps = [-2, 3, 4] => headstart.taps.0 | -2 | greater than or equal to 0 | correct
a target's digest that is none | headstart.target = {"sha256": "unknown"} => headstart.target.sha256 | 'unknown'
a head of a target with another rope | headstart.target_rope = {"theta": 500000.0, "kind": "default", "scaling": {}}
    rope | 500000.0 | 'theta': 10000.0 | train one for this target
a whole model | num_hidden_layers = 7 => num_hidden_layers | 7 in config.json | a head has 1 layer
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
        [source, edit], facts = DAMAGED[symptom]
        folder = copied(EDITS[edit], source)
    else:
        [change], facts = CONFIGS[symptom]
        folder = copied(edited(change))
    assert_raises(lambda: load_head_for(folder, frozen), facts.replace("UP ", f"{UP} "))


FEW = "--samples {place}/samples.jsonl --new-tokens 12 --depth 1"
LINES = {
    "CONVERT": "convert {tmp}/damaged {tmp}/out --target {place}/target",
    "LINT": "lint {tmp}/damaged --target {place}/target",
    "DOCTOR": f"doctor {{tmp}}/damaged {{place}}/target {FEW}",
    "SERVED": f"doctor {{place}}/head {{place}}/target {{tmp}}/damaged {FEW}",
    "SAMPLES": "doctor {tmp}/damaged {place}/target --samples {tmp}/samples.jsonl",
    "EXPORT": "export {place}/recipe.yaml run_dir={tmp}/run decode.head={tmp}/damaged export.format=vllm",
    "PLAIN": "report {place}/recipe.yaml target.path={place}/whole report.prompts={tmp}/questions.jsonl",
    "REPORT": "report {place}/recipe.yaml",
    "CHAT": "chat --target {place}/whole",
}

# An edit of the head, the command that is then typed, and what it says; it succeeds if that is told, and fails if not.
COMMANDS = table("""
convert: a weight is NaN | NaN | CONVERT => UP | infinity or NaN | only finite numbers are allowed | correct the files
convert: the embedding of another target | other embedding | CONVERT => embed_tokens.weight
convert: a head for another target | foreign | CONVERT => vocab_size | 300 | the target's 97 is allowed
convert: a whole model | target | CONVERT => damaged | the layout of this draft head is unknown | EAGLE-3
convert: the output exists | out exists | CONVERT => OUT | out exists already | a new folder is allowed
convert: the target does not exist | nothing | convert {tmp}/damaged {tmp}/out --target no/where => --target
lint: an engine that does not exist | ollama | LINT => layout | ollama cannot read | only vllm, sglang
lint: an engine that reads other layouts | nothing | LINT --engine speculators => layout
doctor: a weight is NaN | NaN | DOCTOR => damaged cannot be used: tensor UP | infinity or NaN | only finite numbers
doctor: no guess is right | negated | DOCTOR => accuracy: damaged | 0.000 of | 0.02 or more
doctor: an export of another head | another head | SERVED => files: EXPORT's | differs from HEAD's by
doctor: an export of another kind | medusa | SERVED => EXPORT | do not fit | HEAD's own weights | fix: export again
doctor: a sample without tokens | samples of texts | SAMPLES => samples.jsonl: row 1 | ['text']
doctor: samples without rows | samples empty | SAMPLES => --samples | is empty | a row with tokens or prompt
doctor: samples in another vocabulary | samples with 97 | SAMPLES => samples.jsonl: row 1 | 97 | 0 to 96
doctor: the tokenizer of another model | samples of prompts | SAMPLES => samples.jsonl: row 1 | tokens | 0 to 96
doctor: more new tokens than positions | nothing | DOCTOR --new-tokens 1000 => --new-tokens | 1000
doctor: head and target the wrong way round | nothing | doctor {place}/target {tmp}/damaged => damaged
doctor: a depth beyond any head | nothing | DOCTOR --depth 100000 => --depth | 100000 | 1 to 64 is allowed | lower it
export: a number format that torch lacks | float3 | EXPORT => torch_dtype | 'float3' | float32, bfloat16 or float16
export: the folder is a file | run a file | EXPORT => run_dir | run is a file
report: two heads are missing | nothing | REPORT 'report.other_heads={{other: nowhere}}' => decode.head | holds no head
report: the tokenizer of another model | nothing | PLAIN target.path={place}/target 'report.baselines=[plain]'
    a prompt holds token id | 0 to 96 of the target | the target's own tokenizer
report: more new tokens than positions | nothing | PLAIN 'report.baselines=[plain]' decode.max_new_tokens=127
    decode.max_new_tokens | 127 | new tokens are allowed after this prompt | lower decode.max_new_
report: a head as the draft model | nothing | PLAIN 'report.baselines=[draft_model]' decode.draft_model={place}/head
    head | embed_tokens.weight is missing | all tensors of a model | give a model's folder
report: no prompts | nothing | REPORT 'report.baselines=[plain]' => heldout.jsonl | is missing
chat: no head in the recipe's run | nothing | chat {place}/recipe.yaml => decode.head | run/head holds no head
chat: a question longer than the target's positions | nothing | CHAT --dtype float32 --prompt hello --max-new-tokens 128
    the question is | tokens long | are allowed | lower --max-new-tokens
told by lint: nothing is wrong | nothing | LINT => damaged | all is well | vllm, sglang, tensorrt_llm
told by lint: no engine serves it | no engines | LINT => damaged | not checked | no engine serves it | --engine vllm
told by convert: a vocabulary of another size | draft vocab 99 | CONVERT => draft_vocab_size: 6 | config.json says 99
""")


@pytest.mark.parametrize("symptom", COMMANDS)
def test_a_command_tells_what_is_wrong(symptom, copied, typed, place, tmp_path):
    [edit, line], facts = COMMANDS[symptom]
    (tmp_path / "questions.jsonl").write_text('{"text": "the target writes"}\n')
    for name in ("target", "medusa", "foreign", "another"):
        (tmp_path / name).symlink_to(place / name)
    copied(EDITS[edit])
    check = assert_told if symptom.startswith("told") else assert_refused
    first, _, more = line.partition(" ")
    words = shlex.split(f"{LINES.get(first, first)} {more}")
    check(typed(*(word.format(place=place, tmp=tmp_path) for word in words)), facts.replace("UP ", f"{UP} "))


def test_the_commands_of_an_export_quote_its_folder(place: Path, tmp_path: Path, typed: Typed) -> None:
    run = tmp_path / """it's a "quote", $HOME; or not"""
    out, head = run / "export/vllm", place / "head"
    overrides = f"decode.head={head}", "export.format=vllm", f"run_dir={run}"
    assert typed("export", place / "recipe.yaml", *overrides).code == 0
    readme = (out / "README.md").read_text()
    commands = [block.strip() for block in readme.split("```")[1::2]]
    served = next(shlex.split(block) for block in commands if block.startswith("vllm serve"))
    assert served[2] == str(place / "target")
    assert json.loads(served[-1])["model"] == str(out)
    python = next(block for block in commands if "from_folders" in block)
    given = python.rpartition("(")[2].rpartition(")")[0]  # to the last call
    assert yaml.safe_load(f"[{given}]") == [str(place / "target"), str(out)]
    launched = next(shlex.split(block) for block in commands if "sglang" in block)
    assert str(out) in launched
    written = next(block for block in commands if "speculative_config" in block)
    answers = written.partition("<<'END'\n")[2].partition("\nEND")[0]
    assert yaml.safe_load(answers)["speculative_config"]["speculative_model"] == str(out)

"""The exact messages for mistakes on command lines, all in one place; for recipes, see tests/recipes."""

from pathlib import Path

import pytest
from bad_inputs import Typed, filled
from tiny_run import build_run

# What is typed after `headstart`, its words joined by " | ", and below it the message, without the place of a mistake.
SENTENCES = r"""
train | gone.yaml
    gone.yaml: No such file or directory; give the path of a recipe, such as recipes/tiny.yaml
train
    the following arguments are required: recipe, section.key=value; a recipe and then section.key=value are
    allowed; headstart train --help lists the fields
train | {recipe} | --fast
    unrecognized arguments: --fast; a recipe and then section.key=value are allowed; headstart train --help lists
    the fields
train | {recipe} | --device-memory | 8x
    argument --device-memory: 8x given, the memory of one device is allowed, such as 80GB, or of several, such as
    8x80GB; write one; a recipe and then section.key=value are allowed; headstart train --help lists the fields
train | {recipe} | --device-memory | 80GB
    argument --device-memory: it plans and does not train; write train.dry_run=true, or leave it out; a recipe and
    then section.key=value are allowed; headstart train --help lists the fields
train | {folder}/prompts.jsonl
    {folder}/prompts.jsonl: not YAML: line 2, column 1: expected '<document start>', but found '{'; fix the file
    there
harvest | {recipe} | --part | 0/4
    argument --part: 0/4 given, 1/N to N/N of any N are allowed; write one, such as 3/64; a recipe and then
    section.key=value are allowed; headstart harvest --help lists the fields
lint | {folder}/run/head
    the following arguments are required: --target
lint | {folder}/gone | --target | {folder}/target
    {folder}/gone holds no head (no config.json); train one with headstart train RECIPE, or give the folder of a
    saved head
doctor | {folder}/gone | {folder}/target | --count | 0
    argument --count: 0 given, 1 or more is allowed; correct it or leave it out
doctor | {folder}/gone
    HEAD and TARGET, or --bits TARGET alone, are required: give a head's folder and then its target's
store | verify | s3://bucket/features
    argument folder: s3://bucket/features given, a folder on this machine is allowed; copy the store here first:
    training checks what it reads by URL
store | verify | {folder}/gone
    {folder}/gone holds no features (no manifest.json); give a folder of features, such as runs/tiny/features, or
    make one with headstart harvest RECIPE
adapt | {recipe} | --steps | 0
    argument --steps: 0 given, 1 or more is allowed; correct it or leave it out; a recipe and then section.key=value
    are allowed; headstart adapt --help lists the fields
chat | --max-new-tokens | 0
    argument --max-new-tokens: 0 given, 1 or more is allowed; correct it or leave it out
chat | {recipe} | --target | x
    --target: x given with the recipe {folder}/recipe.yaml, one of the two is allowed; write target.path=x, or leave
    the recipe out
serve | --port | 70000 | --target | x
    argument --port: 70000 given, 0 to 65535 is allowed; correct it or leave it out
serve | --always-draft
    --target: missing, a RECIPE or the folder of a model is needed; write one of them
serve | --target | x | --api-key=
    --api-key: an empty key, or a key with spaces or non-ASCII characters given, visible ASCII characters are
    allowed, as in HTTP headers; change it
serve | --target | x | --adapt-memory | 1
    --adapt-memory: 1 given, but drafts by prompt lookup cannot be trained, a head is needed; give --head, or leave
    --adapt-memory out
targets | qwen33
    NAME: 'qwen33' given, a folder with config.json, that file, a GGUF file, a hub name (org/name) or a model type of
    transformers
export | {recipe}
    {folder}/run/head holds no head (no config.json); train one with headstart train RECIPE, or give the folder of a
    saved head
report | {recipe}
    decode.head: {folder}/run/head holds no head (no config.json); train one with headstart train RECIPE, or give the
    folder of a saved head
"""


def cases() -> dict[str, str]:
    sentences: dict[str, str] = {}
    for line in SENTENCES.strip().splitlines():
        if line.startswith(" "):
            command = [*sentences][-1]
            sentences[command] = f"{sentences[command]} {line.strip()}".strip()
        else:
            sentences[line] = ""
    return sentences


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sentences")
    build_run(folder)
    return folder


@pytest.mark.parametrize(("command", "sentence"), cases().items(), ids=cases())
def test_a_mistake_is_told_in_this_sentence(command: str, sentence: str, folder: Path, typed: Typed) -> None:
    places = {"recipe": folder / "recipe.yaml", "folder": folder}
    outcome = typed(*filled(command, **places).split(" | "))
    assert outcome.code != 0
    assert filled(sentence, **places) in " ".join(outcome.err.split())

"""The exact messages for common mistakes, all in one place: read them aloud when one changes."""

from pathlib import Path

import pytest
from bad_inputs import filled, type_command
from tiny_run import build_run

# What is typed after `headstart`, its words joined by " | ", and below it the message, without the place of a mistake.
SENTENCES = r"""
train | {recipe} | train.steps=many
    train.steps: 'many' given, a whole number > 0 is allowed; change it
train | {recipe} | train.learning_rate=.nan
    train.learning_rate: nan given, a number > 0 is allowed; change it, or leave it out for the default, 0.0001
train | {recipe} | train.steps=1000000000000000000000000000000
    train.steps: 1000000000000000000000000000000 given, a number of fewer than 64 bits is allowed; lower it
train | {recipe} | trian.steps=3
    trian: {'steps': 3} given, but there is no such key, only run_dir, seed, target, data, head, train, joint,
    decode, report, export, log are allowed; did you mean train?
train | {recipe} | train.steps
    train.steps: 'train.steps' given, section.key=value is allowed; for example train.steps=100
train | {recipe} | head.taps=[2
    head.taps: '[2' given, YAML is allowed; put it in quotes (line 1, column 3: expected ',' or ']', but got
    '<stream end>')
train | {recipe} | head.kind=eagle2
    head.kind: 'eagle2' given, one of eagle1, eagle3,
train | {recipe} | head={}
    head.kind: nothing given, one of eagle1, eagle3,
train | {recipe} | head={kind: eagle1, taps: [2]}
    head.taps: [2] given, but kind eagle1 allows only kind, intermediate_size, num_heads, num_kv_heads; remove it, or
    choose kind eagle3
train | {recipe} | head.taps=[4, 2]
    head.taps: [4, 2] given, ascending indices without repeats are allowed; write [2, 4]
train | {recipe} | head.draft_vocab_size=301
    head.draft_vocab_size: 301 given, 1 to the target's 300 tokens are allowed; lower it, or null for all
train | {recipe} | head.num_kv_heads=3
    head.num_kv_heads: 3 given, a divisor of the target's 4 attention heads is allowed; change it, or set
    head.num_heads
train | {recipe} | decode.width=81
    decode.width: 81 given, 1 to 80 is allowed, as many as the head drafts tokens (head.draft_vocab_size); lower it
train | {recipe} | data.response_tokens=200
    data.response_tokens: 200 given, up to 104 is allowed, because data.prompt_tokens 24 + data.response_tokens 200
    exceed the target's 128 positions; lower one of them
train | {recipe} | decode.max_new_tokens=128
    decode.max_new_tokens: 128 given, 1 to 127 is allowed, fewer than the target's 128 positions; lower it
train | {recipe} | decode.drafter=draft_model
    decode: {'depth': 2, 'drafter': 'dra...: 8, 'nodes': 4, 'width': 2} given, drafter draft_model needs
    draft_model; give decode.draft_model
train | {recipe} | data.server=http://x | data.draft_head=head
    data: {'draft_head': 'head', 'dtyp... 'response_tokens': 12, ...} given, one of states or server, draft_head and
    responses given is allowed; remove server
train | {recipe} | data.online=[auto] | data.store=x
    data: {'dtype': 'float32', 'genera... 'response_tokens': 12, ...} given, online allows no store, as it computes
    the features; remove store, or remove online
train | {recipe} | data.responses=given | data.prompts=self
    data: {'dtype': 'float32', 'genera..., 'responses': 'given', ...} given, responses given needs conversations in
    prompts; self has none, so name a file
train | {recipe} | train.regression_weight=1
    train.regression_weight: 1 given, only 0 or null is allowed with head.kind eagle3; remove it, or choose
    head.kind eagle1
train | {recipe} | head={kind: medusa, medusa_heads: 4}
    train.unroll: 3 given, 4 is allowed, the levels that head.medusa_heads gives; leave it out, or write
    train.unroll: 4
train | {recipe} | head={kind: block, block_size: 3} | decode.depth=4
    decode.depth: 4 given, 1 to 3 is allowed, the levels that head.block_size gives; lower it, or raise
    head.block_size and train again
train | {recipe} | target.split=tensor | data.online=[auto]
    target.split: 'tensor' given, only layers or null is allowed with data.online; remove split
train | {recipe} | report.baselines=[repeats]
    decode.repeats: nothing given, 1 to 64 is allowed, because report.baselines has repeats; add it, or remove
    repeats
train | {recipe} | report.baselines=[plain, plain]
    report.baselines: ['plain', 'plain'] given, a list without repeats is allowed; write ['plain']
train | {recipe} | target.device=gpu
    target.device: 'gpu' given, auto, cpu, cuda, a numbered device such as cuda:1, or mps, xpu, hpu is allowed; did
    you mean cuda?
train | {recipe} | data.prompts=gone.jsonl
    data.prompts: 'gone.jsonl' given, an existing file or dataset folder, hf:org/name:split or self is allowed; put
    the prompts there (relative paths start from the current directory)
train | {recipe} | target.path=./gone
    target.path: './gone' given, a folder with a model's config.json or GGUF file, or a hub name, is allowed; put the
    model there (relative paths start from the current directory)
train | {recipe} | target.path=''
    target.path: '' given, a path of one or more characters is allowed; change it, or write . for the current folder
train | {recipe} | run_dir=s3://me:secret@bucket/run
    run_dir: 's3://...@bucket/run' given, a URL without user, password and query is allowed, as it is logged; remove
    them and set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY
train | {recipe} | target.chat_template_kwargs={date: tomorrow}
    target.chat_template_kwargs: {'date': 'tomorrow'} given, a day such as 2026-11-26 is allowed as its date;
    correct it, or remove it
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
    --max-new-tokens: 0 given, 1 or more is allowed; raise it
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
    decode.head: {folder}/run/head holds no head (no config.json); a trained head's folder is required: train one
    with headstart train RECIPE, name another with decode.head=FOLDER, or compare methods that need none:
    report.baselines='[plain, prompt_lookup]'
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
def test_a_mistake_is_told_in_this_sentence(
    command: str, sentence: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"recipe": folder / "recipe.yaml", "folder": folder}
    outcome = type_command(filled(command, **places).split(" | "), monkeypatch, capsys)
    assert outcome.code != 0
    assert filled(sentence, **places) in " ".join(outcome.err.split())

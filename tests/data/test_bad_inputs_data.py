"""Data, stores and stages as clumsy users give them: no traceback, nothing wrong in silence, a message to act on."""

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from bad_inputs import Typed, assert_raises, assert_refused, assert_told, filled, table
from tiny_run import VOCAB_SIZE, build_tokenizer, copy_run

from headstart.common.files import write_jsonl
from headstart.data_pipelines.prompts.prompts import read_prompts
from headstart.data_pipelines.prompts.row_report import RowReport
from headstart.data_pipelines.prompts.rows import read_rows
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.recipes.schema import DataSection

FACTS = {
    "FIX": "fix or remove them",
    "NEEDS": "a row needs prompt or text (a string), prompt with response or completion, messages",
    "ROLES": "allowed roles are system, developer, user, human, assistant",
    "ORDER": "change the order of the turns",
    "GIVEN": "needs response or completion with prompt, or a turn of the assistant",
    "CHOOSE": "choose data.responses=target",
    "SUFFIXES": "a file that ends in .jsonl, .json, .parquet, .txt, a dataset folder or",
}
USER = {"role": "user", "content": "hello"}
REPLY = {"role": "assistant", "content": "hi there"}

# A row that gives no sample, as a user wrote it, and the facts of its message, which also names the line and ends with
# FIX. With "given: ", data.responses is given.
ROWS = table(
    r"""
a torn line | {"prompt": "cut => not valid JSON ( | one JSON object on each
a number as a row | 7 => a number (7) | a JSON object is needed
half a surrogate pair | {"prompt": "\ud800"} => not text | surrogates not allowed
unknown fields | {"instruction": "why?", "output": "so"} => ['instruction', 'output'] | NEEDS
a prompt of blanks | {"prompt": " \n\t"} => prompt is empty | NEEDS
a system turn that is a number | {"prompt": "x", "system": 3} => system is a number (3) | text is needed
messages that are text | {"messages": "hi"} => messages is text | a list of objects
no messages | {"messages": []} => no user turn to answer | give at least one
a turn by a bot | {"messages": [{user}, {"role": "bot", "content": "x"}]} => turn 2 is by 'bot' | ROLES
a turn without words | {"messages": [{user}, {"role": "assistant", "content": ""}]} => turn 2 by assistant is empty
a part with reasoning | {"messages": [{user}, {"role": "assistant", "content": [{"type": "reasoning", "text": "x"}]}]}
    contains parts that are neither text nor images | remove them
reasoning of two texts | {"messages": [{user}, {"from": "gpt", "value": "b", "reasoning": "x", "thinking": "y"}]}
    turn 2: thinking: 'y' given | the same text as in reasoning is allowed | remove one of them
content that says two things | {"messages": [{"role": "user", "from": "human", "content": "a", "value": "b"}, {reply}]}
    turn 1: content and value say two things | one is allowed | remove the other
messages that say two things | {"messages": [{user}, {reply}], "conversations": [{user}]}
    messages and conversations say two things | remove the other
an answer first | {"messages": [{reply}, {user}]} => right after the start | ORDER
tool calls that are a number | {"messages": [{user}, {"role": "assistant", "tool_calls": 3}]} => tool_calls is a number
a tool call without a name | {"messages": [{user}, {"role": "assistant", "tool_calls": [{"function": {}}]}]}
    turn 2: tool_calls[0]: {'function': {}} given | an object with function.name is allowed
a tool call with a list | {"messages": [{user}, {"from": "gpt", "tool_calls": [{"name": "f", "arguments": "[1]"}]}]}
    turn 2: tool_calls[0].function.arguments: '[1]' (not an object) given | a JSON object in a string, is allowed
tokens with a fraction | {"tokens": [1, 2.0]} => a number (2.0) at place 2 | whole numbers
no tokens | {"tokens": []} => tokens is an empty list | NEEDS
a token above the vocabulary | {"tokens": [300]} => token 300 given | 0 to 299
a mask of another length | {"tokens": [1, 2], "loss_mask": [1]} => 2 tokens and 1 loss_mask values
labels | {"input_ids": [1, 2], "labels": [-100, 1]} => the row has labels
a mask beside messages | {"messages": [{user}, {reply}], "loss_mask": [0, 1]}
    the row has loss_mask, a mask of tokens, without tokens | weight: 0 in each turn that is not trained on
a mask beside a prompt | {"prompt": "x", "response": "y", "assistant_masks": [0, 1]}
    the row has assistant_masks, a mask of tokens, without tokens | tokens and loss_mask
images of a row | {"messages": [{user}], "images": ["a.png"]} => which cannot be read here | remove them
a function call | {"messages": [{user}, {"role": "assistant", "function_call": {"name": "add"}}]}
    turn 2 has function_call | write tool_calls: [{function
a call with args | {"messages": [{user}, {"role": "assistant", "tool_calls": [{"name": "add", "args": {}}]}]}
    the call of add has args | name and arguments are needed: rename or remove it
a turn to train on | {"messages": [{user}, {"role": "assistant", "content": "x", "train": false}]} => turn 2 has train
a turn of some weight | {"messages": [{user}, {"role": "assistant", "content": "x", "weight": 0.5}]}
    turn 2 has weight 0.5 | 0 or 1 is needed | round it
an answer without a prompt | {"text": "2+2?", "response": "4"} => response is given without a prompt
given: a prompt and a null response | {"prompt": "x", "response": null} => fields ['prompt', 'response'] | GIVEN
given: response and completion | {"prompt": "x", "response": "a", "completion": "b"}
    response and completion are given | one is allowed | remove the other
given: a plain completion with a system turn | {"system": "be brief", "prompt": "x", "completion": "a"}
    system is given | messages are needed | give the turns as messages
given: a question without its answer | {"messages": [{user}]} => GIVEN | CHOOSE
given: tokens without a mask | {"tokens": [1, 2, 3]} => no token to train on | set loss_mask values to 1
""",
    **FACTS,
)
TEMPLATE = ChatTemplate(build_tokenizer())


def read(path: Path, responses: str = "target") -> None:
    fields = {"prompts": str(path), "heldout_prompts": "x", "num_prompts": 9, "responses": responses}
    report = RowReport(str(path))
    read_prompts(TEMPLATE, DataSection.model_validate(fields), None, report, vocab_size=VOCAB_SIZE)
    report.check()


@pytest.mark.parametrize("symptom", ROWS)
def test_a_row_that_gives_no_sample_is_named_with_the_reason(tmp_path: Path, symptom: str) -> None:
    [row], facts = ROWS[symptom]
    parts = {"user": json.dumps(USER), "reply": json.dumps(REPLY)}
    (tmp_path / "rows.jsonl").write_text(f"{filled(row, **parts)}\n", encoding="utf-8")
    responses = "given" if symptom.startswith("given: ") else "target"
    assert_raises(lambda: read(tmp_path / "rows.jsonl", responses), f"rows.jsonl line 1 | {facts} | {FACTS['FIX']}")


# A file by its name and content, as a Python literal.
FILES = table(
    r"""
a file of blank lines | rows.jsonl | b'\n \n' => rows.jsonl | has no prompts | 0 rows read | give at
UTF-16, as PowerShell writes | rows.jsonl | b'\xff\xfe{\0}\0\n\0' => rows.jsonl | is UTF-16 text | UTF-8 is allowed
Latin-1 | rows.jsonl | b'{"prompt": "\xe9t\xe9"}\n' => rows.jsonl line 1 | not valid JSON | 'utf-8' codec | FIX
an array without its end | rows.json | b'[\n  {"prompt": "x"},\n  {"prompt": \n' => rows.json
an array of texts | rows.json | b'[\n  "one",\n  "two"\n]\n' => rows.json row 1 | the row is text
an indented object | rows.json | b'{\n  "prompt": "x"\n}\n' => rows.json line 1 | not valid JSON
a pickle | rows.pkl | b'\x80\x04.' => data: | rows.pkl given | SUFFIXES | convert it
parquet in name only | rows.parquet | b'PAR1 and nothing else' => rows.parquet | cannot be read as parquet
""",
    **FACTS,
)


@pytest.mark.parametrize("symptom", FILES)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, symptom: str) -> None:
    (name, content), facts = FILES[symptom]
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(ast.literal_eval(content))
    assert_raises(lambda: read(tmp_path / name), facts)


@pytest.fixture
def place(harvested: Path, tmp_path: Path) -> Path:
    """A folder with a recipe that has not run."""
    shutil.rmtree(copy_run(harvested, tmp_path) / "run")
    return tmp_path


def test_prompts_that_are_no_dataset_are_named(place: Path, typed: Typed) -> None:
    pytest.importorskip("datasets")
    (place / "rows").mkdir()
    (place / "rows" / "a.jsonl").write_text('{"prompt": "x"}\n')
    folder = typed("inspect", place / "recipe.yaml", f"data.prompts={place / 'rows'}")
    assert_refused(folder, "data: | is not a dataset | a folder written by save_to_disk | or a file")
    hub = typed("inspect", place / "recipe.yaml", "data.prompts=hf:/no/such/dataset")
    assert_refused(hub, "data.prompts: 'hf:/no/such/dataset' given | hf:org/name:split | correct the name")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.txt", b"\xef\xbb\xbfone\r\n\r\ntwo\r\n"),  # a mark at the start of a text
        ("rows.json", b'[\n  {"text": "one"},\n  {\n"text": "two"}\n]\n'),  # an indented array
        ("rows.json", b'\xef\xbb\xbf[{"text": "one"}, {"text": "two"}]'),  # a marked array
        ("rows.jsonl", b'[{"text": "one"},\n{"text": "two"}]'),  # an array with the wrong suffix
        ("rows.JSONL", b'{"text": "one"}\n\n{"text": "two"}'),  # a suffix in capitals
        ("rows.jsonl", b'\xef\xbb\xbf{"text": "one", "tokens": null}\r\n{"text": "two"}'),  # a marked file
    ],
)
def test_a_file_in_an_unusual_dress_gives_its_rows(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert [row.read()["text"] for row in read_rows(str(tmp_path / name))] == ["one", "two"]


# The training rows, the held-out rows, data.num_prompts and data.responses: `0-12` stands for the prompts 0 to 11.
SPLITS = table(
    """
refused: a quarter of the rows is held out too | 0-12 | 9-15 | 12 | target => data.heldout_prompts | 3 of 12 rows
refused: half of the rows is held out in another form | 0-3 + {asked} | {answered} + {human} | 12 | target
    data.heldout_prompts | 2 of 4 rows | (line 2, 4), up to 10% | remove them from one of the two files
refused: all prompts are too long | {long} * 14 | {"text": "another text"} | 12 | given => prompts.jsonl
refused: held-out prompts without responses | {"prompt": "p", "completion": "word"} | 0-1 | 12 | given
    heldout.jsonl line 1 | fields ['prompt'] | needs response or completion | CHOOSE
one row is held out too | 0-14 | 5-6 + 20-24 | 12 | target => prompts.jsonl, 12 prompts kept | 13 rows read
fewer rows than data.num_prompts | 0-14 | 20-24 | 100 | target => prompts.jsonl | 14 rows read | 14 prompts kept
prompts lose their system turn | {long_prompt} + {long_chat} + 0-4 | 20-24 | 6 | target => 6 prompts kept
long texts are dropped and are not unusable | {long} + {"text": "text 1"} * 5 | {"text": "another text"} | 12 | given
    6 rows read | 5 prompts kept | dropped 1 too long | data.prompt_tokens and data.response_tokens allow
a few unusable rows | {"question": 1} + 100-250 | 20-24 | 150 | target => 151 rows read
""",
    **FACTS,
)
SPLIT_ROWS = {
    "asked": {"messages": [USER]},
    "answered": {"messages": [USER, REPLY]},
    "human": {"conversations": [{"from": "human", "value": "prompt 1"}]},
    "long": {"text": "word " * 99},
    "long_prompt": {"prompt": "v" * 40},
    "long_chat": {"messages": [{"role": "system", "content": "be very brief"}, {"role": "user", "content": "w" * 30}]},
}


def split_rows(text: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for part in filled(text, **{name: json.dumps(row) for name, row in SPLIT_ROWS.items()}).split(" + "):
        row, _, times = part.partition(" * ")
        if row.startswith("{"):
            rows += [json.loads(row)] * int(times or 1)
        else:
            rows += [{"prompt": f"prompt {number}"} for number in range(*map(int, row.split("-")))]
    return rows


@pytest.mark.parametrize("symptom", SPLITS)
def test_rows_that_are_dropped_or_cut_are_counted_and_too_many_refused(place: Path, typed: Typed, symptom: str) -> None:
    (train, heldout, count, responses), facts = SPLITS[symptom]
    write_jsonl(place / "prompts.jsonl", split_rows(train))
    write_jsonl(place / "heldout.jsonl", split_rows(heldout))
    overrides = f"data.num_prompts={count}", f"data.responses={responses}"
    outcome = typed("inspect", place / "recipe.yaml", *overrides)
    (assert_refused if symptom.startswith("refused: ") else assert_told)(outcome, facts)


@pytest.mark.parametrize(
    ("name", "content", "command", "removed"),
    [
        ("prompts/stage.json", "", "harvest", "prompts/stage.json"),
        ("features/stage.json", "[]", "harvest", "features/stage.json"),
        ("prompts/stage.json", '{"inputs": {}, "complete": true}', "harvest", "prompts/stage.json"),
        ("prompts/rows.json", "[1, 2]", "inspect", "prompts/stage.json"),
    ],
)
def test_a_broken_file_of_a_run_is_named_and_the_remedy_works(harvested, place, typed, name, content, command, removed):
    shutil.copytree(harvested / "run", place / "run")
    (place / "run" / name).write_text(content)
    facts = f"{place / 'run' / name} cannot be read | rm {place / 'run' / removed}"
    assert_refused(typed(command, place / "recipe.yaml"), facts)
    (place / "run" / removed).unlink()  # the remedy
    assert_told(typed(command, place / "recipe.yaml"), "prompts.jsonl | 12 rows read | 12 prompts kept")


def damage(store: Path, kind: str, content: str) -> None:
    """Change the store, or make `other` from it, before a command is typed."""
    manifest, shard = store / "manifest.json", store / "train-00001.safetensors"
    about = json.loads(manifest.read_text())
    if kind == "flip":
        shard.write_bytes(shard.read_bytes()[:-9] + b"x" * 9)
    elif kind == "remove":
        (store / content).unlink()
    elif kind == "foreign":
        shutil.copy(shard, store / "train-00009.safetensors")
    elif kind == "manifest":
        manifest.write_text(content)
    else:
        other = shutil.copytree(store, store.parents[1] / "other")
        changes = {"target": {**about["target"], "content": "0" * 64}} if kind == "tuned" else json.loads(content)
        (other / "manifest.json").write_text(json.dumps({**about, **changes}))


# What is typed after `headstart store`, or the value of data.store, and the damage before it.
STORES = table("""
merge without stores | merge {new} => store merge | only | one or more stores must follow it
merge of different formats | merge {new} {store} {other} | other {"dtype": "int8"} => dtype: 'float32' in | 'int8' in
merge of different targets | merge {new} {store} {other} | other {"target": {"sha256": "{zeros}"}}
    target: the content | cannot be merged | equal taps, dtype and target | harvest one of them again
merge of a target that was tuned in its middle | merge {new} {store} {other} | tuned
    all bytes of the target's weights: the content | cannot be merged | equal taps, dtype and target
merge of a damaged store | merge {new} {store} | flip => train-00001.safetensors | its checksum differs | 1 shard
verify of a flipped bit | verify {store} | flip => train-00001.safetensors is not what the harvest wrote
verify of a lost shard | verify {store} | remove train-00002.safetensors => train-00002.safetensors
verify of a foreign shard | verify {store} | foreign => train-00009.safetensors | is not in the manifest | 1 shard
a manifest that is a list | verify {store} | manifest [] => manifest.json cannot be read | no list of shards
an unknown command | mend {store} => command | 'mend' | choose from | verify
a recipe's store is a run | data.store={place}/run => run holds no features | no manifest.json
a recipe's store lacks a tap | data.store={store} head.taps=[0] => data.store | holds taps [1, 2, 3]
a recipe's store is of another | data.store={other} | other {"target": {"path": "elsewhere", "sha256": "{zeros}"}}
    data.store | elsewhere | give a store of this target | remove data.store to harvest one
a recipe's store says nothing of its target | data.store={other} | other {"target": null} => data.store | None
a recipe's store lost its stage.json | data.store={store} | remove stage.json => data.store | has no stage.json
""")


@pytest.mark.parametrize("symptom", STORES)
def test_a_store_that_a_command_cannot_use_is_named(harvested: Path, place: Path, typed: Typed, symptom: str) -> None:
    store = shutil.copytree(harvested / "run" / "features", place / "run" / "features")
    (line, *damages), facts = STORES[symptom]
    for each in damages:
        kind, _, content = each.partition(" ")
        damage(store, kind, filled(content, zeros="0" * 64))
    words = filled(line, place=place, store=store, new=place / "new", other=place / "other").split()
    command = ["harvest", place / "recipe.yaml"] if line.startswith("data.store") else ["store"]
    assert_refused(typed(*command, *words), facts)
    assert not list(place.glob("new*"))

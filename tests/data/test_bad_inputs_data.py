"""Data, stores and stages as clumsy users give them: no traceback, nothing wrong in silence, a message to act on."""

import ast
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bad_inputs import Says, assert_refused, assert_told, filled, table, type_command

from headstart.common.files import read_jsonl

FIX = "fix or remove them"
NEEDS = "a row needs prompt or text (a string), prompt with response or completion, messages"
ROLES = "allowed roles are system, developer, user, human, assistant"
ORDER = "change the order of the turns"
GIVEN = ("data.responses=given", "data.turns=all")
LINE = "rows.jsonl line 1"
USER = {"role": "user", "content": "hello"}
REPLY = {"role": "assistant", "content": "hi there"}
BROKEN_TEMPLATE = "the target's chat template refuses these messages"

# A row that gives no sample: the row as a user wrote it. With "given: ", data.responses is given.
ROWS = table(
    r"""
a torn line | {"prompt": "cut
    LINE | not JSON ( | one JSON object on each | FIX
a bare word | hello
    LINE | not JSON | one JSON object on each line | FIX
single quotes | {'prompt': 'x'}
    LINE | not JSON | one JSON object on each line | FIX
a comma at the end | {"prompt": "x",}
    LINE | not JSON | one JSON object on each line | FIX
a comment line | // prompts
    LINE | not JSON | one JSON object on each line | FIX
two objects on a line | {"prompt": "x"} {}
    LINE | Extra data | one JSON object on | FIX
a list as a row | [1, 2]
    row | a number (1) | a JSON object is needed | FIX
a number as a row | 7
    LINE | a number (7) | a JSON object is needed | FIX
text as a row | "hello"
    LINE | the row is text | a JSON object is needed | FIX
null as a row | null
    LINE | the row is null | a JSON object is needed | FIX
true as a row | true
    LINE | the row is true | a JSON object is needed | FIX
half a surrogate pair | {"prompt": "\ud800"}
    LINE | not text | surrogates not allowed | FIX
brackets without end | {brackets}
    LINE | not JSON | one JSON object on each | FIX
an empty object | {}
    LINE | fields [] given | NEEDS | FIX
only nulls | {"prompt": null, "text": null}
    LINE | that are not null | NEEDS | FIX
unknown fields | {"question": "why?", "answer": "so"}
    LINE | ['answer', 'question'] | NEEDS | FIX
a misspelt field | {"promt": "x"}
    LINE | ['promt'] | NEEDS | FIX
alpaca's fields | {"instruction": "x", "output": "y"}
    LINE | 'instruction' | NEEDS | FIX
text that is a number | {"text": 5}
    LINE | text is a number (5) | text is needed | FIX
text that is a fraction | {"text": 0.5}
    LINE | text is a number (0.5) | text is needed | FIX
text that is true | {"text": true}
    LINE | text is true | text is needed | FIX
a prompt that is an object | {"prompt": {"a": 1}}
    LINE | an object | text is needed | FIX
a prompt of token ids | {"prompt": [1, 2]}
    LINE | prompt is a list | text is needed | FIX
an empty prompt | {"prompt": ""}
    LINE | prompt is empty | NEEDS | FIX
a prompt of blanks | {"prompt": " \n\t"}
    LINE | prompt is empty | NEEDS | FIX
a system turn that is a number | {"prompt": "x", "system": 3}
    LINE | system is a number (3) | text is needed | FIX
messages that are text | {"messages": "hi"}
    LINE | messages is text | a list of objects | FIX
messages of texts | {"messages": ["hi"]}
    LINE | text at place 1 | a list of objects | FIX
messages that are an object | {"messages": {user}}
    LINE | an object | a list of objects | FIX
no messages | {"messages": []}
    LINE | no user turn to answer | give at least one | FIX
only a system turn | {"messages": [{"role": "system", "content": "be brief"}]}
    LINE | no user turn to answer | give at least one | FIX
a turn by nobody | {"messages": [{"content": "x"}]}
    LINE | turn 1 is by None | ROLES | FIX
a turn by a bot | {"messages": [{user}, {"role": "bot", "content": "x"}]}
    LINE | turn 2 is by 'bot' | ROLES | FIX
a role in capitals | {"messages": [{"role": "User", "content": "x"}]}
    LINE | 'User' | ROLES | FIX
a turn without words | {"messages": [{"role": "user"}]}
    LINE | turn 1 by user is empty | give it text | FIX
a turn of a number | {"messages": [{"role": "user", "content": 3}]}
    LINE | turn 1 is a number (3) | text is needed | FIX
a turn with an image | {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}
    LINE | contains parts that are not text | only text is supported | FIX
two answers in a row | {"messages": [{user}, {reply}, {reply}]}
    LINE | turn 3 is by | ORDER | FIX
an answer first | {"messages": [{reply}, {user}]}
    LINE | right after the start | ORDER | FIX
a late system turn | {"messages": [{user}, {"role": "system", "content": "x"}]}
    LINE | turn 2 is by system | ORDER | FIX
tools that are not JSON | {"messages": [{user}], "tools": "{"}
    LINE | tools: not valid JSON | Expecting | FIX
a tool call without a name | {"messages": [{user}, {"role": "assistant", "tool_calls": [{"function": {}}]}]}
    LINE | turn 2 has a tool call | without a function name | FIX
tokens that are text | {"tokens": "1 2"}
    LINE | tokens is text | a list of whole numbers | FIX
tokens with a fraction | {"tokens": [1, 2.0]}
    LINE | a number (2.0) | whole numbers | FIX
tokens of true and false | {"tokens": [true]}
    LINE | true or false | token ids are needed | FIX
no tokens | {"tokens": []}
    LINE | tokens is an empty list | NEEDS | FIX
a token above the vocabulary | {"tokens": [300]}
    LINE | token 300 given | 0 to 299 | FIX
a token below 0 | {"tokens": [-1]}
    LINE | token -1 given | 0 to 299 | FIX
a mask of another length | {"tokens": [1, 2], "loss_mask": [1]}
    LINE | 2 tokens and 1 loss_mask values | they must have the same length | FIX
a mask of texts | {"tokens": [1], "loss_mask": ["1"]}
    LINE | loss_mask holds text | a list of whole numbers is needed | FIX
given: a prompt alone | {"prompt": "x"}
    LINE | fields ['prompt'] | needs response or completion | choose data.responses=target
given: a prompt and a null response | {"prompt": "x", "response": null}
    LINE | fields ['prompt', 'response'] | needs response or completion | choose data.responses=target
given: preferences | {"prompt": "x", "chosen": "y", "rejected": "z"}
    LINE | ['chosen', 'prompt', 'rejected'] | needs response or completion | choose data.responses=target
given: an empty response | {"prompt": "x", "response": ""}
    LINE | response is empty | NEEDS | FIX
given: a response that is a number | {"prompt": "x", "response": 5}
    LINE | response is a number (5) | text is needed | FIX
given: a completion that is a list of texts | {"prompt": "x", "completion": ["a", "b"]}
    LINE | completion is a list | text is needed | FIX
given: response and completion | {"prompt": "x", "response": "a", "completion": "b"}
    LINE | response and completion are given | one is allowed | remove the other
given: a plain completion with a system turn | {"system": "be brief", "prompt": "x", "completion": "a"}
    LINE | system is given | messages are needed | give the turns as messages
given: a question without its answer | {"messages": [{user}]}
    LINE | needs response or completion beside prompt, or a turn of the assistant | choose data.responses=target
given: tokens without a mask | {"tokens": [1, 2, 3]}
    LINE | no token to train on | set loss_mask values to 1 | FIX
given: a text of one token | {"text": "x"}
    LINE | no token to train on | give a longer text | FIX
""",
    LINE=LINE,
    FIX=FIX,
    NEEDS=NEEDS,
    ROLES=ROLES,
    ORDER=ORDER,
)


@pytest.fixture
def place(harvested: Path, tmp_path: Path) -> Path:
    """A folder whose recipe.yaml runs in it, on the shared target."""
    text = (harvested / "recipe.yaml").read_text().replace(str(harvested), str(tmp_path))
    (tmp_path / "recipe.yaml").write_text(text.replace(str(tmp_path / "target"), str(harvested / "target")))
    for name in ("prompts.jsonl", "heldout.jsonl"):
        shutil.copy(harvested / name, tmp_path / name)
    return tmp_path


Command = Callable[..., Any]


@pytest.fixture
def headstart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return lambda *arguments: type_command(list(arguments), monkeypatch, capsys)


@pytest.mark.parametrize("symptom", ROWS)
def test_a_row_that_gives_no_sample_is_named_with_the_reason(place: Path, headstart: Command, symptom: str) -> None:
    [row], facts = ROWS[symptom]
    parts = {
        "user": json.dumps(USER),
        "reply": json.dumps(REPLY),
        "brackets": "{{{" + "[" * 99999,
        "long": "word " * 99,
    }
    (place / "rows.jsonl").write_text(f"{filled(row, **parts)}\n", encoding="utf-8")
    overrides = GIVEN if symptom.startswith("given: ") else ()
    if overrides:  # held-out rows are read in the same way
        (place / "heldout.jsonl").write_text(json.dumps({"prompt": "other", "completion": "words"}) + "\n")
    outcome = headstart("inspect", place / "recipe.yaml", f"data.prompts={place / 'rows.jsonl'}", *overrides)
    assert_refused(outcome, facts)
    assert not (place / "run" / "prompts" / "train.jsonl").exists()


# Files


SUFFIXES = "a file that ends in .jsonl, .json, .parquet, .txt, a dataset folder or"
# A file by its name and content, as a Python literal.
FILES = table(
    r"""
an empty file | rows.jsonl | b''
    rows.jsonl | has no prompts | 0 rows read | give at
a file of blank lines | rows.jsonl | b'\n \n'
    rows.jsonl | no prompts | 0 rows | give at
an empty text file | rows.txt | b'\n\n'
    rows.txt | has no prompts | 0 rows read | give at
an empty array | rows.json | b'[]\n'
    rows.json | has no prompts | 0 rows read | give at
UTF-16, as PowerShell writes | rows.jsonl | b'\xff\xfe{\0}\0\n\0'
    rows.jsonl | is UTF-16 text | UTF-8 is allowed | save it
Latin-1 | rows.jsonl | b'{"prompt": "\xe9t\xe9"}\n'
    LINE | not JSON | 'utf-8' codec | FIX
Latin-1 text | rows.txt | b'\xe9t\xe9\n'
    rows.txt line 1 | not UTF-8 | can't decode | FIX
zeros | rows.jsonl | b'\0\0\0\0\n'
    LINE | not JSON | one JSON object on each line | FIX
an array without its end | rows.json | b'[\n  {"prompt": "x"},\n  {"prompt": \n'
    rows.json | starts as a JSON array but cannot be read as one | a whole array or one | fix the file
an array of texts | rows.json | b'[\n  "one",\n  "two"\n]\n'
    rows.json row 1 | the row is text | a JSON object is needed | FIX
rows inside an object | rows.json | b'{"data": [{"prompt": "x"}]}'
    rows.json line 1 | fields ['data'] | NEEDS | FIX
an indented object | rows.json | b'{\n  "prompt": "x"\n}\n'
    rows.json line 1 | not JSON | one JSON object on each line | FIX
a pickle | rows.pkl | b'\x80\x04.'
    data: | rows.pkl given | SUFFIXES | convert it
a spreadsheet | rows.csv | b'prompt\nx\n'
    data: | rows.csv given | SUFFIXES | convert it
a compressed file | rows.jsonl.gz | b'\x1f\x8b'
    data: | .jsonl.gz given | SUFFIXES | convert
a file without a suffix | rows | b'{}\n'
    data: | rows given | SUFFIXES | convert it
parquet in name only | rows.parquet | b'PAR1 and nothing else'
    rows.parquet | cannot be read as parquet | a whole parquet file is needed | write it again
an empty parquet file | rows.parquet | b''
    rows.parquet | cannot be read as parquet | a whole parquet file is needed | write it again
""",
    LINE=LINE,
    FIX=FIX,
    NEEDS=NEEDS,
    SUFFIXES=SUFFIXES,
)


@pytest.mark.parametrize("symptom", FILES)
def test_a_file_that_cannot_be_used_is_named(
    place: Path, headstart: Command, monkeypatch: pytest.MonkeyPatch, symptom: str
) -> None:
    (name, content), facts = FILES[symptom]
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (place / name).write_bytes(ast.literal_eval(content))
    monkeypatch.chdir(place)
    assert_refused(headstart("inspect", "recipe.yaml", f"data.prompts={name}"), facts)


def test_prompts_that_are_no_dataset_are_named(place: Path, headstart: Command) -> None:
    pytest.importorskip("datasets")
    (place / "rows").mkdir()
    (place / "rows" / "a.jsonl").write_text('{"prompt": "x"}\n')
    for prompts, facts in (
        (place / "rows", "data: | is not a dataset | a folder written by save_to_disk | or a file"),
        ("hf:/no/such/dataset", "data.prompts: 'hf:/no/such/dataset' given | hf:org/name:split | correct the name"),
    ):
        assert_refused(headstart("inspect", place / "recipe.yaml", f"data.prompts={prompts}"), facts)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param("rows.jsonl", b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}\r\n', id="a mark at the start"),
        pytest.param("rows.txt", b"\xef\xbb\xbfone\r\n\r\ntwo\r\n", id="a mark at the start of a text"),
        pytest.param("rows.json", b'[\n  {"text": "one"},\n  {\n"text": "two"}\n]\n', id="an indented array"),
        pytest.param("rows.json", b'\xef\xbb\xbf[{"text": "one"}, {"text": "two"}]', id="a marked array"),
        pytest.param("rows.jsonl", b'[{"text": "one"},\n{"text": "two"}]', id="an array with the wrong suffix"),
        pytest.param("rows.JSONL", b'{"text": "one"}\n\n{"text": "two"}', id="a suffix in capitals"),
        pytest.param("rows.jsonl", b'{"text": "one", "tokens": null}\n{"prompt": null, "text": "two"}', id="nulls"),
    ],
)
def test_a_file_in_an_unusual_dress_gives_its_rows(place: Path, headstart: Command, name: str, content: bytes) -> None:
    (place / name).write_bytes(content)
    outcome = headstart("inspect", place / "recipe.yaml", f"data.prompts={place / name}")
    assert_told(outcome, Says(name, "2 rows read", "2 prompts kept", "data.num_prompts=12 asks for more"))
    assert [len(row["tokens"]) for row in read_jsonl(place / "run" / "prompts" / "train.jsonl")] == [3, 3]


# What the prompts' stage drops, cuts or refuses


def rows_of(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(first: int, last: int) -> list[dict[str, str]]:
    return [{"prompt": f"prompt {number}"} for number in range(first, last)]


def same_file_twice(place: Path) -> list[str]:
    return [f"data.heldout_prompts={place / 'prompts.jsonl'}"]


def mostly_held_out(place: Path) -> list[str]:
    rows_of(place / "prompts.jsonl", *texts(0, 12))
    rows_of(place / "heldout.jsonl", *texts(9, 15))
    return []


def said_by_a_human(text: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": text}]}


def held_out_in_another_form(place: Path) -> list[str]:
    rows_of(place / "prompts.jsonl", *texts(0, 3), {"messages": [USER]})
    rows_of(place / "heldout.jsonl", {"messages": [USER, REPLY]}, said_by_a_human("prompt 1"))
    return []


def half_of_30_unusable(place: Path) -> list[str]:
    rows_of(place / "prompts.jsonl", *texts(0, 15), *[{"question": number} for number in range(15)])
    return ["data.num_prompts=30"]


def unusable_held_out_rows(place: Path) -> list[str]:
    rows_of(place / "heldout.jsonl", *texts(20, 24), {"text": 5})
    return []


def all_too_long(place: Path) -> list[str]:
    rows_of(place / "prompts.jsonl", *[{"text": "word " * (90 + number)} for number in range(14)])
    rows_of(place / "heldout.jsonl", {"text": "another text"})
    return ["data.responses=given"]


def given_without_held_out_responses(place: Path) -> list[str]:
    rows_of(place / "prompts.jsonl", *[{"prompt": f"p {number}", "completion": "word"} for number in range(9)])
    return ["data.responses=given"]


SPLITS_REFUSED: dict[str, tuple[Callable[[Path], list[str]], Says]] = {
    "the same file to train and to measure on": (
        same_file_twice,
        Says("data.heldout_prompts", "14 of 14 rows", "up to 10% are allowed", "remove them from one of the two files"),
    ),
    "a quarter of the rows is held out too": (
        mostly_held_out,
        Says("data.heldout_prompts", "3 of 12 rows", "(line 10, 11, 12), up to 10% are", "remove them from one"),
    ),
    "half of the rows is held out in another form": (
        held_out_in_another_form,
        Says("data.heldout_prompts", "2 of 4 rows", "(line 2, 4), up to 10%", "remove them from one of the two files"),
    ),
    "15 of 30 rows are unusable": (
        half_of_30_unusable,
        Says("prompts.jsonl line 16", "15 of 30 rows are unusable", "up to 1% are allowed", FIX),
    ),
    "an unusable held-out row": (
        unusable_held_out_rows,
        Says("heldout.jsonl line 5", "1 of 5 rows are unusable", "up to 1% are allowed", FIX),
    ),
    "all prompts are too long": (
        all_too_long,
        Says("prompts.jsonl", "has no prompts (14 rows read, 14 too long)", "at least one usable row", "give"),
    ),
    "given: held-out prompts without responses": (
        given_without_held_out_responses,
        Says(
            "heldout.jsonl line 1", "fields ['prompt']", "needs response or completion", "choose data.responses=target"
        ),
    ),
}


@pytest.mark.parametrize("symptom", SPLITS_REFUSED)
def test_prompts_that_would_spoil_a_run_are_refused(place: Path, headstart: Command, symptom: str) -> None:
    prepare, says = SPLITS_REFUSED[symptom]
    overrides = prepare(place)
    assert_refused(headstart("inspect", place / "recipe.yaml", *overrides), says)


def one_held_out_too(place: Path) -> list[str]:
    rows_of(place / "prompts.jsonl", *texts(0, 14))
    rows_of(place / "heldout.jsonl", *texts(5, 6), *texts(20, 24))
    return []


def with_a_lost_system_turn(place: Path) -> list[str]:
    long = {"messages": [{"role": "system", "content": "be very brief"}, {"role": "user", "content": "w" * 30}]}
    rows_of(place / "prompts.jsonl", {"prompt": "v" * 40}, long, *texts(0, 4))
    return ["data.num_prompts=6"]


def given_and_too_long(place: Path) -> list[str]:
    rows_of(place / "prompts.jsonl", {"text": "word " * 99}, *[{"text": f"text {number}"} for number in range(5)])
    rows_of(place / "heldout.jsonl", {"text": "another text"})
    return ["data.responses=given"]


def some_unusable(place: Path) -> list[str]:
    rows_of(place / "prompts.jsonl", {"question": 1}, *texts(100, 250))
    return ["data.num_prompts=150"]


SPLITS_TOLD: dict[str, tuple[Callable[[Path], list[str]], Says]] = {
    "one row is held out too": (
        one_held_out_too,
        Says("prompts.jsonl, 12 prompts kept", "13 rows read", "dropped 1 held out too", "its prompt is held out too"),
    ),
    "fewer rows than data.num_prompts": (
        lambda place: ["data.num_prompts=100"],
        Says("prompts.jsonl", "14 rows read", "14 prompts kept", "data.num_prompts=100 asks for more, but"),
    ),
    "prompts lose their system turn": (
        with_a_lost_system_turn,
        Says("6 prompts kept", "cut the beginning of 2", "data.prompt_tokens=", "the system turn of 1"),
    ),
    "given: long texts are dropped and are not unusable": (
        given_and_too_long,
        Says("6 rows read", "5 prompts kept", "dropped 1 too long", "longer than data.prompt_tokens"),
    ),
    "a few unusable rows": (
        some_unusable,
        Says("151 rows read", "150 prompts kept; dropped 1 unusable (unknown form 1)", "", "line"),
    ),
}


@pytest.mark.parametrize("symptom", SPLITS_TOLD)
def test_what_was_dropped_or_cut_is_said_in_one_line(place: Path, headstart: Command, symptom: str) -> None:
    prepare, says = SPLITS_TOLD[symptom]
    overrides = prepare(place)
    assert_told(headstart("inspect", place / "recipe.yaml", *overrides), says)


# Stages


def damaged(stage: str, name: str, content: str) -> Callable[[Path], Path]:
    def write(run: Path) -> Path:
        (run / stage / name).write_text(content)
        return run / stage / name

    return write


GOES_ON = "remove this file, and the same command continues with what is there: rm "
STAGES: dict[str, tuple[Callable[[Path], Path], str]] = {
    f"{stage}: stage.json is {what}": (damaged(stage, "stage.json", content), why)
    for stage in ("prompts", "responses", "features")
    for what, content, why in (
        ("empty", "", "Expecting value"),
        ("torn", '{"inputs": {"se', "Unterminated string"),
        ("a list", "[]", "list indices must be integers"),
        ("without facts", '{"inputs": {}, "complete": true}', "KeyError: 'facts'"),
    )
}


@pytest.mark.parametrize("symptom", STAGES)
def test_a_broken_stage_file_is_named_and_the_remedy_works(
    harvested: Path, place: Path, headstart: Command, symptom: str
) -> None:
    shutil.copytree(harvested / "run", place / "run")
    write, why = STAGES[symptom]
    path = write(place / "run")
    outcome = headstart("harvest", place / "recipe.yaml")
    assert_refused(outcome, Says(f"{path} cannot be read", why, "it must say what", f"{GOES_ON}{path}"))
    path.unlink()  # the remedy
    done = headstart("harvest", place / "recipe.yaml")
    assert_told(done, Says("complete in", str(place / "run" / "features"), "features: 12 training", ""))


@pytest.mark.parametrize("content", ["", "{", "[]", "[1, 2]", '[{"rows": 3}, {}]', None])
def test_a_broken_report_on_the_rows_is_named_and_the_remedy_works(
    harvested: Path, place: Path, headstart: Command, content: str | None
) -> None:
    shutil.copytree(harvested / "run", place / "run")
    path = place / "run" / "prompts" / "rows.json"
    path.unlink() if content is None else path.write_text(content)
    stage = path.with_name("stage.json")
    outcome = headstart("inspect", place / "recipe.yaml")
    assert_refused(outcome, Says(f"{path} cannot be read", "", "it must say what became of the rows", f"rm {stage}"))
    stage.unlink()  # the remedy
    assert_told(
        headstart("inspect", place / "recipe.yaml"), Says("prompts.jsonl", "12 rows read", "12 prompts kept", "")
    )


# Stores


def store(place: Path) -> Path:
    return place / "run" / "features"


def other_store(place: Path, **about: object) -> Path:
    """A copy of the store whose manifest says something else."""
    copy = place / "other"
    shutil.copytree(store(place), copy)
    path = copy / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **about}))
    return copy


def store_of_tuned_layers(place: Path) -> Path:
    """Made with weights that differ inside their files alone."""
    target = json.loads((store(place) / "manifest.json").read_text())["target"]
    return other_store(place, target={**target, "sampled": "0" * 64})


def flipped_bit(place: Path) -> Path:
    path = store(place) / "train-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return store(place)


def without(place: Path, name: str) -> Path:
    (store(place) / name).unlink()
    return store(place)


def damage(place: Path, kind: str, content: str) -> None:
    """Change the store before a command is typed."""
    manifest = store(place) / "manifest.json"
    if kind == "flip":
        flipped_bit(place)
    elif kind == "remove":
        without(place, content)
    elif kind == "foreign":
        shutil.copy(store(place) / "train-00000.safetensors", store(place) / "train-00009.safetensors")
    elif kind == "other":
        other_store(place, **json.loads(filled(content, zeros="0" * 64)))
    elif kind == "manifest":
        manifest.write_text(content)
    else:
        about = json.loads(manifest.read_text())
        del about["shards"][0]["bytes"]
        manifest.write_text(json.dumps(about))


# What is typed after `headstart store`, and the damage before it.
STORES = table(
    """
merge without stores | merge {new}
    store merge | only | one or more stores must follow it | as in headstart store merge
merge of a store with itself, into itself | merge {store} {store}
    features | exists already | NEW_FOLDER | give another one first
merge into a folder that is there | merge {place} {store}
    merged store | exists already | NEW_FOLDER | give another one first
merge of a folder that is not there | merge {new} {store} {place}/nowhere
    nowhere holds no features | no manifest.json | give a folder of features | headstart harvest RECIPE
merge of a run instead of its features | merge {new} {place}/run
    run holds no features | no manifest.json | such as runs/tiny/features | headstart harvest RECIPE
merge of different formats | merge {new} {store} {other} | other {"dtype": "int8"}
    dtype: 'float32' in | 'int8' in | equal taps, dtype and target | harvest one of them again
merge of different taps | merge {new} {store} {other} | other {"taps": [0]}
    taps: [1, 2, 3] in | [0] in | equal taps, dtype and target | harvest one of them again
merge of different targets | merge {new} {store} {other} | other {"target": {"sha256": "{zeros}"}}
    target: the content | cannot be merged | equal taps, dtype and target | harvest one of them again
merge of a damaged store | merge {new} {store} | flip
    train-00001.safetensors | its checksum differs | 1 shard | harvest
verify of a flipped bit | verify {store} | flip
    train-00001.safetensors | its checksum differs from the manifest's | 1 shard | harvest
verify of a lost shard | verify {store} | remove train-00002.safetensors
    train-00002.safetensors | in the manifest but missing on disk | 1 shard | and harvest
verify of a foreign shard | verify {store} | foreign
    train-00009.safetensors | is not in the manifest | 1 shard | remove
verify of two stores | verify {store} {store}
    store verify | 2 folders are given | one is allowed | once for each
stats of two stores | stats {store} {place}
    store stats | 2 folders are given | one is allowed | once for each
stats of a lost shard | stats {store} | remove train-00000.safetensors
    train-00000.safetensors | missing on disk | which reuses undamaged shards | harvest again
stats of a store without a manifest | stats {store} | remove manifest.json
    holds no features | no manifest.json | give a folder of features | headstart harvest RECIPE
an empty manifest | verify {store} | manifest
    manifest.json cannot be read | Expecting value | a harvest's manifest is needed | AGAIN
a torn manifest | verify {store} | manifest {"shards": [
    manifest.json cannot be read | Expecting value | a harvest's manifest is needed | AGAIN
a manifest that is a list | verify {store} | manifest []
    manifest.json cannot be read | no list of shards | a harvest's manifest is needed | AGAIN
a manifest without shards | verify {store} | manifest {"taps": [1]}
    manifest.json cannot be read | no list of shards | a harvest's manifest is needed | AGAIN
a manifest of names | verify {store} | manifest {"taps": [1], "shards": ["train-00000.safetensors"]}
    manifest.json cannot be read | no list of shards | a harvest's manifest is needed | AGAIN
a manifest entry without its size | verify {store} | unsized
    manifest.json cannot be read | no list of shards | a harvest's manifest is needed | AGAIN
an unknown command | mend {store}
    command | 'mend' | choose from | verify
no folder | stats
    arguments are required | folder | usage | store
""",
    NEW_FOLDER="a new folder is needed for the merged store",
    AGAIN="harvest again, which reuses undamaged shards",
)


@pytest.mark.parametrize("symptom", STORES)
def test_a_store_command_that_cannot_work_says_why(
    harvested: Path, place: Path, headstart: Command, symptom: str
) -> None:
    shutil.copytree(harvested / "run" / "features", store(place))
    (command, *damages), facts = STORES[symptom]
    for each in damages:
        kind, _, content = each.partition(" ")
        damage(place, kind, content)
    places = {"place": place, "store": store(place), "new": place / "new", "other": place / "other"}
    assert_refused(headstart("store", *filled(command, **places).split()), facts)
    assert not list(place.glob("new*"))


def without_stage(place: Path) -> Path:
    return without(place, "stage.json")


USED: dict[str, tuple[Callable[[Path], Path], tuple[str, ...], Says]] = {
    "data.store is nowhere": (
        lambda place: place / "nowhere",
        (),
        Says("nowhere", "no manifest.json", "give a folder of features", "headstart harvest RECIPE"),
    ),
    "data.store is a run": (
        lambda place: place / "run",
        (),
        Says("run holds no features", "no manifest.json", "such as runs/tiny/features", "headstart harvest RECIPE"),
    ),
    "data.store lacks a tap": (
        store,
        ("head.taps=[0]",),
        Says("data.store", "holds taps [1, 2, 3]", "the head reads [0]", "remove data.store to harvest one"),
    ),
    "data.store is of another target": (
        lambda place: other_store(place, target={"path": "elsewhere", "sha256": "0" * 64}),
        (),
        Says("data.store", "elsewhere", "give a store of this target", "remove data.store to harvest one"),
    ),
    "data.store is of a target that was tuned in its middle": (
        store_of_tuned_layers,
        (),
        Says(
            "data.store", "made with other weights", "give a store of this target", "remove data.store to harvest one"
        ),
    ),
    "data.store says nothing of its target": (
        lambda place: other_store(place, target=None),
        (),
        Says("data.store", "None", "give a store of this target", "remove data.store to harvest one"),
    ),
    "data.store lost its stage.json": (
        without_stage,
        (),
        Says("data.store", "has no stage.json", "a whole folder of features is needed", "copy it with all its files"),
    ),
}


@pytest.mark.parametrize("symptom", USED)
def test_a_store_that_a_recipe_cannot_use_is_named(
    harvested: Path, place: Path, headstart: Command, symptom: str
) -> None:
    shutil.copytree(harvested / "run" / "features", store(place))
    folder, overrides, says = USED[symptom]
    assert_refused(headstart("harvest", place / "recipe.yaml", f"data.store={folder(place)}", *overrides), says)


def test_a_target_without_a_chat_template_takes_prompts_with_responses(
    harvested: Path, place: Path, headstart: Command
) -> None:
    """They are plain text then; a check before the work used to ask for a template."""
    shutil.copytree(harvested / "target", place / "target")
    (place / "target" / "chat_template.jinja").unlink()
    rows_of(place / "prompts.jsonl", *[{"prompt": f"p {number} ", "response": "word"} for number in range(12)])
    rows_of(place / "heldout.jsonl", {"prompt": "other ", "response": "word"})
    options = f"target.path={place / 'target'}", "data.responses=given"
    outcome = headstart("harvest", place / "recipe.yaml", *options)
    assert_told(outcome, Says("12 rows read", "12 prompts kept", "complete in", "12 training and 1 held-out samples"))

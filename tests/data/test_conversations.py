"""Laws of user data: all known forms of a row mean the same, and every unusable row is reported."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_chat_masks import template_of
from tiny_run import END_OF_TEXT, build_run, build_target, build_tokenizer, tiny_recipe

from headstart.common.files import read_jsonl, write_jsonl
from headstart.data_pipelines.features.shards import FeatureStore
from headstart.data_pipelines.harvest import harvest
from headstart.data_pipelines.inspect import inspect
from headstart.data_pipelines.prompts.chat_masks import ChatMasks, encode_prompt, join
from headstart.data_pipelines.prompts.conversations import Conversation, PromptAndAnswer, parse_row
from headstart.data_pipelines.prompts.prompts import ROW_REPORT, key_of, read_prompts
from headstart.data_pipelines.prompts.row_report import RowReport
from headstart.data_pipelines.prompts.rows import BadRow, NotJson, read_rows
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.recipes import Recipe
from headstart.recipes.schema import DataSection


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(contents)]


SYSTEM, ASKED, SAID = ({"role": role, "content": role[0]} for role in ("system", "user", "assistant"))
FUNCTION = {"name": "add", "arguments": {"a": 2}}
AS_TEXT = {"name": "add", "arguments": '{"a": 2}'}
CALL = {"type": "function", "function": FUNCTION}
SPELLINGS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {  # the turns, and rows that mean them
    "a conversation": (
        [SYSTEM, ASKED, SAID],
        [
            {"messages": [SYSTEM, ASKED, SAID]},
            {"messages": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "u"}]}, SAID]},
            {"system": "s", "messages": [ASKED, SAID]},
            {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}], "system": "s"},
            {"messages": None, "conversations": [SYSTEM, ASKED | {"name": None}, SAID | {"name": None}], "tools": None},
        ],
    ),
    "a tool call": (
        [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
        [
            {"messages": [ASKED, {"role": "assistant", "tool_calls": [FUNCTION]}]},
            {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [{"function": FUNCTION}]}]},
            {"messages": [ASKED, {"role": "assistant", "tool_calls": [CALL | {"function": AS_TEXT}]}]},
        ],
    ),
    "a prompt and its answer": (
        [ASKED, SAID],
        [
            {"prompt": [ASKED], "completion": [SAID]},
            {"prompt": [ASKED], "response": [SAID]},
            {"prompt": [ASKED], "completion": "a"},
            {"prompt": "u", "response": "a", "completion": None, "tokens": None, "messages": None},
        ],
    ),
    "a prompt": ([ASKED], [{"prompt": [ASKED]}]),
    "a prompt with a system turn": ([SYSTEM, ASKED], [{"prompt": "u", "system": "s"}]),
}


@pytest.mark.parametrize("form", SPELLINGS)
def test_all_spellings_of_a_row_mean_the_same(form: str) -> None:
    wanted, rows = SPELLINGS[form]
    assert [parse_row(row) for row in rows] == [Conversation(wanted)] * len(rows)


def test_fields_without_content_refuse_no_row() -> None:
    plain = turns("a", "b")
    assert parse_row({"text": "a b", "response": " "}) == parse_row({"text": "a b", "completion": []}) == "a b"
    assert parse_row({"messages": plain, "response": "", "labels": None}) == parse_row({"messages": plain})
    chat = [{"role": "system", "content": "x"}, *plain]
    assert parse_row({"messages": chat, "system": "x "}) == parse_row({"messages": chat, "system": " "})


def test_json_lines_parquet_datasets_and_text_give_the_same_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": turns("hi", "hello")}, {"messages": turns("and?")}]
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": dataset}).save_to_disk(tmp_path / "splits")
    write_jsonl(tmp_path / "rows.jsonl", rows)
    (tmp_path / "hub").mkdir()
    dataset.to_parquet(tmp_path / "hub" / "train.parquet")
    sources = [str(tmp_path / name) for name in ("rows.jsonl", "rows.parquet", "saved", "splits")]
    for source in [*sources, f"hf:{tmp_path / 'hub'}:train"]:
        found = list(read_rows(source))
        assert [row.line for row in found] == [1, 2], source
        assert [row.fields for row in found] == rows, source


def tool_rows() -> list[dict[str, Any]]:
    """Rows whose calls and tools share no keys, so that Arrow pads all of them; some hold nothing, and some null."""

    def row(name: str, arguments: dict[str, Any], properties: dict[str, Any], **fields: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        tool = {"name": name, "parameters": {"type": "object", "properties": properties}}
        said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return {"messages": said, "tools": [{"type": "function", "function": tool}], **fields}

    return [
        row("weather", {"city": "Oslo"}, {"city": {"type": "string", "enum": ["Oslo", None]}}),
        row("rates", {"of": {"day": 5, "bank": "x"}, "in": ["a", "b"]}, {"of": {"type": "object"}}, id=3),
        row("now", {}, {}),
        {"messages": turns("hi", "hello"), "created": None},
    ]


def arrow_tables(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows as tables of several writers: `json` is text of the type arrow.json."""
    pyarrow, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    columns = {name: [row.get(name) for row in rows] for row in rows for name in row}
    features = {name: datasets.List(datasets.Json()) for name in ("messages", "tools")}
    whole = {"id": datasets.Value("int64"), "created": datasets.Value("null"), **features}
    return {
        "pyarrow": pyarrow.table(columns),
        "datasets": datasets.Dataset.from_list(rows).data.table,
        "json": datasets.Dataset.from_dict(columns, features=datasets.Features(whole)).data.table,
    }


def test_keys_that_arrow_adds_to_a_row_are_not_content(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = tool_rows()
    wanted = [parse_row(row) for row in rows]
    for writer, table in arrow_tables(rows).items():
        parquet.write_table(table, tmp_path / "rows.parquet")
        assert [parse_row(row.read()) for row in read_rows(str(tmp_path / "rows.parquet"))] == wanted, writer


@pytest.mark.parametrize(
    ("kind", "value", "found"),
    [
        (lambda pa: pa.map_(pa.string(), pa.int64()), [("a", 1), ("b", None)], {"a": 1, "b": None}),  # its own keys
        (lambda pa: pa.large_list(pa.struct({"a": pa.large_string()})), [{"a": "b"}, {"a": None}], [{"a": "b"}, {}]),
        (lambda pa: pa.dictionary(pa.int8(), pa.string()), "a", "a"),
        (lambda pa: pa.json_(), '{"a": null}', {"a": None}),
        (lambda pa: pa.json_(), "{", "Expecting property name"),
        (lambda pa: pa.json_(), r'"\ud800"', "surrogates not allowed"),
        (lambda pa: pa.map_(pa.int64(), pa.string()), [(1, "a")], "type map<int64, "),
        (lambda pa: pa.list_(pa.timestamp("ns")), [1], "type timestamp[ns]"),
        (lambda pa: pa.struct({"a": pa.binary()}), {"a": b"a"}, {"a": b"a"}),
    ],
)
def test_arrow_data_is_read_as_json_or_named(tmp_path: Path, kind: Any, value: Any, found: Any) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"prompt": ["a", "b"], "x": pyarrow.array([value, None], kind(pyarrow))})
    parquet.write_table(table, tmp_path / "rows.parquet")
    first, second = (row.read() for row in read_rows(str(tmp_path / "rows.parquet")))
    assert second == {"prompt": "b", "x": None}
    if not isinstance(first["x"], NotJson):
        assert first["x"] == found
        return
    assert parse_row(first) == parse_row({"prompt": "a"})  # a column that is not read may hold anything
    with pytest.raises(BadRow, match=f"prompt is Arrow data that JSON cannot hold .*{re.escape(found)}"):
        parse_row({"prompt": first["x"]})


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A harvest of two conversations, a text, and tokens with a mask; the last row is too long."""
    folder = tmp_path_factory.mktemp("given")
    build_run(folder)
    tokenizer, _ = template_of("chatml")
    build_target(folder / "target", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder / "target")
    rows: list[dict[str, Any]] = [{"messages": turns("a", "first words", "b", "last words")}, {"text": "plain text"}]
    rows += [{"tokens": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]}, {"messages": turns("c" * 120, "too much")}]
    write_jsonl(folder / "prompts.jsonl", rows)
    write_jsonl(folder / "heldout.jsonl", [{"messages": turns("a", "other words", "b", "last words")}])
    harvest(given_recipe(folder))
    return folder


def given_recipe(folder: Path, *overrides: str) -> Recipe:
    sizes = "data.prompt_tokens=60", "data.response_tokens=60", "head.draft_vocab_size=null"
    return tiny_recipe(folder, "data.responses=given", *sizes, *overrides)


@pytest.mark.parametrize("which", ["all", "last"])
def test_given_conversations_become_features_masked_to_the_assistants_words(given, tmp_path, which):
    recipe = given_recipe(given, *(["data.turns=last", f"run_dir={tmp_path}"] if which == "last" else []))
    tokenizer, _ = template_of("chatml")
    harvest(recipe)
    store = FeatureStore(recipe.features_dir, "train")
    trained_on = [tokenizer.decode(sample.tokens[sample.loss_mask]) for sample in (store[n] for n in range(len(store)))]
    words = ["first words<|im_end|>", "last words<|im_end|>"]
    assert trained_on[0] == ("".join(words) if which == "all" else words[1])
    assert trained_on[1] == tokenizer.decode(tokenizer("plain text")["input_ids"][1:])
    assert store[2].loss_mask.tolist() == [False, which == "all", False, True]
    assert len(store) == 3
    [report, _] = json.loads((recipe.prompts_dir / ROW_REPORT).read_text())
    assert [(row["line"], row["kind"]) for row in report["left_out"]] == [(4, "too long")]
    assert store.about["mask_rule"] == f"{which} turns of the assistant"
    [row] = read_jsonl(recipe.prompts_dir / "heldout.jsonl")  # its prompt ends where its last answer begins
    assert str(tokenizer.decode(row["tokens"])).endswith("<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("harvested", [False, True])
def test_inspect_colours_the_trained_on_text_and_names_dropped_rows(given, tmp_path, harvested):
    screen = io.StringIO()
    recipe = given_recipe(given, *([] if harvested else [f"run_dir={tmp_path}"]))
    inspect(recipe, Console(file=screen, force_terminal=True, width=200))
    shown = screen.getvalue()
    green = re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", shown)
    assert green[:2] == ["first words<|im_end|>", "last words<|im_end|>"]
    assert "too long" in shown
    assert "tokens per sample" in shown


def test_the_tokens_of_a_prompt_are_those_of_the_prompt_alone() -> None:
    """A token of the joined text may hold the end of the prompt and the start of the completion."""
    tokenizer = build_tokenizer()
    for prompt, answer in (("the", " target"), ("the ", "target"), ("t", "he target"), ("a", "b" + END_OF_TEXT)):
        joined = join(ChatTemplate(tokenizer), PromptAndAnswer(prompt, answer))
        alone = tokenizer(prompt)["input_ids"]
        assert joined.tokens[: len(alone)] == alone
        assert joined.spans == [(len(alone), len(joined.tokens))]
        assert tokenizer.decode(joined.tokens) == prompt + answer.removesuffix(END_OF_TEXT) + END_OF_TEXT


def test_the_target_answers_the_last_prompt_of_a_row_whatever_was_answered() -> None:
    template = ChatTemplate(build_tokenizer())
    for row, prompt in (
        ({"prompt": "what?", "response": "that"}, "[user]what?[assistant]"),
        ({"prompt": "what?", "completion": "that"}, "what?"),
        ({"prompt": "what?", "chosen": "that", "rejected": "this"}, "[user]what?[assistant]"),
        ({"messages": turns("a", "kept", "b", "dropped")}, "[user]a[assistant]kept[user]b[assistant]"),
    ):
        tokens = encode_prompt(ChatMasks(template), parse_row(row, template.is_turn)).tokens
        assert template.tokenizer.decode(tokens) == prompt


def test_plain_texts_that_start_alike_are_not_taken_for_the_same(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    write_jsonl(path, [{"text": "go on"}, {"text": "go home"}])
    tokenizer, report = build_tokenizer(), RowReport(str(path))
    fields: dict[str, Any] = {"num_prompts": 9, "prompt_tokens": 8, "response_tokens": 40, "responses": "given"}
    sizes = DataSection(prompts="prompts.jsonl", heldout_prompts=Path("heldout.jsonl"), **fields)
    held_out = {key_of(row) for row in read_prompts(ChatTemplate(tokenizer), sizes, 1, RowReport(str(path)))}
    rows = read_prompts(ChatTemplate(tokenizer), sizes, None, report, held_out)
    assert [tokenizer.decode(row["tokens"] + row["response"]) for row in rows] == ["go home"]

"""Laws of prompts that the target writes itself (data.prompts self): as many as asked for, usable, reproducible."""

import json
import random
import shutil
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from bad_inputs import assert_raises, table
from launches import finish, launch_module
from test_chat_masks import FAMILIES, template_of
from tiny_run import build_chat_run, build_letters, tiny_recipe
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from headstart.common.files import read_jsonl
from headstart.data_pipelines.harvest import harvest
from headstart.data_pipelines.prompts.candidates import CandidateWriter, UserTemplate, next_candidates
from headstart.data_pipelines.prompts.prompts import describe_prompts, make_prompts_alone
from headstart.data_pipelines.prompts.row_report import RowReport
from headstart.data_pipelines.prompts.selection import RECENT_CANDIDATES, SIMILARITY_MIN, SeenTexts, Selection, shingles
from headstart.data_pipelines.stages.stage import Json
from headstart.inference.core.request import Generation, Request
from headstart.inference.generate.loading import held_out_prompts
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.recipes import Recipe
from headstart.recipes.schema import DataSection


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_chat_run(tmp_path_factory.mktemp("chat"), num_prompts=5, heldout_samples=2).parent
    make_prompts_alone(tiny_recipe(folder))
    return folder


def own_recipe(folder: Path, tmp_path: Path, *overrides: str) -> Recipe:
    return tiny_recipe(folder, f"run_dir={tmp_path / 'run'}", *overrides)


def rows(recipe: Recipe, split: str = "train") -> list[Json]:
    return list(read_jsonl(recipe.prompts_dir / f"{split}.jsonl"))


def kept_candidates(recipe: Recipe) -> list[Json]:
    """The candidates that became prompts, the held-out ones first."""
    tokens = [row["tokens"] for row in rows(recipe, "heldout") + rows(recipe)]
    found = {tuple(row["tokens"]): row for row in read_jsonl(recipe.prompts_dir / "candidates.jsonl")}
    return [found[tuple(each)] for each in tokens]


def prompt_files(recipe: Recipe) -> dict[str, bytes]:
    return {name: (recipe.prompts_dir / name).read_bytes() for name in ("train.jsonl", "heldout.jsonl", "rows.json")}


def data_section(**fields: Any) -> DataSection:
    wanted = {"prompts": "self", "heldout_prompts": "self", "num_prompts": 4, "heldout_samples": 1, **fields}
    return DataSection.model_validate(wanted)


def test_as_many_prompts_as_asked_for_are_usable_and_other_candidates_are_counted(folder: Path) -> None:
    recipe, tokenizer = tiny_recipe(folder), build_letters()
    assert (len(rows(recipe)), len(rows(recipe, "heldout"))) == (5, 2)
    kept = kept_candidates(recipe)
    for row in kept:
        words = row["turns"][0]
        assert len(words) <= 40
        assert sum(map(str.isalpha, words)) >= 10
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": words}], tokenize=False)
        assert row["tokens"] == tokenizer(rendered)["input_ids"]
    candidates = [row["candidate"] for row in kept]
    assert candidates == sorted(candidates)  # the first are held out
    texts = [shingles(row["turns"][0]) for row in kept]
    assert all(len(one & other) / len(one | other) < SIMILARITY_MIN for one, other in combinations(texts, 2))
    rejected = json.loads((recipe.prompts_dir / "stage.json").read_text())["facts"]["rejected"]
    assert rejected["no end within data.self_prompt_tokens"] > 0
    train, heldout = json.loads((recipe.prompts_dir / "rows.json").read_text())
    assert train["rows"] + heldout["rows"] == 7 + sum(rejected.values())
    assert "candidates written by the target, 5 kept; dropped" in describe_prompts(recipe)


@pytest.mark.slow
@pytest.mark.parametrize("override", ["target.split=null", "target.split=tensor"])
def test_two_ranks_write_the_prompts_of_one(folder: Path, tmp_path: Path, override: str) -> None:
    recipe = own_recipe(folder, tmp_path)
    command = "ddp", 2, "data_pipelines.harvest", folder / "recipe.yaml", override, f"run_dir={tmp_path / 'run'}"
    finish(launch_module(*command))
    assert prompt_files(recipe) == prompt_files(tiny_recipe(folder))


@pytest.mark.slow
def test_more_prompts_keep_the_first_and_are_those_of_a_fresh_run(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    first = rows(own_recipe(folder, tmp_path))
    more = own_recipe(folder, tmp_path, "data.num_prompts=20")
    make_prompts_alone(more)
    fresh = own_recipe(folder, tmp_path / "fresh", "data.num_prompts=20")
    make_prompts_alone(fresh)
    assert rows(more)[:5] == first
    assert prompt_files(more) == prompt_files(fresh)


def test_a_harvest_and_its_measurements_run_on_the_targets_own_prompts(folder: Path, tmp_path: Path) -> None:
    recipe = own_recipe(folder, tmp_path)
    shutil.copytree(folder / "run", recipe.run_dir)
    harvest(recipe)
    assert [each.prompt for each in held_out_prompts(recipe)] == [row["tokens"] for row in rows(recipe, "heldout")]


@pytest.mark.slow
def test_system_prompts_steer_the_words(folder: Path, tmp_path: Path) -> None:
    recipe = own_recipe(folder, tmp_path, "data.self_system_prompts=[maths, null]")
    make_prompts_alone(recipe)
    plain = {row["candidate"]: row["turns"] for row in read_jsonl(folder / "run/prompts/candidates.jsonl")}
    steered = {row["candidate"]: row["turns"] for row in read_jsonl(recipe.prompts_dir / "candidates.jsonl")}
    shared = plain.keys() & steered.keys()
    assert all((plain[number] == steered[number]) == (number % 2 == 1) for number in shared)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_opening_ends_where_the_words_begin_in_every_family(name: str) -> None:
    tokenizer, _ = template_of(name)
    template = UserTemplate(ChatTemplate(tokenizer), data_section())
    opening = template.opening(0)
    words = "What is 2+2?"
    written = list(tokenizer(opening.space + words, add_special_tokens=False)["input_ids"])
    whole, wanted = template.prompt(words).tokens, [*opening.tokens, *written, opening.end]
    assert whole[: len(wanted)] == wanted
    assert tokenizer.decode(whole).startswith(tokenizer.decode(opening.tokens) + opening.space + words)


WORDS = "please count all letters of this line"


def scripted(said: str, tokenizer: PreTrainedTokenizerFast, ends: bool = True) -> Any:
    def write(requests: list[Request]) -> list[Generation]:
        tokens = list(tokenizer(said, add_special_tokens=False)["input_ids"])
        last = [list(request.end_tokens or ())[:1] if ends else [] for request in requests]
        return [Generation(tokens + end, finish="end" if ends else "length") for end in last]

    return write


@pytest.mark.parametrize(
    ("said", "ends", "why"),
    [
        (WORDS, True, None),
        (WORDS + " ", True, None),  # the template trims the words
        (WORDS, False, "no end within data.self_prompt_tokens"),
        ("", True, "too short"),
        ("a b c", True, "too short"),
        ("one two three <end> four", True, "template marks"),
        ("one two three [PAD] four", True, "template marks"),  # a token that the target lacks
    ],
)
def test_what_is_wrong_with_a_candidate_alone_is_found(folder, tmp_path, said, ends, why):
    """A good one becomes the prompt that a server renders from the words."""
    tokenizer, recipe = build_letters(), own_recipe(folder, tmp_path)
    tokenizer.chat_template = str(tokenizer.chat_template).replace("m.content", "m.content | trim")
    template = UserTemplate(ChatTemplate(tokenizer), recipe.data)
    size = len(tokenizer)
    tokenizer.add_tokens(["[PAD]"])
    writer = CandidateWriter(recipe, template, [0], size)
    [candidate] = writer.candidates([5], scripted(said, tokenizer, ends))
    assert (candidate["candidate"], candidate["rejected"]) == (5, why)
    assert candidate["tokens"] == (template.prompt(WORDS).tokens if why is None else [])


def candidate(number: int, words: str, rejected: str | None = None) -> Json:
    return {"candidate": number, "turns": [words], "tokens": [number], "rejected": rejected}


def test_a_prompt_that_repeats_another_or_a_held_out_one_is_left_out() -> None:
    rows = [{"id": 0, "tokens": [6], "cut": False}]
    data = data_section(num_prompts=100, heldout_prompts="heldout.jsonl")
    selection = Selection(data, rows, RowReport("file"), ["Which planets have rings?"])
    texts = [
        "Write a poem about the autumn wind, please",
        "write a  poem about the autumn wind, please!",
        "Write a poem about the autumn winds, please",
        "Write a recipe for a soup of autumn pumpkins",
        "which planets have rings",
        "What is the boiling point of water?",
        "the file has the tokens of this one",
    ]
    for number, text in enumerate(texts):
        selection.take(candidate(number, text))
    selection.take(candidate(7, "cut off", "too short"))
    assert [row["tokens"] for row in selection.train] == [[0], [3], [5]]
    counts = {"repeats another": 2, "too short": 1, "held out too": 2}
    assert selection.rejections() == counts


def test_a_target_that_always_writes_the_same_is_given_up_after_500_candidates(folder: Path) -> None:
    recipe = tiny_recipe(folder)
    selection = Selection(recipe.data)
    numbers, _ = next_candidates(own_recipe(folder, folder / "other"), selection)
    assert len(numbers) <= RECENT_CANDIDATES  # no more are written before the selection may give up
    with pytest.raises(ValueError, match=r"data\.num_prompts: 5 given, .* in the last 500 .* up to 0 .* lower it"):
        selection.take_all({number: candidate(number, WORDS) for number in range(RECENT_CANDIDATES)})


def test_near_duplicates_are_found_among_many_texts() -> None:
    """Every text of 200 is found again after one letter has changed, and no other is."""
    seen, numbers = SeenTexts(), range(200)
    for number in numbers:
        seen.add(text_about(number), "repeats")
    assert all(seen.similar(text_about(number).replace("z", "y", 1)) for number in numbers)
    assert not any(seen.similar(text_about(number)) for number in range(200, 250))


def text_about(number: int) -> str:
    rng = random.Random(number)
    return "z" + " ".join("".join(rng.choices("abcdefghij", k=6)) for _ in range(10))


REFUSED = table("""
a base model | none | null => data.prompts | self given | needs a chat template | choose the chat
a template without a user turn | [assistant] | null => data.prompts | self given | rules out | choose a
a template that changes words | {% for m in messages %}[{{ m.content.upper() }}]{% endfor %} | null => data.prompts
a template without system prompts | {% if messages[1:] %}NO_SYSTEM{% endif %}OWN | data.self_system_prompts=[maths]
    data.self_system_prompts | 'maths' given | no system turn | remove it
a system prompt that leaves no room | OWN | data.prompt_tokens=6 => data.prompt_tokens | 6 given | 7 or more are allowed
""")


@pytest.mark.parametrize("symptom", REFUSED)
def test_what_rules_out_the_targets_own_prompts_is_named(folder: Path, tmp_path: Path, symptom: str) -> None:
    (source, override), facts = REFUSED[symptom]
    path = shutil.copytree(folder / "target", tmp_path / "target") / "chat_template.jinja"
    own = path.read_text()
    if source == "none":
        path.unlink()
    else:
        path.write_text(source.replace("OWN", own).replace("NO_SYSTEM", "{{ raise_exception('no system turn') }}"))
    overrides = [f"target.path={tmp_path / 'target'}", *([] if override == "null" else [override])]
    recipe = own_recipe(folder, tmp_path, *overrides)
    assert_raises(lambda: make_prompts_alone(recipe), facts)
    assert not (recipe.prompts_dir / "train.jsonl").exists()


def test_own_prompts_without_places_of_tokens_are_refused() -> None:
    slow = ByT5Tokenizer(chat_template=build_letters().chat_template)
    said = "data.prompts: self given | tokenizer is written in Python | name a file"
    assert_raises(lambda: UserTemplate(ChatTemplate(slow), data_section()), said)

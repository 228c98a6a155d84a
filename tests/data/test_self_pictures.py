"""Laws of prompts about pictures that the target writes itself (data.self_pictures)."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from bad_inputs import Says, assert_raises
from PIL import Image
from seeing_target import build_seeing_chat_run, file_bytes, picture
from tiny_run import build_letters, build_target, contents, tiny_recipe

from headstart.common.files import append_jsonl, read_jsonl
from headstart.data_pipelines.features.shards import FeatureStore
from headstart.data_pipelines.harvest import harvest
from headstart.data_pipelines.preflight import check_harvest
from headstart.data_pipelines.prompts import candidates as self_prompts
from headstart.data_pipelines.prompts.prompts import load_chat_template, make_prompts_alone
from headstart.data_pipelines.prompts.selection import Selection, pictures_of
from headstart.data_pipelines.stages.stage import Json
from headstart.inference.images.pictures import Sources, read_pictures
from headstart.inference.images.processor import load_processor
from headstart.inference.images.prompts import ImagePrompts
from headstart.recipes import Recipe
from headstart.recipes.schema import DataSection


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_seeing_chat_run(tmp_path_factory.mktemp("asked"), num_prompts=3, heldout_samples=1).parent
    harvest(tiny_recipe(folder))
    return folder


@pytest.fixture
def shown(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder / "shown", tmp_path / "shown")


def own_recipe(folder: Path, shown: Path, *overrides: str) -> Recipe:
    return tiny_recipe(folder, f"data.self_pictures={shown}", f"run_dir={shown.parent / 'run'}", *overrides)


def candidates(recipe: Recipe) -> dict[int, Json]:
    return {row["candidate"]: row for row in read_jsonl(recipe.prompts_dir / "candidates.jsonl")}


def test_every_second_candidate_asks_about_a_picture_as_a_server_renders_it(folder: Path) -> None:
    recipe = tiny_recipe(folder)
    asked = {number: row for number, row in candidates(recipe).items() if row["rejected"] is None}
    assert {number % 2 for number, row in asked.items() if "images" in row} == {1}
    assert {number % 2 for number, row in asked.items() if "images" not in row} == {0}
    prompts = ImagePrompts(load_chat_template(recipe), load_processor(folder / "target"))
    pictures = {file.read_bytes() for file in (folder / "shown").iterdir()}
    seen = [row for row in asked.values() if "images" in row]
    assert len({row["images"]["pictures"][0] for row in seen}) > 1
    for row in seen:
        path = recipe.prompts_dir / "pictures" / row["images"]["pictures"][0]
        assert path.read_bytes() in pictures
        content = [{"type": "image", "image": str(path)}, {"type": "text", "text": row["turns"][0]}]
        images = prompts.encode(*read_pictures([{"role": "user", "content": content}], Sources(folder)))
        assert row["tokens"] == images.prompt(recipe.data.prompt_tokens)


def test_both_kinds_are_kept_held_out_and_harvested(folder: Path) -> None:
    recipe, kept = tiny_recipe(folder), candidates(tiny_recipe(folder)).values()
    rows = {split: list(read_jsonl(recipe.prompts_dir / f"{split}.jsonl")) for split in ("heldout", "train")}
    assert {split: len(each) for split, each in rows.items()} == {"heldout": 1, "train": 3}
    expected = [(row["tokens"], row.get("images")) for row in kept if row["rejected"] is None]
    found = [(row["tokens"], row.get("images")) for each in rows.values() for row in each]
    assert [each for each in expected if each in found] == found  # in the order of the candidates
    assert {"images" in row for row in rows["train"]} == {True, False}
    assert len(FeatureStore(recipe.features_dir, "train")) == 3


def test_a_target_writes_other_words_about_another_picture_and_the_run_of_the_first_is_refused(folder, shown):
    for path in shown.iterdir():
        Image.open(path).rotate(180).save(path)
    recipe = own_recipe(folder, shown)
    make_prompts_alone(recipe)
    before, now = candidates(tiny_recipe(folder)), candidates(recipe)
    same = {number: before[number]["turns"] == now[number]["turns"] for number in before.keys() & now.keys()}
    assert all(same[number] for number in same if number % 2 == 0)
    assert not any(same[number] for number in same if number % 2 == 1 and len(before[number]["turns"][0]) > 9)
    picture("yellow").save(shown / "red.png")
    said = "data.self_pictures: the content has changed | choose another run_dir"
    assert_raises(lambda: make_prompts_alone(recipe), said)


def test_a_killed_run_goes_on_after_its_last_candidate_in_batches_of_any_size(folder, shown, monkeypatch):
    """candidates   0..7 | torn line   killed   the torn one and all after it by the same command, pictures too"""
    recipe, written = own_recipe(folder, shown, "data.generate_batch=12"), list[int]()

    def killed_once(journal: Path, rows: list[Json]) -> None:
        append_jsonl(journal, rows)
        was_killed = len(written) >= 5
        written.extend(row["candidate"] for row in rows)
        if not was_killed and len(written) >= 5:
            journal.write_text(journal.read_text()[:-20])  # the last line is torn
            raise KeyboardInterrupt

    monkeypatch.setattr(self_prompts, "append_jsonl", killed_once)
    with pytest.raises(KeyboardInterrupt):
        make_prompts_alone(recipe)
    make_prompts_alone(recipe)
    assert len(written) == len({*written}) + 1  # only the torn one is written again
    made, its = contents(recipe.prompts_dir), contents(tiny_recipe(folder).prompts_dir)
    assert all(made[name] == its[name] for name in ("train.jsonl", "heldout.jsonl", "rows.json"))


def test_broken_and_large_pictures_are_counted_and_named_and_too_many_broken_ones_stop_the_run(folder, shown):
    (shown / "red.png").write_bytes((shown / "red.png").read_bytes()[:60])
    (shown / "blue.png").write_bytes(file_bytes(picture(cells=8)))
    few = "data.num_prompts=1", "data.heldout_samples=1"
    recipe = own_recipe(folder, shown, "data.prompt_tokens=60", *few)
    make_prompts_alone(recipe)
    large = {row["turns"][0] for row in candidates(recipe).values() if row["rejected"] == "too long"}
    assert large == {"72 tokens before the user's words"}
    bad = [row for report in json.loads((recipe.prompts_dir / "rows.json").read_text()) for row in report["left_out"]]
    named = {row["why"] for row in bad if row["kind"] == "picture"}
    assert ["data.self_pictures: red.png: " in why and "unreadable" in why for why in named] == [True]
    for path in shown.iterdir():
        path.write_bytes(b"GIF8")
    other = own_recipe(folder, shown, f"run_dir={shown.parent}/other", *few)
    says = "6 of 12 candidates show pictures that cannot be read, up to 1% are allowed | : blue.png: | remove them"
    assert_raises(lambda: make_prompts_alone(other), says)


def test_the_same_question_about_another_picture_is_another_prompt() -> None:
    data: dict[str, Any] = {"prompts": "self", "heldout_prompts": "self", "num_prompts": 9, "heldout_samples": 1}
    selection = Selection(DataSection.model_validate({**data, "self_pictures": "shown"}))
    for number, shown in enumerate([(), ("a",), ("b",), ("b",), ()]):
        images = {"images": {"text": "", "pictures": list(shown)}} if shown else {}
        row = {"candidate": number, "turns": ["what is the colour here"], "tokens": [1, 2], "rejected": None}
        selection.take({**row, **images})
    kept = [pictures_of(row) for row in selection.heldout + selection.train]
    assert kept == [(), ("a",), ("b",)]
    assert selection.rejections() == {"repeats another": 2}


@pytest.mark.parametrize("symptom", ["missing", "empty", "text alone", "template"])
def test_what_rules_out_prompts_about_pictures_is_named_before_any_work(folder, shown, symptom):
    overrides, says = [], Says("data.self_pictures", f"{shown} given", "rules out", "leave the field out")
    if symptom in ("missing", "empty"):
        shutil.rmtree(shown)
        says = Says("data.self_pictures", f"{shown} given", "a folder with pictures (.png, .jpg", "put some there")
    if symptom == "empty":
        shown.mkdir()
        (shown / "notes.txt").write_text("no picture")
    if symptom == "text alone":
        target = build_target(shown.parent / "target", vocab_size=30, tokenizer=build_letters())
        overrides = [f"target.path={target}"]
    if symptom == "template":
        target = shutil.copytree(folder / "target", shown.parent / "target")
        text = (target / "chat_template.jinja").read_text()
        (target / "chat_template.jinja").write_text(text.replace("in m.content %}", "in m.content | reverse %}"))
        overrides = [f"target.path={target}"]
    recipe = own_recipe(folder, shown, *overrides)
    assert_raises(lambda: check_harvest(recipe), says)
    assert_raises(lambda: make_prompts_alone(recipe), says)

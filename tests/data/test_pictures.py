"""Laws of training data with pictures: which picture a row shows, and that its states are those of the target."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import slow
from PIL import Image as pil
from seeing_target import COLOURS, build_seeing_run, data_url, picture
from tiny_run import copy_run, tiny_recipe
from torch.testing import assert_close

from headstart.common.files import read_growing_jsonl, read_jsonl, write_jsonl
from headstart.data_pipelines.features.shards import FeatureStore
from headstart.data_pipelines.harvest import harvest
from headstart.data_pipelines.prompts.conversations import Conversation, parse_row
from headstart.data_pipelines.prompts.prompts import make_prompts
from headstart.data_pipelines.prompts.rows import BadRow
from headstart.heads.kinds.checkpoint import load_head_for
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.engine.loop import generate_batch
from headstart.inference.generate.loading import held_out_prompts, taps_to_read
from headstart.inference.images.kept import KeptPictures
from headstart.inference.report.command import report
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe
from headstart.trainers.eagle import train

PLACE, ASK = {"type": "image"}, {"type": "text", "text": "why?"}
FILE, URL = {"type": "image", "image": "a"}, {"type": "image_url", "image_url": {"url": "a"}}
ANSWER = {"role": "assistant", "content": "red"}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_seeing_run(tmp_path_factory.mktemp("seen")).parent
    harvest(tiny_recipe(folder))
    return folder


def prompts(recipe: Recipe) -> list[dict[str, Any]]:
    return list(read_jsonl(recipe.prompts_dir / "train.jsonl"))


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else [*content]}


ROWS: dict[str, tuple[dict[str, Any], list[Any], tuple[Any, ...]]] = {
    "a column before the first text": ({"prompt": "why?", "images": ["a", "b"]}, [PLACE, PLACE, ASK], ("a", "b")),
    "one picture": ({"prompt": "why?", "response": "red", "image": "a"}, [PLACE, ASK], ("a",)),
    "places of a column": ({"messages": [user(ASK, PLACE)], "images": ["a"]}, [ASK, PLACE], ("a",)),
    "marks in the text": ({"messages": [user("<image>\nwhy?"), ANSWER], "image": "a"}, [PLACE, ASK], ("a",)),
    "parts with their own": ({"messages": [user(FILE, ASK, URL)]}, [PLACE, ASK, PLACE], ("a", "a")),
    "some with their own": ({"messages": [user(FILE, PLACE, ASK)], "images": ["b"]}, [PLACE, PLACE, ASK], ("a", "b")),
}


@pytest.mark.parametrize("form", ROWS)
def test_a_picture_stands_where_its_row_says(form: str) -> None:
    row, content, pictures = ROWS[form]
    found = parse_row(row)
    assert isinstance(found, Conversation)
    read = [{**part, "text": part["text"].strip()} if "text" in part else part for part in found.messages[0]["content"]]
    assert (read, found.pictures) == (content, pictures)
    assert found.first(0).shown == ()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [user(PLACE, ASK)]}, "0 images for 1 places in its turns; give one for each"),
        ({"messages": [user(PLACE, ASK)], "images": ["a", "b"]}, "2 images for 1 places"),
        ({"messages": [user("why?"), {**ANSWER, "content": [FILE]}]}, "turn 2 by assistant shows a picture; move it"),
        ({"messages": [{**user("why?"), "images": ["a"]}]}, "turn 1 has images, which is not supported; move it into"),
        ({"text": "why?", "images": ["a"]}, "plain text has images, which is not supported; give messages"),
        ({"tokens": [1, 2], "images": ["a"]}, "the row has images, which is not supported; give messages in place"),
        ({"messages": [user(ASK, {"type": "video", "video": "a"})]}, "contains parts that are neither text nor images"),
    ],
)
def test_a_picture_without_its_place_is_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRow, match=said):
        parse_row(row)


def test_states_are_the_models_own_with_the_same_pictures(seen: Path) -> None:
    recipe = tiny_recipe(seen)
    store, pictures = FeatureStore(recipe.features_dir, "train"), KeptPictures(recipe)
    model, inputs = TargetModel.load(recipe.target, ()).model, dict[int, torch.Tensor]()
    layers = [*model.model.language_model.layers, model.model.language_model.norm]
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda _, given, number=number: inputs.update({number: given[0]}))
    assert store.taps == (2, 3, 4)  # tap 2 lies where the features of pictures are added to the stream
    for number, row in enumerate(prompts(recipe)):
        tokens, images = store[number].tokens.unsqueeze(0), pictures.read(row.get("images"))
        given = {} if images is None else dict(images.inputs)
        types = torch.zeros_like(tokens)
        types[:, : len(row["tokens"])] = given.get("mm_token_type_ids", 0)
        with torch.inference_mode():
            model(**given | {"input_ids": tokens, "mm_token_type_ids": types}, use_cache=False)
        states = [*store[number].taps.split(32, 1), store[number].last_hidden]
        assert_close(states, [inputs[tap][0] for tap in (*store.taps, 6)], atol=1e-4, rtol=1e-4)


def test_the_loss_is_on_answers_alone_and_a_shard_holds_no_pixels(seen: Path) -> None:
    recipe = tiny_recipe(seen)
    store, placeholder = FeatureStore(recipe.features_dir, "train"), KeptPictures(recipe).prompts.placeholders
    rows = prompts(recipe)
    assert {len(row.get("images", {}).get("pictures", [])) for row in rows} == {0, 1, 2}
    for number, row in enumerate(rows):
        sample, length, shown = store[number], len(row["tokens"]), row.get("images", {}).get("pictures", [])
        assert sample.tokens[:length].tolist() == row["tokens"]
        assert not sample.loss_mask[:length].any()
        assert sample.loss_mask[length:].all()
        assert sum(token in placeholder for token in row["tokens"]) == 4 * len(shown)
        assert vars(sample).keys() == {"tokens", "loss_mask", "taps", "last_hidden"}


def test_a_picture_that_changed_on_disk_is_another_sample_and_the_run_keeps_its_own(seen: Path, tmp_path: Path) -> None:
    copy_run(seen, tmp_path)
    before, other = tiny_recipe(tmp_path), tiny_recipe(tmp_path, f"run_dir={tmp_path}/other")
    picture("yellow", 0, 1).save(tmp_path / "shown/1_0.png")
    make_prompts(other)
    old, new = prompts(before), prompts(other)
    assert [number for number, (mine, its) in enumerate(zip(old, new, strict=True)) if mine != its] == [1]
    assert old[1]["tokens"] == new[1]["tokens"]
    shutil.rmtree(tmp_path / "shown")
    shutil.rmtree(before.features_dir)
    harvest(before)
    stores = [FeatureStore(each.features_dir, "train") for each in (before, tiny_recipe(seen))]
    assert all(stores[0][number].taps.equal(stores[1][number].taps) for number in range(len(old)))


def test_a_held_out_prompt_with_another_picture_is_another_prompt(seen: Path, tmp_path: Path) -> None:
    copy_run(seen, tmp_path)
    row = list(read_jsonl(tmp_path / "prompts.jsonl"))[1]
    write_jsonl(tmp_path / "heldout.jsonl", [{**row, "images": [f"shown/{number}_0.png"]} for number in (1, 2)])
    recipe = tiny_recipe(tmp_path, f"run_dir={tmp_path}/other")
    make_prompts(recipe)
    old, new = ([(row["tokens"], row.get("images")) for row in prompts(each)] for each in (tiny_recipe(seen), recipe))
    assert new[:11] == [each for number, each in enumerate(old) if number != 1]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "dataset"])
def test_pictures_come_from_files_of_any_form(seen: Path, tmp_path: Path, form: str) -> None:
    copy_run(seen, tmp_path)
    shown = [picture(colour) for colour in COLOURS]
    if form == "jsonl":
        urls = [data_url(each) for each in shown]
        source = tmp_path / "new.jsonl"
        write_jsonl(source, [{"prompt": f"{number} why", "images": [url]} for number, url in enumerate(urls)])
    else:
        from datasets import Dataset, Features, Image, Value

        kinds = Features({"prompt": Value("string"), "image": Image()})
        columns = {"prompt": [f"{number} why" for number in range(4)], "image": shown}
        made, source = Dataset.from_dict(columns, kinds), tmp_path / ("new.parquet" if form == "parquet" else "new")
        made.to_parquet(source) if form == "parquet" else made.save_to_disk(source)
    recipe = tiny_recipe(tmp_path, f"run_dir={tmp_path}/other", f"data.prompts={source}", "data.num_prompts=4")
    make_prompts(recipe)
    kept = [recipe.prompts_dir / "pictures" / row["images"]["pictures"][0] for row in prompts(recipe)]
    assert [pil.open(path).tobytes() for path in kept] == [each.tobytes() for each in shown]


@pytest.mark.parametrize("field", ["server", "states"])
def test_servers_refuse_prompts_with_pictures_by_name(seen: Path, tmp_path: Path, field: str) -> None:
    copy_run(seen, tmp_path)
    shutil.rmtree(tmp_path / "run")
    fields = ["data.server=http://127.0.0.1:9", *(["data.states=vllm"] if field == "states" else [])]
    with pytest.raises(ValueError, match=rf"data\.{field}: .* given for 11 prompts with images, only text is allowed"):
        harvest(tiny_recipe(tmp_path, *fields))


@pytest.mark.parametrize("kind", ["eagle3", slow("block")])
def test_a_head_of_pictures_is_trained_calibrated_and_drafts_the_targets_text(seen, tmp_path, kind):
    copy_run(seen, tmp_path)
    block = "head={kind: block, num_layers: 1}", "train={steps: 3, batch_size: 3}", f"run_dir={tmp_path}/block"
    fields = block if kind == "block" else ()
    recipe = tiny_recipe(tmp_path, *fields, "train.eval_prompts=1", "train.steps=2", "decode.max_new_tokens=4")
    train(recipe, script="trainers/block.py" if kind == "block" else "trainers/eagle.py")
    measured = [row for row in read_growing_jsonl(recipe.metrics_path) if "heldout/tau" in row]
    assert measured[-1]["heldout/tau"] >= 1
    requests = held_out_prompts(recipe)
    assert {each.images is None for each in requests} == {True, False}
    target = TargetModel.load(recipe.target, taps_to_read(recipe))
    head = load_head_for(recipe.head_dir, target.frozen)
    assert head.calibration is not None
    plain = [each.tokens for each in generate_batch(target, requests)]
    drafted = generate_batch(target, requests, head_drafter(head, Dynamic.chain(2)))
    assert [each.tokens for each in drafted] == plain


def test_a_report_splits_prompts_with_pictures_from_texts(seen, tmp_path, monkeypatch):
    monkeypatch.setattr(TargetModel, "difference_in_bits", "a product")  # so that choices are compared one by one, too
    copy_run(seen, tmp_path)
    fields = "report.temperatures=[0]", "report.baselines=[generate, plain, prompt_lookup]", "report.batches=[1, 2]"
    few = "report.num_prompts=3", "decode.growth=chain", "decode.max_new_tokens=3"
    for outcome in report(tiny_recipe(tmp_path, *fields, *few)):
        assert {name: each.prompts for name, each in outcome.by_category.items()} == {"pictures": 2, "texts": 1}
        assert outcome.same == outcome.prompts == 3
        assert outcome.method != "generate" or outcome.batch == 1
        assert outcome.forced is not None
        assert outcome.forced.outside == 0

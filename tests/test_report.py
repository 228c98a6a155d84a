"""Laws of the report: what it prints is what was decoded, and what is missing is named before any work."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_run import build_run, tiny_recipe

from data_pipelines.harvest import harvest
from heads.export import export
from inference.compare import Outcome
from inference.report import report
from recipes import Recipe
from trainers.run import run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("report")
    build_run(folder)
    recipe = tiny_recipe(folder, "train.steps=2", "report.num_prompts=2", "report.warmup_prompts=0")
    run(recipe)
    return recipe


@pytest.fixture(scope="module")
def outcomes(trained: Recipe) -> list[Outcome]:
    return report(trained)


def test_every_way_writes_the_same_text_and_the_files_say_so(trained: Recipe, outcomes: list[Outcome]) -> None:
    assert {o.way for o in outcomes} == {"generate", "plain", "untrained", "chain", "tree"}
    assert all(o.identical == o.prompts == 2 for o in outcomes if o.way != "generate" or o.temperature == 0)
    written = json.loads((trained.report_dir / "report.json").read_text())
    assert [row["tau"] for row in written["outcomes"]] == [o.stats.tau for o in outcomes]
    assert (trained.report_dir / "report.md").read_text().count("| plain |") == len(trained.report.temperatures)
    assert (trained.report_dir / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_card_of_an_export_shows_what_was_measured_of_its_head_and_of_no_other(
    trained: Recipe, outcomes: list[Outcome]
) -> None:
    def measured(**fields: object) -> str:
        section = trained.export.model_copy(update={"format": "native", "overwrite": True, **fields})
        readme = export(trained.model_copy(update={"export": section})) / "README.md"
        return readme.read_text().partition("## Measured\n\n")[2].partition("\n\n## ")[0]

    rates = {(o.temperature, o.batch): o.tokens_per_second for o in outcomes if o.way == "plain"}
    for o in outcomes:
        ratio = o.tokens_per_second / rates[o.temperature, o.batch]
        row = f"| {o.way} | {o.temperature:g} | {o.batch} | 2 | {o.stats.tau:.2f} | {ratio:.2f} |"
        assert row in measured()
    assert f"on prompts of `{trained.data.heldout_prompts}`, at most 8 new tokens each" in measured()
    shutil.copytree(trained.head_dir, trained.run_dir / "copy")
    assert measured(head=trained.run_dir / "copy").startswith("Not measured.")
    (trained.head_dir / "model.safetensors").touch()  # trained anew since
    assert measured().startswith("Not measured.")


def test_a_report_without_a_head_names_the_folder(tmp_path: Path) -> None:
    build_run(tmp_path)
    recipe = tiny_recipe(tmp_path)
    with pytest.raises(ValueError, match=r"heldout\.jsonl is missing; make it with"):
        report(recipe)
    harvest(recipe)
    with pytest.raises(ValueError, match="holds no head"):
        report(recipe)

"""Laws of the report: its figures are those of the decoding, and missing input is named before any work."""

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from tiny_run import recipe_with_random_head, tiny_recipe

from headstart.heads.formats.card import measurements, report_of
from headstart.heads.formats.export import export
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import new_head, save_head
from headstart.heads.vocab import DraftVocab
from headstart.inference.drafters.build import load_drafting_head
from headstart.inference.report.command import report
from headstart.inference.report.compare import Outcome
from headstart.inference.report.methods import build_methods
from headstart.inference.report.tables import as_markdown, columns_of
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe
from headstart.recipes.schema_heads import Eagle3Section, HeadSection, MedusaSection


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("report")
    recipe_with_random_head(folder)
    prompts = f"report.prompts={folder / 'heldout.jsonl'}"
    return tiny_recipe(folder, prompts, "report.num_prompts=1", "decode.max_new_tokens=6")


@pytest.fixture(scope="module")
def outcomes(trained: Recipe) -> list[Outcome]:
    return report(trained)


def test_every_method_writes_the_same_text_and_the_files_say_so_and_explain_each_column(trained, outcomes) -> None:
    assert {o.method for o in outcomes} == {"generate", "plain", "untrained", "chain", "tree"}
    assert all(o.same == o.prompts for o in outcomes if o.method != "generate" or o.temperature == 0)
    written = json.loads((trained.report_dir / "report.json").read_text())
    assert [row["method"] for row in written["outcomes"]] == [o.method for o in outcomes]
    assert [row["tau"] for row in written["outcomes"]] == [o.stats.acceptance_length for o in outcomes]
    assert (trained.report_dir / "report.md").read_text().count("| plain |") == len(trained.report.temperatures)
    files = {path.name for path in trained.report_dir.iterdir() if not path.name.startswith(".")}
    assert files == {"report.json", "report.md"}
    written = (trained.report_dir / "report.md").read_text()
    columns = columns_of(outcomes)
    assert [column for column in columns if f"| {column} " not in written or f"\n- {column}: " not in written] == []
    assert "token forcing" not in written
    assert "a token has the same bits in every pass" in written


def test_a_tree_of_a_target_that_verifies_chains_alone_has_no_row_beside_the_chain(trained: Recipe) -> None:
    """Its figures were those of the chain once more. A chain of another length keeps its row."""
    target = TargetModel.load(trained.target, (1, 2, 3))
    heads, target.passes.method = {"": load_drafting_head(trained.head_dir, target)}, "chains"

    def rows(growth: str) -> list[str]:
        section = trained.report.model_copy(update={"baselines": ("plain", "chain", "tree")})
        decode = trained.decode.model_copy(update={"growth": growth})
        recipe = trained.model_copy(update={"report": section, "decode": decode})
        return [method.name for method in build_methods(recipe, target, heads)]

    assert rows("dynamic") == ["plain", "chain"]
    assert rows("cost_aware") == ["plain", "chain", "tree"]


def test_a_head_without_a_searched_tree_is_refused_before_the_work(trained, monkeypatch) -> None:
    searched = trained.decode.model_copy(update={"growth": "searched"})
    quick = trained.report.model_copy(update={"baselines": ["plain", "tree"]})
    monkeypatch.setattr("headstart.inference.report.command.measure", lambda *inputs: pytest.fail("measured"))
    with pytest.raises(ValueError, match=r"decode.growth: searched given.* a head with a fitted tree"):
        report(trained.model_copy(update={"decode": searched, "report": quick}))


def test_the_card_of_an_export_shows_figures_of_its_own_head_only(trained: Recipe, outcomes: list[Outcome]) -> None:
    def measured(head: Path | None = None) -> str:
        shutil.rmtree(trained.export_dir, ignore_errors=True)
        decode = trained.decode.model_copy(update={"head": head})
        section = trained.export.model_copy(update={"format": "native"})
        readme = export(trained.model_copy(update={"decode": decode, "export": section})) / "README.md"
        return readme.read_text().partition("## Measured\n\n")[2].partition("\n\n## ")[0]

    rates = {(o.temperature, o.batch): o.tokens_per_second for o in outcomes if o.method == "plain"}
    card = measured()
    for o in outcomes:
        ratio = o.tokens_per_second / rates[o.temperature, o.batch]
        row = f"| {o.method} | {o.temperature:g} | {o.batch} | 1 | {o.stats.acceptance_length:.2f} | {ratio:.2f} |"
        assert row in card
    assert f"on prompts of `{trained.data.heldout_prompts}`, at most 6 new tokens each" in card
    shutil.copytree(trained.head_dir, trained.run_dir / "copy")
    assert measured(head=trained.run_dir / "copy").startswith("Not measured.")
    (trained.head_dir / "model.safetensors").touch()  # trained again since the report
    assert measured().startswith("Not measured.")


@pytest.mark.slow
def test_several_heads_are_compared_in_one_report(trained: Recipe, tmp_path: Path) -> None:
    frozen = FrozenTarget.from_folder(Path(trained.target.path), torch.float32)
    sections: dict[str, HeadSection] = {
        "early": Eagle3Section(kind="eagle3", taps=(0, 1)),
        "medusa": MedusaSection(kind="medusa", medusa_heads=1),
    }
    for name, section in sections.items():
        head = new_head(section, frozen, DraftVocab.full(frozen.config.vocab_size), seed=1)
        save_head(head, tmp_path / name)
    folders = ", ".join(f"{name}: {tmp_path / name}" for name in sections)
    recipe = tiny_recipe(
        trained.run_dir.parent,
        f"report.prompts={trained.report.prompts}",
        "report.num_prompts=2",
        "report.temperatures=[0.0]",
        "report.batches=[1, 2]",
        "report.baselines=[chain, tree, generate_lookup]",
        f"report.other_heads={{{folders}}}",
    )
    found = {(o.method, o.batch): o for o in report(recipe)}
    heads = {f"{name} {kind}".strip() for name in ("", *sections) for kind in ("chain", "tree")}
    assert found.keys() == {*product({"plain", *heads}, (1, 2)), ("generate_lookup", 1)}
    assert all(o.same == o.prompts for o in found.values())
    assert len(found["early tree", 1].stats.accepted_at_depth) <= 2
    assert found["medusa tree", 1].stats.drafted <= 2 * found["medusa tree", 1].stats.steps
    assert found["chain", 1].speedups.keys() == {"plain", "generate_lookup"}
    of_run = report_of(recipe, recipe.head_dir)
    assert of_run is not None
    methods = [row["method"] for row in measurements(of_run)]
    assert methods.count("tree") == 2  # one for each batch size
    assert not [method for method in methods if "early" in method]
    with pytest.raises(ValueError, match=r"with report\.other_heads, chain, tree, cost_aware or repeats is needed"):
        tiny_recipe(trained.run_dir.parent, "report.baselines=[plain]", f"report.other_heads={{{folders}}}")


def test_a_method_whose_drafts_stopped_had_an_acceptance_length_of_1_and_no_word_why(outcomes: list[Outcome]) -> None:
    rested = [replace(each, stats=replace(each.stats, resting_steps=3)) for each in outcomes if each.temperature == 0]
    lines = [line for line in as_markdown(rested).splitlines() if "drafts were off" in line]
    steps = {each.method: each.stats.steps for each in rested}
    assert f"- tree: in 3 of {steps['tree']} steps" in " ".join(lines)
    assert not [line for line in lines if line.startswith("- plain")]

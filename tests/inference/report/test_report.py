"""Laws of the report: its figures are those of the decoding, missing input is named before any work, intervals cover
the truth, and token forcing judges texts.
"""

import json
import math
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from matrix import slow
from scripted import Oracle
from shared_fixtures import ModelFactory
from tiny_run import build_tokenizer, recipe_with_random_head, tiny_recipe

from headstart.heads.formats.card import measurements, report_of
from headstart.heads.formats.export import export
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import new_head, save_head
from headstart.heads.vocab import DraftVocab
from headstart.inference.core.request import DecodeStats
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.build import load_drafting_head
from headstart.inference.engine.loop import generate
from headstart.inference.report import forcing, questions
from headstart.inference.report.command import report
from headstart.inference.report.compare import Comparison, Outcome, published_figures, speedup
from headstart.inference.report.forcing import Forced, Forcing, gaps
from headstart.inference.report.methods import Method, build_methods
from headstart.inference.report.questions import Prompt, QuestionTemplate, read_questions
from headstart.inference.report.rounds import Round, Run, able_to_batch, run_batch, run_rounds, seconds_and_tokens
from headstart.inference.report.tables import as_markdown, columns_of, low_to_high
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe
from headstart.recipes.schema_heads import Eagle3Section, HeadSection, MedusaSection


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("report")
    recipe_with_random_head(folder)
    prompts = f"report.prompts={folder / 'heldout.jsonl'}"
    return tiny_recipe(folder, prompts, "report.num_prompts=1", "decode.max_new_tokens=4")


@pytest.fixture(scope="module")
def outcomes(trained: Recipe) -> list[Outcome]:
    return report(trained)


def test_every_method_writes_the_same_text_and_the_files_say_so_and_explain_each_column(trained, outcomes) -> None:
    assert {o.method for o in outcomes} == {"generate", "plain", "untrained", "chain", "tree"}
    assert all(o.same == o.prompts for o in outcomes if o.method != "generate" or o.temperature == 0)
    written = json.loads((trained.report_dir / "report.json").read_text())
    assert [row["method"] for row in written["outcomes"]] == [o.method for o in outcomes]
    lengths = [o.stats.acceptance_length for o in outcomes]
    assert [row["acceptance_length"] for row in written["outcomes"]] == lengths
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
    assert f"on prompts of `{trained.data.heldout_prompts}`, at most 4 new tokens each" in card
    shutil.copytree(trained.head_dir, trained.run_dir / "copy")
    assert measured(head=trained.run_dir / "copy").startswith("Not measured.")
    (trained.head_dir / "model.safetensors").touch()  # trained again since the report
    assert measured().startswith("Not measured.")


@pytest.mark.slow
def test_several_heads_are_compared_in_one_report(trained: Recipe, tmp_path: Path) -> None:
    frozen = FrozenTarget.from_folder(Path(trained.target.path), torch.float32)
    sections: dict[str, HeadSection] = {"early": Eagle3Section(kind="eagle3", taps=(0, 1))}
    sections["medusa"] = MedusaSection(kind="medusa", medusa_heads=1)
    for name, section in sections.items():
        head = new_head(section, frozen, DraftVocab.full(frozen.config.vocab_size), seed=1)
        save_head(head, tmp_path / name)
    folders = ", ".join(f"{name}: {tmp_path / name}" for name in sections)
    fields = [f"prompts={trained.report.prompts}", "num_prompts=2", "temperatures=[0.0]", "batches=[1, 2]"]
    fields += ["baselines=[chain, tree, generate_lookup]", f"other_heads={{{folders}}}"]
    recipe = tiny_recipe(trained.run_dir.parent, *(f"report.{field}" for field in fields))
    found = {(o.method, o.batch): o for o in report(recipe)}
    heads = {f"{name} {kind}".strip() for name in ("", *sections) for kind in ("chain", "tree")}
    assert found.keys() == {*product({"plain", *heads}, (1, 2)), ("generate_lookup", 1)}
    assert all(o.same == o.prompts for o in found.values())
    assert len(found["early tree", 1].stats.accepted_at_depth) <= 2
    assert found["medusa tree", 1].stats.drafted <= 2 * found["medusa tree", 1].stats.steps
    assert found["chain", 1].speedups.keys() == {"plain", "generate_lookup"}
    of_run: Any = report_of(recipe, recipe.head_dir)
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


PROMPTS = [Prompt([5, 6, 7, 11], "one"), Prompt([3], "two"), Prompt([*range(20)], "one")]


@pytest.mark.parametrize("units", [4, 12])
def test_intervals_cover_the_true_speedup(units: int) -> None:
    """Simulated prompts: some are slow for both methods, each run has timing noise, and the gain varies around 1.7."""
    runs, covered = 120, 0
    random = numpy.random.default_rng(0)
    for seed in range(runs):
        tokens = random.integers(60, 129, units)
        base = tokens * 0.01 * random.lognormal(0, 0.3, units) * random.lognormal(0, 0.1, units)
        gain = random.gamma(12, 1 / 12, units)  # mean 1
        seconds = base * gain / 1.7 * random.lognormal(-0.005, 0.1, units)
        found = speedup(seconds.tolist(), tokens.tolist(), base.tolist(), tokens.tolist(), seed)
        assert found.low < found.value < found.high
        covered += found.low <= 1.7 <= found.high
    assert covered >= 0.9 * runs
    assert covered < runs  # intervals that always cover it would be too wide


def test_a_method_is_exactly_as_fast_as_itself_and_a_single_prompt_gives_no_interval() -> None:
    found = speedup([1.0, 2.0, 4.0], [10, 20, 30], [1.0, 2.0, 4.0], [10, 20, 30], 0)
    assert (found.low, found.value, found.high) == (1.0, 1.0, 1.0)
    found = speedup([2.0], [30], [1.0], [10], 0)
    assert found.value == pytest.approx(1.5)
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert low_to_high(found) == "?"


@pytest.mark.parametrize("batch", [slow(1), 2])
def test_every_method_has_the_same_text_and_figures_by_category(target: TargetModel, batch: int) -> None:
    whole = [prompt.tokens + generate(target, prompt.tokens, 9).tokens for prompt in PROMPTS]
    methods = [Method("plain"), Method("generate", transformers=True), Method("oracle", Oracle(*whole, ahead=3))]
    methods.append(Method("generate_lookup", transformers=True, lookup=3))
    methods = able_to_batch(methods, batch, PROMPTS)
    rounds = run_rounds(methods, target, PROMPTS, 9, Sampling(), 1, batch)
    found = {o.method: o for o in Comparison(methods, rounds, Sampling(), batch, forcing_of(target)).outcomes()}
    assert set(found) == {"plain", "generate", "oracle", *(["generate_lookup"] if batch == 1 else [])}
    assert all(o.forced == Forced(27) and o.same == o.prompts == 3 and o.batch == batch for o in found.values())
    for method, length in (("oracle", 4), ("plain", 1)):
        by_category = found[method].by_category
        assert {name: each.acceptance_length for name, each in by_category.items()} == {"one": length, "two": length}
        judged = [(each.forced, each.same, each.prompts) for each in by_category.values()]
        assert judged == [(Forced(18), 2, 2), (Forced(9), 1, 1)]
        assert (by_category["one"].tokens_per_second is None) == (batch == 2)  # the first batch mixes categories
    assert all(o.new_tokens == 27 for o in found.values())
    for outcome in found.values():
        assert outcome.stats.seconds > 0
        json.dumps(outcome.as_json())


def test_seconds_of_a_batch_are_wall_time_and_a_question_with_all_its_turns_is_one_unit(target: TargetModel) -> None:
    run = run_batch(Method("plain"), target, PROMPTS, 9, Sampling())
    waited = [stats.seconds for stats in run.stats]
    assert max(waited) <= 1.1 * run.seconds < sum(waited)

    def round_of(number: int, seconds: float, tokens: int) -> Round:
        return Round(number, [Prompt([1], "qa")], [Run([[1] * tokens], [DecodeStats()], seconds)])

    rounds = [round_of(0, 1.0, 4), round_of(0, 2.0, 5), round_of(1, 4.0, 6)]
    assert seconds_and_tokens(rounds, 0) == ([3.0, 4.0], [9, 6])


def forcing_of(target: TargetModel, sampling: Sampling | None = None) -> Forcing:
    return Forcing.measured(target, PROMPTS, 9, sampling or Sampling())


def test_plain_passes_choose_every_token_of_a_plain_text_and_find_one_that_was_changed(target: TargetModel) -> None:
    prompt = [5, 6, 7]
    for sampling, count in ((Sampling(0.7, seed=2), 70), (Sampling(repetition_penalty=1.3), 9), (Sampling(), 9)):
        plain = generate(target, prompt, count, sampling).tokens  # 70 are more than are scored at once
        assert float(gaps(target, prompt, plain, sampling).max()) == 0
        changed = [*plain[:4], (plain[4] + 1) % 97]
        assert (gaps(target, prompt, changed, sampling) > 0).tolist() == [False] * 4 + [True]


def test_a_token_within_rounding_is_a_near_tie_and_any_other_is_outside(target, monkeypatch) -> None:
    judging, prompt = forcing_of(target), [5, 6, 7]
    assert 0 < judging.rounding < 1e-4  # float32
    changed = [(generate(target, prompt, 1).tokens[0] + 1) % 97]
    gap = float(gaps(target, prompt, changed, Sampling())[0])
    assert gap > 1e-3
    assert judging.judge(Prompt(prompt, ""), changed) == Forced(1, 0, 1, gap)
    assert Forcing(target, Sampling(), gap).judge(Prompt(prompt, ""), changed) == Forced(1, 1, 0, gap)
    assert Forced.sum_of([Forced(1, 1, 0, gap), Forced(4, 0, 2, 2 * gap)]) == Forced(5, 1, 2, 2 * gap)

    # A text that rounds more than the first prompts was outside.
    measured = [*range(2)]
    monkeypatch.setattr(forcing, "rounding", lambda target, prompts, most, sampling: measured.pop() and 1.1 * gap)
    assert Forcing(target, Sampling(), gap / 2).judge(Prompt(prompt, ""), changed) == Forced(1, 1, 0, gap)
    assert Forcing(target, Sampling(), gap / 2).judge(Prompt(prompt, ""), changed) == Forced(1, 0, 1, gap)


def test_texts_drawn_with_other_random_numbers_are_not_judged(target: TargetModel) -> None:
    methods, sampling = [Method("plain"), Method("generate", transformers=True)], Sampling(1.0)
    rounds = run_rounds(methods, target, PROMPTS, 9, sampling, 0)
    plain, own = Comparison(methods, rounds, sampling, 1, forcing_of(target, sampling)).outcomes()
    assert (plain.forced, plain.same, own.forced, own.same) == (Forced(27), 3, None, None)
    assert [(each.forced, each.same) for each in own.by_category.values()] == [(None, None)] * 2


def test_questions_come_from_each_category_in_turn(tmp_path: Path) -> None:
    rows = [{"question_id": 1, "category": "math", "turns": ["a draft", "and then"]}]
    rows += [{"category": "math", "turns": ["a path"]}, {"source": "typing.py", "text": "def head"}]
    rows += [{"category": "qa", "prompt": "a head"}]
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = ChatTemplate(build_tokenizer())
    found = read_questions(path, template, 1000, 4)
    assert [prompt.category for prompt in found] == [questions.CONVERSATION, "math", "typing.py", "qa"]
    texts = [template.tokenizer.decode(prompt.tokens) for prompt in found]
    assert texts == ["[user]a draft[assistant]", "[user]a path[assistant]", "def head", "[user]a head[assistant]"]
    assert read_questions(path, template, 3, 3)[2].tokens == found[2].tokens[-3:]
    assert (found[0].later, found[2].later) == (("and then",), ())
    path.write_text('{"category": "math"}\n')
    with pytest.raises(ValueError, match=r"report\.prompts: row 1 of .*: {'category': 'math'} given, turns"):
        read_questions(path, template, 10, 3)


PUBLISHED_ROWS = {  # invented questions, in the layouts of the published files
    "GSM8K": {"question": "a draft", "answer": "#### 1"},
    "HumanEval": {"prompt": "a draft", **dict.fromkeys(("task_id", "canonical_solution", "test", "entry_point"), "")},
    "MATH-500": {"problem": "a draft", **dict.fromkeys(("solution", "answer", "subject", "unique_id"), ""), "level": 2},
    "MBPP": {"text": "a draft", "code": "", "task_id": 1, "test_list": [], "test_setup_code": ""},
    "MBPP, sanitized": {"source_file": "", "task_id": 2, "prompt": "a draft", "code": "", "test_list": []},
}


def test_published_rows_of_datasets_are_asked_as_users_and_named(tmp_path: Path) -> None:
    template, path = ChatTemplate(build_tokenizer()), tmp_path / "all.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PUBLISHED_ROWS.values()))
    found = read_questions(path, template, 1000, 99)
    assert [prompt.category for prompt in found] == [*PUBLISHED_ROWS]
    assert {template.tokenizer.decode(prompt.tokens) for prompt in found} == {"[user]a draft[assistant]"}


def test_figures_under_the_names_of_others_are_counted_from_the_same_steps() -> None:
    """Two texts: steps of 1, 3 and 3 tokens, and one of 2, from 4 draft tokens each."""
    long, short = DecodeStats(), DecodeStats()
    for accepted in (0, 2, 2):
        long.count_step(accepted, accepted + 1, 4)
    short.count_step(1, 2, 4)
    figures = published_figures([long, short], ["qa", "math"])
    assert figures["Acceptance_Length_Histogram"] == {1: 1, 2: 1, 3: 2}
    assert figures["Joint_Acceptance_Rate"] == {1: 1, 2: 3 / 4, 3: 2 / 4}
    assert figures["Conditional_Acceptance_Rate"] == pytest.approx({1: 1, 2: 3 / 4, 3: 2 / 3})
    assert figures["Category_AL"] == pytest.approx({"qa": 7 / 3, "math": 2})
    assert figures["Average_AL"] == pytest.approx((7 / 3 + 2) / 2)
    assert figures["spec_decode_token_weighted_acceptance_length"] == 9 / 4
    assert figures["spec_decode_overall_draft_acceptance_rate"] == 100 * 5 / 16
    assert published_figures([DecodeStats(steps=3, tokens=3)], ["qa"]) == {}


SPEED_BENCH = Path(__file__).parents[2] / "support/questions/speed_bench.jsonl"  # invented questions in its format


def test_speed_bench_keeps_its_categories_and_all_turns_in_each_file_format(tmp_path: Path) -> None:
    """Four of its categories are MT-Bench's topics too, whose conversations are one category in Spec-Bench."""
    rows, template = [*map(json.loads, SPEED_BENCH.read_text().splitlines())], ChatTemplate(build_tokenizer())
    found = read_questions(SPEED_BENCH, template, 1000, 99)
    assert [prompt.category for prompt in found] == [row["category"] for row in rows]
    assert len({prompt.category for prompt in found}) == len(rows) == 14
    assert [1 + len(prompt.later) for prompt in found] == [len(row["turns"]) for row in rows]
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "test.parquet")
    assert read_questions(tmp_path / "test.parquet", template, 1000, 99) == found
    with (tmp_path / "aiperf.jsonl").open("w") as file:
        for row in rows:
            messages = [{"role": "user", "content": turn} for turn in row["turns"]]
            kept = {key: row[key] for key in ("question_id", "category")}
            file.write(json.dumps({**kept, "messages": messages}) + "\n")
    assert read_questions(tmp_path / "aiperf.jsonl", template, 1000, 99) == found


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("turns", ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"], r"row 1 of .*: turns: .*prepare_data\.py"),
        ("turns", "Why?", r"row 1 of .*turns \(a list of texts\), prompt or text \(a text\) is allowed"),
    ],
)
def test_a_row_of_speed_bench_that_cannot_be_asked_is_named_with_its_field(tmp_path, field, value, message) -> None:
    row = {**json.loads(SPEED_BENCH.read_text().splitlines()[0]), field: value}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=rf"report\.prompts: {message}"):
        read_questions(tmp_path / "rows.jsonl", ChatTemplate(build_tokenizer()), 1000, 1)


def test_the_topics_of_conversations_are_one_category_taken_in_turn(tmp_path: Path) -> None:
    """As in Spec-Bench's file: ten questions of each of MT-Bench's topics, in order, and 80 of each other group."""
    rows = [{"category": topic, "turns": [f"{topic} {i}", "b"]} for topic in ("writing", "stem") for i in range(3)]
    rows += [{"category": "qa", "turns": [f"qa {i}"]} for i in range(6)]
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_questions(path, ChatTemplate(build_tokenizer()), 1000, 6)
    assert [prompt.category for prompt in found] == [questions.CONVERSATION, "qa"] * 3
    assert [prompt.said for prompt in found[::2]] == [("writing 0",), ("stem 0",), ("writing 1",)]


def test_a_later_turn_follows_plain_decodings_answer_for_every_method(make_model: ModelFactory, tmp_path: Path) -> None:
    """transformers samples another answer, so its second turn would continue another text."""
    path = tmp_path / "question.jsonl"
    rows = [{"category": "math", "turns": ["a draft", "and then"]}, {"category": "qa", "turns": ["a path"]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = build_tokenizer()
    target = TargetModel(make_model(vocab_size=len(tokenizer)), ())
    template = ChatTemplate(tokenizer)
    prompts, chat = read_questions(path, template, 1000, 2), QuestionTemplate(template, 100)
    methods = [Method("generate", transformers=True), Method("plain")]
    rounds = run_rounds(methods, target, prompts, 6, Sampling(1.0), 0, 2, chat.next_turn)
    assert [(each.number, len(each.prompts)) for each in rounds] == [(0, 2), (0, 1)]
    answer = tokenizer.decode(generate(target, prompts[0].tokens, 6, Sampling(1.0)).tokens, skip_special_tokens=True)
    assert rounds[1].prompts[0].said == ("a draft", answer, "and then")
    assert tokenizer.decode(rounds[1].prompts[0].tokens).endswith("[user]and then[assistant]")
    outcomes = Comparison(methods, rounds, Sampling(1.0), 2).outcomes()
    assert [(o.prompts, o.new_tokens) for o in outcomes] == [(3, 18), (3, 18)]


def test_a_chat_that_is_too_long_loses_its_middle_and_a_text_to_continue_does_not() -> None:
    chat, long = QuestionTemplate(ChatTemplate(build_tokenizer()), 5), [*range(9)]
    assert chat.shortened(Prompt(long, "qa", ("said",))).tokens == [0, 1, 2, 7, 8]
    assert chat.shortened(Prompt(long, "qa", ("said",))).left_out == 4
    assert chat.shortened(Prompt(long[:5], "qa", ("said",))).left_out == 0
    assert chat.shortened(Prompt(long, "held-out")).tokens == long

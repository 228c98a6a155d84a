"""The first stage: training and held-out prompts as tokens; with data.responses given, complete samples.

headstart prompts recipes/tiny.yaml
"""

import hashlib
import json
import shlex
from collections.abc import Callable, Set
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

from headstart.common.files import read_jsonl, write_jsonl, write_text
from headstart.common.remote import shown
from headstart.common.run_lock import only_run_in
from headstart.data_pipelines.prompts.candidates import UserTemplate, read_candidates, write_candidates
from headstart.data_pipelines.prompts.chat_masks import ChatMasks, samples_of
from headstart.data_pipelines.prompts.conversations import Conversation, parse_row, unread_keys
from headstart.data_pipelines.prompts.row_report import CANDIDATE, HELD_OUT, RowReport
from headstart.data_pipelines.prompts.rows import BadRow, read_rows, source_digest
from headstart.data_pipelines.prompts.selection import Key, Selection, key_of, opening_texts
from headstart.data_pipelines.stages.shard_work import refuse_parts_at_work, start_processes
from headstart.data_pipelines.stages.stage import (
    CONTENT,
    WEIGHTS,
    Json,
    Stage,
    file_digest,
    generation_identity,
    prompt_identities,
    writes_date,
)
from headstart.heads.target_config import TargetConfig, content_identity, folder_of, target_identity
from headstart.inference.images.kept import KeptPictures
from headstart.inference.targets.chat_template import DATE, ChatTemplate
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import Tokenizer, load_tokenizer
from headstart.recipes import Recipe
from headstart.recipes.schema import SELF, DataSection

ROW_REPORT = "rows.json"  # the unusable rows and why
UNSEEN_TOOLS = "tools that the chat template does not write"
GROWING_INPUTS = {"data.prompts", "data.num_prompts"}  # may change if the existing prompts remain the first


def prompts_stage(recipe: Recipe) -> Stage:
    data, target = recipe.data, folder_of(recipe.target)
    inputs = {
        "data.prompts": SELF if data.prompts == SELF else source_digest(data.prompts),
        "data.heldout_prompts": SELF if data.holds_out_own_prompts else file_digest(data.heldout_prompts),
        "data.num_prompts": data.num_prompts,
        "data.prompt_tokens": data.prompt_tokens,
        "data.responses": data.responses,
        WEIGHTS: target_identity(target),
        CONTENT: content_identity(target),
        **prompt_identities(target),
        "seed": recipe.seed,
    }
    if settings := template_settings(recipe, target):
        inputs["target.chat_template_kwargs"] = settings
    if data.prompts == SELF:
        inputs |= {
            "the target's generation_config.json": generation_identity(target),
            "target.dtype": recipe.target.dtype,
            **{f"data.{name}": value for name, value in data.model_dump().items() if name.startswith("self_")},
        }
        if data.self_pictures is not None:
            inputs["data.self_pictures"] = source_digest(str(data.self_pictures))
        if data.holds_out_own_prompts:
            inputs["data.heldout_samples"] = data.heldout_samples
    if data.responses == "given":  # this stage then holds the responses too
        inputs |= {"data.turns": data.turns, "data.response_tokens": data.response_tokens}
    return Stage.of(recipe, "prompts", inputs)


def template_settings(recipe: Recipe, target: Path) -> Json:
    """The settings of the chat template; one that writes the date gets the day on which the prompts were begun."""
    settings = recipe.target.chat_template_kwargs
    if settings.get(DATE) is not None or not writes_date(target):
        return settings
    begun_with = (Stage("prompts", recipe.prompts_dir, {}).claimed_for() or {}).get("target.chat_template_kwargs", {})
    return {**settings, DATE: begun_with.get(DATE, date.today().isoformat())}


@dataclass(frozen=True)
class PromptRows:
    """The rows of both splits, with reports on the rows of their sources."""

    train: list[Json]
    heldout: list[Json]
    reports: list[RowReport]  # one for the training and one for the held-out source
    rejected: dict[str, int] | None = None  # number of self-written candidates left out, by reason


def make_prompts(recipe: Recipe) -> Stage:
    """Write prompts/train.jsonl, prompts/heldout.jsonl and a report on the source rows, unless they are complete.

    A row is {id, tokens, cut}: the prompt's tokens, and whether its beginning was cut off. With data.responses given it
    also has `response`, the tokens after them, and `spans`, the ranges of both to train on. If the source or
    data.num_prompts grew and the existing prompts remain the first, the new ones are added. Raises ValueError
    if too many source rows are unusable, or the existing prompts were made from other inputs.
    """
    stage = prompts_stage(recipe)
    grows = stage.was_complete() and 0 < len(stage.changed_inputs()) == len(stage.changed_inputs() & GROWING_INPUTS)
    if stage.was_complete() and not grows:
        stage.refuse()
        return stage
    template = load_chat_template(recipe)
    rows = read_both(recipe, template)
    if not grows:  # otherwise the report on the existing prompts stays until they are extended
        write_report(stage, rows)
    for report in rows.reports:
        if report.counts != CANDIDATE:
            report.check()
    if grows:
        refuse_other_start(stage, rows)
    stage.claim()
    write_report(stage, rows)
    write_prompts(stage, rows, template)
    return stage


def refuse_other_start(stage: Stage, rows: PromptRows) -> None:
    """Raise ValueError unless the existing prompts are the first of the new ones; print how many are new."""
    existing = {split: list(read_jsonl(stage.folder / f"{split}.jsonl")) for split in ("train", "heldout")}
    first = len(existing["train"])
    if (now := len(rows.train)) < first and rows.train == existing["train"][:now]:
        stage.refuse(f"the recipe gives {now} prompts and the run has {first}: prompts can be added, not taken away")
    if rows.train[:first] != existing["train"] or rows.heldout != existing["heldout"]:
        stage.refuse(f"its first {first} prompts differ from the prompts of the run, so it cannot continue from them")
    new = len(rows.train) - first
    print(
        f"prompts: {first:,} are unchanged, and their responses and features are reused; {new:,} are new"
        + (" (the features of the last shard are made again with the new ones)" if new else "")
    )


def write_report(stage: Stage, rows: PromptRows) -> None:
    write_text(stage.folder / ROW_REPORT, json.dumps([vars(report) for report in rows.reports], indent=1))


def write_prompts(stage: Stage, rows: PromptRows, template: ChatTemplate) -> None:
    """Write both splits and finish the stage."""
    write_jsonl(stage.folder / "train.jsonl", rows.train)
    write_jsonl(stage.folder / "heldout.jsonl", rows.heldout)
    stage.finish(
        {
            "train": len(rows.train),
            "heldout": len(rows.heldout),
            "cut": sum(row["cut"] for row in rows.train + rows.heldout),
            "bad": sum(len(report.bad) for report in rows.reports),
            "held_out_too": sum(len(report.held_out) for report in rows.reports),
            "sha256": file_digest(stage.folder / "train.jsonl"),
            "heldout_sha256": file_digest(stage.folder / "heldout.jsonl"),
            **({} if rows.rejected is None else {"rejected": rows.rejected}),
            "chat_template": hashlib.sha256(str(template.tokenizer.chat_template).encode()).hexdigest(),
        }
    )


def describe_prompts(recipe: Recipe) -> str:
    """How many rows of both sources were read, kept, dropped and cut, one line for each."""
    names = ("prompts", "held-out prompts")
    reports = zip(names, read_reports(recipe), strict=True)
    return "\n".join(report.summary(name, recipe.data) for name, report in reports)


def read_reports(recipe: Recipe) -> list[RowReport]:
    """The reports of the training and the held-out source, as `make_prompts` wrote them."""
    path = recipe.prompts_dir / ROW_REPORT
    try:
        train, heldout = json.loads(path.read_text())
        return [RowReport(**train), RowReport(**heldout)]
    except (FileNotFoundError, ValueError, TypeError) as error:
        advice = "Remove the prompts' stage.json, and the same command makes both again"
        removal = f"{advice}: {shlex.join(['rm', str(path.with_name('stage.json'))])}"
        raise ValueError(f"{path} cannot be read ({error}); it must hold the report on the rows. {removal}") from error


def load_target_tokenizer(recipe: Recipe) -> Tokenizer:
    return load_tokenizer(folder_of(recipe.target), recipe.target.trust_remote_code)


def num_tokens(recipe: Recipe) -> int:
    """The number of tokens in the target's embedding."""
    return TargetConfig.from_folder(folder_of(recipe.target)).vocab_size


def load_chat_template(recipe: Recipe) -> ChatTemplate:
    """The target's chat template with the settings of the run."""
    return ChatTemplate(load_target_tokenizer(recipe), template_settings(recipe, folder_of(recipe.target)))


def read_both(recipe: Recipe, template: ChatTemplate) -> PromptRows:
    """Read the prompts of both splits; training samples that are also held out are left out."""
    data = recipe.data
    if data.prompts == SELF:
        selection = start_selection(recipe, template)
        selection.take_all(read_candidates(recipe.prompts_dir))
        assert not selection.missing
        return PromptRows(selection.train, selection.heldout, selection.reports, selection.rejections())
    reports = [
        RowReport(data.prompts, data.num_prompts, "data.num_prompts"),
        RowReport(str(data.heldout_prompts), data.heldout_samples, "data.heldout_samples"),
    ]
    vocab_size, pictures = num_tokens(recipe), KeptPictures(recipe, template)
    heldout = read_prompts(template, data, None, reports[1], vocab_size=vocab_size, pictures=pictures)
    held_out = {key_of(row) for row in heldout}
    train = read_prompts(template, data, data.num_prompts, reports[0], held_out, vocab_size, pictures)
    return PromptRows(train, heldout, reports)


def start_selection(recipe: Recipe, template: ChatTemplate) -> Selection:
    """A selection that knows the held-out prompts of a file, if there is one."""
    data, source = recipe.data, str(recipe.data.heldout_prompts)
    if data.holds_out_own_prompts:
        return Selection(data)
    report = RowReport(source, data.heldout_samples, "data.heldout_samples")
    rows = read_prompts(
        template, data, None, report, vocab_size=num_tokens(recipe), pictures=KeptPictures(recipe, template)
    )
    return Selection(data, rows, report, opening_texts(source, template))


def write_self_prompts(recipe: Recipe, load: Callable[[], TargetModel]) -> None:
    """Let the target write missing prompts if data.prompts is self, on all ranks; raises ValueError if it cannot."""
    if recipe.data.prompts != SELF:
        return
    stage = prompts_stage(recipe)
    others = stage.changed_inputs() - {"data.num_prompts"}
    if stage.was_complete() and (others or not stage.changed_inputs()):
        return  # complete, or `make_prompts` refuses
    if others and read_candidates(stage.folder):
        stage.refuse()
    template = load_chat_template(recipe)
    user = UserTemplate(template, recipe.data, KeptPictures(recipe, template))
    write_candidates(recipe, stage, user, partial(start_selection, recipe, template), load)


def read_prompts(
    template: ChatTemplate,
    data: DataSection,
    count: int | None,
    report: RowReport,
    held_out: Set[Key] = frozenset(),
    vocab_size: int | None = None,
    pictures: KeptPictures | None = None,
) -> list[Json]:
    """The first `count` samples of a source that are not held out; rows without a usable sample enter the report.

    `vocab_size` is the size of the target's embedding; a tokenizer with added tokens may have more.
    """
    rows: list[Json] = []
    chat = ChatMasks(template, pictures, report.source)
    for row in read_rows(report.source):
        if count is not None and len(rows) >= count:
            break
        report.rows, report.counts = report.rows + 1, row.counts
        try:
            parsed = parse_row(row.read(), template.is_turn)
            samples = list(samples_of(chat, parsed, row.read(), data))
            refuse_unknown(samples, vocab_size or len(template.tokenizer))
        except BadRow as error:
            report.reject(row.line, error)
            continue
        if any(key_of(sample) in held_out for sample in samples):
            report.reject(row.line, BadRow(HELD_OUT, "its prompt is held out too"))
            continue
        rows += [{"id": len(rows) + place, **sample} for place, sample in enumerate(samples)]
        report.unread.update(sorted(unread_keys(row.read(), parsed)))
        if isinstance(parsed, Conversation) and parsed.tools and not template.writes_tools:
            report.unread[UNSEEN_TOOLS] += 1
        if data.responses == "given" and isinstance(parsed, Conversation) and parsed.answered() != parsed:
            report.unanswered += 1
        if any(sample["cut"] for sample in samples):
            report.cut += 1
            report.lost_system += isinstance(parsed, Conversation) and parsed.has_system
    report.samples, report.added, report.without_end = len(rows[:count]), chat.added, chat.without_end
    return rows[:count]


def refuse_unknown(samples: list[Json], vocab_size: int) -> None:
    """Raise BadRow for tokens outside the target's vocabulary: a row's own, or of tokens added to the tokenizer."""
    tokens = [token for sample in samples for token in sample["tokens"] + sample.get("response", [])]
    if unknown := [token for token in (min(tokens), max(tokens)) if not 0 <= token < vocab_size]:
        raise BadRow("unknown token", f"token {unknown[0]} given; the target's tokens are 0 to {vocab_size - 1}")


def make_prompts_alone(recipe: Recipe) -> Stage:
    """`make_prompts` as a separate command: no other command may write into the folder meanwhile."""
    stage = prompts_stage(recipe)
    if stage.was_complete() and not stage.changed_inputs():
        return stage
    with only_run_in(recipe.data_folder, "the prompts"):
        refuse_parts_at_work(recipe.data_folder)
        if recipe.data.prompts == SELF:
            start_processes()
            write_self_prompts(recipe, partial(TargetModel.load_to_answer, recipe.target, ()))
        return make_prompts(recipe)


def make_and_show_prompts(recipe: Recipe) -> None:
    make_prompts_alone(recipe)
    print(f"{describe_prompts(recipe)}\nwritten to {shown(recipe.prompts_dir)}")

"""The first stage: training and held-out prompts as tokens; with data.responses given, whole samples.

python -m data_pipelines.prompts recipes/tiny.yaml
"""

from headstart.recipes import recipe_from_command_line

if __name__ == "__main__":
    recipe_from_command_line(__doc__)  # --help and mistakes end the process here, before torch is loaded

import hashlib
import json
import random
from collections.abc import Iterator

from headstart.data_pipelines.chat_masks import ChatTemplate, MaskedTokens, runs
from headstart.data_pipelines.conversations import Conversation, TokenRow, parse_row
from headstart.data_pipelines.demo.python_stdlib import source_files
from headstart.data_pipelines.row_report import RowReport
from headstart.data_pipelines.rows import BadRow, read_rows, source_digest
from headstart.data_pipelines.stage import Json, Stage, file_digest, write_jsonl, write_text
from headstart.heads.target_config import locate_target
from headstart.inference.target.tokenizer import Tokenizer, load_tokenizer
from headstart.recipes import Recipe, run_command
from headstart.recipes.schema import PYTHON_STDLIB, DataSection

CHARACTERS_PER_TOKEN = 12  # a generous bound, to shorten text before tokenizing
ROW_REPORT = "rows.json"  # the unusable rows and why


def prompts_stage(recipe: Recipe) -> Stage:
    data = recipe.data
    inputs = {
        "data.prompts": data.prompts if data.prompts == PYTHON_STDLIB else source_digest(data.prompts),
        "data.heldout_prompts": file_digest(data.heldout_prompts),
        "data.num_prompts": data.num_prompts,
        "data.prompt_tokens": data.prompt_tokens,
        "target.path": recipe.target.path,
        "seed": recipe.seed,
    }
    if data.responses == "given":  # this stage then holds the responses too
        inputs |= {
            "data.responses": data.responses,
            "data.turns": data.turns,
            "data.response_tokens": data.response_tokens,
        }
    return Stage("prompts", recipe.prompts_dir, inputs)


def make_prompts(recipe: Recipe) -> Stage:
    """Write prompts/train.jsonl, prompts/heldout.jsonl and a report on the source rows, unless they are complete.

    A row is {id, tokens, cut}: the prompt's tokens, and whether its beginning was cut off. With data.responses given it
    also has `text`, all tokens of the sample, and `spans`, the token ranges to train on. Raises ValueError if too many
    source rows are unusable.
    """
    stage = prompts_stage(recipe)
    if stage.is_complete():
        return stage
    stage.begin()
    section, data = recipe.target, recipe.data
    tokenizer = load_tokenizer(locate_target(section.path, section.revision), section.trust_remote_code)
    row_reports = [RowReport(data.prompts), RowReport(str(data.heldout_prompts))]
    if data.prompts == PYTHON_STDLIB:
        train = stdlib_prompts(tokenizer, data.num_prompts, data.prompt_tokens, recipe.seed)
    else:
        train = read_prompts(tokenizer, data, data.num_prompts, row_reports[0])
    heldout = read_prompts(tokenizer, data, None, row_reports[1])
    write_text(stage.folder / ROW_REPORT, json.dumps([report.to_json() for report in row_reports], indent=1))
    for report in row_reports if data.prompts != PYTHON_STDLIB else row_reports[1:]:
        report.check(data.max_bad_fraction)
    write_jsonl(stage.folder / "train.jsonl", train)
    write_jsonl(stage.folder / "heldout.jsonl", heldout)
    stage.finish(
        {
            "train": len(train),
            "heldout": len(heldout),
            "cut": sum(row["cut"] for row in train + heldout),
            "bad": sum(len(report.bad) for report in row_reports),
            "sha256": file_digest(stage.folder / "train.jsonl"),
            "chat_template": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest(),
        }
    )
    return stage


def stdlib_prompts(tokenizer: Tokenizer, count: int, length: int, seed: int) -> list[Json]:
    """Draw prompts of `length` tokens that start at a line of the standard library, never from held-out files."""
    rng = random.Random(seed)
    texts = [file.text for file in source_files() if not file.held_out]
    weights = [len(text) for text in texts]
    tokens: list[list[int]] = []
    while len(tokens) < count:
        excerpts = []
        for text in rng.choices(texts, weights, k=count - len(tokens)):
            start = text.rfind("\n", 0, rng.randrange(len(text))) + 1
            excerpts.append(text[start : start + length * CHARACTERS_PER_TOKEN])
        tokens += [
            encoded[:length] for encoded in tokenizer(excerpts, verbose=False)["input_ids"] if len(encoded) >= length
        ]
    return [{"id": i, "tokens": row, "cut": False} for i, row in enumerate(tokens)]


def read_prompts(tokenizer: Tokenizer, data: DataSection, count: int | None, report: RowReport) -> list[Json]:
    """The first `count` samples of a source, or all for None; unusable rows are added to the report."""
    rows: list[Json] = []
    for row in read_rows(report.source):
        if count is not None and len(rows) >= count:
            break
        report.rows += 1
        try:
            if isinstance(row.fields, BadRow):
                raise row.fields
            for sample in samples_of(tokenizer, row.fields, data):
                rows.append({"id": len(rows), **sample})
                report.cut += [row.line] if sample["cut"] else []
        except BadRow as error:
            report.reject(row.line, error)
    return rows[:count]


def samples_of(tokenizer: Tokenizer, row: Json, data: DataSection) -> Iterator[Json]:
    """The samples of a row: one prompt for the target to answer, or the row's own samples (data.responses given)."""
    if data.responses == "target":
        tokens = encode_prompt(tokenizer, row)
        yield {"tokens": tokens[-data.prompt_tokens :], "cut": len(tokens) > data.prompt_tokens}
        return
    longest = data.prompt_tokens + data.response_tokens
    for given in given_samples(tokenizer, row, data):
        if len(given.tokens) > longest:
            raise BadRow(
                "too long", f"{len(given.tokens)} tokens; data.prompt_tokens and data.response_tokens allow {longest}"
            )
        prompt = given.tokens[: given.spans[-1][0]]
        yield {"tokens": prompt, "cut": False, "text": given.tokens, "spans": given.spans}


def encode_prompt(tokenizer: Tokenizer, row: Json) -> list[int]:
    """The tokens for the target to continue: a text as it is, a conversation without its final answer.

    Raises BadRow for a row without a prompt.
    """
    parsed = parse_known(tokenizer, row)
    if isinstance(parsed, Conversation):
        return ChatTemplate(tokenizer).prompt(parsed)
    if isinstance(parsed, TokenRow):
        spans = runs(parsed.loss_mask)
        return parsed.tokens[: spans[-1][0]] if spans and spans[-1][0] else parsed.tokens
    return list(tokenizer(parsed)["input_ids"])


def given_samples(tokenizer: Tokenizer, row: Json, data: DataSection) -> list[MaskedTokens]:
    """A row's own text and the ranges to train on; in a plain text, everything after the first token."""
    parsed = parse_known(tokenizer, row)
    if isinstance(parsed, Conversation):
        return ChatTemplate(tokenizer).masked(parsed, data.turns)
    tokens = parsed.tokens if isinstance(parsed, TokenRow) else list(tokenizer(parsed)["input_ids"])
    mask = parsed.loss_mask if isinstance(parsed, TokenRow) else [True] * len(tokens)
    spans = runs([False, *mask[1:]])  # nothing predicts the first token
    if not spans:
        raise BadRow("mask", "no token to train on; set loss_mask values to 1, or give a longer text")
    return [MaskedTokens(tokens, spans if data.turns == "all" else spans[-1:])]


def parse_known(tokenizer: Tokenizer, row: Json) -> Conversation | TokenRow | str:
    """Parse a row; raises BadRow for token ids outside the target's vocabulary."""
    parsed = parse_row(row)
    if isinstance(parsed, TokenRow):
        unknown = [token for token in parsed.tokens if not 0 <= token < len(tokenizer)]
        if unknown:
            raise BadRow(
                "unknown token", f"token {unknown[0]} given; the target's tokens are 0 to {len(tokenizer) - 1}"
            )
    return parsed


def main() -> None:
    run_command(__doc__, lambda recipe: print(recipe.prompts_dir, make_prompts(recipe).facts()))


if __name__ == "__main__":
    main()

"""Writes docs/targets.md and the packaged table of families from the results of `target_families.py`."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from headstart.inference.core.states import WINDOW
from headstart.inference.targets.families import TABLE, Family, FamilyTable

PAGE = Path(__file__).parents[1] / "docs/targets.md"
STATES = "it keeps states, which cannot be cut back to an earlier token"
UNKNOWN_CACHE = "its cache is not made of layers that transformers describes"

HEAD = """# Targets

Which models headstart decodes, and how. `headstart targets NAME` says the same of one model: a folder, a name on the
hub, or a model type. This page is written by a script
([`benchmarks/target_families.py`](../benchmarks/target_families.py)); do not edit it.

When a target is loaded, headstart runs a few tokens through it in every way that it knows, and takes the first whose
logits are those of the model's own forward pass. If none is, the model is refused, and the message names the
differences. So no list decides, and a model type that is not on this page may work as well.

## The ways to decode

| way | what a step does |
| --- | --- |
| trees | One pass verifies a tree of draft tokens: each token sees the text and the tokens above it. The layers keep keys and values for each token, so a mask hides the other branches, and what was not accepted is overwritten. |
| chains | One pass verifies one chain of draft tokens; a drafter that grows trees gives its likeliest path. Some layers keep a *state*, which sums up all tokens so far and cannot be cut back. So the states stay where every token was accepted, and the next pass reads the up to {window} tokens since then again ([replay window](how_it_works.md#targets-with-states)). |
| plain | Nothing is drafted, because several tokens in one pass do not go on from the states that are kept: one token per pass. |
| own cache | As chains, in a cache of the model's own making, which is copied before a step. The rows of a batch run one after the other, so a batch is no faster than its rows. |
| own cache, plain | The same without drafts. |
| refused | The model computes something else in several passes than in one. It is no target. |

In float32 the text is the target's own in every way, with drafts and without.

## What was tried

transformers {transformers}, {date}. Of each model type that it registers as a causal or an image-text-to-text model, a
tiny model with **random weights** was made, with every kind of layer that the type has, and decoded in float32: three
prompts, alone and in a batch, with and without drafts, at temperatures 0 and 1. Each text had to be the one that the
model's own forward pass gives. Real weights were not run, and no speed was measured. The types with images were given
text alone.

| outcome | model types |
| --- | ---: |
{counts}

## Limits

- Some models are read the same in one pass and in several only up to a number of positions, and texts end there:
  Llama 4 up to `floor_scale` with `attn_temperature_tuning`, and RoPEs of type `dynamic` and `longrope` up to the
  length that they were trained at.
- Models with sparse attention, and those with a cache of their own, keep transformers' own attention (sdpa or eager);
  the others run headstart's, which does not repeat keys for grouped heads.
- A step is captured in a CUDA graph for targets that verify trees only.
- Targets with states read one prompt at a time, not beside running rows. Their states are kept for later prompts where
  a text ended and where two prompts began to differ; other prefixes are read again.
- In half precision a target is checked in half precision, with more room for rounding.
- Images and sounds are not read: a model with towers for them is a target for text.

"""


def write_table(results: list[dict[str, Any]], types: list[str], version: str, day: date) -> None:
    """Write both files; a type without a result was not tried."""
    found = {each["family"]: family_of(each) for each in results}
    absent = Family("not tried", "no result yet")
    table = FamilyTable(version, str(day), {name: found.get(name, absent) for name in sorted(types)})
    families = {
        name: {field: value for field, value in asdict(family).items() if value is not None}
        for name, family in table.families.items()
    }
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(fields)}" for name, fields in families.items())
    top = f'"transformers": {json.dumps(table.transformers)}, "date": {json.dumps(table.date)}'
    TABLE.write_text(f'{{{top}, "families": {{\n{lines}\n}}}}\n', encoding="utf-8")
    PAGE.write_text(page(table), encoding="utf-8")
    print(f"{len(families)} types in {TABLE.name} and {PAGE.name}")


def family_of(result: dict[str, Any]) -> Family:
    """What a result says to users."""
    outcome, _, reason = str(result["outcome"]).partition(": ")
    if outcome in ("differs", "crash"):
        return Family("wrong", f"{outcome}: {reason}")
    if outcome == "not built":
        return Family("not tried", without_place(reason))
    if outcome == "refused":
        reason = without_place(reason).removeprefix("target.path: ")
        differences = reason.partition("whose passes do not continue its own text: ")[2] or reason
        return Family("refused", differences.partition("; a causal language model that")[0])
    why = result.get("why")
    if outcome == "near-tie":
        outcome, why = result["way"], "; ".join(filter(None, [why, f"near-tie: {reason}"]))
    return Family(outcome, why, result.get("harvest"))


def without_place(reason: str) -> str:
    """A message without the line of code that raised it."""
    return reason.rpartition(" (")[0] or reason


def page(table: FamilyTable) -> str:
    """docs/targets.md."""
    counts = "\n".join(f"| {way} | {len(names)} |" for way, names in table.by_way().items())
    head = HEAD.format(window=WINDOW, transformers=table.transformers, date=table.date, counts=counts)
    return head + "\n".join(sections(table)) + "\n"


def sections(table: FamilyTable) -> Iterator[str]:
    for title, ways, about in (
        ("Refused", ("refused", "wrong"), "The differences are those between the logits of its passes and its own."),
        ("Not tried", ("not tried",), "No tiny model could be made, or it does not continue a text of tokens."),
    ):
        rows = {name: family for name, family in table.families.items() if family.way in ways}
        if rows:
            yield f"## {title}\n\n{about}\n\n| model type | why |\n| --- | --- |"
            yield from (f"| {name} | {cell(family.why)} |" for name, family in rows.items())
            yield ""
    yield "## The table\n"
    yield "| model type | decodes by | heads can be trained | why not by trees |\n| --- | --- | --- | --- |"
    for name, family in table.families.items():
        why = cell(family.why) if family.is_target else "see above"
        trained = cell(family.harvest or ("not tried" if family.is_target else "-"))
        yield f"| {name} | {family.way} | {trained} | {why} |"


def cell(text: str | None) -> str:
    """A text for a table in Markdown."""
    return (text or "").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")

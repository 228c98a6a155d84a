"""Writes the packaged table of families and the tables of docs/targets.md from the results of `target_families.py`."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from headstart.heads.formats.config_rules import refusing
from headstart.heads.target_config import TargetConfig
from headstart.targets import SAME, TABLE, Family, FamilyTable

PAGE = Path(__file__).parents[1] / "docs/targets.md"
STATES = "it keeps recurrent states, which cannot be cut back to an earlier token"
UNKNOWN_CACHE = "its cache is not made of layers that transformers describes"

MARK = "<!-- What follows is written by benchmarks/target_families.py --write. -->\n"


def write_table(results: list[dict[str, Any]], types: list[str], version: str, day: date) -> None:
    """Write both files; a type without a result was not tried."""
    found = {each["family"]: family_of(each) for each in results}
    known = FamilyTable.packaged()
    found = {name: replace(family, images=known.of(name).images) for name, family in found.items()}
    absent = Family("not tried", "no result yet")
    write_files(FamilyTable(version, str(day), {name: found.get(name, absent) for name in sorted(types)}))


def write_files(table: FamilyTable) -> None:
    families = {  # without what is not known
        name: {field: value for field, value in asdict(family).items() if value is not None}
        for name, family in table.families.items()
    }
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(fields)}" for name, fields in families.items())
    top = f'"transformers": {json.dumps(table.transformers)}, "date": {json.dumps(table.date)}'
    TABLE.write_text(f'{{{top}, "families": {{\n{lines}\n}}}}\n', encoding="utf-8")
    prose = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    PAGE.write_text(prose + MARK + tables(table), encoding="utf-8")
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
        return Family("refused", by_difference(differences.partition("; a causal language model that")[0]))
    why = result.get("why") and by_difference(result["why"])
    if outcome == "near-tie":
        outcome, why = result["method"], "; ".join(filter(None, [why, f"near-tie: {reason}"]))
    harvest, decoder = result.get("harvest"), decoder_of(result["family"])
    if decoder is not None and harvest == "yes":
        harvest = "on text alone"
    return Family(outcome, why, harvest, decoder, bits=result.get("bits"))


def after_images(found: str) -> str:
    """The result of decoding after images, in words for users."""
    found = re.sub(r"^(refused: )images: with an? \S+ target, (?:whose )?(.*) given, text, or .*", r"\1its \2", found)
    return without_place(found)


def by_difference(text: str) -> str:
    """The differences of several methods; equal differences are named together."""
    lead, *parts = re.split(r"(?:^|; )(trees|chains|plain|own cache, plain|own cache): ", text)
    methods: dict[str, list[str]] = {}
    for method, difference in zip(parts[::2], parts[1::2], strict=True):
        methods.setdefault(difference, []).append(method)
    return "; ".join([lead] * bool(lead) + [f"{', '.join(names)}: {each}" for each, names in methods.items()])


def decoder_of(name: str) -> str | None:
    """The model type of the language model in a type's default configuration, if it is another."""
    try:
        own = TargetConfig.from_dict(AutoConfig.for_model(name).to_dict()).model_type
    except Exception:  # transformers makes no default configuration, or one without a decoder
        return None
    return None if own == name else own


def without_place(reason: str) -> str:
    """A message without the line of code that raised it."""
    return re.sub(r" \(\w+, [\w.]+:\d+\)$", "", reason)


def tables(table: FamilyTable) -> str:
    """The part of docs/targets.md that depends on the table."""
    return "\n".join(["", *counts(table), *reasons(table), *rows(table)]) + "\n"


def counts(table: FamilyTable) -> Iterator[str]:
    yield f"## {len(table.families)} model types\n"
    yield f"Those of {table.source}.\n"
    yield "| outcome | model types |\n| --- | ---: |"
    yield from (f"| {method} | {len(names)} |" for method, names in table.by_method().items())
    yield ""


def reasons(table: FamilyTable) -> Iterator[str]:
    for title, method, about in (
        ("Refused", "refused", "Its passes compute other logits than its own forward pass."),
        ("Wrong", "wrong", "It wrote another text, or its process failed. Do not use it."),
        ("Not tried", "not tried", "No tiny model could be made, or it does not continue a text of tokens."),
    ):
        found = {name: family for name, family in table.families.items() if family.method == method}
        if found:
            yield f"## {title}\n\n{about}\n\n| model type | why |\n| --- | --- |"
            yield from (f"| {name} | {cell(family.why)} |" for name, family in found.items())
            yield ""


def rows(table: FamilyTable) -> Iterator[str]:
    """Every family."""
    yield "## The table\n"
    columns = ["model type", "decodes by", "after images", "same bits", "heads can be trained", "EAGLE-3 refused by"]
    columns.append("why not by trees")
    yield f"| {' | '.join(columns)} |"
    yield f"|{' --- |' * len(columns)}"
    for name, family in table.families.items():
        images, bits, trained, engines, why = "-", "-", "-", "-", "see above"
        if family.is_target:
            images = "yes" if family.images == SAME else cell(family.images or "-")
            bits = "yes" if family.bits == SAME else cell(family.bits or "not tried")
            trained, why = cell(family.harvest or "not tried"), cell(family.why)
            engines = ", ".join(label.partition(" ")[0] for label in refusing(family.decoder or name))
        yield f"| {name} | {family.method} | {images} | {bits} | {trained} | {engines} | {why} |"


def cell(text: str | None) -> str:
    """A text for a table in Markdown."""
    return (text or "").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")

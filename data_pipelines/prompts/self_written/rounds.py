"""Writing candidates for prompts in rounds, on all ranks, until enough of them are prompts (data.prompts self).

prompts/candidates.jsonl holds what became of every candidate. While candidates are written, each rank appends its own
to a file of its own, so a killed run goes on after the last one, with another number of ranks if you like.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from headstart.common.jsonl import append_jsonl, read_growing_jsonl, resume_jsonl, write_jsonl
from headstart.common.progress import Progress
from headstart.data_pipelines.prompts.self_written.candidates import CandidateWriter, UserTemplate, Write
from headstart.data_pipelines.prompts.self_written.selection import WINDOW, Selection
from headstart.data_pipelines.stages.stage import Json, Stage
from headstart.inference.core.request import Generation, Request
from headstart.inference.engine.loop import generate_batch
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe

CANDIDATES = "candidates.jsonl"
BATCHES = 16  # candidates written and appended together, in units of data.generate_batch
FIRST_SHARE, MORE = 0.8, 1.02  # share of the first candidates expected to be usable; factor for those that are not


def read_candidates(folder: Path) -> dict[int, Json]:
    """The candidates written so far, by number."""
    paths = [folder / CANDIDATES, *sorted(folder.glob(f"{rank_file('*')}"))]
    return {row["candidate"]: row for path in paths for row in read_growing_jsonl(path)}


def rank_file(rank: str) -> str:
    return CANDIDATES.replace(".", f"-{rank}.")


def write_candidates(
    recipe: Recipe,
    stage: Stage,
    template: UserTemplate,
    start_selection: Callable[[], Selection],
    load: Callable[[], TargetModel],
) -> None:
    """Write candidates until the selection has the prompts that the recipe asks for. All ranks must call this.

    Only the main rank selects. Raises ValueError if hardly any candidate is usable.
    """
    state, folder = PartialState(), stage.folder
    if state.is_main_process and not stage.was_complete():  # else its prompts stay what they are until there are more
        stage.claim()
    state.wait_for_everyone()
    own = folder / rank_file(f"{state.process_index:05d}")
    resume_jsonl(own)  # removes an incomplete last line
    selection = start_selection() if state.is_main_process else None
    while True:
        numbers, what = agree(None if selection is None else next_round(recipe, selection))
        if not numbers:
            break
        target = load()
        share = target.ranks.share(numbers)

        def work(write: Write, share: Sequence[int] = share, what: str = what, target: TargetModel = target) -> None:
            writer = CandidateWriter(recipe, template, write, target.end_tokens)
            with Progress(what, len(share), "candidates", active=state.is_main_process) as progress:
                size = BATCHES * recipe.data.generate_batch
                for start in range(0, len(share), size):
                    rows = writer.candidates(share[start : start + size])
                    append_jsonl(own, rows)
                    progress.advance(len(rows))

        target.ranks.carry_out(partial(decode, target, recipe.data.generate_batch), work)
        state.wait_for_everyone()
    if state.is_main_process:
        merge(folder)
    state.wait_for_everyone()


def decode(target: TargetModel, batch: int, requests: list[Request]) -> list[Generation]:
    return generate_batch(target, requests, max_batch=batch)


def agree(plan: tuple[list[int], str] | None) -> tuple[list[int], str]:
    """The main rank's plan, on every rank."""
    [found] = broadcast_object_list([plan])
    assert found is not None
    numbers, what = found
    return numbers, what


def next_round(recipe: Recipe, selection: Selection) -> tuple[list[int], str]:
    """Take what is written; then the numbers of the candidates to write next, none if there are enough prompts."""
    known = read_candidates(recipe.prompts_dir)
    while selection.missing and selection.next in known:
        selection.take(known[selection.next])
    if not selection.missing:
        return [], ""
    share = max(sum(selection.recent) / len(selection.recent), 1 / WINDOW) if selection.next else FIRST_SHARE
    most = max(WINDOW, selection.next)  # by then the selection may have given up
    size = min(max(math.ceil(selection.missing / share * MORE), recipe.data.generate_batch), most)
    unknown = (number for number in count(selection.next) if number not in known)
    return list(islice(unknown, size)), f"prompts ({selection.accepted:,} of {selection.wanted:,} kept)"


def merge(folder: Path) -> None:
    """Put the candidates of all ranks into one file."""
    parts = list(folder.glob(rank_file("*")))
    if parts:
        write_jsonl(folder / CANDIDATES, [row for _, row in sorted(read_candidates(folder).items())])
    for part in parts:
        part.unlink()

"""The start of a command on its ranks: one run per folder, and all ranks on the same run.

If a rank dies or fails, torch's launcher ends the other ranks of its machine. Ranks of other machines fail at their
next collective operation, because the operating system has closed the connection.
"""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from accelerate import PartialState
from accelerate.utils import gather_object
from torch.distributed import DistError

from headstart.common.remote import pull
from headstart.common.run_lock import Owner, only_run_in
from headstart.data_pipelines.features.shards import MANIFEST
from headstart.data_pipelines.stages.stage import STAGES, file_digest
from headstart.recipes import Recipe

FOLDER_SECONDS = 5.0  # how long a network file system may take to show one machine's new file to another
SETTLE_SECONDS = 0.5
PAGE = "docs/several_machines.md"

Facts = dict[str, str]  # values on which all ranks must agree, by name
Result = TypeVar("Result")


@contextmanager
def run_together(
    recipe: Recipe, command: str, check: Callable[[], object], more_facts: Callable[[], Facts] = dict
) -> Iterator[None]:
    """Hold the run's folder for this launch, in which all ranks agree on the run.

    Every rank must enter. Raises ValueError on every rank if `check` fails on one (a machine may lack a file), if
    another command writes into the folder, or if the ranks differ in run_dir (by content, not by path), recipe, stored
    data or `more_facts`, naming each difference.
    """
    state = PartialState()
    with naming_lost_ranks(state):
        on_all_ranks(check)
        with hold_folder(state, "run_dir", recipe.run_dir, command, lambda: {**run_facts(recipe), **more_facts()}):
            yield


@contextmanager
def naming_lost_ranks(state: PartialState) -> Iterator[None]:
    """Raise ValueError saying what to do if a collective operation fails because another rank has ended."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, DistError) and "gloo" not in str(error):
            raise
        raise ValueError(
            f"rank {state.process_index} lost the connection to another rank, whose message says why it ended, unless "
            "it was killed; start the same command again, on all machines: it continues from the last saved state"
        ) from error
    finally:
        if state.num_processes > 1:
            settle()


def settle() -> None:
    """Leave the interpreter to the threads of torch for a moment, before a rank ends.

    gloo's threads need it to drop the tensors of the last collective operation. If the interpreter is being torn down
    by then, it waits for them and they wait for it, for ever (seen with torch 2.13 under DDP).
    """
    time.sleep(SETTLE_SECONDS)


def on_all_ranks(action: Callable[[], Result]) -> list[Result]:
    """The results of an action on every rank, in their order; one rank's ValueError or OSError ends it on all."""
    result, refusal = None, None
    try:
        result = action()
    except (ValueError, OSError) as error:
        refusal = error
    everyone = gather_object([(result, None if refusal is None else str(refusal))])
    if refusal is not None:
        raise refusal
    for rank, (_, said) in enumerate(everyone):
        if said is not None:
            raise ValueError(f"rank {rank} stopped: {said}")
    return [result for result, _ in everyone]


@contextmanager
def hold_folder(
    state: PartialState,
    field: str,
    folder: Path,
    command: str,
    more_facts: Callable[[], Facts] = dict,
    wait: bool = False,
) -> Iterator[None]:
    """Hold a folder that all ranks share, for this launch alone; with `wait`, wait for another command to end."""
    with ExitStack() as stack:

        def take() -> str | None:
            return stack.enter_context(only_run_in(folder, command, wait)).token if state.is_main_process else None

        token = on_all_ranks(take)[0]
        assert token is not None
        pull(folder)
        refuse_differences(state, {field: folder_fact(folder, token), **more_facts()})
        yield


def folder_fact(folder: Path, token: str) -> str:
    """Whether this rank sees the lock that the main rank has just written into its run_dir."""
    deadline = time.monotonic() + FOLDER_SECONDS
    while time.monotonic() < deadline:
        owner = Owner.read(folder)
        if owner is not None and owner.token == token:
            return "the same folder"
        time.sleep(0.1)
    return f"{folder.absolute()}, another folder"


def run_facts(recipe: Recipe) -> Facts:
    """The facts that decide a run, except its folder: the recipe and the existing data."""
    values = recipe.model_dump(mode="json", exclude={"run_dir"})
    sections = {name: value if isinstance(value, dict) else {"": value} for name, value in values.items()}
    facts = {
        f"{name}.{key}".rstrip("."): json.dumps(value)
        for name, section in sections.items()
        for key, value in section.items()
    }
    files = [recipe.data_folder / stage / "stage.json" for stage in STAGES]
    if recipe.data.store is not None:
        files.append(recipe.data.store / MANIFEST)
    for path in files:
        facts[f"{path.parent.name}/{path.name}"] = file_digest(path)[:12] if path.is_file() else "missing"
    return facts


def refuse_differences(state: PartialState, facts: Facts) -> None:
    """Raise ValueError on every rank, naming each fact in which the ranks differ."""
    if state.num_processes == 1:
        return
    everyone: list[tuple[str, Facts]] = gather_object([(socket.gethostname(), facts)])
    main = everyone[0][1]
    different = [
        f"{name}: {main.get(name)} on rank 0 ({everyone[0][0]}), {its.get(name)} on rank {rank} ({host})"
        for rank, (host, its) in enumerate(everyone)
        for name in sorted(main.keys() | its.keys())
        if main.get(name) != its.get(name)
    ]
    if different:
        more = [f"and {len(different) - 12} more"] if len(different) > 12 else []
        raise ValueError(
            "\n  ".join(["the ranks are not on the same run:", *different[:12], *more])
            + f"\nstart every machine with the same recipe and overrides, and a run_dir that all of them share ({PAGE})"
        )

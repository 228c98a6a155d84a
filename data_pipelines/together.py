"""The start of a command on its ranks: one run per folder, all ranks on the same run, and none left waiting."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from headstart.common.run_lock import Owner, only_run_in
from headstart.data_pipelines.features.shards import MANIFEST
from headstart.data_pipelines.stages.lifeline import lifeline
from headstart.data_pipelines.stages.stage import Json, file_digest
from headstart.recipes import Recipe

FOLDER_SECONDS = 5.0  # how long a network file system may take to show one machine's new file to another
PAGE = "docs/several_machines.md"

Facts = dict[str, str]  # what all ranks must agree on, by name


@contextmanager
def run_together(
    recipe: Recipe, command: str, check: Callable[[], object], more_facts: Callable[[], Facts] = dict
) -> Iterator[None]:
    """Hold the run's folder for this launch, in which all ranks agree on the run; if one fails or dies, all end.

    Every rank must enter. `check` raises ValueError for what one rank alone may see, such as a file that its machine
    lacks. Raises ValueError on every rank if another command writes into the folder, or if the ranks differ in run_dir
    (by content, not by path), recipe, stored data or `more_facts`, naming each difference.
    """
    state = PartialState()
    with lifeline(state):
        check()
        with hold_folder(state, "run_dir", recipe.run_dir, command, lambda: {**run_facts(recipe), **more_facts()}):
            yield


@contextmanager
def hold_folder(
    state: PartialState,
    field: str,
    folder: Path,
    command: str,
    more_facts: Callable[[], Facts] = dict,
    wait: bool = False,
) -> Iterator[None]:
    """Hold a folder that all ranks share, for this launch alone; `wait` for another command rather than refuse."""
    with ExitStack() as stack:
        owner, refusal = None, None
        if state.is_main_process:
            try:
                owner = stack.enter_context(only_run_in(folder, command, wait))
            except (ValueError, OSError) as error:
                refusal = error
        token = tell_all(None if owner is None else owner.token, refusal)
        refuse_differences(state, {field: folder_fact(folder, token), **more_facts()})
        yield


def tell_all(token: str | None, refusal: Exception | None) -> str:
    """The main rank's token, on every rank; its refusal is raised on every rank instead."""
    token, said = broadcast_object_list([token, None if refusal is None else str(refusal)])
    if refusal is not None:
        raise refusal
    if said is not None:
        raise ValueError(f"the main rank stopped: {said}")
    assert token is not None
    return token


def folder_fact(folder: Path, token: str) -> str:
    """Whether this rank sees the lock that the main rank has just written into its run_dir."""
    deadline = time.monotonic() + FOLDER_SECONDS
    while time.monotonic() < deadline:
        owner = Owner.read(folder)
        if owner is not None and owner.token == token:
            return "the same folder"
        time.sleep(0.1)
    return f"{folder.absolute()}, another folder than the main rank's"


def run_facts(recipe: Recipe) -> Facts:
    """What decides a run besides its folder: the recipe as written, and the data that is already there."""
    fields = flat(recipe.model_dump(mode="json", exclude={"run_dir"}))
    files = [folder / "stage.json" for folder in (recipe.prompts_dir, recipe.responses_dir, recipe.features_dir)]
    if recipe.data.store is not None:
        files.append(recipe.data.store / MANIFEST)
    found = {f"{path.parent.name}/{path.name}": digest_of(path) for path in files}
    return {**{name: json.dumps(value) for name, value in fields.items()}, **found}


def flat(values: Json) -> Json:
    """A recipe's values by section.key."""
    sections = {name: value if isinstance(value, dict) else {"": value} for name, value in values.items()}
    return {f"{name}.{key}".rstrip("."): value for name, section in sections.items() for key, value in section.items()}


def digest_of(path: Path) -> str:
    return file_digest(path)[:12] if path.is_file() else "missing"


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
            "the ranks are not on the same run:\n  "
            + "\n  ".join(different[:12] + more)
            + "\nstart every machine with the same recipe and overrides, and with a run_dir on a disk that all of them "
            f"share ({PAGE} says what must be shared)"
        )

"""Export a trained head for a serving engine: config.json, weights and a README.md with the serving commands.

    headstart export recipes/tiny.yaml export.format=vllm
    headstart export recipes/tiny_full.yaml export.head=assets/demo_head export.format=speculators
    headstart export recipes/tiny.yaml export.push_to=my-org/my-head

The formats are native, vllm, sglang, tensorrt_llm, eagle, speculators and medusa; the last three are those of the
EAGLE authors' code, the speculators library and the Medusa authors' code. Before anything is written, the files are
checked against what the format's engine reads (see headstart lint), and a head that the engine would serve worse than
it was trained is refused with every reason. vllm, sglang and tensorrt_llm write the same files and differ only in this
check. The export goes to RUN_DIR/export/FORMAT unless export.folder names another folder; with export.push_to it is
also uploaded to a hub repository. Nothing is overwritten without export.overwrite=true.
"""

from headstart.recipes import recipe_from_command_line

if __name__ == "__main__":
    recipe_from_command_line(__doc__)  # --help and mistakes end the process here, before torch is loaded

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import torch
from httpx import HTTPError
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError

from headstart.common.files import read_json
from headstart.heads.base import DraftHead
from headstart.heads.checkpoint import load_head
from headstart.heads.files import HeadFiles, check_can_write, read_config, write_folder
from headstart.heads.formats.card import acceptance_lengths, card
from headstart.heads.formats.contracts import AUTHORS, RULES, violations
from headstart.heads.formats.layouts import FORMATS, ServedTarget
from headstart.heads.formats.subject import Violation, layout_of
from headstart.heads.frozen import FrozenTarget
from headstart.heads.medusa import MedusaHead
from headstart.heads.target_config import locate_target
from headstart.recipes import Recipe, run_command
from headstart.recipes.checks import refuse_original_target
from headstart.recipes.schema import Dtype


def main() -> None:
    run_command(__doc__, export)


def export(recipe: Recipe) -> Path:
    """Check and write the head, upload it if the recipe asks for that, and return its folder.

    Raises ValueError with every reason if the format's engine would not serve the head as it was trained, and if the
    folder, or a head in the repository, exists already.
    """
    section = recipe.export
    refuse_original_target(recipe, section.head)
    folder = section.folder or recipe.export_dir / section.format
    check_can_write(folder, section.overwrite)
    if section.push_to is not None:
        check_repository(section.push_to, section.overwrite, HfApi())
    target_folder = locate_target(recipe.target.path, recipe.target.revision)
    source = section.head or recipe.head_dir
    frozen = FrozenTarget.from_folder(target_folder, getattr(torch, section.dtype or stored_dtype(source)))
    head = load_head(source, frozen)
    target = served_target(recipe, target_folder)
    refuse_hydra(section.format, head)
    config, tensors = FORMATS[section.format].files(head, target)

    found = violations_by_engine(section.format, HeadFiles(folder, config, tensors), frozen)
    refuse_unservable(section.format, found)
    clean = [engine for engine, broken in found.items() if not broken]
    lengths = acceptance_lengths(recipe) if source == recipe.head_dir else {}
    promise = {"acceptance_length": lengths} if lengths else {}
    config["headstart"] = {**config["headstart"], "engines": clean, **promise}
    place = Path(section.push_to) if section.push_to else folder
    readme = card(recipe, head, target, target_folder, place, found)
    weights = FORMATS[section.format].weights
    write_folder(HeadFiles(folder, config, tensors), weights, readme, section.overwrite)
    engines = ", ".join(clean) or "headstart"
    print(f"{head.kind} head written to {folder}; {engines} can serve it, with the commands in its README.md")
    if section.push_to is not None:
        push(folder, section.push_to, HfApi())
    return folder


def stored_dtype(folder: Path) -> str:
    """The dtype that a head was saved in; a folder without config.json is left for `load_head` to refuse."""
    config = folder / "config.json"
    name = read_config(config).get("torch_dtype", "float32") if config.is_file() else "float32"
    if name not in get_args(Dtype):
        raise ValueError(
            f"{config}: torch_dtype is {name!r}; float32, bfloat16 or float16 is allowed: correct the file, or set "
            f"export.dtype"
        )
    return str(name)


def served_target(recipe: Recipe, target_folder: Path) -> ServedTarget:
    architectures = read_json(target_folder / "config.json").get("architectures", [])
    return ServedTarget(recipe.target.path, architectures, recipe.decode.depth, recipe.target.revision)


def violations_by_engine(name: str, files: HeadFiles, frozen: FrozenTarget) -> dict[str, list[Violation]]:
    """What each engine that reads files of this format finds wrong with them.

    The authors' own code reads only its own format; of the two authors' formats vLLM reads only Medusa's.
    """
    layout = layout_of(files)
    is_for_both = layout == "medusa_reference"
    engines = [engine for engine in RULES[layout] if is_for_both or (engine in AUTHORS) == (name in AUTHORS)]
    return {engine: violations(files, frozen, [engine]) for engine in engines}


def refuse_hydra(name: str, head: DraftHead) -> None:
    """Raise ValueError for sequential (Hydra) heads in any format but our own: no engine can draft with them."""
    if FORMATS[name].engine is not None and isinstance(head, MedusaHead) and head.shape.sequential:
        raise ValueError(
            f"export.format: {name!r} given for sequential (Hydra) heads, but no engine feeds heads the earlier draft "
            f"tokens; native is allowed, which headstart serves; or train with head.sequential=false"
        )


def refuse_unservable(name: str, found: dict[str, list[Violation]]) -> None:
    """Raise ValueError if the format's engine would serve the head worse than it was trained, or not at all."""
    engine = FORMATS[name].engine
    if engine is None:
        return
    if engine not in found:
        fitting = ", ".join(found)
        raise ValueError(f"export.format: {name!r} given for a head that only {fitting} can serve; choose one of them")
    if found[engine]:
        reasons = "\n  ".join(map(str, found[engine]))
        raise ValueError(
            f"export.format: {name!r} given, but the engine would not serve the head as it was trained:\n  {reasons}\n"
            f"choose another export.format or train a head that fits; docs/interop.md lists what each format needs"
        )


def check_repository(repository: str, overwrite: bool, hub: HfApi) -> None:
    """Raise ValueError, before any work is done, if the hub does not answer or the repository holds a head already."""
    with hub_errors(repository, "leave export.push_to out and upload the folder by hand"):
        is_taken = hub.file_exists(repository, "config.json")
    if is_taken and not overwrite:
        raise ValueError(
            f"export.push_to: {repository!r} given, which holds a config.json already; choose another repository or "
            f"set export.overwrite=true"
        )


def push(folder: Path, repository: str, hub: HfApi) -> None:
    """Upload the folder's files to a hub repository, which is created as a private one if it does not exist."""
    with hub_errors(repository, f"the export is complete in {folder}: upload it by hand"):
        hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(folder_path=folder, repo_id=repository, commit_message="Draft head exported by headstart")
    print(f"uploaded to {repository}")


@contextmanager
def hub_errors(repository: str, advice: str) -> Iterator[None]:
    """Turn the errors of the hub's client into a ValueError that says what to do."""
    try:
        yield
    except (OSError, HTTPError, HFValidationError) as error:  # no token, no permission, no connection, no such name
        raise ValueError(
            f"export.push_to: {repository!r} given, but the hub says {type(error).__name__}: {error}; {advice}"
        ) from error


if __name__ == "__main__":
    main()

"""Write a trained head for a serving engine, checked against what that engine reads, with a README that says how.

    python -m heads.export recipes/tiny.yaml export.format=vllm
    python -m heads.export recipes/tiny_full.yaml export.head=assets/demo_head export.format=speculators
    python -m heads.export recipes/tiny.yaml export.push_to=my-org/my-head

vllm, sglang and tensorrt_llm write the same files; each asks for its own engine's contract (heads.lint) to be met.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from httpx import HTTPError
from huggingface_hub import HfApi

from heads.base import DraftHead
from heads.checkpoint import load_head
from heads.formats.card import card
from heads.formats.contracts import AUTHORS, RULES, findings
from heads.formats.files import HeadFiles, check_free, write_folder
from heads.formats.layouts import FORMATS, ServedTarget
from heads.formats.subject import Finding, layout_of
from heads.frozen import FrozenTarget
from heads.medusa import MedusaHead
from heads.target_config import locate_target
from recipes import Recipe, run_command
from recipes.tuned_target import refuse_original_target


def main() -> None:
    run_command(__doc__, export)


def export(recipe: Recipe) -> Path:
    """Write and check the head, upload it if asked to; returns the folder.

    Raises ValueError for a head that the format's engine would not serve as it was trained, naming every reason, and
    for a folder or a repository's head that is there already.
    """
    section = recipe.export
    refuse_original_target(recipe, section.head)
    folder = section.folder or recipe.export_dir / section.format
    check_free(folder, section.overwrite)
    if section.push_to is not None:
        check_repository(section.push_to, section.overwrite, HfApi())
    target_folder = locate_target(recipe.target.path, recipe.target.revision)
    source = section.head or recipe.head_dir
    frozen = FrozenTarget.from_folder(target_folder, getattr(torch, section.dtype or stored_dtype(source)))
    head = load_head(source, frozen)
    target = served_target(recipe, target_folder)
    refuse_hydra(section.format, head)
    config, tensors = FORMATS[section.format].files(head, target)

    verdicts = judge(section.format, HeadFiles(folder, config, tensors), frozen)
    refuse(section.format, verdicts)
    good = [engine for engine, found in verdicts.items() if not found]
    config["headstart"] = {**config["headstart"], "engines": good}
    place = Path(section.push_to) if section.push_to else folder
    readme = card(recipe, head, target, target_folder, place, verdicts)
    weights = FORMATS[section.format].weights
    write_folder(HeadFiles(folder, config, tensors), weights, readme, section.overwrite)
    print(f"{head.kind} head written to {folder}; served by {', '.join(good) or 'headstart'}: see its README.md")
    if section.push_to is not None:
        push(folder, section.push_to, HfApi())
    return folder


def stored_dtype(folder: Path) -> str:
    """The number format that a head was saved in; a folder without one is for `load_head` to refuse."""
    config = folder / "config.json"
    return str(json.loads(config.read_text()).get("torch_dtype", "float32")) if config.is_file() else "float32"


def served_target(recipe: Recipe, target_folder: Path) -> ServedTarget:
    architectures = json.loads((target_folder / "config.json").read_text()).get("architectures", [])
    return ServedTarget(recipe.target.path, architectures, recipe.decode.depth, recipe.target.revision)


def judge(name: str, files: HeadFiles, frozen: FrozenTarget) -> dict[str, list[Finding]]:
    """What each engine has against such files; the authors' own code reads those of its own format alone, and of theirs
    vLLM reads Medusa's."""
    layout = layout_of(files)
    both = layout == "medusa_reference"
    engines = [engine for engine in RULES[layout] if both or (engine in AUTHORS) == (name in AUTHORS)]
    return {engine: findings(files, frozen, [engine]) for engine in engines}


def refuse_hydra(name: str, head: DraftHead) -> None:
    """Stop at heads that only we can draft with."""
    if FORMATS[name].engine is not None and isinstance(head, MedusaHead) and head.shape.sequential:
        raise ValueError(
            f"export.format: {name!r} given for sequential heads, Hydra's; no engine feeds heads the tokens drafted "
            f"before; native is allowed, which headstart serves, or train with head.sequential=false"
        )


def refuse(name: str, verdicts: dict[str, list[Finding]]) -> None:
    """Stop at an export that its engine would serve worse than it was trained, or not at all."""
    engine = FORMATS[name].engine
    if engine is None:
        return
    if engine not in verdicts:
        fitting = ", ".join(verdicts)
        raise ValueError(f"export.format: {name!r} given for a head that only {fitting} can serve; choose one of them")
    if verdicts[engine]:
        reasons = "\n  ".join(map(str, verdicts[engine]))
        raise ValueError(
            f"export.format: {name!r} given, but the head would not be served as it was trained:\n  {reasons}\n"
            f"train one without, or choose another export.format: what each needs is in docs/interop.md"
        )


def check_repository(repository: str, overwrite: bool, hub: HfApi) -> None:
    """Refuse, before any work, a hub that does not answer, and to upload over a head that a repository holds."""
    with hub_errors(repository, "leave it out, and upload the folder by hand"):
        is_taken = hub.file_exists(repository, "config.json")
    if is_taken and not overwrite:
        raise ValueError(
            f"export.push_to: {repository!r} given, which holds a config.json already; another repository is allowed, "
            f"or export.overwrite=true"
        )


def push(folder: Path, repository: str, hub: HfApi) -> None:
    """Upload the folder's files to a hub repository, which is made, private, if it is not there."""
    with hub_errors(repository, f"the export is whole in {folder}: upload it by hand"):
        hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(folder_path=folder, repo_id=repository, commit_message="Draft head exported by headstart")
    print(f"uploaded to {repository}")


@contextmanager
def hub_errors(repository: str, advice: str) -> Iterator[None]:
    """What the hub's client raises, as a ValueError that says what to do."""
    try:
        yield
    except (OSError, HTTPError) as error:  # no token, no right, no connection
        raise ValueError(
            f"export.push_to: {repository!r} given, but the hub says {type(error).__name__}: {error}; {advice}"
        ) from error


if __name__ == "__main__":
    main()

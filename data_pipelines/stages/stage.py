"""A stage of a run: a folder that records its inputs, so its output is reused, resumed or refused.

The inputs include digests of the target's small files: of content, so that a moved folder is still the same target.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import xxhash

from headstart.common.files import read_json, write_text
from headstart.recipes import Recipe

Json = dict[str, Any]
STAGES = ["prompts", "responses", "features"]  # each is made from those before it
CHECKSUM = "xxh3_128"  # the name of a shard's checksum in a store's manifest
WEIGHTS = "the target's config and weights"  # the name of `target_identity` among a stage's inputs
CONTENT = "all bytes of the target's weights"  # the name of `content_identity`
TOKENIZER_FILES = (
    "tokeniz*",  # tokenizer.json, tokenizer.model, tokenization_NAME.py
    "*.model",
    "*.tiktoken",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
TOKENIZER_CONFIG = "tokenizer_config.json"  # may hold the chat template too
LOADING_KEYS = ("is_local", "local_files_only")  # arguments of from_pretrained that transformers saves there


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum(path: Path) -> str:
    """A fast checksum (xxh3) for large files: it detects damage at disk speed, but not deliberate forgery."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def different_keys(recorded: Json, wanted: Json) -> set[str]:
    return {key for key in recorded.keys() | wanted.keys() if recorded.get(key) != wanted.get(key)}


def differences(recorded: Json, wanted: Json, wording: str) -> list[str]:
    """One line per key whose values differ; `wording` has two placeholders, the found and the wanted value."""
    return [
        f"{key}: the content has changed"
        if is_digest(recorded.get(key)) and is_digest(wanted.get(key))
        else f"{key}: " + wording.format(shown(recorded.get(key)), shown(wanted.get(key)))
        for key in sorted(different_keys(recorded, wanted))
    ]


def shown(value: object) -> str:
    """A value as a message shows it."""
    return f"content {str(value)[:12]}..." if is_digest(value) else repr(value)


def is_digest(value: object) -> bool:
    """Whether a value is a digest of content."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def removal_command(folders: Iterable[Path]) -> str:
    """A command line that removes the folders that exist."""
    return shlex.join(["rm", "-r", *(str(folder) for folder in folders if folder.exists())])


class Stage:
    """A folder with a stage.json that records the stage's inputs and whether it is complete."""

    def __init__(
        self, name: str, folder: Path, inputs: Json, dependents: Sequence[Path] = (), shared: bool = False
    ) -> None:
        """`dependents` are the folders that are made from this one, for messages.

        A shared folder (data.folder) may serve other recipes, so no message names it for removal.
        """
        self.name, self.folder, self.dependents, self.shared = name, folder, dependents, shared
        self.inputs: Json = json.loads(json.dumps(inputs))  # as JSON reads them back: tuples become lists
        self.path = folder / "stage.json"

    @classmethod
    def of(cls, recipe: Recipe, name: str, inputs: Json) -> "Stage":
        """A recipe's stage: prompts, responses or features."""
        made = [recipe.checkpoints_dir, recipe.head_dir, recipe.report_dir, recipe.export_dir]
        if recipe.joint.mode is not None:  # without it, the folder of this name is not the run's
            made.append(recipe.tuned_target_dir)
        shared = recipe.data_folder.resolve() != recipe.run_dir.resolve()
        later = [] if shared else STAGES[STAGES.index(name) + 1 :]
        return cls(
            name, recipe.data_folder / name, inputs, [*(recipe.data_folder / each for each in later), *made], shared
        )

    def is_complete(self) -> bool:
        """Whether the output is complete; raises ValueError naming the differences if it was made from other inputs."""
        self.refuse()
        return self.was_complete()

    def was_complete(self) -> bool:
        """Whether the folder is complete, for any inputs."""
        return self.path.is_file() and bool(self._recorded()["complete"])

    def claimed_for(self) -> Json | None:
        """The inputs recorded in the folder, or None if no run has claimed it."""
        return self._recorded()["inputs"] if self.path.is_file() else None

    def changed_inputs(self) -> set[str]:
        """The names of the inputs that differ from the recorded ones; empty if no run has claimed the folder."""
        recorded = self.claimed_for()
        return set() if recorded is None else different_keys(recorded, self.inputs)

    def claim(self, inputs: Json | None = None) -> None:
        """Record inputs, by default the stage's own, for an output that is not complete."""
        recorded = self.inputs if inputs is None else inputs
        write_text(self.path, json.dumps({"inputs": recorded, "complete": False}, indent=1))

    def finish(self, facts: Json) -> None:
        write_text(self.path, json.dumps({"inputs": self.inputs, "complete": True, "facts": facts}, indent=1))

    def facts(self) -> Json:
        """The facts that `finish` recorded."""
        return self._recorded()["facts"]

    def digest(self) -> str:
        """The identity of the complete stage, an input of the next stage."""
        return file_digest(self.path)

    def refuse(self, why: str = "") -> None:
        """Raise ValueError if the folder was made from other inputs; `why` says why they cannot be continued."""
        recorded = self.claimed_for()
        different = [] if recorded is None else differences(recorded, self.inputs, "made with {}, the recipe says {}")
        if different:
            problem = f"the {self.name} in {self.folder} were made from other inputs:"
            lines = "\n  ".join([problem, *different, *([why] if why else [])])
            raise ValueError(f"{lines}\nundo the change, or {self._start_anew()}")

    def _recorded(self) -> Json:
        """The content of stage.json; raises ValueError if it is broken."""
        try:
            record = json.loads(self.path.read_text())
            facts = record["facts"] if record["complete"] else None
            return {"inputs": record["inputs"], "complete": record["complete"], "facts": facts}
        except (ValueError, KeyError, TypeError) as error:
            broken = f"{self.path} cannot be read ({type(error).__name__}: {error})"
            must = f"it must say what the {self.name} were made from. If recipe, data and target have not changed since"
            continues = "remove this file, and the same command continues with what is there"
            removal = shlex.join(["rm", str(self.path)])
            raise ValueError(f"{broken}; {must}, {continues}: {removal}. Otherwise {self._start_anew()}") from error

    def _start_anew(self) -> str:
        """The remedy for a folder that does not fit the recipe."""
        if not self.shared:
            removal = removal_command([self.folder, *self.dependents])
            return f"choose another run_dir, or remove these and all that was made from them: {removal}"
        advice = "choose another data.folder, because other recipes may use this one"
        made = [folder for folder in self.dependents if folder.exists()]
        return f"{advice}, and remove what this run made from it: {removal_command(made)}" if made else advice


def prompt_identities(folder: Path) -> Json:
    """Digests of everything in a target's folder that turns text into prompt tokens."""
    settings = read_object(folder / TOKENIZER_CONFIG)
    for name in ("chat_template", *LOADING_KEYS):
        settings.pop(name, None)
    paths = {path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()}
    files = {path.name: file_digest(path) for path in paths if path.name != TOKENIZER_CONFIG}
    return {
        "the target's tokenizer": digest_of([settings, files]),
        "the target's chat template": digest_of(chat_templates(folder)),
    }


def chat_templates(folder: Path) -> Json:
    """The chat templates of a folder by name, in whichever file they are."""
    in_settings = read_object(folder / TOKENIZER_CONFIG).get("chat_template")
    templates = {"default": read_object(folder / "chat_template.json").get("chat_template", in_settings)}
    for path in [folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")]:
        if path.is_file():
            templates["default" if path.parent == folder else path.stem] = path.read_text(encoding="utf-8")
    return templates


def writes_date(folder: Path) -> bool:
    """Whether a chat template of a folder writes the day on which it is rendered."""
    return "strftime_now" in json.dumps(chat_templates(folder))


def generation_identity(folder: Path) -> str | None:
    """A digest of the file that names the target's end tokens; None if there is none."""
    path = folder / "generation_config.json"
    return file_digest(path) if path.is_file() else None


def read_object(path: Path) -> Json:
    """The JSON object in a file of the target, empty if there is no such file."""
    content = read_json(path, "copy it there again") if path.is_file() else {}
    return content if isinstance(content, dict) else {}


def digest_of(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

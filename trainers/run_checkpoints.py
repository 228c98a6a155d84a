"""Checkpoints of a training run, written whole or not at all, and what may change when a run continues from one."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from headstart.common.errors import RUN_AGAIN
from headstart.common.files import remove, whole_folder, write_text
from headstart.common.remote import fetch, url_of
from headstart.data_pipelines.features.batches import SampleStore
from headstart.data_pipelines.stages.stage import CHECKSUM, Json, Stage, checksum, differences
from headstart.heads.files import Tensors, write_safetensors
from headstart.recipes import Recipe

STATE = "state.json"
NAME = re.compile(r"step-(0|[1-9]\d*)")
KEPT = 2  # newest checkpoints
# Fields of the train section that may change when a run is resumed: they affect the weights only through the order of
# additions, or only those that a run begins with.
MAY_CHANGE_ON_RESUME = {
    "fitted_start",
    "start_from",
    "accumulate",
    "activation_checkpointing",
    "checkpoint_every",
    "eval_prompts",
    "dry_run",
}
GROW_WITH_PROMPTS = {"prompts", "responses"}  # inputs of a stage that change when prompts are added


@dataclass(frozen=True)
class Snapshot:
    """Everything that training changes: whole tensors by parameter name, however many ranks hold them.

    Batches, input noise and learning rates are functions of (seed, step), so `step` also says where the run is in the
    data, and no generator state needs to be saved.
    """

    step: int  # steps done
    weights: Tensors
    optimizers: Tensors  # their state, named as in fc.weight.exp_avg
    target: Tensors = field(default_factory=dict)  # what joint.mode trains of it, with optimizer state


class Checkpoints:
    """`folder/step-N` holds the run after N steps, for the two newest N."""

    def __init__(self, folder: Path, inputs: Json) -> None:
        self.folder = folder
        self.inputs: Json = json.loads(json.dumps(inputs))
        self.accepted: Json = {}  # inputs in which the checkpoints may differ

    def steps(self) -> list[int]:
        """The steps of the whole checkpoints, ascending; folders of other names are not ours."""
        paths = [path for path in self.folder.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()]
        if url_of(self.folder) is not None:  # an upload that was cut off lacks its last file
            paths = [path for path in paths if (path / STATE).is_file()]
        return sorted(int(path.name.removeprefix("step-")) for path in paths)

    def newest(self) -> int:
        """The step of the newest checkpoint, 0 if there is none."""
        return max(self.steps(), default=0)

    def newest_inputs(self) -> Json | None:
        """The inputs of the newest checkpoint, None without one; raises ValueError if it cannot be read."""
        newest = self.newest()
        with self._named(newest):
            return json.loads((self.path(newest) / STATE).read_text())["inputs"] if newest else None

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def save(self, snapshot: Snapshot) -> None:
        """Write to a partial folder, rename it, then remove older checkpoints: a full disk or a kill costs nothing.

        Raises ValueError if it cannot be written; earlier checkpoints are then still whole.
        """
        every = {"head": snapshot.weights, "optimizers": snapshot.optimizers, "target": snapshot.target}
        files = {name: tensors for name, tensors in every.items() if tensors}
        path = self.path(snapshot.step)
        try:
            for leftover in self.folder.glob("*.partial"):
                remove(leftover)
            with whole_folder(path) as partial:
                for name, tensors in files.items():
                    write_safetensors(tensors, partial / f"{name}.safetensors")
                checksums = {name: checksum(partial / f"{name}.safetensors") for name in files}
                state = {"step": snapshot.step, CHECKSUM: checksums, "inputs": self.inputs}
                write_text(partial / STATE, json.dumps(state, indent=1))
                for each in partial.iterdir():
                    flush(each)
                remove(path)
            flush(self.folder)
        except OSError as error:
            kept = ", ".join(f"step-{step}" for step in self.steps()) or "none before it"
            failed = f"{path} cannot be written ({error.strerror}); whole checkpoints: {kept}"
            raise ValueError(f"{failed}; {RUN_AGAIN}, which continues from the newest") from error
        for old in self.steps()[:-KEPT]:
            remove(self.path(old))

    def load(self) -> Snapshot | None:
        """The newest checkpoint, if any; raises ValueError if it cannot be read or belongs to another recipe."""
        newest = self.newest()
        if newest == 0:
            return None
        path, files = self.path(newest), dict[str, Tensors]()
        with self._named(newest):
            state = json.loads((path / STATE).read_text())
            for name, wanted in dict(state[CHECKSUM]).items():
                fetch(file := path / f"{name}.safetensors")
                if checksum(file) != wanted:
                    raise ValueError(f"{file.name} is damaged: its {CHECKSUM} differs from the one in {STATE}")
                files[name] = load_file(file)
            optimizers, target = files.get("optimizers", {}), files.get("target", {})
            snapshot = Snapshot(int(state["step"]), files["head"], optimizers, target)
            found = {**state["inputs"], **self.accepted}
        if different := differences(found, self.inputs, "checkpoint {}, recipe {}"):
            lines = "\n  ".join([f"{path} belongs to another recipe:", *different])
            advice = f"choose another run_dir, undo the change in the recipe, or remove {self.folder} to start over"
            raise ValueError(f"{lines}\n{advice}")
        return snapshot

    @contextmanager
    def _named(self, step: int) -> Iterator[None]:
        """Name a checkpoint that cannot be read, and the one before it."""
        try:
            yield
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            before = max((each for each in self.steps() if each < step), default=None)
            resumes = "start over" if before is None else f"resume from step-{before}"
            raise ValueError(f"{self.path(step)} cannot be read ({error}); remove it to {resumes}") from error

    def note_export(self, step: int) -> None:
        """Record which weights became the run's head."""
        write_text(self.folder / "exported.json", json.dumps({"step": step}))


def flush(path: Path) -> None:
    """Force a file or a folder's entries to disk, so that no rename reaches the disk before the data it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoint_inputs(recipe: Recipe, features: Stage) -> Json:
    """Everything that decides the weights; a run resumes only from checkpoints with the same inputs."""
    sections = {"head": recipe.head.model_dump(), "train": recipe.train.model_dump(exclude=MAY_CHANGE_ON_RESUME)}
    if recipe.joint.mode is not None:
        sections["joint"] = recipe.joint.model_dump()
    fields = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {"features": features.digest(), "seed": recipe.seed, **fields}


@dataclass(frozen=True)
class RunStart:
    """The facts that the head was built from when training began; they stay when data is added later."""

    data: Json  # the inputs of the stage that training reads
    samples: int
    vocab: list[int] | None  # target tokens of the draft vocabulary, ascending; None for all
    tap_sizes: list[float] | None  # None for a head that does not scale its taps
    start_from: bool = False  # whether it was a trained head, whose copy is beside the checkpoints

    @classmethod
    def read(cls, folder: Path) -> "RunStart | None":
        """The start of the run whose checkpoints are in the folder; None if it has not begun."""
        path = folder / "start.json"
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            holds = f"{path} cannot be read ({error}); it says which draft vocabulary the checkpoints have"
            raise ValueError(f"{holds}: restore it, or remove {folder} to start over") from error

    def save(self, folder: Path) -> None:
        write_text(folder / "start.json", json.dumps(asdict(self)))

    def has_grown_into(self, features: Stage, store: SampleStore) -> bool:
        """Whether the data is the same as then, but for prompts that were added."""
        fixed = [{key: data[key] for key in data.keys() - GROW_WITH_PROMPTS} for data in (self.data, features.inputs)]
        return fixed[0] == fixed[1] and len(store) > self.samples


def changes(start: RunStart | None, before: Json, now: Json, step: int, features: Stage, store: SampleStore) -> Json:
    """The inputs that may differ from the checkpoints': train.steps if enough, and features with more prompts."""
    found = {}
    if before.get("train.steps") != now["train.steps"] and now["train.steps"] >= step:
        found["train.steps"] = now["train.steps"]
    grown = start is not None and start.has_grown_into(features, store)
    if before.get("features") != now["features"] and grown:
        found["features"] = now["features"]
    return found


def describe_changes(changed: Json, before: Json, step: int, start: RunStart | None, samples: int) -> Iterator[str]:
    """One line for what is kept, and one for each change."""
    yield f"continuing after step {step}; kept: the head's weights, its draft vocabulary, the optimizer's state"
    if "train.steps" in changed:
        yield (
            f"train.steps: {changed['train.steps']} instead of {before['train.steps']}; from here on the learning rate "
            "follows the schedule of the new number"
        )
    if "features" in changed and start is not None:
        yield f"features: {samples} training samples instead of {start.samples}; batches are drawn from all of them now"
        if {**before, **changed}["train.steps"] <= step:
            yield f"no steps are left for the new samples: raise train.steps above {step} to train on them"

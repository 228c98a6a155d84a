"""Checkpoints of a training run: safetensors only, written whole or not at all, and exact."""

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from headstart.common.errors import remedy
from headstart.common.files import remove, removed_on_failure, write_text
from headstart.data_pipelines.stages.stage import Json, differences
from headstart.heads.files import write_safetensors

STATE = "state.json"
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """Everything that training changes: whole tensors by parameter name, however many ranks hold them.

    Batches, input noise and learning rates are functions of (seed, step), so `step` also says where the run is in the
    data, and no generator state needs to be saved.
    """

    step: int  # steps done
    weights: Tensors
    optimizers: Tensors  # their state, named as in fc.weight.exp_avg
    average: Tensors  # the moving average of the weights; empty without train.ema_decay
    loss_scale: dict[str, float]
    target: Tensors = field(default_factory=dict)  # what joint.mode trains of it, with optimizer state

    @property
    def exported(self) -> Tensors:
        """The weights that are measured and exported."""
        return self.average or self.weights


@dataclass(frozen=True)
class Best:
    """The weights with the longest acceptance length so far, and how it was measured."""

    step: int
    score: float  # mean acceptance length over the measured temperatures
    conditions: Json
    folder: Path


class Checkpoints:
    """`folder/step-N` holds the run after N steps, for the newest few N; `folder/best-N` the best weights alone."""

    def __init__(self, folder: Path, inputs: Json, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self.inputs: Json = json.loads(json.dumps(inputs))
        self.accepted: Json = {}

    def steps(self, kind: str = "step") -> list[int]:
        """The steps of the whole checkpoints, ascending; `kind` is step or best."""
        return saved_steps(self.folder, kind)

    def newest(self) -> int:
        """The step of the newest checkpoint, 0 if there is none."""
        return newest_step(self.folder)

    def newest_inputs(self) -> Json | None:
        """The inputs of the newest checkpoint, None if there is none that can be read."""
        try:
            inputs: Json = json.loads((self.path(self.newest()) / STATE).read_text())["inputs"]
        except (OSError, ValueError, KeyError, TypeError):
            return None  # `load` names what is wrong
        return inputs

    def accept(self, changed: Json) -> None:
        """Go on from checkpoints that differ in these inputs."""
        self.accepted = changed

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def save(self, snapshot: Snapshot) -> None:
        """Write to a partial folder, rename it, then remove older checkpoints: a full disk or a kill costs nothing.

        Raises ValueError if it cannot be written; earlier checkpoints are then still whole.
        """
        every = {
            "head": snapshot.weights,
            "optimizers": snapshot.optimizers,
            "average": snapshot.average,
            "target": snapshot.target,
        }
        files = {name: tensors for name, tensors in every.items() if tensors}
        state = {"step": snapshot.step, "loss_scale": snapshot.loss_scale, "files": list(files), "inputs": self.inputs}
        self._write(self.path(snapshot.step), files, state)
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.path(old))

    def load(self) -> Snapshot | None:
        """The newest checkpoint, None if there is none.

        Raises ValueError if another recipe made it or it cannot be read: a run never restarts silently.
        """
        newest = self.newest()
        if newest == 0:
            return None
        path = self.path(newest)
        try:
            state = json.loads((path / STATE).read_text())
            files = {name: load_file(path / f"{name}.safetensors") for name in state["files"]}
            optimizers, average, target = (files.get(name, {}) for name in ("optimizers", "average", "target"))
            snapshot = Snapshot(int(state["step"]), files["head"], optimizers, average, state["loss_scale"], target)
            inputs = state["inputs"]
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read ({error}); remove it to resume from the one before it") from error
        self._refuse_difference(path, inputs)
        return snapshot

    def offer_best(self, step: int, weights: Tensors, score: float, conditions: Json) -> None:
        """Replace the best weights so far if these score higher, or if the scores were measured differently."""
        best, before = self.best(), self.steps("best")
        conditions = json.loads(json.dumps(conditions))
        if best is not None and best.conditions == conditions and best.score >= score:
            return
        state = {"step": step, "score": score, "measured": conditions, "inputs": self.inputs}
        self._write(self.folder / f"best-{step}", {"head": weights}, state)
        for old in before:
            if old != step:
                shutil.rmtree(self.folder / f"best-{old}")

    def best(self) -> Best | None:
        """The best weights so far. Raises ValueError if another recipe made them or they cannot be read."""
        found = []
        for step in self.steps("best"):  # two, if the process died between writing one and removing the other
            path = self.folder / f"best-{step}"
            try:
                state = json.loads((path / STATE).read_text())
                found.append(Best(step, float(state["score"]), state["measured"], path))
                inputs = state["inputs"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} cannot be read ({error}); remove it to continue without it") from error
            self._refuse_difference(path, inputs)
        return max(found, key=lambda best: best.score, default=None)

    def load_best(self, best: Best) -> Tensors:
        try:
            return load_file(best.folder / "head.safetensors")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{best.folder} cannot be read ({error}); choose train.export=newest") from error

    def exported(self) -> Json | None:
        """What `note_export` recorded last."""
        path = self.folder / "exported.json"
        try:
            found: Json | None = json.loads(path.read_text()) if path.is_file() else None
        except ValueError as error:
            raise ValueError(f"{path} is not JSON ({error}); remove it, and the head is written again") from error
        return found

    def note_export(self, what: Json) -> None:
        """Record which weights became the run's head."""
        write_text(self.folder / "exported.json", json.dumps(what))

    def _write(self, path: Path, files: dict[str, Tensors], state: Json) -> None:
        partial = path.with_name(path.name + ".partial")
        try:
            for leftover in self.folder.glob("*.partial"):
                remove(leftover)
            with removed_on_failure(partial):
                partial.mkdir(parents=True)
                for name, tensors in files.items():
                    write_safetensors(tensors, partial / f"{name}.safetensors")
                write_text(partial / STATE, json.dumps(state, indent=1))
                for each in partial.iterdir():
                    flush(each)
                if path.exists():
                    shutil.rmtree(path)
                partial.replace(path)
                flush(self.folder)
        except OSError as error:
            kept = ", ".join(f"step-{step}" for step in self.steps()) or "none before it"
            raise ValueError(
                f"{path} cannot be written ({error.strerror}); whole checkpoints: {kept}; {remedy(error)}, which "
                "continues from the newest"
            ) from error

    def _refuse_difference(self, path: Path, found: Any) -> None:
        found = {**found, **self.accepted} if isinstance(found, dict) else {}
        different = differences(found, self.inputs, "checkpoint {}, recipe {}")
        if different:
            raise ValueError(
                f"{path} belongs to another recipe:\n  "
                + "\n  ".join(different)
                + f"\nchoose another run_dir, undo the change in the recipe, or remove {self.folder} to start over"
            )


def saved_steps(folder: Path, kind: str) -> list[int]:
    paths = (path for path in folder.glob(f"{kind}-*") if path.suffix == "")
    return sorted(int(path.name.removeprefix(f"{kind}-")) for path in paths)


def newest_step(folder: Path) -> int:
    """The step of the newest whole checkpoint in a folder, 0 if there is none."""
    return max(saved_steps(folder, "step"), default=0)


def flush(path: Path) -> None:
    """Force a file or a folder's entries to disk, so that no rename reaches the disk before the data it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Checkpoints of a training run: safetensors only, whole or not at all, and exact."""

import json
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from data_pipelines.stage import Json, differences, write_text

STATE = "state.json"


class Checkpoints:
    """`folder/step-N` holds the head, the optimizers and the inputs of the run after N steps.

    Nothing else moves during training: batches and learning rates are functions of (seed, step).
    """

    def __init__(self, folder: Path, inputs: Json, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self.inputs: Json = json.loads(json.dumps(inputs))

    def steps(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*") if path.suffix == "")

    def newest(self) -> int:
        """The step of the newest checkpoint, 0 if there is none."""
        return max(self.steps(), default=0)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def save(self, step: int, head: nn.Module, state: dict[str, Tensor]) -> None:
        """Write beside, then rename; only then older ones go, so a full disk or a kill costs nothing.

        `state` is the optimizers', by parameter name.
        """
        partial = self.path(step).with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(
            {k: v.detach().cpu().contiguous() for k, v in head.state_dict().items()}, partial / "head.safetensors"
        )
        save_file({k: v.contiguous() for k, v in state.items()}, partial / "optimizers.safetensors")
        write_text(partial / STATE, json.dumps({"step": step, "inputs": self.inputs}, indent=1))
        partial.replace(self.path(step))
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.path(old))

    def resume(self, head: nn.Module) -> tuple[int, dict[str, Tensor]]:
        """Load the newest checkpoint's weights; returns its step, 0 if there is none, and its optimizers' state.

        Raises ValueError when it was made by another recipe or cannot be read; nothing restarts silently.
        """
        newest = self.newest()
        if newest == 0:
            return 0, {}
        path = self.path(newest)
        try:
            state = json.loads((path / STATE).read_text())
            weights, moments = load_file(path / "head.safetensors"), load_file(path / "optimizers.safetensors")
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read ({error}); remove it to resume from the one before") from error
        self._refuse_difference(path, state["inputs"])
        head.load_state_dict(weights)
        return int(state["step"]), moments

    def _refuse_difference(self, path: Path, found: Json) -> None:
        different = differences(found, self.inputs, "checkpoint {}, recipe {}")
        if different:
            raise ValueError(
                f"{path} belongs to another recipe:\n  "
                + "\n  ".join(different)
                + f"\nchoose another run_dir, put the recipe back, or remove {self.folder} to train anew"
            )

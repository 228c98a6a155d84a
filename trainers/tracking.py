"""Where the metrics of a training run go: metrics.jsonl, the progress bar, and wandb if its variables ask for it."""

import os
import uuid
from types import TracebackType
from typing import Any

from accelerate.utils import is_wandb_available

from headstart.common.errors import wrong_value
from headstart.common.files import append_jsonl, read_growing_jsonl, write_jsonl, write_text
from headstart.common.progress import Progress
from headstart.common.remote import publish_growing
from headstart.recipes import Recipe


class Tracker:
    """A context manager; every method does nothing on ranks other than the main one."""

    def __init__(self, recipe: Recipe, first_step: int, active: bool) -> None:
        self.recipe, self.first_step, self.active = recipe, first_step, active
        self.progress = Progress("training", recipe.train.steps, "steps", first_step, active)
        self.run: Any = None

    def __enter__(self) -> "Tracker":
        if self.active:
            self.recipe.run_dir.mkdir(parents=True, exist_ok=True)  # the harvest may be elsewhere
            self._drop_rows_after(self.first_step)
            mode = wandb_mode()
            if mode != "disabled":
                self.run = self._start_wandb(mode)
        self.progress.__enter__()
        return self

    def _start_wandb(self, mode: Any) -> Any:
        import wandb  # an extra; `refuse_unusable_wandb` checks that it is there

        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", "headstart"),
            dir=str(self.recipe.run_dir),
            config=self.recipe.model_dump(mode="json"),
            mode=mode,
            id=self._run_id(),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.progress.__exit__(kind, error, at)
        if self.active:
            publish_growing(self.recipe.metrics_path, 0)
        if self.run is not None:
            self.run.finish()

    def advance(self, step: int) -> None:
        self.progress.advance(step - self.progress.done)

    def log(self, step: int, values: dict[str, float], progress_text: str) -> None:
        """Write one row of metrics, and show `progress_text` beside the progress bar."""
        if not self.active:
            return
        append_jsonl(self.recipe.metrics_path, [{"step": step, **values}])
        if self.run is not None:
            self.run.log(values, step=step)
        self.progress.text = progress_text

    def say(self, text: str) -> None:
        self.progress.say(text)

    @staticmethod
    def has_measured(recipe: Recipe, step: int) -> bool:
        """Whether metrics.jsonl holds the held-out metrics of a step."""
        found = read_growing_jsonl(recipe.metrics_path)
        return any(row.get("step") == step and any(name.startswith("heldout/") for name in row) for row in found)

    def _run_id(self) -> str:
        """One wandb run per run_dir, however often it is resumed."""
        path = self.recipe.run_dir / "wandb_run_id"
        if not path.exists():
            write_text(path, uuid.uuid4().hex[:8])
        return path.read_text()

    def _drop_rows_after(self, step: int) -> None:
        """A resumed run repeats the steps after its checkpoint, so their old rows are removed."""
        path = self.recipe.metrics_path
        if path.exists():
            write_jsonl(path, [row for row in read_growing_jsonl(path) if row.get("step", 0) <= step])


def wandb_mode() -> Any:
    """WANDB_MODE, or online if WANDB_API_KEY is set, or else, and without wandb, disabled."""
    configured = "online" if "WANDB_API_KEY" in os.environ else "disabled"
    return os.environ.get("WANDB_MODE", configured) if is_wandb_available() else "disabled"


def refuse_unusable_wandb() -> None:
    """Raise ValueError if wandb does not know the mode, or would ask for a key when training starts."""
    mode = wandb_mode()
    if mode not in ("online", "offline", "disabled"):
        raise wrong_value("WANDB_MODE", mode, "one of online, offline, disabled is", "change or unset it")
    if mode != "online" or "WANDB_API_KEY" in os.environ:  # with a key, login would wait for the network
        return
    import wandb

    if not wandb.login(prompt=False, verify=False):
        remedy = "no key was found: run wandb login, set WANDB_API_KEY, or set WANDB_MODE=offline"
        raise wrong_value("WANDB_MODE", mode, "offline or disabled is", remedy)

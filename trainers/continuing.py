"""What a run was begun with, and what may have changed when it goes on from a checkpoint."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from headstart.common.files import write_text
from headstart.data_pipelines.features.batches import SampleStore
from headstart.data_pipelines.stages.stage import Json, Stage
from headstart.recipes import Recipe

# Fields of the train section that may change when a run is resumed: they affect the weights only through the order of
# additions.
MAY_CHANGE_ON_RESUME = {
    "fitted_start",  # it decides only what a run begins with
    "start_from",  # likewise
    "accumulate",
    "activation_checkpointing",
    "checkpoint_every",
    "keep_checkpoints",
    "eval_every",
    "eval_prompts",
    "export",
    "log_every",
    "dry_run",
}
GROW_WITH_PROMPTS = {"prompts", "responses"}  # inputs of a stage that change when prompts are added


def checkpoint_inputs(recipe: Recipe, features: Stage) -> Json:
    """Everything that decides the weights; a run resumes only from checkpoints with the same inputs."""
    joint = {} if recipe.joint.mode is None else recipe.joint.model_dump()
    return {
        "features": features.digest(),
        "seed": recipe.seed,
        **{f"head.{field}": value for field, value in recipe.head.model_dump().items()},
        **{f"train.{field}": value for field, value in recipe.train.model_dump(exclude=MAY_CHANGE_ON_RESUME).items()},
        **{f"joint.{field}": value for field, value in joint.items()},
    }


@dataclass(frozen=True)
class RunStart:
    """What the head was built from when training began. It stays when data is added later: so does the head."""

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
            raise ValueError(
                f"{path} cannot be read ({error}); it says which draft vocabulary the checkpoints have. Restore it, or "
                f"remove {folder} to start over"
            ) from error

    def save(self, folder: Path) -> None:
        write_text(folder / "start.json", json.dumps(asdict(self)))

    def has_grown_into(self, features: Stage, store: SampleStore) -> bool:
        """Whether the data is the same as then, but for prompts that were added."""
        fixed = [{key: data[key] for key in data.keys() - GROW_WITH_PROMPTS} for data in (self.data, features.inputs)]
        return fixed[0] == fixed[1] and len(store) > self.samples


def changes(start: RunStart | None, before: Json, now: Json, step: int, features: Stage, store: SampleStore) -> Json:
    """The inputs of the checkpoints that differ, but from which a run may go on: the wanted value by name.

    They are train.steps, unless more steps are done already, and features to which prompts were added.
    """
    found = {}
    if before.get("train.steps") != now["train.steps"] and now["train.steps"] >= step:
        found["train.steps"] = now["train.steps"]
    grown = start is not None and start.has_grown_into(features, store)
    if before.get("features") != now["features"] and grown:
        found["features"] = now["features"]
    return found


def describe_changes(changed: Json, before: Json, step: int, start: RunStart | None, samples: int) -> Iterator[str]:
    """What is reused and what is made anew, one line each."""
    if not changed:
        return
    yield f"going on after step {step}; kept: the head's weights, its draft vocabulary, the optimizer's state"
    if "train.steps" in changed:
        yield (
            f"train.steps: {changed['train.steps']} instead of {before['train.steps']}; from here on the learning rate "
            "follows the schedule of the new number"
        )
    if "features" in changed and start is not None:
        yield f"features: {samples} training samples instead of {start.samples}; batches are drawn from all of them now"
        if {**before, **changed}["train.steps"] <= step:
            yield f"no steps are left for the new samples: raise train.steps above {step} to train on them"

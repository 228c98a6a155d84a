"""List the files that hold one decode step and one training step: what a newcomer has to read.

    python benchmarks/step_files.py

Decodes with the demo head (EAGLE-3, greedy, on the CPU) and the server's defaults, trees by measured costs and repeats
of earlier text, and trains a head of recipes/tiny.yaml for two steps on a few prompts, in a temporary folder. Of each
it prints every file of this repository in which a function ran during a step, with the functions; nested functions
count as the one around them. Takes about a minute.
"""

import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from headstart.heads.base import DraftHead
from headstart.inference.core.request import Request
from headstart.inference.drafters.cost_measurement import cost_table
from headstart.inference.drafters.head import TreeDrafter
from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.engine.step import DecodeStep
from headstart.inference.generate.model import SpeculativeModel
from headstart.inference.generate.options import DRAFTS
from headstart.recipes import load_recipe
from headstart.trainers import run
from headstart.trainers.step import train_step

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("common", "recipes", "heads", "inference", "data_pipelines", "trainers")
TARGET, HEAD = ROOT / "assets" / "demo_target", ROOT / "assets" / "demo_head"
GENERATED = "<string>"  # file name of methods that `dataclass` generates
TRAINING = (  # little data, two steps, and no evaluation that would decode
    "data.num_prompts=8",
    "data.response_tokens=16",
    "data.heldout_samples=2",
    "train.steps=2",
    "train.batch_size=2",
    "train.warmup_steps=1",
    "train.checkpoint_every=2",
    "train.eval_prompts=0",
    "log.wandb=disabled",
)

Functions = dict[str, set[str]]  # file, relative to the repository -> names of the functions that ran


class StepProfile:
    """A profile function that notes which functions run while `step` does, in all of its calls."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step: CodeType = unwrap(step).__code__
        self.inside = 0  # calls of `step` on the stack
        self.found: Functions = defaultdict(set)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self.inside += frame.f_code is self.step
            if self.inside:
                self.note(frame)
        elif event == "return":  # also when a generator yields
            self.inside -= frame.f_code is self.step

    def note(self, frame: FrameType) -> None:
        path, name = frame.f_code.co_filename, frame.f_code.co_qualname.partition(".<locals>")[0]
        if path == GENERATED and "self" in frame.f_locals:  # it belongs to the file of its class
            owner = type(frame.f_locals["self"])
            path = str(sys.modules[owner.__module__].__dict__.get("__file__"))
            name = f"{owner.__name__}.{frame.f_code.co_name}"
        if path.startswith(f"{ROOT}{os.sep}"):
            file = Path(path).resolve().relative_to(ROOT)  # through the links in headstart/
            if file.parts[0] in PACKAGES:
                self.found[file.as_posix()].add(name)


@contextmanager
def profiled(step: Callable[..., Any]) -> Iterator[Functions]:
    """Profile everything in the context; gives the functions that ran within `step`."""
    profile = StepProfile(step)
    sys.setprofile(profile)
    try:
        yield profile.found
    finally:
        sys.setprofile(None)


def decode_step() -> Functions:
    drafts = DRAFTS
    model = SpeculativeModel.from_folders(TARGET, HEAD, drafts, dtype="float32", device="cpu")
    assert isinstance(model.drafter, TreeDrafter)
    assert isinstance(model.drafter.head, DraftHead)
    costs = cost_table(model.target, model.drafter.head, drafts.width, drafts.nodes, drafts.max_batch)
    loop = DecodeLoop(model.target, model.drafter, costs=costs)
    loop.submit(Request([5, 6, 7, 8] * 8, 40))
    with profiled(DecodeStep.run) as found:
        for _ in loop.run():
            pass
    return found


def training_step() -> Functions:
    with tempfile.TemporaryDirectory() as folder:
        recipe = load_recipe(ROOT / "recipes" / "tiny.yaml", [f"run_dir={folder}/run", *TRAINING])
        with profiled(train_step) as found:
            run(recipe)
    return found


def show(title: str, found: Functions) -> None:
    print(f"{title}: {len(found)} files")
    for file in sorted(found):
        print(f"  {file}: {', '.join(sorted(found[file]))}")


def main() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on a GPU a step is captured once and then runs no Python
    torch.set_num_threads(1)
    os.chdir(ROOT)  # paths in the recipe are relative to the repository
    decode, training = decode_step(), training_step()
    show("one decode step", decode)
    show("one training step", training)


if __name__ == "__main__":
    main()

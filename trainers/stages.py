"""The stages of a training run, which the scripts eagle.py, medusa.py and block.py call in data-flow order."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from headstart.common.files import read_growing_jsonl, read_json
from headstart.common.process import end_with_launcher
from headstart.common.remote import pull, shown
from headstart.data_pipelines.features.batches import SampleStore
from headstart.data_pipelines.features.sample_stores import IN_THIS_PROCESS, open_stores
from headstart.data_pipelines.features.shards import stored_taps
from headstart.data_pipelines.harvest_stages import OneTarget
from headstart.data_pipelines.stages.stage import Stage
from headstart.data_pipelines.together import run_together
from headstart.heads.formats.card import exported
from headstart.heads.formats.layouts import refusing_engine
from headstart.heads.frozen import FrozenTarget, SafetensorsFolder
from headstart.heads.kinds.checkpoint import KINDS, head_taps, save_head
from headstart.heads.target_config import TargetConfig, TargetOrigin, folder_of
from headstart.inference.targets.cuda_graph import SpareSteps
from headstart.inference.targets.loading import slow_format
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe
from headstart.recipes.command_line import DeviceMemory
from headstart.recipes.fields import head_kinds
from headstart.trainers.evaluation import TEMPERATURES, HeldOutDecoding
from headstart.trainers.loop import train
from headstart.trainers.memory import Machine, RunMemory
from headstart.trainers.new_head import START, build_head, describe, fit_first_weights, load_start, start_of_run
from headstart.trainers.objectives.medusa2 import TrainableTarget
from headstart.trainers.parallel.launch import ranks_of_a_copy, start_accelerator
from headstart.trainers.plan import preflight, print_plan, refuse_sizes
from headstart.trainers.run_checkpoints import Checkpoints, RunStart, changes, checkpoint_inputs, describe_changes
from headstart.trainers.step import TrainingInputs


@dataclass(frozen=True)
class TrainedHead:
    """A head whose weights after the last step are in the newest checkpoint."""

    frozen: FrozenTarget
    start: RunStart
    checkpoints: Checkpoints
    decoding: HeldOutDecoding | None
    target: TrainableTarget | None
    is_exported: bool  # by an earlier run


@dataclass(frozen=True)
class TrainingRun:
    """One run on the ranks of a launch. Stages that are complete and match the recipe are reused."""

    recipe: Recipe
    accelerator: Accelerator
    machine: Machine

    @classmethod
    def start(cls, recipe: Recipe, script: str, given: DeviceMemory | None = None) -> "TrainingRun":
        """Join the launch; raises ValueError if it contradicts the recipe, or if another script trains its head.

        A dry run may plan for `given` devices, which this machine need not have.
        """
        end_with_launcher()
        refuse_other_script(recipe, script)
        accelerator = start_accelerator(recipe)
        if given is not None:
            return cls(recipe, accelerator, Machine.described(recipe, given))
        slices = ranks_of_a_copy(accelerator)
        return cls(recipe, accelerator, Machine.running(accelerator.num_processes, accelerator.device, slices))

    def check(self) -> None:
        """Raise ValueError for what is known to fail later; a dry run first prints what the run would take."""
        memory = preflight(self.recipe, self.machine)
        if self.recipe.train.dry_run and self.accelerator.is_main_process:
            print_plan(memory)
        self.say_who_refuses(memory.head.target)
        memory.refuse()

    def say_who_refuses(self, target: TargetConfig) -> None:
        """Print a line, before anything is trained, if the engine of export.format refuses heads for this family."""
        section, kind = self.recipe.export, KINDS[self.recipe.head.kind]
        if self.accelerator.is_main_process and (engine := refusing_engine(section.format, kind, target.model_type)):
            print(
                f"export.format: {section.format!r} {section.origin('format')}, but {engine} starts no {kind.title} "
                f"head for targets of type {target.model_type!r}; headstart serves it, and "
                "`headstart targets` names the engines that may"
            )

    @contextmanager
    def on_all_ranks(self) -> Iterator[None]:
        """Check the recipe, and hold run_dir for ranks that agree on the run."""
        recipe = self.recipe
        checkpoints = Checkpoints(recipe.checkpoints_dir, {})
        with run_together(recipe, "training", self.check, lambda: {"checkpoint": f"step {checkpoints.newest()}"}):
            yield

    def train(self, features: Stage, shared: OneTarget) -> TrainedHead:
        """Train the head on the harvested samples, from the newest checkpoint if there is one.

        The `shared` target makes samples during training, decodes and teaches; without such work it is freed.
        """
        accelerator, recipe = self.accelerator, self.recipe
        finished = is_exported(recipe, Checkpoints(recipe.checkpoints_dir, {}))
        decodes = not finished and recipe.train.eval_prompts > 0 and accelerator.is_main_process
        if recipe.data.online != IN_THIS_PROCESS and (not decodes or recipe.joint.mode is not None):
            shared.free()
        frozen = FrozenTarget.from_folder(folder_of(recipe.target), torch.float32, accelerator.device)
        recipe = broadcast_object_list([RunMemory.of(recipe, frozen.config, self.machine).fitted().recipe])[0]
        taps = stored_taps(head_taps(recipe.head, frozen.config), frozen.config.num_layers)
        with open_stores(recipe, features, taps, shared) as (train_store, heldout_store):
            refuse_sizes(recipe, accelerator.num_processes, len(train_store), len(heldout_store))
            checkpoints, start = self.open_checkpoints(features, frozen, train_store)
            head = build_head(recipe, frozen, start)
            if recipe.train.fitted_start and not start.start_from and checkpoints.newest() == 0:
                fit_first_weights(head, frozen, train_store, accelerator, recipe.seed)
            if accelerator.is_main_process:
                if hint := slow_format("train.precision", recipe.train.precision, accelerator.device):
                    print(hint)
                print(*describe(head, frozen, train_store, heldout_store), sep="\n")
            decoding = target = None
            if decodes:
                decoding = start_decoding(recipe, head.taps, start, shared)
            if not finished and recipe.joint.mode is not None:
                target = TrainableTarget.load(recipe, accelerator.device)
            precision = getattr(torch, recipe.train.precision)
            frozen = frozen.scoring_in(precision, shared().frozen if shared.is_loaded else None)
            inputs = TrainingInputs(frozen, train_store, heldout_store, decoding, target)
            train(recipe, head, inputs, accelerator, checkpoints)
        return TrainedHead(frozen, start, checkpoints, decoding, target, finished)

    def open_checkpoints(
        self, features: Stage, frozen: FrozenTarget, store: SampleStore
    ) -> tuple[Checkpoints, RunStart]:
        """The run's checkpoints, and the facts that its head is built from; prints accepted changes of the recipe."""
        recipe, accelerator, folder = self.recipe, self.accelerator, self.recipe.checkpoints_dir
        checkpoints = Checkpoints(folder, checkpoint_inputs(recipe, features))
        step, before = checkpoints.newest(), checkpoints.newest_inputs()
        start, source = None, None
        if before is not None:
            start = RunStart.read(folder)
            checkpoints.accepted = changes(start, before, checkpoints.inputs, step, features, store)
            if accelerator.is_main_process and checkpoints.accepted:
                print(*describe_changes(checkpoints.accepted, before, step, start, len(store)), sep="\n")
        if start is None:
            source = None if recipe.train.start_from is None else load_start(recipe, frozen)
            start = start_of_run(recipe, features, frozen, store, source)
        accelerator.wait_for_everyone()  # all ranks have read what the main rank may now write
        if accelerator.is_main_process and before is None:
            if source is not None:
                save_head(source, folder / START)  # a resumed run needs its shape
            start.save(folder)
        accelerator.wait_for_everyone()  # all ranks build the head from what the main rank has written
        pull(folder)
        return checkpoints, start

    def export(self, trained: TrainedHead) -> None:
        """Write the newest weights as a calibrated head, and the target if it was trained too."""
        if not self.accelerator.is_main_process:
            return
        recipe, state = self.recipe, "head was already complete in"
        if not trained.is_exported:
            export_head(recipe, trained)
            state = "head written to"
        if trained.start.start_from and (measured := before_and_after(recipe)) is not None:
            print(measured)
        with_target = "" if recipe.joint.mode is None else f" target.path={shown(recipe.tuned_target_dir)}"
        print(f"{state} {shown(recipe.head_dir)}; next: headstart report RECIPE{with_target}")


def refuse_other_script(recipe: Recipe, script: str) -> None:
    """Raise ValueError if another script trains the recipe's kind of head."""
    if recipe.head.script != script:
        kinds = ", ".join(kind for kind, section in head_kinds().items() if section.script == script)
        advice = f"start it with: accelerate launch {recipe.head.script} RECIPE"
        raise ValueError(f"head.kind: {recipe.head.kind} given, {script} trains {kinds}; {advice}")


def is_exported(recipe: Recipe, checkpoints: Checkpoints) -> bool:
    """Whether the run is finished, and the weights of its last step are in the head's folder."""
    folders = [recipe.head_dir] if recipe.joint.mode is None else [recipe.head_dir, recipe.tuned_target_dir]
    is_newest = checkpoints.newest() == exported(recipe).get("step") == recipe.train.steps
    return is_newest and all(is_whole(folder) for folder in folders)


def is_whole(folder: Path) -> bool:
    """Whether config.json and the weights in a folder can be read; damaged ones are written again."""
    try:
        read_json(folder / "config.json")
        SafetensorsFolder(folder)
    except (OSError, ValueError):
        return False
    return True


def start_decoding(recipe: Recipe, taps: tuple[int, ...], start: RunStart, shared: OneTarget) -> HeldOutDecoding:
    """Build a second head in the target's number format to decode with; tuned weights need a target of their own."""
    is_tuned = recipe.joint.mode is not None
    target = TargetModel.load_to_answer(recipe.target, taps, packed=False) if is_tuned else shared()
    target.singleton(SpareSteps).clear()  # training needs the memory of the harvest's steps
    decoding_head = build_head(recipe, target.frozen, start).to(target.dtype)
    return HeldOutDecoding(recipe, target, decoding_head.eval().requires_grad_(False))


def export_head(recipe: Recipe, trained: TrainedHead) -> None:
    checkpoints, target, decoding = trained.checkpoints, trained.target, trained.decoding
    newest = checkpoints.load()
    assert newest is not None
    tuned, origin = {}, folder_of(recipe.target)
    if target is not None:
        target.restore(newest.target)
        target.save(recipe, recipe.tuned_target_dir)
        print(f"tuned target written to {shown(recipe.tuned_target_dir)}")
        tuned, origin = target.weights(), recipe.tuned_target_dir
    head = build_head(recipe, trained.frozen, trained.start)
    head.load_state_dict(newest.weights)
    if decoding is not None:
        print("calibrating the head: how far its scores can be trusted at each depth, on held-out prompts", flush=True)
        decoding.load_weights(newest.weights, tuned)
        head.calibration = decoding.fit_calibration()
    else:
        print("train.eval_prompts: 0, so the head's scores are not calibrated; headstart calibrate RECIPE does it")
    head.origin = TargetOrigin.of(origin)
    save_head(head, recipe.head_dir)
    checkpoints.note_export(newest.step)


def before_and_after(recipe: Recipe) -> str | None:
    """The acceptance lengths before and after a warm start, on the same prompts; None if they were not measured."""
    rows = [row for row in read_growing_jsonl(recipe.metrics_path) if "heldout/tau" in row]
    if not rows or rows[0]["step"] != 0:
        return None
    lengths = [
        f"{rows[0][f'heldout/{name}']:.2f} before and {rows[-1][f'heldout/{name}']:.2f} after at temperature {value:g}"
        for name, value in TEMPERATURES.items()
    ]
    return f"acceptance length on the held-out prompts: {', '.join(lengths)}"

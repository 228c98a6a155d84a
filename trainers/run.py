"""A whole training run: recipe -> prompts -> responses -> features -> head, for every kind of head."""

from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator

from headstart.common.files import read_json
from headstart.common.launcher import end_with_launcher
from headstart.data_pipelines.features.batches import SampleStore
from headstart.data_pipelines.features.sample_stores import open_stores
from headstart.data_pipelines.features.shards import stored_taps
from headstart.data_pipelines.harvest import harvest
from headstart.data_pipelines.stages.stage import Stage
from headstart.data_pipelines.together import run_together
from headstart.heads.base import DraftHead
from headstart.heads.block import BlockHead
from headstart.heads.checkpoint import draft_vocab, head_taps, load_head_for, new_head, save_head
from headstart.heads.eagle3 import Eagle3Head
from headstart.heads.frozen import FrozenTarget, SafetensorsFolder
from headstart.heads.target_config import locate_target
from headstart.heads.target_origin import TargetOrigin
from headstart.heads.vocab import DraftVocab
from headstart.inference.targets.loading import processor_name, slow_format
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe
from headstart.recipes.schema import BlockSection, Eagle3Section
from headstart.trainers.checkpoint import Checkpoints, Tensors, newest_step
from headstart.trainers.continuing import RunStart, changes, checkpoint_inputs, describe_changes
from headstart.trainers.dry_run import print_plan, refuse_sizes
from headstart.trainers.evaluation import HeldOutDecoding
from headstart.trainers.first_weights import fit_first_weights
from headstart.trainers.loop import train
from headstart.trainers.objectives.medusa2 import TrainableTarget
from headstart.trainers.preflight import preflight
from headstart.trainers.ranks.launch import refuse_lone_decoding, start_accelerator
from headstart.trainers.run_state import TrainingInputs
from headstart.trainers.scripts import SCRIPTS
from headstart.trainers.starting import START, before_and_after, keep_start, load_start
from headstart.trainers.vocabulary_report import describe_vocabulary


def run(recipe: Recipe, script: str | None = None) -> None:
    """Run the missing stages, then train and export the head; after a kill, the same command continues.

    `script` is the trainer that the user started; without it every kind of head is trained. Raises ValueError for a
    mistake in the recipe or the launch, as early as it can be detected.
    """
    end_with_launcher()
    if script is not None:
        refuse_other_script(recipe, script)
    accelerator = start_accelerator(recipe)
    check = partial(preflight, recipe, accelerator.num_processes, accelerator.device)
    if recipe.train.dry_run:
        check()
        if accelerator.is_main_process:
            print_plan(recipe, accelerator.num_processes, accelerator.device)
        return
    refuse_lone_decoding(recipe, accelerator.num_processes)
    refuse_sizes(recipe, accelerator.num_processes, recipe.data.num_prompts)
    with run_together(recipe, "training", check, lambda: {"checkpoint": f"step {newest_step(recipe.checkpoints_dir)}"}):
        make_head(recipe, accelerator)


def make_head(recipe: Recipe, accelerator: Accelerator) -> None:
    """Run the missing stages and train, on ranks that agree on the run."""
    features = harvest(recipe)
    target_folder = locate_target(recipe.target.path, recipe.target.revision)
    frozen = FrozenTarget.from_folder(target_folder, dtype=torch.float32, device=accelerator.device)
    taps = stored_taps(head_taps(recipe.head, frozen.config), frozen.config.num_layers)
    with open_stores(recipe, features, taps) as (train_store, heldout_store):
        train_and_export(recipe, accelerator, features, frozen, train_store, heldout_store)


def refuse_other_script(recipe: Recipe, script: str) -> None:
    """Raise ValueError if another script trains the recipe's kind of head."""
    kind, kinds = recipe.head.kind, [kind for kind in SCRIPTS if SCRIPTS[kind] == script]
    if kind not in kinds:
        raise ValueError(
            f"head.kind: {kind} given, {script} trains {' and '.join(kinds)}; start it with: accelerate launch "
            f"{SCRIPTS[kind]} RECIPE"
        )


def train_and_export(
    recipe: Recipe,
    accelerator: Accelerator,
    features: Stage,
    frozen: FrozenTarget,
    train_store: SampleStore,
    heldout_store: SampleStore,
) -> None:
    """Train the head on the harvested samples and write it, unless an earlier run has already done so."""
    refuse_sizes(recipe, accelerator.num_processes, len(train_store), len(heldout_store))
    checkpoints, start = open_checkpoints(recipe, accelerator, features, frozen, train_store)
    head = build_head(recipe, frozen, start)
    if recipe.train.fitted_start and not start.start_from and checkpoints.newest() == 0:
        fit_first_weights(head, frozen, train_store, accelerator, recipe.seed)
    if accelerator.is_main_process:
        if hint := slow_format("train.precision", recipe.train.precision, accelerator.device):
            print(hint)
        describe(head, train_store)
        if not head.vocab.is_full:
            print(describe_vocabulary(head.vocab, frozen, heldout_store))
    finished = is_exported(recipe, checkpoints)
    decoding: HeldOutDecoding | None = None
    target: TrainableTarget | None = None
    if not finished:
        if recipe.train.eval_prompts and accelerator.is_main_process:
            decoding = start_decoding(recipe, head.taps, start)
        if recipe.joint.mode is not None:
            target = TrainableTarget.load(recipe, accelerator.device)
    inputs = TrainingInputs(frozen, train_store, heldout_store, decoding, target)
    train(recipe, head, inputs, accelerator, checkpoints)
    if accelerator.is_main_process:
        if not finished:
            export(recipe, inputs, build_head(recipe, frozen, start), checkpoints, machine(accelerator))
        with_target = "" if recipe.joint.mode is None else f" target.path={recipe.tuned_target_dir}"
        state = "head was already complete in" if finished else "head written to"
        if start.start_from and (measured := before_and_after(recipe)) is not None:
            print(measured)
        print(f"{state} {recipe.head_dir}; next: headstart report RECIPE{with_target}")


def open_checkpoints(
    recipe: Recipe, accelerator: Accelerator, features: Stage, frozen: FrozenTarget, store: SampleStore
) -> tuple[Checkpoints, RunStart]:
    """The run's checkpoints, and what its head is built from; says which changes of the recipe it goes on with."""
    folder, inputs = recipe.checkpoints_dir, checkpoint_inputs(recipe, features)
    checkpoints = Checkpoints(folder, inputs, recipe.train.keep_checkpoints)
    step, before = checkpoints.newest(), checkpoints.newest_inputs()
    start = None if before is None else RunStart.read(folder)
    if before is not None:
        changed = changes(start, before, checkpoints.inputs, step, features, store)
        checkpoints.accept(changed)
        if accelerator.is_main_process:
            print(*describe_changes(changed, before, step, start, len(store)), sep="\n", end="\n" if changed else "")
    source = None
    if start is None:
        source = None if recipe.train.start_from is None else load_start(recipe, frozen)
        start = start_of_run(recipe, features, frozen, store, source)
    accelerator.wait_for_everyone()  # all ranks have read what the main rank may now write
    if accelerator.is_main_process and before is None:
        if source is not None:
            keep_start(source, folder)
        start.save(folder)
    accelerator.wait_for_everyone()  # all ranks build the head from what the main rank has written
    return checkpoints, start


def start_of_run(
    recipe: Recipe, features: Stage, frozen: FrozenTarget, store: SampleStore, source: DraftHead | None = None
) -> RunStart:
    """What a new head is built from: the recipe, the samples of today, and a trained head if it starts from one."""
    config = frozen.config
    vocab = draft_vocab(recipe.head, store.token_counts(config.vocab_size)) if source is None else source.vocab
    sizes = None
    scaled = isinstance(recipe.head, BlockSection) or (isinstance(recipe.head, Eagle3Section) and not recipe.head.norms)
    if scaled:
        sizes = store.tap_sizes(head_taps(recipe.head, config), config.num_layers)
    ids = None if vocab.is_full else vocab.ids.tolist()
    return RunStart(features.inputs, len(store), ids, sizes, source is not None)


def build_head(recipe: Recipe, frozen: FrozenTarget, start: RunStart) -> DraftHead:
    """The head before its first step, in float32 and on the device of `frozen`."""
    size = frozen.config.vocab_size
    vocab = DraftVocab.full(size) if start.vocab is None else DraftVocab(torch.tensor(start.vocab), size)
    head = new_head(recipe.head, frozen, vocab, recipe.seed).to(frozen.embedding.device)
    source = None
    if start.start_from:
        source = load_head_for(recipe.checkpoints_dir / START, frozen)
        head = head if head.shape == source.shape else deepcopy(source).requires_grad_(True)
    if start.tap_sizes is not None:
        assert isinstance(head, Eagle3Head | BlockHead)
        head.scale_taps(start.tap_sizes)
    if source is not None:
        head.take_weights(source)
    return head


def describe(head: DraftHead, store: SampleStore) -> None:
    """Print the sizes of the head, its draft vocabulary and the training data."""
    vocab, parameters = head.vocab, sum(parameter.numel() for parameter in head.parameters())
    coverage = vocab.coverage(store.token_counts(vocab.target_size))
    print(
        f"{head.kind} head of {parameters:,} parameters on taps {list(head.taps)}; draft vocabulary {len(vocab.ids)} "
        f"of {vocab.target_size} covers {coverage:.2%} of what the target wrote; {len(store)} samples, "
        f"{store.num_tokens:,} tokens"
    )


def is_exported(recipe: Recipe, checkpoints: Checkpoints) -> bool:
    """Whether the run is finished and has exported the weights that `train.export` names."""
    folders = [recipe.head_dir] if recipe.joint.mode is None else [recipe.head_dir, recipe.tuned_target_dir]
    return (
        all(is_whole(folder) for folder in folders)
        and checkpoints.newest() == recipe.train.steps
        and (checkpoints.exported() or {}).get("export") == recipe.train.export
    )


def is_whole(folder: Path) -> bool:
    """Whether config.json and the weights in a folder can be read; damaged ones are written again."""
    try:
        read_json(folder / "config.json")
        SafetensorsFolder(folder)
    except (OSError, ValueError):
        return False
    return True


def start_decoding(recipe: Recipe, taps: tuple[int, ...], start: RunStart) -> HeldOutDecoding:
    """Load the target, and build a second head in the target's number format to decode with."""
    target = TargetModel.load(recipe.target, taps)
    decoding_head = build_head(recipe, target.frozen, start).to(target.dtype)
    return HeldOutDecoding(recipe, target, decoding_head.eval().requires_grad_(False))


def machine(accelerator: Accelerator) -> str:
    """What the head is trained on, for its card."""
    name = processor_name(accelerator.device)
    return name if accelerator.num_processes == 1 else f"{accelerator.num_processes} x {name}"


def export(recipe: Recipe, inputs: TrainingInputs, head: DraftHead, checkpoints: Checkpoints, trained_on: str) -> None:
    """Write the newest or best weights as a calibrated head, and the target if it was trained too."""
    tuned = {} if inputs.target is None else export_target(recipe, inputs.target, checkpoints)
    step, weights = exported_weights(recipe, checkpoints)
    head.load_state_dict(weights)
    if inputs.decoding is not None:
        inputs.decoding.load_weights(weights, tuned)
        head.calibration = inputs.decoding.fit_calibration()
    tuned_folder = None if inputs.target is None else recipe.tuned_target_dir
    head.origin = TargetOrigin.of(tuned_folder or locate_target(recipe.target.path, recipe.target.revision))
    save_head(head, recipe.head_dir)
    checkpoints.note_export({"export": recipe.train.export, "step": step, "machine": trained_on})


def export_target(recipe: Recipe, target: TrainableTarget, checkpoints: Checkpoints) -> Tensors:
    """Write the tuned target of the newest checkpoint as a Hugging Face folder; returns its tuned weights."""
    newest = checkpoints.load()
    assert newest is not None
    target.restore(newest.target)
    target.save(recipe, recipe.tuned_target_dir)
    print(f"tuned target written to {recipe.tuned_target_dir}")
    return target.weights()


def exported_weights(recipe: Recipe, checkpoints: Checkpoints) -> tuple[int, Tensors]:
    """The head's weights that `train.export` names, and the step they come from."""
    if recipe.train.export == "best":
        best = checkpoints.best()
        if best is None:
            raise ValueError(
                f"train.export: best given, only newest is allowed because {checkpoints.folder} holds no measured "
                "weights; choose newest"
            )
        print(f"exporting the weights of step {best.step}: acceptance length {best.score:.2f}, the longest measured")
        return best.step, checkpoints.load_best(best)
    newest = checkpoints.load()
    assert newest is not None
    return newest.step, newest.exported

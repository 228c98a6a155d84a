"""A whole training run: recipe -> prompts -> responses -> features -> head, for every kind of head."""

import torch
from accelerate import Accelerator

from data_pipelines.harvest import harvest
from data_pipelines.sample_stores import SampleStore, open_stores
from data_pipelines.shards import stored_taps
from data_pipelines.stage import Json, Stage
from heads.base import DraftHead
from heads.checkpoint import draft_vocab, head_taps, new_head, save_head
from heads.eagle3 import Eagle3Head
from heads.frozen import FrozenTarget
from heads.target_config import locate_target
from heads.vocab import DraftVocab
from inference.target.model import TargetModel
from recipes import Recipe
from trainers.checkpoint import Checkpoints, Tensors
from trainers.dry_run import print_plan, refuse_sizes
from trainers.evaluation import Decoding
from trainers.loop import train
from trainers.medusa2 import LiveTarget
from trainers.precision import refuse_contradiction
from trainers.ranks.launch import refuse_many_for_joint, start_accelerator
from trainers.run_state import Materials

# Fields of the train section that change nothing about the weights, so that a run may resume with others. Pieces of a
# batch add up in another order, as ranks do.
ONLY_WATCHING = {
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


def run(recipe: Recipe) -> None:
    """Run the stages that are missing and train the head; killed at any moment, the same command goes on.

    Raises ValueError for what a user got wrong, as early as it can be known.
    """
    refuse_contradiction(recipe.train)
    accelerator = start_accelerator(recipe.train)
    if recipe.joint.mode is not None:
        refuse_many_for_joint(accelerator)
    if recipe.train.dry_run:
        if accelerator.is_main_process:
            print_plan(recipe, accelerator.num_processes, accelerator.device)
        return
    refuse_lone_decoding(recipe, accelerator.num_processes)
    refuse_sizes(recipe, accelerator.num_processes, recipe.data.num_prompts)
    features = harvest(recipe)
    target_folder = locate_target(recipe.target.path, recipe.target.revision)
    frozen = FrozenTarget.from_folder(target_folder, dtype=torch.float32, device=accelerator.device)
    taps = stored_taps(head_taps(recipe.head, frozen.config), frozen.config.num_layers)
    with open_stores(recipe, features, taps) as stores:
        train_on(recipe, accelerator, features, frozen, stores)


def train_on(
    recipe: Recipe,
    accelerator: Accelerator,
    features: Stage,
    frozen: FrozenTarget,
    stores: tuple[SampleStore, SampleStore],
) -> None:
    """Train the head on what was harvested and write it, unless that is done."""
    refuse_sizes(recipe, accelerator.num_processes, len(stores[0]), len(stores[1]))

    vocab = draft_vocab(recipe.head, stores[0].token_counts(frozen.config.vocab_size))
    head = build_head(recipe, frozen, vocab, stores[0])
    checkpoints = Checkpoints(recipe.checkpoints_dir, run_inputs(recipe, features), recipe.train.keep_checkpoints)
    if accelerator.is_main_process:
        describe(head, stores[0])
    complete = is_exported(recipe, checkpoints)
    decodes = recipe.train.eval_prompts and accelerator.is_main_process and not complete
    decoding = start_decoding(recipe, head, stores[0]) if decodes else None
    live = LiveTarget.load(recipe, accelerator.device) if recipe.joint.mode and not complete else None
    train(recipe, head, Materials(frozen, stores[0], stores[1], decoding, live), accelerator, checkpoints)
    if accelerator.is_main_process:
        if not complete:
            tuned = {} if live is None else export_target(recipe, live, checkpoints)
            export(recipe, build_head(recipe, frozen, vocab, stores[0]), checkpoints, decoding, tuned)
        with_target = "" if recipe.joint.mode is None else f" target.path={recipe.tuned_target_dir}"
        print(f"head written to {recipe.head_dir}; next: python -m inference.report RECIPE{with_target}")


def refuse_lone_decoding(recipe: Recipe, num_ranks: int) -> None:
    """Raises ValueError where the main rank is to decode with a target that all ranks hold together."""
    if recipe.target.spans_ranks and recipe.train.eval_prompts and num_ranks > 1:
        raise ValueError(
            f"train.eval_prompts: {recipe.train.eval_prompts} given, 0 is allowed while {num_ranks} ranks hold the "
            "target together (target.tp_plan or zero_stage), as the main one decodes alone; write 0, or train with "
            "one process and target.device_map auto"
        )


def build_head(recipe: Recipe, frozen: FrozenTarget, vocab: DraftVocab, store: SampleStore) -> DraftHead:
    """The head before its first step, where `frozen` is and trained in float32."""
    head = new_head(recipe.head, frozen, vocab, recipe.seed).to(frozen.embedding.device)
    if isinstance(head, Eagle3Head) and not head.shape.fc_norm:
        head.scale_taps(store.tap_sizes(head.taps, frozen.config.num_layers))
    return head


def start_decoding(recipe: Recipe, head: DraftHead, store: SampleStore) -> Decoding:
    """The target, and a second head for it in its own number format."""
    target = TargetModel.load(recipe.target, head.taps)
    beside = build_head(recipe, target.frozen, head.vocab, store).to(target.dtype)
    return Decoding(recipe, target, beside.eval().requires_grad_(False))


def describe(head: DraftHead, store: SampleStore) -> None:
    vocab, parameters = head.vocab, sum(parameter.numel() for parameter in head.parameters())
    coverage = vocab.coverage(store.token_counts(vocab.target_size))
    print(
        f"{head.kind} head of {parameters:,} parameters on taps {list(head.taps)}; draft vocabulary {len(vocab.ids)} "
        f"of {vocab.target_size} covers {coverage:.2%} of what the target wrote; {len(store)} samples, "
        f"{store.num_tokens:,} tokens"
    )


def run_inputs(recipe: Recipe, features: Stage) -> Json:
    """What a checkpoint must have been made from."""
    joint = {} if recipe.joint.mode is None else recipe.joint.model_dump()
    return {
        "features": features.digest(),
        "seed": recipe.seed,
        **{f"head.{field}": value for field, value in recipe.head.model_dump().items()},
        **{f"train.{field}": value for field, value in recipe.train.model_dump(exclude=ONLY_WATCHING).items()},
        **{f"joint.{field}": value for field, value in joint.items()},
    }


def is_exported(recipe: Recipe, checkpoints: Checkpoints) -> bool:
    """Whether the run is over and its head is of the weights that the recipe asks for."""
    folders = [recipe.head_dir] if recipe.joint.mode is None else [recipe.head_dir, recipe.tuned_target_dir]
    there = all((folder / "config.json").is_file() for folder in folders)
    return (
        there
        and checkpoints.newest() == recipe.train.steps
        and (checkpoints.exported() or {}).get("export") == recipe.train.export
    )


def export_target(recipe: Recipe, live: LiveTarget, checkpoints: Checkpoints) -> Tensors:
    """Write the tuned target of the newest checkpoint as a plain folder; returns the weights that were tuned."""
    newest = checkpoints.load()
    assert newest is not None
    live.restore(newest.target)
    live.save(recipe, recipe.tuned_target_dir)
    print(f"tuned target written to {recipe.tuned_target_dir}")
    return live.weights()


def export(
    recipe: Recipe, head: DraftHead, checkpoints: Checkpoints, decoding: Decoding | None, tuned: Tensors
) -> None:
    """Calibrate on the target with its tuned weights and write the newest weights or the best, from a checkpoint."""
    step, weights = exported_weights(recipe, checkpoints)
    head.load_state_dict(weights)
    if decoding is not None:
        decoding.take(weights, tuned)
        head.calibration = decoding.calibration()
    save_head(head, recipe.head_dir)
    checkpoints.note_export({"export": recipe.train.export, "step": step})


def exported_weights(recipe: Recipe, checkpoints: Checkpoints) -> tuple[int, Tensors]:
    """Which step's weights become the head, and these weights."""
    if recipe.train.export == "best":
        best = checkpoints.best()
        if best is None:
            raise ValueError(
                f"train.export: best in the recipe, but nothing was measured in {checkpoints.folder}; choose newest"
            )
        print(f"the best of the measured weights are those of step {best.step}: accepted length {best.score:.2f}")
        return best.step, checkpoints.load_best(best)
    newest = checkpoints.load()
    assert newest is not None
    return newest.step, newest.exported

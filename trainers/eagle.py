"""Train an EAGLE draft head; stages that are missing before it are run, those that are there are reused.

    accelerate launch trainers/eagle.py recipes/tiny.yaml
    accelerate launch trainers/eagle.py recipes/llama3_8b.yaml train.learning_rate=1e-4

Killed at any step, the same command continues from the newest checkpoint and ends in the same weights.
"""

import torch
from accelerate import Accelerator

from data_pipelines.harvest import harvest
from data_pipelines.shards import stored_taps
from data_pipelines.sources import open_stores
from heads.build import draft_vocab, head_taps, new_head, save_head
from heads.eagle3 import Eagle3Head
from heads.frozen import FrozenTarget
from heads.target_config import locate_target
from inference.target import TargetModel
from recipes import Recipe, run_command
from trainers.checkpoint import Checkpoints
from trainers.loop import Materials, train
from trainers.measure import calibrate

# Fields of the train section that change nothing about the weights, so that a run may resume with others.
ONLY_WATCHING = {
    "activation_checkpointing",
    "checkpoint_every",
    "keep_checkpoints",
    "eval_every",
    "eval_prompts",
    "log_every",
}


def main() -> None:
    run_command(__doc__, run)


def run(recipe: Recipe) -> None:
    """recipe -> prompts -> responses -> features -> head."""
    accelerator = Accelerator()
    if recipe.train.batch_size < accelerator.num_processes:
        raise ValueError(
            f"train.batch_size: {recipe.train.batch_size} sequences for {accelerator.num_processes} ranks; give each "
            "rank at least one"
        )
    features = harvest(recipe)
    target_folder = locate_target(recipe.target.path, recipe.target.revision)
    frozen = FrozenTarget.from_folder(target_folder, dtype=torch.float32, device=accelerator.device)
    taps = stored_taps(head_taps(recipe.head, frozen.config), frozen.config.num_layers)
    train_store, heldout_store = open_stores(recipe, features, taps)
    counts = train_store.token_counts(frozen.config.vocab_size)
    vocab = draft_vocab(recipe.head, counts)
    head = new_head(recipe.head, frozen, vocab, recipe.seed).to(accelerator.device)
    if isinstance(head, Eagle3Head) and not head.shape.fc_norm:
        head.scale_taps(train_store.tap_sizes(head.taps, frozen.config.num_layers))
    if accelerator.is_main_process:
        parameters = sum(parameter.numel() for parameter in head.parameters())
        print(
            f"{recipe.head.kind} head of {parameters:,} parameters on taps {list(head.taps)}; draft vocabulary "
            f"{len(vocab.ids)} of {vocab.target_size} covers {vocab.coverage(counts):.2%} of what the target wrote; "
            f"{len(train_store)} samples, {train_store.num_tokens:,} tokens"
        )

    inputs = {
        "features": features.digest(),
        "seed": recipe.seed,
        **{f"head.{field}": value for field, value in recipe.head.model_dump().items()},
        **{f"train.{field}": value for field, value in recipe.train.model_dump(exclude=ONLY_WATCHING).items()},
    }
    checkpoints = Checkpoints(recipe.checkpoints_dir, inputs, recipe.train.keep_checkpoints)
    complete = checkpoints.newest() == recipe.train.steps and (recipe.head_dir / "config.json").is_file()
    decodes = recipe.train.eval_prompts and accelerator.is_main_process and not complete
    target = TargetModel.load(recipe.target, head.taps) if decodes else None
    train(recipe, head, Materials(frozen, train_store, heldout_store, target), accelerator, checkpoints)
    if accelerator.is_main_process:
        if target is not None:
            head.calibration = calibrate(recipe, target, head)
        if not complete:
            save_head(head, recipe.head_dir)
        print(f"head written to {recipe.head_dir}; next: python -m inference.report RECIPE")


if __name__ == "__main__":
    main()

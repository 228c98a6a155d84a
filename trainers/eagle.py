"""Train an EAGLE draft head; stages that are missing before it are run, those that are there are reused.

    accelerate launch trainers/eagle.py recipes/tiny.yaml
    accelerate launch trainers/eagle.py recipes/llama3_8b.yaml train.learning_rate=1e-4

Killed at any step, the same command continues from the newest checkpoint and ends in the same weights.
"""

import torch
from accelerate import Accelerator

from data_pipelines.harvest import harvest
from data_pipelines.shards import FeatureStore
from heads.build import new_head, save_head
from heads.frozen import FrozenTarget
from heads.target_config import locate_target
from heads.vocab import DraftVocab
from inference.target import TargetModel
from recipes import Recipe, recipe_from_command_line
from trainers.checkpoint import Checkpoints
from trainers.loop import Materials, train


def main() -> None:
    recipe = recipe_from_command_line(__doc__ or "")
    try:
        run(recipe)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error


def run(recipe: Recipe) -> None:
    """recipe -> prompts -> responses -> features -> head."""
    accelerator = Accelerator()
    features = harvest(recipe)
    train_store, heldout_store = (FeatureStore(features.folder, split) for split in ("train", "heldout"))

    target_folder = locate_target(recipe.target.path, recipe.target.revision)
    frozen = FrozenTarget.from_folder(target_folder, dtype=torch.float32, device=accelerator.device)
    counts = train_store.token_counts(frozen.config.vocab_size)
    size = recipe.head.draft_vocab_size
    vocab = DraftVocab.full(frozen.config.vocab_size) if size is None else DraftVocab.most_frequent(counts, size)
    head = new_head(recipe.head, frozen, vocab, recipe.seed).to(accelerator.device)
    target = TargetModel.load(recipe.target, head.taps) if recipe.train.eval_prompts else None
    if accelerator.is_main_process:
        parameters = sum(parameter.numel() for parameter in head.parameters())
        print(
            f"{recipe.head.kind} head of {parameters:,} parameters on taps {list(head.taps)}; draft vocabulary "
            f"{len(vocab.ids)} of {vocab.target_size} covers {vocab.coverage(counts):.2%} of what the target wrote; "
            f"{len(train_store)} samples, {train_store.num_tokens:,} tokens"
        )

    inputs = {
        "features": features.digest(),
        "head": recipe.head.model_dump(),
        "train": recipe.train.model_dump(
            exclude={"checkpoint_every", "keep_checkpoints", "eval_every", "eval_prompts", "log_every"}
        ),
        "seed": recipe.seed,
    }
    checkpoints = Checkpoints(recipe.checkpoints_dir, inputs, recipe.train.keep_checkpoints)
    train(recipe, head, Materials(frozen, train_store, heldout_store, target), accelerator, checkpoints)
    if accelerator.is_main_process:
        save_head(head, recipe.head_dir)
        print(f"head written to {recipe.head_dir}; next: python -m inference.report RECIPE")


if __name__ == "__main__":
    main()

"""Warm starts: a run that begins from a trained head instead of a new one."""

from dataclasses import fields
from pathlib import Path

import torch

from headstart.common.files import read_growing_jsonl
from headstart.heads.base import DraftHead
from headstart.heads.checkpoint import KINDS, load_head_for, save_head
from headstart.heads.frozen import FrozenTarget
from headstart.recipes import Recipe
from headstart.trainers.memory_estimate import frozen_without_weights

START = "start_from"  # the folder of the starting head's copy, beside the checkpoints
# What a recipe cannot say about a head: the run goes on with what the head has.
OF_PUBLISHED_HEADS = {
    "rope",
    "norm_eps",
    "head_dim",
    "own_embedding",
    "own_lm_head",
    "fc_bias",
    "bias",
    "norm_before_fc",
    "norm_before_residual",
    "markov_gate",
    "mask_token_id",
}


def load_start(recipe: Recipe, frozen: FrozenTarget) -> DraftHead:
    """The head that the run starts from; raises ValueError that names every difference from the recipe's head."""
    folder = recipe.train.start_from
    assert folder is not None
    try:
        head = load_head_for(folder, frozen)
    except ValueError as error:
        raise ValueError(
            f"train.start_from: {folder} given, a head of the recipe's target is allowed: {error}"
        ) from error
    wrong = differences(recipe, head, frozen)
    if wrong:
        raise ValueError(
            f"train.start_from: {folder} given, whose head differs from the recipe's: {'; '.join(wrong)}; write its "
            f"values into the recipe's head section, or start from another head"
        )
    return head


def differences(recipe: Recipe, head: DraftHead, frozen: FrozenTarget) -> list[str]:
    """What the recipe says differently about a head, one text for each field."""
    section = recipe.head
    if head.kind != section.kind:
        return [f"head.kind: {section.kind} in the recipe, {head.kind} in the folder"]
    with torch.device("meta"):
        wanted = KINDS[section.kind].from_section(section, frozen_without_weights(frozen.config), head.vocab).shape
    wrong = [
        f"{field.name}: {getattr(wanted, field.name)} in the recipe, {getattr(head.shape, field.name)} in the folder"
        for field in fields(wanted)  # type: ignore[arg-type]
        if field.name not in OF_PUBLISHED_HEADS and getattr(wanted, field.name) != getattr(head.shape, field.name)
    ]
    size = section.model_dump().get("draft_vocab_size")
    drafted = None if head.vocab.is_full else len(head.vocab.ids)
    if size != drafted and size != len(head.vocab.ids):
        wrong.append(f"draft_vocab_size: {size} in the recipe, {drafted} in the folder")
    return wrong


def keep_start(head: DraftHead, checkpoints: Path) -> None:
    """Copy the starting head to the checkpoints, which need its shape when the run is resumed."""
    save_head(head, checkpoints / START)


def before_and_after(recipe: Recipe) -> str | None:
    """The acceptance lengths before and after a warm start, on the same prompts; None if they were not measured."""
    rows = [row for row in read_growing_jsonl(recipe.metrics_path) if "heldout/tau" in row]
    if not rows or rows[0]["step"] != 0:
        return None
    lengths = [
        f"{rows[0][name]:.2f} before and {rows[-1][name]:.2f} after at temperature {temperature}"
        for name, temperature in (("heldout/tau", 0), ("heldout/tau_t1", 1))
    ]
    return f"acceptance length on the held-out prompts: {', '.join(lengths)}"

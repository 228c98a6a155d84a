"""The head before its first step: new, fitted to the first samples, or a trained one that a run starts from."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

from headstart.common.errors import named_errors
from headstart.data_pipelines.features.batches import Sample, SampleStore, tapped
from headstart.data_pipelines.stages.stage import Stage
from headstart.heads.base import DraftHead
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import KINDS, draft_vocab, head_taps, load_head_for, new_head
from headstart.heads.kinds.linear_start import LeastSquares
from headstart.heads.target_config import TargetConfig
from headstart.heads.vocab import DraftVocab
from headstart.recipes import Recipe
from headstart.trainers.run_checkpoints import RunStart

START = "start_from"  # the folder of the starting head's copy, beside the checkpoints
FIT_TOKENS = 2**16  # enough to fit three taps of a small target
JUDGED_TOKENS = 4096  # held-out positions that the draft vocabulary is judged by
CHUNK = 64  # positions whose probabilities are in memory at once
# Fields of a head's shape that no recipe has: the run keeps those of the starting head.
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
    "mask_token_id",
}


def start_of_run(
    recipe: Recipe, features: Stage, frozen: FrozenTarget, store: SampleStore, source: DraftHead | None = None
) -> RunStart:
    """The facts that a new head is built from: the recipe, the samples of today, and a trained head to start from."""
    config = frozen.config
    vocab = draft_vocab(recipe.head, store.token_counts(config.vocab_size)) if source is None else source.vocab
    sizes = None
    if KINDS[recipe.head.kind].scales_taps(recipe.head):
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
        head.scale_taps(start.tap_sizes)
    if source is not None:
        head.take_weights(source)
    return head


def head_without_weights(recipe: Recipe, target: TargetConfig, vocab: DraftVocab | None = None) -> DraftHead:
    """The recipe's head with shapes but no weights, on the meta device; `vocab` is by default one of the right size."""
    vocab = vocab or draft_vocab(recipe.head, torch.zeros(target.vocab_size, dtype=torch.long))
    with torch.device("meta"):
        embedding, lm_head = (torch.empty(target.vocab_size, target.hidden_size) for _ in range(2))
        frozen = FrozenTarget(target, embedding, torch.empty(target.hidden_size), None, lm_head)
        return KINDS[recipe.head.kind].from_section(recipe.head, frozen, vocab)


def load_start(recipe: Recipe, frozen: FrozenTarget) -> DraftHead:
    """The head that the run starts from; raises ValueError that names every difference from the recipe's head."""
    folder = recipe.train.start_from
    assert folder is not None
    with named_errors(f"train.start_from: {folder} given, a head of the recipe's target is allowed"):
        head = load_head_for(folder, frozen)
    wrong = differences_from(recipe, head, frozen)
    if wrong:
        found = f"train.start_from: {folder} given, whose head differs from the recipe's: {'; '.join(wrong)}"
        raise ValueError(f"{found}; write its values into the recipe's head section, or start from another head")
    return head


def differences_from(recipe: Recipe, head: DraftHead, frozen: FrozenTarget) -> list[str]:
    """The fields in which the recipe's head differs from a trained one, one text each."""
    section = recipe.head
    if head.kind != section.kind:
        return [f"head.kind: {section.kind} in the recipe, {head.kind} in the folder"]
    wanted = head_without_weights(recipe, frozen.config, head.vocab).shape
    wrong = [
        f"{field.name}: {getattr(wanted, field.name)} in the recipe, {getattr(head.shape, field.name)} in the folder"
        for field in fields(wanted)
        if field.name not in OF_PUBLISHED_HEADS and getattr(wanted, field.name) != getattr(head.shape, field.name)
    ]
    size = section.model_dump().get("draft_vocab_size")
    drafted = None if head.vocab.is_full else len(head.vocab.ids)
    if size != drafted and size != len(head.vocab.ids):
        wrong.append(f"draft_vocab_size: {size} in the recipe, {drafted} in the folder")
    return wrong


def fit_first_weights(head: Any, frozen: FrozenTarget, store: SampleStore, accelerator: Accelerator, seed: int) -> None:
    """Let a new head start as the linear map, fitted to the first samples, that predicts the next state.

    Heads that cannot start so stay as they were initialised. All ranks must call this; the main rank fits.
    """
    if not head.starts_linear:
        return
    if accelerator.is_main_process:
        fit = LeastSquares()
        for number in range(len(store)):
            if fit.count >= FIT_TOKENS:
                break
            add_sample(fit, head, frozen, store[number])
        if fit.count:
            head.start_with_fit(fit, torch.Generator().manual_seed(seed))
    for parameter in head.parameters():
        parameter.data.copy_(broadcast(parameter.data))


@torch.no_grad()
def add_sample(fit: LeastSquares, head: Any, frozen: FrozenTarget, sample: Sample) -> None:
    """Add the inputs and outputs of the head's first level: the taps at a position and the next token, and the target's
    normed state at the next position.

    Only positions after which the target wrote a token count, as in training. Those that are not finite are left out,
    because training itself names the sample.
    """
    device, written = frozen.embedding.device, sample.loss_mask[2:]
    states = tapped(sample.taps, sample.last_hidden, head.taps, head.target.num_layers)[:-2]
    inputs = head.linear_inputs(states[written].to(frozen.embedding), sample.tokens[1:-1][written].to(device))
    outputs = frozen.norm(sample.last_hidden[1:-1][written].to(frozen.embedding))
    finite = inputs.isfinite().all(-1) & outputs.isfinite().all(-1)
    fit.add(inputs[finite], outputs[finite])


def describe(head: DraftHead, frozen: FrozenTarget, train: SampleStore, heldout: SampleStore) -> Iterator[str]:
    """The sizes of the head, its draft vocabulary and the training data, and what a draft vocabulary costs."""
    vocab, parameters = head.vocab, sum(parameter.numel() for parameter in head.parameters())
    coverage = vocab.coverage(train.token_counts(vocab.target_size))
    yield (
        f"{head.kind} head of {parameters:,} parameters on taps {list(head.taps)}; draft vocabulary {len(vocab.ids)} "
        f"of {vocab.target_size} covers {coverage:.2%} of what the target wrote; {len(train)} samples, "
        f"{train.num_tokens:,} tokens"
    )
    if not vocab.is_full:
        yield describe_vocabulary(vocab, frozen, heldout)


@torch.no_grad()
def describe_vocabulary(vocab: DraftVocab, frozen: FrozenTarget, store: SampleStore) -> str:
    """The share of the target's probability outside the draft vocabulary, which no training can bring back."""
    outside, missed, count = 0.0, 0, 0
    inside = vocab.members().to(frozen.embedding.device)
    for number in range(len(store)):
        sample = store[number]
        before_written = sample.loss_mask[1:].nonzero().flatten()[: JUDGED_TOKENS - count]
        for chunk in sample.last_hidden[before_written].to(frozen.embedding).split(CHUNK):
            p = frozen.logits(chunk).softmax(-1)  # [chunk, vocab]
            outside += float(p[:, ~inside].sum())
            missed += int((~inside[p.argmax(-1)]).sum())
            count += len(chunk)
        if count >= JUDGED_TOKENS:
            break
    shares = [f"{part / max(count, 1):.2%}" for part in (outside, missed)]
    return (
        f"outside the draft vocabulary the target has {shares[0]} of its probability, and {shares[1]} of its first "
        f"choices ({count:,} held-out positions); no such token can be accepted"
    )

"""The head before its first step: new, fitted to the first samples, or a trained one that a run starts from."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from jaxtyping import Float
from torch import Tensor

from headstart.common.errors import named_errors
from headstart.data_pipelines.features.batches import Sample, SampleStore, tapped
from headstart.data_pipelines.stages.stage import Stage
from headstart.heads.base import DraftHead
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.block import BlockHead
from headstart.heads.kinds.checkpoint import KINDS, draft_vocab, head_taps, load_head_for, new_head
from headstart.heads.kinds.eagle3 import Eagle3Head
from headstart.heads.target_config import TargetConfig
from headstart.heads.vocab import DraftVocab
from headstart.recipes import Recipe
from headstart.recipes.schema import BlockSection, Eagle3Section
from headstart.trainers.run_checkpoints import RunStart

START = "start_from"  # the folder of the starting head's copy, beside the checkpoints
FIT_TOKENS = 2**16  # enough to fit three taps of a small target
RIDGE = 0.01  # added to the mean square of every input, which is about 1
# Size of the queries and keys that a fitted start attends with: a token's score with itself is this squared times the
# root of head_dim, 11.5 for 64, while those with other tokens are about 1.4.
OWN_POSITION = 1.2
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


class LeastSquares:
    """Ridge regression from sums over batches, so that only one batch is in memory."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        self.count = 0
        self.products = torch.zeros(num_inputs, num_inputs, dtype=torch.float64)  # sum of input x input
        self.targets = torch.zeros(num_inputs, num_outputs, dtype=torch.float64)  # sum of input x output

    def add(self, inputs: Float[Tensor, "count inputs"], outputs: Float[Tensor, "count outputs"]) -> None:
        inputs, outputs = inputs.float(), outputs.float()
        self.count += len(inputs)
        self.products += (inputs.T @ inputs).cpu()
        self.targets += (inputs.T @ outputs).cpu()

    def solve(self) -> Float[Tensor, "inputs outputs"]:
        """The weight of the map, float64."""
        ridge = RIDGE * self.count * torch.eye(len(self.products), dtype=torch.float64)
        return torch.linalg.solve(self.products + ridge, self.targets)

    def size(self, weight: Float[Tensor, "inputs outputs"]) -> float:
        """The root mean square of what a map predicts."""
        squares = ((self.products @ weight) * weight).sum() / (self.count * weight.shape[1])
        return float(squares.sqrt())

    def principal_outputs(self, weight: Float[Tensor, "some outputs"], first: int, rank: int) -> Tensor:
        """The directions in which the inputs from number `first` on move the outputs most. [outputs, rank]"""
        moments = weight.T @ self.products[first:, first:] @ weight
        return torch.linalg.eigh(moments).eigenvectors[:, -rank:]


def start_of_run(
    recipe: Recipe, features: Stage, frozen: FrozenTarget, store: SampleStore, source: DraftHead | None = None
) -> RunStart:
    """The facts that a new head is built from: the recipe, the samples of today, and a trained head to start from."""
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


def fit_first_weights(
    head: DraftHead, frozen: FrozenTarget, store: SampleStore, accelerator: Accelerator, seed: int
) -> None:
    """Let a new EAGLE-3 head start as the linear map, fitted to the first samples, that predicts the next state.

    Heads of other kinds, and those of another width than the target's, stay as they were initialised. All ranks must
    call this; the main rank fits.
    """
    if not isinstance(head, Eagle3Head) or head.shape.own_embedding:
        return
    if accelerator.is_main_process:
        hidden = head.shape.hidden_size
        fit = LeastSquares(head.fc.in_features + hidden, hidden)
        for number in range(len(store)):
            if fit.count >= FIT_TOKENS:
                break
            add_sample(fit, head, frozen, store[number])
        if fit.count:
            start_with_fit(head, fit, torch.Generator().manual_seed(seed))
    for parameter in head.parameters():
        parameter.data.copy_(broadcast(parameter.data))


@torch.no_grad()
def add_sample(fit: LeastSquares, head: Eagle3Head, frozen: FrozenTarget, sample: Sample) -> None:
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


@torch.no_grad()
def start_with_fit(head: Eagle3Head, fit: LeastSquares, generator: torch.Generator) -> None:
    """Start a head as the linear map that predicts the target's next normed state from the taps and the next token.

    `fc` takes the share of the taps. The share of the token, at the rank that the key heads allow, goes through one
    query head per key head, whose queries and keys are the same projection of the token, so that they attend to their
    own position. The norm's weight is uniform, so the feedback to the next level keeps the direction of the prediction.

    A random head under the target's own norm and lm_head is confidently wrong: its loss is far above that of the
    uniform distribution, and training first unlearns it.
    """
    shape, attention = head.shape, head.midlayer.self_attn
    hidden, head_dim = shape.hidden_size, shape.head_dim
    weight, num_taps = fit.solve(), head.fc.in_features
    rank = min(shape.num_kv_heads * head_dim, hidden)
    basis = fit.principal_outputs(weight[num_taps:], num_taps, rank)  # [hidden, rank]
    low_rank = torch.cat([weight[:num_taps], weight[num_taps:] @ basis @ basis.T])
    size = fit.size(low_rank)
    head.fc.weight.copy_(weight[:num_taps].T / size)
    head.norm.weight.fill_(size)
    values = (weight[num_taps:] @ basis).T / size  # [rank, hidden]
    attention.v_proj.weight[:, hidden:] = 0
    attention.v_proj.weight[:rank, :hidden] = values.to(head.fc.weight)
    group = shape.num_heads // shape.num_kv_heads
    for key_head in range(shape.num_kv_heads):
        keys = slice(key_head * head_dim, (key_head + 1) * head_dim)
        queries = slice(key_head * group * head_dim, (key_head * group + 1) * head_dim)
        projection = torch.randn(head_dim, hidden, generator=generator) * OWN_POSITION * hidden**-0.5
        for matrix, rows in ((attention.q_proj.weight, queries), (attention.k_proj.weight, keys)):
            matrix[rows] = 0
            matrix[rows, :hidden] = projection.to(matrix)
        part = basis[:, keys]  # narrower, or empty, beyond the rank
        start = queries.start
        attention.o_proj.weight[:, start : start + part.shape[1]] = part.to(head.fc.weight)


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

"""The weights of a new head that depend on data: a start that already predicts the target's next state linearly."""

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from jaxtyping import Float
from torch import Tensor

from headstart.data_pipelines.features.batches import Sample, SampleStore, tapped
from headstart.heads.base import DraftHead
from headstart.heads.eagle3 import Eagle3Head
from headstart.heads.frozen import FrozenTarget

FIT_TOKENS = 2**16  # enough to fit three taps of a small target
RIDGE = 0.01  # added to the mean square of every input, which is about 1
# Size of the queries and keys that a fitted start attends with: a token's score with itself is this squared times the
# root of head_dim, 11.5 for 64, while those with other tokens are about 1.4.
OWN_POSITION = 1.2


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


def fit_first_weights(
    head: DraftHead, frozen: FrozenTarget, store: SampleStore, accelerator: Accelerator, seed: int
) -> None:
    """Fit what a new EAGLE-3 head starts from, on the first samples; other heads start as they were initialised.

    A head of another width than its target's has no state of the target to predict, so it stays as it is, too. All
    ranks must call this; the main rank fits.
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
    """Add what the head's first level sees and predicts: the taps at a position and the next token, and the target's
    normed state at the next position.

    Only positions after which the target wrote a token count, as in training. What is not finite is left out, because
    training itself names the sample.
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

"""The weights of a new head that depend on data: a start that already predicts the target's next state linearly."""

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

from headstart.data_pipelines.features.batches import Sample, SampleStore, tapped
from headstart.heads.base import DraftHead
from headstart.heads.eagle3 import Eagle3Head
from headstart.heads.frozen import FrozenTarget
from headstart.trainers.first_weights import LeastSquares

FIT_TOKENS = 2**16  # enough to fit three taps of a small target


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
            head.start_with_fit(fit, torch.Generator().manual_seed(seed))
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

"""The weights of a new head that depend on data: features that already predict the target's next hidden state."""

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

from headstart.data_pipelines.batches import Sample, tapped
from headstart.data_pipelines.sample_stores import SampleStore
from headstart.heads.base import DraftHead
from headstart.heads.eagle3 import Eagle3Head
from headstart.heads.least_squares import LeastSquares

FIT_TOKENS = 2**16  # enough to fit three taps of a small target


def fit_first_weights(head: DraftHead, store: SampleStore, accelerator: Accelerator) -> None:
    """Fit what a new EAGLE-3 head starts from, on the first samples; other heads start as they were initialised.

    A head of another width than its target's has no hidden state of the target to predict, so it stays as it is, too.
    All ranks must call this; the main rank fits.
    """
    if not isinstance(head, Eagle3Head) or head.shape.own_embedding:
        return
    if accelerator.is_main_process:
        fit = LeastSquares(head.fc.in_features, head.fc.out_features)
        for number in range(len(store)):
            if fit.count >= FIT_TOKENS:
                break
            add_sample(fit, head, store[number], accelerator.device)
        if fit.count:
            head.start_with_fit(fit)
    for weight in (head.fc.weight, head.norm.weight):
        weight.data.copy_(broadcast(weight.data))


@torch.no_grad()
def add_sample(fit: LeastSquares, head: Eagle3Head, sample: Sample, device: torch.device) -> None:
    """Add what the head's first level sees and predicts: the taps at a position, and the last hidden state at the next.

    Only positions after which the target wrote a token count, as in training.
    """
    states = tapped(sample.taps, sample.last_hidden, head.taps, head.target.num_layers)[:-2]
    written = sample.loss_mask[2:]
    inputs = head.scaled(states[written].to(device, torch.float32))
    fit.add(inputs, sample.last_hidden[1:-1][written].to(device))

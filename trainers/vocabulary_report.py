"""What a draft vocabulary costs, said before training: the probability that the target gives to other tokens."""

import torch

from headstart.data_pipelines.features.batches import SampleStore
from headstart.heads.frozen import FrozenTarget
from headstart.heads.vocab import DraftVocab

TOKENS = 4096  # held-out positions that the vocabulary is judged by
CHUNK = 64  # positions whose probabilities are in memory at once


@torch.no_grad()
def describe_vocabulary(vocab: DraftVocab, frozen: FrozenTarget, store: SampleStore) -> str:
    """How much of the target's probability the draft vocabulary leaves out, which no training can bring back."""
    outside, missed, count = 0.0, 0, 0
    inside = vocab.members().to(frozen.embedding.device)
    for number in range(len(store)):
        sample = store[number]
        before_written = sample.loss_mask[1:].nonzero().flatten()[: TOKENS - count]
        for chunk in sample.last_hidden[before_written].to(frozen.embedding).split(CHUNK):
            p = frozen.logits(chunk).softmax(-1)  # [chunk, vocab]
            outside += float(p[:, ~inside].sum())
            missed += int((~inside[p.argmax(-1)]).sum())
            count += len(chunk)
        if count >= TOKENS:
            break
    shares = [f"{part / max(count, 1):.2%}" for part in (outside, missed)]
    return (
        f"outside the draft vocabulary the target has {shares[0]} of its probability, and {shares[1]} of its first "
        f"choices ({count:,} held-out positions); no such token can be accepted"
    )

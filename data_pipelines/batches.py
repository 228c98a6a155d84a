"""From stored samples to training batches, in an order that is a function of (seed, step) alone."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data_pipelines.shards import Sample


@dataclass(frozen=True)
class Batch:
    """Samples padded on the right; padding is outside every loss mask."""

    tokens: Int[Tensor, "batch seq"]
    loss_mask: Bool[Tensor, "batch seq"]
    taps: Float[Tensor, "batch seq tapped"]
    last_hidden: Float[Tensor, "batch seq hidden"]

    @classmethod
    def collate(cls, samples: list[Sample], dtype: torch.dtype, device: torch.device | str = "cpu") -> "Batch":
        def padded(tensors: list[Tensor]) -> Tensor:
            return pad_sequence(tensors, batch_first=True).to(device)

        return cls(
            tokens=padded([sample.tokens for sample in samples]),
            loss_mask=padded([sample.loss_mask for sample in samples]),
            taps=padded([sample.taps for sample in samples]).to(dtype),
            last_hidden=padded([sample.last_hidden for sample in samples]).to(dtype),
        )


class SampleOrder:
    """An endless sequence of sample numbers, each epoch a fresh permutation; none is ever dropped or repeated early."""

    def __init__(self, num_samples: int, seed: int) -> None:
        if num_samples == 0:
            raise ValueError("the features hold no samples to train on; check data.num_prompts and harvest again")
        self.num_samples, self.seed = num_samples, seed
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.long)

    def __getitem__(self, place: int) -> int:
        epoch, offset = divmod(place, self.num_samples)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._permutation = epoch, torch.randperm(self.num_samples, generator=generator)
        return int(self._permutation[offset])

    def of_step(self, step: int, batch_size: int) -> list[int]:
        """The samples of a global batch; ranks share it out among themselves."""
        return [self[place] for place in range(step * batch_size, (step + 1) * batch_size)]

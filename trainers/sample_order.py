"""The order of training samples: a function of (seed, step) alone, so training can resume at any step."""

from functools import lru_cache

import torch


class SampleOrder:
    """An endless sequence of sample numbers; each epoch is a new permutation of all samples."""

    def __init__(self, shard_sizes: list[int], seed: int) -> None:
        if not sum(shard_sizes):
            raise ValueError("the features hold no samples to train on; check data.num_prompts and harvest again")
        self.shard_sizes, self.seed = shard_sizes, seed
        self.num_samples = sum(shard_sizes)
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def __getitem__(self, place: int) -> int:
        epoch, offset = divmod(place, self.num_samples)
        return self._epoch(epoch)[offset]

    def of_step(self, step: int, batch_size: int) -> list[int]:
        """The samples of a step's global batch, which the ranks divide."""
        return [self[place] for place in range(step * batch_size, (step + 1) * batch_size)]

    def _permutation(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        starts = torch.tensor([0, *self.shard_sizes]).cumsum(0).tolist()
        shards = torch.randperm(len(self.shard_sizes), generator=generator).tolist()
        numbers = [number for shard in shards for number in range(starts[shard], starts[shard + 1])]
        return [numbers[place] for place in torch.randperm(len(numbers), generator=generator).tolist()]

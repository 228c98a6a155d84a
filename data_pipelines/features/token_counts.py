"""Token counts saved next to a feature store, so that choosing a draft vocabulary needs no pass over the shards."""

import hashlib
import json
import shlex
from pathlib import Path

import torch
from torch import Tensor

from headstart.common.files import write_text
from headstart.data_pipelines.stages.stage import CHECKSUM, Json

COUNTS = "token_counts.json"


def shards_identity(shards: list[Json]) -> str:
    """A digest of the content of the listed shards."""
    return hashlib.sha256("".join(shard[CHECKSUM] for shard in shards).encode()).hexdigest()


def write_counts(folder: Path, counted: dict[str, Tensor]) -> None:
    """Save token counts [vocab], keyed by the identity of the shards that they cover."""
    kept = {
        identity: {str(token): int(counts[token]) for token in counts.nonzero().flatten().tolist()}
        for identity, counts in counted.items()
    }
    write_text(folder / COUNTS, json.dumps(kept))


def read_counts(folder: Path, shards: list[Json], vocab_size: int) -> Tensor | None:
    """The saved counts of exactly these shards, or None if there are none. [vocab]"""
    path = folder / COUNTS
    try:
        kept = json.loads(path.read_text()).get(shards_identity(shards)) if path.is_file() else None
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); the token counts of a harvest are needed. Remove it "
            f"({shlex.join(['rm', str(path)])}), and the tokens are counted in the shards"
        ) from error
    if kept is None:
        return None
    counts = torch.zeros(vocab_size, dtype=torch.long)
    counts[torch.tensor([int(token) for token in kept], dtype=torch.long)] = torch.tensor(list(kept.values()))
    return counts

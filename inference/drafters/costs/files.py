"""Step costs are kept with the target and on disk, and measured only where neither has them."""

import hashlib
import json
import os
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from headstart.common.files import write_text
from headstart.common.process import user_cache
from headstart.heads.base import DraftHead
from headstart.inference.drafters.costs.costs import CostSurface, CostTable, Observed
from headstart.inference.drafters.costs.measurement import is_captured, measure_costs
from headstart.inference.targets.loading import processor_name
from headstart.inference.targets.model import TargetModel

LAYOUT = 2  # of the files; another number makes them be measured anew
REMEMBERED = 2  # observed steps of each group that a file keeps: few, so that new ones outweigh them at once


@dataclass(frozen=True)
class CostFile:
    """What a file holds: what was measured, on what, and how observed steps differed."""

    key: dict[str, Any]
    surface: CostSurface
    observed: dict[str, list[float]]


class KnownTables(dict[str, CostTable]):
    """The cost tables of a target, by the digest of their key."""


def cost_table(target: TargetModel, head: DraftHead, width: int, nodes: int, batch: int = 1) -> CostTable:
    """The costs of a target with a head whose levels expand `width` nodes, for trees of up to `nodes` draft tokens.

    They are measured, which takes seconds, unless an earlier run of the same kind left them on disk. `batch` is the
    number of rows that will be decoded together, if that is known.
    """
    key = cost_key(target, head, width, nodes, batch)
    digest = digest_of(key)[:24]
    tables = target.kept(KnownTables)
    if digest not in tables:
        found: list[CostFile] = []

        def find() -> None:
            stored = read_costs(digest, key)
            if stored is None:
                stored = CostFile(key, measure_costs(target, head, width, nodes, batch), {})
                if stored.surface.complete:  # else the next run may find the machine less busy
                    write_costs(digest, stored)
            found.append(stored)

        target.ranks.carry_out(find, lambda run: run())  # some ranks may find a file that others lack
        stored = found[0]
        table = CostTable(stored.surface, width, is_captured(target), target.device.type == "cpu")
        table.observed = Observed(stored.observed)
        weakref.finalize(table, write_observed, digest, stored, table.observed)
        tables[digest] = table
    return tables[digest]


def cost_key(target: TargetModel, head: DraftHead, width: int, nodes: int, batch: int) -> dict[str, Any]:
    """Everything that the costs depend on. A head's weights are not part of it, only its shape."""
    config = {name: value for name, value in target.model.config.to_dict().items() if name != "_name_or_path"}
    return {
        "layout": LAYOUT,
        "processor": processor_name(target.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "target": digest_of(config),
        "dtype": str(target.dtype),
        "attention": target.model.config._attn_implementation,
        "packed_weights": target.is_packed,
        "compiled": target.compiles,
        "ranks": f"{type(target.ranks).__name__} {target.ranks.count}",
        "head": digest_of([head.kind, repr(head.shape), str(head.embedding.dtype), len(head.vocab.ids)]),
        "width": width,
        "nodes": nodes,
        "batch": batch,
    }


def digest_of(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def read_costs(digest: str, key: dict[str, Any]) -> CostFile | None:
    """What an earlier run of the same kind measured; None if there is nothing, or nothing that can be used."""
    with suppress(OSError, RuntimeError, ValueError):  # no home folder is a RuntimeError, a broken file a ValueError
        found = TypeAdapter(CostFile).validate_json(cost_path(digest).read_bytes())
        if found.key == key:
            return found
    return None


def write_costs(digest: str, content: CostFile) -> None:
    """Keep costs for later runs, if there is a place where they can be written."""
    with suppress(OSError, RuntimeError):
        path = cost_path(digest)
        own = path.with_suffix(f".{os.getpid()}")  # several ranks may write the same costs
        write_text(own, json.dumps(asdict(content), indent=1) + "\n")
        own.replace(path)


def write_observed(digest: str, stored: CostFile, observed: Observed) -> None:
    """Add what the steps of this run took to the file."""
    if observed.count and stored.surface.complete:
        newest = {name: list(values)[-REMEMBERED:] for name, values in observed.items()}
        write_costs(digest, CostFile(stored.key, stored.surface, newest))


def cost_path(digest: str) -> Path:
    return user_cache("costs") / f"{digest}.json"

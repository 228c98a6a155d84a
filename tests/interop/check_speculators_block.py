"""Do block heads compute what speculators' own models compute from the same files? Compares the logits of every block.

    make check-speculators
    python tests/interop/check_speculators_block.py path/to/speculators/bin/python

Exports block heads of random weights for the bundled target in speculators' layout and lets that library's own classes
run them on two packed documents. Exit code 1 if a logit differs by more than 1e-4.
"""

import shutil
import subprocess
import sys
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from served_heads import TARGET, WORK, Case, export_recipe
from torch import Tensor

from headstart.heads.formats.export import export
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.block import BlockHead
from headstart.heads.kinds.block_attention import Blocks
from headstart.heads.kinds.checkpoint import load_head_for, new_head, save_head
from headstart.heads.vocab import DraftVocab
from headstart.recipes.schema_heads import BlockSection

BAR = 1e-4
LENGTHS = (70, 50)  # tokens of the two documents
HEADS: dict[str, dict[str, Any]] = {
    "DFlash": {"markov_rank": 0, "block_size": 8},
    "DFlash, window of 16": {"markov_rank": 0, "window": 16},
    "DSpark": {"markov_rank": 32},
    "DSpark, causal window": {"markov_rank": 32, "window": 12, "causal": True},
    "DSpark, 600 draft tokens": {"markov_rank": 32, "draft_vocab_size": 600, "num_layers": 3},
}


def main() -> None:
    torch.set_num_threads(1)
    frozen = FrozenTarget.from_folder(TARGET, torch.float32)
    differences = {name: largest_difference(fields, frozen) for name, fields in HEADS.items()}
    for name, difference in differences.items():
        print(f"{name}: largest difference of a logit {difference:.1e}")
    sys.exit(0 if max(differences.values()) <= BAR else 1)


def largest_difference(fields: dict[str, Any], frozen: FrozenTarget) -> float:
    head = random_head(fields, frozen)
    source, inputs, out = WORK / "block", WORK / "block_inputs.safetensors", WORK / "block_logits.safetensors"
    shutil.rmtree(source, ignore_errors=True)
    save_head(head, source)
    folder = export(export_recipe(source, Case(lambda _: source, "speculators", None)))
    given = random_inputs(head)
    save_file(given, inputs)
    script = "tests/interop/block_logits_of_speculators.py"
    subprocess.run([sys.argv[1], script, str(folder), str(inputs), str(out)], check=True)
    loaded = load_head_for(source, frozen)
    assert isinstance(loaded, BlockHead)
    return float((logits(loaded, given) - load_file(out)["logits"]).abs().max())


def random_head(fields: dict[str, Any], frozen: FrozenTarget) -> BlockHead:
    section = BlockSection(kind="block", **fields)
    size = section.draft_vocab_size or frozen.config.vocab_size
    head = new_head(section, frozen, DraftVocab(torch.arange(size), frozen.config.vocab_size), seed=0)
    assert isinstance(head, BlockHead)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return head.eval().requires_grad_(False)


def random_inputs(head: BlockHead) -> dict[str, Tensor]:
    """One row of two documents, with a block at every third position."""
    generator, seq, hidden = torch.Generator().manual_seed(2), sum(LENGTHS), head.target.hidden_size
    anchors = [*range(3, LENGTHS[0] - 10, 3), *range(LENGTHS[0] + 3, seq - 10, 3)]
    return {
        "taps": torch.randn(1, seq, len(head.taps) * hidden, generator=generator),
        "last_hidden": torch.randn(1, seq, hidden, generator=generator),
        "tokens": torch.randint(head.target.vocab_size, (1, seq), generator=generator),
        "documents": torch.tensor([[0] * LENGTHS[0] + [1] * LENGTHS[1]]),
        "positions": torch.tensor([[*range(LENGTHS[0]), *range(LENGTHS[1])]]),
        "anchors": torch.tensor(anchors),
    }


def logits(head: BlockHead, given: dict[str, Tensor]) -> Tensor:
    """[blocks, levels, draft_vocab], computed here."""
    anchors = tuple(given["anchors"].tolist())
    starts = tuple(0 if anchor < LENGTHS[0] else LENGTHS[0] for anchor in anchors)
    features, tokens = head.project(given["taps"]), given["tokens"]
    states = head.blocks_of(features, given["positions"], tokens, Blocks((0,) * len(anchors), anchors, starts))
    before = tokens[0, given["anchors"].unsqueeze(1) + torch.arange(head.shape.levels)]
    return head.logits(states, before)


if __name__ == "__main__":
    main()

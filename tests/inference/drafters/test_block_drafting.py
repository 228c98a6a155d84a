"""Laws of drafting all levels in one pass: a block head's tree follows its conditional scores, text stays lossless."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafting import TEXT, Naive
from families import FAMILIES
from matrix import slow_unless
from torch.testing import assert_close

from headstart.heads.base import DraftHead
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.block import BlockHead
from headstart.heads.kinds.checkpoint import new_head
from headstart.heads.layers import rotary_table
from headstart.heads.vocab import DraftVocab
from headstart.inference.calibrate import score_text
from headstart.inference.core.drafter import NoDrafter
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.engine.loop import generate_batch
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema_heads import BlockSection, HeadSection, PEagleSection

MakeHead = Callable[..., BlockHead]


SIZES: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2}
IN_ONE_PASS: dict[str, HeadSection] = {
    "DSpark": BlockSection(kind="block", block_size=4, markov_rank=6, **SIZES),
    "DFlash": BlockSection(kind="block", block_size=4, markov_rank=0, **SIZES),
    "P-EAGLE": PEagleSection(kind="peagle", depths=4, num_layers=2, taps=(0, 1, 2), **SIZES),
}


def varied_head(frozen: FrozenTarget, kind: str) -> DraftHead:
    """A head for any target, with no weight at zero."""
    head = new_head(IN_ONE_PASS[kind], frozen, DraftVocab.full(frozen.config.vocab_size), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return head.eval().requires_grad_(False)


@pytest.mark.each_value
@pytest.mark.parametrize("name", slow_unless(("gemma3", "int8"), FAMILIES))
@pytest.mark.parametrize("kind", IN_ONE_PASS)
def test_decoding_is_lossless_for_every_family(name: str, kind: str) -> None:
    """At T = 0, 0.7 and 1, in one batch of rows of different lengths, the text is that of plain decoding."""
    target = TargetModel(FAMILIES[name](), ())
    head = varied_head(target.frozen, kind)
    target = TargetModel(target.model, head.taps)
    prompts = [[5, 6, 7, 11, 3], [40, 2], [9, 60, 33, 14, 50, 51, 52, 1]]
    samplings = [Sampling(), Sampling(0.7, seed=4), Sampling(1.0, seed=5)]
    requests = [Request(prompt, 12, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
    plain = generate_batch(target, requests, NoDrafter(), 4)
    drafted = generate_batch(target, requests, head_drafter(head, Dynamic(3, 12, 60)), 4)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    assert any(each.stats.acceptance_length > 1 for each in drafted)


def test_a_block_head_turns_by_the_yarn_of_its_target() -> None:
    target = TargetModel(FAMILIES["gpt_oss"](), ())
    head = varied_head(target.frozen, "DSpark")
    assert isinstance(head, BlockHead)
    assert head.target.rope.kind == "yarn"
    wanted = rotary_table(head.target.rope, head.shape.head_dim, len(head.rotary))
    assert torch.equal(head.rotary, wanted)


def test_calibration_scores_a_text_as_drafting_would(target: TargetModel, make_head: MakeHead) -> None:
    """Row t of depth k is about the token at t + 2 + k, after a chain of the true tokens before it."""
    head, prompt = make_head("block", markov_rank=6), 2
    text = torch.tensor([TEXT])
    levels = list(score_text(target, head, text, Request([0] * prompt, 1), 3))
    for depth, found in enumerate(levels):
        for row in range(len(found.columns)):
            prefix, path = TEXT[: row + 2], TEXT[row + 2 : row + 2 + depth]
            wanted = Naive(head, target, prefix, Sampling()).logits(tuple(path))[0, 0]
            assert_close(found.without_noise[row], wanted, atol=1e-4, rtol=1e-4)
            assert int(found.columns[row]) == TEXT[row + 2 + depth]

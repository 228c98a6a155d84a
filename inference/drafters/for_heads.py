"""The drafter for a head."""

from headstart.heads.base import DraftHead
from headstart.inference.drafters.block import BlockDrafter
from headstart.inference.drafters.growth import GrowthPolicy
from headstart.inference.drafters.head import HeadDrafter, TreeDrafter
from headstart.inference.drafters.masks import MaskDrafter
from headstart.inference.drafters.repeats import Repeats

DRAFTERS: dict[str, type[TreeDrafter]] = {
    "levels": HeadDrafter,
    "blocks": BlockDrafter,
    "mask entries": MaskDrafter,
}  # by DraftHead.drafted_by


def head_drafter(head: DraftHead, growth: GrowthPolicy, repeats: Repeats | None = None) -> TreeDrafter:
    """The drafter for a head of any kind; raises ValueError if the trees are wider or deeper than it can draft."""
    return DRAFTERS[head.drafted_by](head, growth, repeats)

"""The passes of a target: over texts, trees, chains after states that cannot be cut back, and parts side by side."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache

from headstart.heads.target_config import TargetConfig
from headstart.inference.core.cache import KVCache, Slots
from headstart.inference.core.cache_memory import Shape
from headstart.inference.core.side_by_side import CannotLieSideBySide, PackedCache, PackedMask, Part, unpacked
from headstart.inference.core.states import WINDOW, LayerStates, OwnCaches, after_windows
from headstart.inference.core.tree import PendingTokens, Tree, Window, block_mask, causal_block, filled_up, take
from headstart.inference.core.verify import count_drafted
from headstart.inference.targets.attention import GROUPED, with_row_groups
from headstart.inference.targets.cache_layout import CacheLayout

# Which drafts a target verifies. With a cache of its own, rows run one after the other; `plain` takes no drafts, as its
# passes over several tokens do not continue from its states.
Way = Literal["trees", "chains", "plain", "own cache", "own cache, plain"]
SAME = 0.03  # difference of logits, relative to them, that rounding to bfloat16 stays below
Masks = Tensor | dict[str, Any]  # additive, [rows, 1, seq, keys]; one for all layers, or one per layer type


@dataclass(frozen=True)
class TargetOutput:
    logits: Float[Tensor, "batch kept vocab"]
    taps: Float[Tensor, "batch seq tapped"]  # the tapped hidden states, concatenated in ascending order
    last_hidden: Float[Tensor, "batch seq hidden"]  # before the final norm

    def at(self, first: int, places: Int[Tensor, "batch nodes"]) -> "TargetOutput":
        """The output at these places of each row; logits begin at place `first`."""
        return TargetOutput(take(self.logits, places - first), take(self.taps, places), take(self.last_hidden, places))

    @classmethod
    def of_rows(cls, rows: "list[TargetOutput]") -> "TargetOutput":
        """The outputs of several rows as one, filled up on the right."""
        fields = zip(*map(fields_of, rows), strict=True)
        return cls(*(pad_sequence([part[0] for part in parts], batch_first=True) for parts in fields))


def fields_of(output: TargetOutput) -> tuple[Tensor, Tensor, Tensor]:
    return output.logits, output.taps, output.last_hidden


class Passes:
    """How a target runs. `TargetModel` sets the attributes when it is made."""

    model: Any  # a PreTrainedModel
    config: TargetConfig
    device: torch.device
    dtype: torch.dtype
    taps: tuple[int, ...]
    windows: dict[str, Window | None]  # of each type of attention; None: it sees everything before it
    unmasked: tuple[str, ...]  # types of layers that take no mask
    cache_name: str  # the argument of the model's forward that takes its cache
    selects_logits: bool  # whether the model can compute some logits alone
    layout: CacheLayout
    way: Way  # how it decodes
    _seen: dict[int, Tensor]  # hidden states that the hooks have left

    @property
    def grows_trees(self) -> bool:
        """Whether it verifies trees of draft tokens, and not only chains."""
        return self.way == "trees"

    @property
    def why_no_trees(self) -> str:
        """Why it verifies chains alone, in its own terms."""
        if self.way.startswith("own cache"):
            return "it decodes in a cache of its own making, which holds one text"
        if self.layout.has_states:
            return "it keeps states, which cannot be cut back to an earlier token"
        return "its pass over a tree computes other logits than its own forward"

    @property
    def drafts(self) -> bool:
        """Whether it verifies draft tokens at all."""
        return "plain" not in self.way

    def new_cache(
        self, capacity: int, head_shape: Shape | None = None, batch: int = 1, static: bool = False
    ) -> KVCache:
        """Slots for `capacity` tokens per row, a pending tree included, and what the target keeps besides slots."""
        layout = self.layout
        return KVCache.allocate(
            layout.shapes,
            head_shape,
            capacity,
            batch,
            self.dtype,
            self.device,
            static,
            layout.devices,
            layout.new_states(batch),
            None if layout.empty is None else layout.layers,
        )

    @torch.inference_mode()
    def forward(
        self,
        tokens: Int[Tensor, "batch seq"],
        positions: Int[Tensor, "batch seq"] | None = None,
        mask: Masks | None = None,
        cache: Cache | None = None,
        last_only: bool = False,
        logits_at: list[int] | None = None,
    ) -> TargetOutput:
        """One pass; causal if there is no mask. `last_only` computes logits for the last position alone, `logits_at`
        for these places in the sequence.

        With target.split layers, what it returns is on the first device, as its arguments are.
        """
        return self._run(tokens, positions, mask, cache, [tokens.shape[1] - 1] if last_only else logits_at)[0]

    def _run(
        self,
        tokens: Int[Tensor, "batch seq"],
        positions: Int[Tensor, "batch seq"] | None,
        mask: Masks | None,
        cache: Cache | None,
        logits_at: list[int] | None,
        use_cache: bool = False,
    ) -> tuple[TargetOutput, Cache | None]:
        """`forward`, and the cache that the model returns."""
        given: dict[str, Any] = {"attention_mask": mask, "position_ids": positions, self.cache_name: cache}
        # Places, as for a slice a CPU's matmul copies the whole lm_head first. A list: accelerate would move a tensor
        # to the first device, but the final norm is on the last.
        given["logits_to_keep"] = logits_at if self.selects_logits else None
        given = {name: value for name, value in given.items() if value is not None}
        output = self.model(input_ids=tokens, use_cache=use_cache or cache is not None, **given)
        taps, last_hidden = self._take_seen(tokens)
        tapped = torch.cat(taps, dim=-1) if taps else last_hidden[..., :0]
        logits = output.logits.to(self.device)
        if logits_at is not None and not self.selects_logits:
            logits = logits[:, logits_at]
        return TargetOutput(logits, tapped, last_hidden), output.get(self.cache_name)

    def _take_seen(self, tokens: Int[Tensor, "batch seq"]) -> tuple[list[Tensor], Tensor]:
        # With target.split layers they are on several devices.
        taps = (*self.taps, self.config.num_layers)
        if left := {*taps} - {*self._seen}:
            raise ValueError(
                f"head.taps: {min(left)} given, but a {self.config.model_type!r} model does not run layer {min(left)} "
                f"on text alone; the inputs of its other layers are allowed: choose one of them"
            )
        seen = {tap: one_stream(self._seen[tap], tokens).to(self.device) for tap in taps}
        self._seen.clear()
        return [seen[tap] for tap in self.taps], seen[self.config.num_layers]

    def forward_tree(self, tree: Tree, cache: KVCache) -> TargetOutput:
        """One pass over all nodes of each row's tree, after the verified tokens of that row.

        The trees of a target with states are chains.
        """
        if cache.states is not None:
            return self._forward_chains(tree, cache)
        block = PendingTokens(tree.ancestors, tree.depths)
        positions = cache.target.starts.unsqueeze(1) + tree.depths
        return self.forward(tree.tokens, positions, self.masks(cache.target, block), cache)

    def _forward_chains(self, tree: Tree, cache: KVCache) -> TargetOutput:
        """A pass over each row's window, its root and its chain."""
        states = cache.states
        assert states is not None
        drafted = [count_drafted(parents) for parents in tree.parents.tolist()]
        windows = [states.window(row) for row in range(len(drafted))]
        states.counts = [len(window) + 1 + count for window, count in zip(windows, drafted, strict=True)]
        if isinstance(states, OwnCaches):
            chains = [tree.tokens[row : row + 1, : 1 + count] for row, count in enumerate(drafted)]
            return TargetOutput.of_rows([self._own_pass(states, row, chain) for row, chain in enumerate(chains)])
        tokens, places = after_windows(windows, tree.tokens)
        states.width, least = tokens.shape[1], min(map(len, windows))
        is_sure = min(states.counts) == states.width and not any(drafted)
        output = self._forward_states(tokens, cache, [*range(least, states.width)], is_sure)
        return output.at(least, places)

    def _own_pass(self, states: OwnCaches, row: int, chain: Int[Tensor, "1 nodes"]) -> TargetOutput:
        """A pass over one row's window, its root and its chain, with the model's own cache."""
        window = states.window(row)
        tokens, places = after_windows([window], chain)
        given = states.load(row, is_sure=chain.shape[1] == 1)
        wanted = [*range(len(window), tokens.shape[1])]
        output, states.after[row] = self._run(tokens, None, None, given, wanted, use_cache=True)
        return output.at(len(window), places)

    def _forward_states(
        self, tokens: Int[Tensor, "rows count"], cache: KVCache, logits_at: list[int] | None, is_sure: bool
    ) -> TargetOutput:
        """A causal pass from each row's last good states on. The cache's lengths are afterwards as before."""
        states, slots = cache.states, cache.target
        assert isinstance(states, LayerStates)
        lengths = list(slots.lengths)
        slots.set_lengths([length - len(states.window(row)) for row, length in enumerate(lengths)])
        states.load(cache.layers, len(lengths) if max(lengths) else 0, is_sure)
        positions = mask = None
        if max(lengths):
            block = causal_block(tokens.shape[1], self.device)
            assert block.depths is not None
            positions, mask = slots.starts.unsqueeze(1) + block.depths, self.masks(slots, block)
        output = self.forward(tokens, positions, mask, cache, logits_at=logits_at)
        slots.set_lengths(lengths)
        return output

    def read_on(
        self, tokens: Int[Tensor, "1 count"], row: KVCache, before: int, logits_at: list[int] | None
    ) -> TargetOutput:
        """Read more of a text into a row that holds its first `before` tokens, and move the row's states to its end."""
        states = row.states
        assert states is not None
        if before and not self.drafts and tokens.shape[1] > 1:
            single = [self.read_on(token, row, before + place, None) for place, token in enumerate(tokens.split(1, 1))]
            logits, *others = (torch.cat(parts, dim=1) for parts in zip(*map(fields_of, single), strict=True))
            return TargetOutput(logits if logits_at is None else logits[:, logits_at], *others)
        if not before:
            states.write(0, None)
        if isinstance(states, OwnCaches):
            given = states.load(0, is_sure=True)
            output, states.after[0] = self._run(tokens, None, None, given, logits_at, use_cache=True)
        else:
            assert isinstance(states, LayerStates)
            row.set_lengths([before])
            output = self._forward_states(tokens, row, logits_at, is_sure=before > 0)
        states.commit([0])
        return output

    def make_ready(self, cache: KVCache, drafts: bool) -> bool:
        """Before a step, move states whose windows are full; returns whether the step may draft.

        Windows of one length are moved by a step without drafts, which costs no more than any other. Others are cut
        at powers of two, by passes in which rows with shorter windows take part for the shape alone.
        """
        states, rows = cache.states, len(cache.target.lengths)
        if states is None or not self.drafts:
            return drafts and self.drafts
        lengths = {len(states.window(row)) for row in range(rows)}
        longest = max(lengths, default=0)
        if isinstance(states, OwnCaches) or len(lengths) <= 1:
            return drafts and longest < WINDOW
        goal = WINDOW // 2 if drafts else 0
        if longest >= WINDOW or not drafts:
            while (longest := states.longest(rows)) > goal:
                self._move_states(cache, 1 << (longest.bit_length() - 1))
        return drafts

    def _move_states(self, cache: KVCache, count: int) -> None:
        """Move the states of the rows whose windows have this many tokens or more by as many."""
        states = cache.states
        assert states is not None
        windows = [states.window(row) for row in range(len(cache.target.lengths))]
        tokens = filled_up([window[:count] for window in windows]).to(self.device)
        self._forward_states(tokens, cache, [count - 1], is_sure=False)
        states.commit([row for row, window in enumerate(windows) if len(window) >= count])
        for window in windows:
            if len(window) >= count:
                del window[:count]

    def tree_part(self, tree: Tree, cache: KVCache) -> Part:
        """The input of `forward_tree`, as a part of a pass."""
        return Part(cache.target, tree.tokens, PendingTokens(tree.ancestors, tree.depths), last_only=False)

    def forward_parts(self, parts: list[Part]) -> list[TargetOutput]:
        """One pass over parts that lie side by side; returns what it computed for each. See `packs`."""
        cache, shapes = PackedCache(parts), [(part.tokens.shape[0], part.tokens.shape[1]) for part in parts]
        kept, first = list[int](), 0
        for part in parts:
            kept += [first + place for place in part.kept]
            first += part.tokens.numel()
        own = [self._masks_by_kind(part.slots, part.block) for part in parts]
        packed: dict[str, Tensor] = {
            kind: PackedMask.of(cache, tuple(masks[kind] for masks in own)) for kind in self.windows
        }
        output = self.forward(
            torch.cat([part.tokens.flatten() for part in parts]).unsqueeze(0),
            torch.cat([part.positions.flatten() for part in parts]).unsqueeze(0),
            one_or_all(packed),
            cache,
            logits_at=kept,
        )
        cache.check()
        counts = [(rows, 1 if part.last_only else count) for part, (rows, count) in zip(parts, shapes, strict=True)]
        logits, taps = unpacked(output.logits, counts), unpacked(output.taps, shapes)
        last_hidden = unpacked(output.last_hidden, shapes)
        return [TargetOutput(*found) for found in zip(logits, taps, last_hidden, strict=True)]

    @cached_property
    def packs(self) -> bool:
        """Whether parts may lie side by side in one pass of this model: it is tried on a few tokens."""
        if not self.grows_trees or self.layout.has_indexers or self.model.config._attn_implementation != GROUPED:
            return False
        cache, parts = self.new_cache(3, batch=2), []
        for row, count in enumerate((3, 2)):
            tokens = torch.arange(count, device=self.device).unsqueeze(0)
            parts.append(Part(cache.target.row(row), tokens, causal_block(count, self.device), last_only=False))
        try:
            together = self.forward_parts(parts)
        except (CannotLieSideBySide, RuntimeError):  # the latter if the model itself computes with the mask
            self._seen.clear()
            return False
        alone = [self.forward(part.tokens).logits for part in parts]
        pairs = [(output.logits.float(), wanted.float()) for output, wanted in zip(together, alone, strict=True)]
        return all(bool((found - wanted).norm() < SAME * wanted.norm()) for found, wanted in pairs)

    def masks(self, slots: Slots, block: PendingTokens) -> Masks:
        """The attention mask as the model expects it: one for all layers, or one per layer type."""
        masks: dict[str, Any] = {**self._masks_by_kind(slots, block)}
        return one_or_all(masks) if len(masks) == 1 else {**masks, **dict.fromkeys(self.unmasked)}

    def _masks_by_kind(self, slots: Slots, block: PendingTokens) -> dict[str, Tensor]:
        made = {kind: block_mask(slots, block, self.dtype, window) for kind, window in self.windows.items()}
        if self.model.config._attn_implementation == GROUPED:
            made = {kind: with_row_groups(mask, slots) for kind, mask in made.items()}
        return made


def one_stream(states: Tensor, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq hidden"]:
    """The hidden states of a layer; the mean of a model's residual streams, if it has several."""
    if states.ndim == 3:
        return states
    return states.mean(2 if states.shape[:2] == tokens.shape else 0)


def one_or_all(masks: dict[str, Tensor]) -> Masks:
    return masks if len(masks) > 1 else next(iter(masks.values()))


# Hooks hold the tensors alone. A hook that held its target would keep it in memory after its last user is gone.


def keep_input(seen: dict[int, Tensor], tap: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[tap] = args[0] if args else kwargs["hidden_states"]

    return hook


def keep_output(seen: dict[int, Tensor], tap: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen[tap] = output if isinstance(output, Tensor) else output[0]

    return hook

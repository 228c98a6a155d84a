"""The passes of a target: over texts, trees, chains after recurrent states, and parts side by side."""

from functools import cached_property, partial
from inspect import signature
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from headstart.common.errors import wrong_value
from headstart.heads.target_config import TargetConfig
from headstart.heads.target_ends import final_norm
from headstart.inference.core.cache import KVCache, Slots
from headstart.inference.core.cache_memory import Shape
from headstart.inference.core.recurrent import WINDOW, LayerStates, OwnCaches, after_windows
from headstart.inference.core.request import ALL_OF_IT, Images
from headstart.inference.core.side_by_side import CannotLieSideBySide, PackedCache, PackedMask, Part, unpacked
from headstart.inference.core.tree import PendingTokens, Places, Tree, block_mask, causal_block, padded_rows, take
from headstart.inference.core.verify import count_drafted
from headstart.inference.targets.architecture import CacheLayout, attention_windows
from headstart.inference.targets.attention import GROUPED

# Which drafts a target verifies. With a cache of its own, rows run one after the other. `plain` verifies none, as a
# pass over several tokens does not continue from its recurrent states.
DecodingMethod = Literal["trees", "chains", "plain", "own cache", "own cache, plain"]
BFLOAT16_ROUNDING = 0.03  # relative difference of logits
Masks = Tensor | dict[str, Any]  # additive, [rows, 1, seq, keys]; one for all layers, or one per layer type


class TargetOutput(NamedTuple):
    logits: Float[Tensor, "batch wanted vocab"]
    taps: Float[Tensor, "batch seq tapped"]  # the tapped hidden states, concatenated in ascending order
    last_hidden: Float[Tensor, "batch seq hidden"]  # before the final norm

    def at(self, first: int, index: Int[Tensor, "batch nodes"]) -> "TargetOutput":
        """The output at these tokens of each row; logits begin at token `first`."""
        return TargetOutput(take(self.logits, index - first), take(self.taps, index), take(self.last_hidden, index))

    @classmethod
    def of_rows(cls, rows: "list[TargetOutput]") -> "TargetOutput":
        """The outputs of several rows as one, right-padded."""
        return cls(*(pad_sequence([part[0] for part in parts], batch_first=True) for parts in zip(*rows, strict=True)))


class Passes:
    """How a target runs: its forward passes, and which of them can verify draft tokens."""

    def __init__(self, model: PreTrainedModel, config: TargetConfig, taps: tuple[int, ...], layers: list[Any]) -> None:
        """`layers` are the decoder layers; each tap is the index of the one whose input it is, or of the last output.

        `choose_method` (check.py) sets `method` and `layout`.
        """
        self.model: Any = model
        self.config, self.taps = config, taps
        self.device, self.dtype = model.device, model.dtype  # asking the model every time would cost 1 % of a step
        self.windows, self.unmasked = attention_windows(model)
        accepted = signature(model.forward).parameters
        self.cache_name = "cache_params" if "cache_params" in accepted else "past_key_values"
        self.selects_logits = "logits_to_keep" in accepted
        self.reads_images = any(name.startswith(("pixel_values", "image_")) for name in accepted)
        # The modules that keep, from a pass with images to the next pass, how far positions are behind their index.
        self.keep_offsets: list[Any] = [module for module in model.modules() if hasattr(module, "rope_deltas")]
        self.offset = 0  # of the last images, as in `Slots.offsets`
        self.decodes_after_images = False  # whether a trial found so
        self.by_position = False  # masks say where the keys of each position lie
        self.by_block = False  # masks of steps carry the keys that each token sees, for a kernel of ours
        self.layout: CacheLayout
        self.method: DecodingMethod
        self.hidden: dict[int, Tensor] = {}  # what the hooks have left of the last pass, by tap
        keep_hidden(self.hidden, model, config, taps, layers)

    @property
    def verifies_trees(self) -> bool:
        """Whether one pass verifies a tree of draft tokens, and not only a chain."""
        return self.method == "trees"

    @property
    def verifies_drafts(self) -> bool:
        """Whether a pass verifies draft tokens at all."""
        return "plain" not in self.method

    @property
    def why_no_trees(self) -> str:
        """The reason why it can only verify chains."""
        if self.method.startswith("own cache"):
            return "it decodes in a cache of its own making, which holds one text"
        if self.layout.is_recurrent:
            return "it keeps recurrent states, which cannot be cut back to an earlier token"
        return "its pass over a tree computes other logits than its own forward"

    def new_cache(
        self, capacity: int, head_shape: Shape | None = None, batch: int = 1, static: bool = False
    ) -> KVCache:
        """Slots for `capacity` tokens per row, a pending tree included, and the recurrent states of each row."""
        layout = self.layout
        cache = KVCache.allocate(
            layout.shapes,
            head_shape,
            capacity,
            batch,
            self.dtype,
            self.device,
            static,
            layout.devices,
            layout.new_recurrent_states(batch),
            None if layout.empty is None else layout.layers,
        )
        if self.keep_offsets:
            cache.target.offsets = torch.zeros(batch, dtype=torch.long, device=self.device)
        return cache

    @torch.inference_mode()
    def forward(
        self,
        tokens: Int[Tensor, "batch seq"],
        positions: Int[Tensor, "batch seq"] | None = None,
        mask: Masks | None = None,
        cache: Cache | None = None,
        last_only: bool = False,
        logits_at: list[int] | None = None,
        images: Images | None = None,
    ) -> TargetOutput:
        """One pass over tokens; causal if there is no mask.

        `last_only` computes logits for the last token alone, `logits_at` for the tokens at these indices. With
        target.split layers, arguments and results are on the first device. `images` are in these tokens, the first of
        a text; positions and mask are the model's own then.
        """
        if self.by_position and mask is None and isinstance(cache, KVCache) and images is None:
            mask = self.masks(cache.target, causal_block(tokens.shape[1], self.device))
        return self._run(
            tokens, positions, mask, cache, [tokens.shape[1] - 1] if last_only else logits_at, images=images
        )[0]

    def _run(
        self,
        tokens: Int[Tensor, "batch seq"],
        positions: Int[Tensor, "batch seq"] | None,
        mask: Masks | None,
        cache: Cache | None,
        logits_at: list[int] | None,
        use_cache: bool = False,
        images: Images | None = None,
    ) -> tuple[TargetOutput, Cache | None]:
        """`forward`, and the cache that the model returns."""
        arguments: dict[str, Any] = {"attention_mask": mask, "position_ids": positions, self.cache_name: cache}
        # Indices: for a slice, a CPU's matmul first copies the lm_head. A list: accelerate would move a tensor to the
        # first device, but the final norm is on the last.
        arguments["logits_to_keep"] = logits_at if self.selects_logits else None
        arguments = {name: value for name, value in arguments.items() if value is not None}
        arguments |= {"input_ids": tokens, "use_cache": use_cache or cache is not None}
        if images is not None:  # without a mask, Qwen's omni models count positions by tokens
            arguments |= {"attention_mask": torch.ones_like(tokens), **images.arguments(self.device, self.dtype)}
        try:
            output = self.model(**arguments)
        finally:
            if images is not None:
                self.offset = self.take_offset()
        taps, last_hidden = self._take_hidden(tokens)
        tapped = torch.cat(taps, dim=-1) if taps else last_hidden[..., :0]
        logits = output.logits.to(self.device)
        if logits_at is not None and not self.selects_logits:
            logits = logits[:, logits_at]
        return TargetOutput(logits, tapped, last_hidden), output.get(self.cache_name)

    def hidden_states(
        self, tokens: Int[Tensor, "batch seq"]
    ) -> tuple[list[Float[Tensor, "batch seq hidden"]], Float[Tensor, "batch seq hidden"]]:
        """Each tap, and the last hidden state before the final norm, from a causal pass that records gradients if they
        are enabled."""
        self.model(input_ids=tokens, use_cache=False, **({"logits_to_keep": 1} if self.selects_logits else {}))
        return self._take_hidden(tokens)

    def _take_hidden(self, tokens: Int[Tensor, "batch seq"]) -> tuple[list[Tensor], Tensor]:
        taps = (*self.taps, self.config.num_layers)
        if missing := {*taps} - {*self.hidden}:
            raise ValueError(
                f"head.taps: {min(missing)} given, but a {self.config.model_type!r} model does not run layer "
                f"{min(missing)} on text alone; the inputs of its other layers are allowed: choose one of them"
            )
        # With target.split layers they are on several devices.
        hidden = {tap: one_stream(self.hidden[tap], tokens).to(self.device) for tap in taps}
        self.hidden.clear()
        return [hidden[tap] for tap in self.taps], hidden[self.config.num_layers]

    def tree(self, tree: Tree, cache: KVCache) -> TargetOutput:
        """One pass over all nodes of each row's tree, after the verified tokens of that row.

        The trees of a target with recurrent states are chains.
        """
        if cache.recurrent is not None:
            return self._chains(tree, cache)
        block = PendingTokens(tree.ancestors, tree.depths)
        return self.forward(tree.tokens, cache.target.positions(tree.depths), self.masks(cache.target, block), cache)

    def _chains(self, tree: Tree, cache: KVCache) -> TargetOutput:
        """A pass over each row's window, its root and its chain."""
        states = cache.recurrent
        assert states is not None
        drafted = [count_drafted(parents) for parents in tree.parents.tolist()]
        windows = [states.window(row) for row in range(len(drafted))]
        states.counts = [len(window) + 1 + count for window, count in zip(windows, drafted, strict=True)]
        if isinstance(states, OwnCaches):
            chains = [tree.tokens[row : row + 1, : 1 + count] for row, count in enumerate(drafted)]
            return TargetOutput.of_rows([self._own_cache(cache, row, chain) for row, chain in enumerate(chains)])
        tokens, index = after_windows(windows, tree.tokens)
        states.width, shortest = tokens.shape[1], min(map(len, windows))
        is_sure = min(states.counts) == states.width and not any(drafted)
        output = self._from_states(tokens, cache, [*range(shortest, states.width)], is_sure)
        return output.at(shortest, index)

    def _own_cache(self, cache: KVCache, row: int, chain: Int[Tensor, "1 nodes"]) -> TargetOutput:
        """A pass over one row's window, its root and its chain, with the model's own cache."""
        states, slots, positions = cache.recurrent, cache.target, None
        assert isinstance(states, OwnCaches)
        window = states.window(row)
        tokens, index = after_windows([window], chain)
        if slots.offsets is not None:  # else it would count on from what its own `generate` left
            depths = torch.arange(tokens.shape[1], device=self.device) - len(window)
            positions = slots.positions(depths.expand(len(slots.lengths), -1))[row : row + 1]
        own = states.load(row, is_sure=chain.shape[1] == 1)
        wanted = [*range(len(window), tokens.shape[1])]
        output, states.after[row] = self._run(tokens, positions, None, own, wanted, use_cache=True)
        return output.at(len(window), index)

    def _from_states(
        self,
        tokens: Int[Tensor, "rows count"],
        cache: KVCache,
        logits_at: list[int] | None,
        is_sure: bool,
        images: Images | None = None,
    ) -> TargetOutput:
        """A causal pass that continues each row's last verified states. It leaves the cache's lengths unchanged."""
        states, slots = cache.recurrent, cache.target
        assert isinstance(states, LayerStates)
        lengths = list(slots.lengths)
        slots.set_lengths([length - len(states.window(row)) for row, length in enumerate(lengths)])
        states.load(cache.layers, len(lengths) if max(lengths) else 0, is_sure)
        output = self.forward(tokens, *self._after(slots, tokens), cache, logits_at=logits_at, images=images)
        slots.set_lengths(lengths)
        return output

    def _after(self, slots: Slots, tokens: Tensor) -> tuple[Tensor | None, Masks | None]:
        """The positions and mask of tokens that come after those in the slots; None each at the start of a text."""
        if not max(slots.lengths):
            return None, None
        block = causal_block(tokens.shape[1], self.device)
        assert block.depths is not None
        return slots.positions(block.depths), self.masks(slots, block)

    def prefill(
        self,
        tokens: Int[Tensor, "1 count"],
        row: KVCache,
        before: int,
        logits_at: list[int] | None,
        images: Images | None = None,
    ) -> TargetOutput:
        """Prefill a row, which holds the first `before` tokens of its text, further."""
        states = row.recurrent
        row.set_lengths([before])
        if states is None:
            return self.forward(tokens, *self._after(row.target, tokens), row, logits_at=logits_at, images=images)
        if before and not self.verifies_drafts and tokens.shape[1] > 1:
            single = [self.prefill(token, row, before + index, None) for index, token in enumerate(tokens.split(1, 1))]
            logits, *others = (torch.cat(parts, dim=1) for parts in zip(*single, strict=True))
            return TargetOutput(logits if logits_at is None else logits[:, logits_at], *others)
        if not before:
            states.write(0, None)
        if isinstance(states, OwnCaches):
            cache = states.load(0, is_sure=True)
            positions = None
            if before and row.target.offsets is not None:
                positions = before + row.target.offsets + torch.arange(tokens.shape[1], device=self.device).unsqueeze(0)
            output, states.after[0] = self._run(
                tokens, positions, None, cache, logits_at, use_cache=True, images=images
            )
        else:
            output = self._from_states(tokens, row, logits_at, is_sure=before > 0, images=images)
        states.commit([0])
        return output

    def read_images(
        self, tokens: Int[Tensor, "1 end"], images: Images, row: KVCache, logits_at: list[int] | None
    ) -> TargetOutput:
        """Prefill an empty row with the beginning of a prompt, up to the end of its last image, by the model's own
        positions and masks. Raises ValueError if these refuse the images."""
        try:
            output = self.prefill(tokens, row, 0, logits_at, images)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model may raise anything for tensors that do not belong together
            given = f"tensors that the model refuses ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
            raise wrong_value("images", given, "all that the target's processor returns is", ALL_OF_IT) from error
        row.target.set_offset(0, self.offset)
        return output

    def take_offset(self) -> int:
        """What the model keeps of a pass with images, and a text that follows would take for its own."""
        kept = [module.rope_deltas for module in self.keep_offsets if module.rope_deltas is not None]
        for module in self.keep_offsets:
            module.rope_deltas = None
        return int(kept[0].flatten()[0]) if kept else 0

    def prepare_step(self, cache: KVCache, drafts: bool) -> bool:
        """Before a step, advance recurrent states whose windows are full; returns whether the step may draft.

        Windows of one length are emptied by a step without drafts, which costs no more than any other. Others are cut
        at powers of two, by passes in which rows with shorter windows take part for the shape alone.
        """
        states, rows = cache.recurrent, len(cache.target.lengths)
        if states is None or not self.verifies_drafts:
            return drafts and self.verifies_drafts
        lengths = {len(states.window(row)) for row in range(rows)}
        longest = max(lengths, default=0)
        if isinstance(states, OwnCaches) or len(lengths) <= 1:
            return drafts and longest < WINDOW
        limit = WINDOW // 2 if drafts else 0
        if longest >= WINDOW or not drafts:
            while (longest := max(len(states.window(row)) for row in range(rows))) > limit:
                self._advance_states(cache, 1 << (longest.bit_length() - 1))
        return drafts

    def _advance_states(self, cache: KVCache, count: int) -> None:
        """Advance the states of the rows whose windows have at least `count` tokens by that many."""
        states = cache.recurrent
        assert states is not None
        windows = [states.window(row) for row in range(len(cache.target.lengths))]
        tokens = padded_rows([window[:count] for window in windows]).to(self.device)
        self._from_states(tokens, cache, [count - 1], is_sure=False)
        states.commit([row for row, window in enumerate(windows) if len(window) >= count])
        for window in windows:
            if len(window) >= count:
                del window[:count]

    def side_by_side(self, parts: list[Part]) -> list[TargetOutput]:
        """One pass over parts that lie side by side; returns the output of each. See `allows_side_by_side`."""
        cache, shapes = PackedCache(parts), [(part.tokens.shape[0], part.tokens.shape[1]) for part in parts]
        logits_at, first = list[int](), 0
        for part in parts:
            logits_at += [first + index for index in part.logits_at]
            first += part.tokens.numel()
        masks = [self._masks_by_kind(part.slots, part.block) for part in parts]
        packed: dict[str, Tensor] = {
            kind: PackedMask.of(cache, tuple(by_kind[kind] for by_kind in masks)) for kind in self.windows
        }
        output = self.forward(
            torch.cat([part.tokens.flatten() for part in parts]).unsqueeze(0),
            torch.cat([part.positions.flatten() for part in parts]).unsqueeze(0),
            self._one_or_all(packed),
            cache,
            logits_at=logits_at,
        )
        cache.check()
        counts = [(rows, 1 if part.last_only else count) for part, (rows, count) in zip(parts, shapes, strict=True)]
        logits, taps = unpacked(output.logits, counts), unpacked(output.taps, shapes)
        last_hidden = unpacked(output.last_hidden, shapes)
        return [TargetOutput(*fields) for fields in zip(logits, taps, last_hidden, strict=True)]

    @cached_property
    def allows_side_by_side(self) -> bool:
        """Whether parts may lie side by side in one pass of this model: it is tried on a few tokens."""
        if not self.verifies_trees or self.layout.has_indexers or self.model.config._attn_implementation != GROUPED:
            return False
        cache, parts = self.new_cache(3, batch=2), []
        for row, count in enumerate((3, 2)):
            tokens = torch.arange(count, device=self.device).unsqueeze(0)
            parts.append(Part(cache.target.row(row), tokens, causal_block(count, self.device), last_only=False))
        try:
            together = self.side_by_side(parts)
        except (CannotLieSideBySide, RuntimeError):  # the latter if the model itself computes with the mask
            self.hidden.clear()
            return False
        alone = [self.forward(part.tokens).logits for part in parts]
        pairs = zip(together, alone, strict=True)
        return all(relative_difference(output.logits, wanted) < BFLOAT16_ROUNDING for output, wanted in pairs)

    def masks(self, slots: Slots, block: PendingTokens) -> Masks:
        """The attention mask as the model expects it: one for all layers, or one per layer type."""
        return self._one_or_all(self._masks_by_kind(slots, block))

    def _one_or_all(self, masks: dict[str, Tensor]) -> Masks:
        return {**masks, **dict.fromkeys(self.unmasked)} if len(masks) > 1 else next(iter(masks.values()))

    def _masks_by_kind(self, slots: Slots, block: PendingTokens) -> dict[str, Tensor]:
        make = partial(block_mask, slots, block, self.dtype, carries_keys=self.by_block)
        masks = {kind: make(window=window) for kind, window in self.windows.items()}
        for kind, mask in masks.items() if self.by_position else ():
            vars(mask)["keys"] = Places.of(slots, block, self.windows[kind])
        return masks


def one_stream(hidden: Tensor, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq hidden"]:
    """The hidden states of a layer; the mean of a model's residual streams, if it has several."""
    if hidden.ndim == 3:
        return hidden
    return hidden.mean(2 if hidden.shape[:2] == tokens.shape else 0)


def relative_difference(logits: Tensor, wanted: Tensor) -> float:
    """The size of the difference of logits, relative to the wanted ones."""
    return float((logits.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-6))


# Hooks hold the tensors alone. A hook that held its target would keep it in memory after its last user is gone.


def keep_hidden(
    hidden: dict[int, Tensor], model: PreTrainedModel, config: TargetConfig, taps: tuple[int, ...], layers: Any
) -> list[RemovableHandle]:
    """Leave each tap, and the last hidden state before the final norm, in `hidden`; returns the hooks."""
    last = config.num_layers
    hooks = [
        layers[tap].register_forward_pre_hook(keep_input(hidden, tap), with_kwargs=True) for tap in {*taps} - {last}
    ]
    hooks.append(layers[-1].register_forward_hook(keep_output(hidden, last)))
    if (norm := final_norm(model, config)) is not None:  # models with several residual streams join them first
        hooks.append(norm.register_forward_pre_hook(keep_input(hidden, last), with_kwargs=True))
    return hooks


def keep_input(hidden: dict[int, Tensor], tap: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden[tap] = args[0] if args else kwargs["hidden_states"]

    return hook


def keep_output(hidden: dict[int, Tensor], tap: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        hidden[tap] = output if isinstance(output, Tensor) else output[0]

    return hook

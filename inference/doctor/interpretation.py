"""A head's files split into parts that can be exchanged one by one: taps, norms, vocabulary map, RoPE, weights."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.heads.base import DraftHead
from headstart.heads.files import HeadFiles
from headstart.heads.formats.layouts import layout_of
from headstart.heads.formats.published import translate
from headstart.heads.formats.subject import Subject
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.block_config import block_key
from headstart.heads.kinds.checkpoint import KINDS, head_from_files
from headstart.heads.target_config import Rope
from headstart.inference.calibrate import score_taps
from headstart.inference.core.sampling import Sampling

MAPS = ("d2t", "t2d", "token_map")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ReplayedText:
    """A prompt with the target's own response, and every hidden state that an interpretation of the head may read."""

    text: Int[Tensor, "1 seq"]
    prompt: int  # length of the prompt in tokens
    states: dict[int, Float[Tensor, "1 before hidden"]]  # by tap, for every token but the last


@dataclass(frozen=True)
class Interpretation:
    """One way to interpret a head's files; the doctor changes one field at a time and measures again."""

    folder: Path
    kind: str
    config: dict[str, Any]  # flat, as in our own layout
    tensors: dict[str, Tensor]  # without the vocabulary maps
    taps: tuple[int, ...]  # in the order in which the head reads them
    ids: Int[Tensor, " draft_vocab"]  # token id of each logits column, as the engine computes it; may be out of range
    dtype: torch.dtype | None = None  # the head computes in it; None: the target's

    @classmethod
    def trained(cls, files: HeadFiles, frozen: FrozenTarget) -> "Interpretation":
        """As the head was trained, by our note in config.json if it has one; ValueError for an unknown layout."""
        subject, translation = translate(files, frozen)
        tensors, size = dict(translation.tensors), frozen.config.vocab_size
        offsets, ids = tensors.get("d2t"), tensors.get("token_map")
        if ids is None:
            ids = torch.arange(size) if offsets is None else torch.arange(len(offsets)) + offsets.long()
        if (bias := tensors.get("fc.bias")) is not None and not bool(bias.any()):
            del tensors["fc.bias"]  # a zero bias changes nothing
        weights = {name: tensor for name, tensor in tensors.items() if name not in MAPS}
        return cls(files.folder, subject.kind, translation.config, weights, subject.taps, ids.long())

    @classmethod
    def served(cls, files: HeadFiles, frozen: FrozenTarget, engine: str) -> "Interpretation":
        """As an engine interprets it, which does not read our own note."""
        subject = Subject(files, layout_of(files), frozen)
        bare = HeadFiles(files.folder, {**files.config, "headstart": {"kind": subject.kind}}, files.tensors)
        served = cls.trained(bare, frozen)
        if (captured_taps := subject.layout.captured_taps) is None:
            return served
        return replace(served, taps=tuple(captured_taps(Subject(bare, subject.layout, frozen), engine)))

    def head(self, frozen: FrozenTarget) -> DraftHead:
        """Build the head, without the weights of disabled norms; raises ValueError for tensors that do not fit."""
        config, tensors = dict(self.config), dict(self.tensors)
        for flag, prefix in (("fc_norm", "fc_norm."), ("norm_before_fc", "input_norm.")):
            if not config.get(flag):
                tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
        if len(self.ids) != frozen.config.vocab_size:
            # The map only has to be valid: `ids` is applied to the logits columns later.
            stand_in = KINDS[self.kind].vocab_map
            columns = torch.arange(len(self.ids) + 1)
            columns = columns[columns != block_key(self.config, "mask_token_id", len(self.ids))][: len(self.ids)]
            tensors[stand_in] = columns - torch.arange(len(columns)) if stand_in == "d2t" else columns
        config["headstart"] = {
            "kind": self.kind,
            "taps": list(self.taps),
            "target_num_layers": frozen.config.num_layers,
            "target_rope": asdict(frozen.config.rope),
        }
        return head_from_files(self.folder, config, tensors, frozen)

    @property
    def rope(self) -> Rope:
        return Rope.from_config(self.config)

    @property
    def stored_dtype(self) -> torch.dtype | None:
        """The number format that config.json names; None if it names none."""
        return DTYPES.get(str(self.config.get("torch_dtype") or self.config.get("dtype")))


Measure = Callable[[Interpretation], list[float]]  # accuracy by depth; ValueError if the head cannot be computed


@torch.inference_mode()
def accuracies(
    interpretation: Interpretation, replays: Sequence[ReplayedText], frozen: FrozenTarget, depth: int
) -> list[float]:
    """How often the head's top guess is the target's choice, by depth; ValueError if it cannot be computed.

    Only tokens that the target wrote count. A short text has fewer depths.
    """
    dtype = interpretation.dtype or frozen.embedding.dtype
    in_dtype: dict[str, Any] = {name: each.to(dtype) for name, each in vars(frozen).items() if isinstance(each, Tensor)}
    head = interpretation.head(replace(frozen, **in_dtype))
    if missing := sorted(set(interpretation.taps) - replays[0].states.keys()):
        known = f"the target has hidden_states 0 to {frozen.config.num_layers}"
        raise ValueError(f"{interpretation.folder}: taps {missing} given, but {known}; correct the taps")
    depth, ids = min(depth, head.max_levels or depth), interpretation.ids.to(frozen.embedding.device)
    right, written = Counter[int](), Counter[int]()
    for replay in replays:
        taps = torch.cat([replay.states[tap] for tap in interpretation.taps], dim=-1).to(dtype)
        for level, scored in enumerate(score_taps(head, taps, replay.text, replay.prompt, Sampling(), depth)):
            scores = scored.without_noise  # row t is about the token at position t + 2 + level
            is_right = (ids[scores.argmax(dim=1)] == replay.text[0, level + 2 :]) & scores.isfinite().all(dim=1)
            right[level] += int((is_right & scored.written).sum())
            written[level] += int(scored.written.sum())
    return [right[level] / max(count, 1) for level, count in sorted(written.items())]

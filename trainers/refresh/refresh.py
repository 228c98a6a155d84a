"""`headstart.refresh`: a head learns from texts that its target, whose weights may have moved, has written lately.

The new head is written only if it accepts more of the texts that were held out. The target is only read.
"""

import math
import time
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headstart.common.errors import wrong_value
from headstart.common.files import whole_folder
from headstart.data_pipelines.features.batches import Sample, TrainingBatch, median_tap_sizes, pack
from headstart.data_pipelines.features.shards import FeatureStore, stored_taps
from headstart.heads.base import DraftHead
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import KINDS, load_head_for, save_head, stored_dtype
from headstart.heads.target_config import TargetConfig, TargetOrigin, locate_target
from headstart.heads.target_ends import TargetEnds
from headstart.inference.drafters.growth import Growth
from headstart.inference.generate.settings import refuse_outside
from headstart.inference.serve.traffic import is_held_out
from headstart.inference.targets.loading import load_config, load_weights, pick_device
from headstart.recipes.fields import head_kinds
from headstart.recipes.schema import DecodeSection
from headstart.recipes.schema_heads import HeadSection
from headstart.recipes.schema_train import TrainSection
from headstart.trainers.loop import SampleOrder
from headstart.trainers.objectives.objective import Objective
from headstart.trainers.objectives.unrolled import Teacher
from headstart.trainers.parallel.head_on_ranks import build_optimizers, clip_and_step, set_learning_rates
from headstart.trainers.refresh.judge import LEAST, MOST, Verdict, judge
from headstart.trainers.refresh.states import record, refuse_not_finite
from headstart.trainers.step import TRAINED, autocast, tf32_allowed

RATE = 1e-5  # AdamW's peak learning rate without a train section: a tenth of a new head's
WIDTH = 4  # usual guesses at each level of a tree
SIZED = 64  # samples from which the sizes of the taps follow


@dataclass(frozen=True)
class Rollout:
    """A text of the target. `states` may hold its hidden states: the head's taps, ascending, then the last one."""

    tokens: Sequence[int]  # prompt and answer
    loss_mask: Sequence[bool]  # the tokens that the target wrote
    states: Tensor | None = None  # [tokens, taps * hidden], of the present weights; None: they are computed
    held_out: bool | None = None  # judges heads, and is never trained on; None: so is one prompt in eight


@dataclass(frozen=True)
class Refreshed:
    """The outcome of a refresh: a head's folder, the given one unless `is_new`."""

    head: Path
    verdict: Verdict
    is_new: bool


Target = PreTrainedModel | FrozenTarget | Path
Picks = list[tuple[Sequence[Sample] | FeatureStore, int]]  # samples by their source and number in it


def refresh(
    head: str | Path,
    rollouts: Iterable[Rollout] | str | Path,
    target: PreTrainedModel | FrozenTarget | str | Path,
    out: str | Path,
    *,
    steps: int = 200,
    seconds: float | None = None,
    replay: str | Path | None = None,
    share: float = 0.5,
    train: TrainSection | None = None,
    decode: DecodeSection | None = None,
    device: str = "auto",
    seed: int = 0,
) -> Refreshed:
    """Train a head on its target's newest texts; the new folder `out` gets it if it accepts more of those held out.

    `rollouts` are texts or a folder of features. `target` is a folder, or a model in memory, of which nothing changes,
    or its ends alone if all rollouts have states. Training ends after `steps`, or after `seconds` if these pass first.
    `share` of its samples are drawn from `replay`, the features that the head was first trained on. `train` gives
    rates, batch and loss, `decode` the judged tree, `device` where the head of a target in a folder is trained. `out`
    appears whole or not at all, and `head` is never written. Without `seconds` the result follows from the arguments.
    Raises ValueError that names what is wrong with the rollouts, the weights or the head.
    """
    old, new, tree = Path(head).expanduser(), Path(out).expanduser(), decode or DecodeSection()
    if new.exists():
        raise wrong_value("out", new, "a folder that does not exist is", "remove it, or name another")
    if not 0 <= share < 1:
        raise wrong_value("share", share, "0 or more and less than 1 is", "leave it out for 0.5")
    section = train or TrainSection(steps=steps, learning_rate=RATE)
    section = section.model_copy(update={"steps": steps, "warmup_steps": min(section.warmup_steps, steps // 10)})
    source = locate_target(str(target), field="target") if isinstance(target, str | Path) else target
    cuda = [source.device] if isinstance(source, PreTrainedModel) and source.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.enable_grad():
        frozen = ends_of(source, device)
        before = load_head_for(old, frozen)
        learned, held_out = split(rollouts, before, source)
        if len(held_out) < LEAST or not learned:
            return Refreshed(old, Verdict(len(held_out), math.nan, math.nan, 0.0, 0.0), False)
        if replay is not None and share:
            wanted = round(len(learned) * share / (1 - share))
            learned += drawn(Path(replay).expanduser(), before, wanted, seed)
        made = fit(before, frozen, learned, section, seconds, seed)
        dtype = getattr(torch, stored_dtype(old))
        for weight in made.parameters():
            weight.data = weight.data.to(dtype).float()  # judged as it is written
        growth = Growth.from_section(tree, before.max_levels)
        newest = [source[number] for source, number in held_out[-MOST:]]
        verdict = judge(made, before, newest, growth.depth, min(growth.width, WIDTH))
    if not verdict.is_better:
        return Refreshed(old, verdict, False)
    made.calibration = before.calibration
    if isinstance(source, Path) and before.origin is not None and not before.origin.is_another(TargetOrigin.of(source)):
        made.origin = before.origin  # else its weights are between two checkpoints
    with whole_folder(new) as partial:
        save_head(made.to(dtype), partial)
    return Refreshed(new, verdict, True)


def ends_of(target: Target, device: str = "auto") -> FrozenTarget:
    """A target's embedding, final norm and lm_head in float32; ValueError if those in memory are not finite."""
    if isinstance(target, FrozenTarget):
        return target
    if isinstance(target, Path):
        return FrozenTarget.from_folder(target, torch.float32, pick_device(device, "device"))
    config = TargetConfig.from_dict(target.config.to_dict())
    frozen = FrozenTarget.from_model(target, TargetEnds.from_class(target), config, target.device)
    wide: dict[str, Any] = {name: each.float() for name, each in vars(frozen).items() if isinstance(each, Tensor)}
    if not all(bool(each.isfinite().all()) for each in wide.values()):
        refuse_not_finite(target)
    return replace(frozen, **wide)


def with_states(rollouts: Iterable[Rollout], head: DraftHead, target: Target) -> list[Rollout]:
    """The rollouts with their states, which are computed where they are missing; ValueError for a wrong rollout."""
    texts, taps = list(rollouts), stored_taps(head.taps, head.target.num_layers)
    for number, text in enumerate(texts):
        refuse_wrong(text, f"rollouts[{number}]", head)
    if unknown := [number for number, text in enumerate(texts) if text.states is None]:
        model: Any = target
        if isinstance(target, Path):
            dtype: Any = load_config(target, False).dtype or torch.float32
            model = load_weights(target, dtype=dtype, trust_remote_code=False)
            model = model.to(head.embedding.device)
        found = record(model, [texts[number].tokens for number in unknown], taps)
        for number, states in zip(unknown, found, strict=True):
            texts[number] = replace(texts[number], states=states)
    return texts


def split(rollouts: Iterable[Rollout] | str | Path, head: DraftHead, target: Target) -> tuple[Picks, Picks]:
    """The samples to train on and those held out."""
    if isinstance(rollouts, str | Path):
        taps, folder = stored_taps(head.taps, head.target.num_layers), Path(rollouts).expanduser()
        stores = [FeatureStore(folder, name, taps) for name in ("train", "heldout")]
        sides: list[Picks] = [[(store, number) for number in range(len(store))] for store in stores]
        return sides[0], sides[1]
    learned, held_out, samples, size = Picks(), Picks(), list[Sample](), head.target.hidden_size
    for number, text in enumerate(with_states(rollouts, head, target)):
        tokens, mask = torch.as_tensor(text.tokens).long().cpu(), torch.as_tensor(text.loss_mask).bool().cpu()
        assert text.states is not None
        samples.append(Sample(tokens, mask, text.states[:, :-size], text.states[:, -size:]))
        prompt = tokens[: int(mask.int().argmax())].tolist()
        judges = is_held_out(prompt) if text.held_out is None else text.held_out
        (held_out if judges else learned).append((samples, number))
    return learned, held_out


def refuse_wrong(text: Rollout, name: str, head: DraftHead) -> None:
    """Raise ValueError for a rollout of another tokenizer, without a token to learn, or with states of another size."""
    tokens, mask = torch.as_tensor(text.tokens), torch.as_tensor(text.loss_mask)
    count, size, most = len(tokens), head.target.vocab_size, head.target.max_positions
    if len(mask) != count:
        raise wrong_value(f"{name}.loss_mask", f"{len(mask)} flags", f"{count}, one a token, are", "correct it")
    if not mask.any():
        needed = "at least one token that the target wrote must be marked; leave this rollout out"
        raise ValueError(f"{name}.loss_mask: no token is marked, {needed}")
    refuse_outside(f"{name}.tokens", tokens.tolist(), size, "give tokens of the target's own tokenizer")
    if count > most:
        raise wrong_value(f"{name}.tokens", f"{count} tokens", f"up to {most} of the target's positions are", "cut it")
    wanted = (len({*head.taps, head.target.num_layers}) * head.target.hidden_size,)
    if text.states is not None and text.states.shape != (count, *wanted):
        remedy = f"give the taps {list(head.taps)} and the last hidden state, or leave states out"
        raise wrong_value(f"{name}.states", list(text.states.shape), f"{[count, *wanted]} is", remedy)


def drawn(folder: Path, head: DraftHead, count: int, seed: int) -> Picks:
    """Up to `count` of the stored samples of a folder, drawn by the seed."""
    store = FeatureStore(folder, "train", stored_taps(head.taps, head.target.num_layers))
    order = torch.randperm(len(store), generator=torch.Generator().manual_seed(seed)).tolist()
    return [(store, number) for number in order[:count]]


def section_of(head: DraftHead) -> HeadSection:
    """The recipe's section that describes a head, as far as its loss depends on it."""
    kind = head_kinds()[head.kind]
    fields = {name: getattr(head.shape, name) for name in kind.model_fields if hasattr(head.shape, name)}
    levels = {kind.levels_field: head.max_levels} if kind.levels_field else {}
    values = {name: value for name, value in {**levels, **fields}.items() if value is not None}
    return kind.model_construct(**values)


def fit(
    before: DraftHead,
    frozen: FrozenTarget,
    samples: Picks,
    section: TrainSection,
    seconds: float | None,
    seed: int,
) -> DraftHead:
    """A copy of the head, trained on the samples in this process alone, for section.steps or for these seconds."""
    head, described, device = deepcopy(before).requires_grad_(True).train(), section_of(before), frozen.embedding.device

    def sample(number: int) -> Sample:
        source, place = samples[number]
        found = source[place]
        return replace(found, taps=found.taps.float(), last_hidden=found.last_hidden.float())

    if KINDS[head.kind].scales_taps(described):
        some = (sample(number) for number in range(min(len(samples), SIZED)))
        head.scale_taps(median_tap_sizes(some, head.taps, head.target.num_layers))
        head.take_weights(before)
    objective = replace(Objective.of(described, section), input_noise=0.0)  # it is for a new head
    teacher = Teacher(frozen, head.vocab, getattr(torch, section.precision))
    unrolled = TRAINED[head.trained_by](head, teacher, objective, section)
    optimizers, order = build_optimizers(head, section), SampleOrder([len(samples)], seed)
    began, taken, step = time.perf_counter(), 0, 0
    while step < section.steps:
        set_learning_rates(optimizers, section, step)
        numbers = order.of_step(taken, section.batch_size)
        accumulate = min(section.micro_batches, len(numbers))
        parts = [numbers[first::accumulate] for first in range(accumulate)]
        for part in parts:
            texts = [sample(number) for number in part]
            packing = pack([len(text.tokens) for text in texts], section.pack_tokens)
            with autocast(section, device), tf32_allowed(device):
                batch = TrainingBatch.collate(texts, torch.float32, device, packing)
                supervision = unrolled.supervise(batch, f"{seed} {taken}")
                loss = unrolled(batch, supervision, supervision.counts(objective.unroll)).loss / len(parts)
            loss.backward()
        norm = clip_and_step(unrolled, optimizers, section.clip_norm)
        if not math.isfinite(norm):
            remedy = "lower train.learning_rate, or choose train.precision float32"
            raise ValueError(f"step {taken + 1} of the refresh has a gradient that is not finite; {remedy}")
        taken += 1
        spent = 0.0 if seconds is None else (time.perf_counter() - began) / seconds
        step = max(taken, math.ceil(section.steps * spent))  # the rates end with the seconds
    return head.eval().requires_grad_(False)

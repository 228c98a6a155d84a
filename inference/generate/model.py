"""Speculative decoding with the interface of transformers' `generate`.

The fields of a GenerationConfig mean what they mean in transformers; a field that is not implemented is refused.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Shaped
from pydantic import ValidationError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headstart.common.errors import wrong_value
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import load_head_for
from headstart.heads.target_config import folder_of, locate_target
from headstart.inference.core.constraint import GuardedState, masked_roots
from headstart.inference.core.drafter import Drafter
from headstart.inference.core.history import History
from headstart.inference.core.request import DecodeStats, Generation, Request
from headstart.inference.core.sampling import BatchSampling
from headstart.inference.core.tree import padded_rows
from headstart.inference.drafters.build import build_drafter, load_drafting_head
from headstart.inference.engine.budget import check_length
from headstart.inference.engine.loop import loop_of
from headstart.inference.engine.speculation import SpeculationByLoad, speculation_for
from headstart.inference.generate.options import LOOKUP
from headstart.inference.generate.prompts import is_of_images, read_images, read_prompts, read_stop_strings
from headstart.inference.generate.settings import (
    Config,
    Fields,
    Settings,
    config_fields,
    forbid,
    named_by_source,
    read_end_tokens,
    read_forbidden,
    read_max_new_tokens,
    read_pad_token,
    read_rules,
    read_sampling,
    read_seeds,
    read_settings,
    target_fields,
)
from headstart.inference.generate.text_rules import TextRulesState
from headstart.inference.targets.gguf import is_mostly_in_eight_bits
from headstart.inference.targets.loading import fast_dtype, pick_device
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import DecodeSection, TargetSection


@runtime_checkable  # the shape checks in tests use isinstance
class Streamer(Protocol):
    """transformers' BaseStreamer."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True)
class SpeculativeOutput:
    """The result of `generate` with return_dict_in_generate."""

    sequences: Int[Tensor, "rows total"]  # the prompts as given, the new tokens, padding
    generations: list[Generation]  # one per row
    stats: DecodeStats  # summed over all rows, except that seconds is the wall time of the call
    logprobs: Float[Tensor, "rows new"] | None  # as in Generation; 0 after a text's end, so a row's sum is its text's
    # As in transformers, one tensor per new token, but 0 after a text's end: with output_scores after all processing,
    # so that excluded tokens are -inf, and with output_logits as the target computed them.
    scores: tuple[Float[Tensor, "rows vocab"], ...] | None = None
    logits: tuple[Float[Tensor, "rows vocab"], ...] | None = None


class SpeculativeModel:
    """A target and a drafter with the interface of transformers' `generate`."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None = None,
        tokenizer: Any = None,
        max_batch: int = 16,
        speculation: SpeculationByLoad | None = None,
    ) -> None:
        """Without a drafter, decoding is plain. `tokenizer` is used only for stop strings and needs only `decode`.
        With `speculation` drafts stop while they do not pay.

        Raises ValueError for a model that is not a TargetModel.
        """
        if not isinstance(target, TargetModel):
            remedy = "wrap transformers' model: TargetModel(model, head.taps), or call SpeculativeModel.from_folders"
            raise wrong_value("target", type(target).__name__, "a TargetModel is", remedy)
        if not isinstance(max_batch, int) or max_batch < 1:
            raise wrong_value("max_batch", max_batch, "a whole number, 1 or more, is", "leave it out for 16")
        self.target, self.drafter, self.tokenizer, self.max_batch = target, drafter, tokenizer, max_batch
        self.speculation = speculation

    @classmethod
    def from_folders(
        cls,
        target: str | Path,
        head: str | Path | None = None,
        decode: DecodeSection | None = None,
        tokenizer: Any = None,
        last_hidden: bool = False,
        **section: Any,
    ) -> "SpeculativeModel":
        """Load a target (folder or hub name) and a head that was trained for it (folder).

        Without a head, drafts come from the `decode.drafter` that is given, such as draft_model, or by prompt lookup.
        They stop while they do not pay, by step times that are measured once for a machine. `decode` also gives the
        shape of drafts and max_batch. `section` holds fields of the recipe's target section, such as dtype (default
        float32; auto is the fast one for the machine), device or attention. With `last_hidden` the target also gives
        its last hidden state, which training needs.

        Raises ValueError if the head does not fit the target.
        """
        if decode is None:
            decode = DecodeSection() if head is not None else LOOKUP
        fields = read_section(target, section)
        if (head is None) == (decode.drafter == "head"):
            remedy = "give a head with decode.drafter head, or no head with another drafter"
            raise ValueError(f"head: {head} given with decode.drafter {decode.drafter}; {remedy}")
        folder = locate_target(fields.path, fields.revision, field="target", adapter=fields.adapter)
        if head is None:
            model = TargetModel.load(fields, ())
            drafter = build_drafter(decode, model, fields)
        else:
            # Refuse a head that does not fit before loading the target, which may take minutes.
            frozen = FrozenTarget.from_folder(folder, torch.float32)
            taps = {*load_head_for(head, frozen).taps, *([frozen.config.num_layers] if last_hidden else [])}
            model = TargetModel.load(fields, tuple(sorted(taps)))
            drafter = build_drafter(decode, model, fields, load_drafting_head(Path(head), model))
        return cls(model, drafter, tokenizer, decode.max_batch, speculation_for(decode, model, drafter))

    def generate(
        self,
        input_ids: Int[Tensor, "batch seq"] | None = None,
        *,
        attention_mask: Shaped[Tensor, "rows columns"] | None = None,
        generation_config: Config | None = None,
        streamer: Streamer | None = None,
        **overrides: Any,
    ) -> Int[Tensor, "texts total"] | SpeculativeOutput:
        """Continue prompts that are padded on the left; returns prompts and continuations, padded on the right.

        Greedy output equals that of transformers' `generate`, token for token.
        Sampled output depends only on target, prompt, seed and sampling fields, never on the drafter or the batch.
        `seed` is one number or one per prompt; with num_return_sequences, the i-th sequence of a prompt uses seed + i.
        One prompt may have images: give all that the target's processor returns, generate(**processor(...)).
        Raises ValueError for a field that is not supported or out of range, naming all unsupported ones.
        """
        started = time.perf_counter()
        settings, requests = self._read(input_ids, attention_mask, generation_config, overrides)
        assert input_ids is not None
        if streamer is not None and len(requests) > 1:
            allowed = "only 1 is allowed; give one prompt, or no streamer"
            raise ValueError(f"streamer: given for {len(requests)} texts, {allowed}")
        loop = loop_of(self.target, requests, self.drafter, self.max_batch, speculation=self.speculation)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        for block in loop.run():
            if streamer is not None:
                for token in block.tokens:  # one by one: a text streamer looks for the end of a word or line
                    streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()

        rows = input_ids.repeat_interleave(len(requests) // len(input_ids), dim=0)
        generations = list(loop.generations.values())
        # Without a pad token all texts are equally long, so the 0 is never used.
        written = padded_rows([each.tokens for each in generations], settings.pad_token_id or 0)
        sequences = torch.cat([rows, written.to(rows.device)], dim=1)
        if not settings.return_dict_in_generate:
            return sequences
        stats = DecodeStats.sum_of(each.stats for each in generations)
        stats.seconds = time.perf_counter() - started
        logprobs = [each.logprobs for each in generations if each.logprobs is not None]
        raw, scores = [torch.cat(each.logits) for each in generations if each.logits], None
        if settings.output_scores:
            pairs = zip(requests, generations, strict=True)
            scores = by_step([processed_scores(*pair, bool(settings.renormalize_logits)) for pair in pairs])
        return SpeculativeOutput(
            sequences,
            generations,
            stats,
            padded_rows(logprobs) if logprobs else None,
            scores,
            by_step(raw) if settings.output_logits else None,
        )

    def stream(
        self,
        input_ids: Int[Tensor, "1 seq"],
        *,
        attention_mask: Shaped[Tensor, "rows columns"] | None = None,
        generation_config: Config | None = None,
        **overrides: Any,
    ) -> Iterator[list[int]]:
        """Yield the new tokens of one text as they are accepted, one block per decode step."""
        _, requests = self._read(input_ids, attention_mask, generation_config, overrides)
        if len(requests) > 1:
            raise wrong_value("input_ids", f"{len(requests)} texts", "only 1 is", "use generate for more")
        loop = loop_of(self.target, requests, self.drafter, speculation=self.speculation)
        return (block.tokens for block in loop.run())

    def _read(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, config: Config | None, overrides: Fields
    ) -> tuple[Settings, list[Request]]:
        """The settings of a call, with eos_token_id and pad_token_id resolved, and its requests."""
        images = {name: value for name, value in overrides.items() if is_of_images(name)}
        overrides = {name: value for name, value in overrides.items() if name not in images}
        own = target_fields(self.target.generation_config)
        with named_by_source(own.keys() - config_fields(config).keys() - overrides.keys()):
            settings = self._read_settings(config, overrides)
            return settings, self._build_requests(input_ids, attention_mask, settings, images)

    def _read_settings(self, config: Config | None, overrides: Fields) -> Settings:
        settings = read_settings(config, overrides, self.target.generation_config)
        vocab_size = self.target.config.vocab_size
        ends = read_end_tokens(settings, self.target.end_tokens, vocab_size)
        pad = read_pad_token(settings, self.target.pad_token, ends, vocab_size)
        return settings.model_copy(update={"eos_token_id": [*ends], "pad_token_id": pad})

    def _build_requests(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, settings: Settings, of_images: Fields
    ) -> list[Request]:
        """One request per row of the output; `of_images` are the arguments for the images in the only prompt."""
        ends, vocab_size = tuple(settings.eos_token_id or ()), self.target.config.vocab_size
        prompts = read_prompts(input_ids, attention_mask, settings.pad_token_id, ends, vocab_size)
        images = read_images(prompts, of_images, self.target.model.config)
        assert input_ids is not None
        width = input_ids.shape[1]
        seeds = read_seeds(settings.seed, len(prompts))
        sampling, copies = read_sampling(settings), settings.num_return_sequences
        copies = 1 if copies is None else copies
        if copies < 1:
            raise wrong_value("num_return_sequences", copies, "1 or more is", "leave it out for 1")
        if copies > 1 and sampling.temperature == 0:
            remedy = "only 1 is allowed without do_sample=True; set it, or leave num_return_sequences out"
            raise ValueError(f"num_return_sequences: {copies} given, {remedy}")
        limit = read_max_new_tokens(settings, width, self.target.max_positions)
        check_length(self.target, max(prompts, key=len), limit, "max_new_tokens")
        sampling = forbid(sampling, read_forbidden(settings, ends, vocab_size))
        rules = [read_rules(settings, prompt, width, limit, ends, vocab_size) for prompt in prompts]
        if rules[0].min_new_tokens >= limit and rules[0].forced_eos is None:  # a bias is faster than a constraint
            sampling, rules = forbid(sampling, ends), [replace(each, min_new_tokens=0) for each in rules]
        stop = read_stop_strings(settings.stop_strings, settings.tokenizer or self.tokenizer, vocab_size)
        if stop is not None and len(prompts) * copies > 1 and settings.pad_token_id is None:
            raise ValueError("pad_token_id: missing; give one, because texts that end at stop_strings differ in length")
        scores = bool(settings.output_scores or settings.output_logits)
        return [
            Request(
                prompt,
                limit,
                replace(sampling, seed=seed + copy),
                stop,
                logprobs=scores,
                end_tokens=ends,
                constraint=None if each.forbid_nothing else each,
                keep_logits=scores and bool(settings.return_dict_in_generate),
                images=images,
            )
            for prompt, seed, each in zip(prompts, seeds, rules, strict=True)
            for copy in range(copies)
        ]


def read_section(target: str | Path, section: dict[str, Any]) -> TargetSection:
    """The target section for `from_folders`; raises one ValueError that names every wrong field of it."""
    fields = {"path": str(target), "dtype": "float32", **section}
    dtype = str(fields["dtype"]).removeprefix("torch.")
    try:
        if dtype == "auto":
            return with_fast_dtype(TargetSection(**{**fields, "dtype": "float32"}))
        return TargetSection(**{**fields, "dtype": dtype})
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, each['loc']))}: {each['input']!r} given, {each['msg'].removeprefix('Value error, ')}"
            for each in error.errors()
        ).replace("Extra inputs are not permitted", "but there is no such field")
        wrong = wrong.replace("Input should be", "allowed:")
        known = ", ".join(TargetSection.model_fields)
        raise ValueError(f"{wrong}; fields of the target section are allowed: {known}; correct or remove it") from error


def with_fast_dtype(section: TargetSection) -> TargetSection:
    """The section with the number format that is fast for this target on its device."""
    dtype = fast_dtype(pick_device(section.device), eight_bits=is_mostly_in_eight_bits(folder_of(section)))
    return section.model_copy(update={"dtype": dtype})


def by_step(rows: list[Float[Tensor, "_ vocab"]]) -> tuple[Float[Tensor, "rows vocab"], ...]:
    """One tensor per new token, with 0 for rows that have ended."""
    return pad_sequence(rows).unbind()


def processed_scores(request: Request, generation: Generation, renormalize: bool) -> Float[Tensor, "new vocab"]:
    """The scores that each new token was chosen by, before Gumbel noise: transformers' `scores`."""
    raw = torch.cat(generation.logits)
    sampling, vocab_size = BatchSampling([request.sampling], raw.device), raw.shape[1]
    history = History.start([request.prompt], vocab_size, raw.device)
    state, rows = None if request.constraint is None else GuardedState(request.constraint, vocab_size), []
    for token, logits in zip(generation.tokens, raw, strict=True):
        forced = state is not None and isinstance(state.state, TextRulesState) and state.state.forces()
        row = (torch.zeros_like(logits) if forced else logits).view(1, 1, vocab_size)
        if state is not None:
            row = masked_roots([state], row)
            state.advance([token])
        rows.append(sampling.scores(row, None, history)[0, 0].float())
        history.count(0, [token])
    scores = torch.stack(rows)
    return scores.log_softmax(-1) if renormalize else scores

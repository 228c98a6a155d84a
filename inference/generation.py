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
from torch import Tensor

from headstart.heads.checkpoint import load_head
from headstart.heads.frozen import FrozenTarget
from headstart.heads.target_config import locate_target
from headstart.inference.decode import DecodeLoop
from headstart.inference.drafter import Drafter
from headstart.inference.drafters.build import build_drafter
from headstart.inference.generation_config import (
    DEFAULTS,
    Config,
    Settings,
    has_fixed_length,
    read_end_tokens,
    read_integer,
    read_max_new_tokens,
    read_seeds,
    read_settings,
    read_stop_strings,
    with_settings,
)
from headstart.inference.request import DecodeStats, Generation, Request
from headstart.inference.sampling import Sampling, sampling_from_recipe
from headstart.inference.target.model import TargetModel
from headstart.recipes.schema import DecodeSection, TargetSection


@runtime_checkable  # the shape checks in tests use isinstance
class Streamer(Protocol):
    """transformers' BaseStreamer."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True)
class SpeculativeOutput:
    """What `generate` returns with return_dict_in_generate."""

    sequences: Int[Tensor, "rows total"]  # the prompts as given, the new tokens, padding
    generations: list[Generation]  # one per row
    stats: DecodeStats  # summed over all rows, except that seconds is the wall time of the call
    logprobs: Float[Tensor, "rows new"] | None  # as in Generation; 0 after a text's end, so a row's sum is its text's


class SpeculativeModel:
    """A target and a drafter with the interface of transformers' `generate`."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None = None,
        tokenizer: Any = None,
        sampling: Sampling | None = None,
        max_batch: int = 16,
    ) -> None:
        """Without a drafter, decoding is plain. `tokenizer` is used only for stop strings and needs only `decode`.

        `sampling` sets what a GenerationConfig has no field for: the default seed, the acceptance rule, and the
        presence and frequency penalties. Raises ValueError if it sets anything else.
        """
        self.target, self.drafter, self.tokenizer, self.max_batch = target, drafter, tokenizer, max_batch
        self.sampling = sampling or Sampling()
        if with_settings(self.sampling, DEFAULTS) != self.sampling:
            raise ValueError(
                f"sampling: {self.sampling} given, only seed, rule, typical_epsilon, typical_delta, presence_penalty "
                f"and frequency_penalty are allowed; pass all other fields with each call of generate"
            )

    @classmethod
    def from_folders(
        cls,
        target: str | Path,
        head: str | Path | None = None,
        decode: DecodeSection | None = None,
        tokenizer: Any = None,
        **section: Any,
    ) -> "SpeculativeModel":
        """Load a target (folder or hub name) and a head that was trained for it (folder).

        Without a head, `decode.drafter` names another drafter, such as draft_model, prompt_lookup or lookahead. From
        `decode`, calls also take the shape of drafts, the acceptance rule, the seed, the presence and frequency
        penalties and max_batch; other sampling fields come with each call. `section` holds fields of the recipe's
        target section, such as dtype (default float32), device or attention.

        Raises ValueError if the head does not fit the target.
        """
        decode = decode or DecodeSection()
        fields = TargetSection(**{"path": str(target), "dtype": "float32", **section})
        if (head is None) == (decode.drafter == "head"):
            raise ValueError(
                f"head: {head} given with decode.drafter {decode.drafter}; give a head with decode.drafter head, or no "
                f"head with another drafter"
            )
        if head is None:
            model = TargetModel.load(fields, ())
            drafter = build_drafter(decode, model, fields)
        else:
            # Refuse a head that does not fit before loading the target, which may take minutes.
            frozen = FrozenTarget.from_folder(locate_target(fields.path, fields.revision), torch.float32)
            model = TargetModel.load(fields, load_head(Path(head), frozen).taps)
            drafter = build_drafter(decode, model, fields, load_head(Path(head), model.frozen))
        recipe_sampling = sampling_from_recipe(decode, temperature=0.0)
        # These fields come with each call.
        sampling = replace(recipe_sampling, top_k=None, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
        return cls(model, drafter, tokenizer, sampling, decode.max_batch)

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

        Greedy output equals that of transformers' `generate`, token for token. Under the seeded acceptance rule,
        sampled output depends only on target, prompt, seed and sampling fields, never on the drafter or the batch.
        `seed` is one number or one per prompt; with num_return_sequences, the i-th sequence of a prompt uses seed + i.
        Raises ValueError for a field that is not supported or out of range, naming all unsupported ones.
        """
        started = time.perf_counter()
        settings = self._read_settings(generation_config, overrides)
        requests = self._build_requests(input_ids, attention_mask, settings)
        assert input_ids is not None
        if streamer is not None and len(requests) > 1:
            raise ValueError(f"streamer: given for {len(requests)} texts, only 1 is allowed; give one prompt")
        loop = DecodeLoop(self.target, requests, self.drafter, self.max_batch)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        for _, block in loop.run():
            if streamer is not None:
                for token in block:  # one by one, as a text streamer looks for the end of a word or line after each
                    streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()

        rows = input_ids.repeat_interleave(len(requests) // len(input_ids), dim=0)
        # Without a pad token all texts are equally long, so the 0 is never used.
        written = pad_right([found.tokens for found in loop.generations], settings["pad_token_id"] or 0)
        sequences = torch.cat([rows, written.to(rows.device)], dim=1)
        if not settings["return_dict_in_generate"]:
            return sequences
        stats = DecodeStats()
        for found in loop.generations:
            stats.add(found.stats)
        stats.seconds = time.perf_counter() - started
        logprobs = [found.logprobs for found in loop.generations if found.logprobs is not None]
        return SpeculativeOutput(sequences, loop.generations, stats, pad_right(logprobs, 0.0) if logprobs else None)

    def stream(
        self,
        input_ids: Int[Tensor, "1 seq"],
        *,
        attention_mask: Shaped[Tensor, "rows columns"] | None = None,
        generation_config: Config | None = None,
        **overrides: Any,
    ) -> Iterator[list[int]]:
        """Yield the new tokens of one text as they are accepted, one block per decode step."""
        requests = self._build_requests(input_ids, attention_mask, self._read_settings(generation_config, overrides))
        if len(requests) > 1:
            raise ValueError(f"input_ids: {len(requests)} texts given, stream allows only 1; use generate for more")
        loop = DecodeLoop(self.target, requests, self.drafter)
        return (block for _, block in loop.run())

    def _read_settings(self, config: Config | None, overrides: Settings) -> dict[str, Any]:
        """The settings of a call, with eos_token_id as a tuple and pad_token_id resolved.

        The pad token is the call's, else the target's own, else the first end token, else None.
        """
        settings = read_settings(config, overrides)
        ends = read_end_tokens(settings, self.target.end_tokens, self.target.config.vocab_size)
        candidates = (settings["pad_token_id"], self.target.pad_token, *ends)
        pad = next((token for token in candidates if token is not None), None)
        return {**settings, "eos_token_id": ends, "pad_token_id": pad}

    def _build_requests(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, settings: Settings
    ) -> list[Request]:
        """One request per row of the output."""
        if input_ids is None:
            raise ValueError("input_ids: missing; give prompts as token ids of shape [batch, seq], not inputs_embeds")
        if input_ids.ndim != 2 or not len(input_ids):
            raise ValueError(
                f"input_ids: shape {list(input_ids.shape)} given, [batch, seq] with at least one row is allowed"
            )
        ends, width = settings["eos_token_id"], input_ids.shape[1]
        prompts = read_prompts(input_ids, attention_mask, settings["pad_token_id"], ends)
        seeds = read_seeds(settings.get("seed"), self.sampling.seed, len(prompts))
        sampling, copies = with_settings(self.sampling, settings), settings["num_return_sequences"]
        copies = 1 if copies is None else read_integer("num_return_sequences", copies)
        if copies < 1:
            raise ValueError(f"num_return_sequences: {copies} given, 1 or more is allowed")
        if copies > 1 and sampling.temperature == 0:
            raise ValueError(f"num_return_sequences: {copies} given, only 1 is allowed without do_sample=True")
        limit = read_max_new_tokens(settings, width, self.target.max_positions)
        if has_fixed_length(settings, width, limit):
            sampling = replace(sampling, logit_bias=(*sampling.logit_bias, *((token, -torch.inf) for token in ends)))
        stop = read_stop_strings(settings, settings.get("tokenizer") or self.tokenizer, self.target.config.vocab_size)
        if stop is not None and len(prompts) * copies > 1 and settings["pad_token_id"] is None:
            raise ValueError(
                "pad_token_id: missing; with stop_strings the texts of a batch end at different lengths, so give a "
                "pad_token_id"
            )
        logprobs = bool(settings["output_scores"] or settings["output_logits"])
        return [
            Request(prompt, limit, replace(sampling, seed=seed + copy), stop, logprobs, ends)
            for prompt, seed in zip(prompts, seeds, strict=True)
            for copy in range(copies)
        ]


def read_prompts(
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Shaped[Tensor, "rows columns"] | None,
    pad: int | None,
    ends: tuple[int, ...],
) -> list[list[int]]:
    """Each prompt without its padding; raises ValueError for padding on the right."""
    if attention_mask is not None:
        mask = attention_mask.to(input_ids.device).bool()
    elif pad is None or pad in ends:
        mask = torch.ones_like(input_ids, dtype=torch.bool)
    else:
        mask = input_ids.ne(pad)  # as in transformers: without a mask, pad tokens are padding unless they end texts too
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask: shape {list(mask.shape)} given, {list(input_ids.shape)} is allowed")
    if not mask[:, -1:].all():
        raise ValueError("input_ids: a prompt ends with padding; pad on the left and mask the padding out")
    return [row[seen].tolist() for row, seen in zip(input_ids, mask, strict=True)]


def pad_right(rows: list[list[Any]], filler: int | float) -> Tensor:
    """The rows as one tensor, as wide as the longest of them."""
    longest = max(map(len, rows))
    return torch.tensor([row + [filler] * (longest - len(row)) for row in rows])

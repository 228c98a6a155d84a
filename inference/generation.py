"""Generation with the look of transformers' `generate`, over the loop of `inference.decode`.

A field of a GenerationConfig means here what it means there, and one that we do not implement is refused.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from heads.checkpoint import load_head
from heads.frozen import FrozenTarget
from heads.target_config import locate_target
from inference.decode import DecodeLoop
from inference.drafter import Drafter
from inference.drafters.build import build_drafter
from inference.generation_config import (
    DEFAULTS,
    Config,
    Settings,
    forbids_end,
    new_tokens,
    read_ends,
    read_seeds,
    read_settings,
    read_stop,
    whole,
    with_config,
)
from inference.request import DecodeStats, Generation, Request
from inference.sampling import Sampling, sampling_from_recipe
from inference.target.model import TargetModel
from recipes.schema import DecodeSection, TargetSection


@runtime_checkable  # the shape checks of the tests look at instances
class Streamer(Protocol):
    """transformers' BaseStreamer."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True)
class SpeculativeOutput:
    """What `generate` returns with return_dict_in_generate; `generations` are in the order of the rows."""

    sequences: Int[Tensor, "rows total"]  # prompts as they were given, new tokens, padding
    generations: list[Generation]
    stats: DecodeStats  # of all rows; seconds are the wall time of the call
    logprobs: Float[Tensor, "rows new"] | None  # as in Generation; 0 behind the end, so that a row sums to its text's


class SpeculativeModel:
    """A target and a drafter behind the look of transformers' `generate`."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None = None,
        tokenizer: Any = None,
        sampling: Sampling | None = None,
        max_batch: int = 16,
    ) -> None:
        """`tokenizer`, anything with `decode`, is for stop strings alone.

        `sampling` holds what a GenerationConfig has no word for: the seed, the rule of acceptance, OpenAI's penalties.
        """
        self.target, self.drafter, self.tokenizer, self.max_batch = target, drafter, tokenizer, max_batch
        self.sampling = sampling or Sampling()
        if with_config(self.sampling, DEFAULTS) != self.sampling:
            raise ValueError("sampling: temperature, truncation, repetition_penalty and logit_bias come with each call")

    @classmethod
    def from_folders(
        cls,
        target: str | Path,
        head: str | Path | None = None,
        decode: DecodeSection | None = None,
        tokenizer: Any = None,
        **section: Any,
    ) -> "SpeculativeModel":
        """Ready to use, from the folder of a target (or its hub name) and of a head that was trained for it.

        Without a head, `decode` names another drafter: a draft model, prompt lookup, lookahead, early exit.

        `section` holds fields of the recipe's target section: dtype (float32 if it is not given), device, attention.
        Of `decode`, calls keep the growth of drafts, their acceptance, the seed, OpenAI's penalties and the batch.
        """
        decode = decode or DecodeSection()
        fields = TargetSection(**{"path": str(target), "dtype": "float32", **section})
        if (head is None) == (decode.drafter == "head"):
            raise ValueError(f"head: {head} given with decode.drafter {decode.drafter}; one of the two drafts")
        if head is None:
            model = TargetModel.load(fields, ())
            drafter = build_drafter(decode, model, fields)
        else:
            # A head that does not fit is refused before the target is loaded.
            frozen = FrozenTarget.from_folder(locate_target(fields.path, fields.revision), torch.float32)
            model = TargetModel.load(fields, load_head(Path(head), frozen).taps)
            drafter = build_drafter(decode, model, fields, load_head(Path(head), model.frozen))
        said = sampling_from_recipe(decode, temperature=0.0)
        sampling = replace(said, top_k=None, top_p=1.0, min_p=0.0, repetition_penalty=1.0)  # these come with each call
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
        """The prompts with their continuations, padded on the right; prompts are padded on the left.

        Greedy output is the very tensor of transformers' `generate`. Sampled output depends on target, prompt and seed
        alone: of the prompt's num_return_sequences the i-th has seed + i, and `seed` may be a list, one per prompt.
        Raises ValueError naming every field that is not supported or has a value that is not allowed.
        """
        started = time.perf_counter()
        settings = self.settings(generation_config, overrides)
        requests = self.requests(input_ids, attention_mask, settings)
        assert input_ids is not None
        if streamer is not None and len(requests) > 1:
            raise ValueError(f"streamer: given for {len(requests)} texts, 1 is allowed")
        loop = DecodeLoop(self.target, requests, self.drafter, self.max_batch)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        for _, block in loop.run():
            if streamer is not None:
                for token in block:  # one by one: a text streamer looks for ends of words and lines after each
                    streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()

        rows = input_ids.repeat_interleave(len(requests) // len(input_ids), dim=0)
        # Without a pad token all texts are equally long.
        written = fill_right([found.tokens for found in loop.generations], settings["pad_token_id"] or 0)
        sequences = torch.cat([rows, written.to(rows.device)], dim=1)
        if not settings["return_dict_in_generate"]:
            return sequences
        stats = DecodeStats()
        for found in loop.generations:
            stats.add(found.stats)
        stats.seconds = time.perf_counter() - started
        logprobs = [found.logprobs for found in loop.generations if found.logprobs is not None]
        return SpeculativeOutput(sequences, loop.generations, stats, fill_right(logprobs, 0.0) if logprobs else None)

    def stream(
        self,
        input_ids: Int[Tensor, "1 seq"],
        *,
        attention_mask: Shaped[Tensor, "rows columns"] | None = None,
        generation_config: Config | None = None,
        **overrides: Any,
    ) -> Iterator[list[int]]:
        """Yield the new tokens of one text as they become certain, a block for each target step."""
        requests = self.requests(input_ids, attention_mask, self.settings(generation_config, overrides))
        if len(requests) > 1:
            raise ValueError(f"stream: asked for {len(requests)} texts, 1 is allowed")
        loop = DecodeLoop(self.target, requests, self.drafter)
        return (block for _, block in loop.run())

    def settings(self, config: Config | None, overrides: Settings) -> dict[str, Any]:
        """What a call means, by field; end tokens as a tuple, and a pad token if there is any."""
        settings = read_settings(config, overrides)
        ends = read_ends(settings, self.target.end_tokens, self.target.config.vocab_size)
        candidates = (settings["pad_token_id"], self.target.pad_token, *ends)
        pad = next((token for token in candidates if token is not None), None)
        return {**settings, "eos_token_id": ends, "pad_token_id": pad}

    def requests(self, input_ids: Tensor | None, attention_mask: Tensor | None, settings: Settings) -> list[Request]:
        """One for each row of the output."""
        if input_ids is None:
            raise ValueError("input_ids: missing; prompts are token ids of shape [batch, seq], inputs_embeds are not")
        if input_ids.ndim != 2 or not len(input_ids):
            raise ValueError(
                f"input_ids: shape {list(input_ids.shape)} given, [batch, seq] with a row or more is allowed"
            )
        ends, width = settings["eos_token_id"], input_ids.shape[1]
        prompts = read_prompts(input_ids, attention_mask, settings["pad_token_id"], ends)
        seeds = read_seeds(settings.get("seed"), self.sampling.seed, len(prompts))
        sampling, asked = with_config(self.sampling, settings), settings["num_return_sequences"]
        copies = 1 if asked is None else whole("num_return_sequences", asked)
        if copies < 1:
            raise ValueError(f"num_return_sequences: {copies} given, 1 or more is allowed")
        if copies > 1 and sampling.temperature == 0:
            raise ValueError(f"num_return_sequences: {copies} given, 1 is allowed without do_sample=True")
        limit = new_tokens(settings, width, self.target.max_positions)
        if forbids_end(settings, width, limit):
            sampling = replace(sampling, logit_bias=(*sampling.logit_bias, *((token, -torch.inf) for token in ends)))
        stop = read_stop(settings, settings.get("tokenizer") or self.tokenizer, self.target.config.vocab_size)
        if stop is not None and len(prompts) * copies > 1 and settings["pad_token_id"] is None:
            raise ValueError("pad_token_id: missing; texts of a batch that stop at strings end at different lengths")
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
    """The tokens that the mask lets through; ValueError for padding on the right."""
    if attention_mask is not None:
        mask = attention_mask.to(input_ids.device).bool()
    elif pad is None or pad in ends:
        mask = torch.ones_like(input_ids, dtype=torch.bool)
    else:
        mask = input_ids.ne(pad)  # as in transformers: padding shows by itself unless its token also ends texts
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask: shape {list(mask.shape)} given, {list(input_ids.shape)} is allowed")
    if not mask[:, -1:].all():
        raise ValueError("input_ids: a prompt ends with padding; pad on the left, and mask the padding out")
    return [row[seen].tolist() for row, seen in zip(input_ids, mask, strict=True)]


def fill_right(rows: list[list[Any]], filler: int | float) -> Tensor:
    """A matrix as wide as the longest row."""
    longest = max(map(len, rows))
    return torch.tensor([row + [filler] * (longest - len(row)) for row in rows])

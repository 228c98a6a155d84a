"""Answers in OpenAI's shapes, in one piece and in chunks."""

import time
from itertools import pairwise
from typing import Any
from uuid import uuid4

from headstart.inference.core.request import DecodeStats
from headstart.inference.core.verify import Accepted
from headstart.inference.serve.api.errors import ApiError
from headstart.inference.serve.api.fields import CompletionRequest
from headstart.inference.serve.api.output import Choice, Output, RequestProgress, TokenLogprob
from headstart.inference.show import TokenText
from headstart.inference.targets.tokenizer import Tokenizer, bytes_of, text_of

Json = dict[str, Any]


class Answer:
    """The common form of chat and text completions; subclasses shape a choice."""

    last = "data: [DONE]\n\n"  # the end of a stream

    prefix: str  # begins the id
    full_object: str
    chunk_object: str

    def __init__(
        self, progress: RequestProgress, model: str, fingerprint: str, tokenizer: Tokenizer, max_depth: int
    ) -> None:
        """`max_depth` is how many draft tokens a step may accept."""
        self.progress, self.fields = progress, progress.encoded.fields
        self.tokenizer, self.max_depth = tokenizer, max_depth
        self.base: Json = {
            "id": f"{self.prefix}-{uuid4().hex}",
            "object": self.chunk_object,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
            "seed": progress.encoded.seed,
        }

    def full(self) -> Json:
        """The answer in one piece."""
        choices = []
        for choice in self.progress.choices:
            choices.append({**self.shape(choice, choice.output, is_full=True), **ending(choice)})
            if self.fields.headstart.tokens:
                choices[-1]["headstart"] = {"tokens": as_json(choice.output.shown)}
        figures = {"usage": usage(self.progress), "metrics": metrics(self.progress, self.max_depth)}
        return {**self.base, "object": self.full_object, "choices": choices, **figures}

    def opening(self) -> list[Json]:
        """The chunks before the first token."""
        return []

    def chunks(self, choice: Choice, output: Output) -> list[Json]:
        """The chunks of a step: its text, then its finish reason; the usage comes last, if the request asks for it.

        All other chunks have a choice, as clients expect. The last chunk also has the metrics.
        """
        shows_tokens = self.fields.headstart.tokens
        chunks = []
        if output.shown or output.calls or output.logprobs or (shows_tokens and output.count):
            content = {**self.shape(choice, output), **ending(None)}
            if shows_tokens:
                shown: Json = {"tokens": as_json(output.shown), "count": output.count, "seconds": output.seconds}
                content["headstart"] = shown if output.tree is None else {**shown, "tree": self.tree(output.tree)}
            chunks.append(self.chunk(content))
        if choice.finish is not None:
            chunks.append(self.chunk({**self.shape(choice, Output()), **ending(choice)}))
        if self.progress.is_over:
            if self.fields.stream_options.with_usage:
                chunks.append({**self.base, "choices": [], "usage": usage(self.progress)})
            chunks[-1]["metrics"] = metrics(self.progress, self.max_depth)
        return chunks

    def failed(self, error: ApiError) -> Json:
        """The chunk that ends a stream in an error."""
        return error.body()

    def tree(self, tree: Accepted) -> Json:
        """A draft tree with the texts of its nodes, without padding."""
        nodes = [0, *(node for node, parent in enumerate(tree.parents) if node and parent >= 0)]
        number = {node: index for index, node in enumerate(nodes)}
        return {
            "texts": [text_of(self.tokenizer, [tree.nodes[node]]) for node in nodes],
            "parents": [-1, *(number[tree.parents[node]] for node in nodes[1:])],
            "path": [number[node] for node in tree.path],
        }

    def chunk(self, choice: Json) -> Json:
        options = self.fields.stream_options
        figures = usage(self.progress) if options.continuous_usage_stats else None
        return {**self.base, "choices": [choice], **({"usage": figures} if options.with_usage else {})}

    def spelled(self, token: int) -> str:
        """The text of one token, with replacement characters for parts of characters."""
        return bytes_of(self.tokenizer, token).decode(errors="replace")

    def shape(self, choice: Choice, output: Output, is_full: bool = False) -> Json:
        """A full choice, or what a step added to it."""
        raise NotImplementedError


class ChatAnswer(Answer):
    prefix, full_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[Json]:
        first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, **ending(None)}
        return [self.chunk({"index": choice.index, **first}) for choice in self.progress.choices]

    def shape(self, choice: Choice, output: Output, is_full: bool = False) -> Json:
        text, calls, logprobs = output.text, output.calls, self.logprobs(output)
        if is_full:
            content = text if text.strip() or not calls else None
            message: Json = {"role": "assistant", "content": content, "refusal": None}
            if calls:
                message["tool_calls"] = calls
            return {"index": choice.index, "message": message, "logprobs": logprobs}
        delta: Json = {"content": text} if text or logprobs else {}
        if calls:
            first = len(choice.output.calls) - len(calls)
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls, start=first)]
        return {"index": choice.index, "delta": delta, "logprobs": logprobs}

    def logprobs(self, output: Output) -> Json | None:
        content = [
            {**self.entry(each.token, each.logprob), "top_logprobs": [self.entry(*pair) for pair in each.alternatives]}
            for each in output.logprobs
        ]
        return {"content": content} if content else None

    def entry(self, token: int, logprob: float | None) -> Json:
        return {"token": self.spelled(token), "logprob": logprob, "bytes": [*bytes_of(self.tokenizer, token)]}


class CompletionAnswer(Answer):
    prefix, full_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def shape(self, choice: Choice, output: Output, is_full: bool = False) -> Json:
        wants_ids = isinstance(self.fields, CompletionRequest) and self.fields.return_token_ids
        ids = {"token_ids": choice.tokens} if is_full and wants_ids else {}
        return {"index": choice.index, "text": output.text, "logprobs": self.logprobs(output), **ids}

    def logprobs(self, output: Output) -> Json | None:
        if not output.logprobs:
            return None
        return {
            "tokens": [self.spelled(each.token) for each in output.logprobs],
            "token_logprobs": [each.logprob for each in output.logprobs],
            "top_logprobs": [self.top_logprobs(each) for each in output.logprobs],
            "text_offset": [each.offset for each in output.logprobs],
        }

    def top_logprobs(self, chosen: TokenLogprob) -> dict[str, float] | None:
        """Log-probabilities by text, of the likeliest tokens and of the chosen one; None for a prompt's first token.

        Of tokens with the same text, such as parts of characters, the likeliest counts.
        """
        if chosen.logprob is None:
            return None
        by_text: dict[str, float] = {}
        for token, logprob in (*chosen.alternatives, (chosen.token, chosen.logprob)):
            by_text.setdefault(self.spelled(token), logprob)
        return by_text


def ending(choice: Choice | None) -> Json:
    """Why a choice has ended; None: it has not ended."""
    if choice is None:
        return {"finish_reason": None, "stop_reason": None}
    return {"finish_reason": choice.finish, "stop_reason": choice.stop_reason}


def as_json(shown: list[TokenText]) -> list[Json]:
    return [{"text": each.text, "depth": each.depth} for each in shown]


def usage(progress: RequestProgress) -> Json:
    prompt, written = progress.num_prompt_tokens, progress.num_new_tokens
    first = progress.choices[:: progress.encoded.fields.n]  # each prompt counts once
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached for choice in first)},
    }


def metrics(progress: RequestProgress, max_depth: int) -> Json:
    """Times in seconds and, for a single choice, the figures of its drafts."""
    figures: Json = {**progress.seconds()}
    stats = progress.choices[0].stats
    if len(progress.choices) == 1 and stats is not None:
        figures["speculative_decoding"] = speculative(stats, max_depth) if stats.drafted else None
    return figures


def speculative(stats: DecodeStats, max_depth: int) -> Json:
    """vLLM's block of figures. Each node of a tree is a draft token; a path's depth is its length.

    Steps without drafts, such as those at a load where drafts do not pay, do not count.
    """
    reached = [stats.drafting_steps, *stats.accepted_at_depth, 0]
    accepted = sum(stats.accepted_at_depth)
    return {
        "mean_acceptance_length": 1 + accepted / stats.drafting_steps,
        "draft_acceptance_rate": accepted / stats.drafted,
        "acceptance_histogram": [more - less for more, less in pairwise(reached)],
        "num_spec_steps": stats.drafting_steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": max_depth,
    }

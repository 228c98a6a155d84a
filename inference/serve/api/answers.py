"""Answers in OpenAI's shapes, whole and in chunks."""

import time
from itertools import pairwise
from typing import Any
from uuid import uuid4

from headstart.inference.core.request import DecodeStats
from headstart.inference.core.verify import Accepted
from headstart.inference.serve.api.errors import ApiError
from headstart.inference.serve.api.fields import CompletionRequest
from headstart.inference.serve.api.output import Choice, Completion, Output, TokenLogprob
from headstart.inference.show import TokenText
from headstart.inference.targets.tokenizer import Tokenizer, bytes_of, text_of

Json = dict[str, Any]


class Answer:
    """The common form of chat and text completions; subclasses shape a choice."""

    last = "data: [DONE]\n\n"  # the end of a stream

    prefix: str  # begins the id
    whole_object: str
    chunk_object: str

    def __init__(
        self, completion: Completion, model: str, fingerprint: str, tokenizer: Tokenizer, max_depth: int
    ) -> None:
        """`max_depth` is how many draft tokens a step may accept."""
        self.completion, self.fields = completion, completion.encoded.fields
        self.tokenizer, self.max_depth = tokenizer, max_depth
        self.base: Json = {
            "id": f"{self.prefix}-{uuid4().hex}",
            "object": self.chunk_object,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
            "seed": completion.encoded.seed,
        }

    def whole(self) -> Json:
        """The answer in one piece."""
        choices = []
        for choice in self.completion.choices:
            choices.append({**self.shape(choice, choice.output, is_whole=True), **ending(choice)})
            if self.fields.headstart.tokens:
                choices[-1]["headstart"] = {"tokens": as_json(choice.output.shown)}
        own = {"usage": usage(self.completion), "metrics": metrics(self.completion, self.max_depth)}
        return {**self.base, "object": self.whole_object, "choices": choices, **own}

    def opening(self) -> list[Json]:
        """The chunks before the first token."""
        return []

    def chunks(self, choice: Choice, output: Output) -> list[Json]:
        """The chunks of a step: its text, then its finish reason; after the last one the usage, if it is asked for.

        Without it every chunk has a choice, as clients expect. The very last chunk also has the metrics.
        """
        shows_tokens = self.fields.headstart.tokens
        found = []
        if output.shown or output.calls or output.logprobs or (shows_tokens and output.count):
            content = {**self.shape(choice, output), **ending(None)}
            if shows_tokens:
                own: Json = {"tokens": as_json(output.shown), "count": output.count, "seconds": output.seconds}
                content["headstart"] = own if output.tree is None else {**own, "tree": self.tree(output.tree)}
            found.append(self.chunk(content))
        if choice.finish is not None:
            found.append(self.chunk({**self.shape(choice, Output()), **ending(choice)}))
        if self.completion.is_over:
            if self.fields.stream_options.with_usage:
                found.append({**self.base, "choices": [], "usage": usage(self.completion)})
            found[-1]["metrics"] = metrics(self.completion, self.max_depth)
        return found

    def failed(self, error: ApiError) -> Json:
        """The chunk that ends a stream in an error."""
        return error.body()

    def tree(self, tree: Accepted) -> Json:
        """A draft tree with the texts of its nodes, without padding."""
        kept = [0, *(node for node, parent in enumerate(tree.parents) if node and parent >= 0)]
        number = {node: place for place, node in enumerate(kept)}
        return {
            "texts": [text_of(self.tokenizer, [tree.nodes[node]]) for node in kept],
            "parents": [-1, *(number[tree.parents[node]] for node in kept[1:])],
            "path": [number[node] for node in tree.path],
        }

    def chunk(self, choice: Json) -> Json:
        found, options = {**self.base, "choices": [choice]}, self.fields.stream_options
        if options.with_usage:
            found["usage"] = usage(self.completion) if options.continuous_usage_stats else None
        return found

    def spelled(self, token: int) -> str:
        """The text of one token; in place of parts of characters it has replacement characters."""
        return bytes_of(self.tokenizer, token).decode(errors="replace")

    def shape(self, choice: Choice, output: Output, is_whole: bool = False) -> Json:
        """A whole choice, or what a step added to it."""
        raise NotImplementedError


class ChatAnswer(Answer):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[Json]:
        first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, **ending(None)}
        return [self.chunk({"index": choice.index, **first}) for choice in self.completion.choices]

    def shape(self, choice: Choice, output: Output, is_whole: bool = False) -> Json:
        text, calls, logprobs = output.text, output.calls, self.logprobs(output)
        if is_whole:
            content = text if text.strip() or not calls else None
            message: Json = {"role": "assistant", "content": content, "refusal": None}
            own = {"tool_calls": calls} if calls else {}
            return {"index": choice.index, "message": {**message, **own}, "logprobs": logprobs}
        delta: Json = {"content": text} if text or logprobs else {}
        if calls:
            first = len(choice.output.calls) - len(calls)
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls, start=first)]
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
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def shape(self, choice: Choice, output: Output, is_whole: bool = False) -> Json:
        wants_ids = isinstance(self.fields, CompletionRequest) and self.fields.return_token_ids
        ids = {"token_ids": choice.tokens} if is_whole and wants_ids else {}
        return {"index": choice.index, "text": output.text, "logprobs": self.logprobs(output), **ids}

    def logprobs(self, output: Output) -> Json | None:
        given = output.logprobs
        if not given:
            return None
        return {
            "tokens": [self.spelled(each.token) for each in given],
            "token_logprobs": [each.logprob for each in given],
            "top_logprobs": [self.top_logprobs(each) for each in given],
            "text_offset": [each.offset for each in given],
        }

    def top_logprobs(self, told: TokenLogprob) -> dict[str, float] | None:
        """Those of the likeliest tokens and of the token itself, by their texts; None if it has none.

        Of tokens that look alike, as parts of characters do, the likeliest counts.
        """
        if told.logprob is None:
            return None
        found: dict[str, float] = {}
        for token, logprob in (*told.alternatives, (told.token, told.logprob)):
            found.setdefault(self.spelled(token), logprob)
        return found


def ending(choice: Choice | None) -> Json:
    """Why a choice has ended; None: it has not."""
    if choice is None:
        return {"finish_reason": None, "stop_reason": None}
    return {"finish_reason": choice.finish, "stop_reason": choice.stop_reason}


def as_json(shown: list[TokenText]) -> list[Json]:
    return [{"text": each.text, "depth": each.depth} for each in shown]


def usage(completion: Completion) -> Json:
    prompt, written = completion.num_prompt_tokens, completion.num_new_tokens
    first = completion.choices[:: completion.encoded.fields.n]  # each prompt counts once
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached for choice in first)},
    }


def metrics(completion: Completion, max_depth: int) -> Json:
    """Times in seconds and, for a single choice, the figures of its drafts."""
    figures: Json = {**completion.seconds()}
    stats = completion.choices[0].stats
    if len(completion.choices) == 1 and stats is not None:
        figures["speculative_decoding"] = speculative(stats, max_depth) if stats.drafted else None
    return figures


def speculative(stats: DecodeStats, max_depth: int) -> Json:
    """vLLM's block of figures. Draft tokens are the nodes of trees, and the depth of a path counts as its length.

    Steps that had nothing to verify, such as those at a load where drafts do not pay, do not count.
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

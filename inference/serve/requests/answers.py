"""Answers in OpenAI's shapes, whole and in chunks."""

import time
from itertools import accumulate, pairwise
from typing import Any
from uuid import uuid4

from headstart.inference.core.request import DecodeStats, DraftTree
from headstart.inference.serve.exchange import Choice, Delta, Exchange, Times, TokenLogprob
from headstart.inference.serve.requests.reading import Wanted
from headstart.inference.show.text_stream import TokenText
from headstart.inference.targets.tokenizer import REPLACEMENT_CHARACTER, Tokenizer, text_of

Json = dict[str, Any]


class Answer:
    """What chat and text completions have in common; subclasses shape a choice."""

    prefix: str  # of the id
    whole_object: str
    chunk_object: str

    def __init__(self, wanted: Wanted, model: str, fingerprint: str, tokenizer: Tokenizer, most_depth: int) -> None:
        """`most_depth` is how many draft tokens a step may accept."""
        self.wanted, self.model, self.fingerprint = wanted, model, fingerprint
        self.tokenizer, self.most_depth = tokenizer, most_depth
        self.id = f"{self.prefix}-{uuid4().hex}"
        self.created = int(time.time())
        self.deltas: list[list[Delta]] = [[] for _ in wanted.requests]

    def take(self, delta: Delta) -> None:
        """Remember a delta for the whole answer."""
        self.deltas[delta.index].append(delta)

    def whole(self, exchange: Exchange) -> Json:
        """The answer in one piece."""
        choices = []
        for choice, deltas in zip(exchange.choices, self.deltas, strict=True):
            found = self.whole_choice(choice, deltas)
            if self.wanted.fields.headstart.tokens:
                found["headstart"] = {"tokens": as_json([shown for delta in deltas for shown in delta.shown])}
            choices.append(found)
        return {
            **self.base(self.whole_object),
            "choices": choices,
            "usage": usage(exchange),
            "metrics": metrics(exchange, self.most_depth),
        }

    def base(self, kind: str) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "seed": self.wanted.seed,
        }

    def chunks(self, delta: Delta, exchange: Exchange) -> list[Json]:
        """The chunks of a delta: its text, then its finish reason; after the last one the usage, if it is asked for.

        Without it every chunk has a choice, as clients expect. The very last chunk also has the metrics.
        """
        shows_tokens = self.wanted.fields.headstart.tokens
        contents: list[Json] = []
        if delta.shown or delta.calls or delta.logprobs or (shows_tokens and delta.count):
            contents.append(self.content(delta))
            if shows_tokens:
                own: Json = {"tokens": as_json(delta.shown), "count": delta.count, "seconds": delta.seconds}
                contents[-1]["headstart"] = own
                if delta.tree is not None:
                    own["tree"] = self.tree(delta.tree)
        if delta.finish is not None:
            contents.append(self.finish(exchange.choices[delta.index]))
        found = [self.chunk([content], exchange) for content in contents]
        if not exchange.left:
            if self.wanted.fields.stream_options.with_usage:
                found.append({**self.base(self.chunk_object), "choices": [], "usage": usage(exchange)})
            found[-1]["metrics"] = metrics(exchange, self.most_depth)
        return found

    def tree(self, tree: DraftTree) -> Json:
        """A draft tree with the texts of its nodes, without padding."""
        kept = [0, *(node for node, parent in enumerate(tree.parents) if node and parent >= 0)]
        number = {node: place for place, node in enumerate(kept)}
        return {
            "texts": [text_of(self.tokenizer, [tree.tokens[node]]) for node in kept],
            "parents": [-1, *(number[tree.parents[node]] for node in kept[1:])],
            "path": [number[node] for node in tree.path],
        }

    def chunk(self, choices: list[Json], exchange: Exchange) -> Json:
        found, options = {**self.base(self.chunk_object), "choices": choices}, self.wanted.fields.stream_options
        if options.with_usage:
            found["usage"] = usage(exchange) if options.continuous_usage_stats else None
        return found

    def opening(self, index: int, exchange: Exchange) -> list[Json]:
        """The chunks before a choice's first token."""
        raise NotImplementedError

    def whole_choice(self, choice: Choice, deltas: list[Delta]) -> Json:
        raise NotImplementedError

    def content(self, delta: Delta) -> Json:
        raise NotImplementedError

    def finish(self, choice: Choice) -> Json:
        raise NotImplementedError


class ChatAnswer(Answer):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int, exchange: Exchange) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [self.chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], exchange)]

    def whole_choice(self, choice: Choice, deltas: list[Delta]) -> Json:
        text, calls = "".join(delta.text for delta in deltas), [call for delta in deltas for call in delta.calls]
        message: Json = {"role": "assistant", "content": text if text.strip() or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = [call.as_json() for call in calls]
        logprobs = self.logprobs([each for delta in deltas for each in delta.logprobs])
        return {"index": choice.job.index, "message": message, "logprobs": logprobs, **ending(choice)}

    def content(self, delta: Delta) -> Json:
        found: Json = {"content": delta.text} if delta.text or not delta.calls else {}
        if delta.calls:
            first = sum(len(earlier.calls) for earlier in self.deltas[delta.index])
            self.take(delta)
            found["tool_calls"] = [
                {"index": place, **call.as_json()} for place, call in enumerate(delta.calls, start=first)
            ]
        logprobs = self.logprobs(delta.logprobs)
        return {"index": delta.index, "delta": found, "logprobs": logprobs, "finish_reason": None}

    def finish(self, choice: Choice) -> Json:
        return {"index": choice.job.index, "delta": {}, "logprobs": None, **ending(choice)}

    def logprobs(self, given: list[TokenLogprob]) -> Json | None:
        if not self.wanted.logprobs:
            return None
        content = [
            {**self.entry(each.token, each.logprob), "top_logprobs": [self.entry(*pair) for pair in each.alternatives]}
            for each in given
        ]
        return {"content": content}

    def entry(self, token: int, logprob: float) -> Json:
        text = text_of(self.tokenizer, [token])
        known = REPLACEMENT_CHARACTER not in text  # else the token is part of a character
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if known else None}


class CompletionAnswer(Answer):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, wanted: Wanted, model: str, fingerprint: str, tokenizer: Tokenizer, most_depth: int) -> None:
        super().__init__(wanted, model, fingerprint, tokenizer, most_depth)
        self.offsets = [0] * len(wanted.requests)  # characters of each choice's tokens whose logprobs were given

    def opening(self, index: int, exchange: Exchange) -> list[Json]:
        echo = self.echo(index)
        return [self.chunk([self.shape(index, echo, [])], exchange)] if echo else []

    def whole_choice(self, choice: Choice, deltas: list[Delta]) -> Json:
        text = self.echo(choice.job.index) + "".join(delta.text for delta in deltas)
        return self.shape(choice.job.index, text, [each for delta in deltas for each in delta.logprobs], choice)

    def content(self, delta: Delta) -> Json:
        return self.shape(delta.index, delta.text, delta.logprobs)

    def finish(self, choice: Choice) -> Json:
        return self.shape(choice.job.index, "", [], choice)

    def echo(self, index: int) -> str:
        return self.wanted.echo[index // self.wanted.fields.n]

    def shape(self, index: int, text: str, given: list[TokenLogprob], ended: Choice | None = None) -> Json:
        return {"index": index, "text": text, "logprobs": self.logprobs(index, given), **ending(ended)}

    def logprobs(self, index: int, given: list[TokenLogprob]) -> Json | None:
        """Offsets count the characters of the tokens' own texts, also of those whose text is held back.

        Of alternatives that look alike, as parts of characters do, the likeliest one counts.
        """
        if not self.wanted.logprobs or not given:
            return None
        texts = [text_of(self.tokenizer, [each.token]) for each in given]
        *offsets, self.offsets[index] = accumulate(map(len, texts), initial=self.offsets[index])
        return {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in given],
            "top_logprobs": [
                {text_of(self.tokenizer, [token]): logprob for token, logprob in reversed(each.alternatives)}
                for each in given
            ],
            "text_offset": offsets,
        }


def ending(choice: Choice | None) -> Json:
    if choice is None:
        return {"finish_reason": None, "stop_reason": None}
    return {"finish_reason": choice.finish, "stop_reason": choice.stop_reason}


def as_json(shown: list[TokenText]) -> list[Json]:
    return [{"text": each.text, "depth": each.depth} for each in shown]


def usage(exchange: Exchange) -> Json:
    """Tokens that were read and written; each prompt counts once, whatever the number of its choices."""
    prompt = sum(map(len, exchange.wanted.prompts))
    written = sum(len(choice.tokens) for choice in exchange.choices)
    first = exchange.choices[:: exchange.wanted.fields.n]  # the others of a prompt read it once more
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached for choice in first)},
    }


def metrics(exchange: Exchange, most_depth: int) -> Json:
    """Times in seconds and, for a single choice, what drafting achieved."""
    found: Json = seconds(exchange.times)
    stats = exchange.choices[0].stats
    if len(exchange.choices) == 1 and stats is not None:
        found["speculative_decoding"] = speculative(stats, most_depth) if stats.drafted else None
    return found


def seconds(times: Times) -> Json:
    """How long the request waited, was read and was decoded; null for what did not happen."""
    spans = {
        "queue_seconds": (times.submitted, times.read),
        "prefill_seconds": (times.read, times.first),
        "decode_seconds": (times.first, times.last),
        "time_to_first_token_seconds": (times.submitted, times.first),
    }
    return {
        name: None if start is None or end is None else max(end - start, 0.0) for name, (start, end) in spans.items()
    }


def speculative(stats: DecodeStats, most_depth: int) -> Json:
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
        "num_spec_tokens": most_depth,
    }

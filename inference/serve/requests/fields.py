"""Reads the fields of a chat or completion request into what the engine decodes and how the answer is written."""

import re
import secrets
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from headstart.inference.core.constraint import Constraint
from headstart.inference.core.request import Detokenize, Request, StopStrings
from headstart.inference.core.sampling import Sampling, check_bias
from headstart.inference.engine.checks import check_length
from headstart.inference.serve.constraints.grammar import Grammars
from headstart.inference.serve.constraints.least_tokens import LeastTokens
from headstart.inference.serve.errors import ApiError, wrong
from headstart.inference.serve.requests.body import Body
from headstart.inference.serve.requests.prompts import PromptReader, prompts_of, read_tools
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import text_of, visible_text_of

MOST_CHOICES = 128
MOST_STOPS, LONGEST_STOP = 64, 1000
MOST_ALTERNATIVES = 20
RANDOM_SEEDS = 2**53 - 2**8  # a client that counts in doubles, as JavaScript does, can send the seed back


@dataclass(frozen=True)
class Wanted:
    """A request as it was read. Its choices are those of the first prompt, then of the next."""

    prompts: list[list[int]]
    requests: list[Request]  # one for each choice
    copies: int  # choices per prompt
    seed: int  # of the first choice of each prompt; the next ones count on
    text: Detokenize
    stops: tuple[str, ...]
    include_stop: bool
    stop_tokens: frozenset[int]  # those of the request, not the target's own
    echo: list[str]  # the text before each prompt's choices; empty texts unless the request asks for it
    stream: bool
    include_usage: bool
    continuous_usage: bool
    logprobs: bool
    tools: bool  # look for tool calls
    show_tokens: bool  # the extension of the chat page: each token's text and draft depth


class FieldReader:
    """Reads requests for one target."""

    def __init__(self, target: TargetModel, prompts: PromptReader, defaults: Sampling, most_choices: int) -> None:
        """`defaults` are the sampling parameters of a request that names none; it may ask for so many choices."""
        self.target, self.prompts, self.defaults, self.most_choices = target, prompts, defaults, most_choices
        self.known_grammars: Grammars | None = None

    def chat(self, body: Body) -> Wanted:
        """A body of /v1/chat/completions."""
        if body.take("messages") is None:
            raise ApiError(
                400, "messages: missing; a list of messages is needed; write [{role: user, content: ...}]", "messages"
            )
        tools, choice = read_tools(body.take("tools")), body.take("tool_choice")
        if choice not in (None, "auto", "none"):
            raise wrong("tool_choice", choice, "auto or none is", "leave it out for auto")
        tools = [] if choice == "none" else tools
        tokens = self.prompts.from_chat(body, tools)
        logprobs = body.flag("logprobs")
        alternatives = body.integer("top_logprobs", 0, 0, MOST_ALTERNATIVES)
        if alternatives and not logprobs:
            raise wrong("top_logprobs", alternatives, "0 is, as logprobs is not true,", "set logprobs to true")
        most, copies = self.length(body, "max_completion_tokens", "max_tokens"), self.copies(body, 1)
        return self.wanted(body, [tokens], copies, [""], most, logprobs, alternatives, bool(tools))

    def completion(self, body: Body) -> Wanted:
        """A body of /v1/completions."""
        if body.take("prompt") is None:
            raise ApiError(400, "prompt: missing; a text or a list of token ids is needed; write one", "prompt")
        given = prompts_of(body.take("prompt"))
        copies, special = self.copies(body, len(given)), body.flag("add_special_tokens", default=True)
        prompts = [self.prompts.from_prompt(each, special) for each in given]
        alternatives = body.integer("logprobs", None, 0, MOST_ALTERNATIVES)
        echo = body.flag("echo")
        if echo and alternatives is not None:
            raise wrong("echo", True, "false is, as logprobs of a prompt are not computed,", "leave one of the two out")
        text = partial(visible_text_of, self.prompts.tokenizer)
        before = [text(prompt) if echo else "" for prompt in prompts]
        most = self.length(body, "max_tokens")
        logprobs = alternatives is not None
        return self.wanted(body, prompts, copies, before, most, logprobs, alternatives or 0, tools=False)

    def copies(self, body: Body, prompts: int) -> int:
        """The choices per prompt; raises ApiError, before any work is done, if there are too many in all."""
        copies: int = body.integer("n", 1, 1, MOST_CHOICES)
        if prompts * copies > self.most_choices:
            name = "n" if copies > 1 else "prompt"
            raise ApiError(
                400,
                f"{name}: {prompts * copies} choices asked for, at most {self.most_choices} are allowed (--max-batch "
                f"and --max-queue); ask for fewer",
                name,
            )
        return copies

    def length(self, body: Body, *names: str) -> tuple[str, int | None]:
        """The longest answer, with the name of the field that says so; None for all the room that is left."""
        given = [(name, body.integer(name, None, 1)) for name in names]
        return next(((name, most) for name, most in given if most is not None), (names[-1], None))

    def wanted(
        self,
        body: Body,
        prompts: list[list[int]],
        copies: int,
        echo: list[str],
        most: tuple[str, int | None],
        logprobs: bool,
        alternatives: int,
        tools: bool,
    ) -> Wanted:
        """Read what both kinds of request have in common."""
        stops, include_stop = read_stops(body.take("stop")), body.flag("include_stop_str_in_output")
        decoder = visible_text_of if body.flag("skip_special_tokens", default=True) else text_of
        text: Detokenize = partial(decoder, self.prompts.tokenizer)
        stop_tokens = frozenset(self.stop_tokens(body))
        ends = () if body.flag("ignore_eos") else tuple(self.target.end_tokens)
        sampling = self.sampling(body)
        seed = body.integer("seed", None, -(2**63), 2**63 - copies)
        seed = secrets.randbelow(RANDOM_SEEDS) if seed is None else seed
        least, grammar = body.integer("min_tokens", 0, 0), self.grammar(body)
        if grammar is not None and not ends:
            raise wrong("ignore_eos", True, "false is, as a format says itself where a text may end,", "leave it out")
        if least and grammar is not None:
            raise wrong("min_tokens", least, "0 is, as a format says itself where a text may end,", "leave it out")
        speculative, priority = body.flag("speculative", default=True), body.integer("priority", 0, -(2**31), 2**31)
        stream, options = body.flag("stream"), Body(body.mapping("stream_options"))
        usage, always = options.flag("include_usage"), options.flag("continuous_usage_stats")
        options.refuse_rest()
        extension = Body(body.mapping("headstart"))
        tokens, trees = extension.flag("tokens"), extension.flag("trees")
        extension.refuse_rest()
        body.take("model")
        body.refuse_rest()
        all_ends = (*ends, *sorted(stop_tokens))
        constraint = LeastTokens(least, all_ends, self.target.config.vocab_size) if least and all_ends else grammar
        try:
            check_bias(sampling.logit_bias, self.target.config.vocab_size)
        except ValueError as error:
            raise ApiError(400, str(error), "logit_bias") from None
        requests = []
        for prompt in prompts:
            limit = self.room(prompt, *most)
            if least > limit:
                raise wrong("min_tokens", least, f"at most the {limit} tokens of the longest answer are", "lower it")
            stop = StopStrings(stops, text) if stops else None
            requests += [
                Request(
                    prompt,
                    limit,
                    replace(sampling, seed=seed + copy),
                    stop,
                    logprobs,
                    all_ends,
                    priority,
                    alternatives=alternatives,
                    show_trees=trees,
                    constraint=constraint,
                    speculative=speculative,
                )
                for copy in range(copies)
            ]
        return Wanted(
            prompts=prompts,
            requests=requests,
            copies=copies,
            seed=seed,
            text=text,
            stops=stops,
            include_stop=include_stop,
            stop_tokens=stop_tokens,
            echo=echo,
            stream=stream,
            include_usage=usage or always,
            continuous_usage=always,
            logprobs=logprobs,
            tools=tools,
            show_tokens=tokens,
        )

    def sampling(self, body: Body) -> Sampling:
        """The sampling parameters without seed; Sampling checks them once more."""
        own = self.defaults
        top_k = body.integer("top_k", own.top_k, -1)
        return replace(
            own,
            temperature=at_least_a_trace(body.number("temperature", own.temperature, 0, 100)),
            top_k=None if top_k in (None, 0, -1) else top_k,
            top_p=body.number("top_p", own.top_p, 0, 1, above=True),
            min_p=body.number("min_p", own.min_p, 0, 1),
            repetition_penalty=body.number("repetition_penalty", own.repetition_penalty, 0, 100, above=True),
            presence_penalty=body.number("presence_penalty", own.presence_penalty, -2, 2),
            frequency_penalty=body.number("frequency_penalty", own.frequency_penalty, -2, 2),
            logit_bias=self.read_bias(body.mapping("logit_bias")),
        )

    def read_bias(self, given: dict[str, Any]) -> tuple[tuple[int, float], ...]:
        """Token ids come as strings, since JSON has no other keys."""
        found, last = [], self.target.config.vocab_size - 1
        for key, value in given.items():
            if not key.isascii() or not key.isdigit() or len(key) > 10 or int(key) > last:
                raise wrong("logit_bias", key, f"token ids 0 to {last} are", "leave it out")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not -100 <= value <= 100:
                raise wrong("logit_bias", value, f"-100 to 100 for token {key} is", "correct it or leave it out")
            found.append((int(key), float(value)))
        return tuple(found)

    def stop_tokens(self, body: Body) -> list[int]:
        given = body.take("stop_token_ids")
        if given is None:
            return []
        if not isinstance(given, list) or not all(type(each) is int for each in given) or len(given) > 1000:
            raise wrong("stop_token_ids", given, "a list of at most 1000 token ids is", "correct it or leave it out")
        self.prompts.check_tokens("stop_token_ids", given)
        return given

    def room(self, prompt: list[int], field: str, most: int | None) -> int:
        """How many new tokens a prompt gets; raises ApiError for one that does not fit the context."""
        left = self.target.max_positions - len(prompt)
        try:
            check_length(self.target, prompt, max(left, 1) if most is None else most, field)
        except ValueError as error:
            raise ApiError(400, str(error), field) from None
        return left if most is None else most

    def grammar(self, body: Body) -> Constraint | None:
        """What the text must look like: response_format as OpenAI has it, structured_outputs as vLLM has it."""
        format_, wanted = Body(body.mapping("response_format")), Body(body.mapping("structured_outputs"))
        kind = format_.text("type", "text", ("text", "json_object", "json_schema"))
        schema = Body(format_.mapping("json_schema"))
        for name in ("name", "description", "strict"):
            schema.take(name)
        json, regex, choice = wanted.take("json"), wanted.text("regex"), wanted.take("choice")
        own = schema.take("schema")
        for inner in (format_, schema, wanted):
            inner.refuse_rest()
        json = own if kind == "json_schema" else json
        given = [each for each in (json, regex, choice) if each is not None]
        if len(given) + (kind == "json_object") > 1:
            raise wrong("structured_outputs", list(wanted.values), "one format is", "leave the others out")
        if kind == "json_schema" and json is None:
            missing = "response_format.json_schema.schema: missing; a JSON schema is needed; write one"
            raise ApiError(400, missing, "response_format")
        return self._grammar(kind, json, regex, choice)

    def _grammar(self, kind: str, json: Any, regex: str | None, choice: Any) -> Constraint | None:
        if choice is not None:
            if not isinstance(choice, list) or not choice or not all(isinstance(each, str) and each for each in choice):
                raise wrong("structured_outputs.choice", choice, "a list of texts is", "write one or more")
            regex = "|".join(re.escape(each) for each in choice)
        if kind != "json_object" and json is None and regex is None:
            return None
        param = "structured_outputs" if kind == "text" else "response_format"
        try:
            if self.known_grammars is None:
                ends = [token for token in self.target.end_tokens if token < self.target.config.vocab_size]
                self.known_grammars = Grammars(self.prompts.tokenizer, self.target.config.vocab_size, ends)
            if regex is not None:
                return self.known_grammars.regex(regex, f"{param}.regex")
            if json is None:
                return self.known_grammars.json_object()
            return self.known_grammars.json_schema(
                json, f"{param}.json_schema.schema" if kind != "text" else f"{param}.json"
            )
        except ValueError as error:
            raise ApiError(400, str(error), param) from None


def read_stops(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    strings = [given] if isinstance(given, str) else given
    allowed = f"a text, or a list of at most {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters, is"
    if not isinstance(strings, list) or len(strings) > MOST_STOPS:
        shown = f"{len(strings)} strings" if isinstance(strings, list) else strings
        raise wrong("stop", shown, allowed, "give fewer")
    for each in strings:
        if not isinstance(each, str) or not 0 < len(each) <= LONGEST_STOP:
            raise wrong("stop", each, allowed, "correct it or leave it out")
    return tuple(strings)


def at_least_a_trace(temperature: float) -> float:
    """Of temperatures so small that logits would overflow, all choose the likeliest token."""
    return 0.0 if temperature < 1e-8 else temperature

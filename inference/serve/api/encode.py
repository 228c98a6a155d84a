"""Turns the fields of requests into requests for the decode loop: prompts, sampling, and the form of the text."""

import json
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from headstart.inference.core.constraint import Constraint
from headstart.inference.core.request import Detokenize, Images, Request, StopStrings
from headstart.inference.core.sampling import Sampling, check_bias
from headstart.inference.engine.budget import check_length
from headstart.inference.generate.defaults import TargetDefaults
from headstart.inference.images.pictures import Sources, read_pictures
from headstart.inference.images.prompts import ImagePrompts
from headstart.inference.serve.api.constraints import Grammars
from headstart.inference.serve.api.errors import ApiError, wrong
from headstart.inference.serve.api.fields import (
    ChatRequest,
    CompletionRequest,
    Message,
    NamedTool,
    Templated,
    TextRequest,
    TokenizeRequest,
    refuse_unknown,
)
from headstart.inference.targets.chat_template import FIELDS, ChatTemplate, read_message, unread_fields
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import spells_special_token, text_of, visible_text_of
from headstart.recipes.sampling import SamplingFields

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
UNSEEN_TOOLS = (
    "a request has tools, which the target's chat template does not write, so the target does not see them; "
    "a tool_choice that forces a call still applies"
)
SAMPLING = SamplingFields.model_fields.keys() - {"seed"}
RANDOM_SEEDS = 2**53 - 2**8  # a client that counts in doubles, as JavaScript does, can send the seed back


class PromptEncoder:
    """Encodes prompts for one target. Several threads may use it at once."""

    def __init__(
        self,
        template: ChatTemplate,
        vocab_size: int,
        max_positions: int,
        log: Callable[[str], None] = print,
        images: ImagePrompts | str = "the target reads text alone",
        image_hosts: frozenset[str] = frozenset(),
    ) -> None:
        """`images` says how to encode pictures or why they are refused, `image_hosts` from where they are fetched."""
        self.images = None if isinstance(images, str) else images
        self.sources = Sources(hosts=image_hosts, refused=images if isinstance(images, str) else None)
        self.template, self.tokenizer, self.log = template, template.tokenizer, log
        self.vocab_size, self.max_positions = vocab_size, max_positions
        self.said: set[str] = set()  # warnings
        self.longest_text = max_positions * max(map(len, self.tokenizer.get_vocab()), default=1)  # in characters

    def tokenize(self, fields: TokenizeRequest) -> list[int]:
        if "messages" in fields.model_fields_set:
            return self.chat(fields)[0]
        if fields.prompt is None:
            raise ApiError(400, "prompt: missing; a text, or messages instead, is needed; write one", "prompt")
        return self.from_text(fields.prompt, "prompt", fields.add_special_tokens is not False)

    def chat(self, fields: Templated) -> tuple[list[int], Images | None]:
        """Apply the target's chat template; raises ApiError for messages that the template refuses, and ValueError for
        pictures that cannot be read."""
        messages, variables, continued = fields.messages, fields.variables, fields.continue_final_message
        if not messages:
            given = messages if "messages" in fields.model_fields_set else None
            raise wrong("messages", given, "a list of at least one message is", "write [{role: user, content: ...}]")
        if not self.template.exists:
            no_template = "this target has no chat template, plain prompts are allowed; use /v1/completions"
            raise ApiError(400, f"messages: {no_template}")
        if taken := self.template.reserved(variables):
            raise wrong("chat_template_kwargs", taken, "variables of the template itself are", "leave it out")
        opens_answer = not continued if fields.add_generation_prompt is None else fields.add_generation_prompt
        turns = [turn(f"messages[{index}]", message) for index, message in enumerate(messages)]
        turns, pictures = read_pictures(turns, self.sources)
        tools = None if fields.tool_choice == "none" else fields.tools or None
        images = self.images if pictures else None
        if images is not None:
            if fields.add_special_tokens:
                raise wrong("add_special_tokens", True, "with pictures, only false is", "leave it out")
            images.refuse_marks(turns, tools)
        template = self.template if images is None else images.template
        try:
            if tools and not template.writes_tools:
                self.say_once(UNSEEN_TOOLS)
            text = template.render(turns, tools, opens_answer, continued, variables)
            # What is too long is blamed on the tools where the messages alone are not.
            is_long = tools is not None and len(text) > self.longest_text
            alone = template.render(turns, None, opens_answer, continued, variables) if is_long else text
        except Exception as error:  # a template is a program, which may raise anything
            if str(error).startswith("chat_template_kwargs."):
                raise
            refused = f"messages: the target's chat template refuses them ({' '.join(str(error).split())[:160]})"
            remedy = "messages that it can render are allowed; change their roles or their order"
            raise ApiError(400, f"{refused}; {remedy}", "messages") from None
        name = "messages" if len(alone) > self.longest_text or not is_long else "tools"
        if images is None or len(text) > self.longest_text:
            return self.from_text(text, name, bool(fields.add_special_tokens)), None
        encoded = images.encode_text(text, pictures)
        return encoded.prompt(self.vocab_size), encoded

    def say_once(self, warning: str) -> None:
        if warning not in self.said:
            self.said.add(warning)
            self.log(json.dumps({"warning": warning}))

    def from_text(self, text: str, name: str, special: bool = True) -> list[int]:
        """The tokens of a text; `special` adds those that the tokenizer puts around every text, unless it has them."""
        if len(text) > self.longest_text:
            given = f"{len(text)} characters given, more than {self.max_positions} tokens can hold (the context length)"
            raise ApiError(400, f"{name}: {given}; at most {self.longest_text} are allowed; shorten it", name)
        return self.template.encode_text(text) if special else self.template.encode(text)

    def from_prompt(self, prompt: str | list[int], special: bool) -> list[int]:
        """One prompt of a completion; `special` as in `from_text`."""
        tokens = self.from_text(prompt, "prompt", special) if isinstance(prompt, str) else prompt
        self.check_tokens("prompt", tokens)
        if not tokens:
            raise wrong("prompt", prompt, "at least one token is", "write a prompt that is not empty")
        return tokens

    def check_tokens(self, name: str, tokens: list[int]) -> None:
        """Raise ApiError for an id outside the target's vocabulary."""
        if outside := next((token for token in tokens if not 0 <= token < self.vocab_size), None):
            allowed = f"token ids 0 to {self.vocab_size - 1} are"
            raise wrong(name, outside, allowed, "encode it with the target's tokenizer")


def turn(name: str, message: Message) -> dict[str, Any]:
    """A message as templates take it; `name` is its path in the request."""
    given = {**vars(message), **(message.model_extra or {})}
    content = message.content if message.content is not None or not message.tool_calls else ""
    if content is None:
        raise wrong(f"{name}.content", None, "a text, or a list of parts with a type, is", "write it in quotes")
    if unread := unread_fields(given):
        refuse_unknown(unread[0], given[unread[0]], FIELDS, name)
    parts = (
        content if isinstance(content, str) else [{"type": each.type, **(each.model_extra or {})} for each in content]
    )
    try:
        return read_message({**given, "content": parts})
    except ValueError as error:
        raise ApiError(400, f"{name}.{error}", f"{name}.{str(error).partition(':')[0]}") from None


@dataclass(frozen=True)
class ToolCalls:
    """The tool calls that an answer may hold."""

    schemas: dict[str, Any] = field(default_factory=dict)  # of the arguments, by the tools' names
    is_forced: bool = False  # the answer is a call
    is_named: bool = False  # the request names the tool
    only_one: bool = False


@dataclass(frozen=True)
class Encoded:
    """A request for the decode loop. Its choices are in the order of its prompts."""

    fields: ChatRequest | CompletionRequest
    prompts: list[list[int]]
    requests: list[Request]  # one for each choice
    seed: int  # for the first choice of each prompt; further choices count up from it
    text: Detokenize
    calls: ToolCalls
    echoes: list[str] | None  # the prompts' texts, if they come first in the answers
    original: Any = None  # the fields of another API that were turned into these


class RequestEncoder:
    """Encodes requests for one target; raises ApiError, or ValueError beginning with the field, for a wrong field."""

    def __init__(self, target: TargetModel, prompts: PromptEncoder, defaults: TargetDefaults, max_choices: int) -> None:
        """A request may ask for `max_choices` choices."""
        self.target, self.prompts, self.defaults, self.max_choices = target, prompts, defaults, max_choices
        self.vocab_size = target.config.vocab_size
        with suppress(ValueError):  # for a tokenizer that cannot be used, which a request for a format is told
            _ = self.grammars  # before the first request, because this holds the interpreter's lock for seconds

    def encode(self, fields: ChatRequest | CompletionRequest) -> Encoded:
        images = None
        if isinstance(fields, ChatRequest):
            prompt, images = self.chat(fields)
            prompts, alternatives = [prompt], fields.top_logprobs if fields.logprobs else None
        else:
            prompts, alternatives = self.completion(fields), fields.logprobs
        self.prompts.check_tokens("stop_token_ids", fields.stop_token_ids)
        tokenizer = self.prompts.tokenizer
        text = partial(visible_text_of if fields.skip_special_tokens else text_of, tokenizer)
        stops = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
        searches_all = any(spells_special_token(tokenizer, stop) for stop in stops)
        stop = StopStrings(stops, partial(text_of, tokenizer) if searches_all else text) if stops else None
        ends = (*(() if fields.ignore_eos else self.target.end_tokens), *sorted({*fields.stop_token_ids}))
        seed = secrets.randbelow(RANDOM_SEEDS) if fields.seed is None else fields.seed
        if seed + fields.n > 2**63:
            allowed = f"at most 2^63 - {fields.n} is, because the n = {fields.n} choices count up from it,"
            raise wrong("seed", seed, allowed, "lower it")
        calls = self.tool_calls(fields)
        sampling, grammar = self.sampling(fields), self.form(fields, calls)
        min_tokens = fields.min_tokens if "min_tokens" in fields.model_fields_set else None
        lengths = [self.max_new_tokens(prompt, fields) for prompt in prompts]
        requests = [
            Request(
                prompt,
                length,
                replace(sampling, seed=seed + copy),
                stop,
                alternatives is not None,
                ends,
                fields.priority,
                alternatives=alternatives or 0,
                show_trees=fields.headstart.trees,
                constraint=self.defaults.rules(prompt, length, ends, min_tokens, grammar),
                speculative=fields.speculative,
                prompt_logprobs=isinstance(fields, CompletionRequest) and fields.echo and alternatives is not None,
                images=images,
            )
            for prompt, length in zip(prompts, lengths, strict=True)
            for copy in range(fields.n)
        ]
        echoes = [text(each) for each in prompts] if isinstance(fields, CompletionRequest) and fields.echo else None
        return Encoded(fields, prompts, requests, seed, text, calls, echoes)

    def chat(self, fields: ChatRequest) -> tuple[list[int], Images | None]:
        if fields.top_logprobs and not fields.logprobs:
            allowed = "without logprobs true, only 0 is"
            raise wrong("top_logprobs", fields.top_logprobs, allowed, "set logprobs to true")
        self.check_choices(1, fields.n)
        return self.prompts.chat(fields)

    def completion(self, fields: CompletionRequest) -> list[list[int]]:
        if fields.return_token_ids and fields.stream:
            raise wrong("return_token_ids", True, "with stream true, only false is", "leave one of the two out")
        if fields.max_tokens == 0 and not fields.echo:
            raise wrong("max_tokens", 0, "a whole number of at least 1, or 0 with echo, is", "raise it")
        prompt: Any = fields.prompt
        is_one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
        prompts = [prompt] if is_one else prompt
        self.check_choices(len(prompts), fields.n)
        return [self.prompts.from_prompt(each, fields.add_special_tokens) for each in prompts]

    def check_choices(self, prompts: int, copies: int) -> None:
        """Raise ApiError if a request asks for too many choices, before its prompts are encoded."""
        if prompts * copies > self.max_choices:
            name = "n" if copies > 1 else "prompt"
            allowed = f"at most {self.max_choices} are allowed (--max-batch and --max-queue)"
            raise ApiError(400, f"{name}: {prompts * copies} choices requested, {allowed}; request fewer", name)

    def sampling(self, fields: TextRequest) -> Sampling:
        """The sampling fields without the seed; the target's own for fields that the request leaves out."""
        bias = tuple(self.bias(token, value) for token, value in fields.logit_bias.items())
        check_bias(bias, self.vocab_size)
        defaults, chosen = self.defaults.sampling, fields.model_dump(include=SAMPLING, exclude_none=True)
        return replace(defaults, **chosen, logit_bias=(*defaults.logit_bias, *bias))

    def bias(self, token: str, value: Any) -> tuple[int, float]:
        """Token ids come as strings, because JSON has no other keys."""
        last = self.vocab_size - 1
        if not token.isascii() or not token.isdigit() or len(token) > 10 or int(token) > last:
            raise wrong("logit_bias", token, f"token ids 0 to {last} are", "leave it out")
        if type(value) not in (int, float) or not -100 <= value <= 100:
            raise wrong("logit_bias", value, f"-100 to 100 for token {token} is", "correct it or leave it out")
        return int(token), float(value)

    def max_new_tokens(self, prompt: list[int], fields: ChatRequest | CompletionRequest) -> int:
        """The longest answer to a prompt; raises ValueError if it does not fit the context."""
        name, requested = "max_tokens", fields.max_tokens
        if isinstance(fields, ChatRequest) and fields.max_completion_tokens is not None:
            name, requested = "max_completion_tokens", fields.max_completion_tokens
        left = self.target.max_positions - len(prompt)
        check_length(self.target, prompt, max(left if requested is None else requested, 1), name)
        limit = self.defaults.length(len(prompt), left) if requested is None else requested
        if fields.min_tokens > limit:
            allowed = f"at most the {limit} tokens of the longest answer are"
            raise wrong("min_tokens", fields.min_tokens, allowed, "lower it")
        return max(limit, 1)  # for a limit of 0 the decode loop still writes a token, which is not shown

    def tool_calls(self, fields: TextRequest) -> ToolCalls:
        if not isinstance(fields, ChatRequest) or fields.tool_choice == "none":
            return ToolCalls()
        choice, functions = fields.tool_choice, [tool["function"] for tool in fields.tools]
        parameters = {each["name"]: each.get("parameters") for each in functions}
        schemas = {name: NO_ARGUMENTS if schema is None else schema for name, schema in parameters.items()}
        if choice != "auto" and not schemas:
            raise wrong("tool_choice", choice, "without tools, auto or none is", "give tools")
        if not isinstance(choice, NamedTool):
            return ToolCalls(schemas, choice == "required", only_one=not fields.parallel_tool_calls)
        if (name := choice.function.name) not in schemas:
            raise wrong("tool_choice", name, f"{', '.join(schemas)} is", "name one of the tools")
        return ToolCalls({name: schemas[name]}, is_forced=True, is_named=True, only_one=True)

    def form(self, fields: TextRequest, calls: ToolCalls) -> Constraint | None:
        """The form of the text. The target's own minimum length applies with a form, the request's does not."""
        grammar = self.grammar(fields, calls)
        for name, value, off in (("ignore_eos", fields.ignore_eos, "false"), ("min_tokens", fields.min_tokens, "0")):
            if grammar is not None and value:
                because = "with a format, which says itself where a text may end,"
                raise wrong(name, value, f"{because} only {off} is", "leave it out")
        return grammar

    def grammar(self, fields: TextRequest, calls: ToolCalls) -> Constraint | None:
        format_, outputs = fields.response_format, fields.structured_outputs
        values = {"json": outputs.json_, "regex": outputs.regex, "choice": outputs.choice}
        given = [name for name, value in values.items() if value not in (None, [])]
        if len(given) + (format_.type != "text") > 1:
            raise wrong("structured_outputs", given, "one format is", "leave the others out")
        if given and calls.is_forced:
            allowed = "with a tool_choice that forces a call, none is"
            raise wrong("structured_outputs", given, allowed, "leave one of the two out")
        name = "response_format.json_schema.schema"
        if format_.type == "json_schema" and format_.json_schema.schema_ is None:
            raise ApiError(400, f"{name}: missing; a JSON schema is needed; write one", "response_format")
        schema = format_.json_schema.schema_ if format_.type == "json_schema" else {"type": "object"}
        is_json = format_.type != "text"
        content = self.grammars.json_schema(schema, name) if is_json else None
        if calls.is_forced or (calls.schemas and is_json):  # the format applies to answers without calls
            otherwise = schema if is_json and not calls.is_forced else None
            return self.grammars.tool_calls(calls.schemas, calls.only_one, otherwise)
        if content is not None:
            return content
        if outputs.json_ is not None:
            return self.grammars.json_schema(outputs.json_, "structured_outputs.json")
        regex = "|".join(map(re.escape, outputs.choice)) if outputs.choice else outputs.regex
        return None if regex is None else self.grammars.regex(regex, f"structured_outputs.{given[0]}")

    @cached_property
    def grammars(self) -> Grammars:
        ends = [token for token in self.target.end_tokens if token < self.vocab_size]
        return Grammars(self.prompts.tokenizer, self.vocab_size, ends)

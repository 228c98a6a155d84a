"""Turns messages and prompts of requests into the target's tokens."""

import json
from typing import Any

from headstart.inference.serve.errors import ApiError, wrong
from headstart.inference.serve.requests.fields import Message, Templated, TokenizeRequest, has_function, well_formed
from headstart.inference.targets.chat_template import ChatTemplate


class PromptReader:
    """Encodes prompts for one target. Safe to use from one thread at a time."""

    def __init__(self, template: ChatTemplate, vocab_size: int, max_positions: int) -> None:
        self.template, self.tokenizer = template, template.tokenizer
        self.vocab_size, self.max_positions = vocab_size, max_positions
        self.longest_token = max(map(len, self.tokenizer.get_vocab()), default=1)

    def tokenize(self, fields: TokenizeRequest) -> list[int]:
        if fields.messages is not None:
            return self.from_chat(fields)
        if fields.prompt is None:
            raise ApiError(400, "prompt: missing; a text, or messages in its place, is needed; write one", "prompt")
        return self.from_text(fields.prompt, "prompt", fields.add_special_tokens is not False)

    def from_chat(self, fields: Templated) -> list[int]:
        """The conversation through the target's chat template; raises ApiError for what the template refuses."""
        messages, variables, continued = fields.messages, fields.chat_template_kwargs, fields.continue_final_message
        if not messages:
            raise wrong("messages", messages, "a list of at least one message is", "write [{role: user, content: ...}]")
        if not self.template.exists:
            no_template = "this target has no chat template, plain prompts are allowed; use /v1/completions"
            raise ApiError(400, f"messages: {no_template}")
        if taken := self.template.reserved(variables):
            raise wrong("chat_template_kwargs", taken, "names of the template's own variables are", "leave it out")
        opens_answer = not continued if fields.add_generation_prompt is None else fields.add_generation_prompt
        turns = [turn(f"messages[{place}]", message) for place, message in enumerate(messages)]
        try:
            tools = None if fields.tool_choice == "none" else fields.tools or None
            text = self.template.render(turns, tools, opens_answer, continued, variables)
        except Exception as error:  # a template is a program of its own, and raises whatever it likes
            refused = f"messages: the target's chat template refuses them ({' '.join(str(error).split())[:160]})"
            remedy = "messages that it can render are allowed; change their roles or their order"
            raise ApiError(400, f"{refused}; {remedy}", "messages") from None
        return self.from_text(text, "messages", bool(fields.add_special_tokens))

    def from_text(self, text: str, name: str, special: bool = True) -> list[int]:
        """The tokens of a text; `special` adds those that the tokenizer puts around every text."""
        longest = self.max_positions * self.longest_token
        if len(text) > longest:
            given = f"{len(text)} characters given, more than {self.max_positions} tokens can hold (the context length)"
            raise ApiError(400, f"{name}: {given}; at most {longest} are allowed; shorten it", name)
        return list(self.tokenizer(well_formed(text), add_special_tokens=special, verbose=False)["input_ids"])

    def from_prompt(self, given: str | list[int], special: bool) -> list[int]:
        """One prompt of a completion; `special` is that of `from_text`."""
        tokens = self.from_text(given, "prompt", special) if isinstance(given, str) else given
        self.check_tokens("prompt", tokens)
        if not tokens:
            raise wrong("prompt", given, "at least one token is", "write a prompt that is not empty")
        return tokens

    def check_tokens(self, name: str, tokens: list[int]) -> None:
        """Raise ApiError for an id that is no token of the target."""
        if outside := next((token for token in tokens if not 0 <= token < self.vocab_size), None):
            allowed = f"token ids 0 to {self.vocab_size - 1} are"
            raise wrong(name, outside, allowed, "encode it with the target's tokenizer")


def turn(name: str, message: Message) -> dict[str, Any]:
    """A message as templates take it; `name` is its place in the request."""
    found = message.model_dump(exclude_none=True)
    content = found.get("content", "" if message.tool_calls else None)
    if content is None:
        raise wrong(f"{name}.content", None, "a text, or a list of parts of type text, is", "write it in quotes")
    found["content"] = content if isinstance(content, str) else "".join(part["text"] for part in content)
    if not found.pop("tool_calls", []):
        return found
    return {**found, "tool_calls": read_calls(f"{name}.tool_calls", message.tool_calls or [])}


def read_calls(name: str, given: list[Any]) -> list[Any]:
    """Earlier tool calls with their arguments as objects, as templates expect them, and the client's order of keys."""
    found = []
    for place, call in enumerate(given):
        if not has_function(call):
            raise wrong(f"{name}[{place}]", call, "an object with function.name is", "give back the server's call")
        arguments = call["function"].get("arguments", {})
        try:
            read = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            field = f"{name}[{place}].function.arguments"
            raise wrong(field, arguments, "a JSON object in a string is", "correct it") from None
        found.append({**call, "function": {**call["function"], "arguments": read}})
    return found

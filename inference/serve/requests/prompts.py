"""Turns messages and prompts of requests into the target's tokens."""

import json
from typing import Any

from headstart.inference.serve.errors import ApiError, wrong
from headstart.inference.serve.requests.body import Body, well_formed
from headstart.inference.targets.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
CONTENT = "a text, or a list of parts of type text, is"
# Arguments of `apply_chat_template` that a template's own variables must not replace.
RESERVED = frozenset({
    "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
    "return_assistant_tokens_mask", "messages",
})  # fmt: skip
Message = dict[str, Any]


class PromptReader:
    """Encodes prompts for one target. Safe to use from one thread at a time."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_positions: int) -> None:
        self.tokenizer, self.vocab_size, self.max_positions = tokenizer, vocab_size, max_positions
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)

    @property
    def has_template(self) -> bool:
        return self.tokenizer.chat_template is not None

    def from_chat(self, body: Body, tools: list[Any]) -> list[int]:
        """The conversation through the target's chat template; raises ApiError for what the template refuses."""
        messages, variables = read_messages(body.take("messages")), body.mapping("chat_template_kwargs")
        continued, special = body.flag("continue_final_message"), body.flag("add_special_tokens")
        if not self.has_template:
            raise ApiError(
                400, "messages: this target has no chat template, plain prompts are allowed; use /v1/completions"
            )
        if taken := sorted(RESERVED & variables.keys()):
            raise wrong("chat_template_kwargs", taken[0], "names of the template's own variables are", "leave it out")
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                add_generation_prompt=body.flag("add_generation_prompt", default=not continued),
                continue_final_message=continued,
                tokenize=False,
                **variables,
            )
        except Exception as error:  # a template is a program of its own, and raises whatever it likes
            said = " ".join(str(error).split())[:160]
            raise ApiError(
                400,
                f"messages: the target's chat template refuses them ({said}); messages that it can render are allowed; "
                f"change their roles or their order",
                "messages",
            ) from None
        return self.from_text(str(text), "messages", special)

    def from_text(self, text: str, name: str, special: bool = True) -> list[int]:
        """The tokens of a text; `special` adds those that the tokenizer puts around every text."""
        longest = self.max_positions * self.longest_token
        if len(text) > longest:
            raise ApiError(
                400,
                f"{name}: {len(text)} characters given, more than {self.max_positions} tokens can hold (the context "
                f"length); at most {longest} are allowed; shorten it",
                name,
            )
        return list(self.tokenizer(well_formed(text), add_special_tokens=special, verbose=False)["input_ids"])

    def from_prompt(self, given: Any, special: bool) -> list[int]:
        """One prompt of a completion, a text or a list of token ids; `special` is that of `from_text`."""
        if isinstance(given, str):
            tokens = self.from_text(given, "prompt", special)
        elif isinstance(given, list) and all(type(each) is int for each in given):
            tokens = given
            self.check_tokens("prompt", tokens)
        else:
            allowed = "a text, a list of texts, a list of token ids or a list of such lists is"
            raise wrong("prompt", given, allowed, "write one of them")
        if not tokens:
            raise wrong("prompt", given, "at least one token is", "write a prompt that is not empty")
        return tokens

    def check_tokens(self, name: str, tokens: list[int]) -> None:
        """Raise ApiError for an id that is no token of the target."""
        if outside := next((token for token in tokens if not 0 <= token < self.vocab_size), None):
            raise wrong(
                name, outside, f"token ids 0 to {self.vocab_size - 1} are", "encode it with the target's tokenizer"
            )


def prompts_of(given: Any) -> list[Any]:
    """The prompts of a completion: a text, a list of texts, a list of token ids or a list of such lists."""
    several = isinstance(given, list) and bool(given) and all(isinstance(each, str | list) for each in given)
    return given if several else [given]


def read_messages(given: Any) -> list[Message]:
    """The messages of a chat as templates take them; raises ApiError naming the first one that is wrong."""
    if not isinstance(given, list) or not given:
        raise wrong("messages", given, "a list of at least one message is", "write [{role: user, content: ...}]")
    return [read_message(f"messages[{place}]", each) for place, each in enumerate(given)]


def read_message(name: str, given: Any) -> Message:
    if not isinstance(given, dict):
        raise wrong(name, given, "an object with role and content is", "write it in braces")
    role = given.get("role")
    if role not in ROLES:
        raise wrong(f"{name}.role", role, f"{', '.join(ROLES)} are", "choose one of them")
    found: Message = {"role": "system" if role == "developer" else role}
    calls = given.get("tool_calls")
    if given.get("content") is not None or not calls:
        found["content"] = read_content(f"{name}.content", given.get("content"))
    else:
        found["content"] = ""
    if calls:
        found["tool_calls"] = read_calls(f"{name}.tool_calls", calls)
    for extra in ("name", "tool_call_id", "reasoning_content"):
        if given.get(extra) is not None:
            if not isinstance(given[extra], str):
                raise wrong(f"{name}.{extra}", given[extra], "a text is", "write it in quotes")
            found[extra] = well_formed(given[extra])
    return found


def read_content(name: str, given: Any) -> str:
    if isinstance(given, str):
        return well_formed(given)
    if not isinstance(given, list):
        raise wrong(name, given, CONTENT, "write it in quotes")
    parts = []
    for place, part in enumerate(given):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            shown = part.get("type") if isinstance(part, dict) else part
            raise wrong(f"{name}[{place}]", shown, CONTENT, "leave other parts out: the target reads text alone")
        parts.append(well_formed(part["text"]))
    return "".join(parts)


def read_calls(name: str, given: Any) -> list[Message]:
    """Earlier tool calls, with their arguments as objects, as templates expect them."""
    if not isinstance(given, list):
        raise wrong(name, given, "a list of calls is", "give back what the server answered")
    found = []
    for place, call in enumerate(given):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong(f"{name}[{place}]", call, "an object with function.name is", "give back the server's call")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise wrong(
                    f"{name}[{place}].function.arguments", arguments, "a JSON object in a string is", "correct it"
                ) from None
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


def read_tools(given: Any) -> list[Any]:
    """The tools of a chat; raises ApiError for one that is no function."""
    if given is None:
        return []
    if not isinstance(given, list):
        raise wrong("tools", given, "a list of functions is", "write [{type: function, function: {name: ...}}]")
    for place, tool in enumerate(given):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong(f"tools[{place}]", tool, "an object of type function with a name is", "correct it")
    return given

"""Constraints for the output of requests: JSON schemas and regular expressions.

llguidance compiles no automaton in advance, computes a mask in about 0.1 ms, can take tokens back, and needs only the
tokenizer. xgrammar does the same, but brings compiled code for torch.
"""

import json
from typing import Any

import numpy
import torch
from jaxtyping import Bool
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from headstart.inference.core.constraint import Path
from headstart.inference.serve.api.text import CLOSE, OPEN
from headstart.inference.targets.tokenizer import FastTokenizer, Tokenizer

# One line, as most models write JSON. With free white space a text could consist of nothing else.
LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Keywords that may allow properties other than those in `properties`.
OPEN_KEYWORDS = {"additionalProperties", "unevaluatedProperties", "patternProperties", "anyOf", "oneOf", "$ref", "if"}
LIBRARY_MESSAGE_MAX = 200  # characters
FORCED_TOKENS_CHECKED = 16  # at the start of a text, where the grammar leaves no choice
GRAMMAR_MAX = 120_000  # characters; a mask of a longer grammar can delay all rows by a tenth of a second


class Grammars:
    """Makes constraints for one target's tokens. Constructing this takes seconds, making a constraint milliseconds."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: list[int]) -> None:
        """Raise ValueError for a tokenizer that llguidance cannot use."""
        if not end_tokens:
            raise ValueError("end_tokens: none given, 1 or more are allowed, so that a grammar can end its text")
        if not isinstance(tokenizer, FastTokenizer):
            allowed = "only fast ones of the tokenizers library are allowed"
            remedy = "leave the constraint out, or use such a tokenizer"
            raise ValueError(f"the tokenizer {type(tokenizer).__name__} cannot constrain output, {allowed}; {remedy}")
        rust = tokenizer.backend_tokenizer  # a copy of it, as llguidance.hf makes, takes seconds for a large vocabulary
        rust.no_padding()  # transformers sets both again for each call
        rust.no_truncation()
        self.tokens = LLTokenizer(rust.to_str(), n_vocab=vocab_size, eos_token=end_tokens)
        self.end_tokens, self.vocab_size = frozenset(end_tokens), vocab_size
        special = [token for token in range(vocab_size) if self.tokens.is_special_token(token)]
        self.no_text = torch.tensor([*{*special, *end_tokens}])

    def json_schema(self, schema: Any, name: str = "schema") -> "Grammar":
        """JSON in one line that this schema allows. Raises ValueError, beginning with `name`."""
        if not isinstance(schema, dict):
            raise ValueError(f"{name}: a {type(schema).__name__} given, a JSON object is allowed; correct it")
        try:
            source = LLMatcher.grammar_from_json_schema(short(json.dumps(schema), name), defaults=LAYOUT)
        except (RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{name}: {one_line(error)}; a JSON schema is allowed: correct it") from error
        return self._checked(source, name, "a JSON schema whose keywords are supported")

    def regex(self, pattern: str, name: str = "regex") -> "Grammar":
        """Text that fully matches a regular expression. Raises ValueError, beginning with `name`."""
        return self._checked(
            LLMatcher.grammar_from_regex(short(pattern, name)), name, "a regular expression without look-around"
        )

    def tool_calls(self, tools: dict[str, Any], only_one: bool, content: Any = None) -> "Grammar":
        """Calls that `ToolCallParser` reads; `tools` has the schema of each tool's arguments by its name.

        `content`: instead of calls the text may be JSON that this schema allows. Raises ValueError for an unusable
        schema.
        """
        newline, rules, names = r'"\n"?', [], []  # optional, because models differ
        for number, (name, schema) in enumerate(tools.items()):
            self.json_schema(schema, f"tools: parameters of {name}")
            begin = json.dumps(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', ensure_ascii=False)
            names.append(f"tool{number}")
            # With allOf, each part lists only some of the properties.
            arguments = {**(schema if '"allOf"' in json.dumps(schema) else closed(schema)), "type": "object"}
            rules += [f'tool{number}: {begin} arguments{number} "}}"', f"arguments{number}: {inlined(arguments)}"]
            short("".join(rules), "tools")
        rules.append(f'call: "{OPEN}" {newline} ({" | ".join(names)}) {newline} "{CLOSE}"')
        rules.append("calls: call" if only_one else f"calls: call ({newline} call)*")
        rules += ["start: calls"] if content is None else ["start: calls | content", f"content: {inlined(content)}"]
        return self._checked(LLMatcher.grammar_from_lark("\n".join(rules)), "tools", "a list of tools")

    def _checked(self, source: str, name: str, allowed: str) -> "Grammar":
        if error := LLMatcher.validate_grammar(short(source, name), self.tokens):
            raise ValueError(f"{name}: {one_line(error)}; {allowed} is allowed: correct it")
        grammar = Grammar(self, source)
        state = grammar.start()
        for _ in range(FORCED_TOKENS_CHECKED):
            (tokens,) = state.allowed(()).numpy().nonzero()  # torch takes ten times as long
            if len(tokens) > 1:
                break
            if len(tokens) == 0 or not state.advance(int(tokens[0])):
                reason = one_line(state.matcher.get_error().partition("\n")[0])
                wrong = f"{name}: no text fits, or it is too complex ({reason})"
                raise ValueError(f"{wrong}; {allowed} is allowed: correct it")
        return grammar


class Grammar:
    """A formal language; a text may end only when it belongs to the language."""

    def __init__(self, grammars: Grammars, source: str) -> None:
        self.grammars, self.source = grammars, source
        self.matcher = self.new_matcher()

    def new_matcher(self) -> LLMatcher:
        return LLMatcher(self.grammars.tokens, self.source, log_level=0)  # its warnings quote the text

    def start(self) -> "GrammarState":
        return GrammarState(self.grammars, self)


class GrammarState:
    def __init__(self, grammars: Grammars, grammar: Grammar) -> None:
        self.grammars, self.grammar = grammars, grammar
        self.matcher = grammar.matcher.deep_copy()
        self.taken: list[int] = []  # tokens of the text, without its end
        self.is_renewed = False
        self.has_ended = False

    def allowed(self, path: Path) -> Bool[Tensor, " vocab"]:
        ends, mask = self.grammars.end_tokens, torch.zeros(self.grammars.vocab_size, dtype=torch.bool)
        if self.has_ended or ends & {*path}:
            mask[[*ends]] = True
            return mask
        if path and self.is_renewed:
            return mask
        taken = self.matcher.try_consume_tokens([*path])
        bits = numpy.frombuffer(self.matcher.compute_bitmask(), dtype=numpy.uint8)
        if self.matcher.is_error():
            return self.allowed(path) if self._renew() else mask
        assert taken == len(path), "the path is not allowed"
        mask = torch.from_numpy(numpy.unpackbits(bits, bitorder="little")[: len(mask)].view(bool))
        may_end = self.matcher.is_accepting()
        mask[self.grammars.no_text] = False  # the library would allow a special token where its spelling is allowed
        mask[[*ends]] = may_end  # an end token may also spell ordinary text, but it always ends the output
        if not mask.numpy().any() and (forced := self.matcher.compute_ff_bytes()):
            mask[self.grammars.tokens.greedy_tokenize(forced.decode(errors="ignore"))[0]] = True
        if path:
            self.matcher.rollback(len(path))
        return mask

    def _renew(self) -> bool:
        """Replace the matcher after an error, which is final; returns whether this is the first time.

        Drafts, and other texts of the request, count towards the library's limits. They must not end a text that would
        continue without them, so after the first error the text continues without drafts.
        """
        if self.is_renewed:
            return False
        self.is_renewed, self.matcher = True, self.grammar.new_matcher()
        self.matcher.consume_tokens(self.taken)
        return True

    def advance(self, token: int) -> bool:
        if token in self.grammars.end_tokens:
            self.has_ended = True
            return True
        if self.matcher.consume_token(token) or (self._renew() and self.matcher.consume_token(token)):
            self.taken.append(token)
            return True
        return False  # beyond the library's limits


def short(source: str, name: str) -> str:
    """The text of a grammar, or of a part of one; raises ValueError, beginning with `name`, if it is too long."""
    if len(source) > GRAMMAR_MAX:
        raise ValueError(f"{name}: {len(source)} characters given, at most {GRAMMAR_MAX} are allowed; shorten it")
    return source


def inlined(schema: Any) -> str:
    """A JSON schema within a grammar of calls."""
    return f"%json {json.dumps({'x-guidance': LAYOUT, **schema})}"


def closed(schema: Any) -> Any:
    """The schema of a tool's arguments, closed to properties that it does not list unless it allows others.

    Clients leave out `additionalProperties`, and then a small model keeps inventing arguments and never stops.
    """
    if not isinstance(schema, dict):
        return schema
    result = {**schema}
    for key in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(key), dict):
            result[key] = {name: closed(each) for name, each in schema[key].items()}
    if "items" in schema:
        result["items"] = closed(schema["items"])
    if "properties" not in schema:
        either = [key for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
        result |= {key: [closed(each) for each in schema[key]] for key in either}
    elif not OPEN_KEYWORDS & schema.keys():
        result["additionalProperties"] = False
    return result


def one_line(error: object) -> str:
    """A message of the library, shortened to one line."""
    return " ".join(str(error).split())[:LIBRARY_MESSAGE_MAX]

"""Constraints for the output of requests: JSON schemas and regular expressions.

llguidance compiles no automaton ahead, computes the mask of a state in about 0.1 ms, takes tokens back, and needs
nothing but the tokenizer; xgrammar, which does the same, brings compiled code for torch.
"""

import json
from typing import Any

import numpy
import torch
from jaxtyping import Bool
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from torch import Tensor

from headstart.inference.core.constraint import Path
from headstart.inference.serve.api.text import CLOSE, OPEN
from headstart.inference.targets.tokenizer import FastTokenizer, Tokenizer

# One line, as most models write JSON. With free white space a text could go on for ever without getting anywhere.
LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Keywords beside `properties` that say or may say which others an object has.
OTHERS = {"additionalProperties", "unevaluatedProperties", "patternProperties", "anyOf", "oneOf", "$ref", "if"}
SHOWN = 200  # characters of a message of the library
FORCED = 16  # tokens that a text is followed for while the grammar leaves no choice, before any is written
LONGEST = 120_000  # characters of a grammar; a mask of one with more can take a tenth of a second, for all rows


class Grammars:
    """Makes constraints for texts in the tokens of one target. Making this takes seconds, a constraint milliseconds."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: list[int]) -> None:
        """Raise ValueError for a tokenizer that cannot be used."""
        if not end_tokens:
            raise ValueError("end_tokens: none given, 1 or more are allowed, as a grammar must be able to end its text")
        if not isinstance(tokenizer, FastTokenizer):
            allowed = "only fast ones of the tokenizers library are allowed"
            remedy = "leave the constraint out, or use such a tokenizer"
            raise ValueError(f"the tokenizer {type(tokenizer).__name__} cannot constrain output, {allowed}; {remedy}")
        self.tokens = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=end_tokens)
        self.end_tokens, self.vocab_size = frozenset(end_tokens), vocab_size
        special = [token for token in range(vocab_size) if self.tokens.is_special_token(token)]
        self.no_text = torch.tensor([*{*special, *end_tokens}])

    def json_schema(self, schema: Any, name: str = "schema") -> "Grammar":
        """JSON in one line that this schema allows. Raises ValueError, beginning with `name`, for one of no use."""
        if not isinstance(schema, dict):
            raise ValueError(f"{name}: a {type(schema).__name__} given, a JSON object is allowed; correct it")
        try:
            source = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=LAYOUT)
        except (RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{name}: {one_line(error)}; a JSON schema is allowed: correct it") from error
        return self._checked(source, name, "a JSON schema whose keywords are supported")

    def regex(self, pattern: str, name: str = "regex") -> "Grammar":
        """Text that matches this regular expression as a whole. Raises ValueError, beginning with `name`."""
        return self._checked(LLMatcher.grammar_from_regex(pattern), name, "a regular expression without look-around")

    def tool_calls(self, tools: dict[str, Any], only_one: bool, content: Any = None) -> "Grammar":
        """Calls of tools, given by name with the schemas of their arguments, as `ToolCallParser` reads them.

        `content`: in place of calls the text may be JSON that this schema allows. Raises ValueError for a schema of no
        use.
        """
        newline, rules, names = r'"\n"?', [], []  # the model writes it or not, as it has learned
        for number, (name, schema) in enumerate(tools.items()):
            self.json_schema(schema, f"tools: parameters of {name}")
            begin = json.dumps(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', ensure_ascii=False)
            names.append(f"tool{number}")
            # The parts of an allOf list some of the properties each.
            arguments = {"type": "object", **(schema if '"allOf"' in json.dumps(schema) else closed(schema))}
            rules += [f'tool{number}: {begin} arguments{number} "}}"', f"arguments{number}: {inlined(arguments)}"]
        rules.append(f'call: "{OPEN}" {newline} ({" | ".join(names)}) {newline} "{CLOSE}"')
        rules.append("calls: call" if only_one else f"calls: call ({newline} call)*")
        rules += ["start: calls"] if content is None else ["start: calls | content", f"content: {inlined(content)}"]
        return self._checked(LLMatcher.grammar_from_lark("\n".join(rules)), "tools", "a list of tools")

    def _checked(self, source: str, name: str, allowed: str) -> "Grammar":
        if len(source) > LONGEST:
            raise ValueError(f"{name}: {len(source)} characters given, at most {LONGEST} are allowed; shorten it")
        if error := LLMatcher.validate_grammar(source, self.tokens):
            raise ValueError(f"{name}: {one_line(error)}; {allowed} is allowed: correct it")
        grammar = Grammar(self, source)
        state = grammar.start()
        for _ in range(FORCED):
            ways = state.allowed(()).nonzero().flatten().tolist()
            if len(ways) > 1:
                break
            if not ways or not state.advance(ways):
                reason = one_line(state.matcher.get_error().partition("\n")[0])
                raise ValueError(
                    f"{name}: no text fits, or it is too complex ({reason}); {allowed} is allowed: correct it"
                )
        return grammar


class Grammar:
    """The texts of one language; a text may end only as a whole one of them."""

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
        self.known: dict[Path, Tensor] = {}  # masks after the present text: a level's drafts and their target ask alike

    def allowed(self, path: Path) -> Bool[Tensor, " vocab"]:
        if path not in self.known:
            self.known[path] = self._mask(path)
        return self.known[path]

    def _mask(self, path: Path) -> Bool[Tensor, " vocab"]:
        ends, mask = self.grammars.end_tokens, torch.zeros(self.grammars.vocab_size, dtype=torch.bool)
        if self.has_ended or ends & {*path}:
            mask[[*ends]] = True
            return mask
        if path and self.is_renewed:
            return mask
        taken = self.matcher.try_consume_tokens([*path])
        bits = numpy.frombuffer(self.matcher.compute_bitmask(), dtype=numpy.uint8)
        if self.matcher.is_error():
            return self._mask(path) if self._renew() else mask
        assert taken == len(path), "the path is not allowed"
        mask = torch.from_numpy(numpy.unpackbits(bits, bitorder="little")[: len(mask)].astype(bool))
        may_end = self.matcher.is_accepting()
        mask[self.grammars.no_text] = False  # the library would have a special token for the text that spells it
        mask[[*ends]] = may_end  # an end token may also be ordinary text, which would end the output all the same
        if not mask.any() and (forced := self.matcher.compute_ff_bytes()):
            mask[self.grammars.tokens.greedy_tokenize(forced.decode(errors="ignore"))[0]] = True
        if path:
            self.matcher.rollback(len(path))
        return mask

    def _renew(self) -> bool:
        """Begin anew after an error of the matcher, which is final; returns whether this is the first time.

        Drafts, and other texts of one request, count towards the library's limits. They must not end a text that would
        go on without them, so after the first error it goes on without drafts.
        """
        if self.is_renewed:
            return False
        self.is_renewed, self.matcher = True, self.grammar.new_matcher()
        self.matcher.consume_tokens(self.taken)
        return True

    def advance(self, tokens: list[int]) -> int:
        for count, token in enumerate(tokens):
            if not bool(self.allowed(())[token]):
                return count
            if token in self.grammars.end_tokens:
                self.has_ended = True
            elif self.matcher.consume_token(token) or (self._renew() and self.matcher.consume_token(token)):
                self.taken.append(token)
            else:  # beyond the library's limits
                return count
            self.known.clear()
        return len(tokens)


def inlined(schema: Any) -> str:
    """A JSON schema within a grammar of calls."""
    return f"%json {json.dumps({'x-guidance': LAYOUT, **schema})}"


def closed(schema: Any) -> Any:
    """The schema of a tool's arguments without properties that it does not list, unless it says that there are others.

    Clients leave out `additionalProperties`, and a small model that may invent arguments goes on for ever.
    """
    if not isinstance(schema, dict):
        return schema
    found = {**schema}
    for key in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(key), dict):
            found[key] = {name: closed(each) for name, each in schema[key].items()}
    if "items" in schema:
        found["items"] = closed(schema["items"])
    if "properties" not in schema:
        either = [key for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
        found |= {key: [closed(each) for each in schema[key]] for key in either}
    elif not OTHERS & schema.keys():
        found["additionalProperties"] = False
    return found


def one_line(error: object) -> str:
    """A message of the library in one line, not longer than a line should be."""
    return " ".join(str(error).split())[:SHOWN]

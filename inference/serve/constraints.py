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
from headstart.inference.targets.tokenizer import FastTokenizer, Tokenizer

# One line, as most models write JSON. With free white space a text could go on for ever without getting anywhere.
LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
SHOWN = 200  # characters of a message of the library


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

    def _checked(self, source: str, name: str, allowed: str) -> "Grammar":
        if error := LLMatcher.validate_grammar(source, self.tokens):
            raise ValueError(f"{name}: {one_line(error)}; {allowed} is allowed: correct it")
        return Grammar(self, source)


class Grammar:
    """The texts of one language; a text may end only as a whole one of them."""

    def __init__(self, grammars: Grammars, source: str) -> None:
        self.grammars, self.matcher = grammars, LLMatcher(grammars.tokens, source)

    def start(self) -> "GrammarState":
        return GrammarState(self.grammars, self.matcher.deep_copy())


class GrammarState:
    def __init__(self, grammars: Grammars, matcher: LLMatcher) -> None:
        self.grammars, self.matcher = grammars, matcher
        self.has_ended = False
        self.known: dict[Path, Tensor] = {}  # masks after the present text: a level's drafts and their target ask alike

    def allowed(self, path: Path) -> Bool[Tensor, " vocab"]:
        if path not in self.known:
            self.known[path] = self._mask(path)
        return self.known[path]

    def _mask(self, path: Path) -> Bool[Tensor, " vocab"]:
        size, ends = self.grammars.vocab_size, self.grammars.end_tokens
        if self.has_ended or ends & {*path}:
            mask = torch.zeros(size, dtype=torch.bool)
            mask[[*ends]] = True
            return mask
        taken = self.matcher.try_consume_tokens([*path])
        if self.matcher.is_error():  # final: the grammar has grown beyond the library's limits
            return torch.zeros(size, dtype=torch.bool)
        assert taken == len(path), "the path is not allowed"
        bits = numpy.frombuffer(self.matcher.compute_bitmask(), dtype=numpy.uint8)
        may_end = self.matcher.is_accepting()
        if path:
            self.matcher.rollback(len(path))
        mask = torch.from_numpy(numpy.unpackbits(bits, bitorder="little")[:size].astype(bool))
        if not may_end:  # an end token may also be ordinary text, which would end the output all the same
            mask[[*ends]] = False
        return mask

    def advance(self, tokens: list[int]) -> int:
        count = 0
        for token in tokens:
            if not bool(self.allowed(())[token]):
                break
            is_end = token in self.grammars.end_tokens
            is_taken = is_end or self.matcher.consume_token(token)
            self.known.clear()
            if not is_taken:  # beyond the library's limits
                break
            self.has_ended = self.has_ended or is_end
            count += 1
        return count


def one_line(error: object) -> str:
    """A message of the library in one line, not longer than a line should be."""
    return " ".join(str(error).split())[:SHOWN]

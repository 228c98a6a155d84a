"""Rules that forbid tokens because of the text before them, like transformers' logits processors."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from headstart.inference.core.constraint import Constraint, ConstraintState, Path


@dataclass(frozen=True)
class TextRules:
    """The tokens that may not come next; the fields have the names and meanings of a GenerationConfig.

    With a grammar, the rules apply wherever they leave at least one token that the grammar allows.
    """

    prompt: tuple[int, ...]
    vocab_size: int
    max_new_tokens: int
    end_tokens: tuple[int, ...] = ()
    min_new_tokens: int = 0  # no end token may come earlier
    no_repeat_ngram_size: int = 0  # no n-gram of prompt and output may repeat
    bad_words: tuple[tuple[int, ...], ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()  # may not be the first new token
    forced_eos: int | None = None  # must be the last token if the text reaches its longest length
    grammar: Constraint | None = None

    @property
    def forbid_nothing(self) -> bool:
        least = self.end_tokens and self.min_new_tokens
        rules = least, self.no_repeat_ngram_size, self.bad_words, self.begin_suppress_tokens
        return not any(rules) and self.forced_eos is None

    def start(self) -> "TextRulesState":
        return TextRulesState(self, None if self.grammar is None else self.grammar.start())


class TextRulesState:
    def __init__(self, rules: TextRules, grammar: ConstraintState | None) -> None:
        self.rules, self.grammar = rules, grammar
        self.text, self.followers = list(rules.prompt), dict[Path, set[int]]()  # what followed each (n - 1)-gram
        self._count(0)

    def forces(self, path: Path = ()) -> bool:
        """Whether the token after the text and `path` is `forced_eos`."""
        written = len(self.text) - len(self.rules.prompt) + len(path)
        return self.rules.forced_eos is not None and written == self.rules.max_new_tokens - 1

    def forbidden(self, path: Path) -> set[int]:
        """The tokens that may not follow after the text and `path`, unless one is forced there."""
        rules, written = self.rules, len(self.text) - len(self.rules.prompt) + len(path)
        forbidden = set(rules.end_tokens if written < rules.min_new_tokens else ())
        if written == 0:
            forbidden |= {*rules.begin_suppress_tokens}
        longest = max(rules.no_repeat_ngram_size, *(len(word) for word in rules.bad_words), 1) - 1
        recent = (*self.text[max(len(self.text) - longest, 0) :], *path)
        forbidden |= {word[-1] for word in rules.bad_words if recent[len(recent) - len(word) + 1 :] == word[:-1]}
        size = rules.no_repeat_ngram_size
        if size and len(recent) >= size - 1:
            last = recent[len(recent) - size + 1 :]
            forbidden |= self.followers.get(last, set())
            forbidden |= {gram[-1] for gram in ngrams(recent, size) if gram[:-1] == last}
        return forbidden

    def allowed(self, path: Path) -> Bool[Tensor, " vocab"]:
        mask = torch.ones(self.rules.vocab_size, dtype=torch.bool)
        if self.forces(path):
            mask[:] = False
            mask[self.rules.forced_eos] = True
        else:
            mask[[*self.forbidden(path)]] = False
        if self.grammar is None:
            return mask
        fits = self.grammar.allowed(path)
        return fits & mask if bool((fits & mask).any()) else fits

    def advance(self, token: int) -> bool:
        self.text.append(token)
        self._count(len(self.text) - self.rules.no_repeat_ngram_size)
        return self.grammar is None or self.grammar.advance(token)

    def _count(self, first: int) -> None:
        """Count the n-grams of the text that begin at this place or later."""
        if self.rules.no_repeat_ngram_size:
            for gram in ngrams(tuple(self.text[max(first, 0) :]), self.rules.no_repeat_ngram_size):
                self.followers.setdefault(gram[:-1], set()).add(gram[-1])


def ngrams(tokens: Path, size: int) -> list[Path]:
    return [tokens[first : first + size] for first in range(len(tokens) - size + 1)]

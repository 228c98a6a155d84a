"""A target's default sampling, from its generation_config.json, for the server and the commands."""

from dataclasses import dataclass, replace

from headstart.common.errors import wrong_value
from headstart.inference.core.constraint import Constraint
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.generate.settings import (
    OF_TARGET,
    Settings,
    forbid,
    read_forbidden,
    read_rules,
    read_sampling,
    read_settings,
    target_fields,
)
from headstart.inference.targets.model import TargetModel

# Fields about what a call of `generate` returns, not about the text.
ABOUT_A_CALL = (
    *("num_return_sequences", "return_dict_in_generate", "output_scores", "output_logits"),
    *("output_attentions", "output_hidden_states"),
)


@dataclass(frozen=True)
class TargetDefaults:
    """A target's own settings. A request's field replaces the one of the same meaning."""

    sampling: Sampling
    settings: Settings
    ends: tuple[int, ...]
    vocab_size: int

    @classmethod
    def of(cls, target: TargetModel, temperature: float = 1.0) -> "TargetDefaults":
        """The settings of this target; `temperature` applies if the file has neither temperature nor do_sample.

        Unlike in `generate`, which follows transformers, top_k is off unless the file sets it. Raises ValueError naming
        every field that is not supported.
        """
        own, vocab_size = target_fields(target.generation_config), target.config.vocab_size
        given = {**dict.fromkeys(ABOUT_A_CALL), "top_k": own.get("top_k"), "temperature": None, "do_sample": True}
        try:
            settings = read_settings(None, given, target.generation_config)
            if (strings := settings.stop_strings) is not None:
                raise wrong_value("stop_strings", strings, "null is", "set it to null, and name them in requests")
            ends = tuple(token for token in target.end_tokens if token < vocab_size)
            read_rules(settings, [], 0, 1, ends, vocab_size)  # refuses tokens outside the vocabulary before any text
            sampling = forbid(read_sampling(settings), read_forbidden(settings, ends, vocab_size))
            if not own.keys().isdisjoint({"do_sample", "temperature"}):
                temperature = 0.0 if own.get("do_sample") is False else own.get("temperature", 1.0)
            return cls(replace(sampling, temperature=temperature), settings, ends, vocab_size)
        except ValueError as error:
            raise ValueError(f"{OF_TARGET}: {str(error).removeprefix(f'{OF_TARGET}: ')}") from None

    def length(self, prompt: int, left: int) -> int:
        """The longest answer to a prompt of this length, at most `left` tokens; raises ValueError if it is empty."""
        new, total = self.settings.max_new_tokens, self.settings.max_length
        if new is None and total is not None and total <= prompt:
            allowed = f"a prompt of fewer tokens than max_length {total} of {OF_TARGET} is"
            raise wrong_value("max_tokens", f"none for a prompt of {prompt} tokens", allowed, "give max_tokens")
        own = left if total is None else total - prompt
        return min(left, own if new is None else new)

    def applied(self, request: Request) -> Request:
        """The request with the target's settings for everything but temperature, seed and length."""
        own = request.sampling
        sampling = replace(self.sampling, temperature=own.temperature, seed=own.seed)
        ends = self.ends if request.end_tokens is None else request.end_tokens
        rules = self.rules(request.prompt, request.max_new_tokens, ends)
        return replace(request, sampling=sampling, constraint=rules)

    def rules(
        self,
        prompt: list[int],
        limit: int,
        ends: tuple[int, ...],
        least: int | None = None,
        grammar: Constraint | None = None,
    ) -> Constraint | None:
        """The rules of a text of at most `limit` new tokens; `least` replaces the target's own minimum."""
        rules = read_rules(self.settings, prompt, len(prompt), limit, ends, self.vocab_size)
        rules = rules if least is None else replace(rules, min_new_tokens=least)
        return grammar if rules.forbid_nothing else replace(rules, grammar=grammar)

"""How a target writes where nobody says otherwise: its generation_config.json, for the server and the commands."""

from dataclasses import dataclass, replace
from typing import Any

from headstart.common.errors import wrong_value
from headstart.inference.core.constraint import Constraint
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import AcceptanceRule, Sampling
from headstart.inference.generate.settings import (
    OF_TARGET,
    forbid,
    read_forbidden,
    read_number,
    read_rules,
    read_sampling,
    read_settings,
    target_fields,
)
from headstart.inference.targets.model import TargetModel

# Fields that say what a call of `generate` returns, not how the target writes.
ABOUT_A_CALL = (
    *("num_return_sequences", "return_dict_in_generate", "output_scores", "output_logits"),
    *("output_attentions", "output_hidden_states"),
)


@dataclass(frozen=True)
class TargetDefaults:
    """A target's own settings. What a request says replaces the field of the same meaning."""

    sampling: Sampling
    settings: dict[str, Any]
    vocab_size: int

    @classmethod
    def of(cls, target: TargetModel, rule: AcceptanceRule = "seeded", temperature: float = 1.0) -> "TargetDefaults":
        """The settings of this target; `temperature` applies if they name none and leave open whether to sample.

        Unlike `generate`, which follows transformers, nothing is truncated by top_k unless the file says so. Raises
        ValueError naming every field that is not supported.
        """
        own, vocab_size = target_fields(target.generation_config), target.config.vocab_size
        given = {**dict.fromkeys(ABOUT_A_CALL), "top_k": own.get("top_k"), "temperature": None, "do_sample": True}
        try:
            settings = read_settings(None, given, target.generation_config)
            if (strings := settings["stop_strings"]) is not None:
                raise wrong_value("stop_strings", strings, "null is", "set it to null, and name them in requests")
            settings["eos_token_id"] = tuple(token for token in target.end_tokens if token < vocab_size)
            sampling = forbid(read_sampling(settings, rule), read_forbidden(settings, vocab_size))
            if not read_rules(settings, [], 0, 1, vocab_size).forbid_nothing and rule != "seeded":
                allowed = "only seeded is allowed with rules about a text, such as no_repeat_ngram_size"
                raise ValueError(f"decode.acceptance: {rule} given, {allowed}; set them to null in the file")
            chosen = 0.0 if own.get("do_sample") is False else read_number("temperature", own.get("temperature", 1))
            unsaid = own.keys().isdisjoint({"do_sample", "temperature"})
            return cls(replace(sampling, temperature=temperature if unsaid else chosen), settings, vocab_size)
        except ValueError as error:
            raise ValueError(f"{OF_TARGET}: {str(error).removeprefix(f'{OF_TARGET}: ')}") from None

    def length(self, prompt: int, room: int) -> int:
        """How many new tokens a prompt of this length gets, at most `room`; raises ValueError if none."""
        new, whole = self.settings["max_new_tokens"], self.settings["max_length"]
        if new is None and whole is not None and whole <= prompt:
            allowed = f"a prompt of fewer tokens than max_length {whole} of {OF_TARGET} is"
            raise wrong_value("max_tokens", f"none for a prompt of {prompt} tokens", allowed, "give max_tokens")
        own = room if whole is None else whole - prompt
        return min(room, own if new is None else new)

    def applied(self, request: Request) -> Request:
        """The request with everything but its temperature, seed, rule and length as the target's settings say."""
        given = request.sampling
        sampling = replace(self.sampling, temperature=given.temperature, seed=given.seed, rule=given.rule)
        ends = self.settings["eos_token_id"] if request.end_tokens is None else request.end_tokens
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
        """What a text of at most `limit` new tokens may continue with; `least` replaces the target's own minimum."""
        settings = {**self.settings, "eos_token_id": ends}
        if least is not None:
            settings["min_new_tokens"] = least
        found = read_rules(settings, prompt, len(prompt), limit, self.vocab_size)
        return grammar if found.forbid_nothing else replace(found, grammar=grammar)

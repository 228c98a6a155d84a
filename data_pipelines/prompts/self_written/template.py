"""Where a chat template puts the user's words: what the target reads before it writes them, and what ends them."""

from dataclasses import dataclass
from functools import cache

from headstart.data_pipelines.prompts.chat_masks import ChatTemplate
from headstart.data_pipelines.prompts.conversations import Conversation
from headstart.data_pipelines.prompts.rows import BadRow
from headstart.data_pipelines.stages.stage import Json
from headstart.inference.drafters.model import Tokenizer
from headstart.recipes.schema import SELF, DataSection

# Rendered in place of the user's words, to find what surrounds them; common words, tokenized as a user's would be.
STAND_IN = "What this user asks comes here"
REMEDY = "choose a target with such a template, or name a file of prompts in data.prompts"


@dataclass(frozen=True)
class Opening:
    """The tokens up to the place where the user's words begin, and the first token after these words.

    `space` is what the template writes before the words, if the first token of the words holds it.
    """

    tokens: list[int]
    end: int
    space: str


class UserTemplate:
    """A tokenizer's chat template as the frame of user turns, which the target fills (Magpie, arXiv 2406.08464).

    Raises ValueError if the tokenizer has no template, or the template does not show a user's words as they are.
    """

    def __init__(self, tokenizer: Tokenizer, data: DataSection) -> None:
        if tokenizer.chat_template is None:
            raise ValueError(
                f"data.prompts: {SELF} given, which needs a chat template that says where a user's words begin, and "
                "the target's tokenizer has none (it is a base model, or its chat_template.jinja is missing); choose "
                "the chat version of the model, or name a file of prompts in data.prompts"
            )
        self.tokenizer, self.chat = tokenizer, ChatTemplate(tokenizer)
        self.first = cache(self._first)  # opening of a conversation, by system prompt
        for system in data.self_system_prompts or (None,):
            room = data.prompt_tokens - len(self.first(system).tokens)
            if room < 1:
                raise ValueError(
                    f"data.prompt_tokens: {data.prompt_tokens} given, but {data.prompt_tokens - room} tokens stand "
                    f"before the user's words; {data.prompt_tokens - room + 1} or more are allowed: raise it"
                )

    def _first(self, system: str | None) -> Opening:
        messages = opening_messages(system)
        try:
            opening = self.opening(messages)
            if opening is not None:
                return opening
            why = "it does not show the user's words once, as they are, between tokens of its own"
        except BadRow as error:
            why = str(error)
        if system is None:
            raise ValueError(f"data.prompts: {SELF} given, which the chat template rules out: {why}; {REMEDY}")
        raise ValueError(
            f"data.self_system_prompts: {system!r} given, which the chat template rules out: {why}; remove it"
        )

    def opening(self, messages: list[Json]) -> Opening | None:
        """The tokens before the next user turn; None if the template shows the user's words changed or not at all."""
        text = self.chat.render(Conversation([*messages, user_turn(STAND_IN)]), ask=True)
        before, _, after = text.partition(STAND_IN)
        if not after or STAND_IN in after:
            return None
        start, end = len(before), len(before) + len(STAND_IN)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens, places = list(encoded["input_ids"]), list(encoded["offset_mapping"])
        first = next((number for number, (_, stop) in enumerate(places) if stop > start), len(tokens))
        last = next((number for number, (begin, _) in enumerate(places) if begin >= end), len(tokens))
        if first == 0 or last == len(tokens) or places[last - 1][1] > end:
            return None
        space = text[places[first - 1][1] : start]
        return None if space.strip() else Opening(tokens[:first], tokens[last], space)

    def prompt(self, messages: list[Json]) -> list[int]:
        """The tokens after which the target answers the last user turn."""
        return self.chat.prompt(Conversation(messages))


def opening_messages(system: str | None) -> list[Json]:
    """The messages before the first user turn."""
    return [] if system is None else [{"role": "system", "content": system}]


def user_turn(words: str) -> Json:
    return {"role": "user", "content": words}

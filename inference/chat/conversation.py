"""A conversation as the prompt of its next answer, cut to fit the target's positions."""

from dataclasses import dataclass

from headstart.inference.targets.chat_template import ChatTemplate

Turn = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """The question with the turns before it that fit."""

    tokens: list[int]
    turns: list[Turn]  # the question last
    dropped: int  # questions that were dropped with their answers, the oldest first, so that the rest fits


class Conversation:
    """The questions and answers so far. Without a chat template the target only continues text, and keeps none."""

    def __init__(self, template: ChatTemplate, max_positions: int, max_new_tokens: int) -> None:
        """The prompt and `max_new_tokens` of answer must fit `max_positions`."""
        self.template = template
        self.max_positions, self.max_new_tokens = max_positions, max_new_tokens
        self.turns: list[Turn] = []

    @property
    def has_template(self) -> bool:
        return self.template.exists

    def ask(self, question: str) -> Prompt:
        """The prompt for the answer, without old turns that do not fit; ValueError if the question alone does not."""
        question = question.encode(errors="replace").decode()  # a terminal may give bytes that are not UTF-8
        turns = [*self.turns, {"role": "user", "content": question}]
        whole = len(turns)
        room = self.max_positions - self.max_new_tokens
        while len(tokens := self.as_tokens(turns)) > room and len(turns) > 1:
            turns = turns[2:]
        if not 0 < len(tokens) <= room:
            kept = f"the answer may take {self.max_new_tokens} of the target's {self.max_positions} positions"
            allowed = f"1 to {max(room, 0)} are allowed, because {kept}"
            remedy = "ask a shorter question, or lower --max-new-tokens"
            raise ValueError(f"the question is {len(tokens)} tokens long; {allowed}; {remedy}")
        return Prompt(tokens, turns, dropped=(whole - len(turns)) // 2)

    def answered(self, prompt: Prompt, answer: str) -> None:
        """Continue from this prompt and its answer."""
        self.turns = [*prompt.turns, {"role": "assistant", "content": answer}] if self.has_template else []

    def as_tokens(self, turns: list[Turn]) -> list[int]:
        return self.template.tokens(turns) if self.has_template else self.template.encode_text(turns[-1]["content"])

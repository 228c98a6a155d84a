"""The chat itself: reads questions and commands, streams coloured answers, and says how fast each one came."""

import signal
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType

from rich.console import Console
from rich.text import Text

from headstart.inference.chat.answer import MEASURED_STEPS, WARMUP_STEPS, Answer, plain_tokens_per_second
from headstart.inference.chat.commands import Command, help_text, read_command
from headstart.inference.chat.conversation import Conversation
from headstart.inference.core.drafter import Drafter
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.core.verify import BONUS
from headstart.inference.show.colours import SHADES, token_style
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import Tokenizer, visible_text_of

LEAST_STEPS = 8  # of a plain answer whose speed replaces the one that was measured at the start


class Chat:
    """A conversation on a console. Questions and commands come one by one through `handle`."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        tokenizer: Tokenizer,
        sampling: Sampling,
        max_new_tokens: int,
        console: Console,
        interactive: bool = True,
    ) -> None:
        """Measures twenty steps of plain decoding, to compare answers with.

        `interactive` says that somebody is typing: then Ctrl-C ends an answer, otherwise the whole chat.
        """
        self.interactive = interactive
        self.target, self.drafter, self.sampling, self.console = target, drafter, sampling, console
        self.text = partial(visible_text_of, tokenizer)
        self.conversation = Conversation(tokenizer, target.max_positions, max_new_tokens)
        self.has_drafts = True
        self.question: str | None = None  # the last one that was answered
        tokens = self.conversation.as_tokens([{"role": "user", "content": "Hello"}])
        request = Request(tokens, WARMUP_STEPS + MEASURED_STEPS + 1, sampling, end_tokens=())
        self.plain_rate = plain_tokens_per_second(target, request, self.text)
        self.plain_measured = "measured at the start"

    def introduce(self, names: str) -> None:
        """Say what talks here; `names` are those of the target and of its drafts."""
        self.tell(f"{names}; plain decoding writes {self.plain_rate:.1f} tokens/s here")
        if self.console.color_system is not None:
            self.console.print(legend(), soft_wrap=True)
        if not self.conversation.has_template:
            self.tell("This target has no chat template: it continues your text, and each line stands alone.")

    def handle(self, line: str) -> bool:
        """Answer a question or follow a command; returns whether the chat goes on. Mistakes are told, not raised."""
        try:
            command = read_command(line)
            if command is not None:
                return self.follow(command)
            if line.strip():
                self.answer(line.strip() if self.conversation.has_template else line.rstrip("\r\n"))
        except ValueError as error:
            self.tell(str(error))
        return True

    def follow(self, command: Command) -> bool:
        match command.name:
            case "/quit":
                return False
            case "/help":
                self.tell(help_text())
            case "/plain" | "/draft":
                self.has_drafts = command.name == "/draft"
                self.tell("with draft tokens" if self.has_drafts else "without draft tokens; /draft brings them back")
            case "/seed":
                self.sampling = replace(self.sampling, seed=command.value)
                without = "; it has no effect at temperature 0" if self.sampling.temperature == 0 else ""
                self.tell(f"seed {command.value}{without}")
            case "/temperature":
                self.sampling = replace(self.sampling, temperature=command.value)
                self.tell(f"temperature {command.value:g}")
            case "/reset":
                self.conversation.forget()
                self.question = None
                self.tell("a new conversation")
            case "/again":
                self.answer_again()
        return True

    def answer_again(self) -> None:
        if self.question is None:
            raise ValueError("/again: no question was answered yet, one is needed; ask one first")
        self.conversation.take_back()
        self.answer(self.question)

    def answer(self, question: str) -> None:
        """Stream the answer. After Ctrl-C an interactive chat goes on from what was written so far."""
        prompt = self.conversation.ask(question)
        if prompt.dropped:
            turns = "turn is" if prompt.dropped == 1 else f"{prompt.dropped} turns are"
            self.tell(
                f"the oldest {turns} dropped: the conversation would exceed the target's {self.target.max_positions} "
                f"positions"
            )
        request = Request(prompt.tokens, self.conversation.max_new_tokens, self.sampling)
        answer = Answer(self.target, self.drafter if self.has_drafts else None, request, self.text)
        with first_ctrl_c(answer.stop):
            for piece in answer.pieces():
                self.console.print(Text(printable(piece.text), token_style(piece.depth)), end="", soft_wrap=True)
        self.question = question
        self.conversation.answered(prompt, answer.whole_text())
        self.console.print()
        self.tell(self.summary(answer))
        if answer.stopped and not self.interactive:
            raise KeyboardInterrupt

    def summary(self, answer: Answer) -> str:
        """How fast the answer came, and why it ended if the target did not end it."""
        rate, parts = answer.tokens_per_second, []
        if rate is None:
            parts.append("too short to measure")
        elif self.has_drafts:
            parts.append(f"{answer.stats.acceptance_length:.2f} tokens per target step (acceptance length)")
            parts.append(f"{rate:.1f} tokens/s, about {rate / self.plain_rate:.1f} times as fast as plain decoding")
            parts[-1] += f" ({self.plain_rate:.1f} tokens/s, {self.plain_measured})"
        else:
            parts.append(f"plain decoding, {rate:.1f} tokens/s")
            if answer.stats.steps >= LEAST_STEPS:
                self.plain_rate, self.plain_measured = rate, "measured in the last plain answer"
        if answer.stopped:
            parts.append("stopped by Ctrl-C")
        elif answer.generation.finish == "length":
            parts.append(f"cut off after --max-new-tokens {answer.request.max_new_tokens}")
        return "; ".join(parts)

    def tell(self, message: str) -> None:
        """A line of ours, fainter than the answers."""
        self.console.print(Text(message, "dim"), soft_wrap=True)


def converse(chat: Chat, lines: Iterable[str]) -> None:
    """Handle the lines until one ends the chat."""
    for line in lines:
        if not chat.handle(line):
            return


@contextmanager
def first_ctrl_c(call: Callable[[], None]) -> Iterator[None]:
    """Let the first Ctrl-C inside call this, so that it tears no step apart; the next one interrupts as usual."""

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        call()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def legend() -> Text:
    """What the colours mean, in the colours."""
    found = Text("Draft tokens by depth: ", "dim")
    for depth in range(1, len(SHADES) + 1):
        found.append(f" {depth} ", f"not dim {token_style(depth)}")
    found.append(" or deeper; ")
    found.append("bonus tokens", f"not dim {token_style(BONUS)}")
    return found.append(", and tokens of steps without drafts in plain letters. /help lists the commands.")


def printable(text: str) -> str:
    """The text without control characters, by which a target could change the terminal's state."""
    return "".join(letter for letter in text if letter in "\n\t" or unicodedata.category(letter) != "Cc")

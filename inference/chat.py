"""Talk with a target in the terminal: questions and commands, answers as they stream, and how fast each one came."""

import difflib
import signal
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

from headstart.inference.core.drafter import Drafter
from headstart.inference.core.request import Detokenize, EmittedTokens, Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.core.verify import BONUS
from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.generate.defaults import TargetDefaults
from headstart.inference.show import SHADES, TextStream, TokenText, token_style
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import visible_text_of

Turn = dict[str, str]
HELP = {  # command -> (its value, what it does)
    "/plain": ("", "decode without draft tokens: slower, but the same text (in bfloat16 a near-tie may differ)"),
    "/draft": ("", "decode with draft tokens again"),
    "/again": ("", "answer the last question again, such as after /plain or with another seed"),
    "/seed": ("N", "sample other text: the seed of the random numbers"),
    "/temperature": ("T", "how freely tokens are sampled; 0 always takes the likeliest one"),
    "/reset": ("", "begin a new conversation"),
    "/help": ("", "list these commands"),
    "/quit": ("", "end the chat; Ctrl-D does too, and Ctrl-C while no answer is written"),
}
NUMBERS = {"/seed": (int, "a whole number", "/seed 1"), "/temperature": (float, "a number", "/temperature 0.7")}
WARMUP_STEPS, MEASURED_STEPS = 4, 16  # steps of plain decoding at the start
LEAST_STEPS = 8  # a plain answer of more steps replaces the speed that was measured at the start


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
        self.turns = [*prompt.turns, {"role": "assistant", "content": answer}] if self.template.exists else []

    def as_tokens(self, turns: list[Turn]) -> list[int]:
        return self.template.tokens(turns) if self.template.exists else self.template.encode_text(turns[-1]["content"])


class Answer:
    """An answer that is written while `shown` or `blocks` is read."""

    def __init__(self, target: TargetModel, drafter: Drafter | None, request: Request, text: Detokenize) -> None:
        self.request, self.text = request, text
        self.loop = DecodeLoop(target, drafter, max_batch=1)
        self.generation = self.loop.generations[self.loop.submit(request)]
        self.step_seconds: list[float] = []  # time of each target step after the prompt was read
        self.stopped = False

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens per second of the target's steps; None before the first step."""
        return self.generation.stats.tokens / sum(self.step_seconds) if self.step_seconds else None

    def stop(self) -> None:
        """End the answer with the step that is running."""
        self.stopped = True

    def shown(self) -> Iterator[TokenText]:
        """The text as it becomes certain, without the end token."""
        stream = TextStream(self.text, self.request.prompt)
        for block in self.blocks():
            count = len(block.tokens) - (self.generation.finish == "end")
            for token, depth in zip(block.tokens[:count], block.depths, strict=False):
                yield TokenText(stream.piece(token), depth)
        yield TokenText(stream.rest(), None)

    def blocks(self) -> Iterator[EmittedTokens]:
        """The first token, from the prompt's pass, then the tokens of each step."""
        with closing(self.loop.run()) as blocks:
            started = None  # the pass over the prompt is no step
            for block in blocks:
                if started is not None:
                    self.step_seconds.append(time.perf_counter() - started)
                yield block
                if self.stopped:
                    break
                started = time.perf_counter()

    def whole_text(self) -> str:
        """All text so far."""
        tokens = self.generation.tokens
        return self.text(tokens[:-1] if self.generation.finish == "end" else tokens)


def read_command(line: str) -> tuple[str, Any] | None:
    """The command in a line and the number after it, None if the line is a question; raises ValueError for mistakes."""
    if not line.startswith("/"):
        return None
    name, *values = line.split()
    if name not in HELP:
        near = difflib.get_close_matches(name, HELP, n=1)
        advice = f"did you mean {near[0]}?" if near else "/help says what each does"
        advice += " (a question may begin with a slash after a space)"
        raise ValueError(f"{name}: not a command; {', '.join(HELP)} are allowed; {advice}")
    given = " ".join(values)
    if name not in NUMBERS:
        if values:
            raise ValueError(f"{name}: {given!r} given, no value is allowed; write {name} alone")
        return name, None
    kind, allowed, example = NUMBERS[name]
    try:
        return name, kind(given)
    except ValueError:
        raise ValueError(f"{name}: {given!r} given, {allowed} is allowed; write {example}") from None


class Chat:
    """A conversation on a console. Questions and commands come one by one through `handle`."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        template: ChatTemplate,
        sampling: Sampling,
        max_new_tokens: int,
        console: Console,
        interactive: bool = True,
    ) -> None:
        """Measures plain decoding, to compare answers with; where nobody types, Ctrl-C ends the whole chat."""
        self.interactive = interactive
        self.target, self.drafter, self.sampling, self.console = target, drafter, sampling, console
        self.defaults = TargetDefaults.of(target)
        self.text = partial(visible_text_of, template.tokenizer)
        self.conversation = Conversation(template, target.max_positions, max_new_tokens)
        self.has_drafts = True
        self.question: str | None = None  # the last one that was answered
        tokens = self.conversation.as_tokens([{"role": "user", "content": "Hello"}])
        request = Request(tokens, WARMUP_STEPS + MEASURED_STEPS + 1, sampling, end_tokens=())
        answer = Answer(target, None, request, self.text)
        list(answer.blocks())
        self.plain_rate = 1 / median(answer.step_seconds[WARMUP_STEPS:])
        self.plain_measured = "measured at the start"

    def introduce(self, names: str) -> None:
        """Say what talks here; `names` are those of the target and of its drafts."""
        self.say(f"{names}; plain decoding writes {self.plain_rate:.1f} tokens/s here")
        if self.console.color_system is not None:
            self.console.print(legend(), soft_wrap=True)
        if not self.conversation.template.exists:
            self.say("This target has no chat template: it continues your text, and each line stands alone.")

    def converse(self, lines: Iterable[str]) -> None:
        """Handle the lines until one ends the chat."""
        for line in lines:
            if not self.handle(line):
                return

    def handle(self, line: str) -> bool:
        """Answer a question or follow a command; False ends the chat. Mistakes are printed, not raised."""
        try:
            command = read_command(line)
            if command is not None:
                return self.follow(*command)
            if line.strip():
                self.answer(line.strip() if self.conversation.template.exists else line.rstrip("\r\n"))
        except ValueError as error:
            self.say(str(error))
        return True

    def follow(self, command: str, value: Any) -> bool:
        match command:
            case "/help":
                self.say("\n".join(f"  {f'{name} {value}'.rstrip():<16}{does}" for name, (value, does) in HELP.items()))
            case "/plain" | "/draft":
                self.has_drafts = command == "/draft"
                self.say("with draft tokens" if self.has_drafts else "without draft tokens; /draft brings them back")
            case "/seed":
                self.sampling = replace(self.sampling, seed=value)
                self.say(f"seed {value}{'; it has no effect at temperature 0' * (self.sampling.temperature == 0)}")
            case "/temperature":
                self.sampling = replace(self.sampling, temperature=value)
                self.say(f"temperature {value:g}")
            case "/reset":
                self.conversation.turns, self.question = [], None
                self.say("a new conversation")
            case "/again":
                if self.question is None:
                    raise ValueError("/again: no question was answered yet, one is needed; ask one first")
                del self.conversation.turns[-2:]
                self.answer(self.question)
        return command != "/quit"

    def answer(self, question: str) -> None:
        """Stream the answer. After Ctrl-C an interactive chat continues from what was written so far."""
        prompt = self.conversation.ask(question)
        if prompt.dropped:
            turns = "turn is" if prompt.dropped == 1 else f"{prompt.dropped} turns are"
            limit = f"the target's {self.target.max_positions} positions"
            self.say(f"the oldest {turns} dropped: the conversation would exceed {limit}")
        request = self.defaults.applied(Request(prompt.tokens, self.conversation.max_new_tokens, self.sampling))
        answer = Answer(self.target, self.drafter if self.has_drafts else None, request, self.text)
        with first_ctrl_c(answer.stop):
            for each in answer.shown():
                self.console.print(Text(printable(each.text), token_style(each.depth)), end="", soft_wrap=True)
        self.question = question
        self.conversation.answered(prompt, answer.whole_text())
        self.console.print()
        self.say(self.summary(answer))
        if answer.stopped and not self.interactive:
            raise KeyboardInterrupt

    def summary(self, answer: Answer) -> str:
        """How fast the answer came, and why it ended if the target did not end it."""
        rate = answer.tokens_per_second
        if rate is None:
            said = "too short to measure"
        elif self.has_drafts:
            length = f"{answer.generation.stats.acceptance_length:.2f} tokens per target step (acceptance length)"
            plain = f"plain decoding ({self.plain_rate:.1f} tokens/s, {self.plain_measured})"
            said = f"{length}; {rate:.1f} tokens/s, about {rate / self.plain_rate:.1f} times as fast as {plain}"
        else:
            said = f"plain decoding, {rate:.1f} tokens/s"
            if answer.generation.stats.steps >= LEAST_STEPS:
                self.plain_rate, self.plain_measured = rate, "measured in the last plain answer"
        if answer.stopped:
            return f"{said}; stopped by Ctrl-C"
        is_cut = answer.generation.finish == "length"
        return f"{said}; cut off after --max-new-tokens {answer.request.max_new_tokens}" if is_cut else said

    def say(self, message: str) -> None:
        """A line of ours, fainter than the answers."""
        self.console.print(Text(message, "dim"), soft_wrap=True)


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
    """The meaning of the colours, in the colours."""
    found = Text("Draft tokens by depth: ", "dim")
    for depth in range(1, len(SHADES) + 1):
        found.append(f" {depth} ", f"not dim {token_style(depth)}")
    found.append(" or deeper; ")
    found.append("bonus tokens", f"not dim {token_style(BONUS)}")
    return found.append(", and tokens of steps without drafts in plain letters. /help lists the commands.")


def printable(text: str) -> str:
    """The text without control characters, by which a target could change the terminal's state."""
    return "".join(letter for letter in text if letter in "\n\t" or unicodedata.category(letter) != "Cc")

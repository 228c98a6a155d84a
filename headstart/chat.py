"""Talk with a target in the terminal, and see which tokens of its answers were drafted.

    headstart chat
    headstart chat --prompt "Why is the sky blue?"
    headstart chat --target assets/demo_target --head assets/demo_head --dtype float32 --prompt "def main("
    headstart chat recipes/tiny.yaml

Without arguments SmolLM2-135M-Instruct talks, which is fetched first if it is missing. Each answer is streamed: draft
tokens are on green, darker with depth, and bonus tokens are underlined. The line after it gives its acceptance length,
the number of tokens per target step. /help lists the commands, such as /plain, which switches drafts off. If the input
is not a terminal, each line of it is a question, and nothing is coloured.
"""

import signal
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from threading import Event
from types import FrameType

from rich.console import Console
from rich.text import Text

from headstart.inference.core.request import Generation, Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.core.verify import BONUS
from headstart.inference.engine.loop import loop_of
from headstart.inference.generate.defaults import TargetDefaults
from headstart.inference.generate.loading import load_model
from headstart.inference.generate.model import SpeculativeModel
from headstart.inference.show import TextStream
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.tokenizer import visible_text_of
from headstart.options import FOLDER, ChatOptions, find_folder
from headstart.smollm2 import fetch

Turn = dict[str, str]
HELP = {  # command -> what it does
    "/plain": "decode without draft tokens: slower, but the same text (on a GPU a near-tie may differ)",
    "/draft": "decode with draft tokens again",
    "/again": "answer the last question again, such as after /plain",
    "/reset": "begin a new conversation",
    "/help": "list these commands",
    "/quit": "end the chat; Ctrl-D does too, and Ctrl-C while no answer is written",
}
SHADES = ("#d9f0d3", "#b8e2b0", "#93d08c", "#6abb6b", "#43a24f", "#1f7d34", "#0f6126")  # by depth; darker with depth
WHITE_LETTERS_FROM = 6  # the first depth whose shade is too dark for black letters


def talk(options: ChatOptions) -> None:
    """Load target and head, and answer until the questions end."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # do not fail on other terminal encodings
    names = options.model
    if names.target is None:
        folder = find_folder(FOLDER)
        names = replace(names, target=str(folder))
        if not (folder / "config.json").is_file():
            print(fetch(folder, "auto"), flush=True)
    interactive = options.prompt is None and sys.stdin.isatty()
    console = Console(highlight=False, color_system="auto" if interactive or options.prompt is not None else None)
    sampling = Sampling(options.temperature or 0.0, seed=options.seed)
    model, template, section = load_model(names)
    assert model.drafter is not None
    defaults, longest = TargetDefaults.of(model.target, temperature=0.0), names.decode.max_new_tokens
    if options.temperature is None:
        sampling = replace(sampling, temperature=defaults.sampling.temperature)
    if "max_new_tokens" not in names.decode.model_fields_set:  # half of a small target's positions are for questions
        longest = defaults.length(0, min(longest, max(model.target.max_positions // 2, 1)))
    chat = Chat(model, template, sampling, longest, console, interactive)
    chat.introduce(f"{Path(section.path).name}, drafts by {names.drafts}, {section.dtype} on {model.target.device}")
    if options.prompt is not None:
        chat.answer(options.prompt)
    elif not interactive:
        chat.converse(sys.stdin)
    else:
        with suppress(ImportError):
            import readline  # noqa: F401  (gives input() its line editing and history, where Python was built with it)
        with suppress(EOFError, KeyboardInterrupt):  # Ctrl-D; Ctrl-C while no answer is written, or a second one
            chat.converse(iter(lambda: input("> "), None))
        console.print()


@dataclass
class Chat:
    """A conversation on a console. Questions and commands come one by one through `handle`."""

    model: SpeculativeModel
    template: ChatTemplate
    sampling: Sampling
    max_new_tokens: int  # a prompt and an answer of this length must fit the target
    console: Console
    interactive: bool = True  # otherwise Ctrl-C ends the chat
    has_drafts: bool = True
    turns: list[Turn] = field(default_factory=list)  # empty without a chat template: each line is continued alone
    question: str | None = None  # the last one that was answered

    def introduce(self, names: str) -> None:
        """Say who talks here; `names` says it of the target and of its drafts."""
        self.say(names)
        if self.console.color_system is not None:
            self.console.print(legend(), soft_wrap=True)
        if not self.template.exists:
            self.say("This target has no chat template: it continues your text, and each line stands alone.")

    def converse(self, lines: Iterable[str]) -> None:
        """Handle the lines until one ends the chat; lines that were not typed here are shown before their answers."""
        for line in lines:
            if not self.interactive:
                self.console.print(f"> {line.rstrip()}", markup=False, soft_wrap=True)
            if not self.handle(line):
                return

    def handle(self, line: str) -> bool:
        """Answer a question or follow a command; False ends the chat. Mistakes are printed, not raised."""
        try:
            if line.startswith("/"):
                return self.follow(line.strip())
            if line.strip():
                self.answer(line.strip() if self.template.exists else line.rstrip("\r\n"))
        except ValueError as error:
            self.say(str(error))
        return True

    def follow(self, command: str) -> bool:
        match command:
            case "/help":
                self.say("\n".join(f"  {name:<8}{does}" for name, does in HELP.items()))
            case "/plain" | "/draft":
                self.has_drafts = command == "/draft"
                self.say("with draft tokens" if self.has_drafts else "without draft tokens; /draft brings them back")
            case "/reset":
                self.turns, self.question = [], None
                self.say("a new conversation")
            case "/again":
                if self.question is None:
                    raise ValueError("/again: no question was answered yet, one is needed; ask one first")
                del self.turns[-2:]
                self.answer(self.question)
            case _ if command not in HELP:
                advice = "/help says what each does (a question may begin with a slash after a space)"
                raise ValueError(f"{command}: not a command; {', '.join(HELP)} are allowed; {advice}")
        return command != "/quit"

    def answer(self, question: str) -> None:
        """Stream the answer. After Ctrl-C an interactive chat continues from the part that was written."""
        prompt, turns = self.prompt(question)
        request = TargetDefaults.of(self.model.target).applied(Request(prompt, self.max_new_tokens, self.sampling))
        with first_ctrl_c() as pressed:
            generation = self.stream(request, pressed)
        self.question = question
        written = generation.tokens[:-1] if generation.finish == "end" else generation.tokens
        if self.template.exists:
            answer = visible_text_of(self.template.tokenizer, written)
            self.turns = [*turns, {"role": "assistant", "content": answer}]
        stats = generation.stats
        summary = f"{stats.acceptance_length:.2f} tokens per target step (acceptance length)"
        if not self.has_drafts or not stats.steps:
            summary = "plain decoding" if stats.steps else "no target step after the first token"
        elif stats.resting_steps:
            summary += f"; in {stats.resting_steps} of {stats.steps} steps drafts were off, as they did not pay"
        if pressed.is_set():
            summary += "; stopped by Ctrl-C"
        elif generation.finish == "length":
            summary += f"; cut off after --max-new-tokens {request.max_new_tokens}"
        self.say(f"\n{summary}")
        if pressed.is_set() and not self.interactive:
            raise KeyboardInterrupt

    def prompt(self, question: str) -> tuple[list[int], list[Turn]]:
        """The tokens of the conversation with this question, and its turns, without old ones that do not fit."""
        question = question.encode(errors="replace").decode()  # a terminal may give bytes that are not UTF-8
        turns = [*self.turns, {"role": "user", "content": question}]
        limit, positions = self.model.target.max_positions - self.max_new_tokens, self.model.target.max_positions
        while len(tokens := self.encode(turns)) > limit and len(turns) > 1:
            turns = turns[2:]
        if not 0 < len(tokens) <= limit:
            why = f"the answer may take {self.max_new_tokens} of the target's {positions} positions"
            remedy = "ask a shorter question, or lower --max-new-tokens"
            allowed = f"1 to {max(limit, 0)} are allowed, because {why}"
            raise ValueError(f"the question is {len(tokens)} tokens long; {allowed}; {remedy}")
        if dropped := (len(self.turns) + 1 - len(turns)) // 2:
            oldest = "turn is" if dropped == 1 else f"{dropped} turns are"
            self.say(f"the oldest {oldest} dropped: the conversation would exceed the target's {positions} positions")
        return tokens, turns

    def encode(self, turns: list[Turn]) -> list[int]:
        return self.template.tokens(turns) if self.template.exists else self.template.encode_text(turns[-1]["content"])

    def stream(self, request: Request, stop: Event) -> Generation:
        """Print the answer as its text becomes certain, without the end token; `stop` ends it after the next step."""
        drafter = self.model.drafter if self.has_drafts else None
        loop = loop_of(self.model.target, [request], drafter, speculation=self.model.speculation)
        generation = loop.generations[0]
        text = TextStream(partial(visible_text_of, self.template.tokenizer), request.prompt)
        with closing(loop.run()) as blocks:
            for block in blocks:
                count = len(block.tokens) - (generation.finish == "end")
                for token, depth in zip(block.tokens[:count], block.depths, strict=False):
                    self.console.print(Text(printable(text.piece(token)), token_style(depth)), end="", soft_wrap=True)
                if stop.is_set():
                    break
        self.console.print(Text(printable(text.rest())), end="", soft_wrap=True)
        return generation

    def say(self, message: str) -> None:
        """Print a line of the chat itself, fainter than the answers."""
        self.console.print(Text(message, "dim"), soft_wrap=True)


@contextmanager
def first_ctrl_c() -> Iterator[Event]:
    """The first Ctrl-C inside sets the event, so that a step ends first; the second interrupts as usual."""
    pressed = Event()

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        pressed.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def token_style(depth: int | None) -> str:
    """The style of a token by its draft depth: BONUS for a bonus token, None for a token of a step without drafts."""
    if depth is None:
        return ""
    if depth == BONUS:
        return "underline"
    return f"{'white' if depth >= WHITE_LETTERS_FROM else 'black'} on {SHADES[min(depth, len(SHADES)) - 1]}"


def legend() -> Text:
    """The colour legend."""
    shades = [(f" {depth} ", token_style(depth)) for depth in range(1, len(SHADES) + 1)]
    end = ", and tokens of steps without drafts in plain letters. /help lists the commands."
    return Text.assemble("Draft tokens by depth: ", *shades, " or deeper; ", ("bonus tokens", token_style(BONUS)), end)


def printable(text: str) -> str:
    """The text without control characters, by which a target could change the terminal's state."""
    return "".join(letter for letter in text if letter in "\n\t" or unicodedata.category(letter) != "Cc")

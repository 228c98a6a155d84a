"""Talk with a target in the terminal, and see which tokens of its answers were drafted.

    headstart chat
    headstart chat --prompt "Why is the sky blue?"
    headstart chat --target assets/demo_target --head assets/demo_head --dtype float32 --prompt "def main("
    headstart chat recipes/tiny.yaml

Without arguments SmolLM2-135M-Instruct talks, which is fetched first if it is missing. Each answer is streamed: draft
tokens are on green, darker with depth, and bonus tokens are underlined. The line after it gives its acceptance length
and its speed, compared with plain decoding as measured at the start. /help lists the commands, such as /plain, which
switches drafts off. If the input is not a terminal, each line of it is a question, and nothing is coloured.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path

from rich.console import Console

from headstart.common.errors import STARTS_OVER, errors_as_messages
from headstart.inference.chat import Chat
from headstart.inference.core.sampling import Sampling
from headstart.inference.generate.defaults import TargetDefaults
from headstart.inference.generate.loading import load_model
from headstart.options import FOLDER, ChatOptions, chat_options, find_folder
from headstart.smollm2 import fetch


def main(argv: Sequence[str] | None = None) -> None:
    options = chat_options(__doc__, argv)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal in another encoding is no reason to end
    with errors_as_messages(STARTS_OVER):
        talk(options)


def talk(options: ChatOptions) -> None:
    """Load target and head, and answer until the questions end."""
    wanted = options.model
    if wanted.target is None:
        folder = find_folder(FOLDER)
        wanted = replace(wanted, target=str(folder))
        if not (folder / "config.json").is_file():
            print(fetch(folder, "auto"), flush=True)
    interactive = options.prompt is None and sys.stdin.isatty()
    piped = options.prompt is None and not interactive
    console = Console(highlight=False, color_system=None if piped else "auto")
    sampling = Sampling(options.temperature or 0.0, seed=options.seed, rule=wanted.decode.acceptance)
    model, template, section = load_model(wanted)
    assert model.drafter is not None
    own, longest = TargetDefaults.of(model.target, temperature=0.0), wanted.decode.max_new_tokens
    if options.temperature is None:
        sampling = replace(sampling, temperature=own.sampling.temperature)
    if "max_new_tokens" not in wanted.decode.model_fields_set:  # half of a small target's positions are for questions
        longest = own.length(0, min(longest, max(model.target.max_positions // 2, 1)))
    chat = Chat(model.target, model.drafter, template, sampling, longest, console, interactive)
    chat.introduce(f"{Path(section.path).name}, drafts by {wanted.drafts}, {section.dtype} on {model.target.device}")
    if options.prompt is not None:
        chat.answer(options.prompt)
    elif piped:
        chat.converse(piped_lines(console))
    else:
        with suppress(KeyboardInterrupt):  # a second Ctrl-C while an answer is being stopped
            chat.converse(typed_lines(console))


def typed_lines(console: Console) -> Iterator[str]:
    """The lines that a user types, until Ctrl-D, or Ctrl-C while nothing is answered."""
    with suppress(ImportError):
        import readline  # noqa: F401  (gives input() its line editing and history, where Python was built with it)
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            yield input("> ")
    console.print()


def piped_lines(console: Console) -> Iterator[str]:
    """The lines of standard input, each shown before its answer."""
    for line in sys.stdin:
        console.print(f"> {line.rstrip()}", markup=False, soft_wrap=True)
        yield line

"""Talk with a target in the terminal, and see which tokens of its answers were drafted.

    headstart chat
    headstart chat --prompt "Why is the sky blue?"
    headstart chat --target assets/demo_target --head assets/demo_head --dtype float32 --prompt "def main("
    headstart chat recipes/tiny.yaml

Without arguments SmolLM2-135M-Instruct talks, which is fetched first if it is missing. Each answer is streamed: draft
tokens stand on green, darker with depth, and bonus tokens are underlined. Below it stand its acceptance length and its
speed beside that of plain decoding, which is measured at the start. /help lists the commands, such as /plain, which
switches drafts off. If the input is not a terminal, each line of it is a question, and nothing is coloured.
"""

from headstart.chat_options import ChatOptions, chat_options

if __name__ == "__main__":
    chat_options(__doc__)  # --help and mistakes end the process here, before torch is loaded

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path

from rich.console import Console

from headstart.common.errors import STARTS_OVER, errors_as_messages
from headstart.heads.target_config import locate_target
from headstart.inference.chat.session import Chat, converse
from headstart.inference.core.sampling import Sampling
from headstart.inference.generate.model import SpeculativeModel
from headstart.inference.generate.options import require_head
from headstart.inference.targets.loading import fast_dtype, pick_device
from headstart.inference.targets.tokenizer import load_tokenizer
from headstart.recipes.checks import refuse_original_target
from headstart.recipes.schema import TargetSection
from headstart.smollm2 import fetch
from headstart.smollm2_options import FOLDER


def main(argv: Sequence[str] | None = None) -> None:
    options = chat_options(__doc__, argv)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal in another encoding is no reason to end
    with errors_as_messages(STARTS_OVER):
        talk(options)


def talk(options: ChatOptions) -> None:
    """Load target and head, and answer until the questions end."""
    interactive = sys.stdin.isatty() and options.prompt is None
    piped = not interactive and options.prompt is None
    console = Console(highlight=False, color_system=None if piped else "auto")
    require_head(options.head, options.recipe)
    section = target_section(options)
    sampling = Sampling(options.temperature, seed=options.seed, rule=options.decode.acceptance)
    fields = section.model_dump(exclude={"path"})
    model = SpeculativeModel.from_folders(section.path, options.head, options.decode, **fields)
    tokenizer = load_tokenizer(locate_target(section.path, section.revision), section.trust_remote_code)
    assert model.drafter is not None
    chat = Chat(model.target, model.drafter, tokenizer, sampling, options.max_new_tokens, console, interactive)
    drafts = options.decode.drafter.replace("_", " ") if options.head is None else f"head {options.head}"
    chat.introduce(f"{Path(section.path).name}, drafts by {drafts}, {section.dtype} on {model.target.device}")
    if options.prompt is not None:
        chat.answer(options.prompt)
    elif piped:
        converse(chat, piped_lines(console))
    else:
        with suppress(KeyboardInterrupt):  # a second Ctrl-C while an answer is being stopped
            converse(chat, typed_lines(console))


def target_section(options: ChatOptions) -> TargetSection:
    """The target's section; fetches the default target if it is missing."""
    if options.recipe is not None:
        refuse_original_target(options.recipe)
        return options.recipe.target
    path = options.target
    if path is None:
        path = str(FOLDER)
        if not (FOLDER / "config.json").is_file():
            print(fetch(FOLDER, "auto"), flush=True)
    dtype = fast_dtype(pick_device("auto")) if options.dtype == "auto" else options.dtype
    return TargetSection.model_validate({"path": path, "dtype": dtype})


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


if __name__ == "__main__":
    main()

"""The commands of the chat: lines that begin with a slash."""

import difflib
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Command:
    name: str
    value: Any = None  # the number of /seed or /temperature


def read_command(line: str) -> Command | None:
    """The command in a line of input, None if the line is a question; raises ValueError for a command that is wrong."""
    if not line.startswith("/"):
        return None
    name, *values = line.split()
    if name not in HELP:
        near = difflib.get_close_matches(name, HELP, n=1)
        advice = f"did you mean {near[0]}?" if near else "/help says what each does"
        raise ValueError(
            f"{name}: not a command; {', '.join(HELP)} are allowed; {advice} (a question may begin with a slash after "
            f"a space)"
        )
    given = " ".join(values)
    if name not in NUMBERS:
        if values:
            raise ValueError(f"{name}: {given!r} given, no value is allowed; write {name} alone")
        return Command(name)
    kind, allowed, example = NUMBERS[name]
    try:
        return Command(name, kind(given))
    except ValueError:
        raise ValueError(f"{name}: {given!r} given, {allowed} is allowed; write {example}") from None


def help_text() -> str:
    return "\n".join(f"  {f'{name} {value}'.rstrip():<16}{does}" for name, (value, does) in HELP.items())

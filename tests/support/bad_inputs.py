"""Run a command in this process as a user would type it, and check that its message can be acted on.

The facts of a message are fragments of it, joined by " | ": the field or file, what was given or found, what is
allowed, and what to do.
"""

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from headstart import cli


def table(text: str, **names: str) -> dict[str, tuple[list[str], str]]:
    """Cases by name: lines `name | input | input => facts`, or the facts on the next line; `names` stand for facts."""
    cases: dict[str, tuple[list[str], str]] = {}
    for line in text.strip().replace("\n    ", " => ").splitlines():
        case, _, facts = line.partition(" => ")
        name, *inputs = case.split(" | ")
        assert name not in cases, name
        cases[name] = inputs, " | ".join(names.get(fact, fact) for fact in facts.split(" | "))
    return cases


def filled(text: str, **places: object) -> str:
    """The text with values in place of names in braces; other braces stay."""
    for name, value in places.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def missing_facts(facts: str, message: str) -> list[str]:
    flat = " ".join(message.split())
    return [fact for fact in facts.split(" | ") if " ".join(fact.split()) not in flat]


class Says(str):
    """The facts of a message, given one by one; an empty one is left out."""

    def __new__(cls, what: str, value: str, allowed: str, remedy: str) -> "Says":
        return super().__new__(cls, " | ".join(filter(None, (what, value, allowed, remedy))))


@dataclass(frozen=True)
class Outcome:
    code: int  # the exit code
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


Typed = Callable[..., Outcome]  # the fixture `typed`


def type_command(given: Sequence[object], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Outcome:
    """Run `headstart ARGUMENTS`; an exception other than SystemExit is what a user sees as a traceback."""
    monkeypatch.setattr(sys, "argv", ["bin/headstart", *map(str, given)])
    capsys.readouterr()
    code, message = 0, ""
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        message = stop.code if isinstance(stop.code, str) else ""  # the interpreter prints it to stderr
    except BaseException:
        code, message = 1, traceback.format_exc()
    printed = capsys.readouterr()
    return Outcome(code, printed.out, printed.err + message)


def assert_refused(outcome: Outcome, facts: str) -> None:
    """The command failed, without a traceback, and its message has all facts."""
    assert outcome.code != 0, f"accepted in silence: {outcome.text}"
    assert_message(outcome.text, facts)


def assert_told(outcome: Outcome, facts: str) -> None:
    """The command succeeded, and reports what it did about the input."""
    assert outcome.code == 0, outcome.text
    assert_message(outcome.text, facts)


def assert_raises(call: Callable[[], object], facts: str) -> None:
    """A call of the Python API raises ValueError, whose message has all facts."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is checked fact by fact)
        call()
    assert_message(str(error.value), facts)


def assert_message(message: str, facts: str) -> None:
    assert "Traceback" not in message, message
    assert not missing_facts(facts, message), f"no {missing_facts(facts, message)} in:\n{message}"

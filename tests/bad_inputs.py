"""Run a command in this process as a user would type it, and check that its message can be acted on."""

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from headstart import cli


@dataclass(frozen=True)
class Says:
    """What a message must tell: four fragments of it. An empty one is allowed where there is nothing to name."""

    what: str  # the field or the file
    value: str  # what was given or found
    allowed: str  # what would be right
    remedy: str  # what to do

    def missing_from(self, message: str) -> list[str]:
        flat = " ".join(message.split())
        parts = {"what": self.what, "value": self.value, "allowed": self.allowed, "remedy": self.remedy}
        return [f"{name} {part!r}" for name, part in parts.items() if " ".join(part.split()) not in flat]


@dataclass(frozen=True)
class Outcome:
    code: int  # the exit code
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


def type_command(
    arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Outcome:
    """Run `headstart ARGUMENTS`; an exception other than SystemExit is what a user sees as a traceback."""
    monkeypatch.setattr(sys, "argv", ["bin/headstart", *map(str, arguments)])
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


def assert_refused(outcome: Outcome, says: Says) -> None:
    """The command failed, without a traceback, and its message tells all four things."""
    assert "Traceback" not in outcome.text, outcome.text
    assert outcome.code != 0, f"accepted in silence: {outcome.text}"
    assert not says.missing_from(outcome.text), f"no {', '.join(says.missing_from(outcome.text))} in:\n{outcome.text}"


def assert_told(outcome: Outcome, says: Says) -> None:
    """The command succeeded, and says what it did about the input."""
    assert "Traceback" not in outcome.text, outcome.text
    assert outcome.code == 0, outcome.text
    assert not says.missing_from(outcome.text), f"no {', '.join(says.missing_from(outcome.text))} in:\n{outcome.text}"


def assert_raises(call: Callable[[], object], says: Says) -> None:
    """A call of the Python API raises ValueError, whose message tells all four things."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is checked part by part)
        call()
    message = str(error.value)
    assert not says.missing_from(message), f"no {', '.join(says.missing_from(message))} in:\n{message}"

"""Laws of the chat: its text is the target's own, and each token's colour tells where it came from."""

import io
import json
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from scripted import noisy_copy
from tiny_run import ENDS, build_target, build_tokenizer, recipe_values

from headstart import chat as command
from headstart import cli
from headstart.chat import Chat, first_ctrl_c, printable
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import new_head, save_head
from headstart.heads.vocab import DraftVocab
from headstart.inference.core.cache import KVCache
from headstart.inference.core.request import Generation, Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.core.tree import Tree
from headstart.inference.core.verify import BONUS, Verified
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.drafters.model import ModelDrafter
from headstart.inference.engine.loop import loop_of
from headstart.inference.generate.model import SpeculativeModel
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import visible_text_of
from headstart.recipes.schema import TargetSection
from headstart.recipes.schema_heads import Eagle3Section

ESCAPE = "\x1b"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    build_target(folder / "target", num_layers=2)
    for name in ("config.json", "generation_config.json"):  # one end token, or most answers would be empty
        path = folder / "target" / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 0}))
    frozen = FrozenTarget.from_folder(folder / "target", torch.float32)
    vocab = DraftVocab.full(frozen.config.vocab_size)
    save_head(new_head(Eagle3Section(kind="eagle3", taps=(0, 1, 2)), frozen, vocab, seed=0), folder / "head")
    return folder


@pytest.fixture(scope="module")
def talker(folders: Path) -> TargetModel:
    return TargetModel.load(TargetSection(path=str(folders / "target"), dtype="float32", device="cpu"), ())


class Guesser(ModelDrafter):
    """Drafts with a copy of the target whose weights are a little off; presses Ctrl-C in a step, if it is given."""

    steps = 0
    stop_at: int | None = None

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        self.steps += 1
        if self.steps == self.stop_at:
            signal.raise_signal(signal.SIGINT)
        return super().draft(verified, cache)


@pytest.fixture
def guesser(talker: TargetModel) -> Guesser:
    return Guesser(noisy_copy(talker, 0.05), Dynamic.chain(4), talker)


@pytest.fixture
def make_chat(talker: TargetModel, guesser: Guesser) -> Callable[..., tuple[Chat, io.StringIO]]:
    def make(colours: bool = False, longest: int = 16) -> Any:
        printed = io.StringIO()
        system = {"color_system": "truecolor", "force_terminal": True} if colours else {"color_system": None}
        console = Console(file=printed, width=500, highlight=False, **system)
        template = ChatTemplate(build_tokenizer())
        return Chat(SpeculativeModel(talker, guesser), template, Sampling(), longest, console), printed

    return make


def answers(chat: Chat) -> list[str]:
    return [turn["content"] for turn in chat.turns if turn["role"] == "assistant"]


def test_mistakes_are_told_and_the_chat_goes_on(make_chat: Any) -> None:
    chat, printed = make_chat()
    for line in ("/pain", "/plain 3", "/again", "x" * 200):
        assert chat.handle(line)
    told = printed.getvalue()
    for part in ("/pain: not a command; /plain, /draft", "/plain 3: not a command", "ask one first"):
        assert part in told
    assert "shorter question" in told
    assert chat.handle("the target")
    assert len(answers(chat)) == 1
    assert not chat.handle("/quit")


def test_depths_agree_with_the_trees_that_were_verified(talker: TargetModel, guesser: Guesser) -> None:
    request = Request([5, 6, 7, 11], 40, show_trees=True)
    first, *steps = loop_of(talker, [request], guesser).run()
    assert first.depths == [None]
    seen = set[int | None]()
    for step in steps:
        on_path = 0 if step.tree is None else len(step.tree.path) - 1
        depths = [*range(1, on_path + 1), None if step.tree is None else BONUS]
        assert step.depths == depths[: len(step.tokens)]
        seen |= {*step.depths}
    assert {BONUS, 1, 2, 3} <= seen


def test_an_answer_shows_no_end_token_and_its_pieces_are_its_text(make_chat: Any) -> None:
    ended = 0
    for first in range(20, 25):
        prompt, (chat, printed) = [first, 30, 40], make_chat()
        generation = chat.stream(Request(prompt, 24, end_tokens=tuple(ENDS)), Event())
        tokens = generation.tokens[: -1 if generation.finish == "end" else None]
        before = visible_text_of(chat.template.tokenizer, prompt)
        full = visible_text_of(chat.template.tokenizer, prompt + tokens)
        assert printed.getvalue().split() == printable(full[len(before) :]).split()  # rich expands tabs
        ended += generation.finish == "end"
    assert ended


def test_the_oldest_turns_are_dropped_when_the_positions_are_full_and_the_chat_says_so(make_chat, talker) -> None:
    chat, printed = make_chat(longest=16)
    chat.turns = [{"role": role, "content": "a draft is a tree"} for role in ("user", "assistant") * 8]
    tokens, turns = chat.prompt("of tokens")
    assert len(tokens) <= talker.max_positions - 16
    assert turns == [*chat.turns[16 - len(turns) + 1 :], {"role": "user", "content": "of tokens"}]
    dropped = (16 - len(turns) + 1) // 2
    assert f"oldest {dropped} turns are dropped" in printed.getvalue()
    chat.handle("of tokens")
    assert len(chat.turns) == len(turns) + 1
    chat.handle("/reset")
    assert chat.turns == []


def test_ctrl_c_ends_the_answer_after_its_step_and_keeps_what_was_written(make_chat: Any, guesser: Guesser) -> None:
    chat, printed = make_chat()
    guesser.stop_at = 4
    assert chat.handle("the target writes")
    assert "stopped by Ctrl-C" in printed.getvalue()
    [answer] = answers(chat)
    assert printed.getvalue().startswith(printable(answer))
    assert guesser.steps == 4
    assert chat.handle("and the head?")
    assert len(answers(chat)) == 2
    chat.interactive, guesser.stop_at = False, guesser.steps + 4
    with pytest.raises(KeyboardInterrupt):
        chat.handle("and if nobody types?")


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background
    with first_ctrl_c() as pressed:
        assert not pressed.is_set()
        signal.raise_signal(signal.SIGINT)
        assert pressed.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_drafted_tokens_are_coloured_on_a_terminal_only(make_chat: Any) -> None:
    for colours in (True, False):
        chat, printed = make_chat(colours=colours)
        chat.introduce("names")
        chat.handle("the target writes")
        assert (f"{ESCAPE}[30;48;2;217;240;211m" in printed.getvalue()) == colours
        assert (ESCAPE in printed.getvalue()) == colours
        assert ("Draft tokens by depth" in printed.getvalue()) == colours


def test_a_target_without_a_template_continues_each_line_alone_and_control_characters_are_dropped(make_chat) -> None:
    chat, printed = make_chat()
    chat.template.tokenizer.chat_template = None
    chat.introduce("names")
    chat.converse(["  the target\n", "writes\n"])
    assert "no chat template" in printed.getvalue()
    assert chat.turns == []
    assert chat.prompt(" a")[0] == chat.template.tokenizer(" a")["input_ids"]
    assert printable("a\x1b[2J\tb\r\n\x9bé😀") == "a[2J\tb\né😀"


def talk(monkeypatch: pytest.MonkeyPatch, given: bytes, *arguments: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
    monkeypatch.setattr(sys, "argv", ["headstart", "chat", *arguments])
    cli.main()


def test_piped_lines_are_answered_one_by_one_without_colours(folders, monkeypatch, capsys) -> None:
    """A byte that is not UTF-8, an empty line and a missing end of line are no reason to stop."""
    options = ["--target", str(folders / "target"), "--head", str(folders / "head"), "--dtype", "float32"]
    given = b"the target\n\n/plain\nis \xff a draft\n/quit\nnever asked"
    talk(monkeypatch, given, *options, "--max-new-tokens", "8")
    told = capsys.readouterr().out
    asked = [line.removeprefix("> ") for line in told.splitlines() if line.startswith("> ")]
    assert asked == ["the target", "", "/plain", "is \ufffd a draft", "/quit"]
    assert told.count("tokens per target step") == told.count("plain decoding") == 1
    assert ESCAPE not in told


def test_the_targets_settings_apply_to_a_chat_and_the_command_overrides_them(folders, tmp_path, monkeypatch) -> None:
    shutil.copytree(folders / "target", tmp_path / "target")
    path = tmp_path / "target" / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 0, "do_sample": True, "temperature": 1.5, "no_repeat_ngram_size": 1}))
    arguments = ["--target", str(tmp_path / "target"), "--dtype", "float32", "--prompt", "a draft is"]
    streamed, stream = list[tuple[Request, Generation]](), Chat.stream

    def record(chat: Chat, request: Request, stop: Event) -> Generation:
        streamed.append((request, stream(chat, replace(request, max_new_tokens=9), stop)))  # far fewer than the 64
        return streamed[-1][1]

    monkeypatch.setattr(Chat, "stream", record)
    for more in ((), ("--temperature", "0", "--max-new-tokens", "5")):
        talk(monkeypatch, b"", *arguments, *more)
    assert [(each.sampling.temperature, each.max_new_tokens) for each, _ in streamed] == [(1.5, 64), (0, 5)]
    for _, generation in streamed:
        assert len({*generation.tokens}) == len(generation.tokens)
    path.write_text(json.dumps({"num_beams": 4}))
    with pytest.raises(SystemExit, match=r"the target's generation_config.json: num_beams: 4 given, 1 is allowed"):
        talk(monkeypatch, b"", *arguments)


def test_the_default_target_is_fetched_if_it_is_missing(folders, tmp_path, monkeypatch, capsys) -> None:
    def fetch(folder: Path, source: str) -> str:
        folder.parent.mkdir(parents=True)
        folder.symlink_to(folders / "target")
        return f"fetched from {source}"

    monkeypatch.setattr("headstart.options.ROOT", tmp_path)  # no clone
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "fetch", fetch)
    for times, place, more in ((1, tmp_path, ("--head", str(folders / "head"))), (0, folders, ())):
        monkeypatch.chdir(place)
        talk(monkeypatch, b"a draft is\n", *more, "--dtype", "float32", "--max-new-tokens", "4")
        told = capsys.readouterr().out
        assert told.count("fetched from auto") == times
    assert "drafts by prompt lookup" in told  # no bundled head in this folder


def test_a_recipe_says_who_talks_and_how_it_drafts(tmp_path, folders, monkeypatch, capsys) -> None:
    for name in ("prompts.jsonl", "heldout.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe_values(tmp_path)))
    names = [f"target.path={folders / 'target'}", f"decode.head={folders / 'head'}", "decode.growth=chain"]
    talk(monkeypatch, b"the target\n", str(tmp_path / "recipe.yaml"), *names, "--seed", "3")
    told = capsys.readouterr().out
    assert f"drafts by head {folders / 'head'}, float32 on cpu" in told
    assert "tokens per target step" in told
    assert "cut off after --max-new-tokens 8" in told

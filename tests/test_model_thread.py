"""Laws of the thread in which the target works."""

import asyncio
import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
from tiny_run import build_target

from headstart.inference.serve import command
from headstart.inference.serve.engine import Engine
from headstart.inference.serve.model_thread import ModelThread
from headstart.inference.serve.options import serve_options


def test_the_thread_that_loads_the_target_also_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that compute had two pools of OpenMP threads, which slowed every step down by a third."""
    folder, seen = build_target(tmp_path / "target"), []
    from_folders = command.SpeculativeModel.from_folders

    def note(*given: object, **fields: object) -> object:
        seen.append(threading.get_ident())
        return from_folders(*given, **fields)  # type: ignore[arg-type]

    monkeypatch.setattr(command.SpeculativeModel, "from_folders", note)
    thread = ModelThread()
    options = serve_options(None, ["--target", str(folder), "--dtype", "float32"])
    served = thread.submit(partial(command.load, options, thread)).result()
    assert served.thread is thread

    def make_loop() -> object:
        seen.append(threading.get_ident())
        return served.make_loop()

    async def run() -> None:
        engine = Engine(served.thread, make_loop, lambda job, event: None)  # type: ignore[arg-type]
        assert not engine.alive
        engine.start()
        assert engine.alive
        engine.stop()
        assert not engine.alive

    asyncio.run(run())
    assert len(seen) == 2
    assert seen[0] == seen[1] != threading.get_ident()


def test_what_a_call_returns_or_raises_reaches_the_one_who_waits() -> None:
    thread, started = ModelThread(), []

    def fail() -> None:
        raise ValueError("no such head")

    def end() -> None:
        raise SystemExit(2)

    found: list[Future[object]] = [thread.submit(call) for call in (lambda: started.append(1), fail, end, lambda: 7)]
    thread.end()
    with pytest.raises(ValueError, match="no such head"):
        found[1].result()
    with pytest.raises(SystemExit):
        found[2].result()
    assert (found[3].result(), started) == (7, [1])


def test_a_second_engine_on_an_ended_thread_fails_at_once_and_does_not_wait_forever() -> None:
    thread = ModelThread()
    thread.end()
    with pytest.raises(RuntimeError, match="one loaded target serves one engine"):
        thread.submit(lambda: 1)

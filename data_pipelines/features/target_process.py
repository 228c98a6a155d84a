"""A target in a separate process on its own device, which reads the next samples while the head trains."""

import multiprocessing
import signal
from multiprocessing.connection import Connection
from threading import Lock

from safetensors.torch import load, save

from headstart.common.launcher import end_with_parent
from headstart.data_pipelines.features.features import States, tap
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import TargetSection


class TargetProcess:
    """Runs `tap` in another process, which ends when closed or when this process ends."""

    def __init__(self, section: TargetSection, taps: tuple[int, ...], device: str) -> None:
        self.device = device
        context = multiprocessing.get_context("spawn")  # a forked process could not use a GPU
        self._pipe, its_end = context.Pipe()
        section = section.model_copy(update={"device": device})
        self._process = context.Process(target=serve, args=(section, taps, its_end), daemon=True)
        self._process.start()
        its_end.close()
        self._lock = Lock()  # training samples are requested from a thread, held-out ones from the main thread

    def tap(self, texts: list[list[int]]) -> States:
        """The states of the texts; raises ValueError if the process has ended."""
        try:
            with self._lock:
                self._pipe.send(texts)
                answer = self._pipe.recv_bytes()
        except (EOFError, OSError) as error:
            raise ValueError(
                f"data.online_devices: the target's process on {self.device} has ended; see its error message above"
            ) from error
        return States(**load(answer))

    def close(self) -> None:
        self._pipe.close()  # the process ends when its pipe closes
        self._process.join()


def serve(section: TargetSection, taps: tuple[int, ...], pipe: Connection) -> None:
    """Answer requests until the pipe is closed or the other process is gone."""
    # Ctrl-C reaches every process; training saves first, then closes this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    target = TargetModel.load(section, taps)
    while True:
        try:
            texts = pipe.recv()
        except EOFError:
            return
        states = tap(target, texts)
        pipe.send_bytes(save({name: tensor.cpu() for name, tensor in vars(states).items()}))

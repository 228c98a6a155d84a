"""A target in a process and on a device of its own, which reads the next samples while a head trains on these."""

import multiprocessing
import signal
from multiprocessing.connection import Connection
from threading import Lock

from safetensors.torch import load, save

from data_pipelines.features import States, tap
from inference.target.model import TargetModel
from recipes.schema import TargetSection


class TargetProcess:
    """What `tap` gives, computed elsewhere; ends with this process, or when it is closed."""

    def __init__(self, section: TargetSection, taps: tuple[int, ...], device: str) -> None:
        self.device = device
        context = multiprocessing.get_context("spawn")  # a forked process could not use a GPU
        self._pipe, its_end = context.Pipe()
        section = section.model_copy(update={"device": device})
        self._process = context.Process(target=serve, args=(section, taps, its_end), daemon=True)
        self._process.start()
        its_end.close()
        self._lock = Lock()  # samples to train on are asked for in a thread, those held out are not

    def ask(self, texts: list[list[int]]) -> States:
        """Raises ValueError where the process has ended."""
        try:
            with self._lock:
                self._pipe.send(texts)
                answer = self._pipe.recv_bytes()
        except (EOFError, OSError) as error:
            raise ValueError(
                f"data.online_devices: the target's process on {self.device} has ended; see what it said above"
            ) from error
        return States(**load(answer))

    def close(self) -> None:
        self._pipe.close()  # which ends it
        self._process.join()


def serve(section: TargetSection, taps: tuple[int, ...], pipe: Connection) -> None:
    """Answer until the other end is closed, or its process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the training saves first, and then closes
    target = TargetModel.load(section, taps)
    while True:
        try:
            texts = pipe.recv()
        except EOFError:
            return
        states = tap(target, texts)
        pipe.send_bytes(save({name: tensor.cpu() for name, tensor in vars(states).items()}))

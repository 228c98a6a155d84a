"""A connection between the ranks that breaks when one of them dies, so that the others end instead of waiting.

A collective operation waits for a dead rank until its time-out, which is hours. The operating system, however, closes
the connections of a killed process at once, and keepalive packets find a machine that is gone.
"""

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

CONNECT_SECONDS = 20.0
SETTLE_SECONDS = 0.5
GRACE_SECONDS = 5.0  # for a rank to end by itself, with an error message of its own
DONE = "done"
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # a silent machine is given up after 30 s


@contextmanager
def lifeline(state: PartialState) -> Iterator[None]:
    """End this process if another rank dies, or fails, while the context is open; every rank must enter."""
    if state.num_processes == 1:
        yield
        return
    line = connect(state)
    try:
        yield
    except SystemExit:  # all ranks exit together
        line.close(DONE)
        settle()
        raise
    except BaseException as error:
        line.close(f"failed: {error or type(error).__name__}")
        if isinstance(error, RuntimeError) and (lost := line.lost_peer()):  # it failed in an operation with that rank
            raise ValueError(lost) from error
        raise
    line.close(DONE)
    settle()


def settle() -> None:
    """Leave the interpreter to the threads of torch for a moment, before a rank ends.

    gloo's threads need it to drop the tensors of the last collective operation. If the interpreter is being torn down
    by then, it waits for them and they wait for it, for ever (seen with torch 2.13 under DDP).
    """
    time.sleep(SETTLE_SECONDS)


class Line:
    """This rank's end: on the main rank the connections to all others, elsewhere the one to the main rank."""

    def __init__(self, rank: int, peers: dict[int, socket.socket]) -> None:
        self.rank, self.peers = rank, peers
        self.closed, self._lost = threading.Event(), threading.Event()
        self._message = ""
        self.threads = [threading.Thread(target=self._watch, args=peer, daemon=True) for peer in peers.items()]
        for thread in self.threads:
            thread.start()

    def lost_peer(self) -> str | None:
        """What to tell the user about the rank that this one has lost, if it has."""
        return self._message if self._lost.wait(1.0) else None

    def close(self, message: str) -> None:
        """Tell the peers how this rank ended."""
        self.closed.set()
        self._tell(f"{self.rank} {message}", self.peers)
        for connection in self.peers.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    def _tell(self, line: str, peers: Iterable[int]) -> None:
        for peer in peers:
            with suppress(OSError):
                self.peers[peer].sendall((" ".join(line.split()) + "\n").encode())

    def _watch(self, peer: int, connection: socket.socket) -> None:
        """Wait for the peer's last words; without `done`, end this process and pass the news on."""
        try:
            words = read_line(connection)
        except OSError:
            words = ""
        rank, _, message = words.partition(" ")
        if message == DONE:
            return
        said = message or "ended without a word, as a killed process or a lost machine does"
        self._message = (
            f"rank {self.rank} ends, because rank {rank or peer} {said}; start the same command again, on all "
            "machines: it goes on from what was saved last"
        )
        self._lost.set()
        self._tell(f"{rank or peer} {said}", self.peers.keys() - {peer})
        if self.closed.wait(GRACE_SECONDS):
            return
        print(f"error: {self._message}", file=sys.stderr, flush=True)
        os._exit(1)  # the main thread may be waiting in a collective operation, which nothing interrupts


def connect(state: PartialState) -> Line:
    """Connect the main rank with each other one."""
    token = secrets.token_hex(16)
    listener = listen() if state.is_main_process else None
    address = [None if listener is None else (listener.getsockname()[1], token)]
    port, token = broadcast_object_list(address)[0]
    if listener is None:
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
        connection.settimeout(None)
        keep_alive(connection)
        connection.sendall(f"{token} {state.process_index}\n".encode())
        return Line(state.process_index, {0: connection})
    with listener:
        return Line(0, accept(listener, token, state.num_processes - 1))


def listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def accept(listener: socket.socket, token: str, count: int) -> dict[int, socket.socket]:
    """The connections of `count` ranks that know the token; raises TimeoutError if one does not come."""
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + CONNECT_SECONDS
    while len(found) < count:
        listener.settimeout(max(deadline - time.monotonic(), 0.001))
        connection, _ = listener.accept()
        connection.settimeout(CONNECT_SECONDS)
        said, _, rank = read_line(connection).partition(" ")
        if said != token:
            connection.close()
            continue
        connection.settimeout(None)
        keep_alive(connection)
        found[int(rank)] = connection
    return found


def read_line(connection: socket.socket) -> str:
    """The next line, and no byte more; what there is of it if the connection ends first."""
    line = b""
    while (byte := connection.recv(1)) not in (b"", b"\n"):
        line += byte
    return line.decode("utf-8", "replace")


def keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

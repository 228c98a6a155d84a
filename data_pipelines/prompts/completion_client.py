"""Completions from OpenAI-compatible servers that run the target, such as vLLM or SGLang."""

import fcntl
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

import httpx

from headstart.data_pipelines.stages.stage import Json
from headstart.inference.core.sampling import Sampling

TIMEOUT = httpx.Timeout(10.0, read=600.0)  # seconds; a whole response is one read
RETRIES = 5
RETRIED_STATUSES = {408, 409, 429, 500, 502, 503, 504}  # HTTP statuses that may be temporary
REMEDY = "check the server and run the command again; finished responses are kept"


@dataclass
class CompletionServer:
    """One URL of data.server."""

    url: str
    failure: str = ""  # the reason to stop using it


@dataclass(frozen=True)
class Completion:
    """A server's answer to a completion, or with its models."""

    url: str
    content: Json
    choice: Json  # the first

    @property
    def states_path(self) -> Path | None:
        """The file into which vLLM's method extract_hidden_states writes the states of the prompt."""
        path = (self.content.get("kv_transfer_params") or {}).get("hidden_states_path")
        return None if path is None else Path(path)

    @contextmanager
    def written_states(self) -> Iterator[Path]:
        """The path of that file once it is whole; it is removed at the end. Raises OSError if it is not there."""
        assert self.states_path is not None
        lock = self.states_path.with_name(self.states_path.name + ".lock")
        try:
            with lock.open() as held:
                fcntl.flock(held, fcntl.LOCK_SH)  # vLLM holds it until the file is whole
            yield self.states_path
        finally:
            for path in (self.states_path, lock):
                path.unlink(missing_ok=True)

    def tokens(self, vocab_size: int, ends: Set[int]) -> list[int]:
        """The ids that the target wrote; raises ValueError if the server does not give them all, or another model's.

        They cannot be read from the text: other tokens spell the same text, and it may hide the end token.
        """
        tokens = self.choice.get("token_ids")
        if not isinstance(tokens, list):
            lacks = (
                f"data.server: {self.url} answers without token_ids, and text alone does not tell the target's tokens"
            )
            raise ValueError(f"{lacks}; use a server that knows return_token_ids: vLLM, SGLang or headstart serve")
        if unknown := [token for token in tokens if token not in range(vocab_size)]:
            answered = f"data.server: {self.url} answered with token {unknown[0]}, 0 to {vocab_size - 1} of the target"
            raise ValueError(f"{answered} is allowed; start the server with the target of target.path")
        if ends and self.choice.get("finish_reason") == "stop" and ends.isdisjoint(tokens[-1:]):
            last = f"token {tokens[-1]}" if tokens else "no token"
            allowed = f"an end token of the target ({', '.join(map(str, sorted(ends)))}) is allowed: use a server"
            raise ValueError(
                f"data.server: {self.url} answered with finish_reason 'stop' after {last}, {allowed} whose token_ids "
                "hold it, or add the token at which it stops to eos_token_id in the target's generation_config.json"
            )
        return tokens


class CompletionClient:
    """Sends requests to servers of one model, several at a time; a server gets the next one once it has answered.

    A failed request is retried after 1, 2, 4, ... seconds if its error may be temporary. A server that still fails is
    named once and no longer used; its requests go to the others. Raises ValueError if no server is left, for permanent
    errors, and if the servers serve different models.
    """

    def __init__(self, urls: Sequence[str], pause: Callable[[float], None] = time.sleep) -> None:
        self.servers, self.pause = [CompletionServer(url.rstrip("/").removesuffix("/v1")) for url in urls], pause
        self._lock = Lock()  # guards the failures of the servers
        # One connection per request: httpx allows 100 by default, and the other requests would time out.
        self.client = httpx.Client(timeout=TIMEOUT, limits=httpx.Limits(max_connections=None))
        weakref.finalize(self, self.client.close)
        with ThreadPoolExecutor(max_workers=len(urls)) as pool:
            answers = list(pool.map(lambda server: self._ask(server, "/v1/models", "data"), self.servers))
        served = {answer.url: answer.choice["id"] for answer in answers if answer is not None}
        if not served:
            raise self._none_left()
        (first, self.model), *others = served.items()
        if wrong := [f"{url} serves {its}" for url, its in others if its != self.model]:
            allowed = "servers of one model, the target, are allowed: correct data.server, or start them all with it"
            raise ValueError(f"data.server: {first} serves {self.model}, but {' and '.join(wrong)}; {allowed}")

    @property
    def live(self) -> list[CompletionServer]:
        return [server for server in self.servers if not server.failure]

    def each(self, bodies: Sequence[Json], at_once: int) -> Iterator[tuple[int, Completion]]:
        """Yield (number of the completion, its answer) as each arrives; up to `at_once` are in flight on each server.

        After a failure nothing more is asked for, and the error is raised after the answers that still arrive.
        """
        waiting, error = deque(range(len(bodies))), None
        asked, done = dict[Future[Completion | None], tuple[str, int]](), SimpleQueue[Any]()
        with ThreadPoolExecutor(max_workers=at_once * len(self.servers)) as pool:
            while waiting or asked:
                in_flight = Counter(url for url, _ in asked.values())
                while waiting and (free := [each for each in self.live if in_flight[each.url] < at_once]):
                    server, number = min(free, key=lambda each: in_flight[each.url]), waiting.popleft()
                    in_flight[server.url] += 1
                    answer = pool.submit(self.ask, server, bodies[number])
                    asked[answer] = server.url, number
                    answer.add_done_callback(done.put)
                if not asked:
                    raise self._none_left()
                _, number = asked.pop(answer := done.get())
                if answer.exception() is not None:
                    error = answer.exception()
                elif answer.result() is not None:
                    yield number, answer.result()
                else:
                    waiting.append(number)
                if error is not None:
                    waiting.clear()
        if error is not None:
            raise error

    def ask(self, server: CompletionServer, body: Json) -> Completion | None:
        """One server's answer to a completion; None if the server is no longer used."""
        return self._ask(server, "/v1/completions", "choices", {"model": self.model, **body})

    def _ask(self, server: CompletionServer, path: str, key: str, body: Json | None = None) -> Completion | None:
        """The server's answer, whose list `key` has an entry; None if the server is no longer used."""
        for attempt in range(RETRIES + 1):
            if attempt:
                self.pause(2.0 ** (attempt - 1))
            if server.failure:
                return None
            try:
                answer = self.client.request("GET" if body is None else "POST", server.url + path, json=body)
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code == 200:
                return completion_of(server, answer, key)
            reason = f"status {answer.status_code}: {answer.text[:200]}"
            if answer.status_code not in RETRIED_STATUSES:
                raise ValueError(f"data.server: {server.url}{path} gave no answer ({reason}); {REMEDY}")
        reason = f"{server.url}{path} gave no answer ({reason})"
        with self._lock:
            is_first, server.failure = not server.failure, server.failure or reason
        if is_first and (left := len(self.live)):
            print(f"data.server: {reason}; stopped using it; {left} of {len(self.servers)} servers remain", flush=True)
        return None

    def _none_left(self) -> ValueError:
        return ValueError(f"data.server: {' and '.join(server.failure for server in self.servers)}; {REMEDY}")


def completion(prompt: list[int], sampling: Sampling, max_new_tokens: int) -> Json:
    """The body of a request for a response."""
    return {
        "prompt": prompt,
        "max_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "return_token_ids": True,
        "skip_special_tokens": False,
    }


def completion_of(server: CompletionServer, answer: httpx.Response, key: str) -> Completion:
    """An answer with the first entry of its list `key`; raises ValueError if there is none."""
    try:
        content = dict(answer.json())
        return Completion(server.url, content, dict(content[key][0]))
    except (ValueError, LookupError, TypeError) as error:
        lacking = f"data.server: {server.url} answers without {key} ({answer.text[:200]})"
        needed = "an OpenAI-compatible server is needed, such as vLLM or SGLang: check the URL"
        raise ValueError(f"{lacking}; {needed}") from error

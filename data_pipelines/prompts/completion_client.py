"""Completions from OpenAI-compatible servers that run the target, such as vLLM or SGLang."""

import fcntl
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock

import httpx

from headstart.data_pipelines.stages.stage import Json
from headstart.inference.core.sampling import Sampling
from headstart.inference.targets.tokenizer import Tokenizer

TIMEOUT = httpx.Timeout(10.0, read=600.0)  # seconds; a whole response is one read
RETRIES = 5
RETRIED_STATUSES = {408, 409, 429, 500, 502, 503, 504}  # HTTP statuses that may be temporary
REMEDY = "check the server and run the command again; finished responses are kept"


@dataclass
class Server:
    """One URL of data.server."""

    url: str
    in_flight: int = 0  # requests of ours
    failure: str = ""  # the reason to stop using it


@dataclass(frozen=True)
class Answer:
    """A server's answer to a completion."""

    url: str
    content: Json
    choice: Json

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

    def tokens(self, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
        """The ids that the server gives (vLLM's return_token_ids), else those of its text; ValueError beyond a
        target's vocabulary."""
        if self.choice.get("token_ids") is not None:
            tokens = list(self.choice["token_ids"])
        else:
            tokens = list(tokenizer(self.choice["text"], add_special_tokens=False)["input_ids"])
            end = tokenizer.eos_token_id
            if self.choice.get("finish_reason") == "stop" and end is not None and tokens[-1:] != [end]:
                tokens.append(end)
        if max(tokens, default=0) >= vocab_size:
            answered = f"data.server: {self.url} answered with token {max(tokens)}, 0 to {vocab_size - 1} of the target"
            raise ValueError(f"{answered} is allowed; start the server with the target of target.path")
        return tokens


class CompletionClient:
    """Sends requests to servers of one model, several at a time, each to the server with the fewest of them in flight.

    A failed request is retried after 1, 2, 4, ... seconds if its error may be temporary. A server that still fails is
    named once and no longer used; its requests go to the others. Raises ValueError if no server is left, for permanent
    errors, and if the servers serve different models.
    """

    def __init__(self, urls: Sequence[str], pause: Callable[[float], None] = time.sleep) -> None:
        self.servers, self.pause = [Server(url.rstrip("/").removesuffix("/v1")) for url in urls], pause
        self._lock = Lock()  # of the servers' counts and failures
        # One connection per request: httpx allows 100 by default, and the other requests would time out.
        self.client = httpx.Client(timeout=TIMEOUT, limits=httpx.Limits(max_connections=None))
        weakref.finalize(self, self.client.close)
        self.model = self._served_by_all()

    @property
    def live(self) -> list[Server]:
        return [server for server in self.servers if not server.failure]

    def each(self, bodies: Sequence[Json], at_once: int) -> Iterator[tuple[int, Answer]]:
        """Yield (number of the completion, its answer) as each arrives; up to `at_once` are in flight on each server.

        After a failure nothing more is asked for, and the error is raised after the answers that still arrive.
        """
        with ThreadPoolExecutor(max_workers=at_once * len(self.servers)) as pool:
            waiting = enumerate(bodies)
            in_flight: dict[Future[Answer], int] = {}
            failure = None
            while True:
                if failure is None:
                    free = max(at_once * len(self.live) - len(in_flight), 0)
                    in_flight |= {pool.submit(self._complete, body): number for number, body in islice(waiting, free)}
                if not in_flight:
                    break
                for future in wait(in_flight, return_when=FIRST_COMPLETED).done:
                    number = in_flight.pop(future)
                    if (error := future.exception()) is None:
                        yield number, future.result()
                    failure = failure or error
            if failure is not None:
                raise failure

    def ask(self, server: Server, body: Json) -> Answer | None:
        """One server's answer to a completion; None if the server is no longer used."""
        response = self._ask(server, "POST", "/v1/completions", {"model": self.model, **body})
        return (
            None if response is None else Answer(server.url, response.json(), first_entry(server, response, "choices"))
        )

    def _complete(self, body: Json) -> Answer:
        while True:
            with self._lock:
                if not self.live:
                    raise self._none_left()
                server = min(self.live, key=lambda each: each.in_flight)
                server.in_flight += 1
            try:
                answer = self.ask(server, body)
            finally:
                with self._lock:
                    server.in_flight -= 1
            if answer is not None:
                return answer

    def _served_by_all(self) -> str:
        """The model that every server serves; raises ValueError naming those that serve another than the first."""
        with ThreadPoolExecutor(max_workers=len(self.servers)) as pool:
            asked = list(pool.map(lambda server: self._ask(server, "GET", "/v1/models", None), self.servers))
        answers = [(server, answer) for server, answer in zip(self.servers, asked, strict=True) if answer is not None]
        if not answers:
            raise self._none_left()
        served = {server.url: str(first_entry(server, answer, "data")["id"]) for server, answer in answers}
        (first, model), *others = served.items()
        if wrong := [f"{url} serves {its}" for url, its in others if its != model]:
            allowed = "servers of one model, the target, are allowed: correct data.server, or start them all with it"
            raise ValueError(f"data.server: {first} serves {model}, but {' and '.join(wrong)}; {allowed}")
        return model

    def _ask(self, server: Server, method: str, path: str, body: Json | None) -> httpx.Response | None:
        """The server's answer with status 200; None if the server is no longer used."""
        for attempt in range(RETRIES + 1):
            if attempt:
                self.pause(2.0 ** (attempt - 1))
            if server.failure:
                return None
            try:
                response = self.client.request(method, server.url + path, json=body)
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == 200:
                return response
            reason = f"status {response.status_code}: {response.text[:200]}"
            if response.status_code not in RETRIED_STATUSES:
                raise ValueError(f"data.server: {server.url}{path} gave no answer ({reason}); {REMEDY}")
        self._give_up(server, f"{server.url}{path} gave no answer ({reason})")
        return None

    def _give_up(self, server: Server, reason: str) -> None:
        with self._lock:
            is_first, server.failure = not server.failure, server.failure or reason
            left = len(self.live)
        if is_first and left:
            print(f"data.server: {reason}; stopped using it; {left} of {len(self.servers)} servers remain", flush=True)

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


def first_entry(server: Server, answer: httpx.Response, key: str) -> Json:
    """The first entry of the list `key` of an answer; raises ValueError if it has none."""
    try:
        return dict(answer.json()[key][0])
    except (ValueError, LookupError, TypeError) as error:
        lacking = f"data.server: {server.url} answers without {key} ({answer.text[:200]})"
        needed = "an OpenAI-compatible server is needed, such as vLLM or SGLang: check the URL"
        raise ValueError(f"{lacking}; {needed}") from error

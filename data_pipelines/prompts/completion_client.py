"""Responses from an OpenAI-compatible server that runs the target, such as vLLM or SGLang."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice

import httpx

from headstart.data_pipelines.stages.stage import Json
from headstart.inference.core.sampling import Sampling
from headstart.inference.targets.tokenizer import Tokenizer

TIMEOUT = httpx.Timeout(10.0, read=600.0)  # seconds; a whole response is one read
RETRIES = 5
RETRIED_STATUSES = {408, 409, 429, 500, 502, 503, 504}  # HTTP statuses that may pass with time


class CompletionClient:
    """Sends prompts as token ids and returns the server's responses as token ids, several at a time.

    The ids come from the server if it gives them (vLLM's return_token_ids), else its text is tokenized. A failed
    request is retried after 1, 2, 4, ... seconds if its error may pass with time; in the end it raises ValueError.
    """

    def __init__(self, url: str, tokenizer: Tokenizer, pause: Callable[[float], None] = time.sleep) -> None:
        self.url, self.tokenizer, self.pause = url.rstrip("/").removesuffix("/v1"), tokenizer, pause
        # One connection per request: httpx allows 100 by default, and the other requests would time out.
        self.client = httpx.Client(timeout=TIMEOUT, limits=httpx.Limits(max_connections=None))
        self.model = str(self._found(self._ask("GET", "/v1/models", None), "data")["id"])

    def complete(
        self, prompts: list[list[int]], samplings: list[Sampling], max_new_tokens: int, at_once: int
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield (number of the prompt, its response) as each arrives; `at_once` requests are in flight together.

        After a failure nothing more is asked for, and the error is raised after the responses that still arrive.
        """

        def one(prompt: list[int], sampling: Sampling) -> list[int]:
            body = {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": max_new_tokens,
                "temperature": sampling.temperature,
                "seed": sampling.seed,
                "return_token_ids": True,
                "skip_special_tokens": False,
            }
            return self._tokens(self._found(self._ask("POST", "/v1/completions", body), "choices"))

        with ThreadPoolExecutor(max_workers=at_once) as pool:
            waiting = enumerate(zip(prompts, samplings, strict=True))
            in_flight: dict[Future[list[int]], int] = {}
            failure = None
            while True:
                if failure is None:
                    free = at_once - len(in_flight)
                    in_flight |= {pool.submit(one, *pair): number for number, pair in islice(waiting, free)}
                if not in_flight:
                    break
                for future in wait(in_flight, return_when=FIRST_COMPLETED).done:
                    number = in_flight.pop(future)
                    if (error := future.exception()) is None:
                        yield number, future.result()
                    failure = failure or error
            if failure is not None:
                raise failure

    def _found(self, answer: httpx.Response, key: str) -> Json:
        """The first entry of the list `key` of an answer; raises ValueError if there is none."""
        try:
            found: Json = dict(answer.json()[key][0])
        except (ValueError, LookupError, TypeError) as error:
            lacking = f"data.server: {self.url} answers without {key} ({answer.text[:200]})"
            needed = "an OpenAI-compatible server is needed, such as vLLM or SGLang: check the URL"
            raise ValueError(f"{lacking}; {needed}") from error
        return found

    def _tokens(self, choice: Json) -> list[int]:
        if choice.get("token_ids") is not None:
            return list(choice["token_ids"])
        tokens = list(self.tokenizer(choice["text"], add_special_tokens=False)["input_ids"])
        end = self.tokenizer.eos_token_id
        ended = choice.get("finish_reason") == "stop" and end is not None and tokens[-1:] != [end]
        return [*tokens, end] if ended else tokens

    def _ask(self, method: str, path: str, body: Json | None) -> httpx.Response:
        for attempt in range(RETRIES + 1):
            if attempt:
                self.pause(2.0 ** (attempt - 1))
            try:
                response = self.client.request(method, self.url + path, json=body)
            except httpx.TransportError as error:
                why = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == 200:
                return response
            why = f"status {response.status_code}: {response.text[:200]}"
            if response.status_code not in RETRIED_STATUSES:
                break
        advice = "check the server and run the command again, which keeps the finished responses"
        raise ValueError(f"data.server: {self.url}{path} gave no answer ({why}); {advice}")

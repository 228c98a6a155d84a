"""What a learner asks of the server whose head it trains."""

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import torch
from safetensors.torch import load

from headstart.data_pipelines.features.shard_files import HEADER_SIZE
from headstart.heads.target_config import TargetConfig
from headstart.inference.serve.options import KEYS
from headstart.trainers.refresh.refresh import Rollout

PATIENCE = 3600.0  # seconds: a new head takes over when the texts that have begun are finished
LONGEST = 2048  # the last positions of a text that are trained on


class AdaptingServer:
    """A server with --adapt-memory. Raises UnreachableError or RefusedError."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.key = os.environ.get(KEYS, "").partition(",")[0]

    def facts(self) -> dict[str, Any]:
        """The head that it serves, and how much traffic it has."""
        return json.loads(self._ask("/adapt"))

    def serve(self, folder: str) -> None:
        """Let it decode with the head in a folder, for all requests that have not begun."""
        self._ask("/adapt/head", {"folder": folder})

    def traffic(self, taps: tuple[int, ...], target: TargetConfig) -> Iterator[Rollout]:
        """The finished requests that it keeps, oldest first, with these taps."""
        newest = 0
        while True:
            page = self._ask(f"/adapt/traffic?since={newest}")
            header = json.loads(page[HEADER_SIZE : HEADER_SIZE + int.from_bytes(page[:HEADER_SIZE], "little")])
            about, tensors = header["__metadata__"], load(page)
            given = json.loads(about["taps"])
            columns = torch.cat(
                [column_range(given.index(tap), target.hidden_size) for tap in (*taps, target.num_layers)]
            )
            rows = json.loads(about["requests"])
            if not rows:
                return
            for row in rows:
                newest = row["number"]
                tokens, states = tensors[f"{newest}.tokens"].long(), tensors[f"{newest}.states"]
                written = torch.arange(len(tokens)) >= row["response"]
                text, flags, own = (part[-LONGEST:] for part in (tokens, written, states[:, columns]))
                yield Rollout(text.tolist(), flags.tolist(), own, row["heldout"])

    def _ask(self, path: str, fields: dict[str, Any] | None = None) -> bytes:
        headers, method = {"Authorization": f"Bearer {self.key}"} if self.key else {}, "POST" if fields else "GET"
        try:
            answer = httpx.request(method, self.url + path, json=fields, headers=headers, timeout=PATIENCE)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            needed = "a running server is needed; start headstart serve RECIPE --adapt-memory 0.25"
            raise UnreachableError(f"--server: {self.url} cannot be reached ({error}); {needed}") from error
        if answer.status_code != 200:
            says = "it has no such path; start it with --adapt-memory" if answer.status_code == 404 else answer.text
            kind = RefusedError if answer.status_code < 500 else UnreachableError
            raise kind(f"--server: {self.url}{path} refuses ({answer.status_code}): {says}")
        return answer.content


class RefusedError(ValueError):
    """The server is there and says no."""


class UnreachableError(ValueError):
    """The server is not there, or not able to answer; it may be later."""


def column_range(place: int, size: int) -> torch.Tensor:
    return torch.arange(place * size, (place + 1) * size)

"""One request on its way through the decode loop: submits its choices, and yields what each step adds to them."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

from headstart.inference.serve.api.encode import Encoded
from headstart.inference.serve.api.errors import ApiError, stopping
from headstart.inference.serve.api.output import Choice, End, Event, Output, RequestProgress, Update
from headstart.inference.serve.options import ServerSettings
from headstart.inference.serve.worker import Worker, internal_error


class Exchange(RequestProgress):
    """Submits the choices of a request, and yields what is added to them until all have ended."""

    def __init__(self, encoded: Encoded, arrived: float, worker: Worker, settings: ServerSettings) -> None:
        super().__init__(encoded, arrived)
        self.worker, self.settings = worker, settings
        self.running = {*self.choices}  # those that the worker has not ended
        self.is_too_late = False
        for choice in self.choices:
            worker.submit(choice)

    async def outputs(self, pause: float | None = None) -> AsyncIterator[tuple[Choice, Output] | None]:
        """What each step adds; None after `pause` silent seconds. Raises ApiError if the worker or a limit ends it."""
        while self.running:
            yield await self._next(pause)

    def cancel(self) -> None:
        """Cancel the choices that are still running."""
        for choice in self.running:
            self.worker.cancel(choice)

    async def settle(self) -> None:
        """Cancel the choices that are still running, and wait until the worker has ended them."""
        if self.worker.alive:
            self.cancel()
        while self.running and (self.worker.alive or not self.events.empty()):
            with suppress(ApiError):
                await self._take(*await self.events.get())

    async def _next(self, pause: float | None) -> tuple[Choice, Output] | None:
        """The additions of the next event; a request's time limit cancels its choices, and their ends follow."""
        limit = self.settings.queue_timeout if self.first is None else self.settings.request_timeout
        left = None if limit is None or self.is_too_late else max(self.arrived + limit - time.perf_counter(), 0.001)
        waits = [seconds for seconds in (pause, left) if seconds is not None]
        try:
            async with asyncio.timeout(min(waits, default=None)):
                taken = await self.events.get()
        except TimeoutError:
            if left is None or left > min(waits):
                return None
        else:
            return await self._take(*taken)
        if self.first is None:
            message = f"no token within {limit:g} seconds, the server's --queue-timeout; send the request again later"
            raise ApiError(503, message, headers={"Retry-After": "10"})
        self.is_too_late = True
        self.cancel()
        return None

    async def _take(self, choice: Choice, event: Event) -> tuple[Choice, Output]:
        if isinstance(event, Update):
            if self.first is None:
                self.first, self.prefill = event.at, event.at - event.seconds
            self.last = event.at
        else:
            self.running.discard(choice)
            self.ended = time.perf_counter()
        if isinstance(event, ApiError):
            choice.finish = "error"
            raise event
        if self.first is None and isinstance(event, End) and event.finish == "cancelled":
            raise stopping()  # the server is ending, and the client has received nothing yet
        try:
            if isinstance(event, End):
                output = choice.end(event)
            elif event.prompt is None:
                output = choice.grow(event)
            else:  # this shapes every token of the prompt
                output = await asyncio.to_thread(choice.grow, event)
        except Exception as error:  # such as in the text of its tokens
            choice.finish = "error"
            raise internal_error(error) from error
        if isinstance(event, Update) and choice.is_over:
            self.worker.cancel(choice)  # unless the loop has ended the text itself
        return choice, output

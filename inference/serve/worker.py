"""The thread that owns target, head and decode loop. Other threads send it orders through a queue."""

import asyncio
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from functools import partial
from queue import Empty, SimpleQueue

from headstart.inference.core.constraint import NoWayOnError
from headstart.inference.core.request import EmittedTokens
from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.serve.api.errors import ApiError, stopping
from headstart.inference.serve.api.output import Choice, End, Event, Update

Observe = Callable[[Choice, Event], None]
# A step takes the interpreter's lock again after each operation of torch. By Python's 5 ms, a thread that reads a large
# body would keep it from each of some hundred operations, and the next token would come seconds late.
LOCK_SECONDS = 0.0005


class Worker:
    """Runs the decode loop in the model's thread and hands events back to asyncio."""

    def __init__(self, thread: Executor, make_loop: Callable[[], DecodeLoop], observe: Observe) -> None:
        """`thread` is the one that loaded the target. `make_loop` is called in it, and again after a step that failed.

        No other thread computes: GNU's OpenMP keeps a pool for each computing thread. Once the pools hold more threads
        than there are cores, waking them takes a quarter to a third of a small target's step on two cores.

        `observe` is called in asyncio's thread with each event as soon as it happens, before a slow client reads it.
        """
        self.thread, self.make_loop, self.observe = thread, make_loop, observe
        self.orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.next: tuple[Callable[[], DecodeLoop], Future[None]] | None = None  # the loop to change to
        self.choices: dict[int, Choice] = {}
        self.running = True
        self.ended: Future[None] | None = None
        self.prefixes = 0, 0  # tokens of prompts that were looked up among earlier texts, and those in the cache
        self.cache_usage = 0.0  # the batch's
        self.failures = 0  # steps that ended in an error
        self.asyncio: asyncio.AbstractEventLoop

    @property
    def alive(self) -> bool:
        return self.ended is not None and not self.ended.done()

    def start(self) -> None:
        """Begin to decode; events go to the asyncio loop that is running now."""
        sys.setswitchinterval(LOCK_SECONDS)
        self.asyncio = asyncio.get_running_loop()
        self.ended = self.thread.submit(self._run)
        self.thread.shutdown(wait=False)  # so that a second worker on this thread fails instead of waiting forever

    def submit(self, choice: Choice) -> None:
        if not self.alive:
            raise ApiError(503, "the decode loop has stopped; restart the server")
        self.orders.put(partial(self._submit, choice))

    def cancel(self, choice: Choice) -> None:
        """End a choice, whether it waits or runs; its End follows, unless it has ended already."""
        self.orders.put(partial(self._cancel, choice))

    def change_loop(self, prepare: Callable[[], Callable[[], DecodeLoop]]) -> Future[None]:
        """Change to another loop once the running texts are finished; no text starts until then.

        `prepare` is called in the worker's thread and returns the function that makes the loop. The future is done
        after the change, or has the error of `prepare` or of making the loop.
        """
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # so that the caller cannot cancel it
        self.orders.put(partial(self._prepare, prepare, done))
        return done

    def stop(self) -> None:
        """End the thread after the current step; the remaining choices end in an error."""
        self.orders.put(self._stop)
        if self.ended is not None:
            wait([self.ended])

    def _run(self) -> None:
        try:
            self.loop = self.make_loop()
            while self.running:
                self._follow_orders()
                if self.next is not None and not self.loop.batch.members:
                    self._change_loop(*self.next)
                if not self.loop.idle:
                    self._step()
        except Exception:
            traceback.print_exc()
        finally:
            self.running = False
            self._fail_all(stopping())
            if self.next is not None:
                self.next[1].set_exception(stopping())
            while not self.orders.empty():
                self.orders.get()()

    def _follow_orders(self) -> None:
        """Follow all orders; wait for one if there is nothing to decode."""
        try:
            self.orders.get(block=self.loop.idle and self.next is None)()
            while True:
                self.orders.get_nowait()()
        except Empty:
            pass

    def _submit(self, choice: Choice) -> None:
        if not self.running:
            self._report([(choice, stopping())])
            return
        try:
            choice.number = self.loop.submit(choice.request)
        except ValueError as error:
            self._report([(choice, ApiError(400, str(error)))])
        except Exception as error:
            self._report([(choice, internal_error(error))])
        else:
            self.choices[choice.number] = choice

    def _cancel(self, choice: Choice) -> None:
        number = choice.number
        if number is not None and self.choices.get(number) is choice:  # a new loop numbers requests from 0 again
            self.loop.cancel(number)
            self.cache_usage = self.loop.batch.cache_usage
            self._report(self._ends())

    def _prepare(self, prepare: Callable[[], Callable[[], DecodeLoop]], done: Future[None]) -> None:
        if not self.running:
            done.set_exception(stopping())
        elif self.next is not None:
            done.set_exception(ApiError(409, "another head is being loaded, one at a time is allowed; wait for it"))
        else:
            try:
                self.next = prepare(), done
                self.loop.admits = False
            except Exception as error:
                done.set_exception(error)

    def _change_loop(self, make_loop: Callable[[], DecodeLoop], done: Future[None]) -> None:
        """Start the other loop with the waiting requests; keep this one if the other cannot be made."""
        self.next = None
        waiting = [self.choices.pop(number) for number in self.loop.withdraw()]
        self.loop.close()
        try:
            self.loop = make_loop()
            self.make_loop = make_loop
            done.set_result(None)
        except Exception as error:
            self.loop = self.make_loop()
            done.set_exception(error)
        for choice in waiting:
            self._submit(choice)

    def _stop(self) -> None:
        self.running = False

    def _step(self) -> None:
        try:
            blocks = self.loop.step()
        except Exception as error:  # such as too little memory
            traceback.print_exc()
            self.failures += 1
            # Requests that wait go to a new loop, unless all wait: then nothing would end a loop that always fails.
            numbers = self.loop.withdraw()
            waiting = [self.choices.pop(number) for number in numbers] if len(numbers) < len(self.choices) else []
            lost = f"a step failed ({type(error).__name__}); its {len(self.choices)} requests get an error"
            print(lost, file=sys.stderr, flush=True)
            self._fail_all(ApiError(500, "decoding failed; the server's log has the reason"))
            self.cache_usage = 0.0
            self.loop = self.make_loop()
            for choice in waiting:
                self._submit(choice)
            return
        now = time.perf_counter()
        self.prefixes = self.loop.prefix_counts
        self.cache_usage = self.loop.batch.cache_usage
        events = [(self.choices[block.number], self._update(block, now)) for block in blocks]
        self._report([*events, *self._ends()])

    def _update(self, block: EmittedTokens, now: float) -> Update:
        generation = self.loop.generations[block.number]
        first = len(generation.tokens) - len(block.tokens)
        return Update(
            block,
            (generation.logprobs or [])[first:],
            generation.alternatives[first:],
            generation.cached_tokens,
            seconds=generation.stats.seconds,
            at=now,
            is_first=first == 0,
            prompt=generation.prompt_scores if first == 0 else None,
        )

    def _ends(self) -> list[tuple[Choice, Event]]:
        """The choices that have ended since the last call; the loop forgets them."""
        ends: list[tuple[Choice, Event]] = []
        for number, generation in self.loop.take_ended():
            event: Event = End(generation.finish, generation.stats)
            if generation.error is not None:
                is_clients = isinstance(generation.error, NoWayOnError)
                event = ApiError(400, str(generation.error)) if is_clients else internal_error(generation.error)
            ends.append((self.choices.pop(number), event))
            self.loop.forget(number)
        return ends

    def _fail_all(self, error: ApiError) -> None:
        choices, self.choices = self.choices, {}
        self._report([(choice, error) for choice in choices.values()])

    def _report(self, events: list[tuple[Choice, Event]]) -> None:
        """Put each event into its choice's queue, all in one iteration of asyncio's loop."""

        def put() -> None:
            for choice, event in events:
                self.observe(choice, event)
                choice.events.put_nowait((choice, event))

        if events and not self.asyncio.is_closed():
            self.asyncio.call_soon_threadsafe(put)


def internal_error(error: Exception) -> ApiError:
    """The client's error for a choice that failed; the traceback goes to the log."""
    traceback.print_exception(error)
    return ApiError(500, f"this choice failed ({type(error).__name__}); the server's log has the reason")

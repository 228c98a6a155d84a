"""The thread that owns target, head and decode loop. Other threads send it orders through a queue."""

import asyncio
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue

from headstart.inference.core.constraint import NoWayOnError
from headstart.inference.core.request import EmittedTokens
from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.serve.api.errors import ApiError, stopping
from headstart.inference.serve.api.output import Choice, End, Update

Event = Update | End | ApiError  # after an error no event follows
Observe = Callable[["Job", Event], None]


@dataclass(eq=False)
class Job:
    """One choice that is decoded. Its events are put into `events`, in asyncio's thread."""

    choice: Choice  # the worker only reads its request
    events: asyncio.Queue[tuple["Job", Event]]
    # Used in asyncio's thread only:
    latest: float = field(default_factory=time.perf_counter)  # when it was submitted, then its last update
    started: bool = False  # whether it has its first token
    # Used in the worker's thread only:
    number: int | None = None  # of the request in the decode loop


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
        self.jobs: dict[int, Job] = {}
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
        self.asyncio = asyncio.get_running_loop()
        self.ended = self.thread.submit(self._run)
        self.thread.shutdown(wait=False)  # so that a second worker on this thread fails instead of waiting forever

    def submit(self, job: Job) -> None:
        if not self.alive:
            raise ApiError(503, "the decode loop has stopped; restart the server")
        self.orders.put(partial(self._submit, job))

    def cancel(self, job: Job) -> None:
        """End a job, whether it waits or runs; its End follows, unless it has ended already."""
        self.orders.put(partial(self._cancel, job))

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
        """End the thread after the current step; the remaining jobs end in an error."""
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

    def _submit(self, job: Job) -> None:
        if not self.running:
            self._report([(job, stopping())])
            return
        try:
            job.number = self.loop.submit(job.choice.request)
        except ValueError as error:
            self._report([(job, ApiError(400, str(error)))])
        except Exception as error:
            self._report([(job, internal_error(error))])
        else:
            self.jobs[job.number] = job

    def _cancel(self, job: Job) -> None:
        if job.number is not None and self.jobs.get(job.number) is job:  # a new loop numbers requests from 0 again
            self.loop.cancel(job.number)
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
        waiting = [self.jobs.pop(number) for number in self.loop.withdraw()]
        self.loop.close()
        try:
            self.loop = make_loop()
            self.make_loop = make_loop
            done.set_result(None)
        except Exception as error:
            self.loop = self.make_loop()
            done.set_exception(error)
        for job in waiting:
            self._submit(job)

    def _stop(self) -> None:
        self.running = False

    def _step(self) -> None:
        try:
            blocks = self.loop.step()
        except Exception as error:  # such as too little memory: these requests fail, later ones get a new loop
            traceback.print_exc()
            self.failures += 1
            lost = f"a step failed ({type(error).__name__}); its {len(self.jobs)} requests get an error"
            print(lost, file=sys.stderr, flush=True)
            self._fail_all(ApiError(500, "decoding failed; the server's log has the reason"))
            self.cache_usage = 0.0
            self.loop = self.make_loop()
            return
        now = time.perf_counter()
        self.prefixes = self.loop.prefix_counts
        self.cache_usage = self.loop.batch.cache_usage
        events = [(self.jobs[block.number], self._update(block, now)) for block in blocks]
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

    def _ends(self) -> list[tuple[Job, Event]]:
        """The jobs that have ended since the last call; the loop forgets them."""
        ends: list[tuple[Job, Event]] = []
        for number, generation in self.loop.take_ended():
            event: Event = End(generation.finish, generation.stats)
            if generation.error is not None:
                is_clients = isinstance(generation.error, NoWayOnError)
                event = ApiError(400, str(generation.error)) if is_clients else internal_error(generation.error)
            ends.append((self.jobs.pop(number), event))
            self.loop.forget(number)
        return ends

    def _fail_all(self, error: ApiError) -> None:
        jobs, self.jobs = self.jobs, {}
        self._report([(job, error) for job in jobs.values()])

    def _report(self, events: list[tuple[Job, Event]]) -> None:
        """Put each event into its job's queue, all in one iteration of asyncio's loop."""

        def put() -> None:
            for job, event in events:
                self.observe(job, event)
                job.events.put_nowait((job, event))

        if events and not self.asyncio.is_closed():
            self.asyncio.call_soon_threadsafe(put)


def internal_error(error: Exception) -> ApiError:
    """The client's error for a choice that failed; the traceback goes to the log."""
    traceback.print_exception(error)
    return ApiError(500, f"this choice failed ({type(error).__name__}); the server's log has the reason")

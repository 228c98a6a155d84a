"""Owns target, head and decode loop in one thread. Everything else talks to it through a queue of orders."""

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
from headstart.inference.core.request import Alternatives, DecodeStats, EmittedTokens, Request, TokenScores
from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.serve.api.errors import ApiError, stopping


@dataclass(frozen=True)
class Update:
    """The part of a choice that one step of the decode loop made certain."""

    block: EmittedTokens
    logprobs: list[float]  # one for each token; empty unless the request asks for them
    alternatives: list[Alternatives]  # in place of each token; empty unless the request asks for them
    cached: int  # tokens of the prompt that were not read again
    seconds: float  # since the engine began to read the prompt
    at: float  # time.perf_counter() after the step
    is_first: bool = False  # of its choice
    prompt: TokenScores | None = None  # of the prompt's tokens but the first, with the first update and if asked for


@dataclass(frozen=True)
class End:
    """A choice has ended; no update follows."""

    finish: str  # as in Generation
    stats: DecodeStats


Event = Update | End | ApiError  # after an error no event follows
Observe = Callable[["Job", Event], None]


@dataclass(eq=False)
class Job:
    """One choice on its way through the engine. Its events reach `events`, in the thread of asyncio."""

    index: int  # in its request
    request: Request
    events: asyncio.Queue[tuple["Job", Event]]
    latest: float = field(default_factory=time.perf_counter)  # when it was submitted, then its last update
    started: bool = False  # whether its first token is written; these two belong to the thread of asyncio
    number: int | None = None  # in the decode loop; it belongs to the engine's thread


class Engine:
    """Runs the decode loop in the model's thread and hands events back to asyncio."""

    def __init__(self, thread: Executor, make_loop: Callable[[], DecodeLoop], observe: Observe) -> None:
        """`thread` is the one that loaded the target. `make_loop` is called in it, once more after an error in a step.

        No other thread computes: GNU's OpenMP keeps a pool for each that does, and once these hold more threads than
        there are cores, waking them takes a quarter to a third of a small target's step on two cores.

        `observe` sees each event in the thread of asyncio, when it happens, and not when a slow client has read it.
        """
        self.thread, self.make_loop, self.observe = thread, make_loop, observe
        self.orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.next: tuple[Callable[[], DecodeLoop], Future[None]] | None = None  # once the running rows have ended
        self.jobs: dict[int, Job] = {}
        self.running = True
        self.ended: Future[None] | None = None
        self.prefixes = 0, 0  # tokens of prompts that were looked up among earlier texts, and those that were found
        self.cache_usage = 0.0  # that of the batch
        self.failures = 0  # steps that ended in an error
        self.asyncio: asyncio.AbstractEventLoop

    @property
    def alive(self) -> bool:
        return self.ended is not None and not self.ended.done()

    def start(self) -> None:
        """Begin to decode; events go to the asyncio loop that is running now."""
        self.asyncio = asyncio.get_running_loop()
        self.ended = self.thread.submit(self._run)
        self.thread.shutdown(wait=False)  # a second engine would wait forever; now it is refused

    def submit(self, job: Job) -> None:
        if not self.alive:
            raise ApiError(503, "the engine has stopped; restart the server")
        self.orders.put(partial(self._submit, job))

    def cancel(self, job: Job) -> None:
        """End a job wherever it is; its End follows, unless it has ended already."""
        self.orders.put(partial(self._cancel, job))

    def change_loop(self, prepare: Callable[[], Callable[[], DecodeLoop]]) -> Future[None]:
        """Decode in another loop, once the texts that have begun are finished in this one; nothing starts meanwhile.

        `prepare` is called in the engine's thread and returns what makes the loop; what it raises is the future's.
        """
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # whoever waits for it may leave
        self.orders.put(partial(self._prepare, prepare, done))
        return done

    def stop(self) -> None:
        """End the thread after the step that is running; jobs that are left end in an error."""
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
        """Follow all orders; waits for one if there is nothing to decode."""
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
            job.number = self.loop.submit(job.request)
        except ValueError as error:
            self._report([(job, ApiError(400, str(error)))])
        except Exception as error:
            self._report([(job, own_failure(error))])
        else:
            self.jobs[job.number] = job

    def _cancel(self, job: Job) -> None:
        if job.number is not None and self.jobs.get(job.number) is job:  # a new loop numbers from 0 again
            self.loop.cancel(job.number)
            self.cache_usage = self.loop.batch.cache_usage
            self._report(self._ends())

    def _prepare(self, prepare: Callable[[], Callable[[], DecodeLoop]], done: Future[None]) -> None:
        if not self.running:
            done.set_exception(stopping())
        elif self.next is not None:
            done.set_exception(ApiError(409, "another head is on its way, one at a time is allowed; wait for it"))
        else:
            try:
                self.next = prepare(), done
                self.loop.admits = False
            except Exception as error:
                done.set_exception(error)

    def _change_loop(self, make_loop: Callable[[], DecodeLoop], done: Future[None]) -> None:
        """Begin the other loop with the requests that wait; this one goes on if the other cannot be made."""
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
        except Exception as error:  # such as too little memory: these requests fail, the next ones begin anew
            traceback.print_exc()
            self.failures += 1
            lost = f"the step failed ({type(error).__name__}); its {len(self.jobs)} requests get an error"
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
        found: list[tuple[Job, Event]] = []
        for number, generation in self.loop.take_ended():
            job, error = self.jobs.pop(number), generation.error
            if isinstance(error, NoWayOnError):
                found.append((job, ApiError(400, str(error))))
            else:
                ended = End(generation.finish, generation.stats)
                found.append((job, ended if error is None else own_failure(error)))
            self.loop.forget(number)
        return found

    def _fail_all(self, error: ApiError) -> None:
        jobs, self.jobs = self.jobs, {}
        self._report([(job, error) for job in jobs.values()])

    def _report(self, events: list[tuple[Job, Event]]) -> None:
        """Put each event into its job's queue, all in one turn of asyncio's loop."""

        def put() -> None:
            for job, event in events:
                self.observe(job, event)
                job.events.put_nowait((job, event))

        if events and not self.asyncio.is_closed():
            self.asyncio.call_soon_threadsafe(put)


def own_failure(error: Exception) -> ApiError:
    """What the client of a failed choice is told; the log gets the traceback."""
    traceback.print_exception(error)
    return ApiError(500, f"this choice failed ({type(error).__name__}); the server's log has the reason")

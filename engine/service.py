"""Between the event loop and the engine's thread: the life of the engine (loading, ready, draining, dead) and its open requests."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from engine.core import Engine, Output, RankLost
from engine.detokenizer import TextStream
from engine.loop import EngineLoop, LoopEnded
from engine.metrics import EngineMetrics
from engine.request import Finish, Request, Sampling, State
from engine.settings import EngineSettings
from engine.stages import Stage, nothing
from engine.threads import usable_cores

if TYPE_CHECKING:
    from engine.assembly import Assembled
    from engine.tokenizer import Tokenizer

STOP_STEP_S = 0.5
"""A step that is under way at the end gets so long to return."""

log = logging.getLogger("pairscope.engine")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Health:
    """What /health answers: a status code and a JSON object."""

    code: int
    body: dict[str, object]


class NotServing(Exception):
    """No request can be taken now: loading, draining, full or dead. `code` is the HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class LoadingStopped(Exception):
    """The server is told to stop while it loads."""


class Ticket:
    """One request as the server holds it: wait for what comes, report what the client took, close it when done."""

    def __init__(self, request: Request, service: EngineService) -> None:
        self.request = request
        self._service = service
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()
        self._ended = False
        self.relay: asyncio.Task[None] | None = (
            None  # brings what another engine generates, once the request goes on there
        )

    def put(self, output: Output) -> None:
        self._outputs.put_nowait(output)

    async def next(self) -> Output:
        """The next output; several that have piled up come as one."""
        output = await self._outputs.get()
        while not self._outputs.empty():
            later = self._outputs.get_nowait()
            output = Output(
                output.request, output.text + later.text, output.tokens + later.tokens, later.finish, later.error
            )
        self._ended = output.finish is not None
        return output

    def delivered(self, tokens: int) -> None:
        """The client's connection has taken so many more tokens."""
        self._service.note_delivered(self.request, tokens)

    def close(self) -> None:
        """Done with it. A request that still runs is aborted, here or where it goes on."""
        if self.relay is not None:
            self.relay.cancel()
        self._service.close(self, abort=not self._ended)


class EngineService:
    """Lives in the event loop; the engine's thread calls back with call_soon_threadsafe only."""

    def __init__(self, settings: EngineSettings, model_name: str, metrics: EngineMetrics) -> None:
        self.settings = settings
        self.model_name = model_name
        self.metrics = metrics
        self.stage, self.progress, self.detail = "starting", 0.0, ""
        self.death: str | None = None
        self.draining = False
        self._assembled: Assembled | None = None
        self._loop: EngineLoop | None = None
        self._aio: asyncio.AbstractEventLoop | None = None
        self._tickets: dict[str, Ticket] = {}
        self._numbers = itertools.count(1)
        self.on_death: Callable[[], None] = lambda: None
        self.tokenisers = ThreadPoolExecutor(max(2, usable_cores() // 2), "tokenise")  # the rest is for the steps

    @property
    def vocab(self) -> int:
        assert self._assembled is not None, "the engine is not loaded"
        return self._assembled.config.vocab

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self._loop is not None and self.death is None

    @property
    def num_open(self) -> int:
        """Requests of clients that have not ended."""
        return len(self._tickets)

    @property
    def thread_alive(self) -> bool:
        """Whether the engine's thread still runs."""
        return self._loop is not None and self._loop.is_alive()

    @property
    def engine(self) -> Engine:
        assert self._loop is not None, "the engine is not loaded"
        return self._loop.engine

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._assembled is not None, "the engine is not loaded"
        return self._assembled.tokenizer

    def note_progress(self, stage: str, progress: float, detail: str = "", /) -> None:
        """Called by the loading thread. LoadingStopped when nobody waits for the model any more."""
        if self.draining:
            raise LoadingStopped
        self.stage, self.progress, self.detail = stage, progress, detail

    def begin(self, assembled: Assembled) -> None:
        """Serve with this engine from now on. Call in the event loop."""
        self._aio = asyncio.get_running_loop()
        self._assembled = assembled
        self._loop = EngineLoop(assembled.engine, self._deliver, self._died)
        self.metrics.watch(assembled.engine.stats)
        self._loop.start()

    async def drain(self) -> None:
        """Take no new requests; let the running ones end within drain_s, then abort the rest and stop the thread."""
        self.draining = True
        if self._loop is None:
            return
        end = time.monotonic() + self.settings.drain_s
        while self._tickets and time.monotonic() < end and self.death is None:
            await asyncio.sleep(0.02)
        for ticket in list(self._tickets.values()):
            ticket.put(Output(ticket.request, "", 0, Finish.ABORT, "the server is stopping"))
            self._loop.abort(ticket.request.id)
        self.tokenisers.shutdown(wait=False, cancel_futures=True)
        self._loop.stop()
        await asyncio.to_thread(self._loop.join, STOP_STEP_S)
        if self._assembled is not None:
            await asyncio.to_thread(self._assembled.close)

    def health(self) -> Health:
        if self.death is not None:
            return Health(500, {"status": "dead", "reason": self.death})
        if self.draining:
            return Health(503, {"status": "draining"})
        if self._loop is None:
            told: dict[str, object] = {"status": "loading", "stage": self.stage, "progress": round(self.progress, 3)}
            return Health(503, told | ({"detail": self.detail} if self.detail else {}))
        age_s = time.monotonic() - self.engine.stats.beat_s
        if age_s > self.settings.stalled_after_s:
            return Health(503, {"status": "stalled", "stats_age_s": round(age_s, 1)})
        return Health(200, {"status": "ready", "stats_age_s": round(age_s, 3)})

    # -- requests -----------------------------------------------------------------------------------------------------

    def refuse_if_not_serving(self, wanted: int = 1) -> None:
        """NotServing when `wanted` more requests can't be taken now."""
        if self.death is not None:
            raise NotServing(500, f"the engine has died: {self.death}")
        if self.draining:
            raise NotServing(503, "the server is stopping")
        if self._loop is None:
            raise NotServing(503, f"the model is loading: {self.stage} {100 * self.progress:.0f} %")
        if len(self._tickets) + wanted > self.settings.max_seqs + self.settings.max_waiting:
            raise NotServing(429, f"{len(self._tickets)} requests run or wait already; try again later")

    def refuse_if_too_late(self, deadline_ms: int | None, prompt: Sequence[int]) -> None:
        """NotServing when no token can come before the deadline, even at the best speed that this engine has reached."""
        if deadline_ms is None:
            return
        least_ms = 1000 * self.engine.least_s(prompt)
        if deadline_ms < least_ms:
            raise NotServing(
                429, f"deadline_ms is {deadline_ms}: before the first token lie {least_ms:.0f} ms of work at least"
            )

    def open(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        arrived_s: float,
        paced: bool,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Ticket:
        """Hand a request to the engine. Close the ticket in any case."""
        assert self._loop is not None, "the engine is not loaded"
        text = TextStream(self.tokenizer.inner, prompt, sampling.stop)
        number = next(self._numbers)
        request = Request(f"r{number}", prompt, sampling, arrived_s, text, paced, priority, deadline_s)
        ticket = Ticket(request, self)
        self._tickets[request.id] = ticket
        self._loop.submit(request)
        return ticket

    def note_tokenised(self, seconds: float) -> None:
        """A prompt has been tokenised in one of the worker threads."""
        spent, stats = nothing(), self.engine.stats
        spent[Stage.TOKENISE] = seconds
        with stats.lock:
            stats.add_stages(spent)

    def adopt(self, request: Request) -> Ticket:
        """A ticket for a request that the engine has already, or is about to have. Close it in any case."""
        ticket = Ticket(request, self)
        self._tickets[request.id] = ticket
        return ticket

    def ticket(self, id: str) -> Ticket | None:
        """That of a request that somebody waits for."""
        return self._tickets.get(id)

    async def call(self, work: Callable[[], Result]) -> Result:
        """What `work` gives, done in the engine's thread between two steps. NotServing when the engine ends first."""
        if self._loop is None:
            raise NotServing(503, "the model is loading")
        try:
            return await asyncio.wrap_future(self._loop.call(work))
        except LoopEnded as error:
            raise NotServing(503, str(error)) from None

    @property
    def assembled(self) -> Assembled:
        assert self._assembled is not None, "the engine is not loaded"
        return self._assembled

    def note_delivered(self, request: Request, tokens: int) -> None:
        was_paused = request.num_undelivered >= self.settings.stream_buffer
        request.num_delivered += tokens
        if request.state is State.DEPARTED:
            return  # counted where it was generated
        self.engine.stats.counters.delivered_tokens_total += tokens
        if was_paused and self._loop is not None:
            self._loop.nudge()

    def close(self, ticket: Ticket, abort: bool) -> None:
        if self._tickets.pop(ticket.request.id, None) is not None and abort and self._loop is not None:
            self._loop.abort(ticket.request.id)

    # -- called in the engine's thread --------------------------------------------------------------------------------

    def _deliver(self, outputs: list[Output]) -> None:
        assert self._aio is not None
        self._call_soon(lambda: self._dispatch(outputs))

    def _died(self, error: BaseException) -> None:
        known = isinstance(error, RankLost)  # its line says all
        if not known:
            log.critical("the engine loop died", exc_info=error)
        self.death = str(error) if known else f"{type(error).__name__}: {error}"
        self._call_soon(self._fail_all)

    def _call_soon(self, call: Callable[[], None]) -> None:
        assert self._aio is not None
        try:
            self._aio.call_soon_threadsafe(call)
        except RuntimeError:  # the event loop has closed: nobody is left to tell
            log.debug("an output came after the server had stopped")

    # -- in the event loop again --------------------------------------------------------------------------------------

    def _dispatch(self, outputs: list[Output]) -> None:
        for output in outputs:
            ticket = self._tickets.get(output.request.id)
            if ticket is not None:
                ticket.put(output)

    def _fail_all(self) -> None:
        for ticket in list(self._tickets.values()):
            ticket.put(Output(ticket.request, "", 0, Finish.ERROR, f"the engine has died: {self.death}"))
        self.on_death()


def load_in_thread(
    service: EngineService, done: Callable[[Assembled], None], failed: Callable[[BaseException], None]
) -> threading.Thread:
    """Load the model beside the event loop, so that /health answers meanwhile. `done` and `failed` run in that thread."""

    def load() -> None:
        try:
            service.note_progress("libraries", 0.0)
            from engine.assembly import assemble  # heavy: torch

            assembled = assemble(service.settings, service.note_progress, log.info)
        except BaseException as error:
            failed(error)
        else:
            done(assembled)

    thread = threading.Thread(target=load, name="load", daemon=True)
    thread.start()
    return thread

"""The engine itself: requests in, steps, tokens and text out. One thread drives it; it knows nothing of HTTP."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from engine.accounting import ModelCost
from engine.request import Finish, Request, State
from engine.scheduler import Blocked, Row, Scheduler, StepPlan
from engine.speculation import Speculation
from engine.stages import Seconds, Stage
from engine.stats import EngineStats, Occupancy, StepRecord, phase_of
from engine.steplog import StepLog


@dataclass(frozen=True, slots=True)
class Output:
    """What one step gave one request. `tokens` may bring no text yet; `finish` is set with the last output."""

    request: Request
    text: str
    tokens: int
    finish: Finish | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The next token of every row that samples, or several, one after another, where guesses were right; how long the step took,
    and in which stages where that is timed.
    """

    tokens: tuple[tuple[Row, int], ...]
    seconds: float
    stages: Seconds | None = None


class OutOfMemory(RuntimeError):
    """The device had no memory for this step. Cache and weights are as before."""


class RankLost(RuntimeError):
    """One of the processes that compute a model together is gone, hangs or has failed: the end of the engine, in one line."""


class StepRunner(Protocol):
    def run(self, plan: StepPlan) -> StepResult:
        """Copy a plan's blocks, compute its tokens and choose the next ones. OutOfMemory leaves everything usable."""


class Engine:
    """`context` bounds prompt plus output of one request. `end_tokens` end an output and are not part of its text."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        cost: ModelCost,
        stats: EngineStats,
        end_tokens: frozenset[int],
        context: int,
        stall_timeout_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.stats = stats
        self.context = context
        self._runner = runner
        self._cost = cost
        self._end_tokens = end_tokens
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._stopwatch = stopwatch
        self._schedule_s = self._detokenise_s = 0.0  # of the step under way
        self.steps = StepLog()
        self._speculation: Speculation | None = None
        self._requests: dict[str, Request] = {}
        self.on_beat: Callable[[], None] = lambda: None  # may raise, and end the engine by it

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def speculate(self, speculation: Speculation | None) -> None:
        """From the next step on, guess tokens and verify them; None: no more."""
        self._speculation = speculation
        self.stats.speculation = speculation.stats if speculation is not None else None

    def add(self, request: Request) -> None:
        """Queue a request. ValueError when its id is in use or its prompt leaves no room for output."""
        if request.id in self._requests:
            raise ValueError(f"request id {request.id} is in use")
        if request.num_tokens >= self.context:
            raise ValueError(f"the prompt has {request.num_tokens} tokens, the context ends at {self.context}")
        self._requests[request.id] = request
        self.scheduler.add(request)
        with self.stats.lock:
            self.stats.record_prompt(self._clock(), request.prompt)

    def abort(self, ids: Iterable[str]) -> list[Output]:
        """End requests now; their blocks are free when this returns. Unknown ids are ignored."""
        outputs = []
        for id in ids:
            request = self._requests.get(id)
            if request is not None:
                self.scheduler.remove(request)
                outputs.append(self._end(request, Finish.ABORT, "", 0))
        if outputs:
            self.beat()
        return outputs

    def hold(self, id: str) -> Request:
        """Stop computing a request and keep its cache. KeyError when no such request waits or runs."""
        request = self._requests[id]
        if request.state not in (State.WAITING, State.RUNNING):
            raise KeyError(id)
        self.scheduler.hold(request)
        return request

    def park(self, request: Request, computed: int) -> None:
        """Take in a request that has so many tokens in its cache already, and hold it; its blocks are to be filled. OutOfBlocks
        when there is no room for them, ValueError for what `add` would refuse; then nothing has changed.
        """
        if request.id in self._requests or request.num_tokens >= self.context:
            raise ValueError(f"request {request.id} does not fit in here")
        self.scheduler.park(request, computed)
        self._requests[request.id] = request
        request.num_prompt_counted = request.prompt  # counted where it came in
        request.first_scheduled_s = request.last_token_s = self._clock()

    def resume(self, id: str) -> bool:
        """Let a held request go on. False when it has ended meanwhile."""
        request = self._requests.get(id)
        if request is None or request.state is not State.HELD:
            return False
        request.last_token_s = self._clock() if request.last_token_s is not None else None
        self.scheduler.resume(request)
        return True

    def depart(self, id: str) -> bool:
        """Forget a held request that goes on elsewhere; its blocks are free when this returns. False when it has ended meanwhile."""
        request = self._requests.get(id)
        if request is None or request.state is not State.HELD:
            return False
        self.scheduler.remove(request)
        request.state = State.DEPARTED
        del self._requests[id]
        if self._speculation is not None:
            self._speculation.forget(id)
        self.beat()
        return True

    @property
    def requests(self) -> list[Request]:
        """All that wait, run or are held. In the engine's thread only."""
        return list(self._requests.values())

    def step(self) -> list[Output]:
        """One step: plan, run, take in the tokens. Any exception but OutOfMemory is the end of this engine."""
        outputs = self._give_up_stalled()
        evicted = self.scheduler.pool.num_evicted
        began = self._stopwatch()
        drafts = self._speculation.drafts(self.scheduler.decoding) if self._speculation is not None else None
        plan = self.scheduler.schedule(drafts)
        self._schedule_s, self._detokenise_s = self._stopwatch() - began, 0.0
        now = self._clock()
        self._count_plan(plan, self.scheduler.pool.num_evicted - evicted)
        outputs += [self._end(request, Finish.ERROR, "", 0, reason) for request, reason in plan.failed]
        self._note_first_scheduled(plan, now)
        if plan.rows:
            try:
                result = self._runner.run(plan)
            except OutOfMemory as error:
                outputs += self._out_of_memory(plan, str(error))
            else:
                outputs += self._take_in(plan, result)
        elif plan.swap_out:
            self._runner.run(plan)
        self.beat()
        return outputs

    @property
    def is_idle(self) -> bool:
        """Whether a step now would have nothing to compute: no request, or all are paused by slow clients."""
        return not len(self.scheduler.waiting) and all(self.scheduler.is_paused(r) for r in self.scheduler.running)

    def least_s(self, prompt: Sequence[int]) -> float:
        """Seconds from now to a newcomer's first token at least: what runs is computed first, then what is not cached of its
        prompt, at the best speed so far. May be called from another thread.
        """
        tokens = self.stats.occupancy.tokens_due + len(prompt) - self.scheduler.cached_tokens(prompt)
        return 2 * self._cost.layer_weights * tokens / self.stats.peaks.flops_per_s

    def beat(self) -> None:
        """Publish who is where, and that the loop is alive."""
        self.on_beat()
        scheduler, pool = self.scheduler, self.scheduler.pool
        running = scheduler.running
        # Shared blocks are full: what is not written lies in blocks of one table only, so nothing is counted twice.
        unused = sum(len(r.blocks) * pool.block_size - r.num_computed for r in (*running, *scheduler.held))
        occupancy = Occupancy(
            running=len(running),
            waiting=len(scheduler.waiting),
            blocks=pool.num_blocks,
            blocks_taken=pool.num_taken,
            blocks_cached=pool.num_cached,
            blocks_swapped=scheduler.host.num_taken if scheduler.host is not None else None,
            free_run=pool.free_run,
            block_size=pool.block_size,
            slots_written=pool.num_taken * pool.block_size - unused,
            tokens_due=sum(r.num_tokens - r.num_computed for r in running),
            context_mean=sum(r.num_computed for r in running) / len(running) if running else None,
        )
        with self.stats.lock:
            self.stats.occupancy = occupancy
            self.stats.beat_s = self._clock()

    def _count_plan(self, plan: StepPlan, evicted: int) -> None:
        """Count what was decided: who came in with what cached, who had to leave, what moved, what kept others waiting."""
        counters = self.stats.counters
        with self.stats.lock:
            for request, cached in plan.admitted:
                if request.first_scheduled_s is None:
                    counters.prefix_queries_total += request.num_tokens if self.scheduler.prefix_cache else 0
                    counters.prefix_hits_total += cached
                first_time = max(0, min(cached, request.prompt) - request.num_prompt_counted)
                request.num_prompt_counted += first_time
                counters.prompt_tokens_total += first_time
            counters.prefix_evictions_total += evicted
            counters.preemptions_total += len(plan.preempted)
            counters.preemptions_swap_total += sum(bool(request.host_blocks) for request in plan.preempted)
            counters.preemptions_recompute_total += sum(not request.host_blocks for request in plan.preempted)
            counters.swap_out_blocks_total += len(plan.swap_out)
            counters.swap_in_blocks_total += len(plan.swap_in)
            counters.blocked_on_blocks_total += plan.blocked is Blocked.BLOCKS
            counters.blocked_on_seqs_total += plan.blocked is Blocked.SEQS
            counters.blocked_on_tokens_total += plan.blocked is Blocked.TOKENS

    def _note_first_scheduled(self, plan: StepPlan, now: float) -> None:
        with self.stats.lock:
            for row in plan.rows:
                if row.request.first_scheduled_s is None:
                    row.request.first_scheduled_s = now
                    self.stats.queue_time.observe(now - row.request.arrived_s)

    def _take_in(self, plan: StepPlan, result: StepResult) -> list[Output]:
        now = self._clock()
        with self.stats.lock:
            work = self._cost.of(plan.rows)
            phase = phase_of(plan.rows)
            self.stats.record_step(StepRecord(now, result.seconds, plan.num_tokens, work, bool(result.tokens), phase))
            for row in plan.rows:
                self._count_prompt(row)
                self.scheduler.computed(row)
            if self._speculation is not None:
                self._speculation.learn(plan, result.tokens, result.seconds)
        outputs = [
            self._append_all(row.request, [token for _, token in own], now)
            for row, own in itertools.groupby(result.tokens, key=lambda pair: pair[0])
        ]
        stages = self._count_stages(result.stages)
        self._log_step(plan, result.seconds, stages)
        return outputs

    def _append_all(self, request: Request, tokens: Sequence[int], now: float) -> Output:
        """Take in a request's tokens of this step up to its end. All but the last were guessed: their K and V are there."""
        output = Output(request, "", 0)
        for number, token in enumerate(tokens):
            if number:
                self.scheduler.accepted(request)
            more = self._append(request, token, now)
            output = replace(more, text=output.text + more.text, tokens=output.tokens + more.tokens)
            if output.finish is not None:
                break
        else:
            self.scheduler.drop_guesses(request)
        with self.stats.lock:
            self.stats.counters.generation_tokens_total += output.tokens
            self._time_tokens(request, output.tokens, now)
        return output

    def _count_stages(self, stages: Seconds | None) -> Seconds | None:
        """The runner's stages with the engine's own."""
        if stages is None:
            return None
        spent = list(stages)
        spent[Stage.SCHEDULE] += self._schedule_s
        spent[Stage.DETOKENISE] += self._detokenise_s
        with self.stats.lock:
            self.stats.add_stages(spent)
        return spent

    def _log_step(self, plan: StepPlan, seconds: float | None, stages: Seconds | None = None) -> None:
        waiting, free = len(self.scheduler.waiting), self.scheduler.pool.num_free
        self.steps.add(plan, time.time_ns(), seconds, waiting, free, stages)

    def _count_prompt(self, row: Row) -> None:
        """Tokens of the prompt count once; what a preempted request computes again counts as recomputed."""
        request = row.request
        first_time = max(0, min(row.context, request.prompt) - max(row.start, request.num_prompt_counted))
        request.num_prompt_counted += first_time
        self.stats.counters.prompt_tokens_total += first_time
        self.stats.counters.prompt_tokens_computed_total += first_time
        if request.num_preempted:
            decoded = 1 if row.samples and row.known_end > request.prompt else 0
            self.stats.counters.recomputed_tokens_total += max(0, row.known_end - row.start - first_time - decoded)

    def _time_tokens(self, request: Request, tokens: int, now: float) -> None:
        """Several tokens of one step share the time since the last one evenly: so the mean is that of an output token."""
        if request.last_token_s is None:
            request.first_token_s = now
            self.stats.time_to_first_token.observe(now - request.arrived_s)
        else:
            for _ in range(tokens):
                self.stats.inter_token_latency.observe((now - request.last_token_s) / tokens)
        request.last_token_s = now

    def _append(self, request: Request, token: int, now: float) -> Output:
        request.tokens.append(token)
        sampling = request.sampling
        text, stopped = "", False
        ended = token in self._end_tokens and not sampling.ignore_eos
        if request.text is not None and not ended:
            began = self._stopwatch()
            text, stopped = request.text.push(token)
            self._detokenise_s += self._stopwatch() - began
        if ended or stopped:
            return self._finish(request, Finish.STOP, text, flush=not stopped)
        if request.num_output >= sampling.max_tokens or request.num_tokens >= self.context:
            return self._finish(request, Finish.LENGTH, text, flush=True)
        return Output(request, text, 1)

    def _finish(self, request: Request, finish: Finish, text: str, flush: bool) -> Output:
        if flush and request.text is not None:
            text += request.text.flush()
        self.scheduler.remove(request)
        return self._end(request, finish, text, 1)

    def _end(self, request: Request, finish: Finish, text: str, tokens: int, error: str | None = None) -> Output:
        del self._requests[request.id]
        if self._speculation is not None:
            self._speculation.forget(request.id)
        now = self._clock()
        request.state, request.finish, request.error, request.finished_s = State.FINISHED, finish, error, now
        with self.stats.lock:
            counters = self.stats.counters
            if finish is not Finish.ABORT and request.deadline_s is not None and now > request.deadline_s:
                counters.deadline_missed_total += 1
            if finish is Finish.ABORT:
                counters.requests_aborted_total += 1
            elif finish is Finish.ERROR:
                counters.requests_failed_total += 1
            else:
                counters.requests_finished_total += 1
                self.stats.request_latency.observe(now - request.arrived_s)
                self.stats.output_length.observe(request.num_output)
                self._time_per_output_token(request, now)
        return Output(request, text, tokens, finish, error)

    def _time_per_output_token(self, request: Request, now: float) -> None:
        """The mean of one answer, whose last token has come now: its time after the first one, by the tokens that came in it."""
        if request.first_token_s is not None and request.num_output > 1:
            self.stats.time_per_output_token.observe((now - request.first_token_s) / (request.num_output - 1))

    def _out_of_memory(self, plan: StepPlan, reason: str) -> list[Output]:
        """Give up the requests of this step, so that the others can go on."""
        with self.stats.lock:
            self.stats.counters.oom_total += 1
        outputs = []
        for row in plan.rows:
            self.scheduler.remove(row.request)
            outputs.append(self._end(row.request, Finish.ERROR, "", 0, reason))
        self._log_step(plan, None)
        return outputs

    def _give_up_stalled(self) -> list[Output]:
        """Abort requests whose client has taken nothing for stall_timeout_s while they were paused for it."""
        now = self._clock()
        stalled = []
        for request in self.scheduler.running:
            if not self.scheduler.is_paused(request):
                request.paused_since_s = None
            elif request.paused_since_s is None:
                request.paused_since_s = now
            elif now - request.paused_since_s > self._stall_timeout_s:
                stalled.append(request.id)
        return self.abort(stalled)

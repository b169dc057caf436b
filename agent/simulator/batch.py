"""The requests inside one simulated engine: the queue, those whose prompt is read, the running batch, and the KV they hold.

The batch is followed in steps, not in tokens: every running sequence gains one token a step, so a sequence is known by the step
at which it will end, and a slice of time costs the same whether ten or a hundred run.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush

from agent.simulator.window import Window

STEP_TOKENS = 512  # prompt and output tokens of one step together
PATIENCE_S = 60.0  # a client gives up on a request that has waited so long


class Request:
    __slots__ = ("arrived_s", "base", "done", "end_step", "first_s", "left", "output", "prefill", "prompt")

    def __init__(self, arrived_s: float, prompt: int, output: int, left: float) -> None:
        self.arrived_s = arrived_s
        self.prompt = prompt
        self.output = output
        self.left = left  # prompt tokens that still need arithmetic
        self.prefill = left
        self.done = 0.0  # output tokens made before a preemption
        self.base = 0.0  # tokens held minus steps made
        self.end_step = 0.0
        self.first_s = -1.0


class Batch:
    """The state of one engine process since its start. Times in s, lengths in tokens, KV in blocks of `block_tokens`."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.waiting: deque[Request] = deque()
        self.prefilling: deque[Request] = deque()
        self.running: list[tuple[float, int, Request]] = []  # a heap by end_step
        self.base = 0.0  # sum of the running requests' bases
        self.prompt_held = 0.0  # tokens of the prompts in `prefilling`
        self.backlog = 0.0  # prompt tokens in `prefilling` that still need arithmetic
        self.step = 0.0
        self.admitted = 0
        self.generated = self.prompt_read = self.computed = 0.0
        self.finished = self.aborted = self.preempted = 0
        self.leaked = 0.0  # blocks that nobody gives back
        self.waste = block_tokens / 2  # tokens lost in a sequence's last block
        self.ttft, self.queued, self.latency = Window(), Window(), Window()
        self.gap, self.prompts, self.outputs = Window(), Window(), Window()

    @property
    def sequences(self) -> int:
        """Sequences that hold KV: running, or with their prompt being read."""
        return len(self.running) + len(self.prefilling)

    @property
    def context(self) -> float:
        """Tokens held by the running sequences."""
        return self.base + len(self.running) * self.step

    def blocks_used(self) -> float:
        held = self.context + self.prompt_held
        return (held + self.sequences * self.waste) / self.block_tokens + self.leaked

    def expire(self, now_s: float) -> None:
        for window in (self.ttft, self.queued, self.latency, self.gap, self.prompts, self.outputs):
            window.expire(now_s)

    def lose_patience(self, now_s: float) -> None:
        """Whoever has waited too long goes away."""
        waiting = self.waiting
        while waiting and now_s - waiting[0].arrived_s > PATIENCE_S:
            waiting.popleft()
            self.aborted += 1

    def admit(self, now_s: float, most: int, backlog: float = STEP_TOKENS * 4) -> None:
        """Take from the queue, in order, while fewer than `most` are in, KV for the prompt is free and less than `backlog` is unread."""
        waiting = self.waiting
        if not waiting:
            return
        free = self.blocks - self.blocks_used()
        while waiting and self.sequences < most and self.backlog < backlog:
            request = waiting[0]
            held = request.prompt + request.done
            need = (held + self.waste) / self.block_tokens
            if need > free and self.sequences:
                return
            free -= need
            waiting.popleft()
            self.prefilling.append(request)
            self.prompt_held += held
            self.backlog += request.left
            if request.first_s < 0:
                self.queued.add(now_s, max(0.0, now_s - request.arrived_s))

    def decode(self, steps: float, end_s: float) -> None:
        """One token a step for every running sequence; those that reach their end leave."""
        heap = self.running
        made = len(heap) * steps
        self.step += steps
        while heap and heap[0][0] <= self.step:
            _, _, request = heappop(heap)
            made -= self.step - request.end_step
            self.base -= request.base
            self.finished += 1
            self.latency.add(end_s, end_s - request.arrived_s)
            self.outputs.add(end_s, float(request.output))
        if not heap:
            self.base = 0.0  # sheds the rounding of a long run
        self.generated += made

    def prefill(self, tokens: float, start_s: float, end_s: float, step_s: float) -> None:
        """Read `tokens` of the prompts, first come first; a prompt that is read joins the batch."""
        self.backlog -= tokens
        self.computed += tokens
        spent, total = 0.0, tokens
        while self.prefilling:
            request = self.prefilling[0]
            if request.first_s < 0:
                self.prompt_read += min(request.left, tokens) * request.prompt / request.prefill
            if request.left > tokens + 1e-6:
                request.left -= tokens
                break
            tokens -= request.left
            spent += request.left
            request.left = 0.0
            at_s = start_s + (end_s - start_s) * (spent / total if total > 0 else 1.0)
            # no sooner than one step after it came: the slice may have drawn its arrival late
            self._begin_decode(request, max(at_s, request.arrived_s + step_s), end_s)
        if not self.prefilling:
            self.backlog = self.prompt_held = 0.0

    def _begin_decode(self, request: Request, at_s: float, now_s: float) -> None:
        self.prefilling.popleft()
        self.prompt_held -= request.prompt + request.done
        self.admitted += 1
        request.base = request.prompt + request.done - self.step
        request.end_step = self.step + request.output - request.done
        self.base += request.base
        heappush(self.running, (request.end_step, self.admitted, request))
        if request.first_s < 0:
            request.first_s = at_s
            self.ttft.add(now_s, at_s - request.arrived_s)
            self.prompts.add(now_s, float(request.prompt))

    def preempt(self) -> None:
        """Push the youngest sequences back to the queue until the others fit; their KV is made again later."""
        while len(self.running) > 1 and self.blocks_used() > self.blocks:
            youngest = max(self.running, key=lambda entry: entry[1])
            self.running.remove(youngest)
            heapify(self.running)
            request = youngest[2]
            held = request.base + self.step
            self.base -= request.base
            request.done = request.output - (request.end_step - self.step)
            request.left = request.prefill = max(1.0, held)
            self.waiting.appendleft(request)
            self.preempted += 1

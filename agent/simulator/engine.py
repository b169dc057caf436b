"""One simulated engine: open arrivals, a queue, a running batch over paged KV, prefill and decode in one step.

The batch is followed in steps, not in tokens: every running sequence gains one token a step, so a sequence is known by the step
at which it will end, and a slice of time costs the same whether ten or a hundred run. A group of GPUs steps at its slowest.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from random import Random

from agent.simulator import roofline
from agent.simulator.conditions import EngineConditions, GpuConditions
from agent.simulator.gpu import Gpu
from agent.simulator.sku import GIB
from agent.simulator.window import Window
from agent.simulator.workload import OUTPUT_TOKENS, PREFIX_HIT, PROMPT_TOKENS, Arrivals
from telemetry.sample import Value

MAX_RUNNING = 80
STEP_TOKENS = 512  # prompt and output tokens of one step together
KV_SHARE = 0.62  # pool size: the normal batch fills this much of it
UPTIME_S = 3 * 86_400.0  # of an engine when the simulation begins
PATIENCE_S = 60.0  # a client gives up on a request that has waited so long
OFFLOAD_SHARE = 0.5  # of the prefix hits, whose KV comes back from host memory over PCIe
PCIE_LANE_BYTES_S = {1: 0.2e9, 2: 0.4e9, 3: 0.8e9, 4: 1.6e9, 5: 3.2e9, 6: 6.4e9}


class Request:
    __slots__ = ("arrived_s", "base", "done", "end_step", "first_s", "left", "order", "output", "prefill", "prompt")

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
        self.order = 0


class Engine:
    """One engine on the GPUs of its group. `load` is the share of its capacity that arrives at the busiest hour."""

    def __init__(self, name: str, gpus: list[Gpu], served: roofline.Served, load: float, random: Random) -> None:
        self.name = name
        self.gpus = gpus
        self.served = served
        self.random = random
        self.jitter = Random(f"{name}/jitter")  # apart, so that being asked changes no request
        self.cost = roofline.cost(served, gpus[0].sku, len(gpus))
        held = PROMPT_TOKENS.mean + OUTPUT_TOKENS.mean * 0.8
        typical = MAX_RUNNING * 0.82
        self.blocks = int(typical * held / KV_SHARE / served.block_tokens)
        self.capacity = self._capacity(MAX_RUNNING, held)
        self.arrivals = Arrivals(load * self.capacity, random)
        pool = self.blocks * served.block_tokens * served.kv_bytes_per_token
        for gpu in gpus:
            gpu.memory_used_bytes = (2 * served.parameters + pool) / len(gpus) + 4 * GIB
        self.version = "1.8.2"
        self.up = True
        self.ttft, self.queued, self.latency = Window(), Window(), Window()
        self.gap, self.prompts, self.outputs = Window(), Window(), Window()
        self._start(-UPTIME_S)

    def _capacity(self, running: int, held: float) -> float:
        """Requests/s that a full batch sustains at the highest clock."""
        fresh = PROMPT_TOKENS.mean * (1 - PREFIX_HIT)
        prefill = running * fresh / OUTPUT_TOKENS.mean
        memory = roofline.memory_s(self.cost, running, running * held)
        kernel = roofline.kernel_s(memory, roofline.compute_s(self.cost, running, prefill))
        return running / (kernel + self.served.overhead_s) / OUTPUT_TOKENS.mean

    def _start(self, now_s: float) -> None:
        """A fresh process: empty, counters at zero."""
        self.started_s = now_s
        self.waiting: deque[Request] = deque()
        self.prefilling: deque[Request] = deque()
        self.running: list[tuple[float, int, Request]] = []  # a heap by end_step
        self.base = 0.0  # sum of the running requests' bases
        self.prompt_held = 0.0  # tokens of the prompts in `prefilling`
        self.backlog = 0.0  # prompt tokens in `prefilling` that still need arithmetic
        self.step = 0.0
        self.order = 0
        self.step_s = 0.0
        self.generated = self.prompt_read = self.prompt_told = 0.0
        self.finished = self.aborted = self.preempted = self.prefix_queries = self.prefix_hits = 0
        self.leaked = 0.0
        self.waste = self.served.block_tokens / 2
        self.window_s = self.window_busy_s = self.window_steps = self.window_tokens = self.window_fresh = 0.0
        for window in (self.ttft, self.queued, self.latency, self.gap, self.prompts, self.outputs):
            window.clear()

    # --- the batch -------------------------------------------------------------------------------------------------------

    @property
    def context(self) -> float:
        """Tokens held by the running sequences."""
        return self.base + len(self.running) * self.step

    def blocks_used(self) -> float:
        held = self.context + self.prompt_held
        sequences = len(self.running) + len(self.prefilling)
        return (held + sequences * self.waste) / self.served.block_tokens + self.leaked

    def _arrive(self, elapsed_s: float, seconds: float, wrong: EngineConditions) -> None:
        for offset in self.arrivals.draw(elapsed_s, seconds, wrong.arrivals):
            prompt = max(1, int(PROMPT_TOKENS.pick(self.random.random()) * wrong.prompt))
            prompt = min(prompt, self.served.max_len - 1)
            output = max(1, int(OUTPUT_TOKENS.pick(self.random.random()) * wrong.output))
            output = min(output, self.served.max_len - prompt)
            hit = int(prompt * min(1.0, PREFIX_HIT * wrong.prefix_hit * (0.9 + 0.2 * self.random.random())))
            self.prefix_queries += prompt
            self.prefix_hits += hit
            self.waiting.append(Request(elapsed_s + offset, prompt, output, max(1.0, prompt - hit)))

    def _admit(self, now_s: float, most: int) -> None:
        waiting = self.waiting
        while waiting and now_s - waiting[0].arrived_s > PATIENCE_S:
            waiting.popleft()
            self.aborted += 1
        if not waiting:
            return
        block = self.served.block_tokens
        free = self.blocks - self.blocks_used()
        while waiting and len(self.running) + len(self.prefilling) < most and self.backlog < STEP_TOKENS * 4:
            request = waiting[0]
            held = request.prompt + request.done
            need = (held + self.waste) / block
            if need > free and (self.running or self.prefilling):
                return
            free -= need
            waiting.popleft()
            self.prefilling.append(request)
            self.prompt_held += held
            self.backlog += request.left
            if request.first_s < 0:
                self.queued.add(now_s, max(0.0, now_s - request.arrived_s))

    def _preempt(self) -> None:
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

    def _begin_decode(self, request: Request, at_s: float, now_s: float) -> None:
        self.prefilling.popleft()
        self.prompt_held -= request.prompt + request.done
        self.order += 1
        request.order = self.order
        request.base = request.prompt + request.done - self.step
        request.end_step = self.step + request.output - request.done
        self.base += request.base
        heappush(self.running, (request.end_step, self.order, request))
        if request.first_s < 0:
            request.first_s = at_s
            self.ttft.add(now_s, at_s - request.arrived_s)
            self.prompts.add(now_s, float(request.prompt))

    # --- time ------------------------------------------------------------------------------------------------------------

    def advance(self, elapsed_s: float, seconds: float, wrong: EngineConditions, boards: list[GpuConditions]) -> None:
        """Move on by `seconds` (a slice of about 0.2 s) and set the load that the engine puts on its GPUs."""
        if wrong.down or any(board.lost for board in boards):
            if self.up:
                self.up = False
                self.running = []
            # whoever comes now is turned away; drawn all the same, so that the same requests follow with and without a fault
            self._arrive(elapsed_s, seconds, wrong)
            self.waiting.clear()
            self._rest(0.0)
            return
        if not self.up:
            self.up = True
            self._start(elapsed_s)
        if wrong.version is not None:
            self.version = wrong.version
        self.leaked = wrong.leaked_share * self.blocks
        self.waste = self.served.block_tokens / 2 if wrong.waste_tokens is None else wrong.waste_tokens
        self._arrive(elapsed_s, seconds, wrong)
        end_s = elapsed_s + seconds
        if wrong.hung:
            # the kernel of one rank never ends and the others spin in their collective: util stays, arithmetic stops
            while self.waiting and end_s - self.waiting[0].arrived_s > PATIENCE_S:
                self.waiting.popleft()
                self.aborted += 1
            self.window_s += seconds
            self.window_busy_s += seconds
            self._rest(1.0)
            return
        self._admit(end_s, wrong.max_running or MAX_RUNNING)
        running = len(self.running)
        if not running and not self.prefilling:
            self.window_s += seconds
            self._rest(0.0)
            return

        guess = self.step_s or 0.03
        prefill = min(max(0.0, STEP_TOKENS - running), self.backlog, self.backlog / max(1.0, seconds / guess))
        memory = roofline.memory_s(self.cost, running, self.context + self.prompt_held * 0.5)
        compute = roofline.compute_s(self.cost, running, prefill)
        lanes = min(
            PCIE_LANE_BYTES_S[board.pcie_gen or gpu.sku.pcie_gen] * (board.pcie_width or gpu.sku.pcie_width)
            for gpu, board in zip(self.gpus, boards, strict=True)
        )
        hits = prefill * PREFIX_HIT / (1 - PREFIX_HIT) * OFFLOAD_SHARE
        moved = hits * self.served.kv_bytes_per_token / len(self.gpus)
        kernels, slowest = [], 0.0
        for gpu, board in zip(self.gpus, boards, strict=True):
            stretched = compute * gpu.sku.clock_max_mhz / max(gpu.sku.clock_idle_mhz, gpu.clock_mhz or 1.0)
            own = roofline.kernel_s(memory * board.memory_slow, stretched)
            kernels.append((own, memory * board.memory_slow, stretched))
            slowest = max(slowest, own)
        # stolen time and a slower kernel path lengthen the step without adding work to it
        kernel = slowest * wrong.step_scale / (1 - wrong.stolen)
        step_s = kernel + self.served.overhead_s + wrong.host_s + moved / lanes
        steps = seconds / step_s
        self.step_s = step_s

        done = min(self.backlog, prefill * steps)
        self._decode(running, steps, end_s)
        self._prefill(done, seconds, elapsed_s, end_s)
        self.gap.add(end_s, step_s)
        if self.blocks_used() > self.blocks:
            self._preempt()
        self.window_s += seconds
        self.window_busy_s += seconds
        self.window_steps += steps
        self._load_gpus(kernels, kernel, step_s, moved, wrong)

    def _decode(self, running: int, steps: float, end_s: float) -> None:
        made = running * steps
        self.step += steps
        heap = self.running
        while heap and heap[0][0] <= self.step:
            _, _, request = heappop(heap)
            made -= self.step - request.end_step
            self.base -= request.base
            self.finished += 1
            self.latency.add(end_s, end_s - request.arrived_s)
            self.outputs.add(end_s, float(request.output))
        if not heap:
            self.base = 0.0
        self.generated += made
        self.window_tokens += made

    def _prefill(self, tokens: float, seconds: float, elapsed_s: float, end_s: float) -> None:
        self.backlog -= tokens
        self.window_fresh += tokens
        spent, total = 0.0, tokens
        while self.prefilling:
            request = self.prefilling[0]
            part = min(request.left, tokens)
            if request.first_s < 0:
                self.prompt_read += part * request.prompt / request.prefill
            if request.left > tokens + 1e-6:
                request.left -= tokens
                break
            tokens -= request.left
            spent += request.left
            request.left = 0.0
            at_s = elapsed_s + seconds * (spent / total if total > 0 else 1.0)
            # no sooner than one step after it came: the slice may have drawn its arrival late
            self._begin_decode(request, max(at_s, request.arrived_s + self.step_s), end_s)
        if not self.prefilling:
            self.backlog = self.prompt_held = 0.0

    def _load_gpus(
        self,
        kernels: list[tuple[float, float, float]],
        kernel: float,
        step_s: float,
        moved: float,
        wrong: EngineConditions,
    ) -> None:
        for gpu, (own, memory, compute) in zip(self.gpus, kernels, strict=True):
            gpu.busy = 1.0
            gpu.mem_share = min(1.0, memory / step_s + 0.5 * wrong.stolen)
            gpu.compute_share = min(1.0, compute / step_s + 0.6 * wrong.stolen)
            wait = max(0.0, kernel - own) / step_s
            gpu.activity = roofline.activity(
                min(1.0, own / step_s + wrong.stolen), gpu.compute_share, wait if wrong.stolen == 0 else 0.0
            )
            gpu.pcie_bytes_s = 40e6 + moved / step_s

    def _rest(self, spinning: float) -> None:
        for gpu in self.gpus:
            gpu.busy = spinning
            gpu.mem_share = gpu.compute_share = 0.0
            gpu.activity = roofline.activity(0.0, 0.0, spinning)
            gpu.pcie_bytes_s = 2e6

    # --- what its endpoint says ------------------------------------------------------------------------------------------

    def fields(self, now_s: float, wrong: EngineConditions) -> dict[str, Value]:
        """The engine's fields at `now_s`; rates and the mean step are those since the last call, quantiles of the last minute."""
        for window in (self.ttft, self.queued, self.latency, self.gap, self.prompts, self.outputs):
            window.expire(now_s)
        if not self.up:
            return {"up": 0, "probe_ok": 0}
        if wrong.silent:
            return {"up": 1, "probe_ok": 1}
        seconds = self.window_s or 1.0
        running = len(self.running) + len(self.prefilling)
        used = self.blocks_used()
        held = self.context + self.prompt_held
        fields: dict[str, Value] = {
            "generation_tokens_total": int(self.generated),
            "delivered_tokens_total": int(self.generated),
            "prompt_tokens_total": int(self.prompt_read),
            "preemptions_total": self.preempted,
            "requests_finished_total": self.finished,
            "requests_failed_total": 0,
            "requests_aborted_total": self.aborted,
            "oom_total": 0,
            "steps_total": int(self.step),
            "prefix_queries_total": self.prefix_queries,
            "prefix_hits_total": self.prefix_hits,
            "tokens_per_s": round(self.window_tokens / seconds, 2),
            "prompt_tokens_per_s": round((self.prompt_read - self.prompt_told) / seconds, 2),
            "requests_running": float(running),
            "requests_waiting": float(len(self.waiting)),
            "kv_used_pct": round(min(100.0, 100 * used / self.blocks), 2),
            "kv_blocks_count": float(self.blocks),
            "kv_blocks_free": float(max(0, int(self.blocks - used))),
            "stats_age_s": round(0.05 + 0.1 * self.jitter.random(), 3),
            "uptime_s": round(now_s - self.started_s, 1),
            "up": 1,
            "version": self.version,
            "config_hash": f"sim-{self.version}",
            "counter_style": "step",
        }
        if held > 0:
            fields["kv_fragmentation_pct"] = round(100 * running * self.waste / (held + running * self.waste), 2)
        if running:
            fields["context_mean"] = round(held / running, 1)
        hung = self.window_steps == 0 and running > 0
        fields["probe_ok"] = 0 if hung else 1
        if self.window_steps > 0:
            self._paced(fields, seconds)
        if len(self.ttft):
            fields["ttft_p50_s"] = round(self.ttft.quantile(0.5), 4)
            fields["ttft_p95_s"] = round(self.ttft.quantile(0.95), 4)
            fields["ttft_p99_s"] = round(self.ttft.quantile(0.99), 4)
            fields["prompt_len_mean"] = round(self.prompts.mean, 1)
            fields["prompt_len_p50"] = self.prompts.quantile(0.5)
            fields["prompt_len_p95"] = self.prompts.quantile(0.95)
            fields["prompt_len_max"] = self.prompts.quantile(1.0)
        if len(self.queued):
            fields["queue_p99_s"] = round(self.queued.quantile(0.99), 4)
        if len(self.latency):
            fields["e2e_p99_s"] = round(self.latency.quantile(0.99), 3)
            fields["output_len_mean"] = round(self.outputs.mean, 1)
            fields["output_len_p95"] = self.outputs.quantile(0.95)
        self.prompt_told = self.prompt_read
        self.window_s = self.window_busy_s = self.window_steps = self.window_tokens = self.window_fresh = 0.0
        return fields

    def _paced(self, fields: dict[str, Value], seconds: float) -> None:
        """What only an engine that makes steps can say."""
        step_s = self.window_busy_s / self.window_steps
        fields["step_mean_s"] = round(step_s, 6)
        fields["tokens_per_step"] = round(self.window_tokens / self.window_steps, 2)
        if len(self.gap):
            fields["itl_mean_s"] = round(self.gap.mean, 6)
            fields["itl_p50_s"] = round(self.gap.quantile(0.5), 6)
            fields["itl_p99_s"] = round(self.gap.quantile(0.99), 6)
        sku, group = self.gpus[0].sku, len(self.gpus)
        tokens_s = (self.window_tokens + self.window_fresh) / seconds
        fields["mfu_pct"] = round(100 * 2 * self.served.parameters * tokens_s / group / sku.peak_flops, 2)
        moved = 2 * self.served.parameters + self.context * self.served.kv_bytes_per_token
        fields["mbu_pct"] = round(100 * moved / group / step_s / sku.bandwidth_bytes_s, 2)
        fields["probe_s"] = round(step_s * (1 + self.jitter.random()), 4)

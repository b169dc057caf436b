"""One simulated engine: open arrivals, a batch that steps at the pace of its slowest GPU, and what its endpoint says."""

from __future__ import annotations

from random import Random

from agent.simulator import roofline
from agent.simulator.batch import STEP_TOKENS, Batch, Request
from agent.simulator.conditions import EngineConditions, GpuConditions
from agent.simulator.gpu import Gpu
from agent.simulator.rank import Rank
from agent.simulator.sku import GIB
from agent.simulator.trace import Replay, Trace
from agent.simulator.workload import OUTPUT_TOKENS, PREFIX_HIT, PROMPT_TOKENS, Arrivals, Traffic
from telemetry.sample import Value

MAX_RUNNING = 80
SLICE_S = 0.25  # up to this long a slice is short beside the reading of a prompt
BUSY_SHARE = 0.82  # of them run in a busy hour
KV_SHARE = 0.62  # pool size: the batch of a busy hour fills this much of it
UPTIME_S = 3 * 86_400.0  # of an engine when the simulation begins
VERSION = "1.8.2"
OFFLOAD_SHARE = 0.5  # of the prefix hits, whose KV comes back from host memory over PCIe
COLLECTIVES = 0.25  # of a step's overhead, which every rank waits out
CONTEXT_BYTES = 0.6 * GIB  # of a GPU that a process has opened and not yet filled
PCIE_LANE_BYTES_S = {1: 0.2e9, 2: 0.4e9, 3: 0.8e9, 4: 1.6e9, 5: 3.2e9, 6: 6.4e9}


class Engine:
    """One engine on the GPUs of its group. `load` is the share of its capacity that arrives at the busiest hour."""

    def __init__(
        self,
        name: str,
        gpus: list[Gpu],
        served: roofline.Served,
        load: float,
        random: Random,
        trace: Trace | None = None,
        trace_start_s: float = 0.0,
    ) -> None:
        self.name = name
        self.gpus = gpus
        self.served = served
        self.jitter = Random(f"{name}/jitter")  # apart, so that being asked changes no request
        self.cost = roofline.cost(served, gpus[0].sku, len(gpus))
        held = PROMPT_TOKENS.mean + OUTPUT_TOKENS.mean * 0.8
        self.blocks = int(MAX_RUNNING * BUSY_SHARE * held / KV_SHARE / served.block_tokens)
        self.prefix_hit = PREFIX_HIT
        self.arrivals: Traffic
        if trace is None:
            self.arrivals = Arrivals(load * self._capacity(PROMPT_TOKENS.mean, OUTPUT_TOKENS.mean), random)
        else:
            trace = trace.shortened(served.max_len - 1)
            prompt, output, self.prefix_hit = trace.means()
            self.arrivals = Replay(trace, load * self._capacity(prompt, output), trace_start_s, random)
        pool = self.blocks * served.block_tokens * served.kv_bytes_per_token
        self.held_bytes = (2 * served.parameters + pool) / len(gpus) + 4 * GIB  # of each GPU
        self.version, self.config = VERSION, "a"
        self.up = True
        self.starting = False
        self._start(-UPTIME_S)

    def _capacity(self, prompt: float, output: float) -> float:
        """Requests/s that a full batch sustains at the highest clock, of requests with these mean lengths."""
        held = prompt + output * 0.8
        fitting = self.blocks * self.served.block_tokens * KV_SHARE / BUSY_SHARE / held
        running = min(MAX_RUNNING, round(fitting))
        prefill = running * prompt * (1 - self.prefix_hit) / output
        memory = roofline.memory_s(self.cost, running, running * held)
        kernel = roofline.kernel_s(memory, roofline.compute_s(self.cost, running, prefill))
        return running / (kernel + self.served.overhead_s) / output

    def _start(self, now_s: float) -> None:
        """A fresh process: empty, counters at zero."""
        self.started_s = now_s
        for gpu in self.gpus:
            gpu.memory_used_bytes = self.held_bytes
        self.batch = Batch(self.blocks, self.served.block_tokens)
        self.step_s = 0.03
        self.ranks = [Rank(Random(f"{self.name}/rank{i}")) for i in range(len(self.gpus))]
        self.prefix_queries = self.prefix_hits = 0
        self._since_s = self._stepping_s = self._steps = 0.0  # since the fields were last asked for
        self._told = (0.0, 0.0, 0.0)  # generated, read and computed tokens by then

    def _arrive(self, elapsed_s: float, seconds: float, wrong: EngineConditions) -> None:
        for asked in self.arrivals.draw(elapsed_s, seconds, wrong.arrivals):
            prompt = min(max(1, int(asked.prompt * wrong.prompt)), self.served.max_len - 1)
            output = min(max(1, int(asked.output * wrong.output)), self.served.max_len - prompt)
            hit = int(prompt * min(1.0, asked.hit * wrong.prefix_hit))
            self.prefix_queries += prompt
            self.prefix_hits += hit
            self.batch.waiting.append(Request(elapsed_s + asked.offset_s, prompt, output, max(1.0, prompt - hit)))

    def advance(self, elapsed_s: float, seconds: float, wrong: EngineConditions, boards: list[GpuConditions]) -> None:
        """Move on by `seconds` (a slice of about 0.2 s) and set the load that the engine puts on its GPUs."""
        self.starting = wrong.joining
        if wrong.down or wrong.joining or any(board.lost for board in boards):
            # whoever comes now is turned away; drawn all the same, so that the same requests follow with and without a fault
            self.up = False
            self._arrive(elapsed_s, seconds, wrong)
            self.batch.waiting.clear()
            self._rest(1.0 if wrong.joining else 0.0)
            for gpu in self.gpus:
                gpu.memory_used_bytes = CONTEXT_BYTES
            return
        if not self.up:
            self.up = True
            self._start(elapsed_s)
        self.version = wrong.version or self.version
        self.config = wrong.config or self.config
        batch = self.batch
        batch.leaked = wrong.leaked_share * self.blocks
        if wrong.waste_tokens is not None:
            batch.waste = wrong.waste_tokens
        self._arrive(elapsed_s, seconds, wrong)
        end_s = elapsed_s + seconds
        batch.lose_patience(end_s)
        self._since_s += seconds
        if wrong.hung:
            # the kernel of one rank never ends and the others spin in their collective: util stays, arithmetic stops
            self._rest(1.0)
            return
        steps = max(4.0, seconds / self.step_s)  # admitted once a slice, what a real one admits step by step
        batch.admit(
            end_s, wrong.max_running or MAX_RUNNING, STEP_TOKENS * steps if seconds > SLICE_S else STEP_TOKENS * 4
        )
        if not batch.sequences:
            self._rest(0.0)
            return
        prefill = self._step(seconds, wrong, boards)
        steps = seconds / self.step_s
        batch.decode(steps, end_s)
        batch.prefill(min(batch.backlog, prefill * steps), elapsed_s, end_s, self.step_s)
        batch.gap.add(end_s, self.step_s)
        if batch.blocks_used() > self.blocks:
            batch.preempt()
        self._stepping_s += seconds
        self._steps += steps

    def _step(self, seconds: float, wrong: EngineConditions, boards: list[GpuConditions]) -> float:
        """Set the length of a step and the load of each GPU during it; the prompt tokens in a step."""
        batch, cost, group = self.batch, self.cost, len(self.gpus)
        running = len(batch.running)
        room = max(0.0, STEP_TOKENS - running)
        prefill = min(room, batch.backlog, batch.backlog / max(1.0, seconds / self.step_s))
        memory = roofline.memory_s(cost, running, batch.context + batch.prompt_held * 0.5)
        compute = roofline.compute_s(cost, running, prefill)
        hit = min(0.95, self.prefix_hit * wrong.prefix_hit)
        moved = prefill * hit / (1 - hit) * OFFLOAD_SHARE * self.served.kv_bytes_per_token / group
        links = [
            PCIE_LANE_BYTES_S[board.pcie_gen or gpu.sku.pcie_gen] * (board.pcie_width or gpu.sku.pcie_width)
            for gpu, board in zip(self.gpus, boards, strict=True)
        ]
        parts, slowest = [], 0.0
        for gpu, board in zip(self.gpus, boards, strict=True):
            traffic = memory * board.memory_slow
            arithmetic = compute * gpu.sku.clock_max_mhz / gpu.clock_mhz
            own = roofline.kernel_s(traffic, arithmetic) * board.rank_slow
            parts.append((own, traffic, arithmetic))
            slowest = max(slowest, own)
        # stolen time and a slower kernel path lengthen the step without adding work to it
        longer = wrong.step_scale / (1 - wrong.stolen)
        kernel = slowest * longer
        step_s = self.step_s = kernel + self.served.overhead_s + wrong.host_s + moved / min(links)
        alike = (1 - COLLECTIVES) * self.served.overhead_s + wrong.host_s
        for rank, (own, _, _), link in zip(self.ranks, parts, links, strict=True):
            rank.advance(seconds, step_s, own * longer + alike + moved / link)
        for gpu, (own, traffic, arithmetic) in zip(self.gpus, parts, strict=True):
            gpu.busy = 1.0
            gpu.mem_share = min(1.0, traffic / step_s + 0.5 * wrong.stolen)
            gpu.compute_share = min(1.0, arithmetic / step_s + 0.6 * wrong.stolen)
            waiting = 0.0 if wrong.stolen else (kernel - own) / step_s
            gpu.activity = roofline.activity(min(1.0, own / step_s + wrong.stolen), gpu.compute_share, waiting)
            gpu.pcie_bytes_s = 40e6 + moved / step_s
        return prefill

    def _rest(self, spinning: float) -> None:
        for gpu in self.gpus:
            gpu.busy = spinning
            gpu.mem_share = gpu.compute_share = 0.0
            gpu.activity = roofline.activity(0.0, 0.0, spinning)
            gpu.pcie_bytes_s = 2e6

    # --- what its endpoint says

    def fields(self, now_s: float, wrong: EngineConditions) -> dict[str, Value]:
        """The engine's fields at `now_s`; rates and the mean step are those since the last call, quantiles of the last minute."""
        batch = self.batch
        batch.expire(now_s)
        if not self.up:
            return {"up": 0, "probe_ok": 0, "starting": int(self.starting)}
        if wrong.silent:
            return {"up": 1, "probe_ok": 1}
        seconds = self._since_s or 1.0
        generated, read, computed = (
            now - before
            for now, before in zip((batch.generated, batch.prompt_read, batch.computed), self._told, strict=True)
        )
        used = batch.blocks_used()
        fields: dict[str, Value] = {
            "generation_tokens_total": int(batch.generated),
            "delivered_tokens_total": int(batch.generated),
            "prompt_tokens_total": int(batch.prompt_read),
            "preemptions_total": batch.preempted,
            "requests_finished_total": batch.finished,
            "requests_failed_total": 0,
            "requests_aborted_total": batch.aborted,
            "oom_total": 0,
            "steps_total": int(batch.step),
            "prefix_queries_total": self.prefix_queries,
            "prefix_hits_total": self.prefix_hits,
            "tokens_per_s": round(generated / seconds, 2),
            "prompt_tokens_per_s": round(read / seconds, 2),
            "requests_running": float(batch.sequences),
            "requests_waiting": float(len(batch.waiting)),
            "kv_used_pct": round(min(100.0, 100 * used / self.blocks), 2),
            "kv_blocks_count": float(self.blocks),
            "kv_blocks_free": float(max(0, int(self.blocks - used))),
            "stats_age_s": round(0.05 + 0.1 * self.jitter.random(), 3),
            "uptime_s": round(now_s - self.started_s, 1),
            "up": 1,
            "probe_ok": 0 if self._steps == 0 and batch.sequences else 1,
            "version": self.version,
            "config_hash": f"sim-{self.config}",
            "counter_style": "step",
        }
        if batch.sequences:
            held = batch.context + batch.prompt_held
            wasted = batch.sequences * batch.waste
            fields["context_mean"] = round(held / batch.sequences, 1)
            fields["kv_fragmentation_pct"] = round(100 * wasted / (held + wasted), 2)
        if self._steps > 0:
            self._paced(fields, generated, (generated + computed) / seconds)
        self._experienced(fields)
        self._told = (batch.generated, batch.prompt_read, batch.computed)
        self._since_s = self._stepping_s = self._steps = 0.0
        return fields

    def _paced(self, fields: dict[str, Value], generated: float, tokens_s: float) -> None:
        """What only an engine that makes steps can say."""
        batch, sku, group = self.batch, self.gpus[0].sku, len(self.gpus)
        step_s = self._stepping_s / self._steps
        fields["step_mean_s"] = round(step_s, 6)
        fields["tokens_per_step"] = round(generated / self._steps, 2)
        fields["itl_mean_s"] = round(batch.gap.mean, 6)
        fields["itl_p50_s"] = round(batch.gap.quantile(0.5), 6)
        fields["itl_p99_s"] = round(batch.gap.quantile(0.99), 6)
        fields["mfu_pct"] = round(100 * 2 * self.served.parameters * tokens_s / group / sku.peak_flops, 2)
        moved = 2 * self.served.parameters + batch.context * self.served.kv_bytes_per_token
        fields["mbu_pct"] = round(100 * moved / group / step_s / sku.bandwidth_bytes_s, 2)
        fields["probe_s"] = round(step_s * (1 + self.jitter.random()), 4)

    def _experienced(self, fields: dict[str, Value]) -> None:
        """What the requests of the last minute saw."""
        batch = self.batch
        if len(batch.ttft):
            fields["ttft_p50_s"] = round(batch.ttft.quantile(0.5), 4)
            fields["ttft_p95_s"] = round(batch.ttft.quantile(0.95), 4)
            fields["ttft_p99_s"] = round(batch.ttft.quantile(0.99), 4)
            fields["prompt_len_mean"] = round(batch.prompts.mean, 1)
            fields["prompt_len_p50"] = batch.prompts.quantile(0.5)
            fields["prompt_len_p95"] = batch.prompts.quantile(0.95)
            fields["prompt_len_max"] = batch.prompts.quantile(1.0)
        if len(batch.queued):
            fields["queue_p99_s"] = round(batch.queued.quantile(0.99), 4)
        if len(batch.latency):
            fields["e2e_p99_s"] = round(batch.latency.quantile(0.99), 3)
            fields["output_len_mean"] = round(batch.outputs.mean, 1)
            fields["output_len_p95"] = batch.outputs.quantile(0.95)

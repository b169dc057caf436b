"""Step 4: is the work stuck, badly spread, or starved by the host? A hung engine, imbalance, host CPU, a second tenant."""

from __future__ import annotations

from rules.evidence import Evidence, ratio, rise, value
from rules.finding import Effect, Finding, confirmed, effect_of, fix, line, no_data, pair_line, ruled_out, summary
from rules.priors import Strength
from rules.thresholds import Bar
from rules.verdict import Cause, Cost, Line, Status


def scheduling(evidence: Evidence, bar: Bar) -> Finding:
    """R19, R20: requests run and no token comes, the engine does not answer, or the queue is here while peers idle."""
    engine = evidence.engine
    if engine is None:
        return no_data(Cause.SCHEDULING, line("no_engine"))
    return _hung(evidence, bar) or _not_answering(evidence, bar) or _uneven(evidence, bar) or _moving(evidence, bar)


def _hung(evidence: Evidence, bar: Bar) -> Finding | None:
    engine = evidence.engine
    if engine is None or not bar.reached("scheduling.frozen_s", engine.frozen_s):
        return None
    if bar.reached("telemetry.stats_age_s", value(engine.stats_age)):
        return None  # the counters may be old rather than still
    frozen = engine.frozen_s or 0.0
    running = value(engine.running) or 0.0
    return confirmed(
        Cause.SCHEDULING,
        Strength.PROOF,
        (
            line("frozen", "engine.generation_tokens_total", frozen_s=frozen, running=running),
            line("health_lies", "engine.up") if value(engine.up) else None,
            line("probe_failed", "engine.probe_ok") if engine.probe_ok is False else None,
            _util_line(evidence),
            pair_line(evidence),
        ),
        summary("hung", frozen_s=frozen, running=running),
        (fix("restart_engine", Cost.SOFTWARE_CHEAP), fix("drain_node", Cost.OPERATIONS_CHEAP)),
        since_ns=evidence.at_ns - int(frozen * 1e9),
        alone=True,
    )


def _util_line(evidence: Evidence) -> Line | None:
    util = evidence.util_pct
    powers = [gpu.power for gpu in evidence.gpus if gpu.power is not None]
    if util is None:
        return None
    if powers:
        mean = sum(seen.value for seen in powers) / len(powers)
        return line("util_power", "gpu.power_w", util_pct=util, power_w=mean)
    return line("util_cpu", "host.cpu_pct", util_pct=util)


def _not_answering(evidence: Evidence, bar: Bar) -> Finding | None:
    engine = evidence.engine
    if engine is None or engine.starting or not bar.reached("scheduling.silent_s", engine.down_s):
        return None
    since = evidence.at_ns - int(engine.down_s * 1e9)
    if any(event.kind in ("restart", "deploy") and event.time_ns >= since - 10**10 for event in evidence.events):
        return None  # it was started anew: the cold start's matter
    return confirmed(
        Cause.SCHEDULING,
        Strength.STRONG,
        (line("not_answering", "engine.up", engine=engine.name, down_s=engine.down_s), _util_line(evidence)),
        summary("not_answering", engine=engine.name, down_s=engine.down_s),
        (fix("restart_engine", Cost.SOFTWARE_CHEAP),),
        since_ns=since,
        alone=True,
    )


def _uneven(evidence: Evidence, bar: Bar) -> Finding | None:
    """The queue is here and not at the peers, while a unit of work takes as long as ever and more of it comes: the balancer.

    More comes when more goes through than usual, prompts and output alike, or when the peers have less than usual.
    """
    engine, peers = evidence.engine, evidence.peers
    if engine is None or engine.waiting is None or peers.pairs < 2 or peers.waiting is None or peers.running is None:
        return None
    waiting, running = engine.waiting.value, value(engine.running) or 0.0
    if effect_of(evidence, bar).slow_work or not bar.reached("scheduling.peer_waiting", waiting):
        return None
    share = (waiting + running) / max(peers.waiting + peers.running, 1.0)
    usual_queue = engine.waiting.usual_high or 0.0
    if not bar.reached("scheduling.peer_ratio", share) or waiting <= 2 * usual_queue or peers.waiting >= 1:
        return None
    fewer_there = peers.usual_running is not None and bar.reached(
        "scheduling.peers_fall", peers.running / max(peers.usual_running, 1e-9)
    )
    more_here = bar.reached(
        "scheduling.more_ratio", min(ratio(engine.prompt_tokens_per_s) or 0, ratio(engine.tokens_per_s) or 0)
    )
    if not (more_here or (fewer_there and (ratio(engine.running) or 0) >= 1)):
        return None
    return confirmed(
        Cause.SCHEDULING,
        Strength.FAIR,
        (
            line("queue", "engine.requests_waiting", waiting=waiting, running=running),
            line(
                "peers_idle", "engine.requests_waiting", pairs=peers.pairs, waiting=peers.waiting, running=peers.running
            ),
        ),
        summary("uneven", ratio=share),
        (fix("balance_by_eta", Cost.SOFTWARE_CHEAP),),
        since_ns=engine.waiting.since_ns,
        alone=True,
    )


def _moving(evidence: Evidence, bar: Bar) -> Finding:
    engine = evidence.engine
    if engine is None or (engine.frozen_s is None and engine.tokens_per_s is None):
        return no_data(Cause.SCHEDULING, line("no_progress_counter"))
    peers = evidence.peers
    waiting = engine.waiting
    if waiting is not None and bar.reached("scheduling.peer_waiting", waiting.value):
        usual = waiting.usual or 0.0
        if waiting.value > 2 * max(waiting.usual_high or 0.0, 1.0):
            seen = line("queue_up", waiting.lane, waiting=waiting.value, usual=usual)
            return Finding(Cause.SCHEDULING, Status.SYMPTOM, (seen,))
    return ruled_out(
        Cause.SCHEDULING,
        line("moving", "engine.tokens_per_s", tokens_s=value(engine.tokens_per_s) or 0.0),
        line("peers", "engine.requests_waiting", pairs=peers.pairs, waiting=peers.waiting, running=peers.running or 0.0)
        if peers.pairs and peers.waiting is not None
        else None,
    )


def host_cpu(evidence: Evidence, bar: Bar) -> Finding:
    """R17 and the evidence order's step 6: quota throttling, CPU pressure, one core full while the GPU waits."""
    host = evidence.host
    if host is None or (host.cpu is None and host.psi_cpu is None):
        return no_data(Cause.HOST_CPU, line("no_host"))
    effect = effect_of(evidence, bar)
    signs = [*_quota(evidence, bar), *_pressure(evidence, bar), *_full_core(evidence, bar)]
    if not signs or not effect.slow:
        return ruled_out(
            Cause.HOST_CPU, *_host_lines(evidence), line("cpu_harmless", "host.cpu_pct") if signs else None
        )
    strength = Strength.STRONG if len(signs) > 1 else Strength.FAIR
    since = [seen.since_ns for seen in (host.psi_cpu, host.load, host.cpu) if seen is not None and seen.since_ns]
    return confirmed(
        Cause.HOST_CPU,
        strength,
        (*signs, *_host_lines(evidence), pair_line(evidence)),
        summary("host_cpu", loss_pct=effect.loss_pct or 0.0),
        (fix("free_cpu", Cost.OPERATIONS_CHEAP), fix("raise_cpu_quota", Cost.SOFTWARE_CHEAP)),
        since_ns=min(since) if since else evidence.output.since_ns,
        scope="node",
    )


def _quota(evidence: Evidence, bar: Bar) -> list[Line]:
    throttled = evidence.host.throttled if evidence.host else None
    if throttled is None or not bar.reached("host_cpu.throttled_pct", throttled.value):
        return []
    if throttled.usual is not None and throttled.value <= 1.5 * throttled.usual:
        return []  # it was so in health, too
    return [line("quota", throttled.lane, throttled_pct=throttled.value)]


def _pressure(evidence: Evidence, bar: Bar) -> list[Line]:
    host = evidence.host
    if host is None:
        return []
    found = []
    if host.psi_cpu is not None and bar.reached("host_cpu.pressure_rise_pct", rise(host.psi_cpu)):
        found.append(line("psi_cpu", host.psi_cpu.lane, now=host.psi_cpu.value, usual=host.psi_cpu.usual or 0.0))
    if host.load is not None and host.load.value >= 2 and bar.reached("host_cpu.load_ratio", ratio(host.load)):
        found.append(line("load", host.load.lane, now=host.load.value, usual=host.load.usual or 0.0))
    return found


def _full_core(evidence: Evidence, bar: Bar) -> list[Line]:
    """One core full while the GPU waits for it, by its util or by its power; only if the core is not usually so."""
    host, util = evidence.host, evidence.util_pct
    if host is None or host.core_max is None or evidence.effort != "gpu" or util is None:
        return []
    usual = host.core_max.usual
    if usual is not None and host.core_max.value < usual + 10:
        return []
    powers = [ratio(gpu.power) for gpu in evidence.gpus]
    known = [share for share in powers if share is not None]
    starved = bar.reached("host_cpu.power_ratio", sum(known) / len(known) if known else None)
    if not bar.reached("host_cpu.core_pct", host.core_max.value) or not (
        starved or bar.reached("host_cpu.util_pct", util)
    ):
        return []
    return [line("full_core", host.core_max.lane, core_pct=host.core_max.value, util_pct=util)]


def _host_lines(evidence: Evidence) -> list[Line | None]:
    host = evidence.host
    if host is None or host.cpu is None:
        return []
    if host.cpu.usual is None:
        return [line("cpu", host.cpu.lane, now=host.cpu.value)]
    return [line("cpu_usual", host.cpu.lane, now=host.cpu.value, usual=host.cpu.usual)]


def contention(evidence: Evidence, bar: Bar) -> Finding:
    """A second process on the GPU since the pair became slow."""
    counted = [gpu for gpu in evidence.gpus if gpu.processes is not None]
    if not counted:
        return no_data(Cause.CONTENTION, line("no_gpu" if not evidence.gpus else "no_processes"))
    shared = [gpu for gpu in counted if bar.reached("contention.processes_rise", rise(gpu.processes))]
    effect: Effect = effect_of(evidence, bar)
    most = max(counted, key=lambda gpu: value(gpu.processes) or 0)
    seen = line("processes", "gpu.processes", gpu=most.index, count=int(value(most.processes) or 0))
    if not shared or not effect.slow:
        return ruled_out(Cause.CONTENTION, seen)
    return confirmed(
        Cause.CONTENTION,
        Strength.FAIR,
        (seen, pair_line(evidence)),
        summary("contention", loss_pct=effect.loss_pct or 0.0),
        (fix("evict_tenant", Cost.OPERATIONS_CHEAP),),
        since_ns=evidence.output.since_ns,
        gpus=tuple(gpu.index for gpu in shared),
    )


def network(evidence: Evidence, bar: Bar) -> Finding:
    """Client latency beside the server's own is not measured by any source yet."""
    return no_data(Cause.NETWORK, line("no_network"))


def examine(evidence: Evidence, bar: Bar) -> list[Finding]:
    return [scheduling(evidence, bar), host_cpu(evidence, bar), contention(evidence, bar), network(evidence, bar)]

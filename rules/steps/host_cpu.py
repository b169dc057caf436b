"""Host CPU: quota throttling, too few cores, CPU pressure, one core full while the GPU waits."""

from __future__ import annotations

from collections.abc import Sequence

from rules.evidence import Evidence, HostEvidence, Observation, ratio, rise, value
from rules.finding import (
    Effect,
    Finding,
    Sign,
    cleared,
    confirmed,
    effect_of,
    fix,
    harmless,
    line,
    names_cause,
    no_data,
    pair_line,
    strongest,
    summary,
    unread,
)
from rules.priors import Strength
from rules.thresholds import Bar
from rules.verdict import Cause, Cost, Line


def host_cpu(evidence: Evidence, bar: Bar) -> Finding:
    """R17 and the evidence order's step 6: quota throttling, CPU pressure, one core full while the GPU waits."""
    host = evidence.host
    starved = _late_first(evidence, bar)
    if starved:
        return _tokenizer(evidence, starved)
    if masks_on_cpu(evidence, bar):
        return _masks(evidence, effect_of(evidence, bar))
    if _paced(evidence, bar):
        return _unfed(evidence, effect_of(evidence, bar))
    seen = () if host is None else (host.cpu, host.psi_cpu, host.core_max, host.cores, host.cores_asked)
    if host is None or (all(entry is None for entry in seen) and not host.throttling):
        return no_data(Cause.HOST_CPU, line("no_host"))
    effect = effect_of(evidence, bar)
    signs = [
        *_quota(evidence, bar),
        *_few_cores(evidence, bar),
        *_pressure(evidence, bar),
        *full_core(evidence, bar),
    ]
    if not signs and _may_be_pressed(host, bar):
        return harmless(Cause.HOST_CPU, effect, *_host_lines(evidence))
    if not signs:
        return cleared(Cause.HOST_CPU, _host_lines(evidence), [] if evidence.told else _not_seen(host))
    if not effect.hurts:
        calm = line("cpu_harmless", "host.cpu_pct") if effect.known else None
        return harmless(Cause.HOST_CPU, effect, *_host_lines(evidence), *signs, calm)
    if evidence.engine is not None and evidence.engine.structured and full_core(evidence, bar):
        signs.append(line("structured", ""))
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


def _not_seen(host: HostEvidence) -> list[Line]:
    """A mean over all cores clears nothing: the busiest one, and a crowd, are seen by their own readings only."""
    found = [unread("host.cpu_core_max_pct")] if host.core_max is None else []
    return [*found, unread("host.psi_cpu_pct")] if host.psi_cpu is None and host.load is None else found


def _may_be_pressed(host: HostEvidence, bar: Bar) -> bool:
    """Under pressure, and what is usual is not known yet."""
    pressed = host.psi_cpu
    return pressed is not None and pressed.usual is None and bar.reached("host_cpu.pressure_rise_pct", pressed.value)


def _late_first(evidence: Evidence, bar: Bar) -> list[Sign]:
    """R17: the first token is late because its text is read by one thread, however busy the GPU looks meanwhile."""
    engine = evidence.engine
    if engine is None or not (
        bar.reached("host_cpu.first_ratio", ratio(engine.ttft)) or (evidence.told and effect_of(evidence, bar).hurts)
    ):
        return []
    signs = []
    tokenize, first = value(engine.tokenize_s), value(engine.ttft)
    share = tokenize / first if tokenize is not None and first and engine.ttft and not engine.ttft.relative else None
    if bar.reached("host_cpu.tokenize_share", share):
        signs.append(
            Sign(
                Strength.STRONG, line("tokenize", "engine.ttft_p95_s", tokenize_s=tokenize or 0.0, ttft_s=first or 0.0)
            )
        )
    thread = engine.thread_max
    if (
        thread is not None
        and bar.reached("host_cpu.core_pct", thread.value)
        and (thread.usual is None or thread.value >= thread.usual + 10)
    ):
        signs.append(Sign(Strength.FAIR, line("thread_full", thread.lane, pct=thread.value)))
    return signs


def _tokenizer(evidence: Evidence, signs: Sequence[Sign]) -> Finding:
    effect, engine = effect_of(evidence, Bar()), evidence.engine
    util = evidence.util_pct
    return confirmed(
        Cause.HOST_CPU,
        strongest(signs),
        (
            *(sign.line for sign in signs),
            line("busy_is_no_alibi", "gpu.util_pct", util_pct=util) if util is not None else None,
            pair_line(evidence),
        ),
        names_cause(Cause.HOST_CPU, effect),
        (fix("faster_tokenizer", Cost.SOFTWARE_CHEAP), fix("raise_cpu_quota", Cost.SOFTWARE_CHEAP)),
        since_ns=engine.ttft.since_ns if engine is not None and engine.ttft is not None else None,
        scope="node",
    )


def masks_on_cpu(evidence: Evidence, bar: Bar) -> bool:
    """Structured answers beside harm: which tokens are allowed is worked out on the CPU, for each sequence and token, and nothing that is
    told of the cores or the GPU says otherwise."""
    engine, host, util = evidence.engine, evidence.host, evidence.util_pct
    if engine is None or not engine.structured or not effect_of(evidence, bar).hurts:
        return False
    return (host is None or host.core_max is None) and (util is None or bar.reached("host_cpu.util_pct", util))


def _masks(evidence: Evidence, effect: Effect) -> Finding:
    return confirmed(
        Cause.HOST_CPU,
        Strength.FAIR,
        (line("structured", ""), line("masks_on_cpu", "host.cpu_core_max_pct"), pair_line(evidence)),
        names_cause(Cause.HOST_CPU, effect),
        (fix("cheaper_grammar", Cost.SOFTWARE_CHEAP), fix("raise_cpu_quota", Cost.SOFTWARE_CHEAP)),
        since_ns=evidence.output.since_ns,
        scope="node",
    )


def _paced(evidence: Evidence, bar: Bar) -> bool:
    """A told batch beside a GPU that idles half of the time, and nothing of the cores: whoever launches its work is late with it."""
    engine, host, util = evidence.engine, evidence.host, evidence.util_pct
    if (
        not evidence.told
        or engine is None
        or util is None
        or util < 1
        or (host is not None and host.core_max is not None)
    ):
        return False
    return bar.reached("host_cpu.told_running", value(engine.running)) and bar.reached("host_cpu.told_util_pct", util)


def _unfed(evidence: Evidence, effect: Effect) -> Finding:
    running = value(evidence.engine.running) if evidence.engine is not None else None
    return confirmed(
        Cause.HOST_CPU,
        Strength.WEAK,
        (
            line("unfed", "gpu.util_pct", running=running or 0.0, util_pct=evidence.util_pct or 0.0),
            pair_line(evidence),
        ),
        names_cause(Cause.HOST_CPU, effect),
        (fix("free_cpu", Cost.OPERATIONS_CHEAP), fix("raise_cpu_quota", Cost.SOFTWARE_CHEAP)),
        since_ns=evidence.output.since_ns,
        scope="node",
    )


def _quota(evidence: Evidence, bar: Bar) -> list[Line]:
    if evidence.host is not None and evidence.host.throttling:
        return [line("told_throttling", "host.cgroup_throttled_pct")]
    throttled = evidence.host.throttled if evidence.host else None
    if throttled is None or not bar.reached("host_cpu.throttled_pct", throttled.value):
        return []
    if throttled.usual is not None and throttled.value <= 1.5 * throttled.usual:
        return []  # it was so in health, too
    return [line("quota", throttled.lane, throttled_pct=throttled.value)]


def _few_cores(evidence: Evidence, bar: Bar) -> list[Line]:
    """More threads than cores, or so few cores that the engine's loop waits: tokens come later and the first ones do not."""
    host, engine = evidence.host, evidence.engine
    if host is None:
        return []
    found = []
    cores = host.cores if host.cores is not None else host.cores_asked
    if cores and host.threads and bar.reached("host_cpu.threads_per_core", host.threads / cores):
        found.append(line("many_threads", "", threads=host.threads, cores=cores))
    loop = engine is not None and bar.reached("host_cpu.loop_ratio", ratio(engine.itl))
    if bar.reached("host_cpu.few_cores", cores) and (loop or effect_of(evidence, bar).slow):
        found.append(line("few_cores", "", cores=cores or 0.0))
    return found


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


def full_core(evidence: Evidence, bar: Bar) -> list[Line]:
    """One core full while the GPU waits for it, by its util or by its power; only if the core is not usually so."""
    host, util = evidence.host, evidence.util_pct
    if host is None or host.core_max is None or host.core_waits:
        return []
    if util is None and evidence.told and bar.reached("host_cpu.core_pct", host.core_max.value):
        return [line("full_core_only", host.core_max.lane, core_pct=host.core_max.value)]
    if evidence.effort != "gpu" or util is None:
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
    if host is None:
        return []
    pressed = host.psi_cpu if host.psi_cpu is not None and not evidence.told else None
    core = host.core_max if not evidence.told else None
    return [
        _cpu_line(host.cpu),
        line("core_max", core.lane, now=core.value) if core is not None else None,
        line("pressed", pressed.lane, now=pressed.value) if pressed is not None else None,
    ]


def _cpu_line(cpu: Observation | None) -> Line | None:
    if cpu is None or cpu.usual is None:
        return None if cpu is None else line("cpu", cpu.lane, now=cpu.value)
    return line("cpu_usual", cpu.lane, now=cpu.value, usual=cpu.usual)

"""Step 5: was something deployed, restarted, or is it still cold? Looked at last: a deploy is often near and seldom guilty."""

from __future__ import annotations

from rules.evidence import EngineEvidence, Evidence, ratio, value
from rules.finding import Finding, confirmed, effect_of, fix, line, no_data, pair_line, ruled_out, summary
from rules.priors import Strength
from rules.steps.requests import explained_share
from rules.thresholds import Bar
from rules.verdict import Cause, Cost
from rules.window import Event


def software(evidence: Evidence, bar: Bar) -> Finding:
    """R26: each unit of work takes longer since a deploy, a configuration change or a restart, and nothing physical moved."""
    changes = _changes(evidence, bar)
    effect = effect_of(evidence, bar)
    if evidence.engine is None:
        return no_data(Cause.SOFTWARE, line("no_engine"))
    if not changes:
        return ruled_out(Cause.SOFTWARE, line("nothing_changed"))
    last = changes[-1]
    age_min = (evidence.at_ns - last.time_ns) / 60e9
    seen = line(f"changed_{last.kind}", "", text=last.text or last.subject, minutes=age_min)
    since = evidence.output.since_ns
    explained = explained_share(evidence)
    guilty = None
    if effect.slow_work and since is not None and not bar.reached("request_mix.explained", explained):
        guilty = next((event for event in reversed(changes) if _matches(event, since, bar)), None)
    if guilty is None:
        return ruled_out(Cause.SOFTWARE, seen, line("step_elsewhere") if effect.slow else line("no_step"))
    seen = line(
        f"changed_{guilty.kind}",
        "",
        text=guilty.text or guilty.subject,
        minutes=(evidence.at_ns - guilty.time_ns) / 60e9,
    )
    return confirmed(
        Cause.SOFTWARE,
        Strength.STRONG if guilty.kind in ("deploy", "config") else Strength.FAIR,
        (
            seen,
            line("step_follows", "pair.output_pct", lag_s=max((since or 0) - guilty.time_ns, 0) / 1e9),
            line(
                "work_slower",
                "engine.step_mean_s",
                slower_pct=100 * (1 / max(evidence.output.work_ratio or 1, 1e-3) - 1),
            ),
            pair_line(evidence),
        ),
        summary("software", text=guilty.text or guilty.subject, loss_pct=effect.loss_pct or 0.0),
        (fix("roll_back", Cost.SOFTWARE_CHEAP),),
        since_ns=since,
    )


def _changes(evidence: Evidence, bar: Bar) -> list[Event]:
    recent = evidence.at_ns - int(bar.enter("software.event_s") * 1e9)
    name = evidence.engine.name if evidence.engine else ""
    return [
        event
        for event in evidence.events
        if event.kind in ("deploy", "config", "restart") and event.time_ns >= recent and _concerns(event, name)
    ]


def _concerns(event: Event, engine: str) -> bool:
    return event.subject in ("", engine) or not engine


def _matches(event: Event, since_ns: int, bar: Bar) -> bool:
    """The slow stretch begins at the event or within the lag after it; ten seconds of slack for the spans' edges."""
    lag_ns = since_ns - event.time_ns
    return -10 * 10**9 <= lag_ns <= bar.enter("software.lag_s") * 10**9


def cold_start(evidence: Evidence, bar: Bar) -> Finding:
    """R21, R22: the engine is starting, or so young that first requests pay for its warm-up."""
    engine = evidence.engine
    if engine is None:
        return no_data(Cause.COLD_START, line("no_engine"))
    since = evidence.at_ns - int(max(engine.down_s, 1.0) * 1e9)
    started = [
        event
        for event in evidence.events
        if event.kind in ("restart", "deploy") and event.time_ns >= since - 10**10 and _concerns(event, engine.name)
    ]
    starting = line("starting", "engine.starting", engine=engine.name, down_s=engine.down_s)
    slow_start = engine.starting and bar.reached("cold_start.starting_s", engine.down_s)
    if engine.starting and not started and not slow_start:
        return ruled_out(Cause.COLD_START, starting)  # it loads, as it should
    if slow_start or (bar.reached("scheduling.silent_s", engine.down_s) and started):
        return confirmed(
            Cause.COLD_START,
            Strength.STRONG,
            (
                line(
                    f"changed_{started[-1].kind}", "", text=started[-1].text or engine.name, minutes=engine.down_s / 60
                )
                if started
                else starting,
                line("not_answering", "engine.up", engine=engine.name, down_s=engine.down_s),
            ),
            summary("starting", engine=engine.name, down_s=engine.down_s),
            (fix("wait_warm", Cost.SOFTWARE_CHEAP), fix("faster_load", Cost.SOFTWARE_CHEAP)),
            since_ns=started[0].time_ns if started else since,
            alone=True,
        )
    return _young(evidence, engine, bar)


def _young(evidence: Evidence, engine: EngineEvidence, bar: Bar) -> Finding:
    uptime = engine.uptime_s
    if uptime is None:
        return no_data(Cause.COLD_START, line("no_uptime"))
    if uptime >= bar.enter("cold_start.uptime_s"):
        return ruled_out(Cause.COLD_START, line("warm", "engine.uptime_s", minutes=uptime / 60))
    effect = effect_of(evidence, bar)
    slow_first = bar.reached("memory_kv.harm_ratio", ratio(engine.ttft))
    seen = line("young", "engine.uptime_s", uptime_s=uptime)
    if not effect.slow or not slow_first or uptime > 60:
        return ruled_out(Cause.COLD_START, seen)
    return confirmed(
        Cause.COLD_START,
        Strength.FAIR,
        (seen, line("first_slow", "engine.ttft_p95_s", ttft_s=value(engine.ttft) or 0.0), pair_line(evidence)),
        summary("cold", engine=engine.name, uptime_s=uptime),
        (fix("wait_warm", Cost.SOFTWARE_CHEAP),),
        since_ns=evidence.at_ns - int(uptime * 1e9),
    )


def storage(evidence: Evidence, bar: Bar) -> Finding:
    """R25: I/O pressure beside a loss."""
    host = evidence.host
    if host is None or host.psi_io is None:
        return no_data(Cause.STORAGE, line("no_io"))
    seen = line("psi_io", host.psi_io.lane, now=host.psi_io.value)
    above = host.psi_io.usual is None or host.psi_io.value > 2 * host.psi_io.usual + 2
    if not bar.reached("storage.pressure_pct", host.psi_io.value) or not above or not effect_of(evidence, bar).slow:
        return ruled_out(Cause.STORAGE, seen)
    return confirmed(
        Cause.STORAGE,
        Strength.WEAK,
        (seen, pair_line(evidence)),
        summary("storage", now=host.psi_io.value),
        (fix("move_io", Cost.OPERATIONS_CHEAP),),
        since_ns=host.psi_io.since_ns,
        scope="node",
    )


def examine(evidence: Evidence, bar: Bar) -> list[Finding]:
    return [software(evidence, bar), cold_start(evidence, bar), storage(evidence, bar)]

"""Step 5: was something deployed, restarted, or is it still cold? Looked at last: a deploy is often near and seldom guilty."""

from __future__ import annotations

from rules.evidence import EngineEvidence, Evidence, ratio
from rules.finding import Effect, Finding, confirmed, effect_of, fix, line, no_data, pair_line, ruled_out, summary
from rules.priors import Strength
from rules.steps.requests import change_of, explained_share, is_queued
from rules.thresholds import Bar
from rules.verdict import Cause, Cost, Line
from rules.window import Event

DEPLOYS = ("deploy", "config")


def software(evidence: Evidence, bar: Bar) -> Finding:
    """R26: since a deploy or a configuration change each unit of work takes longer, or fewer sequences run at once; physics clean.

    A restart alone is the cold start's matter for its first minutes and a suspect after them.
    """
    if evidence.engine is None:
        return no_data(Cause.SOFTWARE, line("no_engine"))
    changes = _changes(evidence, bar)
    if not changes:
        return ruled_out(Cause.SOFTWARE, line("nothing_changed"))
    effect = effect_of(evidence, bar)
    fewer = _runs_fewer(evidence, effect, bar)
    slower = effect.slow_work and not bar.reached("request_mix.explained", explained_share(evidence))
    engine = evidence.engine
    since = evidence.output.since_ns
    if fewer and engine.waiting is not None:
        since = engine.waiting.since_ns or since
    guilty = None
    if (slower or fewer) and since is not None:
        guilty = next((event for event in reversed(changes) if _matches(event, since, bar)), None)
    if guilty is None:
        return ruled_out(
            Cause.SOFTWARE, _event_line(changes[-1], evidence), line("step_elsewhere" if effect.slow else "no_step")
        )
    follows = line("step_follows", "pair.output_pct", lag_s=max((since or 0) - guilty.time_ns, 0) / 1e9)
    return confirmed(
        Cause.SOFTWARE,
        Strength.FAIR if guilty.kind == "restart" else Strength.STRONG,
        (
            _event_line(guilty, evidence),
            follows,
            line(
                "fewer_run", "engine.requests_running", running=engine.running.value, usual=engine.running.usual or 0.0
            )
            if fewer and engine.running is not None
            else None,
            line(
                "work_slower",
                "engine.step_mean_s",
                slower_pct=100 * (1 / max(evidence.output.work_ratio or 1, 1e-3) - 1),
            )
            if slower
            else None,
            pair_line(evidence),
        ),
        summary(
            "software" if slower else "software_fewer",
            text=guilty.text or guilty.subject,
            loss_pct=effect.loss_pct or 0.0,
        ),
        (fix("roll_back", Cost.SOFTWARE_CHEAP),),
        since_ns=since,
    )


def _runs_fewer(evidence: Evidence, effect: Effect, bar: Bar) -> bool:
    """Requests wait, the KV pool has room, and fewer sequences than usual run: something limits the batch."""
    engine = evidence.engine
    if engine is None or not effect.slow_output or not is_queued(evidence, bar):
        return False
    roomy = engine.kv_used is not None and not bar.reached("memory_kv.kv_used_pct", engine.kv_used.value)
    return roomy and bar.reached("software.running_ratio", ratio(engine.running)) and not change_of(evidence, bar).any


def _event_line(event: Event, evidence: Evidence) -> Line:
    minutes = (evidence.at_ns - event.time_ns) / 60e9
    return line(f"changed_{event.kind}", "", text=event.text or event.subject, minutes=minutes)


def _changes(evidence: Evidence, bar: Bar) -> list[Event]:
    """Deploys and configuration changes of the last hour, and restarts whose warm-up is over."""
    recent = evidence.at_ns - int(bar.enter("software.event_s") * 1e9)
    warm = evidence.at_ns - int(bar.enter("cold_start.warm_s") * 1e9)
    name = evidence.engine.name if evidence.engine else ""
    return [
        event
        for event in evidence.events
        if _concerns(event, name)
        and (
            (event.kind in DEPLOYS and event.time_ns >= recent)
            or (event.kind == "restart" and recent <= event.time_ns <= warm)
        )
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
    """Started within the last minutes, unchanged, and slow since: kernels compile, caches fill."""
    uptime = engine.uptime_s
    if uptime is None:
        return no_data(Cause.COLD_START, line("no_uptime"))
    if uptime >= bar.enter("cold_start.warm_s"):
        return ruled_out(Cause.COLD_START, line("warm", "engine.uptime_s", minutes=uptime / 60))
    effect = effect_of(evidence, bar)
    seen = line("young", "engine.uptime_s", uptime_s=uptime)
    began = evidence.at_ns - int(uptime * 1e9)
    since = evidence.output.since_ns
    changed = any(
        event.kind in DEPLOYS and _concerns(event, engine.name) and abs(event.time_ns - began) <= 180 * 10**9
        for event in evidence.events
    )
    if not effect.slow_work or changed or (since is not None and since > began + bar.enter("software.lag_s") * 10**9):
        return ruled_out(Cause.COLD_START, seen)
    return confirmed(
        Cause.COLD_START,
        Strength.FAIR,
        (
            seen,
            line("first_slow", "engine.ttft_p95_s", ttft_s=engine.ttft.value) if engine.ttft is not None else None,
            pair_line(evidence),
        ),
        summary("cold", engine=engine.name, uptime_s=uptime, loss_pct=effect.loss_pct or 0.0),
        (fix("wait_warm", Cost.SOFTWARE_CHEAP),),
        since_ns=began,
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

"""Step 5: was something deployed, restarted, or is it still cold? Looked at last: a deploy is often near and seldom guilty."""

from __future__ import annotations

from collections.abc import Sequence

from rules.evidence import Evidence, Observation, ratio, value
from rules.finding import (
    Effect,
    Finding,
    Sign,
    confirmed,
    effect_of,
    fix,
    harmless,
    line,
    names_cause,
    no_data,
    pair_line,
    ruled_out,
    strongest,
    summary,
)
from rules.launch_line import REFUSED, SAID, findings
from rules.priors import Strength
from rules.steps.cold_start import DEPLOYS, begins_empty, cold_start, concerns
from rules.steps.memory import is_stalled
from rules.steps.requests import change_of, explained_share, is_queued
from rules.steps.storage import storage
from rules.thresholds import Bar
from rules.verdict import Cause, Cost, Line
from rules.window import Event


def software(evidence: Evidence, bar: Bar) -> Finding:
    """R26: since a deploy or a configuration change each unit of work takes longer, or fewer sequences run at once; physics clean.

    A restart alone is the cold start's matter for its first minutes and a suspect after them.
    """
    if evidence.engine is None:
        return no_data(Cause.SOFTWARE, line("no_engine"))
    own = _by_itself(evidence, bar)
    if own is not None:
        return own
    changes = _changes(evidence, bar)
    if not changes and evidence.told:
        return no_data(Cause.SOFTWARE, line("no_changes_told"))
    if not changes and not evidence.engine.versioned:
        return no_data(Cause.SOFTWARE, line("no_version"))
    if not changes:
        return ruled_out(Cause.SOFTWARE, line("nothing_changed"))
    effect = effect_of(evidence, bar)
    fewer = _runs_fewer(evidence, effect, bar)
    slower = effect.slow_work and not bar.reached("request_mix.explained", explained_share(evidence))
    engine = evidence.engine
    if evidence.told:
        return _told(evidence, effect, changes)
    since = evidence.output.since_ns
    if fewer and engine.waiting is not None:
        since = engine.waiting.since_ns or since
    guilty = None
    if (slower or fewer) and since is not None:
        guilty = next((event for event in reversed(changes) if _matches(event, since, bar)), None)
    if guilty is None:
        told = _event_line(changes[-1], evidence)
        after = line("step_elsewhere" if effect.slow else "no_step") if effect.known else None
        return harmless(Cause.SOFTWARE, effect, told, after)
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


def _told(evidence: Evidence, effect: Effect, changes: Sequence[Event]) -> Finding:
    """Somebody says that something changed shortly before; that it fits in time is taken as told."""
    seen = [_told_line(event) for event in changes]
    if not effect.hurts:
        return ruled_out(Cause.SOFTWARE, *seen, line("no_step"))
    restart_only = all(event.kind == "restart" for event in changes)
    return confirmed(
        Cause.SOFTWARE,
        Strength.FAIR if restart_only or not effect.slow else Strength.STRONG,
        (*seen, pair_line(evidence)),
        names_cause(Cause.SOFTWARE, effect),
        (fix("roll_back", Cost.SOFTWARE_CHEAP),),
    )


def _by_itself(evidence: Evidence, bar: Bar) -> Finding | None:
    """What is set up or built wrong shows in its own numbers, whether anything changed or not. R14, R24's opposite, R26 to R28."""
    engine, effect, group = evidence.engine, effect_of(evidence, bar), evidence.group
    if engine is None:
        return None
    signs: list[Sign] = []
    unspoilt = effect.hurts and not is_stalled(engine, bar)
    if unspoilt and bar.reached("software.acceptance", value(engine.acceptance)):
        signs.append(Sign(Strength.FAIR, line("acceptance", "engine.spec_accepted_total", pct=_pct(engine.acceptance))))
    if unspoilt and engine.prefix_lost and not change_of(evidence, bar).longer_prompts:
        signs.append(Sign(Strength.FAIR, line("prefix_fell", "engine.prefix_hits_total")))
    cold_cache = evidence.told and bar.reached(
        "software.no_hits_pct", 100 * hit if (hit := value(engine.prefix_hit)) is not None else None
    )
    if unspoilt and (engine.no_reuse or cold_cache) and not begins_empty(evidence, bar):
        signs.append(Sign(Strength.FAIR, line("no_reuse", "engine.prefix_hits_total")))
    useful = evidence.output.useful_ratio
    if useful is not None and _works_for_nothing(evidence, useful, bar):
        signs.append(Sign(Strength.FAIR, line("padding", "", pct=100 * useful)))
    each = engine.model_size / group.size if engine.model_size and group.size and group.size > 1 else None
    waits = bar.reached("software.split_util_pct", evidence.util_pct)
    if bar.reached("software.size_per_gpu", each) and (waits or (evidence.util_pct is None and effect.slow)):
        seen = line("oversplit", "", size=engine.model_size or 0.0, gpus=group.size or 0)
        signs.append(Sign(Strength.FAIR if waits else Strength.WEAK, seen))
    if _slow_kernels(evidence, effect, bar):
        signs.append(Sign(Strength.WEAK, line("slow_kernels", "gpu.power_w")))
    if evidence.persistence is False and effect.hurts:
        signs.append(Sign(Strength.WEAK, line("persistence_off", "")))
    alone = group.affected == "one"  # what is installed or set up wrong is so on its peers, too
    if engine.load is not None and engine.load.failed and not evidence.gpus and not alone:
        signs.append(Sign(Strength.FAIR, line("start_failed", "")))
    if engine.flat and effect.hurts and not _is_full(evidence, bar):
        signs.append(Sign(Strength.WEAK, line("flat", "engine.tokens_per_s")))
    signs += _launch(evidence)
    if not signs:
        return None
    changes = _changes(evidence, bar)
    return confirmed(
        Cause.SOFTWARE,
        Strength.STRONG if changes else strongest(signs),
        (*(sign.line for sign in signs), *(_event_line(event, evidence) for event in changes), pair_line(evidence)),
        names_cause(Cause.SOFTWARE, effect),
        (fix("check_setup", Cost.SOFTWARE_CHEAP), *((fix("roll_back", Cost.SOFTWARE_CHEAP),) if changes else ())),
        since_ns=evidence.output.since_ns,
    )


def _launch(evidence: Evidence) -> list[Sign]:
    """What the launch line holds that its server refuses; what only misleads is told beside it."""
    found = findings(evidence.tells.launch) if evidence.tells is not None and evidence.tells.launch else []
    if not any(key in REFUSED or key == "eager" for key, _ in found):
        return []
    return [
        Sign(Strength.STRONG if key in REFUSED else Strength.WEAK, line(SAID[key], "engine.config_hash", flag=flag))
        for key, flag in found
    ]


def _pct(seen: Observation | None) -> float:
    return 100 * (value(seen) or 0.0)


def _works_for_nothing(evidence: Evidence, useful: float, bar: Bar) -> bool:
    """More is spent, by util or by power, and no more comes out of it."""
    spent = [share for gpu in evidence.gpus if (share := ratio(gpu.power)) is not None]
    return bar.reached("software.useful_ratio", useful) or bar.reached(
        "software.useless_ratio", max(spent, default=0.0) / max(useful, 1e-3)
    )


def _slow_kernels(evidence: Evidence, effect: Effect, bar: Bar) -> bool:
    """Busy at the usual clock, and the power is far below usual while the work is slow: the kernels don't use the card."""
    if not effect.slow_work or not evidence.told:
        return False
    return any(
        bar.reached("gpu_fault.stuck_util_pct", value(gpu.util))
        and bar.reached("software.idle_power_ratio", ratio(gpu.power))
        and (ratio(gpu.sm_clock) or 0.0) > bar.line("power.clock_ratio")
        for gpu in evidence.gpus
    )


def _is_full(evidence: Evidence, bar: Bar) -> bool:
    engine = evidence.engine
    return engine is not None and bar.reached("memory_kv.kv_used_pct", value(engine.kv_used))


def _runs_fewer(evidence: Evidence, effect: Effect, bar: Bar) -> bool:
    """Requests wait, the KV pool has room, and fewer sequences than usual run: something limits the batch."""
    engine = evidence.engine
    if engine is None or not effect.slow_output or not is_queued(evidence, bar):
        return False
    roomy = engine.kv_used is not None and not bar.reached("memory_kv.kv_used_pct", engine.kv_used.value)
    return roomy and bar.reached("software.running_ratio", ratio(engine.running)) and not change_of(evidence, bar).any


def _told_line(event: Event) -> Line:
    return line(f"told_{event.kind}_named", "", text=event.text) if event.text else line(f"told_{event.kind}")


def _event_line(event: Event, evidence: Evidence) -> Line:
    if evidence.told:
        return _told_line(event)
    minutes = (evidence.at_ns - event.time_ns) / 60e9
    return line(f"changed_{event.kind}", "", text=event.text or event.subject, minutes=minutes)


def _changes(evidence: Evidence, bar: Bar) -> list[Event]:
    """Deploys and configuration changes of the last hour, and restarts whose warm-up is over."""
    recent = evidence.at_ns - int(bar.enter("software.event_s") * 1e9)
    warm = evidence.at_ns - int(bar.enter("cold_start.warm_s") * 1e9)
    name = evidence.engine.name if evidence.engine else ""
    if evidence.told:
        kinds = (*DEPLOYS, "driver") if begins_empty(evidence, bar) else (*DEPLOYS, "driver", "restart")
        return [event for event in evidence.events if event.kind in kinds]
    return [
        event
        for event in evidence.events
        if concerns(event, name)
        and (
            (event.kind in DEPLOYS and event.time_ns >= recent)
            or (event.kind == "restart" and recent <= event.time_ns <= warm)
        )
    ]


def _matches(event: Event, since_ns: int, bar: Bar) -> bool:
    """The slow stretch begins at the event or within the lag after it; ten seconds of slack for the spans' edges."""
    lag_ns = since_ns - event.time_ns
    return -10 * 10**9 <= lag_ns <= bar.enter("software.lag_s") * 10**9


def examine(evidence: Evidence, bar: Bar) -> list[Finding]:
    return [software(evidence, bar), cold_start(evidence, bar), storage(evidence, bar)]

"""Engine findings: what `pairscope doctor` says of one engine: whether it answers, whose GPUs it has, and whether it gives a token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agent.collectors.engine_probe import Probed
from agent.collectors.interface import Finding
from agent.engine_gpus import EngineGpus
from agent.engine_status import EngineStatus
from telemetry.messages import say


@dataclass(frozen=True, slots=True)
class Examination:
    """What the readings so far have shown of one engine. `gpus` is what its samples say, `driver_says` what would be said without
    the configuration; `pid` the root of its processes; `has_gpus` whether this host has any.
    """

    status: EngineStatus
    kind: str
    model: str
    gpus: EngineGpus | None = None
    driver_says: EngineGpus | None = None
    pid: int | None = None
    has_gpus: bool = False
    probed: Probed | None = None


def findings(seen: Examination, language: str) -> list[Finding]:
    """One for how it answers; then of its GPUs and of its probe, as far as there is something to say."""
    return [*_answers(seen, language), *_gpus(seen, language), *_probe(seen, language)]


def _answers(seen: Examination, language: str) -> Iterator[Finding]:
    status, source = seen.status, f"engine {seen.status.name}"
    if status.state in ("loading", "starting", "restarting"):
        progress = "" if status.progress is None else f"{100 * status.progress:.0f} %"
        stage = " ".join(part for part in (status.stage, progress) if part)
        key = "loading_stage" if stage else "loading"
        remedy = say("agent.examined.loading_remedy", language)
        yield Finding(source, "warning", say(f"agent.examined.{key}", language, url=status.url, stage=stage), remedy)
    elif status.state == "down":
        problem = status.problem or say("agent.state.down", language)
        yield Finding(source, "error", say("agent.examined.problem", language, url=status.url, problem=problem))
    elif status.problem:
        yield Finding(
            source, "warning", say("agent.examined.problem", language, url=status.url, problem=status.problem)
        )
    else:
        names = {"url": status.url, "kind": seen.kind or "?", "model": seen.model or "?"}
        yield Finding(source, "ok", say("agent.examined.answers", language, **names))


def _gpus(seen: Examination, language: str) -> Iterator[Finding]:
    source, gpus, others = f"engine {seen.status.name}", seen.gpus, seen.driver_says
    if gpus is not None:
        how = say(f"agent.examined.by_{gpus.mapping}", language)
        values = {"gpus": gpus.tag, "how": how, "confidence": gpus.confidence}
        if gpus.mapping == "manual" and others is not None and others.indices != gpus.indices:
            how = say(f"agent.examined.by_{others.mapping}", language)
            text = say("agent.examined.contradicted", language, gpus=gpus.tag, others=others.tag, how=how)
            yield Finding(source, "warning", text, say("agent.examined.contradicted_remedy", language))
        else:
            yield Finding(source, "ok", say("agent.examined.gpus", language, **values))
    elif seen.has_gpus and seen.status.state == "ready":
        key = "no_process" if seen.pid is None else "no_gpus"
        text = say(f"agent.examined.{key}", language, pid=seen.pid)
        yield Finding(source, "warning", text, say(f"agent.examined.{key}_remedy", language))


def _probe(seen: Examination, language: str) -> Iterator[Finding]:
    source, probed = f"engine {seen.status.name}", seen.probed
    if probed is None:
        return
    if not probed.trouble:
        yield Finding(source, "ok", say("agent.examined.probed", language, seconds=probed.seconds))
        return
    text = say(f"agent.engine.probe_{probed.trouble}", language, detail=probed.detail)
    if text != seen.status.problem:  # else it is said already
        yield Finding(source, "warning", text)

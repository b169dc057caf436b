"""Examination: every question about this host, asked while the collectors take their first readings."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.collectors.interface import Finding
from agent.doctor import container, devices, installed, kernel_log, running, secret_files, service, state_folder, store
from agent.settings import AgentSettings
from agent.sweep import sweep
from telemetry.messages import say


@dataclass(frozen=True, slots=True)
class Patient:
    """What is examined: the agent's settings, and the files that hold its secrets (and its configuration)."""

    settings: AgentSettings
    secret_files: Sequence[Path] = ()

    @property
    def language(self) -> str:
        return self.settings.language


QUESTIONS: Mapping[str, Callable[[Patient], Sequence[Finding]]] = {
    # one line a question, in the order in which they are printed; the names are the sources of their findings
    "install": lambda patient: installed.findings(patient.language),
    "state": lambda patient: state_folder.findings(patient.settings.state_dir, patient.language),
    "secrets": lambda patient: secret_files.findings(patient.secret_files, patient.language),
    "store": lambda patient: store.findings(patient.settings.store_url, patient.language),
    "agent": lambda patient: running.findings(patient.settings),
    "service": lambda patient: service.findings(patient.language),
    "container": lambda patient: container.findings(patient.language),
    "devices": lambda patient: devices.findings(patient.language),
    "kernel_log": lambda patient: kernel_log.findings(patient.language),
}


def examine(
    patient: Patient, *, wait_s: float, progress: Callable[[Sequence[str]], None] = lambda _: None
) -> list[Finding]:
    """All findings: the host's own, then each source's. Takes `wait_s` at most, and a second reading at least."""
    answers = {name: _Answer(name, question, patient) for name, question in QUESTIONS.items()}
    sources = sweep(running.without_paused(patient.settings), wait_s=wait_s, progress=progress).findings
    own = [finding for answer in answers.values() for finding in answer.wait(wait_s)]
    return [*own, *_without_unstarted(sources, patient.settings)]


def _without_unstarted(findings: Sequence[Finding], settings: AgentSettings) -> list[Finding]:
    """While no agent runs, an engine that the agent would host is not amiss: it is only not started."""
    hosted = {f"engine {engine.name}" for engine in settings.engines if engine.command}
    if not hosted or running.ask_health(settings) is not None:
        return list(findings)
    text = say("doctor.agent.would_host", settings.language)
    remedy = say("doctor.agent.start_remedy", settings.language)
    return [
        Finding(finding.source, "absent", text, remedy)
        if finding.source in hosted and finding.level == "error"
        else finding
        for finding in findings
    ]


class _Answer:
    """One question, asked on a thread of its own: a store or a file system that hangs costs its own answer only."""

    def __init__(self, name: str, question: Callable[[Patient], Sequence[Finding]], patient: Patient) -> None:
        self._name = name
        self._language = patient.language
        self._findings: Sequence[Finding] | None = None
        self._thread = threading.Thread(target=self._ask, args=(question, patient), name=name, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> Sequence[Finding]:
        self._thread.join(timeout_s)
        if self._findings is None:
            return [Finding(self._name, "warning", say("doctor.source.late", self._language, wait_s=timeout_s))]
        return self._findings

    def _ask(self, question: Callable[[Patient], Sequence[Finding]], patient: Patient) -> None:
        try:
            self._findings = question(patient)
        except Exception as error:  # one question that can't be answered must not hide the others
            text = say("doctor.source.silent", self._language, reason=f"{type(error).__name__}: {error}")
            self._findings = [Finding(self._name, "error", text)]


def worst(findings: Sequence[Finding]) -> str:
    """The worst level: ok (absent counts as ok), warning or error."""
    levels = {finding.level for finding in findings}
    return next((level for level in ("error", "warning") if level in levels), "ok")

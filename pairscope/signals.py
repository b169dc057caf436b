"""Judging what somebody tells of an incident: a file of keyed signals, judged by the rules, printed for a person or as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from pairscope.judge import print_diagnoses
from rules.service import TriageSettings
from rules.signals import judge_signals, read_signals
from rules.signals.reading import near
from rules.verdict import verdict_json
from telemetry.messages import say

MOST_WARNINGS = 20


def tell_signals(path: Path, settings: TriageSettings, *, as_json: bool) -> int:
    """Print the judgement of every incident of the file; 1 if anything is wrong, else 0. SignalsError if it can't be read."""
    language = settings.language
    told, many = read_signals(path, language)
    warned = [signals for signals in told if signals.unknown]
    for signals in warned[:MOST_WARNINGS]:
        where = say("rules.signals.of", language, name=signals.name) if many else ""
        keys = ", ".join(_with_guess(key, language) for key in signals.unknown[:10])
        keys += f" ... ({len(signals.unknown)})" if len(signals.unknown) > 10 else ""
        warning = say("rules.signals.unknown", language, where=where, keys=keys)
        Console(stderr=True, soft_wrap=True).print(warning, style="yellow", markup=False, emoji=False, highlight=False)
    diagnoses = [judge_signals(signals, settings.priors) for signals in told]
    if as_json:
        verdicts = [verdict_json(diagnosis, language) for diagnosis in diagnoses]
        print(json.dumps(verdicts if many else verdicts[0], ensure_ascii=False, indent=1))
    else:
        print_diagnoses(diagnoses, Console(highlight=False), language, whole=True, as_given=True)
    return 1 if any(diagnosis.verdicts for diagnosis in diagnoses) else 0


def _with_guess(key: str, language: str) -> str:
    guess = near(key)
    return key if guess is None else say("rules.signals.meant", language, signal=key, near=guess)

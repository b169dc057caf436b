"""One incident that somebody tells of, as a JSON object of keyed signals: read, turned into evidence, and judged by the same rules."""

from __future__ import annotations

from rules.signals.judging import judge_signals
from rules.signals.reading import Signals, SignalsError, read_signals

__all__ = ["Signals", "SignalsError", "judge_signals", "read_signals"]

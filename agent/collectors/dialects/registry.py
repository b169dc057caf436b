"""Registry: every kind of engine that is known, one line each, and which of them an exposition is."""

from __future__ import annotations

from agent.collectors.dialects.dialect import Dialect
from agent.collectors.dialects.pairscope import PAIRSCOPE
from agent.collectors.dialects.vllm import VLLM
from agent.exposition import Exposition

DIALECTS: tuple[Dialect, ...] = (
    PAIRSCOPE,
    VLLM,
)
"""In the order in which they are tried on an unknown endpoint."""


def detect(exposition: Exposition, kind: str = "auto") -> Dialect | None:
    """The dialect that the exposition is in; with a given kind, that one or none."""
    return next((d for d in DIALECTS if kind in ("auto", d.kind) and d.speaks(exposition)), None)

"""Ollama: it has no metrics. Which model is resident and its version are all that can be had without standing in between."""

from __future__ import annotations

from agent.collectors.dialects.dialect import Get, Told, text

PATH = "/api/version"
"""Asked in place of metrics, which would be a 404 in its log at every tick."""


def ask(get: Get) -> Told | None:
    """What it tells; None where it is no Ollama."""
    resident = get("/api/ps")
    models = resident.get("models") if isinstance(resident, dict) else None
    if not isinstance(models, list):
        return None
    return Told(text(get(PATH), "version"), text(models[0] if models else None, "model", "name"))

"""What is installed: Python, PairScope, and which of its parts."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import psutil

from agent.collectors.interface import Finding
from telemetry.messages import say

EXTRAS: Mapping[str, Sequence[str]] = {
    "engine": ("torch", "tokenizers", "safetensors", "gguf"),
    "dashboard": ("dash", "plotly", "dash_ag_grid", "dash_mantine_components"),
}


def findings(language: str) -> Sequence[Finding]:
    try:
        own = version("pairscope")
    except PackageNotFoundError:  # run from a checkout
        own = "-"
    text = say(
        "doctor.install.versions", language, own=own, python=platform.python_version(), psutil=psutil.__version__
    )
    return [Finding("install", "ok", text), *(_extra(name, modules, language) for name, modules in EXTRAS.items())]


def _extra(name: str, modules: Sequence[str], language: str) -> Finding:
    missing = [module for module in modules if find_spec(module) is None]
    if not missing:
        return Finding("install", "ok", say("doctor.install.extra", language, extra=name))
    remedy = say("doctor.install.extra_remedy", language, extra=name)
    if len(missing) == len(modules):
        return Finding("install", "absent", say("doctor.install.no_extra", language, extra=name), remedy)
    text = say("doctor.install.part_of_extra", language, extra=name, missing=", ".join(missing))
    return Finding("install", "warning", text, remedy)

"""Every sentence that a rule can say exists, and takes the numbers that the rule gives it."""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from rules.verdict import Cause, Cost, Status, Step
from telemetry.messages import catalogue, say

RULES = Path(__file__).parents[2] / "rules"
TABLES = {"line": "evidence", "summary": "summary", "fix": "fix"}


def calls() -> Iterator[tuple[str, str, set[str] | None]]:
    """(file:line, key, names of the values or None when they are not all spelled out) for each literal key."""
    for path in RULES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TABLES and node.args
            ):
                continue
            names = {keyword.arg for keyword in node.keywords}
            spelled = None if None in names else {name for name in names if name is not None}
            for key in literal_keys(node.args[0]):
                yield f"{path.name}:{node.lineno}", f"rules.{TABLES[node.func.id]}.{key}", spelled


def literal_keys(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.IfExp):
        return literal_keys(node.body) + literal_keys(node.orelse)
    return []


def placeholders(sentence: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(sentence) if name}


def test_every_sentence_that_is_said_exists_and_is_given_its_numbers() -> None:
    found = list(calls())
    assert len(found) > 100
    for place, key, names in found:
        assert key in catalogue(), f"{place} says {key}"
        if names is not None:
            assert placeholders(catalogue()[key]["en"]) <= names, f"{place}: {key}"


def test_sentences_of_varying_keys_exist() -> None:
    varying = [f"evidence.changed_{kind}" for kind in ("deploy", "config", "restart")]
    varying += [f"evidence.pair_{effort}" for effort in ("gpu", "cpu")] + ["evidence.xid", "evidence.gpu_lost"]
    varying += [f"evidence.cap_{name}" for name in ("usual", "requested", "default")]
    varying += [
        f"evidence.{name}{end}" for name in ("prompt_len", "prompt_share", "output_len") for end in ("", "_usual")
    ]
    varying += [f"summary.{kind}_{effort}" for kind in ("healthy", "node_ok") for effort in ("gpu", "cpu")]
    varying += [f"cause.{cause}" for cause in Cause] + [f"step.{step}" for step in Step]
    varying += [f"status.{status}" for status in Status] + [f"cost.{cost}" for cost in Cost]
    varying += [f"scope.{scope}" for scope in ("gpu", "engine", "node", "rack", "circuit", "cluster")]
    varying += [f"baseline.{name}" for name in ("history", "peers", "warming")]
    for key in varying:
        assert f"rules.{key}" in catalogue(), key


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_sentence_of_the_rules_can_be_said(language: str) -> None:
    sample = {"text": "a -> b", "cause": "power", "engine": "e", "gpu": "0", "gpus": "0, 1", "state": "lost"}
    sample |= {"subject": "3", "effort": "GPU-Util", "place": "n1", "summary": "s", "when": "t", "scope": "node"}
    for key in catalogue():
        if key.startswith("rules."):
            names = placeholders(catalogue()[key]["en"])
            assert say(key, language, **{name: sample.get(name, 3.0) for name in names})

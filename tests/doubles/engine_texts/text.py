"""Text: how families, labels and histograms of an engine's double are written."""

from __future__ import annotations

from collections.abc import Mapping

MODEL = "org/Tiny-1B"


def labels(own: Mapping[str, object]) -> str:
    """In braces, or nothing."""
    return "{" + ",".join(f'{name}="{value}"' for name, value in own.items()) + "}" if own else ""


def lines(values: Mapping[str, object], own: str = "") -> str:
    return "".join(f"{name}{own} {value}\n" for name, value in values.items())


def histogram(name: str, labels: str, buckets: Mapping[str, float], total: float) -> str:
    """`buckets` is upper bound -> cumulative count, with +Inf."""
    lines = [f"# TYPE {name} histogram"]
    lines += [f'{name}_bucket{{{labels},le="{bound}"}} {count}' for bound, count in buckets.items()]
    lines += [f"{name}_sum{{{labels}}} {total}", f"{name}_count{{{labels}}} {buckets['+Inf']}"]
    return "\n".join(lines) + "\n"

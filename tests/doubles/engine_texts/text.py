"""Text: how families, labels and histograms of an engine's double are written."""

from __future__ import annotations

from collections.abc import Mapping

MODEL = "org/Tiny-1B"


def labelled(own: Mapping[str, object]) -> str:
    """The pairs as they stand between braces."""
    return ",".join(f'{name}="{value}"' for name, value in own.items())


def lines(values: Mapping[str, object], labels: str = "") -> str:
    """One line a value; a key may bring labels of its own: `name{reason="stop"}`."""
    made = []
    for key, value in values.items():
        name, _, own = key.partition("{")
        both = ",".join(part for part in (labels, own.removesuffix("}")) if part)
        made.append(f"# TYPE {name} untyped\n{name}{{{both}}} {value}\n" if both else f"{name} {value}\n")
    return "".join(made)


def histogram(name: str, labels: str, buckets: Mapping[str, float], total: float) -> str:
    """`buckets` is upper bound -> cumulative count, with +Inf."""
    comma = "," if labels else ""
    made = [f"# TYPE {name} histogram"]
    made += [f'{name}_bucket{{{labels}{comma}le="{bound}"}} {count}' for bound, count in buckets.items()]
    made += [f"{name}_sum{{{labels}}} {total}", f"{name}_count{{{labels}}} {buckets['+Inf']}"]
    return "\n".join(made) + "\n"


def timed(name: str, labels: str, bounds: tuple[float, float], count: float, total: float) -> str:
    """A histogram whose observations all lie between two bounds."""
    return histogram(name, labels, {str(bounds[0]): 0.0, str(bounds[1]): count, "+Inf": count}, total)

"""Prior weights of the causes by preset, and what a piece of evidence is worth: read from `priors.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files

from rules.verdict import Cause, Step

STEP_OF: Mapping[Cause, Step] = {
    Cause.TELEMETRY: Step.VALIDITY,
    Cause.DEMAND: Step.VALIDITY,
    Cause.THERMAL: Step.PHYSICAL,
    Cause.POWER: Step.PHYSICAL,
    Cause.GPU_FAULT: Step.PHYSICAL,
    Cause.PCIE_LINK: Step.PHYSICAL,
    Cause.MEMORY_KV: Step.MEMORY,
    Cause.REQUEST_MIX: Step.REQUESTS,
    Cause.SCHEDULING: Step.SCHEDULING,
    Cause.HOST_CPU: Step.SCHEDULING,
    Cause.CONTENTION: Step.SCHEDULING,
    Cause.NETWORK: Step.SCHEDULING,
    Cause.SOFTWARE: Step.SOFTWARE,
    Cause.COLD_START: Step.SOFTWARE,
    Cause.STORAGE: Step.SOFTWARE,
}
"""The fixed walk: which step looks at which cause. Within a step, the order here breaks ties."""


class Strength(StrEnum):
    PROOF = "proof"
    STRONG = "strong"
    FAIR = "fair"
    WEAK = "weak"


@dataclass(frozen=True, slots=True)
class Priors:
    """`weight` of each cause (any scale), `likelihood` ratio of each strength, and the weight of an unlisted cause."""

    weight: Mapping[Cause, float]
    likelihood: Mapping[Strength, float]
    unknown: float

    def of_step(self, step: Step) -> float:
        """The share of a step among all causes, 0..1."""
        total = sum(self.weight.values())
        return sum(self.weight[cause] for cause, at in STEP_OF.items() if at is step) / total


@cache
def priors(preset: str = "evidence") -> Priors:
    """The preset's priors. ValueError names an unknown preset or a cause without a weight."""
    tables = tomllib.loads(files("rules").joinpath("priors.toml").read_text("utf-8"))
    likelihood = tables.pop("likelihood")
    if preset not in tables:
        raise ValueError(f"priors preset {preset!r} is unknown; use one of {', '.join(tables)}")
    missing = [str(cause) for cause in STEP_OF if cause not in tables[preset]]
    if missing:
        raise ValueError(f"priors.toml: preset {preset!r} has no weight for {', '.join(missing)}")
    return Priors(
        {cause: float(tables[preset][cause]) for cause in STEP_OF},
        {strength: float(likelihood[strength]) for strength in Strength},
        float(likelihood["unknown"]),
    )

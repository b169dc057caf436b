"""Settings of the report: what a GPU hour costs. Without a price no money is told."""

from __future__ import annotations

import math
from dataclasses import dataclass

from telemetry.lineprotocol import printable
from telemetry.messages import say

LONGEST_CURRENCY = 12


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """`price_per_gpu_hour` is in `currency`, which is only a text. ValueError for a price below zero or a text that can't be shown."""

    price_per_gpu_hour: float | None = None
    currency: str = ""
    language: str = "en"

    def __post_init__(self) -> None:
        price = self.price_per_gpu_hour
        if price is not None and not (math.isfinite(price) and 0 <= price <= 1e9):
            raise ValueError(say("report.mistake.price", self.language, value=price))
        if len(self.currency) > LONGEST_CURRENCY or printable(self.currency) != self.currency:
            raise ValueError(say("report.mistake.currency", self.language, most=LONGEST_CURRENCY))

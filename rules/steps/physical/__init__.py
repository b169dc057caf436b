"""Step 1: does the hardware do less per unit of work? Heat, power, faults and clock state, link: one file each.

A throttle bit or a temperature is one side of a pair: without a loss beside it, it is written down and ruled out.
"""

from __future__ import annotations

from rules.evidence import Evidence
from rules.finding import Finding
from rules.steps.physical.fault import gpu_fault
from rules.steps.physical.heat import thermal
from rules.steps.physical.link import pcie_link
from rules.steps.physical.power import power
from rules.thresholds import Bar


def examine(evidence: Evidence, bar: Bar) -> list[Finding]:
    return [thermal(evidence, bar), power(evidence, bar), gpu_fault(evidence, bar), pcie_link(evidence, bar)]

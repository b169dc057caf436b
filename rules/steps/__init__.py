"""The doctor's checklist, in its fixed order, hardware to software: one file a step, one function a rule.

To add a rule: one function in its step's file, one entry in that step's `examine`. A step reads `Evidence` only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rules.evidence import Evidence
from rules.finding import Finding
from rules.steps import memory, physical, requests, scheduling, software, validity
from rules.thresholds import Bar
from rules.verdict import Step

WALK: Mapping[Step, Callable[[Evidence, Bar], list[Finding]]] = {
    Step.VALIDITY: validity.examine,
    Step.PHYSICAL: physical.examine,
    Step.MEMORY: memory.examine,
    Step.REQUESTS: requests.examine,
    Step.SCHEDULING: scheduling.examine,
    Step.SOFTWARE: software.examine,
}

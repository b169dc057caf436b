"""Settings of the simulated fleet, checked as they are made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agent.simulator.faults import FAULTS
from agent.simulator.sku import SKUS
from telemetry.messages import say


class SimulatorError(ValueError):
    """What was asked for can't be simulated; one line that names the setting and what it may be."""


@dataclass(frozen=True, slots=True)
class SimulatorSettings:
    """A simulated fleet. Times in seconds. SimulatorError for a value that makes no sense.

    The first `history_s` are healthy past; the fault strikes `fault_after_s` after them.
    """

    store_url: str = ""
    state_dir: Path = Path("pairscope-state")
    nodes: int = 4
    gpus_per_node: int = 8
    group: int = 2  # GPUs of one engine (tensor parallel)
    nodes_per_rack: int = 4
    sku: str = "h100-sxm"
    load: float = 0.83  # of the engines' capacity, at the busiest hour
    fault: str | None = None
    fault_after_s: float = 120.0
    fault_node: str | None = None  # None: the second node, or the only one
    fault_gpu: int | None = None  # of the node, by index; None: the second, or the only one
    null_twin: bool = False  # the fault's harmless look-alike instead
    seed: int = 1
    history_s: float = 1800.0
    interval_s: float = 1.0
    language: str = "en"

    def __post_init__(self) -> None:
        whole = ("nodes", "gpus_per_node", "group", "nodes_per_rack")
        for name, value in ((name, getattr(self, name)) for name in whole):
            if value < 1:
                self._refuse("at_least", name=name, least=1, value=value)
        if self.gpus_per_node % self.group:
            self._refuse("group", gpus=self.gpus_per_node, group=self.group)
        if self.sku not in SKUS:
            self._refuse("sku", name=self.sku, known=", ".join(sorted(SKUS)))
        if self.fault is not None and self.fault not in FAULTS:
            self._refuse("fault", name=self.fault, known=", ".join(FAULTS))
        if self.fault_node is not None and self.fault_node not in self.node_names:
            self._refuse("node", name=self.fault_node, first=self.node_names[0], last=self.node_names[-1])
        if self.fault_gpu is not None and not 0 <= self.fault_gpu < self.gpus_per_node:
            self._refuse("gpu", value=self.fault_gpu, last=self.gpus_per_node - 1)
        if not 0 < self.load <= 2:
            self._refuse("load", value=self.load)
        for name, seconds in {"history_s": self.history_s, "fault_after_s": self.fault_after_s}.items():
            if not seconds >= 0:
                self._refuse("at_least", name=name, least=0, value=seconds)
        if not 0.1 <= self.interval_s <= 60:
            self._refuse("interval", value=self.interval_s)

    def _refuse(self, key: str, **values: object) -> None:
        raise SimulatorError(say(f"simulator.mistake.{key}", self.language, **values))

    @property
    def node_names(self) -> list[str]:
        return [f"sim-n{i + 1:02d}" for i in range(self.nodes)]

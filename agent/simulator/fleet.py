"""The simulated fleet: nodes in racks on circuits, their shared air, the faults that strike them, and the truth about those."""

from __future__ import annotations

import math
from dataclasses import dataclass

from agent.simulator import faults
from agent.simulator.conditions import healthy
from agent.simulator.cooling import SUPPLY_C
from agent.simulator.faults.fault import Fault, Target
from agent.simulator.node import SLICE_S, Node
from agent.simulator.roofline import CHAT_34B
from agent.simulator.settings import SimulatorError, SimulatorSettings
from agent.simulator.sku import SKUS
from agent.simulator.trace import Trace
from telemetry.catalogue import SIMULATED
from telemetry.messages import say
from telemetry.sample import Sample

NODES_PER_CIRCUIT = 2
CIRCUIT_RATING_A = 40.0  # three-phase, 415 V
LINE_V = 415.0
POWER_FACTOR = 0.98
STRIDE_S = 1.0  # the shared air and the faults are looked at this often
SETTLE_S = 60.0  # simulated before the first sample
SLOW_EVERY_S = 5.0  # supplies, air, circuits


@dataclass(frozen=True, slots=True)
class Truth:
    """What was done to the fleet, for scoring: the cause that a verdict must name, where, and from when on."""

    fault: str
    cause: str  # as in rules.verdict.Cause; "none" for a null twin
    scope: str
    subject: dict[str, str]
    since_ns: int
    null_twin: bool


@dataclass(slots=True)
class _Planned:
    fault: Fault
    nodes: list[Node]  # all that it strikes; the named one comes first
    target: Target
    at_s: float
    null_twin: bool
    told: int = 0  # events already sent


class Fleet:
    """`step` moves the fleet on and answers with the samples of the moment it arrives at.

    Its time starts at `start_ns` with boards already warm and batches full. With a `trace` its requests come, else drawn ones.
    Everything moves on in slices of `slice_s`; longer ones are faster, and too long for a clock that heat or a cap steps down.
    """

    def __init__(
        self,
        settings: SimulatorSettings,
        start_ns: int = 1_767_225_600_000_000_000,
        trace: Trace | None = None,
        slice_s: float = SLICE_S,
    ) -> None:
        self.settings = settings
        self.start_ns = start_ns
        self.elapsed_s = -SETTLE_S
        sku = SKUS[settings.sku]
        self.nodes = [
            Node(
                name=name,
                rack=f"sim-r{i // settings.nodes_per_rack + 1}",
                circuit=f"sim-c{i // NODES_PER_CIRCUIT + 1}",
                gpus=settings.gpus_per_node,
                group=settings.group,
                sku=sku,
                served=CHAT_34B,
                load=settings.load,
                seed=str(settings.seed),
                trace=trace,
                slice_s=slice_s,
            )
            for i, name in enumerate(settings.node_names)
        ]
        self.racks: dict[str, list[Node]] = {}
        self.circuits: dict[str, list[Node]] = {}
        for node in self.nodes:
            self.racks.setdefault(node.rack, []).append(node)
            self.circuits.setdefault(node.circuit, []).append(node)
        self._planned: list[_Planned] = []
        self._slow_due_s = 0.0
        if settings.fault is not None:
            at_s = settings.history_s + settings.fault_after_s
            self.plan(settings.fault, settings.fault_node, at_s=at_s, null_twin=settings.null_twin)
        while self.elapsed_s < 0:
            self._stride(min(STRIDE_S, -self.elapsed_s))
        for node in self.nodes:
            node.fast(0.0, start_ns)  # what was counted so far belongs to no sample

    @property
    def time_ns(self) -> int:
        return self.start_ns + round(self.elapsed_s * 1e9)

    def plan(self, name: str, node: str | None = None, *, at_s: float | None = None, null_twin: bool = False) -> Truth:
        """Let a fault strike `node` at `at_s` of the fleet's time (now if None). SimulatorError for an unknown name or node."""
        fault = faults.FAULTS.get(name)
        if fault is None:
            known = ", ".join(faults.FAULTS)
            raise SimulatorError(say("simulator.mistake.fault", self.settings.language, name=name, known=known))
        names = {member.name: member for member in self.nodes}
        if node is None:
            node = self.nodes[min(1, len(self.nodes) - 1)].name
        if node not in names:
            first, last = self.nodes[0].name, self.nodes[-1].name
            raise SimulatorError(
                say("simulator.mistake.node", self.settings.language, name=node, first=first, last=last)
            )
        member = names[node]
        chosen = self.settings.fault_gpu
        gpu = min(1, len(member.gpus) - 1) if chosen is None else chosen
        target = Target(gpu=gpu, engine=gpu // member.group, engines=len(member.engines), gpus=len(member.gpus))
        struck = {
            "rack": self.racks[member.rack],
            "circuit": self.circuits[member.circuit],
            "cluster": self.nodes,
        }.get(fault.scope, [member])
        struck = sorted(struck, key=lambda other: other is not member)
        planned = _Planned(fault, struck, target, self.elapsed_s if at_s is None else at_s, null_twin)
        self._planned.append(planned)
        return self._truth(planned)

    @property
    def truth(self) -> list[Truth]:
        """Of every fault that is planned, whether it has struck by now or not."""
        return [self._truth(planned) for planned in self._planned]

    def _truth(self, planned: _Planned) -> Truth:
        fault, node, target = planned.fault, planned.nodes[0], planned.target
        subject = {"node": node.name}
        if fault.scope in ("rack", "circuit", "cluster"):
            subject = {fault.scope: node.tags[fault.scope]}
        if fault.scope in ("engine", "gpu"):
            subject["engine"] = node.engines[target.engine].name
        if fault.scope == "gpu":
            subject["gpu"] = str(target.gpu)
        cause = "none" if planned.null_twin else fault.cause
        since_ns = self.start_ns + round(planned.at_s * 1e9)
        return Truth(fault.name, cause, fault.scope, subject, since_ns, planned.null_twin)

    def step(self, seconds: float) -> list[Sample]:
        """Move on by `seconds` (> 0) and give the samples of that moment, all with one time, and of events on the way."""
        if not seconds > 0:
            raise SimulatorError(f"a step must be longer than 0 s, not {seconds!r}")
        found: list[Sample] = []
        strides = max(1, math.ceil(seconds / STRIDE_S - 1e-9))
        for _ in range(strides):
            found += self._stride(seconds / strides)
        time_ns = self.time_ns
        for node in self.nodes:
            sent = node.fast(self.elapsed_s, time_ns)
            found += [] if node.wrong.silent else sent
        if self.elapsed_s >= self._slow_due_s - 1e-6:
            self._slow_due_s = self.elapsed_s + SLOW_EVERY_S
            heard = [node for node in self.nodes if not node.wrong.silent]
            for node in heard:
                found += node.slow(time_ns)
            found += [self._circuit(name, nodes, time_ns) for name, nodes in self.circuits.items() if nodes[0] in heard]
        return found

    def _stride(self, seconds: float) -> list[Sample]:
        found = self._strike()
        for nodes in self.racks.values():
            returned = sum(node.cooling.exhaust_c for node in nodes) / len(nodes)
            for place, node in enumerate(nodes):
                # some exhaust comes round again, more of it at the top of the rack
                leak = 0.02 + 0.03 * place / max(1, self.settings.nodes_per_rack - 1)
                node.advance(self.elapsed_s, seconds, SUPPLY_C + leak * (returned - SUPPLY_C))
        self.elapsed_s += seconds
        return found

    def _strike(self) -> list[Sample]:
        """Set what is wrong with each node that a fault has reached; the events that go with it."""
        found: list[Sample] = []
        struck: set[str] = set()
        for planned in self._planned:
            age = self.elapsed_s - planned.at_s
            if age < 0:
                continue
            fault = planned.fault
            act = fault.twin if planned.null_twin else fault.effect
            strength = 1.0 if fault.onset_s <= 0 else min(1.0, age / fault.onset_s)
            for node in planned.nodes:
                if node.name not in struck:
                    node.wrong = healthy(len(node.gpus), len(node.engines))
                    struck.add(node.name)
                act(node.wrong, strength, age, planned.target)
            found += self._tell(planned, age)
        return found

    def _tell(self, planned: _Planned, age_s: float) -> list[Sample]:
        """The events of a fault that are due and not yet told."""
        events = planned.fault.twin_events if planned.null_twin else planned.fault.events
        found: list[Sample] = []
        while planned.told < len(events) and events[planned.told].after_s <= age_s:
            event = events[planned.told]
            planned.told += 1
            for node in planned.nodes:
                for subject in event.subjects(node.name, planned.target):
                    found.append(node.event(event.kind, subject, event.text, event.detail, event.code, self.time_ns))
        return found

    def _circuit(self, name: str, nodes: list[Node], time_ns: int) -> Sample:
        """Read by the agent of the circuit's first node."""
        first = nodes[0]
        watts = sum(node.supply.input_w for node in nodes)
        volts = LINE_V + first.random.gauss(0, 0.8)
        amps = watts / (math.sqrt(3) * volts * POWER_FACTOR)
        tags = {"node": first.name, "rack": first.rack, "circuit": name, "cluster": SIMULATED, "origin": SIMULATED}
        return Sample(
            "circuit",
            tags,
            {
                "current_a": round(amps, 2),
                "voltage_v": round(volts, 1),
                "rating_a": CIRCUIT_RATING_A,
                "load_pct": round(100 * amps / (0.8 * CIRCUIT_RATING_A), 2),
            },
            time_ns,
        )

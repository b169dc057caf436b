"""The simulated fleet as a running part: a healthy past first, then a live second each second, through spool and delivery."""

from __future__ import annotations

import logging
import sys
import threading
import time
from dataclasses import dataclass, replace

from agent.delivery import Delivery
from agent.simulator.faults import FAULTS
from agent.simulator.fleet import Fleet
from agent.simulator.recording import PAST_STEP_S, record
from agent.simulator.settings import SimulatorSettings
from agent.spool import Spool, SpoolError
from telemetry.catalogue import SIMULATED
from telemetry.messages import say
from telemetry.process import notify, stop_event
from telemetry.store import StoreDown, StoreError, open_store

__all__ = ["describe_faults", "record", "run"]

log = logging.getLogger(__name__)

SPOOL_FOLDER = "spool-simulator"
DRAIN_EVERY_SAMPLES = 10_000  # the past is made faster than a disk writes it
DELIVERED_WITHIN_S = 20.0  # ready when the past is in the store, or after this long without it
PAST_GPU_SECONDS = 200_000  # a larger fleet gets a shorter past, so that it is ready within about a minute
ADRIFT_S = 30.0  # the machine slept, its clock was set, or the fleet is too large: go on from the present


def describe_faults(language: str = "en") -> dict[str, str]:
    """Fault name -> what it does, in the order of triage."""
    return {name: say(fault.description, language) for name, fault in FAULTS.items()}


def run(settings: SimulatorSettings) -> int:
    """Simulate until SIGTERM or SIGINT; the exit code, 2 for a store or state folder that can't be used.

    The fault strikes `fault_after_s` after READY.
    """
    stopping = stop_event()
    now_ns = time.time_ns()
    try:
        history_s = missing_past_s(settings, now_ns)
        spool = Spool(settings.state_dir / SPOOL_FOLDER)
    except (SpoolError, StoreError) as error:
        print(say("simulator.unusable", settings.language, reason=error.told(settings.language)), file=sys.stderr)
        return 2
    delivery = Delivery(spool, lambda: open_store(settings.store_url))
    delivery.start()
    try:
        _simulate(_Run(settings, spool, stopping), now_ns, history_s)
    finally:
        delivery.stop(1.5)
        spool.close()
    return 0


@dataclass(slots=True)
class _Run:
    settings: SimulatorSettings
    spool: Spool
    stopping: threading.Event


def _simulate(run: _Run, now_ns: int, history_s: float) -> None:
    settings = run.settings
    notify(STATUS=say("simulator.progress.past", settings.language, percent=0))
    fleet = Fleet(replace(settings, history_s=history_s, fault=None), now_ns - round(history_s * 1e9))
    if not _backfill(run, fleet, history_s):
        return
    if settings.fault is not None:
        fleet.plan(
            settings.fault,
            settings.fault_node,
            at_s=fleet.elapsed_s + (time.time_ns() - fleet.time_ns) / 1e9 + settings.fault_after_s,
            null_twin=settings.null_twin,
        )
    boards = settings.nodes * settings.gpus_per_node
    notify(READY="1", STATUS=say("simulator.progress.live", settings.language, nodes=settings.nodes, gpus=boards))
    _live(run, fleet)


def missing_past_s(settings: SimulatorSettings, now_ns: int) -> float:
    """How much past to make: `history_s`, or less for a large fleet or where an earlier run has left its samples in the store.

    StoreError for a store that can't be used at all; one that is only down gets the whole past once it is back.
    """
    history_s = min(settings.history_s, PAST_GPU_SECONDS / (settings.nodes * settings.gpus_per_node))
    since_ns = now_ns - round(history_s * 1e9)
    where = {"origin": SIMULATED, "node": settings.node_names}
    try:
        store = open_store(settings.store_url)
        try:
            newest = [sample.time_ns for sample in store.latest("host", since_ns=since_ns, where=where)]
        finally:
            store.close()
    except StoreDown as error:
        log.warning("simulator: %s; the whole past is made again", error)
        return history_s
    return max(0.0, (now_ns - max(newest)) / 1e9) if newest else history_s


def _backfill(run: _Run, fleet: Fleet, history_s: float) -> bool:
    """Make the past, up to the present that has moved on meanwhile, and hand it over; False when told to stop."""
    handed, told = 0, 0
    while (behind_s := (time.time_ns() - fleet.time_ns) / 1e9) > PAST_STEP_S and fleet.elapsed_s < 2 * history_s + 60:
        samples = fleet.step(PAST_STEP_S)
        ticket = run.spool.append(samples)
        handed += len(samples)
        if handed >= DRAIN_EVERY_SAMPLES:
            handed = 0
            run.spool.wait_durable(ticket, 1.0)
        percent = int(100 * fleet.elapsed_s / (fleet.elapsed_s + behind_s))
        if percent >= told + 5:
            told = percent
            notify(STATUS=say("simulator.progress.past", run.settings.language, percent=percent))
        if run.stopping.is_set():
            return False
    run.spool.commit()
    deadline_s = time.monotonic() + DELIVERED_WITHIN_S
    while run.spool.waiting_blocks and time.monotonic() < deadline_s and not run.stopping.wait(0.1):
        pass
    return not run.stopping.is_set()


def _live(run: _Run, fleet: Fleet) -> None:
    """One step an interval, each at its own time; a fleet that has fallen behind catches up in longer steps."""
    settings = run.settings
    announced = 0
    while True:
        behind_s = (time.time_ns() - fleet.time_ns) / 1e9
        if abs(behind_s) > ADRIFT_S:
            fleet.start_ns += round(behind_s * 1e9)
            behind_s = 0.0
        if run.stopping.wait(max(0.0, settings.interval_s - behind_s)):
            return
        late = behind_s >= 2 * settings.interval_s
        run.spool.append(
            fleet.step(min(behind_s, max(PAST_STEP_S, settings.interval_s)) if late else settings.interval_s)
        )
        for truth in fleet.truth[announced:]:
            if truth.since_ns <= fleet.time_ns:
                announced += 1
                where = ", ".join(truth.subject.values())
                notify(STATUS=say("simulator.progress.fault", settings.language, name=truth.fault, node=where))
                log.warning("simulated fault %s on %s", truth.fault, where)

"""How much faster than real time the simulated fleet runs: python bench/simulator.py"""

from __future__ import annotations

import resource
import time

from agent.simulator.fleet import Fleet
from agent.simulator.settings import SimulatorSettings

ROWS = ((1, 8, 1.0, 300), (4, 8, 1.0, 200), (4, 8, 5.0, 200), (32, 8, 1.0, 30), (125, 8, 1.0, 10))
"""nodes, GPUs a node, step in s, steps"""


def main() -> None:
    print(f"{'GPUs':>6} {'step s':>7} {'x real time':>12} {'samples/s':>10} {'peak MiB':>9}")
    for nodes, gpus, step_s, steps in ROWS:
        fleet = Fleet(SimulatorSettings(nodes=nodes, gpus_per_node=gpus))
        began = time.process_time()  # of this process, so that a busy machine doesn't count
        samples = sum(len(fleet.step(step_s)) for _ in range(steps))
        spent = time.process_time() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(f"{nodes * gpus:>6} {step_s:>7.1f} {steps * step_s / spent:>12.1f} {samples / spent:>10,.0f} {peak:>9}")


if __name__ == "__main__":
    main()

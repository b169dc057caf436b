"""RAPL: what the CPU packages draw, from the kernel's energy counters under /sys/class/powercap (Intel and AMD)."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.collectors.interface import Finding, Tags, Tick
from telemetry.messages import say
from telemetry.sample import Sample

log = logging.getLogger(__name__)

PACKAGE_LIMIT_W = 2000.0
"""No package draws more. A counter that seems to have moved faster was reset, and one that could have gone round more than once
at this pace since the last reading says nothing. The common ranges are 65 and 262 kJ, so 32 s and more are safe between readings.
"""

LOOK_AGAIN_S = 60.0
"""Where there is nothing to read, look again this often: the module may be loaded or the permission given later."""

_PACKAGE = re.compile(r"intel-rapl:\d+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Package:
    """One CPU package's counter: microjoules, from 0 to `range_uj` and round again."""

    counter: Path
    range_uj: int


class RaplCollector:
    """`cpu_power_w` of the `host` measurement: the mean power of all CPU packages since the last reading, in W.

    Memory, cores and the whole platform (psys) have counters of their own, which overlap with the packages', and are left out.
    The first reading has no power. `sys` is where /sys is mounted; `now_s` a monotonic clock.
    """

    name = "rapl"

    def __init__(self, tags: Tags, sys: Path = Path("/sys"), now_s: Callable[[], float] = time.monotonic) -> None:
        self.errors = 0
        self._tags = dict(tags)
        self._folder = sys / "class" / "powercap"
        self._now_s = now_s
        self._packages: Sequence[Package] = ()
        self._look_s = -math.inf
        self._last: tuple[float, Mapping[Path, int]] | None = None
        self._problem = "absent"

    @property
    def pending(self) -> bool:
        """Whether one reading is there and the next is needed."""
        return self._problem == "first"

    def collect(self, tick: Tick) -> Sequence[Sample]:
        if not self._packages and tick.monotonic_s >= self._look_s:
            self._look_s = tick.monotonic_s + LOOK_AGAIN_S
            self._look()
        power_w = self._power_w() if self._packages else None
        return [Sample("host", self._tags, {"cpu_power_w": power_w}, tick.time_ns)] if power_w is not None else []

    def reprobe(self) -> None:
        self._look_s = -math.inf
        self._packages = ()
        self._last = None

    def close(self) -> None:
        pass

    def findings(self, language: str) -> Sequence[Finding]:
        source = say("agent.rapl.source", language)
        text = say(f"agent.rapl.{self._problem}", language, packages=len(self._packages))
        match self._problem:
            case "denied":
                return [Finding(source, "warning", text, say("agent.rapl.denied_remedy", language))]
            case "absent":
                return [Finding(source, "absent", text)]
            case "broken":
                return [Finding(source, "warning", text)]
        return [Finding(source, "ok", text)]

    def _look(self) -> None:
        """Find the packages and try their counters once."""
        packages = tuple(_packages(self._folder))
        self._problem = "first" if packages else "absent"
        try:
            for package in packages:
                _number(package.counter)
        except PermissionError:
            self._fail("denied")
            return
        except (OSError, ValueError):
            self._fail("broken")
            return
        self._packages = packages

    def _fail(self, problem: str) -> None:
        self.errors += 1
        self._packages, self._last = (), None
        self._problem = problem
        if self.errors == 1:
            log.warning("%s", say(f"agent.rapl.{problem}"))

    def _power_w(self) -> float | None:
        try:
            now = {package.counter: _number(package.counter) for package in self._packages}
        except PermissionError:
            self._fail("denied")
            return None
        except (OSError, ValueError):
            self._fail("broken")
            return None
        now_s = self._now_s()
        last, self._last = self._last, (now_s, now)
        if last is None:
            return None
        elapsed_s = now_s - last[0]
        joules = [
            _joules(package, last[1][package.counter], now[package.counter], elapsed_s) for package in self._packages
        ]
        known = [value for value in joules if value is not None]
        if elapsed_s <= 0 or len(known) < len(joules):
            return None  # a sum without one of the packages would look like an idle one
        self._problem = "ok"
        return sum(known) / elapsed_s


def _joules(package: Package, before_uj: int, now_uj: int, elapsed_s: float) -> float | None:
    """What one package has used; None where the counter can't say."""
    limit_uj = PACKAGE_LIMIT_W * elapsed_s * 1e6
    if limit_uj >= package.range_uj:
        return None
    used_uj = (now_uj - before_uj) % package.range_uj
    return used_uj / 1e6 if used_uj <= limit_uj else None


def _packages(folder: Path) -> list[Package]:
    """The CPU packages; a zone whose range can't be read is none that can be used."""
    found: list[Package] = []
    for zone in sorted(folder.glob("intel-rapl:*")):
        try:
            if _PACKAGE.fullmatch(zone.name) and (zone / "name").read_text().startswith("package"):
                range_uj = _number(zone / "max_energy_range_uj")
                if range_uj > 0:
                    found.append(Package(zone / "energy_uj", range_uj))
        except (OSError, ValueError):
            continue
    return found


def _number(path: Path) -> int:
    """The number in a file of /sys. OSError or ValueError where there is none."""
    with path.open("rb") as file:
        text = file.read(32).strip()
    if not text.isdigit():
        raise ValueError(f"{path.name}: not a number")
    return int(text)

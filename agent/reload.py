"""Reload: what a new configuration changes in a running agent, and what it can't change before a restart."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from agent.collectors.interface import Collector, Examined, Tick
from agent.settings import AgentSettings, EngineTarget
from telemetry.messages import say
from telemetry.sample import Sample

Gather = Callable[[], AgentSettings]
"""Reads the configuration anew; raises ConfigurationRefused with one line for one that can't be used."""

UNTIL_RESTART = ("state_dir", "store_url", "host", "port", "allow_remote", "language")
"""What the agent holds open, or has told others, from its start to its end."""

PLACE = ("node", "rack", "circuit", "cluster")
"""Settings that are tags of every sample; they take effect without making any collector anew."""

WARM_S = 2.0


class ConfigurationRefused(Exception):
    """The configuration can't be used. One line: where it stands, what is wrong, and the remedy."""


@dataclass(frozen=True, slots=True)
class Difference:
    """`settings`: those to go on with; `kept`: keys that wait for a restart; `changed`: the keys that take effect."""

    settings: AgentSettings
    kept: Sequence[str]
    changed: Sequence[str]


def difference(now: AgentSettings, wanted: AgentSettings) -> Difference:
    names = [field.name for field in dataclasses.fields(AgentSettings)]
    differing = [name for name in names if getattr(now, name) != getattr(wanted, name)]
    kept = [name for name in differing if name in UNTIL_RESTART]
    held = {name: getattr(now, name) for name in kept}
    return Difference(replace(wanted, **held), kept, [name for name in differing if name not in kept])


def engine_changes(now: Sequence[EngineTarget], wanted: Sequence[EngineTarget]) -> Mapping[str, str]:
    """engine -> added, removed or changed."""
    before, after = ({target.name: target for target in targets} for targets in (now, wanted))
    return {
        **{name: "added" for name in after if name not in before},
        **{name: "removed" for name in before if name not in after},
        **{name: "changed" for name, target in after.items() if name in before and before[name] != target},
    }


def describe(now: AgentSettings, difference: Difference) -> str:
    """What takes effect, in words and without any value: values may be secrets."""
    language = difference.settings.language
    parts = [name for name in difference.changed if name != "engines"]
    for name, how in engine_changes(now.engines, difference.settings.engines).items():
        parts.append(say(f"agent.reload.engine_{how}", language, name=name))
    return ", ".join(parts)


def to_make_anew(changed: Sequence[str], depends_on: Mapping[str, Sequence[str]], sources: Sequence[str]) -> set[str]:
    """The sources that one of the changed settings concerns. One that doesn't say what it depends on depends on all."""
    changed = [name for name in changed if name not in PLACE]
    return {source for source in sources if set(depends_on.get(source, changed)) & set(changed)}


def warm(collector: Collector, wait_s: float = WARM_S) -> list[Sample]:
    """Let a new collector take its first readings before it takes part, so that its start costs no tick; events that it
    had to tell already. Never raises: what is wrong with it will show in its ticks.
    """
    events: list[Sample] = []
    give_up_s = time.monotonic() + wait_s
    for number in range(1, 1000):
        try:
            samples = collector.collect(Tick(-number, time.time_ns(), time.monotonic()))
        except Exception:
            return events
        events += [sample for sample in samples if sample.measurement == "event"]
        is_waited_for = collector.pending if isinstance(collector, Examined) else number < 2
        if not is_waited_for or time.monotonic() > give_up_s:
            break
        time.sleep(0.1)
    return events


def terminal_is_gone(had_terminal: bool) -> bool:
    """Whether a hangup signal means that the terminal was closed, and not that somebody asks for a reload."""
    return had_terminal and not has_terminal()


def has_terminal() -> bool:
    """Whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True

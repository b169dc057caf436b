"""Engine identity: which version and configuration each engine ran last, kept on disk, so that a change is noticed even when
the agent was not running at the time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agent.remembered import RememberedFile, remembered

log = logging.getLogger(__name__)

VANISHED_AFTER_S = 120.0

FIELDS = ("version", "config_hash")


@dataclass(frozen=True, slots=True)
class Change:
    """One of FIELDS had the value `before` and now has `after`."""

    field: str
    before: str
    after: str


@dataclass(slots=True)
class Identities:
    """What each engine said last. Without a `path` it is forgotten with the process."""

    path: Path | None = None
    file: RememberedFile = field(init=False)
    _known: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.file = RememberedFile(self.path)
        if self.path is None:
            return
        try:
            loaded = remembered(self.path)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log.warning("%s can't be read, engine versions start anew: %s", self.path, error)
            return
        if isinstance(loaded, dict):
            for engine, said in loaded.items():
                if isinstance(said, dict):
                    self._known[engine] = {name: str(said[name]) for name in FIELDS if name in said}

    def update(self, engine: str, said: Mapping[str, str], tick: int) -> list[Change]:
        """Take what is said; the changes against what was said before. What is not said is not a change. It is remembered from run
        to run once the samples of this tick, which tell of the changes, are safe.
        """
        known = self._known.setdefault(engine, {})
        changes = [
            Change(name, known[name], said[name])
            for name in FIELDS
            if name in said and name in known and said[name] != known[name]
        ]
        if any(known.get(name) != said[name] for name in FIELDS if name in said):
            known.update({name: said[name] for name in FIELDS if name in said})
            self.file.put(self._known, tick)
        return changes


class Vanishing:
    """Notices metric families that one version of an engine had and the next one has no more."""

    def __init__(self) -> None:
        self._version = ""
        self._seen: frozenset[str] = frozenset()
        self._before: frozenset[str] = frozenset()
        self._changed_s = 0.0

    def gone(self, version: str, families: frozenset[str], monotonic_s: float) -> list[str]:
        """The families that are gone, once, when the new version has had VANISHED_AFTER_S to show them: some appear with their
        first request only. `families` are those of this scrape that are known by name.
        """
        if version and self._version and version != self._version:
            self._before, self._seen, self._changed_s = self._seen, frozenset(), monotonic_s
        self._version = version or self._version
        self._seen |= families
        if not self._before or monotonic_s - self._changed_s < VANISHED_AFTER_S:
            return []
        gone, self._before = sorted(self._before - self._seen), frozenset()
        return gone

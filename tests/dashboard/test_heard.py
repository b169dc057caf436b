"""The newest sample of every series: what speaks is asked for at each look, what is silent once a minute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dashboard.heard import Heard
from telemetry.sample import Sample
from telemetry.store import Store

S = 10**9
NOW = 1_790_000_000 * S
DAY = 86_400 * S


class Asked:
    """A store that remembers from when on it was asked."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.back_s: list[int] = []
        self.now_ns = NOW

    def latest(self, measurement: str, *, since_ns: int, fields: Sequence[str] | None = None) -> list[Sample]:
        self.back_s.append((self.now_ns - since_ns) // S)
        return self._store.latest(measurement, since_ns=since_ns, fields=fields)


def host(node: str, at_ns: int, cpu_pct: float) -> Sample:
    return Sample("host", {"node": node}, {"cpu_pct": cpu_pct}, at_ns)


def look(heard: Heard, asked: Any, after_s: int) -> dict[str, tuple[int, Any]]:
    asked.now_ns = NOW + after_s * S
    found = heard.latest("host", now_ns=asked.now_ns, since_ns=asked.now_ns - DAY, fields=["cpu_pct"])
    assert len(found) == len({sample.tags["node"] for sample in found})
    return {s.tags["node"]: ((s.time_ns - NOW) // S, s.fields["cpu_pct"]) for s in found}


def test_a_silent_host_stays_and_a_day_is_asked_for_once_a_minute_only(store: Store) -> None:
    store.write([host("silent", NOW - 3600 * S, 1.0), host("loud", NOW - 1 * S, 2.0)])
    asked = Asked(store)
    heard = Heard(asked)  # type: ignore[arg-type]
    assert look(heard, asked, 0) == {"silent": (-3600, 1.0), "loud": (-1, 2.0)}
    store.write([host("loud", NOW + 4 * S, 3.0), host("new", NOW + 4 * S, 4.0)])
    assert look(heard, asked, 5) == {"silent": (-3600, 1.0), "loud": (4, 3.0), "new": (4, 4.0)}
    look(heard, asked, 59)
    look(heard, asked, 61)
    assert asked.back_s == [86_400, 120, 120, 86_400]


def test_a_host_that_speaks_again_is_seen_at_once_and_one_that_spoke_last_at_the_last_whole_look_is_kept(
    store: Store,
) -> None:
    store.write([host("silent", NOW - 3600 * S, 1.0), host("last", NOW, 2.0)])
    asked = Asked(store)
    heard = Heard(asked)  # type: ignore[arg-type]
    look(heard, asked, 0)
    store.write([host("silent", NOW + 50 * S, 5.0)])
    assert look(heard, asked, 55) == {"silent": (50, 5.0), "last": (0, 2.0)}


def test_what_is_older_than_was_asked_for_is_forgotten_between_whole_looks(store: Store) -> None:
    store.write([host("old", NOW - DAY + 10 * S, 1.0)])
    asked = Asked(store)
    heard = Heard(asked)  # type: ignore[arg-type]
    assert "old" in look(heard, asked, 0)
    assert look(heard, asked, 20) == {}


def test_a_clock_that_went_back_is_followed_by_a_whole_look(store: Store) -> None:
    asked = Asked(store)
    heard = Heard(asked)  # type: ignore[arg-type]
    look(heard, asked, 0)
    look(heard, asked, -3000)
    assert asked.back_s == [86_400, 86_400]

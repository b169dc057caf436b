"""Rollups on VictoriaMetrics: each gauge of the whole fleet by the minute and the quarter of an hour.

Single series are not rolled up. The server draws their means, extremes, masks and counters from raw samples about as fast as it would
from cells, packs raw samples to about a byte, and can neither delete them nor keep cells longer than them. What it can't do fast is to
draw a thousand series together, and that is what is kept here, as `pairscope_fleet_1min_*` and `pairscope_fleet_15min_*`.

Samples can't be replaced either: of two at one time both stay, or either. So nothing is ever written twice at one time.

- A writer marks the minutes that it touches, with a number that grows with each of its marks, in a series of its own. The sum of all
  writers' newest numbers tells a state of a minute, and changes whenever something came later.
- A cell is written at a time of its own, drawn by lot within its minute, and after it `done` with the sum that was read before the
  samples were. A cell stands while that sum is still the minute's; if not, the minute is read from raw samples, and drawn again. So
  processes that roll up at once, or are cut off, leave cells that nobody takes, at worst.
- Every field of the catalogue has its count in a cell, be it zero: if a part is missing, as after a crash of the server, it shows.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from telemetry import catalogue
from telemetry.catalogue import Kind, Measurement
from telemetry.sample import Sample
from telemetry.store.buckets import Buckets
from telemetry.store.rollup import MINUTE_NS, QUARTER_NS, SINGLE, Cell, Gauge, combined, fleet_fields, level_ns
from telemetry.store.victoriametrics_query import AHEAD_MS, DAY_MS, Query, bucketed, quoted, spans
from telemetry.store.victoriametrics_ranges import gathered
from telemetry.store.victoriametrics_series import MS, by_time

SETTLE_NS = 20 * 10**9  # clocks of writers and this one may differ by so much without work being done twice
_RECENT_NS = 7200 * 10**9
_LATE_NS = 3600 * 10**9
"""Open minutes are looked for among the recent ones; a writer of older ones says so, at the time it writes."""
_MARGIN_NS = 120 * 10**9
_MINUTES_AT_ONCE = 15
_MARKS, _LATE = "pairscope_mark", "pairscope_late"
_CELLS = {MINUTE_NS: "pairscope_fleet_1min", QUARTER_NS: "pairscope_fleet_15min"}

Place = tuple[str, str]
"""A measurement and a field."""
Timed = tuple[int, Cell]
"""A cell and the start of its minute or quarter."""


class Marks:
    """What one writer says of the minutes that it touches. Thread-safe.

    A minute that is going on is marked when it is first touched and once more when it is over: nobody has rolled it up before, unless
    his clock is far ahead. One that is over is marked with each write, before the samples and again when they are acknowledged.
    """

    def __init__(self, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._wall_ns = wall_ns
        self._writer = secrets.token_hex(4)
        self._count = 0
        self._late_ms = 0
        self._going_on: frozenset[int] = frozenset()
        self._lock = threading.Lock()

    def before(self, samples: Iterable[Sample]) -> tuple[str, frozenset[int]]:
        """The lines that go with the samples, and the minutes that these touch."""
        touched = frozenset(
            sample.time_ns // MINUTE_NS * MINUTE_NS for sample in samples if sample.measurement not in SINGLE
        )
        with self._lock:
            return self._lines(touched - self._going_on), touched

    def after(self, touched: Collection[int], post: Callable[[str], None], *, again: bool = False) -> None:
        """Post what follows when the samples are acknowledged; `again` when they were sent once more."""
        now_ns = self._wall_ns()
        with self._lock:  # so that a larger number never comes before a smaller one
            known = self._going_on | frozenset(touched)
            over = {start_ns for start_ns in known if start_ns + MINUTE_NS <= now_ns}
            marked = over | frozenset(touched) if again else over
            if marked:
                late = [start_ns for start_ns in marked if start_ns < now_ns - _LATE_NS]
                post(self._lines(marked) + (self._late(min(late), now_ns) if late else ""))
            self._going_on = known - over

    def _lines(self, minutes: Iterable[int]) -> str:
        self._count += 1
        within_ns = self._count * MS % MINUTE_NS  # a time of its own
        return "".join(
            f"{_MARKS},writer={self._writer} at={self._count}i {start_ns + within_ns}\n" for start_ns in sorted(minutes)
        )

    def _late(self, oldest_ns: int, now_ns: int) -> str:
        self._late_ms = max(self._late_ms + 1, now_ns // MS)
        return f"{_LATE},writer={self._writer} from={oldest_ns // MS}i {self._late_ms * MS}\n"


class FleetCells:
    """One server's cells. `post` writes lines, `flush` makes readable what others wrote."""

    def __init__(
        self, query: Query, post: Callable[[str], None], flush: Callable[[], None], oldest_ns: Callable[[], int]
    ) -> None:
        self._query = query
        self._post = post
        self._flush = flush
        self._oldest_ns = oldest_ns  # of what the server keeps
        self._looked_ns = 0  # when all that was open then had been drawn

    # --- rolling up

    def work(self, until_ns: int, budget_s: float) -> bool:
        """Draw together what ended by `until_ns`, for about `budget_s`; whether some of it is left."""
        deadline_s = time.monotonic() + budget_s
        now_ns = time.time_ns()
        first_ns = self._first_ns(min(until_ns, now_ns))
        if first_ns is not None:
            for start_ns in self._open_quarters(first_ns, until_ns):
                if not self._quarter(start_ns, until_ns, deadline_s):
                    return True
        self._looked_ns = now_ns
        return False

    def _first_ns(self, until_ns: int) -> int | None:
        """The start of the first quarter that may be open; None when nothing is marked at all."""
        end_ms = time.time_ns() // MS + AHEAD_MS
        if self._looked_ns:
            window_ms = end_ms - (self._looked_ns - _MARGIN_NS) // MS
            oldest = f"min(min_over_time({self._query.named(_LATE + '_from')}[{window_ms}ms]))"
            found = [until_ns - _RECENT_NS, *(round(value) * MS for _, value in self._query.at(oldest, end_ms))]
        else:
            oldest = f"min(tfirst_over_time({self._query.named(_MARKS + '_at')}[{end_ms - DAY_MS}ms]))"
            found = [round(value * 1000) * MS for _, value in self._query.at(oldest, end_ms)]
        if not found:
            return None
        return max(min(found), self._oldest_ns()) // QUARTER_NS * QUARTER_NS

    def _open_quarters(self, first_ns: int, until_ns: int) -> list[int]:
        """The newest first. One that is not over is always among them."""
        states = self._states(QUARTER_NS, first_ns, until_ns)
        settled = self._settled(QUARTER_NS, states, self._stored(QUARTER_NS, first_ns, until_ns))
        return sorted((start_ns for start_ns in states if start_ns not in settled), reverse=True)

    def _quarter(self, start_ns: int, until_ns: int, deadline_s: float) -> bool:
        """Draw one quarter's minutes together, and itself if it is over; False when the time didn't suffice."""
        end_ns = start_ns + QUARTER_NS
        is_over = end_ns <= until_ns
        whole = self._states(QUARTER_NS, start_ns, end_ns)  # before anything else, so that it is never too new
        states = self._states(MINUTE_NS, start_ns, end_ns)
        # a quarter that goes on is looked at by every agent several times a minute, and mostly there is nothing to do
        stored = self._stored(MINUTE_NS, start_ns, end_ns, _places() if is_over else ())
        settled = self._settled(MINUTE_NS, states, stored)
        minutes = range(start_ns, end_ns, MINUTE_NS)
        made: dict[int, dict[Place, Gauge | None]] = {}
        for minute, at_ms in settled.items():
            cells = _complete(stored, at_ms) if is_over else {}
            if cells is not None:
                made[minute] = cells
        ended = [minute for minute in minutes if minute + MINUTE_NS <= until_ns and minute not in made]
        due = ended if is_over else [minute for minute in ended if minute in states]
        for first in range(0, len(due), _MINUTES_AT_ONCE):
            if time.monotonic() >= deadline_s:
                return False
            some = due[first : first + _MINUTES_AT_ONCE]
            drawn = self._minutes(some)
            self._put(MINUTE_NS, {minute: (states.get(minute, 0), drawn[minute]) for minute in some})
            made |= drawn
        if is_over and len(made) == len(minutes):
            several = [made[minute] for minute in minutes]
            joined = {place: _joined([each[place] for each in several]) for place in _places()}
            self._put(QUARTER_NS, {start_ns: (whole.get(start_ns, 0), joined)})
        return True

    def _minutes(self, minutes: Sequence[int]) -> dict[int, dict[Place, Gauge | None]]:
        self._flush()  # what was marked is then readable
        over = Buckets(minutes[0], MINUTE_NS, (minutes[-1] - minutes[0]) // MINUTE_NS + 1)
        found: dict[int, dict[Place, Gauge | None]] = {minute: dict.fromkeys(_places()) for minute in minutes}
        for known in catalogue.MEASUREMENTS.values():
            names = fleet_fields(known.name)
            for name, cells in (gathered(self._query, known, names, over, None) if names else {}).items():
                for start_ns, cell in cells:
                    if start_ns in found and isinstance(cell, Gauge):
                        found[start_ns][known.name, name] = cell
        return found

    def _put(self, level: int, made: Mapping[int, tuple[int, Mapping[Place, Gauge | None]]]) -> None:
        cells, dones = "", ""
        for start_ns, (state, by_place) in made.items():
            at_ns = start_ns + secrets.randbelow(level // MS) * MS
            dones += f"{_CELLS[level]} done={state}i {at_ns}\n"
            for (measurement, name), cell in by_place.items():
                parts = "n=0i"
                if cell is not None:
                    # the sum and not the mean, which may have more digits than the server keeps
                    parts = f"n={cell.n}i,sum={cell.mean * cell.n!r},low={cell.low!r},high={cell.high!r}"
                cells += f"{_CELLS[level]},measurement={measurement},field={name} {parts} {at_ns}\n"
        self._post(cells)
        self._post(dones)

    # --- reading

    def gathered(self, known: Measurement, names: Sequence[str], over: Buckets) -> dict[str, list[Timed]]:
        """field -> cells of all series of a measurement, none of which straddles buckets."""
        level = level_ns(over.step_ns)
        if not level or not self._query.can_draw(over):
            return gathered(self._query, known, names, over, None)
        found: dict[str, list[Timed]] = {name: [] for name in names}
        if level == QUARTER_NS:
            quarters = self._take(QUARTER_NS, known, names, (over.first_ns, over.end_ns), found)
            minutes: set[int] = set()
            for first, last in spans((start_ns // QUARTER_NS for start_ns in quarters), near=1):
                span = first * QUARTER_NS, (last + 1) * QUARTER_NS
                minutes |= self._take(MINUTE_NS, known, names, span, found, quarters)
        else:
            minutes = self._take(MINUTE_NS, known, names, (over.first_ns, over.end_ns), found)
        for part, wanted in _raw(minutes, over):
            for name, cells in gathered(self._query, known, names, part, None).items():
                found[name] += [timed for timed in cells if timed[0] in wanted]
        return found

    def _take(
        self,
        level: int,
        known: Measurement,
        names: Sequence[str],
        span: tuple[int, int],
        found: Mapping[str, list[Timed]],
        among: Collection[int] | None = None,
    ) -> set[int]:
        """Put the cells that stand into `found`; the starts of those that don't."""
        states = self._states(level, *span)
        places = [(known.name, name) for name in names]
        stored = self._stored(level, *span, places)
        settled = self._settled(level, states, stored)
        missing: set[int] = set()
        for start_ns in range(*span, level):
            if among is not None and start_ns // QUARTER_NS * QUARTER_NS not in among:
                continue
            cells = _complete(stored, settled[start_ns], places) if start_ns in settled else None
            if cells is None:
                missing.add(start_ns)
                continue
            for (_, name), cell in cells.items():
                if cell is not None:
                    found[name].append((start_ns, cell))
        return missing

    # --- what the server holds

    def _states(self, level: int, first_ns: int, end_ns: int) -> dict[int, int]:
        """start_ns -> the sum of all writers' newest marks."""
        over = Buckets(first_ns, level, -(-(end_ns - first_ns) // level))
        query = f"sum(max_over_time({bucketed(self._query.named(_MARKS + '_at'), over)}))"
        return {
            first_ns + place * level: round(value)
            for _, places, values in self._query.drawn(query, over)
            for place, value in zip(places, values, strict=True)
        }

    def _stored(self, level: int, first_ns: int, end_ns: int, places: Collection[Place] = ()) -> _Stored:
        """What was written of cells, and of which state."""
        labels: tuple[str, ...] = ()
        parts = "done"
        if places:
            measurements, fields = {measurement for measurement, _ in places}, {name for _, name in places}
            labels = (
                f"measurement=~{quoted('|' + '|'.join(sorted(measurements)))}",
                f"field=~{quoted('|' + '|'.join(sorted(fields)))}",
            )
            parts = "(done|n|sum|low|high)"
        prefix = f"{_CELLS[level]}_"
        stored: _Stored = {}
        selector = self._query.named(prefix + parts, *labels)
        for series, values, times in self._query.export(selector, first_ns // MS, (end_ns - 1) // MS):
            place = series.tags.get("measurement", ""), series.tags.get("field", "")
            of_place = stored.setdefault(place, {})
            by_time(times, values, float, of_place.setdefault(series.name.removeprefix(prefix), {}))
        return stored

    def _settled(self, level: int, states: Mapping[int, int], stored: _Stored) -> dict[int, int]:
        """start_ns -> the time in ms at which the cell of its state was written."""
        dones = stored.get(_DONE, {}).get("done", {})
        found: dict[int, int] = {}
        for at_ms in sorted(dones):
            start_ns = at_ms * MS // level * level
            if round(dones[at_ms]) == states.get(start_ns, 0):
                found[start_ns] = at_ms
        return found


_Stored = dict[Place, dict[str, dict[int, float]]]
"""place -> part -> its values by the time in ms that they were written at."""
_DONE: Place = ("", "")


def _places() -> list[Place]:
    return [(known, name) for known in catalogue.MEASUREMENTS for name in fleet_fields(known)]


def _complete(stored: _Stored, at_ms: int, places: Collection[Place] | None = None) -> dict[Place, Gauge | None] | None:
    """The cells that were written at a time, None for a field without values; None for all when a part is not there."""
    cells: dict[Place, Gauge | None] = {}
    for place in _places() if places is None else places:
        parts = stored.get(place, {})
        n, total, low, high = (parts.get(part, {}).get(at_ms) for part in ("n", "sum", "low", "high"))
        if n == 0:
            cells[place] = None
        elif n is None or total is None or low is None or high is None:
            return None
        else:
            cells[place] = Gauge(round(n), low if low == high else total / n, low, high)
    return cells


def _joined(cells: Sequence[Gauge | None]) -> Gauge | None:
    some = [cell for cell in cells if cell is not None]
    if not some:
        return None
    whole = combined(Kind.GAUGE, some)
    assert isinstance(whole, Gauge)
    return whole


def _raw(minutes: Collection[int], over: Buckets) -> Iterator[tuple[Buckets, set[int]]]:
    """What to ask of raw samples, and the starts that are wanted of it: whole buckets at once where no minute of theirs is there."""
    held: dict[int, list[int]] = {}
    for start_ns in minutes:
        held.setdefault((start_ns - over.first_ns) // over.step_ns, []).append(start_ns)
    per_bucket = over.step_ns // MINUTE_NS
    whole = [bucket for bucket, several in held.items() if len(several) == per_bucket]
    single = {start_ns for several in held.values() if len(several) < per_bucket for start_ns in several}
    wanted = {over.first_ns + bucket * over.step_ns for bucket in whole}
    for first, last in spans(whole, near=1):
        yield Buckets(over.first_ns + first * over.step_ns, over.step_ns, last - first + 1), wanted
    for first, last in spans((start_ns // MINUTE_NS for start_ns in single), near=1):
        yield Buckets(first * MINUTE_NS, MINUTE_NS, last - first + 1), single

"""The fleet now: every pair that reports, its newest readings, and what triage last said of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dashboard.heard import Heard
from dashboard.selection import SECOND_NS, PairKey
from telemetry.catalogue import NOT_LIVE
from telemetry.pairs import THROTTLE_REASONS
from telemetry.sample import Sample
from telemetry.store import Store

RESTART_MEMORY_S = 3_600
EVENT_LIMIT = 500


@dataclass(frozen=True, slots=True)
class PairNow:
    """One pair's newest readings. A value is None when it was not read or is stale; `heard_ns` is when its node last spoke.

    `up` is 1, 0, or None when nobody said; `starting` is set while it does not answer because it loads. `temp_c` is the hottest
    GPU's, `clock_mhz` the slowest's, `reasons` of any GPU. `judged` is its newest verdict sample, `restart` the newest restart
    event of the last hour.
    """

    key: PairKey
    heard_ns: int
    cluster: str = ""
    rack: str = ""
    model: str = ""
    gpus: tuple[str, ...] = ()
    simulated: bool = False
    up: int | None = None
    starting: bool = False
    effort: str = "cpu"
    baseline: str = ""
    output_pct: float | None = None
    util_pct: float | None = None
    tokens_per_s: float | None = None
    expected_tokens_per_s: float | None = None
    temp_c: float | None = None
    clock_mhz: float | None = None
    reasons: tuple[str, ...] = ()
    kv_pct: float | None = None
    waiting: float | None = None
    tells_stages: bool = False
    judged: Sample | None = None
    restart: Sample | None = None

    @property
    def cause(self) -> str:
        """What triage says: a cause, `none`, or empty when it has said nothing."""
        return self.judged.tags.get("cause", "") if self.judged else ""

    def age_s(self, now_ns: int) -> float:
        return max(0.0, (now_ns - self.heard_ns) / SECOND_NS)


_OF_AN_ENGINE = (
    *("up", "starting", "tokens_per_s", "requests_waiting", "kv_used_pct", "requests_running", "stats_age_s"),
    "stage_mlp_s",
)
_OF_A_HOST = ("cpu_pct", "mem_used_pct", "load1")
_OF_A_GPU = ("state", "util_pct", "throttle_reasons", "temp_c", "sm_clock_mhz")
"""What `_pair` draws on, and one or two that are there as long as anything is. There are many GPUs with many fields each."""


@dataclass(frozen=True, slots=True)
class Fleet:
    at_ns: int
    pairs: Mapping[PairKey, PairNow] = field(default_factory=dict)

    @property
    def nodes(self) -> list[str]:
        return sorted({key.node for key in self.pairs})

    def worst_first(self) -> list[PairNow]:
        """Pairs with a named cause first, then by what is left of the expected output; silent ones after those that report."""

        def rank(pair: PairNow) -> tuple[bool, bool, float, str]:
            named = pair.cause not in ("", "none")
            output = pair.output_pct if pair.output_pct is not None else 1e9
            return not named, pair.output_pct is None, output, str(pair.key)

        return sorted(self.pairs.values(), key=rank)


def read_fleet(store: Store, now_ns: int, *, forget_s: float, stale_s: float, heard: Heard | None = None) -> Fleet:
    """The newest readings of every pair heard within `forget_s`. StoreError as the store raises it.

    `heard` is what an earlier look at the same store left, so that this one costs less.
    """
    heard = heard or Heard(store)
    since = now_ns - int(forget_s * SECOND_NS)
    fresh = now_ns - int(stale_s * SECOND_NS)
    engines = _newest(heard.latest("engine", now_ns=now_ns, since_ns=since, fields=_OF_AN_ENGINE), "engine")
    gpus = _newest(heard.latest("gpu", now_ns=now_ns, since_ns=since, fields=_OF_A_GPU), "gpu")
    hosts = _newest(heard.latest("host", now_ns=now_ns, since_ns=since, fields=_OF_A_HOST))
    outputs = _newest(store.latest("pair", since_ns=fresh), "engine")
    verdicts = _newest(heard.latest("verdict", now_ns=now_ns, since_ns=since), "engine")
    restarts = _restarts(store, now_ns)
    by_node: dict[str, list[Sample]] = {}
    for sample in engines.values():
        by_node.setdefault(sample.tags["node"], []).append(sample)
    pairs: dict[PairKey, PairNow] = {}
    for node in sorted({key.node for key in (*engines, *gpus, *hosts)}):
        mine = {key.engine: sample for key, sample in gpus.items() if key.node == node}
        own = by_node.get(node, [])
        host = hosts.get(PairKey(node))
        named = {index for engine in own for index in gpu_names(engine.tags)}
        for engine in own:
            indices = gpu_names(engine.tags) or tuple(sorted((i for i in mine if i not in named), key=by_number))
            key = PairKey(node, engine.tags.get("engine", ""))
            pairs[key] = _pair(key, engine, [mine[i] for i in indices if i in mine], indices, host, outputs, fresh)
        loose = [mine[i] for i in sorted(mine, key=by_number) if i not in named]
        if not own or (loose and all(gpu_names(engine.tags) for engine in own)):
            key = PairKey(node)
            pairs[key] = _pair(key, None, loose, tuple(s.tags["gpu"] for s in loose), host, outputs, fresh)
    return Fleet(
        now_ns, {key: replace(pair, judged=verdicts.get(key), restart=restarts.get(key)) for key, pair in pairs.items()}
    )


def gpu_names(tags: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that an engine's tags name: "0+1" -> ("0", "1")."""
    return tuple(name for name in tags.get("gpus", "").split("+") if name)


def by_number(name: str) -> tuple[int, str]:
    """By number where it is one; a name from outside may be digits that int() refuses."""
    return (int(name), "") if name.isascii() and name.isdigit() and len(name) <= 9 else (1 << 30, name)


def _newest(samples: Iterable[Sample], tag: str = "") -> dict[PairKey, Sample]:
    """The newest sample by node and the value of `tag`: a series whose other tags changed is still the same thing."""
    found: dict[PairKey, Sample] = {}
    for sample in samples:
        key = PairKey(sample.tags["node"], sample.tags.get(tag, "") if tag else "")
        if key not in found or sample.time_ns >= found[key].time_ns:
            found[key] = sample
    return found


def _restarts(store: Store, now_ns: int) -> dict[PairKey, Sample]:
    events = store.samples(
        "event",
        start_ns=now_ns - RESTART_MEMORY_S * SECOND_NS,
        end_ns=now_ns + RESTART_MEMORY_S * SECOND_NS,
        where={"kind": "restart"},
        limit=EVENT_LIMIT,
    )
    return _newest(events, "subject")


def value(sample: Sample | None, name: str) -> float | None:
    """A field as a number; None when it is absent."""
    found = sample.fields.get(name) if sample is not None else None
    return None if found is None or isinstance(found, str) else float(found)


def _pair(
    key: PairKey,
    engine: Sample | None,
    gpus: Sequence[Sample],
    names: tuple[str, ...],
    host: Sample | None,
    outputs: Mapping[PairKey, Sample],
    fresh_ns: int,
) -> PairNow:
    sources = [sample for sample in (engine, host, *gpus) if sample is not None]
    tags = sources[0].tags
    alive = [gpu for gpu in gpus if gpu.time_ns >= fresh_ns]
    spoke = engine if engine is not None and engine.time_ns >= fresh_ns else None
    output = outputs.get(key)
    machine = host if host is not None and host.time_ns >= fresh_ns else None
    up = value(spoke, "up")
    seen = [u for u in (value(gpu, "util_pct") for gpu in alive) if u is not None]
    util = value(output, "util_pct")
    if util is None:
        util = statistics.fmean(seen) if seen else value(machine, "cpu_pct") if not gpus else None
    mask = 0
    for gpu in alive:
        mask |= int(value(gpu, "throttle_reasons") or 0)
    tokens = value(spoke, "tokens_per_s")
    return PairNow(
        key=key,
        # an engine's own silence is told apart from its node's: the page is stale when neither speaks
        heard_ns=max(sample.time_ns for sample in sources),
        cluster=tags.get("cluster", ""),
        rack=tags.get("rack", ""),
        model=engine.tags.get("model", "") if engine is not None else "",
        gpus=names,
        simulated=any(sample.tags.get("origin") in NOT_LIVE for sample in sources),
        up=None if up is None else int(up),
        starting=value(spoke, "starting") == 1,
        effort=str(output.fields.get("effort", "")) if output else ("gpu" if gpus else "cpu"),
        baseline=str(output.fields.get("baseline", "")) if output else "",
        output_pct=value(output, "output_pct"),
        util_pct=util,
        tokens_per_s=tokens if tokens is not None else value(output, "tokens_per_s"),
        expected_tokens_per_s=value(output, "expected_tokens_per_s"),
        temp_c=max((t for t in (value(gpu, "temp_c") for gpu in alive) if t is not None), default=None),
        clock_mhz=min((c for c in (value(gpu, "sm_clock_mhz") for gpu in alive) if c is not None), default=None),
        reasons=tuple(name for bit, name in THROTTLE_REASONS if mask & bit and name != "gpu_idle"),
        kv_pct=value(spoke, "kv_used_pct"),
        waiting=value(spoke, "requests_waiting"),
        tells_stages=value(engine, "stage_mlp_s") is not None,
    )

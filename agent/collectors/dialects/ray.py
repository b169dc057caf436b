"""Ray Serve: each node's Ray metrics agent exports the engines of all its replicas, under names of its own making.

Each counter may be there twice, as `x_total` and as a gauge `x` that is about to go; older releases have the gauge only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from agent.collectors.dialects.dialect import Alternatives, Dialect
from agent.collectors.dialects.sglang import SGLANG, SGLANG_BEFORE_REALTIME
from agent.collectors.dialects.vllm import REPLICA_LABELS, VLLM_LIKE


def _doubled(dialect: Dialect) -> Mapping[str, Alternatives]:
    """The counters, and the gauges that stand in for them where Ray exports nothing else."""
    return {
        name: (*families, *(replace(family, name=family.name.removesuffix("_total")) for family in families))
        for name, families in dialect.counters.items()
    }


def _by_ray(dialect: Dialect, engine: str, rank_labels: tuple[str, ...]) -> Dialect:
    return replace(
        dialect,
        kind=f"ray+{engine}",
        # the colon until vLLM 0.10.2, the underscore from 0.11.2
        passed_as={f"ray_{engine}:": f"{engine}:", f"ray_{engine}_": f"{engine}:"},
        counters=_doubled(dialect),
        rank_labels=rank_labels,
        ask=None,
    )


RAY_DIALECTS = (
    _by_ray(VLLM_LIKE, "vllm", VLLM_LIKE.rank_labels),
    *(_by_ray(dialect, "sglang", (*REPLICA_LABELS, "dp_rank")) for dialect in (SGLANG, SGLANG_BEFORE_REALTIME)),
)

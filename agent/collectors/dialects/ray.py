"""Ray Serve: each node's Ray metrics agent exports the engines of all its replicas, under names of its own making.

Each counter may be there twice, as `x_total` and as a gauge `x` that is about to go; only the first is in the tables.
"""

from __future__ import annotations

from dataclasses import replace

from agent.collectors.dialects.sglang import SGLANG, SGLANG_BEFORE_REALTIME
from agent.collectors.dialects.vllm import REPLICA_LABELS, VLLM_LIKE

_SGLANG = {"ray_sglang:": "sglang:", "ray_sglang_": "sglang:"}

RAY_DIALECTS = (
    # the colon until vLLM 0.10.2, the underscore from 0.11.2
    replace(VLLM_LIKE, kind="ray+vllm", passed_as={"ray_vllm:": "vllm:", "ray_vllm_": "vllm:"}, ask=None),
    *(
        replace(dialect, kind="ray+sglang", passed_as=_SGLANG, rank_labels=(*REPLICA_LABELS, "dp_rank"), ask=None)
        for dialect in (SGLANG, SGLANG_BEFORE_REALTIME)
    ),
)

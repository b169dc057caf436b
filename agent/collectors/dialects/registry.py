"""Registry: every kind of engine that is known, one line each, and which of them an exposition is."""

from __future__ import annotations

from agent.collectors.dialects import nim, sglang, trtllm
from agent.collectors.dialects.dialect import Dialect
from agent.collectors.dialects.dynamo import DYNAMO_FRONTEND, DYNAMO_WORKERS
from agent.collectors.dialects.llamacpp import LLAMACPP
from agent.collectors.dialects.lmdeploy import LMDEPLOY
from agent.collectors.dialects.nim import NIM
from agent.collectors.dialects.pairscope import PAIRSCOPE
from agent.collectors.dialects.ray import RAY_DIALECTS
from agent.collectors.dialects.tgi import TGI
from agent.collectors.dialects.triton import TRITON
from agent.collectors.dialects.vllm import VLLM, VLLM_LIKE
from agent.exposition import Exposition

DIALECTS: tuple[Dialect, ...] = (
    # who passes others' families on comes first
    PAIRSCOPE,
    *DYNAMO_WORKERS,
    DYNAMO_FRONTEND,
    *RAY_DIALECTS,
    sglang.SGLANG,
    sglang.SGLANG_BEFORE_REALTIME,
    sglang.SGLANG_VIA_GATEWAY,
    sglang.SGLANG_BEFORE_REALTIME_VIA_GATEWAY,
    VLLM,
    VLLM_LIKE,
    LMDEPLOY,
    trtllm.TRTLLM,
    TRITON,
    TGI,
    LLAMACPP,
    NIM,
    trtllm.TRTLLM_UNPREFIXED,
)
"""In the order in which they are tried on an unknown endpoint."""

OWNERS = {"tensorrt_llm": "trtllm", "nvidia": "dynamo", "library": "ollama"}
"""What some engines say of themselves in `owned_by` of /v1/models, where that is not their kind's name here."""

KINDS = frozenset(kind for dialect in DIALECTS for kind in dialect.kind.split("+")) - {"vllm-compatible"} | {"ollama"}

OTHER_PATHS = (nim.PATH, trtllm.PATH)
"""Where metrics are, other than at /metrics."""


def detect(exposition: Exposition, kind: str = "auto") -> Dialect | None:
    """The dialect that the exposition is in; with a given kind, one of that kind or none."""
    return next((d for d in DIALECTS if _is(d, kind) and d.speaks(exposition)), None)


def _is(dialect: Dialect, kind: str) -> bool:
    """A kind stands for the engine wherever it runs ("vllm" for "ray+vllm"), and for who runs it."""
    return kind in ("auto", dialect.kind, *dialect.kind.split("+"), dialect.kind.removesuffix("-compatible"))

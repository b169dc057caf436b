"""A server's launch line against what its program takes: flags that no version has, that are gone, or that do something else.

Facts of vLLM's argument parser, read in the packages of 0.4.2 to 0.32: nothing here is about one deployment.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

UNKNOWN = frozenset(
    ("--tokenizer_mode", "--use-flash-attn", "--awq-ckpt-path", "-wbits", "--wbits", "-group-size", "--group-size")
)
"""Refused at the start: underscores by the plain parser of that time, the others by every version."""

GONE = frozenset(("--use-v2-block-manager",))
EAGER = frozenset(("--enforce-eager", "--disable-cuda-graph"))
"""Kernels are launched one by one instead of as a captured graph."""
KV_TYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16")
DEMO = "vllm.entrypoints.api_server"


def findings(text: str) -> list[tuple[str, str]]:
    """(key of `rules.evidence.launch_*`, the flag) of everything in the line that is not what it seems; in the order of the line."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    found: list[tuple[str, str]] = []
    for place, word in enumerate(words):
        flag, has_value, value = word.partition("=")
        if not has_value and place + 1 < len(words) and not words[place + 1].startswith("-"):
            value = words[place + 1]
        if flag in UNKNOWN:
            found.append(("unknown", flag))
        elif flag in GONE:
            found.append(("gone", flag))
        elif flag == "--kv-cache-dtype" and value not in KV_TYPES:
            found.append(("kv_type", f"{flag} {value}"))
        elif flag == "--gpu-memory-utilization":
            found.append(("share", f"{flag} {value}"))
        elif flag in EAGER:
            found.append(("eager", flag))
        elif flag == "--disable-log-stats":
            found.append(("no_stats", flag))
        elif word == DEMO:
            found.append(("demo", word))
    return found


REFUSED = frozenset(("unknown", "gone", "kv_type"))
"""With these the server does not start, or not any more."""

SAID: Mapping[str, str] = {
    "unknown": "launch_unknown",
    "gone": "launch_gone",
    "kv_type": "launch_kv_type",
    "share": "launch_share",
    "eager": "launch_eager",
    "no_stats": "launch_no_stats",
    "demo": "launch_demo",
}

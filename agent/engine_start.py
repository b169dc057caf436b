"""Engine start: how far an engine has come, by its log, while it does not answer yet."""

from __future__ import annotations

import re

_STAGES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (stage, re.compile(pattern, re.IGNORECASE))
    for stage, pattern in (
        # in words that vLLM, SGLang, TGI, TensorRT-LLM, LMDeploy and llama.cpp have in common
        ("download", r"\bdownload(ing)?\b|fetching \d+ files|\.safetensors: +\d+%"),
        ("graphs", r"captur\w* .{0,40}(graph|batch)"),
        ("weights", r"checkpoint shards|load(ing)? (\w+ )?(weights?|model|tensors)|load_tensors|shard to be ready"),
        ("compile", r"\bcompil(e|ing)\b|bytecode transform"),
        ("warm-up", r"\bwarm(ing)?[ -]?up\b"),
    )
)
_PERCENT = re.compile(r"(?<![\d.])(\d{1,3})%")


def stage_of(log: str) -> tuple[str, float | None] | None:
    """The stage that the newest line which names one names, and its progress, 0..1, where the line has a percentage; None where
    no line does.
    """
    for line in reversed(log.splitlines()):
        for stage, pattern in _STAGES:
            if pattern.search(line):
                percent = _PERCENT.search(line)
                share = int(percent.group(1)) / 100 if percent else None
                return stage, share if share is None or share <= 1 else None
    return None

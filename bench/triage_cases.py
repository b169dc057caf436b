"""Published faults and claims as cases with a known answer: each told as signals, the right cause or none, and words it must say.

A fault has a twin: the same load without it. A claim is something that was published and can't be; its verdict must contradict it with
the true figure, and what is true of the same thing must pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rules.signals.judging import judge_signals
from rules.signals.reading import parse
from rules.verdict import Diagnosis

Told = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Case:
    """`says`: pieces of the evidence in English. `twin`: what must give no verdict."""

    name: str
    what: str
    told: Told
    cause: str
    says: tuple[str, ...]
    twin: Told


FAULTS = (
    Case(
        "B3",
        "42 to 18 tokens/s while a log service fills the disk's queue",
        {
            "tps_ratio": 18 / 42,
            "psi_io_pct": 38,
            "disk_busy_pct": 99,
            "temp_c": 61,
            "sm_ratio": 1.0,
            "power_ratio": 0.7,
            "util_pct": 71,
            "flags": [],
        },
        "storage",
        ("the disk is busy 99 %", "resident weights are not read again"),
        {"tps_ratio": 1.0, "psi_io_pct": 38, "disk_busy_pct": 99, "temp_c": 61, "util_pct": 97, "flags": []},
    ),
    Case(
        "B16",
        "out of memory with 12 GB free, in blocks of 8 GB at most, at a prompt of 128K",
        {
            "oom": True,
            "vram_free_mib": 12_288,
            "mem_used_mib": 28_672,
            "largest_free_gb": 8,
            "model": "qwen2-7b",
            "context_tokens": 131_072,
        },
        "memory_kv",
        ("12.9 GB were free", "largest free block is 8.0 GB", "takes 7.52 GB"),
        {
            "vram_free_mib": 12_288,
            "mem_used_mib": 28_672,
            "tps_ratio": 1.0,
            "model": "qwen2-7b",
            "context_tokens": 131_072,
        },
    ),
    Case(
        "B20",
        "a slow tokenizer, 180 ms at batch 64, beside GPU-Util 92 %",
        {
            "tps_ratio": 0.7,
            "ttft_s": 0.31,
            "tokenize_s": 0.18,
            "util_pct": 92,
            "flags": [],
            "temp_c": 63,
            "running": 64,
        },
        "host_cpu",
        ("reading the text takes 0.18 s", "doesn't say that the GPU is the limit"),
        {
            "tps_ratio": 1.0,
            "ttft_s": 0.31,
            "tokenize_s": 0.009,
            "util_pct": 92,
            "flags": [],
            "temp_c": 63,
            "running": 64,
        },
    ),
    Case(
        "B34",
        "GPU-Util between 15 and 95 % while requests come evenly",
        {"ttft_ratio": 3.2, "util_swing_pct": 80, "util_pct": 55, "running_cv": 0.62, "arrivals_cv": 0.08, "flags": []},
        "scheduling",
        ("swings by 80 points", "while requests come evenly"),
        {"ttft_ratio": 1.0, "util_swing_pct": 80, "util_pct": 55, "running_cv": 0.62, "arrivals_cv": 0.5, "flags": []},
    ),
    Case(
        "B37",
        "5.2 s to the first token right after a start, 80 ms from then on",
        {"uptime_s": 12, "ttft_ratio": 5.2 / 0.08, "ttft_s": 5.2, "running": 1, "waiting": 0},
        "cold_start",
        ("up for 12 s",),
        {"uptime_s": 12, "ttft_ratio": 1.1, "ttft_s": 0.088, "running": 1, "waiting": 0},
    ),
    Case(
        "B38",
        "two ranks of one group, busy 95 and 30 % of the time",
        {"tp": 2, "rank_util": [95, 30], "tps_ratio": 0.6, "flags": []},
        "pcie_link",
        ("busy 95 % and 30 %", "wait for each other"),
        {"tp": 2, "rank_util": [95, 93], "tps_ratio": 1.0, "flags": []},
    ),
)

LAUNCH = (
    "python -m vllm.entrypoints.api_server --model qwen2-7b --tokenizer_mode auto --kv-cache-dtype fp16 "
    "--gpu-memory-utilization 0.9 --use-v2-block-manager --max-num-seqs 192 --disable-log-stats"
)
SOUND_LAUNCH = "vllm serve qwen2-7b --tokenizer-mode auto --kv-cache-dtype fp8 --max-num-seqs 192"

TRAPS = (
    Case(
        "A21",
        "4K tokens of a 13B model's KV cache moved over 10 GbE in 120 ms",
        {"model": "llama-2-13b", "context_tokens": 4096, "link_gbit_s": 10, "moved_s": 0.12},
        "telemetry",
        ("3.35 GB over 10 Gbit/s take 2.68 s at least", "would need 224 Gbit/s"),
        {"model": "qwen2-7b", "context_tokens": 4096, "link_gbit_s": 10, "moved_s": 0.19},
    ),
    Case(
        "B7",
        "1 GFLOP of a decode step moves 10 MB; 12 MB of MLP weights a layer; 1.2 GFLOP of attention scores",
        {
            "model": "qwen2-7b",
            "running": 4,
            "context_tokens": 2048,
            "flop_per_byte": 100,
            "mlp_mb": 12,
            "scores_gflop": 1.2,
        },
        "telemetry",
        ("does 4 FLOP for each byte", "407 MB, not 12 MB", "0.059 GFLOP, not 1.20", "it waits for memory"),
        {
            "model": "qwen2-7b",
            "running": 4,
            "context_tokens": 2048,
            "flop_per_byte": 4.3,
            "mlp_mb": 407,
            "scores_gflop": 0.06,
        },
    ),
    Case(
        "B11",
        "the KV cache's traffic far exceeds that of the weights, 8 sequences of 4K",
        {"model": "qwen2-7b", "running": 8, "context_tokens": 4096, "kv_to_weights": 3},
        "telemetry",
        ("KV reads are 12 % of the weights'", "KV cache's traffic is not the limit"),
        {"model": "qwen2-7b", "running": 8, "context_tokens": 4096, "kv_to_weights": 0.12},
    ),
    Case(
        "B18",
        "chunks of 8K bring the peak of a 128K prompt down to 3.2 GB",
        {"model": "qwen2-7b", "context_tokens": 131_072, "peak_gb": 3.2},
        "telemetry",
        ("takes 7.5 GB whatever the chunk", "chunks cut activations only"),
        {"model": "qwen2-7b", "context_tokens": 131_072, "peak_gb": 8.4},
    ),
    Case(
        "B32",
        "a launch line with flags that no version has",
        {"launch": LAUNCH, "start_failed": True},
        "software",
        (
            "--tokenizer_mode is no flag",
            "neither saves anything",
            "--use-v2-block-manager was removed",
            "leaves nothing aside",
            "switches the metrics off",
            "demonstration server",
        ),
        {"launch": SOUND_LAUNCH, "tps_ratio": 1.0},
    ),
    Case(
        "B35",
        "a 16K prompt runs out of memory at 65 % used, since its KV cache takes 14 GB",
        {
            "oom": True,
            "model": "qwen2-7b",
            "context_tokens": 16_384,
            "kv_gb": 14,
            "unused_gb": 6,
            "vram_free_mib": 14_336,
            "mem_used_mib": 26_624,
        },
        "memory_kv",
        ("takes 0.94 GB", "14.0 GB is not the KV cache", "holds 6.0 GB that nothing uses", "15.0 GB were free"),
        {"model": "qwen2-7b", "context_tokens": 16_384, "kv_gb": 0.94, "tps_ratio": 1.0},
    ),
)
"""B35 and B32 are incidents with a wrong explanation: the cause is named, and the explanation contradicted beside it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    case: Case
    found: tuple[str, ...]
    missing: tuple[str, ...]  # words that were not said
    on_twin: tuple[str, ...]

    @property
    def right(self) -> bool:
        return self.found[:1] == (self.case.cause,) and not self.missing and not self.on_twin


def judged(case: Case) -> Outcome:
    diagnosis, twin = judge_signals(parse(dict(case.told))), judge_signals(parse(dict(case.twin)))
    said = " ".join(sentences(diagnosis))
    return Outcome(
        case,
        tuple(str(verdict.cause) for verdict in diagnosis.verdicts),
        tuple(words for words in case.says if words not in said),
        tuple(str(verdict.cause) for verdict in twin.verdicts),
    )


def sentences(diagnosis: Diagnosis) -> list[str]:
    """All that the verdicts and the walk say."""
    lines = [entry for verdict in diagnosis.verdicts for entry in verdict.evidence]
    lines += [entry for step in diagnosis.steps for entry in step.evidence]
    return list(dict.fromkeys(entry.text() for entry in lines))


def told(outcomes: list[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        case = outcome.case
        wrong = [f"missing: {words}" for words in outcome.missing] + [f"twin: {cause}" for cause in outcome.on_twin]
        yield (
            f"{case.name:<4} {'+' if outcome.right else '-'} {case.cause:<11} {', '.join(outcome.found) or 'nothing':<24} "
            f"{case.what} {'; '.join(wrong)}".rstrip()
        )
        yield from (f"       {words}" for words in case.says if words not in outcome.missing)
    faults = [outcome for outcome in outcomes if outcome.case in FAULTS]
    traps = [outcome for outcome in outcomes if outcome.case in TRAPS]
    yield (
        f"cases: {sum(o.right for o in faults)}/{len(faults)} faults named with a silent twin, "
        f"{sum(o.right for o in traps)}/{len(traps)} claims contradicted with the true figure"
    )

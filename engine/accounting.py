"""Operations and bytes of a step, counted from what was planned: the numerators of MFU and MBU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.scheduler import Row


@dataclass(frozen=True, slots=True)
class Work:
    """What one step has to do at least."""

    flops: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Peaks:
    """What this device reached in a short probe at start: FLOP/s of a large product, bytes/s of reading memory."""

    flops_per_s: float
    bytes_per_s: float


def utilisation(work: Work, seconds: float, peaks: Peaks) -> tuple[float, float]:
    """(MFU, MBU) in %: operations/s over the peak (Chowdhery et al. 2022, PaLM, appendix B, whose numerator counts the model's
    operations only, not recomputed ones) and bytes/s over the peak (Databricks 2023, "LLM Inference Performance Engineering").
    """
    return (
        100.0 * work.flops / (seconds * peaks.flops_per_s),
        100.0 * work.bytes / (seconds * peaks.bytes_per_s),
    )


def least_s(work: Work, peaks: Peaks) -> float:
    """Seconds that this work takes at least: the roofline of Williams, Waterman and Patterson (2009)."""
    return max(work.flops / peaks.flops_per_s, work.bytes / peaks.bytes_per_s)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Constants of one loaded model."""

    layer_weights: int  # numbers in all layers' matrices
    head_weights: int
    layer_bytes: int  # of the same, as stored
    head_bytes: int
    embedding_row_bytes: int
    kv_bytes_per_token: int
    attention_width: int  # layers x heads x head_dim
    window: int | None = None
    local_share: float = 0.0  # of the layers, that attend to the last `window` tokens only

    def of(self, rows: Iterable[Row]) -> Work:
        """Work of one step.

        FLOPs: 2 per weight and token, 2 per head weight and sampled token, 4 x layers x heads x head_dim per token and token
        it attends to (Q K^T and the weighted sum of V). Bytes: every weight once per step (the head only if something is
        sampled), the embedding rows, the cache of each row's context read once, K and V of new tokens written. Layers with a
        window attend to and read what is within it. Activations are left out: they stay in the cache of the processor.
        """
        tokens = sampled = 0
        attended = read = 0.0
        for row in rows:
            tokens += row.count
            sampled += row.num_samples
            out_of_window = unread = 0
            if self.window is not None and row.context > self.window:
                unread = max(0, row.start + 1 - self.window)  # what not even the row's first token sees
                less = row.context - self.window  # what its last one doesn't see; each one before it misses one less
                out_of_window = (unread + less) * (less - unread + 1) // 2
            attended += row.count * row.start + row.count * (row.count + 1) // 2 - self.local_share * out_of_window
            read += row.context - self.local_share * unread
        flops = 2 * self.layer_weights * tokens + 2 * self.head_weights * sampled + 4 * self.attention_width * attended
        moved = (
            self.layer_bytes
            + (self.head_bytes if sampled else 0)
            + tokens * self.embedding_row_bytes
            + (read + tokens) * self.kv_bytes_per_token
        )
        return Work(round(flops), round(moved))

"""Figures that the model's shape or a link contradicts: told numbers that can't be true, with what they would have to be."""

from __future__ import annotations

from rules.evidence import Evidence, TellEvidence, value
from rules.finding import Sign, line
from rules.priors import Strength
from rules.shape import Shape, decode_flop_per_byte, moved_s
from rules.thresholds import Bar
from rules.verdict import Line

GB = 1e9


def contradicted(evidence: Evidence, bar: Bar) -> list[Sign]:
    """One strong sign for each figure that is told and can't be."""
    told = evidence.tells
    if told is None:
        return []
    lines = [_moved(told, bar), _intensity(evidence, told, bar)]
    if told.shape is not None:
        lines += [
            _peak(told, told.shape),
            _kv_size(told, told.shape, bar),
            _kv_traffic(evidence, told, told.shape, bar),
            _mlp(told, told.shape, bar),
            _work(evidence, told, told.shape, bar),
        ]
    return [Sign(Strength.STRONG, seen) for seen in lines if seen is not None]


def kv_line(told: TellEvidence | None) -> Line | None:
    """What the KV cache of the told context really takes."""
    if told is None or told.shape is None or told.context_tokens is None:
        return None
    size = told.shape.kv_bytes(told.context_tokens)
    return line("kv_takes", "engine.kv_used_pct", tokens=told.context_tokens, gb=size / GB)


def kv_share_line(evidence: Evidence) -> Line | None:
    """The KV cache's part of what a decode step reads, where model, context and batch are told."""
    told = evidence.tells
    batch = value(evidence.engine.running) if evidence.engine else None
    if told is None or told.shape is None or told.context_tokens is None or not batch:
        return None
    share = told.shape.kv_to_weights(batch, told.context_tokens)
    kv, weights = told.shape.kv_bytes(batch * told.context_tokens), told.shape.weight_bytes
    return line("kv_traffic", "engine.kv_used_pct", kv_gb=kv / GB, weights_gb=weights / GB, pct=100 * share)


def _apart(bar: Bar, told: float, true: float) -> bool:
    """Off by more than units and rounding explain, up or down."""
    if told <= 0 or true <= 0:
        return told != true
    return bar.reached("telemetry.figure_apart", max(told / true, true / told))


def _moved(told: TellEvidence, bar: Bar) -> Line | None:
    """A transfer in less time than its link takes for the bytes."""
    size = told.moved_bytes
    if size is None and told.shape is not None and told.context_tokens is not None:
        size = told.shape.kv_bytes(told.context_tokens)
    if size is None or told.moved_s is None or not told.link_gbit_s:
        return None
    least_s = moved_s(size, told.link_gbit_s)
    if least_s <= told.moved_s * bar.enter("telemetry.figure_apart"):
        return None
    return line(
        "moves_too_fast",
        "",
        gb=size / GB,
        gbit_s=told.link_gbit_s,
        least_s=least_s,
        told_s=told.moved_s,
        needed_gbit_s=told.link_gbit_s * least_s / told.moved_s if told.moved_s > 0 else 0.0,
    )


def _peak(told: TellEvidence, shape: Shape) -> Line | None:
    """A peak below what the KV cache alone takes: chunks cut activations, and the cache must be there whole."""
    if told.peak_bytes is None or told.context_tokens is None:
        return None
    size = shape.kv_bytes(told.context_tokens)
    if told.peak_bytes >= size:
        return None
    return line("peak_too_low", "", told_gb=told.peak_bytes / GB, kv_gb=size / GB, tokens=told.context_tokens)


def _kv_size(told: TellEvidence, shape: Shape, bar: Bar) -> Line | None:
    if told.kv_bytes is None or told.context_tokens is None:
        return None
    size = shape.kv_bytes(told.context_tokens)
    if not _apart(bar, told.kv_bytes, size):
        return None
    return line("kv_size_wrong", "", told_gb=told.kv_bytes / GB, kv_gb=size / GB, tokens=told.context_tokens)


def _kv_traffic(evidence: Evidence, told: TellEvidence, shape: Shape, bar: Bar) -> Line | None:
    batch = value(evidence.engine.running) if evidence.engine else None
    if told.kv_to_weights is None or told.context_tokens is None or not batch:
        return None
    share = shape.kv_to_weights(batch, told.context_tokens)
    if not _apart(bar, told.kv_to_weights, share):
        return None
    return line("kv_traffic_wrong", "", told_pct=100 * told.kv_to_weights, pct=100 * share)


def _mlp(told: TellEvidence, shape: Shape, bar: Bar) -> Line | None:
    if told.mlp_bytes is None or not _apart(bar, told.mlp_bytes, shape.mlp_bytes):
        return None
    return line("mlp_bytes_wrong", "", told_mb=told.mlp_bytes / 1e6, mb=shape.mlp_bytes / 1e6)


def _work(evidence: Evidence, told: TellEvidence, shape: Shape, bar: Bar) -> Line | None:
    """Attention scores of a layer and step, in FLOP."""
    batch = value(evidence.engine.running) if evidence.engine else None
    if told.scores_flop is None or told.context_tokens is None or not batch:
        return None
    true = shape.scores_flop(batch, told.context_tokens)
    if not _apart(bar, told.scores_flop, true):
        return None
    return line("scores_wrong", "", told_gflop=told.scores_flop / 1e9, gflop=true / 1e9)


def _intensity(evidence: Evidence, told: TellEvidence, bar: Bar) -> Line | None:
    """FLOP for each byte of a decode step: as many as sequences, whatever the model."""
    batch = value(evidence.engine.running) if evidence.engine else None
    if told.flop_per_byte is None or not batch or not _apart(bar, told.flop_per_byte, decode_flop_per_byte(batch)):
        return None
    return line("intensity_wrong", "", told=told.flop_per_byte, true=decode_flop_per_byte(batch), batch=batch)

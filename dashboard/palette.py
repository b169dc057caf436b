"""The colours, for light and dark. The lines are Okabe and Ito's, which colour-blind people can tell apart; red means a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Palette:
    """`line` and `text` by a trace's role; `text` is the same hue with a contrast of 4.5 or more on `paper`."""

    paper: str
    ink: str
    dim: str
    grid: str
    problem: str
    lost: str  # fill between what is spent and what is yielded
    band: str  # fill of an incident
    unknown: str  # a cell that has no report
    simulated: str  # ground of the badge on simulated data
    on_simulated: str
    line: Mapping[str, str]
    text: Mapping[str, str]
    reasons: tuple[str, ...]  # throttle reasons, in the order of telemetry.pairs.THROTTLE_REASONS
    scale: tuple[tuple[float, str], ...]  # % of expected, from 60 to 120; 100 is at 2/3


LIGHT = Palette(
    paper="#ffffff",
    ink="#212529",
    dim="#5c636a",
    grid="#eceef0",
    problem="#c92a2a",
    lost="rgba(213, 94, 0, 0.22)",
    band="rgba(201, 42, 42, 0.07)",
    unknown="#ced4da",
    simulated="#ffd43b",
    on_simulated="#212529",
    line={
        "tokens": "#0072B2",
        "util": "#E69F00",
        "temp": "#D55E00",
        "inlet": "#56B4E9",
        "clock": "#009E73",
        "kv": "#CC79A7",
        "psu": "#868e96",
        "queue": "#868e96",
        "limit": "#868e96",
    },
    text={
        "tokens": "#0068a3",
        "util": "#8a5f00",
        "temp": "#b34f00",
        "inlet": "#1b76ab",
        "clock": "#007a59",
        "kv": "#a34b7d",
        "psu": "#5c636a",
        "queue": "#5c636a",
        "limit": "#5c636a",
    },
    reasons=("#D55E00", "#E69F00", "#d9c000", "#6741d9", "#c92a2a", "#56B4E9", "#009E73", "#868e96", "#868e96"),
    scale=(
        (0.0, "#8f0e0e"),
        (0.25, "#d94a3a"),
        (0.5, "#f2b08c"),
        (0.667, "#dbe9f2"),
        (0.8, "#86bad8"),
        (1.0, "#2f7fb0"),
    ),
)

DARK = Palette(
    paper="#1d1f22",
    ink="#e9ecef",
    dim="#a6adb4",
    grid="#2d3136",
    problem="#ff6b6b",
    lost="rgba(232, 120, 30, 0.26)",
    band="rgba(255, 107, 107, 0.09)",
    unknown="#454b52",
    simulated="#ffd43b",
    on_simulated="#212529",
    line={
        "tokens": "#3d9be0",
        "util": "#E69F00",
        "temp": "#e8782a",
        "inlet": "#56B4E9",
        "clock": "#14b387",
        "kv": "#d68db5",
        "psu": "#9aa1a8",
        "queue": "#9aa1a8",
        "limit": "#9aa1a8",
    },
    text={
        "tokens": "#5badea",
        "util": "#eeb02f",
        "temp": "#f08a45",
        "inlet": "#6cbdec",
        "clock": "#2dc49a",
        "kv": "#de9fc1",
        "psu": "#a6adb4",
        "queue": "#a6adb4",
        "limit": "#a6adb4",
    },
    reasons=("#e8782a", "#E69F00", "#e5d434", "#8f74f5", "#ff6b6b", "#56B4E9", "#14b387", "#9aa1a8", "#9aa1a8"),
    # the pale middle of the light scale would glow here and read as alarm
    scale=(
        (0.0, "#e03131"),
        (0.25, "#b83a2e"),
        (0.5, "#7d4a38"),
        (0.667, "#2b4250"),
        (0.8, "#2f6285"),
        (1.0, "#3d9be0"),
    ),
)


def palette(theme: str) -> Palette:
    return DARK if theme == "dark" else LIGHT

"""What quantisation costs a model, in figures, what it may cost at most, and where measured figures are kept."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from engine.kernels.build import HEADERS, SOURCE, cache_folder, own_folder, written_whole

SAMPLES, SAMPLE_BYTES = 64, 1 << 16
"""What is read of each file for a checkpoint's fingerprint: other weights differ everywhere."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What a scheme may cost at most: perplexity in % of that of full weights, Kullback-Leibler divergence in nats a token."""

    perplexity_pct: float
    kl: float


BARS = {"int8": Bar(1.0, 0.02), "int4": Bar(5.0, 0.1)}


@dataclass(frozen=True, slots=True)
class Quality:
    """Of a model with quantised weights against the same with full ones, over `tokens` next tokens."""

    scheme: str
    tokens: int
    full_perplexity: float
    perplexity: float
    kl: float  # nats: sum of p log(p / q), p with full weights, mean over tokens
    top1: float  # share of positions where both hold the same token for the likeliest

    @property
    def perplexity_pct(self) -> float:
        """How much perplexity has risen, in %."""
        return 100 * (self.perplexity / self.full_perplexity - 1)

    @property
    def passes(self) -> bool:
        bar = BARS[self.scheme]
        return self.perplexity_pct <= bar.perplexity_pct and self.kl <= bar.kl  # NaN does not pass

    def figures(self) -> dict[str, object]:
        """For the sentences about it."""
        bar = BARS[self.scheme]
        return asdict(self) | {
            "perplexity_pct": self.perplexity_pct,
            "most_pct": bar.perplexity_pct,
            "most_kl": bar.kl,
            "top1_pct": 100 * self.top1,
        }


class PoorQuality(Exception):
    """The scheme that is asked for costs this model more than it may."""

    def __init__(self, quality: Quality) -> None:
        super().__init__(f"{quality.scheme}: perplexity {quality.perplexity_pct:+.1f} %, KL {quality.kl:.3f}")
        self.quality = quality


def text() -> str:
    """The bundled text: prose, instructions, dialogue, code, data, a letter, a log; about 2,000 tokens."""
    return files(__package__).joinpath("quality.txt").read_text("utf-8")


def fingerprint(path: Path) -> str:
    """Of a checkpoint's file or folder: names, sizes and samples of the content of the files that make the model."""
    inside = (file for pattern in ("*.safetensors", "*.json") for file in path.glob(pattern))
    digest = hashlib.sha256()
    for file in sorted(inside) if path.is_dir() else (path,):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            for number in range(SAMPLES):
                opened.seek(number * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
                digest.update(opened.read(SAMPLE_BYTES))
                if size <= SAMPLE_BYTES:
                    break
    return digest.hexdigest()


class QualityCache:
    """Remembers measured quality, one small file for each checkpoint, scheme and kernel, in the user's cache folder."""

    def __init__(self, checkpoint: str) -> None:
        self._checkpoint = checkpoint

    def get(self, scheme: str, kernel: str) -> Quality | None:
        """None when it is not known, or what stands there can't be understood."""
        try:
            found = json.loads(self._path(scheme, kernel).read_text("utf-8"))
            quality = Quality(**found)
            return quality if quality.scheme == scheme and math.isfinite(quality.kl + quality.perplexity) else None
        except (OSError, ValueError, TypeError):
            return None

    def put(self, quality: Quality, kernel: str) -> None:
        """Where nothing can be kept, nothing is: it is measured again next time."""
        try:
            path = self._path(quality.scheme, kernel)
            with written_whole(path) as target:
                target.write_text(json.dumps(asdict(quality)), "utf-8")
        except OSError:
            return

    def _path(self, scheme: str, kernel: str) -> Path:
        parts = (self._checkpoint, scheme, kernel, hashlib.sha256(text().encode()).hexdigest(), _code())
        key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
        return own_folder(cache_folder()) / f"quality-{key}.json"


@cache
def _code() -> str:
    """Changes with the code that decides what a scheme costs."""
    names = ("numbers.py", "quantized.py", "kernelchoice.py", "loader.py", "fusedstep.py")
    kernels = (f"kernels/{name}" for name in (SOURCE, *HEADERS))
    room = files(__package__)
    return hashlib.sha256(b"".join(room.joinpath(name).read_bytes() for name in (*names, *kernels))).hexdigest()

"""The output to expect for this load: learned from the pair's own healthy spans and from peers, with its uncertainty.

What is learned is the time of one engine step, seconds, as a function of the batch B (sequences running), the prompt tokens that
come with each output token (r) and the context C (tokens a sequence):

    s(B, r, C) = level * B^0.4 * shape(log2 B)  +  tau * B * r  +  kappa * B * C

Output tokens/s is B / s. The first term is reading weights and computing the batch, the second is prefill between decode steps,
the third is reading the KV cache; `shape` is piecewise linear over powers of two. It follows the load: fewer requests are no loss.
The fit is a Bayesian linear regression on relative errors with Huber weights, so that a few bad spans move nothing, and so that its
uncertainty grows where nothing was seen. Prior slopes come from published sweeps (step time x1.1 to x1.8 for each doubling of B).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

KNOTS = 11  # batch 1 .. 1024
TAU, KAPPA = KNOTS, KNOTS + 1
SIZE = KNOTS + 2
GROWTH = 0.4  # prior exponent of step time over batch
SHAPE_SD = 0.25  # prior change of `shape` from knot to knot
SHARE_MEAN, SHARE_SD = 0.15, 0.15  # prior share of a step spent on prefill, and on the KV cache, at the usual load
KEPT_PER_BATCH = 48  # healthy spans kept for each power of two of B: a quiet night does not wash out the day
READY = 6  # spans of 10 s; with the 60 s held back this is two minutes of healthy history
PEER_SPREAD = 0.08  # part-to-part spread of one card model, relative (published survey of 8 % mean)
FLOOR = 0.01  # no expected value is surer than this
REFIT_AFTER = 3  # new spans


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine was asked to do and did, over one span."""

    running: float  # sequences, mean
    waiting: float
    tokens_per_s: float
    prompt_tokens_per_s: float | None  # computed ones: without those found in the prefix cache
    context: float | None  # tokens a sequence, mean

    @property
    def batch(self) -> float:
        """Sequences in a step. Below one, the engine idles between requests and steps with one."""
        return max(self.running, 1.0)

    @property
    def step_s(self) -> float | None:
        """Seconds a step took, from what came out; None when nothing did."""
        if self.tokens_per_s <= 0 or self.running <= 0:
            return None
        return self.running / self.tokens_per_s

    @property
    def prompt_share(self) -> float | None:
        """Computed prompt tokens for each output token."""
        if self.prompt_tokens_per_s is None or self.tokens_per_s <= 0:
            return None
        return self.prompt_tokens_per_s / self.tokens_per_s


@dataclass(frozen=True, slots=True)
class Point:
    """One healthy span."""

    batch: float
    share: float
    context: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Expected:
    """Expected step time at a load, seconds, and its relative standard error. `baseline`: history, peers or warming."""

    step_s: float | None
    spread: float
    baseline: str


WARMING = Expected(None, math.inf, "warming")


def point_of(load: Load) -> Point | None:
    """The span as a point to learn from; None when too little ran to say anything."""
    step = load.step_s
    if step is None or load.running < 0.3:
        return None
    return Point(load.batch, load.prompt_share or 0.0, load.context or 0.0, step)


class StepModel:
    """What one pair has learned. Feed it healthy spans only."""

    def __init__(self) -> None:
        self._spans: dict[int, deque[Point]] = {}
        self._new = 0
        self._level = 0.0
        self._share_ref = 1.0
        self._context_ref = 1.0
        self._weights: list[float] = []
        self._covariance: list[list[float]] = []
        self._share_limits = (0.0, math.inf)
        self._context_limits = (0.0, math.inf)
        self.batch_max = 0.0
        self.noise = 0.05

    @property
    def ready(self) -> bool:
        return bool(self._weights)

    def points(self) -> list[Point]:
        return [point for spans in self._spans.values() for point in spans]

    def learn(self, points: Sequence[Point]) -> None:
        for point in points:
            bucket = round(math.log2(point.batch))
            self._spans.setdefault(bucket, deque(maxlen=KEPT_PER_BATCH)).append(point)
            self._new += 1
        if self._new >= REFIT_AFTER or not self._weights:
            self._fit()

    def usual(self, point: Point) -> Point:
        """The same batch with prompt share and context held inside the range that healthy spans had."""
        low, high = self._share_limits
        c_low, c_high = self._context_limits
        return Point(
            point.batch, min(max(point.share, low), high), min(max(point.context, c_low), c_high), point.step_s
        )

    def predict(self, at: Point) -> Expected:
        if not self._weights:
            return WARMING
        row = self._row(at)
        step = sum(self._weights[index] * value for index, value in row)
        if not (math.isfinite(step) and step > 0):
            return WARMING
        variance = sum(self._covariance[i][j] * x * y for i, x in row for j, y in row) / step / step
        spread = math.sqrt(max(variance, 0.0) + self.noise**2 / 2 + FLOOR**2)
        return Expected(step, spread, "history") if math.isfinite(spread) else WARMING

    def _row(self, at: Point) -> list[tuple[int, float]]:
        place = min(max(math.log2(at.batch), 0.0), KNOTS - 1.0)
        knot = min(int(place), KNOTS - 2)
        weight = place - knot
        scale = self._level * at.batch**GROWTH
        row = [(knot, scale * (1 - weight)), (knot + 1, scale * weight)]
        reference = self._level  # so that tau and kappa are shares of a step, too
        row.append((TAU, reference * at.batch * at.share / self._share_ref))
        row.append((KAPPA, reference * at.batch * at.context / self._context_ref))
        return row

    def _fit(self) -> None:
        points = self.points()
        self._new = 0
        if len(points) < READY:
            return
        self._level = statistics.median(point.step_s / point.batch**GROWTH for point in points)
        growth = statistics.median(point.batch for point in points) ** GROWTH
        self._share_ref = max(statistics.median(p.batch * p.share for p in points), 1e-9) / growth
        self._context_ref = max(statistics.median(p.batch * p.context for p in points), 1e-9) / growth
        shares, contexts = sorted(p.share for p in points), sorted(p.context for p in points)
        self._share_limits = (_quantile(shares, 0.05) * 0.8, _quantile(shares, 0.95) * 1.25)
        self._context_limits = (_quantile(contexts, 0.05) * 0.8, _quantile(contexts, 0.95) * 1.25)
        self.batch_max = _quantile(sorted(p.batch for p in points), 0.98)
        rows = [(self._row(point), point.step_s) for point in points]
        used = {TAU: any(p.share > 0 for p in points), KAPPA: any(p.context > 0 for p in points)}
        self._solve(rows, [index for index in (TAU, KAPPA) if not used[index]])

    def _solve(self, rows: Sequence[tuple[list[tuple[int, float]], float]], off: list[int]) -> None:
        weights = [1.0] * len(rows)
        noise = 0.05
        theta: list[float] = []
        covariance: list[list[float]] = []
        for _ in range(3):
            matrix, target = _prior(off)
            for (row, step), weight in zip(rows, weights, strict=True):
                precision = 0.5 * weight / noise**2  # neighbouring spans are not independent
                for i, x in row:
                    target[i] += precision * x / step
                    for j, y in row:
                        matrix[i][j] += precision * x * y / step**2
            inverse = _inverse(matrix)
            if inverse is None:
                return  # spans too far apart to be of one engine: what was known stands
            covariance = inverse
            theta = [sum(c * t for c, t in zip(line, target, strict=True)) for line in covariance]
            residuals = [1 - sum(theta[i] * x for i, x in row) / step for row, step in rows]
            noise = max(1.4826 * statistics.median(abs(r) for r in residuals), FLOOR)
            weights = [min(1.0, 1.5 * noise / max(abs(r), 1e-12)) for r in residuals]
        negative = [index for index in (TAU, KAPPA) if theta[index] < 0 and index not in off]
        if negative:  # neither prefill nor context makes a step faster
            self._solve(rows, off + negative)
            return
        self._weights, self._covariance, self.noise = theta, covariance, noise

    def state(self) -> list[list[float]]:
        """The spans it stands on, for the state file; `StepModel.of` is the inverse."""
        return [
            [round(p.batch, 3), round(p.share, 4), round(p.context, 1), float(f"{p.step_s:.5g}")] for p in self.points()
        ]

    @staticmethod
    def of(state: Sequence[Sequence[float]]) -> StepModel:
        """ValueError for anything that is not four finite numbers a span."""
        model = StepModel()
        points = []
        for entry in state:
            batch, share, context, step = (float(value) for value in entry)
            if not (batch >= 1 and step > 0 and all(map(math.isfinite, (batch, share, context, step)))):
                raise ValueError(f"a learned span can't be {list(entry)}")
            points.append(Point(batch, share, context, step))
        if points:
            model.learn(points)
        return model


def expect(at: Point, own: StepModel | None, peers: Sequence[StepModel]) -> Expected:
    """Expected step time at `at`: the pair's own history where it is sure, peers of the same kin where it is not, or warming."""
    mine = own.predict(at) if own is not None else WARMING
    if mine.step_s is not None and mine.spread < PEER_SPREAD:
        return mine
    others = [answer for answer in (peer.predict(at) for peer in peers[:9]) if answer.step_s is not None]
    if not others:
        return mine
    logs = [math.log(answer.step_s) for answer in others if answer.step_s is not None]
    middle = statistics.median(logs)
    apart = 1.4826 * statistics.median(abs(value - middle) for value in logs)
    spread = math.sqrt(PEER_SPREAD**2 + apart**2 + statistics.median(answer.spread for answer in others) ** 2)
    if mine.step_s is None:
        return Expected(math.exp(middle), spread, "peers")
    w_mine, w_theirs = mine.spread**-2, spread**-2
    mixed = math.exp((w_mine * math.log(mine.step_s) + w_theirs * middle) / (w_mine + w_theirs))
    return Expected(mixed, (w_mine + w_theirs) ** -0.5, "history" if w_mine >= w_theirs else "peers")


def _prior(off: Sequence[int]) -> tuple[list[list[float]], list[float]]:
    matrix = [[0.0] * SIZE for _ in range(SIZE)]
    target = [0.0] * SIZE
    for knot in range(KNOTS):
        matrix[knot][knot] += 1.0  # shape ~ 1 +- 1
        target[knot] += 1.0
        if knot:
            tie = SHAPE_SD**-2
            matrix[knot][knot] += tie
            matrix[knot - 1][knot - 1] += tie
            matrix[knot][knot - 1] -= tie
            matrix[knot - 1][knot] -= tie
    for index in (TAU, KAPPA):
        mean, sd = (0.0, 1e-6) if index in off else (SHARE_MEAN, SHARE_SD)
        matrix[index][index] += sd**-2
        target[index] += mean * sd**-2
    return matrix, target


def _inverse(matrix: list[list[float]]) -> list[list[float]] | None:
    """Inverse of a symmetric positive definite matrix by Gauss-Jordan: SIZE is small and the prior keeps it regular.

    None when rounding has eaten that, as it does with readings that are many orders of magnitude apart.
    """
    size = len(matrix)
    work = [[*row, *(1.0 if i == j else 0.0 for j in range(size))] for i, row in enumerate(matrix)]
    for i in range(size):
        pivot = work[i][i]
        if not (math.isfinite(pivot) and pivot > 1e-12):
            return None
        work[i] = [value / pivot for value in work[i]]
        line = work[i]
        for j in range(size):
            factor = work[j][i]
            if j != i and factor:
                work[j] = [value - factor * own for value, own in zip(work[j], line, strict=True)]
    return [row[size:] for row in work]


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

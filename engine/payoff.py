"""Whether speculation pays just now: what steps with drafts bring and take, beside steps without, measured all the time."""

from __future__ import annotations

from dataclasses import dataclass, field

PLAIN_FIRST = 4
"""Steps without drafts that must have been timed before any with them."""

TRIAL = 12
"""Steps with drafts after which a trial ends; one that goes very badly ends after a third of them."""

ENTER, LEAVE = 1.05, 1.0
"""A trial must bring so much to be kept, and speculation ends when it brings less than the other: what hovers around
nothing does not switch all the time."""

PLAIN_EVERY = 48
"""Every so many steps with drafts there is one without, so that what they are compared with stays true."""

PAUSE, LONGEST_PAUSE = 64, 2048
"""Steps without drafts after a trial that failed: doubled each time, and from the beginning after one that succeeded."""

WEIGHT = 0.1  # of the newest step in the running means
OUTLIER = 4.0  # a step counts for so many times the mean at most: first times make kernels, neighbours burst in


@dataclass(slots=True)
class Mean:
    """A running mean, arithmetic at first, so that it knows something at once. The first value is forgotten when a lower second
    one comes: in it kernels were made.
    """

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        if self.count <= 2:
            self.value = value if self.count == 1 else min(self.value, value)
            return
        self.value += max(WEIGHT, 1 / self.count) * (min(value, OUTLIER * self.value) - self.value)


@dataclass(slots=True)
class Payoff:
    """At one number of decoding requests. `on` with a `trial` under way means: not yet proven."""

    plain_s: Mean = field(default_factory=Mean)  # of steps without drafts
    drafted_s: Mean = field(default_factory=Mean)  # of steps with drafts, making them included
    tokens: float = 0.0  # running mean of what each request got in a step with drafts
    on: bool = True
    trial: int = TRIAL  # steps of the trial that are left; 0: none is under way
    pause: int = PAUSE  # steps that the next pause lasts
    rest: int = 0  # steps of this pause that are left
    since_plain: int = 0

    @property
    def speedup(self) -> float | None:
        """Tokens/s with drafts by tokens/s without; None as long as one of them is unknown."""
        if not self.plain_s.count or not self.drafted_s.count or not self.drafted_s.value:
            return None
        return self.tokens * self.plain_s.value / self.drafted_s.value

    def wants_drafts(self) -> bool:
        """Whether the next step should have drafts, if there are any."""
        return self.on and self.plain_s.count >= PLAIN_FIRST and self.since_plain < PLAIN_EVERY

    def plain(self, seconds: float) -> None:
        """A step without drafts took so long."""
        self.plain_s.add(seconds)
        self.since_plain = 0
        if not self.on:
            self.rest -= 1
            if self.rest <= 0:
                self.on, self.trial = True, TRIAL
                self.drafted_s, self.tokens = Mean(), 0.0

    def drafted(self, seconds: float, tokens_each: float) -> None:
        """A step with drafts took so long and brought so many tokens a decoding request."""
        self.drafted_s.add(seconds)
        self.tokens += max(WEIGHT, 1 / self.drafted_s.count) * (tokens_each - self.tokens)
        self.since_plain += 1
        speedup = self.speedup
        if speedup is None:
            return
        if self.trial:
            self.trial -= 1
            done = TRIAL - self.trial
            if self.trial and not (done >= TRIAL // 3 and speedup < LEAVE / 2):
                return
            self._judge(speedup >= ENTER)
        elif speedup < LEAVE:
            self._judge(False)

    def _judge(self, pays: bool) -> None:
        self.trial = 0
        if pays:
            self.pause = PAUSE
            return
        self.on, self.rest = False, self.pause
        self.pause = min(2 * self.pause, LONGEST_PAUSE)

"""Speculation: which requests get a draft in the next step and how long, and whether it pays. The engine's thread alone calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.draft import Draft, Proposer
from engine.payoff import Payoff
from engine.request import Request
from engine.scheduler import Row, StepPlan
from engine.stats import SpeculationStats

TRUSTED = 0.3
"""Free guesses are computed for a request of which so large a share came true lately. One whole draft is enough to begin with."""

NEWEST = 0.3
"""Weight of the newest draft in that share."""

FIRST_FREE = 2
"""A free draft is so long at first, and twice as long after each that was right to its end."""


@dataclass(slots=True)
class Record:
    """How one request's drafts have fared."""

    length: int  # of the next draft
    share: float  # of guessed tokens that came true lately
    guess: tuple[int, ...] = ()  # made and not computed: to be judged by what comes
    made_at: int = 0  # tokens of the request when it was made

    def judge(self, accepted: int, drafted: int, most: int) -> None:
        """Of `drafted` guessed tokens so many were right: the next draft is longer after a whole success, else as long as this
        success and one more.
        """
        self.share += NEWEST * (accepted / drafted - self.share)
        if accepted < drafted:
            self.length = max(1, min(accepted + 1, most))
        elif drafted >= self.length:
            self.length = min(2 * self.length, most)


class Speculation:
    """`most` bounds a draft, `context` prompt plus output. `log` hears when it is switched off and on again.

    Payoff is kept for each size of the decoding batch, in powers of two: what pays for one request costs too much for many.
    """

    def __init__(
        self,
        proposer: Proposer,
        most: int,
        context: int,
        stats: SpeculationStats,
        clock: Callable[[], float],
        log: Callable[[str], None] = lambda line: None,
        payoff: Callable[[], Payoff] = Payoff,
    ) -> None:
        self.proposer = proposer
        self.most = most
        self.context = context
        self.stats = stats
        self._clock = clock
        self._log = log
        self._new_payoff = payoff
        self._payoffs: dict[int, Payoff] = {}
        self._records: dict[str, Record] = {}
        self._decoding = 0  # requests that decode in the step under way
        self._drafting_s = 0.0

    def drafts(self, decoding: Sequence[Request]) -> Mapping[str, Draft]:
        """Drafts for the next step, by request id."""
        began, self._decoding = self._clock(), len(decoding)
        wanted = self.proposer.free or self._payoff(len(decoding)).wants_drafts()
        found = self._made(decoding) if decoding and wanted else {}
        self._drafting_s = self._clock() - began
        return found

    def learn(self, plan: StepPlan, chosen: Iterable[tuple[Row, int]], step_s: float) -> None:
        """What a step brought: `chosen` are its tokens, a row once for each."""
        got: dict[str, int] = {}
        for row, _ in chosen:
            got[row.request.id] = got.get(row.request.id, 0) + 1
        drafted = [row for row in plan.rows if row.draft.tokens]
        for row in drafted:
            accepted, tokens = got[row.request.id] - 1, len(row.draft.tokens)
            self._records[row.request.id].judge(accepted, tokens, self.most)
            self.stats.add(self._clock(), tokens, accepted)
        if len(plan.rows) == self._decoding and all(row.known_end - row.start == 1 for row in plan.rows):
            # what was computed for guesses that are still to come is no cost of a step without any
            self._weigh(len(plan.rows), bool(drafted), step_s + bool(drafted) * self._drafting_s, sum(got.values()))

    def forget(self, id: str) -> None:
        """This request has ended."""
        self._records.pop(id, None)
        self.proposer.forget(id)

    def _payoff(self, decoding: int) -> Payoff:
        return self._payoffs.setdefault(decoding.bit_length(), self._new_payoff())

    def _made(self, decoding: Sequence[Request]) -> Mapping[str, Draft]:
        wanted = []
        for request in decoding:
            record = self._records.setdefault(request.id, self._new_record())
            room = min(request.sampling.max_tokens - request.num_output, self.context - request.num_tokens) - 1
            if room > 0 and not self._waits(record, request):
                wanted.append((request, min(record.length, room)))
        drafts = dict(zip((r.id for r, _ in wanted), self.proposer.propose(wanted), strict=True))
        computed = self._payoff(len(decoding)).wants_drafts()
        found = {}
        for request, _ in wanted:
            draft, record = drafts[request.id], self._records[request.id]
            if computed and record.share >= TRUSTED:
                found[request.id] = draft
            elif draft.tokens:
                record.guess, record.made_at = draft.tokens, request.num_tokens
        return found

    def _new_record(self) -> Record:
        return Record(min(FIRST_FREE, self.most), 0.0) if self.proposer.free else Record(self.most, 1.0)

    def _waits(self, record: Record, request: Request) -> bool:
        """Judge a guess that was only made, as far as its tokens have come. Whether it is still open."""
        if not record.guess:
            return False
        came = request.tokens[record.made_at : record.made_at + len(record.guess)]
        right = next((n for n, (a, b) in enumerate(zip(came, record.guess, strict=False)) if a != b), len(came))
        if right == len(came) < len(record.guess):
            return True
        record.judge(right, len(record.guess), self.most)
        record.guess = ()
        return False

    def _weigh(self, decoding: int, drafted: bool, seconds: float, tokens: int) -> None:
        payoff = self._payoff(decoding)
        was_on = payoff.on
        if drafted:
            payoff.drafted(seconds, tokens / decoding)
        else:
            payoff.plain(seconds)
        self.stats.on, self.stats.speedup = payoff.on, payoff.speedup
        if was_on and not payoff.on:
            self._log(
                f"speculation is off with {decoding} decoding: {payoff.speedup or 0:.2f} times the speed without it; "
                f"tried again after {payoff.rest} steps"
            )
        elif payoff.on and not was_on:
            self._log(f"speculation is tried again with {decoding} decoding")

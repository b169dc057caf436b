"""Delivery: the thread that carries samples from the spool to the store, for as long as it takes."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence

from agent.quiet import QuietLog
from agent.spool import Block, Spool
from telemetry.logs import and_then
from telemetry.sample import Sample
from telemetry.store import Rejected, Store, StoreDown, StoreError

log = logging.getLogger(__name__)

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 10.0
"""A page is live again so soon after an outage; 125 hosts then ask some 17 times a second, a seventh of what they do when all is well."""

PATIENCE_S = 300.0
"""What would take longer at the pace of resting is sent without a rest."""

_HOPELESS = 64
"""Attempts at one batch of which none succeeded: its samples are more than one tick's, and not all of them can be bad."""


class Delivery:
    """Carries the newest samples first, then what is left from an outage, newest first too.

    Nothing leaves the spool before the store has it for good. A store that fails is tried again after 1 s, 2 s ... 10 s, each with
    jitter, or as late as it asks for, and told of in at most one log line a minute. A sample that the store refuses for good, or
    that alone makes it fail, is counted in `rejected` and never holds up the others. While it catches up it rests as long as it
    computes, so that the host's engines keep their cores; what it waits for the server is rest enough. The backlog of a long outage
    gets no rest until five minutes of it are left.
    """

    def __init__(
        self,
        spool: Spool,
        open_store: Callable[[], Store],
        *,
        target: str = "store",
        batch_samples: int = 2000,
        monotonic: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        computed_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self.delivered = 0  # samples that the store took
        self.rejected = 0  # samples that it refused for good
        self.errors = 0  # failed attempts
        self.last_error = ""  # empty while all is well
        self._spool = spool
        self._open_store = open_store
        self._target = target
        self._batch_samples = batch_samples
        self._monotonic = monotonic
        self._jitter = jitter
        self._computed_s = computed_s
        self._store: Store | None = None
        self._was_sound = False  # it took something of the batch before
        self._failures = 0  # in a row
        self._failing_since_s: float | None = None
        self._quiet = QuietLog(log, monotonic)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="delivery", daemon=True)

    @property
    def lag_s(self) -> float:
        """Seconds by which the newest sample in the store is behind the newest one taken."""
        return self._spool.lag_s

    @property
    def connected(self) -> bool:
        """Whether the last attempt succeeded."""
        return self._failures == 0

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> bool:
        """Deliver what can still be delivered and end; False when the time is up before, and then the rest waits in the spool."""
        deadline_s = self._monotonic() + timeout_s
        self._spool.commit()
        self._stopping.set()
        self._spool.wake()
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline_s - self._monotonic()))
        return not self._thread.is_alive()

    # --- the thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._spool.wait(0.5) and not self._stopping.is_set():
                self._stopping.wait(self.carry())
        if self.connected:
            with contextlib.suppress(Exception):  # the rest waits in the spool
                self._carry_live()
                self._spool.commit()
        self._close_store()

    def carry(self) -> float:
        """One round: live samples, then one batch of the backlog. The seconds to rest before the next; never raises."""
        computed_s, began_s = self._computed_s(), self._monotonic()
        try:
            live = self._carry_live()
            backlog = self._spool.backlog(self._batch_samples)
            self._send(backlog)
        except Exception as error:  # a defect in a store must not end the delivery
            return self._failed(error)
        self._succeeded()
        if backlog:
            computed_s = self._computed_s() - computed_s
            round_s = self._monotonic() - began_s + computed_s
            return computed_s if round_s * self._spool.waiting_blocks <= PATIENCE_S * len(backlog) else 0.0
        return 0.0 if live else 0.1

    def _carry_live(self) -> int:
        count = 0
        while blocks := self._spool.live(self._batch_samples):
            self._send(blocks)
            count += len(blocks)
            if count > 64:  # the backlog gets its turn
                break
        return count

    def _send(self, blocks: Sequence[Block]) -> None:
        samples: list[Sample] = []
        for block in blocks:
            samples += block.samples()
        held_s = 0.0
        if samples:
            if self._store is None:
                self._store = self._open_store()
            held_s = self._store.durable_after_s
            rejected = self._write(self._store, samples)
            self.delivered += len(samples) - len({id(entry.sample) for entry in rejected})
            if rejected:
                self.rejected += len(rejected)
                first = rejected[0]
                self._spool.rejected_file.add(rejected)
                self._quiet.warning(
                    "rejected",
                    "%s: refused %d samples for good, such as %s of %s: %s",
                    self._target,
                    len(rejected),
                    first.sample.measurement,
                    dict(first.sample.tags),
                    first.reason,
                )
        self._spool.delivered(blocks, held_s)

    def _write(self, store: Store, samples: Sequence[Sample]) -> list[Rejected]:
        """`store.write`, also when one sample makes the store fail with a defect: then the batch is halved until it is alone.

        A sample is to blame only where the store takes others. Where it takes none the defect is the store's, and is raised.
        """
        refused: list[Rejected] = []
        parts, failed, is_sound = [samples], 0, False
        while parts:
            part = parts.pop()
            try:
                refused += store.write(part)
                is_sound = True
            except StoreError:
                raise
            except Exception as error:
                failed += 1
                is_trusted = is_sound or (self._was_sound and len(samples) == 1)
                if not is_trusted and ((len(part) == 1 and not parts) or failed == _HOPELESS):
                    self._was_sound = False
                    raise
                half = len(part) // 2
                if half:
                    parts += [part[half:], part[:half]]
                else:
                    refused.append(Rejected(part[0], f"{type(error).__name__}: {error}"))
        self._was_sound = is_sound
        return refused

    def _failed(self, error: Exception) -> float:
        self.errors += 1
        self._failures += 1
        self.last_error = str(error)
        if self._failing_since_s is None:
            self._failing_since_s = self._monotonic()
        wait_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(self._failures - 1, 10))
        wait_s = max(FIRST_RETRY_S, wait_s * (0.5 + 0.5 * self._jitter()))
        if isinstance(error, StoreDown) and error.retry_after_s is not None:
            wait_s = max(wait_s, error.retry_after_s)
        unforeseen = not isinstance(error, StoreError)
        named = str(error) if self._target in str(error) else f"{self._target}: {error}"
        self._quiet.warning(
            "failed",
            "%s",
            and_then(named, f"next attempt in {wait_s:.0f} s"),
            error=error if unforeseen else None,
        )
        self._start_anew(error)
        return wait_s

    def _start_anew(self, error: Exception) -> None:
        """A store that is down for now and may lose what it took knows itself what to send again; any other is opened anew, and
        what it may have lost is sent again.
        """
        if self._store is not None and isinstance(error, StoreDown) and self._store.durable_after_s > 0:
            return
        self._close_store()
        self._spool.give_out_again()

    def _succeeded(self) -> None:
        if self._failing_since_s is not None:
            log.warning("%s: delivering again after %.0f s", self._target, self._monotonic() - self._failing_since_s)
        self._failures = 0
        self._failing_since_s = None
        self.last_error = ""

    def _close_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            with contextlib.suppress(Exception):
                store.close()

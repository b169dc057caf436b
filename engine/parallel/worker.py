"""The process of a rank but the first: it loads its share, then computes what it is told, until the first rank is gone."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
import sys

from engine.assembly import choose_device, load_share
from engine.checkpoints.find import find_model, open_checkpoint
from engine.core import StepResult
from engine.parallel.group import Group, meeting_place
from engine.parallel.messages import REPORT, receive, unpacked
from engine.parallel.ranks import device_of
from engine.parallel.shard import Shard, ShardedCheckpoint
from engine.progress import silent
from engine.runner import Runner
from engine.scheduler import Row, StepPlan
from engine.settings import EngineSettings
from engine.threads import ThreadChooser

log = logging.getLogger("pairscope.engine")


class FollowingRunner(Runner):
    """Computes a step's tokens with the others and chooses none."""

    def _step(self, plan: StepPlan) -> tuple[tuple[Row, int], ...]:
        decoder, batch = self.decoder, self._batch(plan)
        x = decoder.forward(batch, self.cache)
        if batch.sampled_rows:  # the first rank waits for this part of their logits
            decoder.logits(x if batch.sampled is None else x.index_select(0, batch.sampled))
        return ()


def main(descriptor: int) -> None:
    """Until the socket closes: then 0. Anything that fails is told in one line, exit code 1; the first rank sees to the rest."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank ends us
    source = socket.socket(fileno=descriptor)
    first = receive(source)
    if first is None:
        return
    told = json.loads(first)
    shard = Shard(told["rank"], told["size"])
    try:
        _follow(EngineSettings(**told["settings"]), shard, told["port"], source)
    except Exception as error:  # whatever it is, this rank's end is the engine's
        reason = str(error).splitlines()[0][:300] if str(error) else ""
        print(f"rank {shard.rank} of {shard.size}: {type(error).__name__}: {reason}", file=sys.stderr, flush=True)
        sys.exit(1)


def _follow(settings: EngineSettings, shard: Shard, port: int, source: socket.socket) -> None:
    store = meeting_place(port)
    device = device_of(choose_device(settings.device), shard.rank)
    group = Group(shard, store, device, settings.rank_timeout_s)
    path = find_model(settings.model)
    checkpoint = ShardedCheckpoint(open_checkpoint(path), shard)
    share = load_share(settings, checkpoint, path, device, silent, lambda line: None, group)
    runner = FollowingRunner(share.loaded.decoder, share.cache, ThreadChooser(share.threads))
    while (message := receive(source)) is not None:
        plan = unpacked(message)
        group.begin_step()
        result = runner.run(plan)
        if plan.rows:
            _report(source, result, group)


def _report(to: socket.socket, result: StepResult, group: Group) -> None:
    wait_s = group.end_step()
    with contextlib.suppress(OSError):  # the first rank has closed: the next message will not come
        to.sendall(REPORT.pack(max(0.0, result.seconds - wait_s), wait_s))

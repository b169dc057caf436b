"""Up: everything on one machine. Starts the parts, says when each is ready, restarts one that dies, stops all on Ctrl-C."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from engine.progress import words
from pairscope.parts import Part, PartSpec, hear, last_line, reap, start, stop_all
from telemetry.lineprotocol import printable
from telemetry.messages import say
from telemetry.process import notify

POLL_S = 0.1
HEALTH_EVERY_S = 0.5
DETAIL_LIMIT = 120
GIVE_UP_AFTER_FAILURES = 4
"""A part that has never been ready and has died this often in a row is reported, with its log, as what to look at."""


class CannotStart(Exception):
    """One line: what stands in the way, and the remedy."""


@dataclass(frozen=True, slots=True)
class HostedEngine:
    """The engine that the agent hosts, as `up` shows it: its endpoint is asked, the agent is its parent."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. `parts` in start order; `ports` (name -> host, port) must be free; `open_url` is what a person opens."""

    parts: Sequence[PartSpec]
    addresses: Mapping[str, str]  # part -> what to print beside it when it is ready
    ports: Mapping[str, tuple[str, int]]
    state_dir: Path
    effective: str  # the configuration that the parts read, as JSON
    open_url: str
    engine: HostedEngine | None
    simulated: str  # "4x8" or ""
    language: str
    version: str


def check_ports(ports: Mapping[str, tuple[str, int]], language: str) -> None:
    """CannotStart names the first port that is taken, and the option that changes it."""
    for name, (host, port) in ports.items():
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except (OSError, OverflowError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise CannotStart(
                    say("pairscope.up.port_taken", language, name=name, host=host, port=port, reason=reason)
                ) from None


def claim(state_dir: Path, name: str, taken: str, language: str) -> int:
    """Make the state folder (0700) and lock `name` in it, so that two of a kind never share it; the lock's open descriptor.

    CannotStart, with the sentence `taken`, when another process holds it, or when the folder can't be used.
    """
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(state_dir / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CannotStart(say("pairscope.up.state_unwritable", language, path=state_dir, reason=reason)) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise CannotStart(say(f"pairscope.{taken}", language, path=state_dir)) from None
    return descriptor


def write_effective(plan: Plan) -> None:
    """Write the configuration that every part of this run reads (0600: it may hold a webhook's address)."""
    path = plan.state_dir / "up.json"
    draft = path.with_suffix(".json.new")
    try:
        plan.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            file.write(plan.effective)
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        reason = error.strerror or str(error)
        raise CannotStart(
            say("pairscope.up.state_unwritable", plan.language, path=plan.state_dir, reason=reason)
        ) from None


class Board:
    """What a person sees while things start and run: one line per news, and on a terminal a moving line while something loads."""

    def __init__(self, console: Console, language: str) -> None:
        self._console = console
        self._language = language
        self._status: Status | None = None
        self._last_progress = ""

    def line(self, key: str, **values: object) -> None:
        plain = {name: escape(value) if isinstance(value, str) else value for name, value in values.items()}
        self._console.print(say(f"pairscope.up.{key}", self._language, **plain), highlight=False)

    def progress(self, stage: str, share: float | None, detail: str = "") -> None:
        """How far the engine's start is: a moving line on a terminal; elsewhere one line for each new stage."""
        percent = "" if share is None else f"{share * 100:.0f} %  {detail}".rstrip()
        stage = words(stage, self._language)
        if self._console.is_terminal:
            text = say("pairscope.up.loading", self._language, stage=escape(stage), percent=escape(percent))
            if self._status is None:
                self._status = self._console.status(text)
                self._status.start()
            else:
                self._status.update(text)
        elif stage != self._last_progress:
            self._last_progress = stage
            self.line("loading_line", stage=stage)

    def end_progress(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        self._last_progress = ""


@dataclass(slots=True)
class EngineView:
    """What is known of the hosted engine, from its own /health and from the agent's /healthz."""

    ready: bool = False
    was_ready: bool = False
    stage: str = ""
    progress: float | None = None
    detail: str = ""
    model: str = ""


def look_at_engine(client: httpx.Client, engine: HostedEngine, view: EngineView) -> None:
    view.ready = False
    try:
        response = client.get(f"{engine.url}/health")
        body = response.json()
    except (httpx.HTTPError, ValueError):
        return
    if not isinstance(body, dict):
        return
    if response.status_code == 200:
        view.ready = True
        return
    view.stage = str(body.get("stage") or body.get("status") or "")
    progress = body.get("progress")
    view.progress = float(progress) if isinstance(progress, int | float) else None
    view.detail = printable(str(body.get("detail") or ""))[:DETAIL_LIMIT]


def served_model(client: httpx.Client, engine: HostedEngine) -> str:
    try:
        return str(client.get(f"{engine.url}/v1/models").json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError):
        return "?"


def run(
    plan: Plan,
    console: Console,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Run the plan until SIGINT or SIGTERM; 0. CannotStart when something stands in the way; then nothing is left running."""
    lock = claim(plan.state_dir, "up.lock", "up.already_running", plan.language)
    try:
        check_ports(plan.ports, plan.language)
        write_effective(plan)
        return _supervise(plan, Board(console, plan.language), monotonic, sleep)
    finally:
        os.close(lock)


def _supervise(plan: Plan, board: Board, monotonic: Callable[[], float], sleep: Callable[[float], None]) -> int:
    stopping = False

    def on_signal(_number: int, _frame: object) -> None:
        nonlocal stopping
        stopping = True

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    parts = [Part(spec) for spec in plan.parts]
    view = EngineView()
    announced = False
    next_look_s = 0.0
    board.line("hello", version=plan.version, path=str(plan.state_dir))
    if plan.simulated:
        board.line("simulated", size=plan.simulated)
    client = httpx.Client(timeout=httpx.Timeout(1.0), trust_env=False)
    try:
        for part in parts:
            _start(part, plan.language, monotonic())
        while not stopping:
            now_s = monotonic()
            for part in parts:
                _tend(part, plan, board, now_s)
            if plan.engine is not None and now_s >= next_look_s:
                next_look_s = now_s + HEALTH_EVERY_S
                _tend_engine(plan.engine, view, client, board)
            if not announced and all(p.ready for p in parts) and (plan.engine is None or view.was_ready):
                announced = True
                board.end_progress()
                board.line("open", url=plan.open_url)
                notify(READY="1")
            sleep(POLL_S)
        board.end_progress()
        board.line("stopping")
    finally:
        client.close()
        stubborn = stop_all(parts)
        for number, handler in previous.items():
            signal.signal(number, handler)
    for name in stubborn:
        board.line("killed", name=name)
    board.line("stopped")
    return 0


def _tend(part: Part, plan: Plan, board: Board, now_s: float) -> None:
    """Hear, announce, reap and restart one part."""
    if hear(part):
        board.end_progress()
        board.line("ready", name=part.spec.name, address=plan.addresses.get(part.spec.name, ""))
    code = reap(part, now_s)
    if code == 2 and not part.exits[:-1]:  # a mistake in what it was given: restarting can't mend it
        raise CannotStart(
            last_line(part.spec.log) or say("pairscope.up.part_refused", plan.language, name=part.spec.name)
        )
    if code is not None:
        board.end_progress()
        how = _how(code, plan.language)
        board.line("died", name=part.spec.name, how=how, log=str(part.spec.log))
        if part.failures == GIVE_UP_AFTER_FAILURES:
            board.line("keeps_dying", name=part.spec.name, last=last_line(part.spec.log), log=str(part.spec.log))
    if part.process is None and part.restart_at_s is not None and now_s >= part.restart_at_s:
        if not (plan.state_dir / "up.json").exists():  # somebody cleared the folder under us
            write_effective(plan)
        _start(part, plan.language, now_s)


def _start(part: Part, language: str, now_s: float) -> None:
    try:
        start(part, now_s)
    except OSError as error:
        values = {"name": part.spec.name, "log": part.spec.log, "reason": error.strerror or str(error)}
        raise CannotStart(say("pairscope.up.cant_start", language, **values)) from None


def _tend_engine(engine: HostedEngine, view: EngineView, client: httpx.Client, board: Board) -> None:
    was_ready = view.ready
    look_at_engine(client, engine, view)
    if view.ready and not was_ready:
        view.was_ready = True
        view.model = served_model(client, engine)
        board.end_progress()
        board.line("engine_ready", url=engine.url, model=view.model)
    elif was_ready and not view.ready:
        board.line("engine_lost", name=engine.name)
    elif not view.ready and view.stage:
        board.progress(view.stage, view.progress, view.detail)


def _how(code: int, language: str) -> str:
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = str(-code)
        return say("pairscope.up.by_signal", language, signal=name)
    return say("pairscope.up.by_exit", language, code=code)

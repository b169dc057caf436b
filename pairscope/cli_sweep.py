"""`pairscope sweep`: how many requests at once an engine should run, measured or from a table."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console, Group
from rich.live import Live

from pairscope.config import gather
from pairscope.copying import tell
from pairscope.load_sweep.endpoint import EndpointProblem, Served, base_of, client_for, meet
from pairscope.load_sweep.knee import Judged, Limits, Point, judge
from pairscope.load_sweep.lengths import Lengths, fitting, fixed, of_store, of_trace, usual
from pairscope.load_sweep.measuring import Plan, Swept, Tell, sweep
from pairscope.load_sweep.output import as_json, refuse_place, write
from pairscope.load_sweep.table import read_table
from pairscope.load_sweep.watching import with_cards
from pairscope.load_sweep.wording import advice, table
from pairscope.options import (
    SPOKEN,
    ConfigOption,
    LangOption,
    Refused,
    StateOption,
    StoreOption,
    one_line_for_mistakes,
    overrides,
    print_whole,
    stores_told,
)
from pairscope.selection import open_for_reading
from telemetry.lineprotocol import printable
from telemetry.messages import say
from telemetry.store import StoreError, open_existing, public_url

MOST_BATCH = 8192
DAY_NS = 86_400 * 10**9
SETTLED_NS = 6 * 10**9
"""Live samples reach the store within 5 s."""


def s(key: str) -> str:
    return say(f"load_sweep.about.{key}", SPOKEN)


def sweep_command(
    url: Annotated[str | None, typer.Argument(metavar="[URL]", help=s("url"))] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help=s("model"))] = None,
    lengths: Annotated[str | None, typer.Option("--lengths", metavar="FILE|store", help=s("lengths"))] = None,
    inputs: Annotated[int | None, typer.Option("--input-tokens", min=1, max=10**7, help=s("input_tokens"))] = None,
    outputs: Annotated[int | None, typer.Option("--output-tokens", min=1, max=10**7, help=s("output_tokens"))] = None,
    start: Annotated[int | None, typer.Option("--start", min=1, max=MOST_BATCH, help=s("start"))] = None,
    most: Annotated[int, typer.Option("--max-batch", min=1, max=MOST_BATCH, help=s("max_batch"))] = 256,
    requests: Annotated[int | None, typer.Option("--requests", min=1, max=10**6, help=s("requests"))] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=1, max=3600, help=s("timeout"))] = 120,
    natural: Annotated[bool, typer.Option("--natural-ends", help=s("natural"))] = False,
    key_file: Annotated[Path | None, typer.Option("--api-key-file", metavar="FILE", help=s("api_key_file"))] = None,
    node: Annotated[str | None, typer.Option("--node", metavar="NAME", help=s("node"))] = None,
    table_file: Annotated[Path | None, typer.Option("--table", metavar="FILE", help=s("table"))] = None,
    ttft_limit: Annotated[
        float | None, typer.Option("--ttft-limit", metavar="MS", min=0.001, max=1e9, help=s("ttft_limit"))
    ] = None,
    least: Annotated[float, typer.Option("--elasticity", min=0.0, max=1.0, help=s("elasticity"))] = 0.3,
    memory_headroom: Annotated[
        float, typer.Option("--memory-headroom", metavar="PCT", min=0.0, max=99.0, help=s("memory_headroom"))
    ] = 15.0,
    power_headroom: Annotated[
        float, typer.Option("--power-headroom", metavar="PCT", min=0.0, max=99.0, help=s("power_headroom"))
    ] = 15.0,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.svg|.md|.csv", help=s("out"))] = None,
    force: Annotated[bool, typer.Option("--force", help=s("force"))] = False,
    as_json_: Annotated[bool, typer.Option("--json", help=s("json"))] = False,
    state_dir: StateOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    lang: LangOption = None,
) -> None:
    with one_line_for_mistakes():
        configuration = gather(config, overrides(state_dir=state_dir, store=store, lang=lang), lang)
        language = configuration.language
        limits = Limits(least, ttft_limit / 1e3 if ttft_limit else None, memory_headroom, power_headroom)
        if out is not None:
            refuse_place(out, force=force, language=language)
        if (url is None) == (table_file is None):
            raise Refused(say(f"load_sweep.mistake.{'nothing' if url is None else 'both'}", language))
        shown = Shown(out, force, as_json_, language)
        if table_file is not None:
            points = read_table(table_file, language)
            tell_judged(judge(points, limits), points, table_file.name, shown)
            return
        begin = start or (8 if most > 8 else 1)
        if begin > most:
            raise Refused(say("load_sweep.mistake.order", language, start=begin, most=most))
        asked = _lengths(lengths, configuration.store_url, node, language)
        plan = Plan(begin, most, requests, limits, fixed(asked, inputs, outputs, language))
        try:
            base_url = base_of(url or "")
            done = measure(base_url, model, plan, timeout_s, _key(key_file, language), language, natural_ends=natural)
        except EndpointProblem as problem:
            raise Refused(problem.text(language)) from None
        if done.swept.points:
            local = httpx.URL(base_url).host in ("127.0.0.1", "localhost", "::1")
            here = node or (configuration.node if local else None)
            seen = with_store(done.swept, configuration.store_url, here, language)
            judged = judge(seen, limits) if len(seen) > 1 else None
            what = say("load_sweep.told.what", language, model=printable(done.served.model), url=base_url)
            ended = "failed" if done.swept.problem else "stopped" if done.swept.stopped else "whole"
            more = {"url": base_url, "model": done.served.model, "lengths": plan.lengths.told, "ended": ended}
            if judged is None and out is not None and out.suffix != ".csv":
                shown = Shown(None, force, as_json_, language)
            tell_judged(judged, seen, what, shown, **more)
            if not done.served.tells_usage:
                tell(say("load_sweep.told.no_usage", language), warning=True)
            if judged is None:
                tell(say("load_sweep.told.one_point", language), warning=True)
        if done.swept.problem is not None:
            raise Refused(done.swept.problem.text(language))
        if done.swept.stopped:
            tell(say(f"load_sweep.told.{'stopped' if done.swept.points else 'stopped_empty'}", language), warning=True)
            raise typer.Exit(130)


@dataclass(frozen=True, slots=True)
class Shown:
    """How it is told, and where it is written."""

    out: Path | None
    force: bool
    as_json: bool
    language: str


@dataclass(frozen=True, slots=True)
class Done:
    served: Served
    swept: Swept


def measure(
    base_url: str, model: str | None, plan: Plan, timeout_s: float, key: str, language: str, *, natural_ends: bool
) -> Done:
    """EndpointProblem before the first batch; what ends it later is told in what is returned. SIGINT and SIGTERM stop it."""

    async def run() -> Done:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        async with client_for(plan.most + 4, timeout_s, key) as client:
            served = await _until(meet(client, base_url, model, natural_ends=natural_ends), stop)
            if served is None:
                nobody = Served(base_url, model or "", None, "", False, 1.0, 0.0, True)
                return Done(nobody, Swept(stopped=True))
            lengths = fitting(plan.lengths, served.context)
            if not lengths.pairs:
                raise Refused(say("load_sweep.mistake.no_fit", language, context=served.context))
            named = printable(served.model)
            tell(say("load_sweep.told.before", language, model=named, url=base_url, lengths=lengths.told))
            if lengths.left_out:
                told = {"count": lengths.left_out, "context": served.context}
                tell(say("load_sweep.told.left_out", language, **told))
            with live(language) as progress:
                return Done(served, await sweep(client, served, replace(plan, lengths=lengths), stop, progress))

    return asyncio.run(run())


async def _until(work: Coroutine[Any, Any, Served], stop: asyncio.Event) -> Served | None:
    """What `work` brings; None when it was stopped before."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, stopped):
            one.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


@contextmanager
def live(language: str) -> Iterator[Tell]:
    """On a terminal, the table so far and how far the batch under way is; elsewhere nothing."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda _batch, _done, _total, _points: None
        return
    with Live(console=console, transient=True, refresh_per_second=4) as shown:

        def tell_it(batch: int, done: int, total: int, points: Sequence[Point]) -> None:
            line = say("load_sweep.told.going", language, batch=batch, done=done, total=total)
            shown.update(Group(table(points, language), line) if points else Group(line))

        yield tell_it


def with_store(swept: Swept, url: str, node: str | None, language: str) -> list[Point]:
    """The points in order, with what the store holds of the node's GPUs; without, where there is no store or no such node."""
    points = swept.ordered()
    if node is None:
        return points
    try:
        found = open_existing(url)
        if found is None:
            return points
        with closing(found) as opened:
            since_ns = min(start for start, _ in swept.windows.values())
            if not any(tags.get("node") == node for tags in opened.series("gpu", since_ns=since_ns)):
                return points
            if not swept.stopped:
                time.sleep(
                    max(0.0, (max(end for _, end in swept.windows.values()) + SETTLED_NS - time.time_ns()) / 1e9)
                )
            return [with_cards(point, opened, node, *swept.windows[point.batch]) for point in points]
    except StoreError as error:
        tell(error.told(language), warning=True)
        return points


def _lengths(asked: str | None, store_url: str, node: str | None, language: str) -> Lengths:
    if asked is None:
        return usual(language)
    if asked != "store":
        return of_trace(Path(asked), language)
    with stores_told(language), closing(open_for_reading(store_url, language)) as store:
        found = of_store(store, {"node": (node,)} if node else None, time.time_ns(), DAY_NS)
    where = public_url(store_url)
    if found is None:
        raise Refused(say("load_sweep.mistake.no_traffic", language, store=where))
    return replace(found, told=say("load_sweep.lengths.store", language, store=where))


def _key(path: Path | None, language: str) -> str:
    if path is None:
        return ""
    try:
        text = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise Refused(say("load_sweep.mistake.key_file", language, path=path, reason=reason)) from None
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise Refused(say("load_sweep.mistake.key_file", language, path=path, reason="?"))
    return text


def tell_judged(judged: Judged | None, points: Sequence[Point], what: str, shown: Shown, **more: object) -> None:
    """On stdout the table and the words, or JSON; then the file."""
    language = shown.language
    if shown.as_json:
        print_whole(json.dumps(as_json(judged, points, language, **more), ensure_ascii=False, indent=1), language)
    else:
        console = Console(highlight=False)
        console.print(table(points, language, judged.recommended if judged else None))
        if judged is not None:
            console.print()
            first, *others = advice(judged, language)
            console.print(printable(first), style="bold", markup=False, soft_wrap=True)
            for line in others:
                console.print(f"- {printable(line)}", markup=False, soft_wrap=True)
    if shown.out is not None:
        title = say("load_sweep.told.title", language, what=what)
        write(shown.out, judged, points, title, force=shown.force, language=language)
        tell(say("load_sweep.told.written", language, path=shown.out))

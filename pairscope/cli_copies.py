"""`pairscope record`, `replay` and `export`: samples out of a store and into one."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from pairscope.config import (
    gather,
)
from pairscope.copying import Stopped, print_summary, select, span_option, stoppable, tell, when
from pairscope.export import FORMATS, CsvWriter, MakeWriter, Shape, export, export_into, places_of
from pairscope.options import (
    SPOKEN,
    ConfigOption,
    JsonOption,
    LangOption,
    Refused,
    StateOption,
    StoreOption,
    one_line_for_mistakes,
    overrides,
    stores_told,
    t,
)
from pairscope.progress import shown
from pairscope.record import Nothing, follow, record
from pairscope.replay import ORIGINS, Plan, Shift, parse_shift, replay, replayed_json, replayed_lines
from pairscope.selection import open_for_reading
from telemetry.catalogue import MEASUREMENTS
from telemetry.messages import say
from telemetry.process import stop_event
from telemetry.store import StoreDown, open_store, public_url
from telemetry.store.buckets import AGGREGATES


def r(key: str, **values: object) -> str:
    return say(f"recording.{key}", SPOKEN, **values)


FromOption = Annotated[str | None, typer.Option("--from", metavar="TIME", help=r("record.from"))]
ToOption = Annotated[str | None, typer.Option("--to", metavar="TIME", help=r("record.to"))]
LastOption = Annotated[str | None, typer.Option("--last", metavar="SPAN", help=r("record.last"))]
NodesOption = Annotated[list[str] | None, typer.Option("--node", metavar="NAME", help=r("record.node"))]
MeasurementsOption = Annotated[
    list[str] | None,
    typer.Option("--measurement", metavar="NAME", help=r("record.measurement", known=", ".join(MEASUREMENTS))),
]
ForceOption = Annotated[bool, typer.Option("--force", help=r("record.force"))]


def record_command(
    out: Annotated[Path, typer.Argument(metavar="OUT.lp[.gz]", help=r("record.out"))],
    start: FromOption = None,
    end: ToOption = None,
    last: LastOption = None,
    node: NodesOption = None,
    measurement: MeasurementsOption = None,
    following: Annotated[bool, typer.Option("--follow", help=r("record.follow"))] = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
    state_dir: StateOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    lang: LangOption = None,
) -> None:
    with one_line_for_mistakes():
        configuration = gather(config, overrides(state_dir=state_dir, store=store, lang=lang), lang)
        language, url = configuration.language, configuration.store_url
        now_ns = time.time_ns()
        wanted = select(
            start=start,
            end=end,
            last=last,
            nodes=node,
            measurements=measurement,
            now_ns=now_ns,
            language=language,
            ahead=following,
        )
        total = None if following else float(wanted.end_ns - wanted.start_ns)
        what = say("recording.record.working", language, store=public_url(url))
        word = say("recording.samples_word", language)
        try:
            with (
                stores_told(language),
                stoppable(),
                closing(open_for_reading(url, language)) as source,
                shown(what, total, word) as advance,
            ):
                if following:
                    stopping = stop_event()
                    done = follow(
                        source,
                        wanted,
                        out,
                        force=force,
                        language=language,
                        advance=advance,
                        wait=stopping.wait,
                        down=once(
                            lambda error: tell(
                                say("recording.record.down", language, error=error.told(language)), warning=True
                            )
                        ),
                    )
                else:
                    done = record(source, wanted, out, force=force, language=language, advance=advance)
        except Stopped as stopped:
            tell(say("recording.stopped", language, path=out))
            raise typer.Exit(stopped.code) from None
        except Nothing:
            shown_url, begins, ends = public_url(url), when(wanted.start_ns), when(wanted.end_ns)
            tell(say("recording.nothing", language, store=shown_url, start=begins, end=ends))
            raise typer.Exit(1) from None
        if done.left_out:
            tell(say("recording.record.left_out", language, count=done.left_out), warning=True)
        first, final = when(done.first_ns), when(done.last_ns)
        if as_json:
            summary = {"path": str(out), "store": public_url(url), "samples": done.samples, "left_out": done.left_out}
            print_summary(summary | {"bytes": done.bytes, "first": first, "last": final}, to_stderr=str(out) == "-")
        elif str(out) != "-":
            key = "recording.record.done" if done.samples else "recording.record.done_empty"
            tell(say(key, language, count=done.samples, bytes=done.bytes, path=out, first=first, last=final))


def replay_command(
    recording: Annotated[Path, typer.Argument(metavar="FILE", help=r("replay.file"))],
    shift: Annotated[str | None, typer.Option(metavar="now|TIME|+SPAN", help=r("replay.shift"))] = None,
    speed: Annotated[str, typer.Option(metavar="1|10|max", help=r("replay.speed"))] = "max",
    origin: Annotated[str, typer.Option(metavar="|".join(ORIGINS), help=r("replay.origin"))] = "auto",
    prefix: Annotated[str, typer.Option(metavar="TEXT", help=r("replay.prefix"))] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help=r("replay.dry_run"))] = False,
    as_json: JsonOption = False,
    state_dir: StateOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    lang: LangOption = None,
) -> None:
    with one_line_for_mistakes():
        configuration = gather(config, overrides(state_dir=state_dir, store=store, lang=lang), lang)
        language, url = configuration.language, configuration.store_url
        pace = replay_speed(speed)
        plan = Plan(replay_shift(shift, pace), pace, origin, prefix, dry_run, language)
        if origin not in ORIGINS:
            raise Refused(r("replay.origin_wrong", text=origin, known=", ".join(ORIGINS)))
        size = float(recording.stat().st_size) if recording.is_file() else None
        what = say("recording.replay.working", language, path=recording)
        try:
            with (
                stores_told(language),
                stoppable(),
                closing(open_store(url)) if not dry_run else nullcontext() as target,
                shown(what, size, say("recording.samples_word", language)) as advance,
            ):
                done = replay(recording, target, plan, advance=advance, tell=tell)
        except Stopped as stopped:
            tell(say("recording.replay.stopped", language))
            raise typer.Exit(stopped.code) from None
        if as_json:
            print_summary(replayed_json(recording, url, plan, done))
        else:
            for line, warning in replayed_lines(recording, url, plan, done):
                tell(line, warning=warning)
        raise typer.Exit(1 if done.bad_lines or done.refused or done.ends_early or not done.samples else 0)


def export_command(
    out: Annotated[Path, typer.Argument(metavar="OUT.parquet|OUT.csv|FOLDER", help=r("export.out"))],
    start: FromOption = None,
    end: ToOption = None,
    last: LastOption = None,
    node: NodesOption = None,
    measurement: MeasurementsOption = None,
    fields: Annotated[list[str] | None, typer.Option("--field", metavar="NAME", help=r("export.field"))] = None,
    every: Annotated[str | None, typer.Option("--every", metavar="SPAN", help=r("export.every"))] = None,
    how: Annotated[str | None, typer.Option("--as", metavar="|".join(AGGREGATES), help=r("export.how"))] = None,
    wide: Annotated[bool, typer.Option("--wide", help=r("export.wide"))] = False,
    format_: Annotated[str | None, typer.Option("--format", metavar="|".join(FORMATS), help=r("export.format"))] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
    state_dir: StateOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    lang: LangOption = None,
) -> None:
    with one_line_for_mistakes():
        configuration = gather(config, overrides(state_dir=state_dir, store=store, lang=lang), lang)
        language, url = configuration.language, configuration.store_url
        wanted = select(
            start=start,
            end=end,
            last=last,
            nodes=node,
            measurements=measurement,
            now_ns=time.time_ns(),
            language=language,
        )
        if how is not None and how not in AGGREGATES:
            raise Refused(r("export.how_wrong", text=how, known=", ".join(AGGREGATES)))
        if how is not None and every is None:
            raise Refused(r("export.how_needs_every", text=how))
        every_ns = None if every is None else span_option(every, "--every", language)
        shape = Shape(tuple(fields or ()), every_ns, how or "auto", wide, language)
        kind, places = places_of(out, wanted.measurements, format_, language)
        make: MakeWriter = CsvWriter
        if kind == "parquet":
            try:
                from pairscope.parquet import ParquetWriter
            except ModuleNotFoundError as error:
                raise Refused(t("extra_missing", module=error.name, extra="export")) from None
            make = ParquetWriter
        what = say("recording.export.working", language, store=public_url(url))
        word = say("recording.samples_word", language)
        try:
            with (
                stores_told(language),
                stoppable(),
                closing(open_for_reading(url, language)) as source,
                shown(what, float(wanted.end_ns - wanted.start_ns), word) as advance,
            ):
                done = export_into(
                    out,
                    places,
                    lambda: export(source, wanted, shape, places, make, force=force, advance=advance),
                    language,
                )
        except Stopped as stopped:
            tell(say("recording.stopped", language, path=out))
            raise typer.Exit(stopped.code) from None
        except Nothing:
            shown_url, begins, ends = public_url(url), when(wanted.start_ns), when(wanted.end_ns)
            tell(say("recording.nothing", language, store=shown_url, start=begins, end=ends))
            raise typer.Exit(1) from None
        if as_json:
            files = [
                {"path": str(one.path), "measurement": one.measurement, "rows": one.rows, "bytes": one.bytes}
                for one in done
            ]
            print_summary({"store": public_url(url), "format": kind, "files": files})
            return
        for one in done:
            key = "recording.export.done"
            tell(say(key, language, rows=one.rows, measurement=one.measurement, bytes=one.bytes, path=one.path))


def replay_shift(text: str | None, speed: float | None) -> Shift | None:
    if text is None:
        return None
    try:
        return parse_shift(text, paced=speed is not None, now_ns=time.time_ns())
    except (ValueError, OverflowError):
        raise Refused(r("replay.shift_wrong", text=text)) from None


def replay_speed(text: str) -> float | None:
    """Times as fast as it was; None for max."""
    if text == "max":
        return None
    if not re.fullmatch(r"\d{1,6}(\.\d{1,6})?", text) or not float(text):
        raise Refused(r("replay.speed_wrong", text=text))
    return float(text)


def once(tell_it: Callable[[StoreDown], None]) -> Callable[[StoreDown], None]:
    """`tell_it` for the first error only: an outage is one line, however long it is."""
    told: list[StoreDown] = []

    def tell_first(error: StoreDown) -> None:
        if not told:
            tell_it(error)
        told.append(error)

    return tell_first

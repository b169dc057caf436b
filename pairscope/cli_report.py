"""`pairscope report`: an incident of a recording or of the store as Markdown with plots, or as JSON."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from pairscope.config import gather, settings
from pairscope.copying import Stopped, span_option, stoppable, tell
from pairscope.moment import iso
from pairscope.options import (
    SPOKEN,
    ConfigOption,
    LangOption,
    Refused,
    StateOption,
    StoreOption,
    moment,
    one_line_for_mistakes,
    overrides,
    print_whole,
    shared,
    stores_told,
)
from pairscope.progress import shown
from pairscope.report import source
from pairscope.report.as_json import as_json as report_json
from pairscope.report.content import Report, report_of
from pairscope.report.plots import plots_of
from pairscope.report.settings import ReportSettings
from pairscope.report.wording import place
from pairscope.report.writing import default_folder, text_of, write
from rules.service import TriageSettings
from telemetry.messages import say


def r(key: str) -> str:
    return say(f"report.about.{key}", SPOKEN)


def report_command(
    recording: Annotated[Path | None, typer.Argument(metavar="[FILE]", help=r("file"))] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FOLDER|FILE.md", help=r("out"))] = None,
    since: Annotated[str | None, typer.Option("--since", metavar="TIME", help=r("since"))] = None,
    at: Annotated[str | None, typer.Option("--at", metavar="TIME", help=r("at"))] = None,
    start: Annotated[str | None, typer.Option("--from", metavar="TIME", help=r("from"))] = None,
    end: Annotated[str | None, typer.Option("--to", metavar="TIME", help=r("to"))] = None,
    last: Annotated[str | None, typer.Option("--last", metavar="SPAN", help=r("last"))] = None,
    node: Annotated[list[str] | None, typer.Option("--node", metavar="NAME", help=r("node"))] = None,
    every_node: Annotated[bool, typer.Option("--all", help=r("all"))] = False,
    price: Annotated[float | None, typer.Option("--price-per-gpu-hour", metavar="NUMBER", help=r("price"))] = None,
    currency: Annotated[str | None, typer.Option("--currency", metavar="TEXT", help=r("currency"))] = None,
    single_file: Annotated[bool, typer.Option("--single-file", help=r("single"))] = False,
    force: Annotated[bool, typer.Option("--force", help=r("force"))] = False,
    as_json: Annotated[bool, typer.Option("--json", help=r("json"))] = False,
    state_dir: StateOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    lang: LangOption = None,
) -> None:
    with one_line_for_mistakes():
        configuration = gather(
            config,
            overrides(
                state_dir=state_dir,
                store=store,
                lang=lang,
                report={"price_per_gpu_hour": price, "currency": currency},
            ),
            lang,
        )
        language = configuration.language
        made = settings(configuration, "report", ReportSettings, **shared(configuration))
        triage = settings(configuration, "triage", TriageSettings, **shared(configuration))
        begin = _one_of({"--since": since, "--from": start, "--last": last}, language)
        finish = _one_of({"--at": at, "--to": end}, language)
        at_ns = moment(finish[1], finish[0]) if finish else None
        end_ns = at_ns or time.time_ns()
        last_ns = span_option(last, "--last", language) if last is not None else None
        since_ns = moment(begin[1], begin[0]) if begin and last_ns is None else None
        if since_ns is not None and since_ns >= end_ns:
            raise Refused(say("report.mistake.order", language, since=iso(since_ns), at=iso(end_ns)))
        if out is not None:
            text_of(out, language, force=force)
        if recording and every_node:
            raise Refused(say("report.mistake.file_and_store", language))
        if recording:
            read = source.of_recording(recording, since_ns, at_ns, node or (), language, last_ns=last_ns)
        else:
            since_ns = end_ns - last_ns if last_ns is not None else since_ns
            nodes = [] if every_node else node or [configuration.node]
            with stores_told(language):
                read = source.of_store(configuration.store_url, since_ns, end_ns, nodes, language)
        report = _walked(read, made, triage.priors, language)
        plots = plots_of(report, language)
        if as_json:
            print_whole(json.dumps(report_json(report, plots, language), ensure_ascii=False, indent=1), language)
        if as_json and out is None:
            return
        files = write(report, plots, out or default_folder(report), language, inside=single_file, force=force)
        tell(say("report.told.written", language, path=files[0], summary=_summary(report, language)))
        if not recording and not every_node and not node:
            tell(say("report.told.this_host", language, node=configuration.node))


def _one_of(given: dict[str, str | None], language: str) -> tuple[str, str] | None:
    """The one option that was given, with its text. Refused for two."""
    found = [(option, text) for option, text in given.items() if text is not None]
    if len(found) > 1:
        raise Refused(say("report.mistake.both", language, one=found[0][0], other=found[1][0]))
    return found[0] if found else None


def _walked(read: source.Source, made: ReportSettings, preset: str, language: str) -> Report:
    first_ns = read.samples[0].time_ns
    word = say("report.told.moments", language)
    with ExitStack() as stack:
        advance = stack.enter_context(shown(say("report.told.judging", language), float(read.end_ns - first_ns), word))
        try:
            stack.enter_context(stoppable())
            return report_of(read, made, preset, tell=lambda at_ns: advance(float(at_ns - first_ns), len(read.samples)))
        except Stopped as stopped:
            raise typer.Exit(stopped.code) from None


def _summary(report: Report, language: str) -> str:
    if not report.incidents:
        return say("report.told.nothing", language)
    if len(report.incidents) > 1:
        return say("report.told.incidents", language, count=len(report.incidents))
    first = report.incidents[0]
    cause = say(f"rules.cause.{first.cause}", language)
    return say("report.told.one", language, cause=cause, place=place(first.scope, first.subject, language))

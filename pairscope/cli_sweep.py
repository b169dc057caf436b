"""`pairscope sweep`: how many requests at once an engine should run, measured or from a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pairscope.config import gather
from pairscope.copying import tell
from pairscope.load_sweep.knee import Judged, Limits, Point, judge
from pairscope.load_sweep.output import as_json, refuse_place, write
from pairscope.load_sweep.table import read_table
from pairscope.load_sweep.wording import advice, table
from pairscope.options import (
    SPOKEN,
    ConfigOption,
    LangOption,
    Refused,
    one_line_for_mistakes,
    overrides,
    print_whole,
)
from telemetry.lineprotocol import printable
from telemetry.messages import say


def s(key: str) -> str:
    return say(f"load_sweep.about.{key}", SPOKEN)


def sweep_command(
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
    config: ConfigOption = None,
    lang: LangOption = None,
) -> None:
    with one_line_for_mistakes():
        language = gather(config, overrides(state_dir=None, store=None, lang=lang), lang).language
        limits = Limits(least, ttft_limit / 1e3 if ttft_limit else None, memory_headroom, power_headroom)
        if out is not None:
            refuse_place(out, force=force, language=language)
        if table_file is None:
            raise Refused(say("load_sweep.mistake.nothing", language))
        points = read_table(table_file, language)
        judged = judge(points, limits)
        tell_judged(judged, judged.points, out, table_file.name, force=force, json_too=as_json_, language=language)


def tell_judged(
    judged: Judged | None,
    points: Sequence[Point],
    out: Path | None,
    what: str,
    *,
    force: bool,
    json_too: bool,
    language: str,
    **more: object,
) -> None:
    """On stdout the table and the words, or JSON; then the file."""
    if json_too:
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
    if out is not None:
        write(out, judged, points, say("load_sweep.told.title", language, what=what), force=force, language=language)
        tell(say("load_sweep.told.written", language, path=out))

"""The command line: what a person types, turned into settings and handed to a part. Nothing is measured or judged here."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agent import daemon
from agent.collectors.interface import Finding
from agent.doctor.examination import Patient, examine, worst
from agent.doctor.running import without_paused
from agent.reload import ConfigurationRefused
from agent.settings import AgentSettings
from agent.simulator import recording as simulated_recording
from agent.simulator import service as simulation
from agent.simulator.settings import SimulatorSettings
from agent.sweep import sweep
from dashboard.settings import DashboardSettings
from engine.settings import EngineSettings
from engine.threads import calm_openmp
from pairscope import __version__, doctor, pausing, traffic, up
from pairscope import store as storing
from pairscope.cli_drill import drill_command
from pairscope.cli_report import report_command
from pairscope.cli_sweep import sweep_command
from pairscope.config import (
    SECTIONS,
    ConfigError,
    Configuration,
    default_state_dir,
    gather,
    private_files,
    redacted,
    settings,
)
from pairscope.copying import Stopped, print_summary, select, span_option, stoppable, tell, when
from pairscope.export import FORMATS, CsvWriter, MakeWriter, Shape, export, export_into, places_of
from pairscope.judge import judge_live, judge_recording, print_diagnoses
from pairscope.options import (
    SPOKEN,
    ConfigOption,
    JsonOption,
    LangOption,
    Refused,
    StateOption,
    StoreOption,
    moment,
    one_line_for_mistakes,
    overrides,
    shared,
    stores_told,
    t,
)
from pairscope.plan import plan_up
from pairscope.progress import shown
from pairscope.record import Nothing, follow, record
from pairscope.replay import ORIGINS, Plan, Shift, parse_shift, replay, replayed_json, replayed_lines
from pairscope.report.settings import ReportSettings
from pairscope.selection import open_for_reading
from pairscope.signals import tell_signals
from pairscope.sweep import print_sweep
from pairscope.traffic import TrafficSettings
from rules import service as triage_service
from rules.service import TriageSettings
from rules.verdict import verdict_json
from telemetry import logs
from telemetry.catalogue import MEASUREMENTS
from telemetry.messages import say
from telemetry.process import die_with_parent, stop_event
from telemetry.store import StoreDown, open_store, public_url
from telemetry.store.buckets import AGGREGATES

ONCE_WAIT_S = 15.0
"""How long a person waits for sources that take longer than a tick: a BMC needs some seconds to answer at all."""


def r(key: str, **values: object) -> str:
    return say(f"recording.{key}", SPOKEN, **values)


app = typer.Typer(
    name="pairscope",
    help=t("about"),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

FromOption = Annotated[str | None, typer.Option("--from", metavar="TIME", help=r("record.from"))]
ToOption = Annotated[str | None, typer.Option("--to", metavar="TIME", help=r("record.to"))]
LastOption = Annotated[str | None, typer.Option("--last", metavar="SPAN", help=r("record.last"))]
NodesOption = Annotated[list[str] | None, typer.Option("--node", metavar="NAME", help=r("record.node"))]
MeasurementsOption = Annotated[
    list[str] | None,
    typer.Option("--measurement", metavar="NAME", help=r("record.measurement", known=", ".join(MEASUREMENTS))),
]
ForceOption = Annotated[bool, typer.Option("--force", help=r("record.force"))]


def hello(part: str, language: str, *, store: str, **values: object) -> None:
    """One line on stderr that says what a daemon is about to do, where and for how long."""
    line = say(f"pairscope.cli.hello.{part}", language, store=public_url(store), **values)
    Console(stderr=True, soft_wrap=True).print(line, markup=False, highlight=False)


@contextmanager
def waiting(language: str) -> Iterator[Callable[[Sequence[str]], None]]:
    """On a terminal, a moving line that names the sources that are still waited for; elsewhere nothing.

    The collectors' log is silent meanwhile: what it would say stands among the findings.
    """
    console = Console(stderr=True)
    log = logging.getLogger("agent")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        if not console.is_terminal:
            yield lambda _names: None
            return
        with console.status("...") as status:
            yield lambda names: status.update(escape(say("doctor.sum.waiting", language, names=", ".join(names))))
    finally:
        log.setLevel(level)


def engines_at(urls: Sequence[str] | None) -> list[dict[str, str]] | None:
    """The engines of --engine-url; None when there are none, so that those of the configuration stand."""
    return [{"name": f"engine-{i}", "url": url} for i, url in enumerate(urls or [], 1)] or None


def agent_settings(configuration: Configuration) -> AgentSettings:
    return settings(configuration, "agent", AgentSettings, **shared(configuration))


def print_version(asked: bool) -> None:
    if asked:
        print(f"pairscope {__version__}")
        raise typer.Exit(0)


@app.callback()
def before_each(
    version: Annotated[
        bool, typer.Option("--version", help=t("version.about"), callback=print_version, is_eager=True)
    ] = False,
) -> None:
    parent = os.environ.pop("PAIRSCOPE_PARENT_PID", None)  # ours alone: what we start has another parent
    if parent:
        die_with_parent()
        if parent != str(os.getppid()):  # it died before we could ask
            raise typer.Exit(0)


@app.command("up", help=t("up.about"))
def up_command(
    simulate: Annotated[str | None, typer.Option(metavar="NODESxGPUS", help=t("up.simulate"))] = None,
    fault: Annotated[str | None, typer.Option(metavar="NAME", help=t("up.fault"))] = None,
    send_traffic: Annotated[bool, typer.Option("--traffic/--no-traffic", help=t("up.traffic"))] = True,
    host_engine: Annotated[bool, typer.Option("--engine/--no-engine", help=t("up.engine"))] = True,
    model: Annotated[str | None, typer.Option(metavar="DIR|FILE|NAME", help=t("model"))] = None,
    webhook: Annotated[str | None, typer.Option(metavar="URL", help=t("up.webhook"))] = None,
    dashboard_port: Annotated[int | None, typer.Option(min=1, max=65535, help=t("up.port", part="dashboard"))] = None,
    engine_port: Annotated[int | None, typer.Option(min=1, max=65535, help=t("up.port", part="engine"))] = None,
    agent_port: Annotated[int | None, typer.Option(min=1, max=65535, help=t("up.port", part="agent"))] = None,
    port: Annotated[str | None, typer.Option("--port", hidden=True)] = None,
    state_dir: StateOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    lang: LangOption = None,
) -> None:
    with one_line_for_mistakes():
        if port is not None:
            raise Refused(t("up.which_port"))
        configuration = gather(
            config,
            overrides(
                state_dir=state_dir,
                store=store,
                lang=lang,
                engine={"model": model, "port": engine_port},
                agent={"port": agent_port},
                dashboard={"port": dashboard_port},
                triage={"webhook_url": webhook},
            ),
            lang,
        )
        if fault and not simulate:
            raise Refused(t("up.fault_needs_simulate"))
        if simulate and configuration.state_dir == default_state_dir().absolute():
            # what was simulated must not be there when the next real run looks at its past
            configuration = configuration.moved_to(configuration.state_dir / "simulated")
        plan = plan_up(
            configuration,
            host_engine=host_engine,
            send_traffic=send_traffic,
            simulate=fleet_size(simulate) if simulate else None,
            fault=fault,
        )
        raise typer.Exit(up.run(plan, Console(highlight=False, soft_wrap=True)))


@app.command("agent", help=t("agent.about"))
def agent_command(
    once: Annotated[bool, typer.Option("--once", help=t("agent.once"))] = False,
    as_json: JsonOption = False,
    node: Annotated[str | None, typer.Option(help=t("agent.node"))] = None,
    engine_url: Annotated[list[str] | None, typer.Option(metavar="URL", help=t("agent.engine_url"))] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help=t("agent.port"))] = None,
    state_dir: StateOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    lang: LangOption = None,
) -> None:
    def gathered() -> AgentSettings:
        given = overrides(
            state_dir=state_dir,
            store=store,
            lang=lang,
            node={"name": node},
            agent={"port": port, "engines": engines_at(engine_url)},
        )
        return agent_settings(gather(config, given, lang))

    def gathered_again() -> AgentSettings:
        try:
            return gathered()
        except ConfigError as error:
            raise ConfigurationRefused(str(error)) from None

    with one_line_for_mistakes():
        made = gathered()
        if not once:
            logs.to_stderr()
            watched = ", ".join(f"{engine.name} {engine.url}" for engine in made.engines) or say(
                "pairscope.cli.agent.no_engine", made.language
            )
            hello(
                "agent",
                made.language,
                node=made.node,
                host=made.host,
                port=made.port,
                engines=watched,
                store=made.store_url,
            )
            raise typer.Exit(daemon.run(made, gathered_again))
        with waiting(made.language) as progress:
            swept = sweep(without_paused(made), wait_s=ONCE_WAIT_S, progress=progress)
        if as_json:
            for sample in swept.samples:
                print(
                    json.dumps(
                        {
                            "measurement": sample.measurement,
                            "time_ns": sample.time_ns,
                            "tags": dict(sample.tags),
                            "fields": dict(sample.fields),
                        },
                        ensure_ascii=False,
                    )
                )
            return
        print_sweep(swept, Console(highlight=False), made.language)


@app.command("doctor", help=t("doctor.about"))
def doctor_command(
    engine_url: Annotated[list[str] | None, typer.Option(metavar="URL", help=t("agent.engine_url"))] = None,
    wait_s: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=1.0, max=600.0, help=t("doctor.wait"))
    ] = ONCE_WAIT_S,
    as_json: JsonOption = False,
    state_dir: StateOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    lang: LangOption = None,
) -> None:
    with one_line_for_mistakes():
        configuration = gather(
            config,
            overrides(state_dir=state_dir, store=store, lang=lang, agent={"engines": engines_at(engine_url)}),
            lang,
        )
        made = agent_settings(configuration)
        with waiting(made.language) as progress:
            found = examine(Patient(made, private_files(config, configuration)), wait_s=wait_s, progress=progress)
        if as_json:
            print(json.dumps(doctor.as_json(found), ensure_ascii=False, indent=1))
        else:
            doctor.print_findings(found, Console(highlight=False), made.language)
        raise typer.Exit(doctor.EXIT_CODES[worst(found)])


store_app = typer.Typer(help=say("store.about", SPOKEN), no_args_is_help=True)
app.add_typer(store_app, name="store")


def tell_of_store(found: Sequence[Finding], as_json: bool, language: str) -> None:
    if as_json:
        print(json.dumps(doctor.as_json(found), ensure_ascii=False, indent=1))
    else:
        Console(highlight=False).print(doctor.findings_table(found, language))
    raise typer.Exit(doctor.EXIT_CODES[worst(found)])


@store_app.command("init", help=say("store.init_about", SPOKEN))
def store_init_command(
    as_json: JsonOption = False,
    state_dir: StateOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    lang: LangOption = None,
) -> None:
    with one_line_for_mistakes():
        made = agent_settings(gather(config, overrides(state_dir=state_dir, store=store, lang=lang), lang))
        tell_of_store(storing.initialise(made), as_json, made.language)


@store_app.command("check", help=say("store.check_about", SPOKEN))
def store_check_command(
    as_json: JsonOption = False,
    state_dir: StateOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    lang: LangOption = None,
) -> None:
    with one_line_for_mistakes():
        made = agent_settings(gather(config, overrides(state_dir=state_dir, store=store, lang=lang), lang))
        tell_of_store(storing.check(made), as_json, made.language)


@app.command("pause", help=t("pause.about"))
def pause_command(
    length: Annotated[str, typer.Argument(metavar="[DURATION]", help=t("pause.duration"))] = "10m",
    state_dir: StateOption = None,
    config: ConfigOption = None,
    lang: LangOption = None,
) -> None:
    with one_line_for_mistakes():
        made = agent_settings(gather(config, overrides(state_dir=state_dir, store=None, lang=lang), lang))
        until = pausing.pause(made, duration_s(length))
        key = "asked" if until.is_confirmed else "nobody" if until.is_confirmed is None else "unheard"
        print(say(f"pairscope.pausing.{key}", made.language, until=until.moment, port=made.port))
        raise typer.Exit(1 if until.is_confirmed is False else 0)


@app.command("resume", help=t("resume.about"))
def resume_command(state_dir: StateOption = None, config: ConfigOption = None, lang: LangOption = None) -> None:
    with one_line_for_mistakes():
        made = agent_settings(gather(config, overrides(state_dir=state_dir, store=None, lang=lang), lang))
        print(say(f"pairscope.pausing.{'resumed' if pausing.resume(made) else 'no_pause'}", made.language))


@app.command("engine", help=t("engine.about"))
def engine_command(
    model: Annotated[str | None, typer.Option(metavar="DIR|FILE|NAME", help=t("model"))] = None,
    host: Annotated[str | None, typer.Option(help=t("engine.host"))] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help=t("engine.port"))] = None,
    quantize: Annotated[str | None, typer.Option(metavar="none|int8|int4|auto", help=t("engine.quantize"))] = None,
    check_quality: Annotated[bool, typer.Option("--check-quality", help=t("engine.check_quality"))] = False,
    config: ConfigOption = None,
    lang: LangOption = None,
) -> None:
    with one_line_for_mistakes():
        given = {"model": model, "host": host, "port": port, "quantize": quantize}
        configuration = gather(config, overrides(state_dir=None, store=None, lang=lang, engine=given), lang)
        made = settings(configuration, "engine", EngineSettings, **shared(configuration))
        calm_openmp()
        try:
            if check_quality:
                from engine.qualitycheck import check_quality as run
            else:
                from engine.server import run
        except ModuleNotFoundError as error:
            raise Refused(t("extra_missing", module=error.name, extra="engine")) from None
        logs.to_stderr()
        raise typer.Exit(run(made))


@app.command("triage", help=t("triage.about"), epilog=t("triage.example"))
def triage_command(
    recording: Annotated[Path | None, typer.Argument(metavar="[FILE]", help=t("triage.file"))] = None,
    serve: Annotated[bool, typer.Option("--serve", help=t("triage.serve"))] = False,
    at: Annotated[str | None, typer.Option(metavar="TIME", help=t("triage.at"))] = None,
    node: Annotated[str | None, typer.Option(help=t("triage.node"))] = None,
    whole: Annotated[bool, typer.Option("--whole", help=t("triage.whole"))] = False,
    every_node: Annotated[bool, typer.Option("--all", help=t("triage.all"))] = False,
    signals: Annotated[Path | None, typer.Option("--signals", metavar="FILE", help=t("triage.signals"))] = None,
    as_json: JsonOption = False,
    webhook: Annotated[str | None, typer.Option(metavar="URL", help=t("up.webhook"))] = None,
    state_dir: StateOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    lang: LangOption = None,
) -> None:
    with one_line_for_mistakes():
        configuration = gather(
            config, overrides(state_dir=state_dir, store=store, lang=lang, triage={"webhook_url": webhook}), lang
        )
        made = settings(configuration, "triage", TriageSettings, **shared(configuration))
        if signals:
            if serve or recording or at or node or every_node:
                raise Refused(t("triage.signals_alone"))
            raise typer.Exit(tell_signals(signals, made, as_json=as_json))
        if serve:
            if recording or at:
                raise Refused(t("triage.serve_alone"))
            logs.to_stderr()
            lock = up.claim(configuration.state_dir, "triage.lock", "triage.already_running", configuration.language)
            every_s, state_dir = made.evaluate_every_s, configuration.state_dir
            hello("triage", made.language, every_s=every_s, store=made.store_url, state_dir=state_dir)
            try:
                raise typer.Exit(triage_service.run(made))
            finally:
                os.close(lock)
        at_ns = None if at is None else moment(at)
        if recording:
            diagnoses = judge_recording(recording, at_ns, made)
        else:
            with stores_told(configuration.language):
                diagnoses = judge_live(made, at_ns, None if every_node else node or configuration.node)
        if as_json:
            verdicts = [entry for diagnosis in diagnoses for entry in verdict_json(diagnosis, configuration.language)]
            verdicts.sort(key=lambda entry: -float(str(entry["confidence"])))
            print(json.dumps(verdicts, ensure_ascii=False, indent=1))
        else:
            print_diagnoses(diagnoses, Console(highlight=False), configuration.language, whole=whole)
        raise typer.Exit(1 if any(diagnosis.verdicts for diagnosis in diagnoses) else 0)


app.command("drill", help=say("drill.about.command", SPOKEN))(drill_command)
app.command("report", help=say("report.about.command", SPOKEN), epilog=say("report.about.example", SPOKEN))(
    report_command
)
app.command("sweep", help=say("load_sweep.about.command", SPOKEN), epilog=say("load_sweep.about.example", SPOKEN))(
    sweep_command
)


@app.command("dashboard", help=t("dashboard.about"))
def dashboard_command(
    host: Annotated[str | None, typer.Option(help=t("dashboard.host"))] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help=t("dashboard.port"))] = None,
    state_dir: StateOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    lang: LangOption = None,
) -> None:
    with one_line_for_mistakes():
        configuration = gather(
            config,
            overrides(state_dir=state_dir, store=store, lang=lang, dashboard={"host": host, "port": port}),
            lang,
        )
        made = settings(configuration, "dashboard", DashboardSettings, **shared(configuration))
        try:
            from dashboard import app as dashboard_app
        except ModuleNotFoundError as error:
            raise Refused(t("extra_missing", module=error.name, extra="dashboard")) from None
        logs.to_stderr()
        hello("dashboard", made.language, host=made.host, port=made.port, store=made.store_url)
        raise typer.Exit(dashboard_app.run(made))


@app.command("simulate", help=t("simulate.about"))
def simulate_command(
    size: Annotated[str, typer.Argument(metavar="NODESxGPUS", help=t("simulate.size"))] = "4x8",
    fault: Annotated[str | None, typer.Option(metavar="NAME", help=t("simulate.fault"))] = None,
    fault_after: Annotated[float, typer.Option(metavar="SECONDS", help=t("simulate.fault_after"))] = 120.0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help=t("simulate.out"))] = None,
    seconds: Annotated[float, typer.Option(help=t("simulate.seconds"))] = 600.0,
    seed: Annotated[int, typer.Option(help=t("simulate.seed"))] = 0,
    faults: Annotated[bool, typer.Option("--faults", help=t("simulate.faults"))] = False,
    state_dir: StateOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    lang: LangOption = None,
) -> None:
    with one_line_for_mistakes():
        configuration = gather(config, overrides(state_dir=state_dir, store=store, lang=lang), lang)
        if faults:
            table = Table("fault", t("simulate.what"), box=None, header_style="bold")
            for name, what in simulation.describe_faults(configuration.language).items():
                table.add_row(name, what)
            Console(highlight=False).print(table)
            return
        nodes, gpus = fleet_size(size)
        configuration.sections["simulator"].update(
            {"nodes": nodes, "gpus_per_node": gpus, "fault": fault, "fault_after_s": fault_after, "seed": seed}
        )
        made = settings(configuration, "simulator", SimulatorSettings, **shared(configuration))
        if out is None:
            logs.to_stderr()
            raise typer.Exit(simulation.run(made))
        stderr = Console(stderr=True, highlight=False)
        minutes = (made.history_s + seconds) / 60
        stderr.print(t("simulate.making", minutes=minutes, nodes=nodes, gpus=gpus), soft_wrap=True)
        written = simulated_recording.record(made, seconds, out)
        stderr.print(t("simulate.written", count=written, path=out))


@app.command("record", help=r("record.about"))
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


@app.command("replay", help=r("replay.about"))
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


@app.command("export", help=r("export.about"))
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


@app.command("traffic", help=t("traffic.about"))
def traffic_command(
    url: Annotated[str | None, typer.Option(help=t("traffic.url"))] = None,
    rate: Annotated[float | None, typer.Option(metavar="PER_SECOND", help=t("traffic.rate"))] = None,
    config: ConfigOption = None,
) -> None:
    with one_line_for_mistakes():
        configuration = gather(
            config, overrides(state_dir=None, store=None, lang=None, traffic={"url": url, "rate_per_s": rate})
        )
        raise typer.Exit(traffic.run(settings(configuration, "traffic", TrafficSettings)))


@app.command("check-config", help=t("check.about"))
def check_config_command(
    as_json: JsonOption = False,
    state_dir: StateOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    lang: LangOption = None,
) -> None:
    with one_line_for_mistakes():
        configuration = gather(config, overrides(state_dir=state_dir, store=store, lang=lang), lang)
        kinds: dict[str, type] = {
            "agent": AgentSettings,
            "engine": EngineSettings,
            "triage": TriageSettings,
            "dashboard": DashboardSettings,
            "traffic": TrafficSettings,
            "simulator": SimulatorSettings,
            "report": ReportSettings,
        }
        for section, kind in kinds.items():
            settings(configuration, section, kind, **shared(configuration))
        shown = {
            "state_dir": str(configuration.state_dir),
            **redacted({"store": configuration.store_url if "@" in configuration.store_url else None}),
            "language": configuration.language,
            **{name: redacted(configuration.sections[name]) for name in SECTIONS if configuration.sections[name]},
        }
        if shown["store"] is None:
            shown["store"] = configuration.store_url
        if as_json:
            print(json.dumps(shown, ensure_ascii=False, indent=1))
        else:
            Console(highlight=False).print(t("check.fine"))
            Console(highlight=False).print_json(data=shown)


@app.command("version", help=t("version.about"))
def version_command() -> None:
    print_version(True)


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


def fleet_size(text: str) -> tuple[int, int]:
    """4x8 -> (4, 8). Refused for anything else, or for more than 1,000 nodes or 16 GPUs a node."""
    match = re.fullmatch(r"(\d{1,4})[xX](\d{1,2})", text)
    nodes, gpus = (int(match[1]), int(match[2])) if match else (0, 0)
    if not (1 <= nodes <= 1000 and 1 <= gpus <= 16):
        raise Refused(t("size_wrong", text=text))
    return nodes, gpus


def duration_s(text: str) -> float:
    """Seconds of 90, 90s, 10m, 1h30m. Refused for anything else, and for more than a day."""
    match = re.fullmatch(r"(?=\d)(?:(\d{1,4})h)?(?:(\d{1,5})m)?(?:(\d{1,6})s?)?", text)
    hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0)
    found = hours * 3600 + minutes * 60 + seconds
    if not 1 <= found <= pausing.LONGEST_S:
        raise Refused(t("pause.duration_wrong", text=text))
    return float(found)

"""The command line: what a person types, turned into settings and handed to a part. Nothing is measured or judged here."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from agent.settings import AgentSettings
from agent.simulator import recording as simulated_recording
from agent.simulator import service as simulation
from agent.simulator.settings import SimulatorSettings
from dashboard.settings import DashboardSettings
from engine.settings import EngineSettings
from engine.threads import calm_openmp
from pairscope import __version__, traffic, up
from pairscope.cli_copies import export_command, record_command, replay_command
from pairscope.cli_drill import drill_command
from pairscope.cli_host import (
    agent_command,
    doctor_command,
    pause_command,
    resume_command,
    store_check_command,
    store_init_command,
)
from pairscope.cli_migrate import migrate_command
from pairscope.cli_report import report_command
from pairscope.cli_sweep import sweep_command
from pairscope.config import (
    SECTIONS,
    default_state_dir,
    gather,
    redacted,
    settings,
)
from pairscope.judge import judge_live, judge_recording, print_diagnoses
from pairscope.options import (
    SPOKEN,
    ConfigOption,
    JsonOption,
    LangOption,
    Refused,
    StateOption,
    StoreOption,
    hello,
    moment,
    one_line_for_mistakes,
    overrides,
    shared,
    stores_told,
    t,
)
from pairscope.plan import plan_up
from pairscope.report.settings import ReportSettings
from pairscope.signals import tell_signals
from pairscope.traffic import TrafficSettings
from rules import service as triage_service
from rules.service import TriageSettings
from rules.verdict import verdict_json
from telemetry import logs
from telemetry.messages import say
from telemetry.process import die_with_parent

app = typer.Typer(
    name="pairscope",
    help=t("about"),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


app.command("agent", help=t("agent.about"))(agent_command)

app.command("doctor", help=t("doctor.about"))(doctor_command)

store_app = typer.Typer(help=say("store.about", SPOKEN), no_args_is_help=True)
app.add_typer(store_app, name="store")


store_app.command("init", help=say("store.init_about", SPOKEN))(store_init_command)

store_app.command("check", help=say("store.check_about", SPOKEN))(store_check_command)

app.command("pause", help=t("pause.about"))(pause_command)

app.command("resume", help=t("resume.about"))(resume_command)


@app.command("engine", help=t("engine.about"))
def engine_command(
    model: Annotated[str | None, typer.Option(metavar="DIR|FILE|NAME", help=t("model"))] = None,
    host: Annotated[str | None, typer.Option(help=t("engine.host"))] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help=t("engine.port"))] = None,
    quantize: Annotated[str | None, typer.Option(metavar="none|int8|int4|auto", help=t("engine.quantize"))] = None,
    attention: Annotated[
        str | None, typer.Option(metavar="auto|sdpa|flex|flash|flashinfer", help=t("engine.attention"))
    ] = None,
    speculate: Annotated[str | None, typer.Option(metavar="off|ngram|draft:MODEL", help=t("engine.speculate"))] = None,
    speculate_tokens: Annotated[int | None, typer.Option(min=1, max=64, help=t("engine.speculate_tokens"))] = None,
    check_quality: Annotated[bool, typer.Option("--check-quality", help=t("engine.check_quality"))] = False,
    step_log: Annotated[str | None, typer.Option(metavar="FILE", help=t("engine.step_log"))] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option("--tensor-parallel", min=1, metavar="N", help=t("engine.tensor_parallel"))
    ] = None,
    config: ConfigOption = None,
    lang: LangOption = None,
) -> None:
    with one_line_for_mistakes():
        given: dict[str, object] = {"model": model, "host": host, "port": port, "quantize": quantize}
        given |= {"attention": attention, "step_log": step_log, "tensor_parallel": tensor_parallel}
        given |= {"speculate": speculate, "speculate_tokens": speculate_tokens}
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
        logs.to_stderr(also=("pairscope.engine",))
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
            diagnoses = judge_recording(recording, at_ns, made, node)
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

app.command("migrate", help=say("migrate.about.command", SPOKEN), epilog=say("migrate.about.example", SPOKEN))(
    migrate_command
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


app.command("record", help=say("recording.record.about", SPOKEN))(record_command)

app.command("replay", help=say("recording.replay.about", SPOKEN))(replay_command)

app.command("export", help=say("recording.export.about", SPOKEN))(export_command)


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


def fleet_size(text: str) -> tuple[int, int]:
    """4x8 -> (4, 8). Refused for anything else, or for more than 1,000 nodes or 16 GPUs a node."""
    match = re.fullmatch(r"(\d{1,4})[xX](\d{1,2})", text)
    nodes, gpus = (int(match[1]), int(match[2])) if match else (0, 0)
    if not (1 <= nodes <= 1000 and 1 <= gpus <= 16):
        raise Refused(t("size_wrong", text=text))
    return nodes, gpus

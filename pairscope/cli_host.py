"""What concerns one host's agent: `pairscope agent`, `doctor`, `store init` and `check`, `pause` and `resume`."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from agent import daemon
from agent.collectors.interface import Finding
from agent.doctor.examination import Patient, examine, worst
from agent.doctor.running import without_paused
from agent.reload import ConfigurationRefused
from agent.settings import AgentSettings
from agent.sweep import sweep
from pairscope import doctor, pausing
from pairscope import store as storing
from pairscope.config import (
    ConfigError,
    Configuration,
    gather,
    private_files,
    settings,
)
from pairscope.options import (
    ConfigOption,
    JsonOption,
    LangOption,
    Refused,
    StateOption,
    StoreOption,
    hello,
    one_line_for_mistakes,
    overrides,
    shared,
    t,
)
from pairscope.sweep import print_sweep
from telemetry import logs
from telemetry.messages import say

ONCE_WAIT_S = 15.0
"""How long a person waits for sources that take longer than a tick: a BMC needs some seconds to answer at all."""


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


def tell_of_store(found: Sequence[Finding], as_json: bool, language: str) -> None:
    if as_json:
        print(json.dumps(doctor.as_json(found), ensure_ascii=False, indent=1))
    else:
        Console(highlight=False).print(doctor.findings_table(found, language))
    raise typer.Exit(doctor.EXIT_CODES[worst(found)])


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


def resume_command(state_dir: StateOption = None, config: ConfigOption = None, lang: LangOption = None) -> None:
    with one_line_for_mistakes():
        made = agent_settings(gather(config, overrides(state_dir=state_dir, store=None, lang=lang), lang))
        print(say(f"pairscope.pausing.{'resumed' if pausing.resume(made) else 'no_pause'}", made.language))


def duration_s(text: str) -> float:
    """Seconds of 90, 90s, 10m, 1h30m. Refused for anything else, and for more than a day."""
    match = re.fullmatch(r"(?=\d)(?:(\d{1,4})h)?(?:(\d{1,5})m)?(?:(\d{1,6})s?)?", text)
    hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0)
    found = hours * 3600 + minutes * 60 + seconds
    if not 1 <= found <= pausing.LONGEST_S:
        raise Refused(t("pause.duration_wrong", text=text))
    return float(found)

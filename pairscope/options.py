"""What all commands share on the command line: their options, the words of their help, and how a user's mistake ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from agent.simulator.settings import SimulatorError
from pairscope import pausing, up
from pairscope.config import ConfigError, Configuration
from pairscope.moment import moment_ns
from pairscope.whole_file import CannotCopy
from rules.signals import SignalsError
from telemetry.messages import LANGUAGES, say, terminal_language
from telemetry.store import StoreError, public_url

SPOKEN = terminal_language()


def t(key: str, **values: object) -> str:
    return say(f"pairscope.cli.{key}", SPOKEN, **values)


ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", metavar="FILE", help=t("config"))]
StateOption = Annotated[Path | None, typer.Option("--state-dir", metavar="DIR", help=t("state_dir"))]
StoreOption = Annotated[str | None, typer.Option("--store", metavar="URL", help=t("store"))]
LangOption = Annotated[str | None, typer.Option("--lang", "--language", metavar="|".join(LANGUAGES), help=t("lang"))]
JsonOption = Annotated[bool, typer.Option("--json", help=t("json"))]


class Refused(Exception):
    """A user's mistake: one line, exit 2."""


@contextmanager
def one_line_for_mistakes() -> Iterator[None]:
    """Every user's mistake ends as one line on stderr and exit 2; a broken pipe ends silently."""
    try:
        yield
    except (
        ConfigError,
        up.CannotStart,
        StoreError,
        SimulatorError,
        SignalsError,
        Refused,
        pausing.CannotPause,
        CannotCopy,
    ) as error:
        Console(stderr=True, soft_wrap=True).print(f"pairscope: {error}", markup=False, highlight=False)
        raise typer.Exit(2) from None
    except BrokenPipeError:
        _silence_stdout()
        raise typer.Exit(0) from None


@contextmanager
def stores_told(language: str) -> Iterator[None]:
    """What is wrong with a store, in the language of the configuration."""
    try:
        yield
    except StoreError as error:
        raise Refused(error.told(language)) from None


def overrides(
    *, state_dir: Path | None, store: str | None, lang: str | None, **sections: dict[str, Any]
) -> dict[str, Any]:
    return {"state_dir": str(state_dir) if state_dir else None, "store": store, "language": lang, **sections}


def shared(configuration: Configuration) -> dict[str, object]:
    """What every part gets from the top of the configuration."""
    return {
        "store_url": configuration.store_url,
        "state_dir": configuration.state_dir,
        "language": configuration.language,
        "node": configuration.node,
        **configuration.place,
    }


def _silence_stdout() -> None:
    """Nothing more gets through; the interpreter would flush the old one on its way out, and fail."""
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - open until the end of the process


def print_whole(text: str, language: str) -> None:
    """Print it; Refused where stdout takes no more, as on a full disk."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        _silence_stdout()
        raise Refused(say("recording.file.stdout", language, reason=error.strerror or str(error))) from None


def moment(text: str, option: str = "--at") -> int:
    """As `moment_ns`, Refused for what is no moment, with the option that holds it."""
    try:
        return moment_ns(text)
    except (ValueError, OverflowError):
        raise Refused(t("triage.at_wrong", option=option, text=text)) from None


def hello(part: str, language: str, *, store: str, **values: object) -> None:
    """One line on stderr that says what a daemon is about to do, where and for how long."""
    line = say(f"pairscope.cli.hello.{part}", language, store=public_url(store), **values)
    Console(stderr=True, soft_wrap=True).print(line, markup=False, highlight=False)

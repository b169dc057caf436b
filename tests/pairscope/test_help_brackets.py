"""Brackets in the texts of the command line reach the reader: the help is markup, and an extra's name looks like a mark of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import click
import typer
from rich.markup import render
from typer.testing import CliRunner

from pairscope.cli import app
from telemetry.messages import LANGUAGES, say

STYLES = {"bold", "dim", "italic", "green", "red", "yellow", "cyan"}


def texts(command: click.Command, name: str = "pairscope") -> Iterator[tuple[str, str]]:
    yield name, command.help or ""
    for parameter in command.params:
        yield f"{name} {parameter.name}", getattr(parameter, "help", None) or ""
    children: Mapping[str, click.Command] = getattr(command, "commands", {})
    for child_name, child in children.items():
        yield from texts(child, f"{name} {child_name}")


def test_no_bracket_of_a_help_text_is_taken_for_markup_but_those_that_are() -> None:
    found = list(texts(typer.main.get_command(app)))
    found += [(language, say("recording.export.about", language)) for language in LANGUAGES]
    assert len(found) > 50
    for name, text in found:
        for span in render(text).spans:
            assert set(str(span.style).split()) <= STYLES, (name, span.style)


def test_the_extra_that_parquet_needs_is_named_whole() -> None:
    for arguments in (["export", "--help"], ["--help"]):
        shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).stdout
        assert re.search(r"pairscope\[export\]", shown), shown

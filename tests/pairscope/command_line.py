"""`pairscope ...` as a person types it, within this process: its words, its two streams and its exit code."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from pairscope import cli


def pairscope(*arguments: str, typed: bytes | None = None) -> Result:
    """In English, unless the arguments say otherwise; `typed` is what comes on stdin."""
    return CliRunner().invoke(cli.app, list(arguments), input=typed, env={"PAIRSCOPE_LANG": "en"})

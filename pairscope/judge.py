"""Judging from the terminal: samples from a recording or from the store, judged by the rules, printed for a person."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from rules import triage
from rules.settings import TriageSettings
from rules.verdict import Diagnosis, Status
from telemetry import lineprotocol
from telemetry.messages import say
from telemetry.sample import Sample
from telemetry.store import StoreError, open_store

LIVE_HISTORY_NS = 2 * 3600 * 10**9
JUDGED = ("gpu", "engine", "host", "psu", "power", "thermal", "circuit", "event", "agent")
COLOURS = {Status.CONFIRMED: "red", Status.SYMPTOM: "yellow", Status.RULED_OUT: "green", Status.NO_DATA: "bright_black"}

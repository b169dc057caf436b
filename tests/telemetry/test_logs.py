"""The log of a daemon: every line has its time and level, once, and the journal's own time is not doubled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from telemetry.logs import and_then

SPEAK = "import logging; from telemetry import logs; logs.to_stderr(); logs.to_stderr(); logging.getLogger('a').warning('it %s', 'broke')"


TELL = "import logging; from telemetry import logs; logs.to_stderr(also=('a',)); [logging.getLogger(n).info('%s', n) for n in 'ab']"


def spoken(tmp_path: Path, *, journal: bool, program: str = SPEAK) -> str:
    with (tmp_path / "log").open("w") as log:
        place = os.fstat(log.fileno())
        stream = f"{place.st_dev}:{place.st_ino}" if journal else "9:4711"  # of the parent: this one writes to a file
        environment = {**os.environ, "JOURNAL_STREAM": stream, "TZ": "Asia/Shanghai"}
        subprocess.run([sys.executable, "-c", program], stderr=log, env=environment, check=True)
    return (tmp_path / "log").read_text()


def test_a_line_has_local_time_and_level(tmp_path: Path) -> None:
    line = spoken(tmp_path, journal=False)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+08:00 warning: it broke\n", line), line


def test_the_journal_gets_no_second_time(tmp_path: Path) -> None:
    assert spoken(tmp_path, journal=True) == "warning: it broke\n"


def test_what_only_tells_is_heard_of_those_that_were_asked_for(tmp_path: Path) -> None:
    assert spoken(tmp_path, journal=True, program=TELL) == "info: a\n"


def test_what_comes_next_is_a_sentence_of_its_own_after_a_question() -> None:
    assert and_then("is it running?", "next attempt in 1 s") == "is it running? Next attempt in 1 s"
    assert and_then("disk full", "trying again") == "disk full; trying again"

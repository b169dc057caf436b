"""A report into files: the plots first, the text that names them last, each whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from pairscope.report.content import Report
from pairscope.report.markdown import markdown
from pairscope.report.plots import Drawn
from pairscope.whole_file import CannotCopy, WholeFile, refuse_unless_new, unwritable
from telemetry.messages import say

TEXT = "report.md"


def default_folder(report: Report) -> Path:
    """A name for the moment that is told, in the current folder."""
    at_ns = report.incidents[0].since_ns if report.incidents else report.end_ns
    return Path(f"incident-{datetime.fromtimestamp(at_ns / 1e9, UTC):%Y%m%dT%H%M%SZ}")


def write(
    report: Report,
    plots: Mapping[int, Sequence[Drawn]],
    out: Path,
    language: str,
    *,
    inside: bool,
    force: bool,
) -> list[Path]:
    """The files that were written, the text first. CannotCopy before anything is written where one is there already."""
    text = text_of(out, language, force=force)
    named = {place: [_beside(text, plot) for plot in drawn] for place, drawn in plots.items()}
    files = [] if inside else [plot for drawn in named.values() for plot in drawn]
    told = markdown(report, named, language, inside=inside)
    contents = {text.parent / plot.name: plot.svg for plot in files} | {text: told}
    with _nothing_left(text.parent, contents):
        _make_folder(text.parent, language)
        for path in contents:
            refuse_unless_new(path, force=force, language=language)
        for path, content in contents.items():
            _put(path, content, language, force=force)
    return [text, *(path for path in contents if path != text)]


@contextmanager
def _nothing_left(folder: Path, paths: Iterable[Path]) -> Iterator[None]:
    """Where the block fails, what was not there before is taken away again: half a report is none."""
    had_folder, had = folder.exists(), {path for path in paths if path.exists()}
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for path in paths:
                if path not in had:
                    path.unlink(missing_ok=True)
            if not had_folder:
                folder.rmdir()
        raise


def text_of(out: Path, language: str, *, force: bool) -> Path:
    """Where the text goes. CannotCopy for a place that can't be: told before a long walk, not after it."""
    if out.suffix and out.suffix != ".md" and not out.is_dir():
        raise CannotCopy(say("report.mistake.suffix", language, path=out))
    text = out if out.suffix == ".md" and not out.is_dir() else out / TEXT
    if not out.parent.is_dir():
        raise CannotCopy(say("recording.file.no_folder", language, path=out, folder=out.parent))
    if out.exists():
        refuse_unless_new(text, force=force, language=language)
    return text


def _beside(text: Path, plot: Drawn) -> Drawn:
    """Beside a file that is named by hand, the plots carry its name, so that two reports in one folder don't meet."""
    if text.name == TEXT:
        return plot
    stem = "".join(letter if (letter.isalnum() and letter.isascii()) or letter in "-_" else "-" for letter in text.stem)
    return replace(plot, name=f"{stem}-{plot.name}")


def _make_folder(folder: Path, language: str) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error, language) from None


def _put(path: Path, text: str, language: str, *, force: bool) -> None:
    with WholeFile(path, force=force, language=language) as file:
        file.write(text.encode("utf-8"))

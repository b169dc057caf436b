"""Every sentence that a user sees, in English and Simplified Chinese, side by side in one TOML file per room.

A file `rules.toml` holds tables of `key = { en = "...", zh = "..." }`; its sentences are asked for as `rules.table.key`.
Placeholders are `str.format` fields by name, so `{loss_pct:.0f}` works; `{down_s:span_s}` and `{minutes:span_min}` are a time with its
unit, in hours from two of them on. Both languages must use the same names (a test holds it).
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from string import Formatter

LANGUAGES = ("en", "zh")

Values = Mapping[str, object]


@cache
def catalogue() -> Mapping[str, Mapping[str, str]]:
    """key -> language -> sentence, read once. ValueError names the file and key of an entry without one of the languages."""
    sentences: dict[str, Mapping[str, str]] = {}
    for entry in files(__package__).iterdir():
        if entry.name.endswith(".toml"):
            _flatten(entry.name.removesuffix(".toml"), tomllib.loads(entry.read_text("utf-8")), sentences)
    return sentences


def _flatten(prefix: str, node: Mapping[str, object], into: dict[str, Mapping[str, str]]) -> None:
    if set(node) == set(LANGUAGES) and all(isinstance(text, str) for text in node.values()):
        into[prefix] = {language: str(text) for language, text in node.items()}
        return
    for name, child in node.items():
        if not isinstance(child, Mapping):
            raise ValueError(f"messages {prefix}.{name}: expected a table with {' and '.join(LANGUAGES)}")
        _flatten(f"{prefix}.{name}", child, into)


def say(key: str, language: str = "en", /, **values: object) -> str:
    """The sentence for `key` in `language`, filled in. KeyError for an unknown key: a missing sentence is a defect, not a blank."""
    sentence = catalogue()[key][language if language in LANGUAGES else "en"]
    if values and ":span_" in sentence:
        return _Spans(language).vformat(sentence, (), values)
    return sentence.format(**values) if values else sentence


_SPANS_S = {"span_s": 1, "span_min": 60}
_SPAN_WORDS = {"en": ("s", "min", "h"), "zh": ("秒", "分钟", "小时")}


class _Spans(Formatter):
    """`str.format` that knows spans of time as well."""

    def __init__(self, language: str) -> None:
        self._second, self._minute, self._hour = _SPAN_WORDS.get(language, _SPAN_WORDS["en"])

    def format_field(self, value: object, format_spec: str) -> str:
        if format_spec not in _SPANS_S or not isinstance(value, int | float):
            return str(super().format_field(value, format_spec))
        seconds = value * _SPANS_S[format_spec]
        if seconds >= 7200:
            return f"{seconds / 3600:.1f} {self._hour}"
        return f"{value:.0f} {self._second if format_spec == 'span_s' else self._minute}"


def terminal_language() -> str:
    """The language of the terminal: PAIRSCOPE_LANG if set, else zh when the locale says Chinese, else en."""
    for variable in ("PAIRSCOPE_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        value = os.environ.get(variable)
        if value:
            return "zh" if value.lower().startswith("zh") else "en"
    return "en"

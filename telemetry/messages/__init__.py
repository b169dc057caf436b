"""Every sentence that a user sees, in English and Simplified Chinese, side by side in one TOML file per room.

A file `rules.toml` holds tables of `key = { en = "...", zh = "..." }`; its sentences are asked for as `rules.table.key`.
Placeholders are `str.format` fields by name, so `{loss_pct:.0f}` works; both languages must use the same names (a test holds it).
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

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
    return sentence.format(**values) if values else sentence


def terminal_language() -> str:
    """The language of the terminal: PAIRSCOPE_LANG if set, else zh when the locale says Chinese, else en."""
    for variable in ("PAIRSCOPE_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        value = os.environ.get(variable)
        if value:
            return "zh" if value.lower().startswith("zh") else "en"
    return "en"

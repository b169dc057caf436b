"""Both languages say the same thing: every sentence exists in both, with the same placeholders."""

from __future__ import annotations

import string

from telemetry import catalogue, messages


def placeholders(sentence: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(sentence) if name is not None}


def test_every_sentence_has_the_same_placeholders_in_both_languages() -> None:
    assert messages.catalogue()
    for key, sentence in messages.catalogue().items():
        assert placeholders(sentence["en"]) == placeholders(sentence["zh"]), key


def test_every_chinese_sentence_is_translated() -> None:
    for key, sentence in messages.catalogue().items():
        letters = [c for c in sentence["en"] if c.isalpha()]
        if len(letters) > 24:  # short entries may be a bare technical name
            assert any("\u4e00" <= c <= "\u9fff" for c in sentence["zh"]), key


def test_every_catalogue_entry_has_both_titles() -> None:
    for measurement in catalogue.MEASUREMENTS.values():
        for field in measurement.fields.values():
            assert field.title_en and field.title_zh, (measurement.name, field.name)

"""Secrets of a server's store: sent as they are, or refused without a word of them, by both kinds of server."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from telemetry.store import StoreError, influxdb_http, open_store, victoriametrics
from telemetry.store.failure import is_victoria

KINDS = ("influxdb", "victoriametrics")
PARSE = {"influxdb": influxdb_http.parse, "victoriametrics": victoriametrics.parse}
SECRET = "s3cr3t"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "token", [f"{SECRET}\nX: y", f"{SECRET}\r\n\r\nGET /", f"{SECRET}密", f"{SECRET}\x7f", f"{SECRET}é"]
)
def test_a_token_that_no_header_can_hold_is_refused_and_not_shown(
    kind: str, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(token, "utf-8")
    for where in ("variable", "file"):
        if where == "variable":
            monkeypatch.setenv("PAIRSCOPE_STORE_TOKEN", token)
        else:
            monkeypatch.delenv("PAIRSCOPE_STORE_TOKEN")
        url = f"{kind}://db/x" + (f"?token_file={tmp_path}/token" if where == "file" else "")
        with pytest.raises(StoreError) as caught:
            open_store(url)
        for told in (str(caught.value), caught.value.told("zh"), repr(caught.value)):
            assert SECRET not in told and "\n" not in told
        assert "PAIRSCOPE_STORE_TOKEN" in str(caught.value) or f"{tmp_path}/token" in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_break_behind_the_token_of_the_environment_is_not_of_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAIRSCOPE_STORE_TOKEN", f"{SECRET}\n")
    assert PARSE[kind](f"{kind}://db/x").authorization.split(" ", 1)[1] == SECRET
    monkeypatch.setenv("PAIRSCOPE_STORE_TOKEN", "\n")
    assert PARSE[kind](f"{kind}://db/x").authorization == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_password_in_any_script_is_sent_in_utf_8(kind: str) -> None:
    sent = PARSE[kind](f"{kind}://m%C3%A9:%E5%AF%86%0A:x@db/x").authorization
    assert base64.b64decode(sent.removeprefix("Basic ")).decode("utf-8") == "mé:密\n:x"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["[::1/x", "\u2100db/x", "[v1.x/x"])
def test_a_url_that_is_none_is_one_line_without_its_password(kind: str, place: str) -> None:
    with pytest.raises(StoreError) as caught:
        open_store(f"{kind}://me:{SECRET}@{place}")
    for told in (str(caught.value), caught.value.told("zh")):
        assert SECRET not in told and "\n" not in told and kind in told


def test_an_answer_nested_without_end_is_of_no_victoriametrics() -> None:
    assert not is_victoria("[" * 200_000)
    assert is_victoria(json.dumps({"data": {"result": [{"value": [1, "1"]}]}}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("letter", ["?", "#", "/", "?db=1&"])
def test_a_password_that_is_cut_by_a_letter_of_its_own_is_never_shown_and_how_to_write_it_is(
    kind: str, letter: str
) -> None:
    for before in ("12", "pa", ""):
        for url in (
            f"{kind}://me:{before}{letter}{SECRET}@db/x",
            f"{kind}://me:{before}{letter}{SECRET}@db/x?verify=0",
            f"{kind}://me:{SECRET}@db/x?{SECRET}=1",
        ):
            with pytest.raises(StoreError) as caught:
                open_store(url)
            assert "%3F" in str(caught.value) and "%3F" in caught.value.told("zh"), url
            assert SECRET not in f"{caught.value}{caught.value.told('zh')}{caught.value!r}", url
    with pytest.raises(StoreError, match="unknown option colour; known are"):
        open_store(f"{kind}://db/x?colour=red")
    PARSE[kind](f"{kind}://me:{SECRET}%3F%23%2F%40@db:1/x?token={SECRET}@1")

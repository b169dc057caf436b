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

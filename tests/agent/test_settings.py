"""Settings of sources: a mistake is one line that names the thing, and no password gets into it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.settings import AgentSettings, BmcTarget, EngineTarget, PduTarget


@pytest.mark.parametrize(
    "url", ["https://bmc.example", "https://10.0.0.7:8443", "ipmi://bmc.example", "ipmi:", "http://127.0.0.1:8000"]
)
def test_a_bmc_is_redfish_over_tls_or_ipmi(url: str) -> None:
    assert BmcTarget(url).url == url


@pytest.mark.parametrize(
    "url", ["bmc.example", "http://bmc.example", "https://", "ftp://bmc", "ipmi:///dev", "https://host:99999"]
)
def test_other_bmc_addresses_are_refused_with_the_remedy(url: str) -> None:
    with pytest.raises(ValueError, match="https://"):
        BmcTarget(url)


def test_a_password_inside_a_bmc_url_is_refused_without_being_repeated() -> None:
    with pytest.raises(ValueError, match="keys of their own") as refused:
        BmcTarget("https://root:s3cret@bmc.example")
    assert "s3cret" not in str(refused.value)


def test_a_b_redundancy_needs_the_supplies_of_the_second_feed() -> None:
    with pytest.raises(ValueError, match="feed_b"):
        BmcTarget("https://bmc.example", redundancy="A/B")


def test_a_pdu_needs_exactly_one_way_to_log_in() -> None:
    for given in ({}, {"community": "public", "user": "reader"}):
        with pytest.raises(ValueError, match="community"):
            PduTarget("p1", "pdu.example", **given)


def test_exporters_need_an_http_address(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dcgm_url"):
        AgentSettings(tmp_path, "sqlite:///x", dcgm_url="localhost:9400")


def test_a_probe_is_never_more_often_than_once_a_second() -> None:
    with pytest.raises(ValueError, match="probe_every_s"):
        EngineTarget("e", "http://127.0.0.1:8000", probe_every_s=0.1)


@pytest.mark.parametrize(
    "url",
    [
        "http://user:s3cret@127.0.0.1:8000",
        "http://s3cret@127.0.0.1",
        "http://user:s3cret@host:x",
        "http://a\nb",
        "http://a b",
    ],
)
def test_an_engines_address_is_shown_and_so_holds_neither_a_password_nor_a_new_line(url: str) -> None:
    with pytest.raises(ValueError, match="engine chat: url") as refused:
        EngineTarget("chat", url)
    assert "s3cret" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_exporters_address_that_is_refused_is_repeated_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dcgm_url") as refused:
        AgentSettings(tmp_path, "sqlite:///x", dcgm_url="http://user:s3cret@host:99999")
    assert "s3cret" not in str(refused.value)


def test_no_target_shows_its_secrets_when_it_is_printed() -> None:
    targets = (
        EngineTarget("e", "http://127.0.0.1:1", api_key="s3cret"),
        BmcTarget("https://bmc.example", "u", "s3cret"),
        PduTarget("p", "pdu.example", community="s3cret"),
        PduTarget("p", "pdu.example", user="u", auth_password="s3cret", privacy_password="s3cret"),
    )
    assert "s3cret" not in repr(targets)

"""One session, ended on every exit; no account is locked; and a BMC that behaves badly costs its own numbers only."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from agent.power.fault import BmcFault, Trouble
from agent.power.redfish import client
from agent.power.redfish.reader import RedfishReader
from agent.settings import BmcTarget
from tests import loopback
from tests.agent.power.conftest import Read, Serve
from tests.doubles.engine_endpoint import nothing_listens
from tests.doubles.redfish import server
from tests.doubles.redfish.documents import CHASSIS, collection, ref
from tests.doubles.redfish.server import PASSWORD, SESSIONS, USER, Fault, RedfishBmc, body, redirect, slow, status

SUPPLY = f"{CHASSIS}/PowerSubsystem/PowerSupplies/1"


def eventually(is_so: Callable[[], bool], within_s: float = 90.0) -> bool:
    until_s = time.monotonic() + within_s
    while not is_so() and time.monotonic() < until_s:
        time.sleep(0.01)
    return is_so()


def fault_of(reader: RedfishReader) -> BmcFault:
    with pytest.raises(BmcFault) as fault:
        reader.read()
    return fault.value


def test_one_session_serves_all_visits_and_is_ended_at_the_end(serve: Serve, reader: Read) -> None:
    bmc = serve("both")
    one = reader(bmc)
    for _ in range(4):
        one.read()
    assert (bmc.opened, len(bmc.sessions)) == (1, 1)
    assert {asked.auth for asked in bmc.asked if asked.method == "GET" and asked.path != "/redfish/v1/"} == {"session"}
    one.close()
    assert bmc.sessions == {}
    assert fault_of(one).trouble is Trouble.UNREACHABLE  # what is closed asks nothing more
    assert bmc.opened == 1


def test_an_expired_session_is_renewed_once_and_not_in_a_loop(serve: Serve, reader: Read) -> None:
    bmc = serve("both")
    one = reader(bmc)
    one.read()
    bmc.expire()
    assert one.read().node_w == 3815.0
    assert (bmc.opened, len(bmc.sessions)) == (2, 1)
    bmc.faults = dict.fromkeys(bmc.documents, status(401))
    bmc.asked.clear()
    assert fault_of(one).trouble is Trouble.REFUSED
    assert (bmc.opened, len(bmc.sessions)) == (3, 0)
    assert len(bmc.asked) < 8


def test_a_document_that_is_refused_does_not_cost_the_rest(serve: Serve, reader: Read) -> None:
    bmc = serve("new")
    bmc.faults[f"{CHASSIS}/EnvironmentMetrics"] = status(401)
    one = reader(bmc)
    reading = one.read()
    assert (reading.node_w, len(reading.supplies or ()), reading.inlet_c) == (None, 3, 24.5)
    for _ in range(3):
        one.read()
    assert bmc.opened == 2  # it was asked again once, and then left alone
    bmc.faults[f"{CHASSIS}/ThermalSubsystem/ThermalMetrics"] = status(403)
    assert one.read().inlet_c is None
    one.close()
    assert bmc.sessions == {}


def test_without_a_session_service_every_request_carries_the_password(serve: Serve, reader: Read) -> None:
    for profile in ("gone", "unlisted"):
        bmc = serve("both")
        bmc.has_sessions = profile != "gone"
        if profile == "unlisted":
            del bmc.documents["/redfish/v1/"]["SessionService"], bmc.documents["/redfish/v1/"]["Links"]
        assert reader(bmc).read().node_w == 3815.0
        assert bmc.opened == 0
        assert {asked.auth for asked in bmc.asked if asked.path.startswith("/redfish/v1/Chassis")} == {"basic"}


def test_without_a_user_no_credentials_are_sent(serve: Serve, reader: Read) -> None:
    bmc = serve("both")
    assert fault_of(reader(bmc, user="", password="")).trouble is Trouble.REFUSED
    assert {asked.auth for asked in bmc.asked} == {"none"} and bmc.paths("POST") == []


def test_when_no_session_is_left_it_gets_by_without_and_takes_one_when_there_is(serve: Serve, reader: Read) -> None:
    bmc = serve("both")
    bmc.session_limit = 0
    one = reader(bmc)
    assert one.read().node_w == 3815.0
    assert bmc.opened == 0
    bmc.session_limit = 1
    bmc.asked.clear()
    assert one.read().node_w == 3815.0
    assert (bmc.opened, {asked.auth for asked in bmc.asked if "Chassis" in asked.path}) == (1, {"session"})


def test_a_bmc_that_is_full_and_gives_nothing_without_a_session_is_called_full(serve: Serve, reader: Read) -> None:
    bmc = serve("both")
    bmc.session_limit = 0
    bmc.faults = {path: status(503) for path in bmc.documents if path != "/redfish/v1/"}
    assert fault_of(reader(bmc)).trouble is Trouble.CROWDED


@pytest.mark.parametrize("code", [400, 401, 403])
def test_after_three_refusals_it_asks_once_an_hour(serve: Serve, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bmc = serve("both")
    bmc.login_status = code
    now_s = [1000.0]
    one = RedfishReader(BmcTarget(bmc.url, USER, PASSWORD), monotonic=lambda: now_s[0])
    for _ in range(20):
        assert fault_of(one).trouble is Trouble.REFUSED
        now_s[0] += 30
    assert len(bmc.paths("POST")) == 3
    now_s[0] += 1.2 * client.PAUSE_S
    for _ in range(5):
        fault_of(one)
        now_s[0] += 30
    assert len(bmc.paths("POST")) == 4
    bmc.login_status = None
    now_s[0] += 1.2 * client.PAUSE_S
    assert one.read().node_w == 3815.0
    one.close()
    assert bmc.sessions == {}


def test_a_wrong_password_where_there_are_no_sessions_is_a_refusal_too(serve: Serve, reader: Read) -> None:
    bmc = serve("both")
    bmc.has_sessions = False
    one = reader(bmc, password="another")
    for _ in range(6):
        assert fault_of(one).trouble is Trouble.REFUSED
    assert len([asked for asked in bmc.asked if asked.auth == "wrong" and "Chassis" in asked.path]) == 3


def test_a_bmc_that_is_not_there_is_unreachable(reader: Read) -> None:
    class Nowhere:
        url = nothing_listens()

    assert fault_of(reader(Nowhere())).trouble is Trouble.UNREACHABLE


BAD: dict[str, Fault] = {
    "404": status(404),
    "503": status(503),
    "bad JSON": body(b'{"Name": "half'),
    "no object": body([1, 2, 3]),
    "null": body(None),
    "deep": body(b'{"a":' * 200_000 + b"1" + b"}" * 200_000),
    "endless": server.endless,
    "redirect off": redirect("http://127.0.0.2/redfish/v1/Chassis"),
    "redirect off, no scheme": redirect("//evil.example/redfish/v1/Chassis", 307),
    "redirect loop": redirect(SUPPLY, 308),
    "cut short": lambda _bmc: server.Reply(raw=True, body=b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"),
    "not HTTP": lambda _bmc: server.Reply(raw=True, body=b"220 smtp ready\r\n"),
    "gzip that is none": lambda _bmc: server.Reply(
        raw=True, body=b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"
    ),
    "wild types": body({"Status": [], "Name": {}, "InputRanges": {"a": 1}, "Metrics": 7, "PowerCapacityWatts": []}),
}


@pytest.mark.parametrize("kind", BAD)
def test_one_document_that_is_broken_costs_its_own_numbers_and_no_session(
    serve: Serve, reader: Read, kind: str
) -> None:
    bmc = serve("new")
    one = reader(bmc)
    one.read()
    bmc.faults[SUPPLY] = BAD[kind]
    reading = one.read()
    assert (reading.node_w, reading.inlet_c, reading.leak) == (3815.0, 24.5, False)
    others = {supply.name: supply.output_w for supply in reading.supplies or ()}
    assert (others["PSU1"], others["PSU3"]) == (1210.0, 1195.0)
    assert others.get("PSU2") is None
    if kind not in ("404", "wild types"):  # it is there and can't be read: not gone, and not fine
        assert "PSU2" in others and any(SUPPLY in problem for problem in reading.problems)
    one.close()
    assert bmc.sessions == {}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("place", ["/redfish/v1/", "/redfish/v1/Chassis", CHASSIS, f"{CHASSIS}/Power"])
def test_a_bmc_that_is_broken_from_the_start_leaves_no_session(
    serve: Serve, reader: Read, kind: str, place: str
) -> None:
    bmc = serve("old")
    bmc.faults[place] = BAD[kind]
    one = reader(bmc)
    try:
        reading = one.read()
    except BmcFault:
        assert bmc.sessions == {}  # a visit that failed leaves nothing open
    else:
        assert not reading.supplies and reading.node_w is None
    del bmc.faults[place]
    one._rediscover_s = 0.0
    assert one.read().node_w == 3815.0
    one.close()
    assert bmc.sessions == {}


@pytest.mark.parametrize("fault", [server.hang, server.drip, server.drip_headers, slow(20)])
@pytest.mark.parametrize("place", ["/redfish/v1/", CHASSIS, SUPPLY])
def test_a_bmc_that_stalls_ends_within_the_visits_deadline(
    serve: Serve, reader: Read, fault: Fault, place: str
) -> None:
    bmc = serve("new")
    bmc.faults[place] = fault
    one = reader(bmc, deadline_s=1.0)
    began_s = time.monotonic()
    assert fault_of(one).trouble is Trouble.SLOW
    assert time.monotonic() - began_s < 15  # well before what stalls would end by itself
    bmc.released.set()
    one.close()
    assert eventually(lambda: bmc.sessions == {})


def test_what_was_read_of_power_stands_when_the_rest_comes_too_late(serve: Serve, reader: Read) -> None:
    bmc = serve("new")
    one = reader(bmc, deadline_s=4.0)
    one.read()
    bmc.faults[f"{CHASSIS}/ThermalSubsystem/ThermalMetrics"] = server.drip
    reading = one.read()
    assert (reading.node_w, len(reading.supplies or ()), reading.inlet_c) == (3815.0, 3, None)
    assert len(reading.problems) == 1


def test_a_first_visit_that_is_too_short_is_gone_on_with(serve: Serve, reader: Read) -> None:
    bmc = serve("hgx")
    for path in list(bmc.documents):
        bmc.faults[path] = lambda bmc, path=path: server.Reply(
            body=json.dumps(bmc.documents[path]).encode(), wait_s=0.06
        )
    one = reader(bmc, deadline_s=1.0)
    assert fault_of(one).trouble is Trouble.SLOW
    for _ in range(20):
        try:
            assert one.read().node_w == 3815.0
        except BmcFault as fault:
            assert fault.trouble is Trouble.SLOW
        else:
            break
    else:
        pytest.fail("it never came to an end")


def test_redirects_to_a_trailing_slash_are_followed(serve: Serve, reader: Read) -> None:
    bmc = serve("both")
    bmc.slash_redirects = True
    assert reader(bmc).read().node_w == 3815.0


def test_nothing_is_asked_of_another_place(serve: Serve, reader: Read) -> None:
    bmc, other = serve("new"), serve("new")
    metrics = f"{SUPPLY}/Metrics"
    for address in (
        f"{other.url}{metrics}",
        f"//127.0.0.1:{other.port}{metrics}",
        f"@127.0.0.1:{other.port}/x",
        "redfish/v1/relative",
        "/a path\nwith lines",
        "/" + "x" * 5000,
        7,
        None,
    ):
        bmc.documents[SUPPLY]["Metrics"] = {"@odata.id": address}
        reading = reader(bmc).read()
        assert (reading.supplies or ())[1].output_w is None
    bmc.documents[SUPPLY]["Metrics"] = ref(metrics)
    bmc.faults[metrics] = redirect(f"{other.url}{metrics}")
    assert (reader(bmc).read().supplies or ())[1].output_w is None
    assert other.asked == []


def test_a_collection_without_end_and_pages_in_a_circle_are_bounded(serve: Serve, reader: Read) -> None:
    bmc = serve("new")
    supplies = f"{CHASSIS}/PowerSubsystem/PowerSupplies"
    own = bmc.documents[supplies]["Members"]
    bmc.documents[supplies] = collection(supplies, [])
    bmc.documents[supplies] |= {"Members": [*own, *own], "Members@odata.nextLink": f"{supplies}?page=2"}
    bmc.documents[f"{supplies}?page=2"] = {"Members": own, "Members@odata.nextLink": supplies}
    fans = f"{CHASSIS}/ThermalSubsystem/Fans"
    bmc.documents[fans]["Members"] += [ref(f"{fans}/{i}") for i in range(100, 9_000)]
    bmc.documents["/redfish/v1/Chassis"]["Members"] = [ref(CHASSIS)] * 3 + [
        ref(f"/redfish/v1/Chassis/{i}") for i in range(2, 5000)
    ]
    one = reader(bmc)
    reading = one.read()
    assert [supply.name for supply in reading.supplies or ()] == ["PSU1", "PSU2", "PSU3"]
    assert reading.fan_min_rpm == 8870.0
    assert len(bmc.asked) < 250
    bmc.asked.clear()
    assert one.read().node_w == 3815.0
    assert len(bmc.asked) < 30  # what leads nowhere is not asked again


def test_a_bmc_of_large_documents_is_left_alone_after_some_of_them(serve: Serve, reader: Read) -> None:
    bmc = serve("new")
    bmc.documents["/redfish/v1/Chassis"]["Members"] = [ref(f"{CHASSIS}{i}") for i in range(30)]
    for i in range(30):
        bmc.documents[f"{CHASSIS}{i}"] = {
            **bmc.documents[CHASSIS],
            "@odata.id": f"{CHASSIS}{i}",
            "Oem": "x" * 1_000_000,
        }
    one = reader(bmc)
    reading = one.read()
    assert sum("Chassis/1" in path and path.count("/") == 4 for path in bmc.paths()) < 12
    assert any("in one visit" in problem for problem in reading.problems)


def test_links_are_followed_anew_when_one_is_gone(serve: Serve, reader: Read) -> None:
    bmc = serve("new")
    one = reader(bmc)
    one.read()
    supplies = f"{CHASSIS}/PowerSubsystem/PowerSupplies"
    for suffix in ("", "/Metrics"):
        bmc.documents[f"{supplies}/moved{suffix}"] = bmc.documents.pop(f"{SUPPLY}{suffix}")
    bmc.documents[f"{supplies}/moved"] |= {
        "@odata.id": f"{supplies}/moved",
        "Metrics": ref(f"{supplies}/moved/Metrics"),
    }
    bmc.documents[supplies]["Members"][1] = ref(f"{supplies}/moved")
    assert [supply.name for supply in one.read().supplies or ()] == ["PSU1", "PSU3"]
    assert [supply.output_w for supply in one.read().supplies or ()] == [1210.0, 1180.0, 1195.0]
    bmc.asked.clear()
    one.read()
    assert CHASSIS not in bmc.paths()


@pytest.mark.parametrize("place", [f"{CHASSIS}/EnvironmentMetrics", "/redfish/v1/Chassis", "/redfish/v1/"])
def test_closing_in_the_middle_of_a_visit_ends_it_and_its_session(serve: Serve, reader: Read, place: str) -> None:
    bmc = serve("new")
    bmc.faults[place] = server.hang
    one = reader(bmc, deadline_s=90.0)
    ended = threading.Event()

    def visit() -> None:
        try:
            one.read()
        except BmcFault:
            ended.set()

    threading.Thread(target=visit, daemon=True).start()
    assert eventually(lambda: place in bmc.paths())
    began_s = time.monotonic()
    one.close()
    assert time.monotonic() - began_s < 45
    assert ended.wait(60)
    assert eventually(lambda: bmc.sessions == {})


def test_closing_while_a_login_is_under_way_leaves_no_session(serve: Serve, reader: Read) -> None:
    bmc = serve("new")
    bmc.login_wait_s = 0.3
    one = reader(bmc)
    thread = threading.Thread(target=fault_of, args=(one,), daemon=True)
    thread.start()
    assert eventually(lambda: SESSIONS in bmc.paths("POST"))
    one.close()
    thread.join(60)
    assert bmc.opened == 1
    assert eventually(lambda: bmc.sessions == {})


CONFIGURATION = """
state_dir = "{folder}"
[node]
name = "n7"
[agent]
port = {port}
interval_s = 0.5
nvml = false
[agent.bmc]
url = "{url}"
user = "{user}"
password_file = "{folder}/password"
every_s = 5
"""


def agent_with(bmc: RedfishBmc, folder: Path, port: int, *arguments: str) -> subprocess.Popen[str]:
    (folder / "password").write_text(PASSWORD)
    file = folder / "pairscope.toml"
    file.write_text(CONFIGURATION.format(folder=folder, port=port, url=bmc.url, user=USER))
    return subprocess.Popen(
        [sys.executable, "-m", "pairscope", "agent", "--config", str(file), *arguments],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PAIRSCOPE_LANG": "en"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_an_agent_that_changes_its_credentials_or_is_ended_by_signal_leaves_no_session_and_no_secret(
    serve: Serve, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    bmc = serve("both")
    port = free_port()
    agent = agent_with(bmc, tmp_path, port)

    def shown() -> str:
        with contextlib.suppress(httpx.HTTPError):
            return loopback.get(f"http://127.0.0.1:{port}/metrics").text
        return ""

    try:
        assert eventually(lambda: 'pairscope_psu_output_w{node="n7",psu="PSU2"} 1180.0' in shown(), 60)
        assert len(bmc.sessions) == 1
        bmc.password = "an0ther-0ne"
        (tmp_path / "password").write_text(bmc.password)
        agent.send_signal(signal.SIGHUP)
        assert eventually(lambda: bmc.opened == 2 and len(bmc.sessions) == 1, 60)
        agent.send_signal(signal.SIGTERM)
        output, _ = agent.communicate(timeout=120)
    finally:
        agent.kill()
    assert agent.returncode == 0
    assert bmc.sessions == {}
    assert bmc.opened == 2
    (tmp_path / "password").unlink()
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()) + output.encode()
    assert b"headroom_pct" in kept
    for secret in (PASSWORD.encode(), bmc.password.encode(), b"secret-of-the-session"):
        assert secret not in kept


def test_a_single_sweep_waits_for_the_bmc_and_shows_it(
    serve: Serve, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    bmc = serve("both")
    bmc.login_wait_s = 2.0  # longer than the sweep would take
    agent = agent_with(bmc, tmp_path, free_port(), "--once", "--json")
    try:
        output, _ = agent.communicate(timeout=120)
    finally:
        agent.kill()
    shown = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    psus = {sample["tags"]["psu"]: sample["fields"]["output_w"] for sample in shown if sample["measurement"] == "psu"}
    assert psus == {"PSU1": 1210.0, "PSU2": 1180.0, "PSU3": 1195.0}
    (power,) = [sample["fields"] for sample in shown if sample["measurement"] == "power"]
    assert power["headroom_pct"] == pytest.approx(100 * (1 - 3585 / 9000))
    assert power["headroom_redundant_pct"] == pytest.approx(100 * (1 - 3585 / 5900))
    assert bmc.sessions == {}

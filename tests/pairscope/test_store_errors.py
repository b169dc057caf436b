"""Every way in which a store can be wrong, by the commands that take one: one line, its target, the remedy, and never a secret."""

from __future__ import annotations

import fcntl
import json
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent.doctor import store as doctor
from pairscope import replay
from pairscope.cli import app
from telemetry.store import StoreError, open_existing, open_store, public_url
from tests.doubles import wrong_servers as wrong
from tests.doubles.wrong_servers import Banner, Foreign, certificate, influxdb
from tests.store_servers import Influxd, Victoria

SECRET = "s3cret"
RECORDING = "host,node=n1 load1=1 1795960800000000000\n"
OF_BOTH = {
    "web": r"does not (say that it is an InfluxDB|answer as a VictoriaMetrics); check host",
    "prometheus": r"does not (say that it is an InfluxDB|answer as a VictoriaMetrics); check host",
    "elasticsearch": r"does not (say that it is an InfluxDB|answer as a VictoriaMetrics); check host",
    "ssh": r"is no web server \(it says 'SSH-2.0-OpenSSH_9.6.*'\); check host and port",
    "nobody": r"no answer from http://127.0.0.1:\d+ \(Connection refused\); is the server running\?",
    "unresolvable": r"the host of http://nosuch.invalid:1 has no address; check its name",
    "self-signed": r"nobody known here vouches for the server's certificate \(self.signed certificate\).*ca_file=FILE",
    "expired": r"certificate has expired; renew it",
    "another name": r"certificate is for another name .*127.0.0.1.*; use the name",
    "TLS at a plain port": r"speaks no TLS; use (influxdb|victoriametrics)://",
    "plain at a TLS port": r"closed the connection without an answer.* use (influxdbs|victoriametricss)://",
    "no ca_file": r"ca_file /nowhere.pem: No such file or directory; name a file",
    "a ca_file without one": r"ca_file .* holds no certificate; name a PEM file",
    "no token_file": r"token_file /nowhere.token: No such file or directory; name a file",
    "full disk": r"the server's disk is full \(.*no space left on device\); free some",
}
CASES = {
    **{f"{kind}, {name}": says for name, says in OF_BOTH.items() for kind in ("influxdb", "victoriametrics")},
    "influxdb, a VictoriaMetrics": r"is a VictoriaMetrics; use victoriametrics://",
    "influxdb, a later VictoriaMetrics": r"is a VictoriaMetrics; use victoriametrics://",
    "victoriametrics, an InfluxDB": r"is an InfluxDB; use influxdb://",
    "influxdb, wrong password": r"refuses the credentials \(authorization failed\); check the user and password",
    "influxdb, no password": r"wants credentials \(.*\); give user:password@.*token_file",
    "influxdb, no right": r"credentials do not allow this \(.*\); grant read and write on fleet",
    "victoriametrics, wrong password": r"refuses the credentials \(.*\); check the user and password",
    "victoriametrics, no password": r"wants credentials \(.*\); give user:password@.*token_file",
    "influxdb 2, wrong token": r"refuses the credentials \(unauthorized access\); check .*token",
    "influxdb 2, no token": r"wants credentials \(unauthorized access\); give .*token_file",
    "influxdb 3, wrong token": r"refuses the credentials \(unauthorized access\); check .*token",
    "influxdb, no path": r"names no host or no database; use influxdb://host:8086/database",
    "victoriametrics, no host": r"names no host; use victoriametrics://host:8428",
    "influxdb, odd option": r"unknown option tokn; known are .*token_file",
    "victoriametrics, odd option": r"unknown option tokn; known are .*token_file",
    "unknown kind": r"unknown kind 'postgres'; use one of sqlite://",
    "sqlite, no database": r"is not a PairScope store; name another file",
    "sqlite, another's database": r"is another program's database; name another file",
    "sqlite, a folder": r"is a folder; name a file in it",
    "sqlite, newer": r"has layout 99, this version knows \d+; update PairScope",
}


@pytest.fixture(scope="module")
def urls(need_program: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Case -> URL, its servers running."""
    need_program("openssl")
    folder = tmp_path_factory.mktemp("wrong")
    found: dict[str, str] = {}
    with ExitStack() as stack:

        def port(server: Foreign | Banner) -> int:
            stack.callback(server.close)
            return server.server_port

        _, self_side = certificate(folder, "self", "IP:127.0.0.1")
        old_file, old_side = certificate(folder, "old", "IP:127.0.0.1", days=-1)
        other_file, other_side = certificate(folder, "other", "DNS:other.example")
        plain, tls = port(Foreign(wrong.anything)), port(Foreign(wrong.anything, context=self_side))
        (folder / "empty.pem").write_text("nothing\n")
        full = Foreign(lambda _path: (500, "write /data/wal: no space left on device"))
        at = {
            "web": ("", plain, ""),
            "prometheus": ("", port(Foreign(wrong.prometheus)), ""),
            "elasticsearch": ("", port(Foreign(wrong.elasticsearch)), ""),
            "ssh": ("", port(Banner()), ""),
            "nobody": ("", _free_port(), ""),
            "self-signed": ("s", tls, ""),
            "expired": ("s", port(Foreign(wrong.anything, context=old_side)), f"ca_file={old_file}"),
            "another name": ("s", port(Foreign(wrong.anything, context=other_side)), f"ca_file={other_file}"),
            "TLS at a plain port": ("s", plain, ""),
            "plain at a TLS port": ("", tls, ""),
            "no ca_file": ("s", tls, "ca_file=/nowhere.pem"),
            "a ca_file without one": ("s", tls, f"ca_file={folder}/empty.pem"),
            "no token_file": ("", plain, "token_file=/nowhere.token"),
            "full disk": ("", port(full), ""),
        }
        for kind, path in (("influxdb", "/fleet"), ("victoriametrics", "")):
            for name, (letter, number, options) in at.items():
                query = f"?{options}" if options else ""
                user = "" if options.startswith("token") else f"me:{SECRET}@"
                found[f"{kind}, {name}"] = f"{kind}{letter}://{user}127.0.0.1:{number}{path}{query}"
            found[f"{kind}, unresolvable"] = f"{kind}://me:{SECRET}@nosuch.invalid:1{path}"
        later = Foreign(wrong.later_victoria, headers={"X-Influxdb-Version": "1.8.0"})
        found["influxdb, a later VictoriaMetrics"] = f"influxdb://me:{SECRET}@127.0.0.1:{port(later)}/fleet"
        refusing = Foreign(influxdb(401, "unauthorized access"), headers={"X-Influxdb-Version": "v2.7.1"})
        found["influxdb 2, no token"] = f"influxdb://127.0.0.1:{port(refusing)}/fleet?org=o"
        found["influxdb 2, wrong token"] = f"{found['influxdb 2, no token']}&token={SECRET}"
        third = Foreign(influxdb(401, "unauthorized access"), headers={"X-Influxdb-Version": "3.11.2"})
        found["influxdb 3, wrong token"] = f"influxdb://127.0.0.1:{port(third)}/fleet?token={SECRET}"
        found |= {
            "influxdb, no path": "influxdb://127.0.0.1",
            "victoriametrics, no host": "victoriametrics://",
            "influxdb, odd option": f"influxdb://127.0.0.1/fleet?tokn={SECRET}",
            "victoriametrics, odd option": f"victoriametrics://127.0.0.1?tokn={SECRET}",
        }
        found["unknown kind"] = f"postgres://me:{SECRET}@db/x"
        found |= _files(folder)
        yield found


def _files(folder: Path) -> dict[str, str]:
    (folder / "notes.txt").write_text("my notes, by no means a database\n")
    with closing(sqlite3.connect(folder / "other.db")) as other:
        other.execute("CREATE TABLE contacts (name TEXT)")
        other.commit()
    open_store(f"sqlite://{folder}/newer.db").close()
    with closing(sqlite3.connect(folder / "newer.db")) as newer:
        newer.execute("PRAGMA user_version=99")
    (folder / "folder").mkdir()
    names = {
        "no database": "notes.txt",
        "another's database": "other.db",
        "a folder": "folder",
        "newer": "newer.db",
    }
    return {f"sqlite, {case}": f"sqlite://{folder}/{name}" for case, name in names.items()}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def guarded(need_program: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Case -> URL, on real servers that want a password."""
    influx = Influxd(need_program("influxd"), tmp_path_factory.mktemp("influxd"), auth=True)
    flags = ("-httpAuth.username=me", "-httpAuth.password=right")
    vm = Victoria(need_program("victoria-metrics"), tmp_path_factory.mktemp("victoria"), *flags)
    influx.start()
    vm.start()
    for query in (
        "CREATE USER admin WITH PASSWORD 'right' WITH ALL PRIVILEGES",
        f"CREATE USER guest WITH PASSWORD '{SECRET}'",
        "CREATE DATABASE fleet",
    ):
        asked = urllib.request.Request(
            f"http://{influx.address}/query?u=admin&p=right", data=f"q={query.replace(' ', '+')}".encode()
        )
        urllib.request.urlopen(asked, timeout=10).close()
    yield {
        "influxdb, wrong password": f"influxdb://admin:{SECRET}@{influx.address}/fleet",
        "influxdb, no password": f"influxdb://{influx.address}/fleet",
        "influxdb, no right": f"influxdb://guest:{SECRET}@{influx.address}/fleet",
        "victoriametrics, wrong password": f"victoriametrics://me:{SECRET}@{vm.address}",
        "victoriametrics, no password": f"victoriametrics://{vm.address}",
    }
    influx.kill()
    vm.kill()


OF_REAL = ("influxdb, a VictoriaMetrics", "victoriametrics, an InfluxDB")
OF_GUARDED = tuple(name for name in CASES if re.search(", (wrong|no) (password|right)", name))


@pytest.fixture
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(URL, what is said of it)"""
    name: str = request.param
    if name in OF_GUARDED:
        return request.getfixturevalue("guarded")[name], CASES[name]
    if name == OF_REAL[0]:
        return f"influxdb://me:{SECRET}@{request.getfixturevalue('victoria').address}/fleet", CASES[name]
    if name == OF_REAL[1]:
        return f"victoriametrics://me:{SECRET}@{request.getfixturevalue('influxd').address}", CASES[name]
    return request.getfixturevalue("urls")[name], CASES[name]


def commands(folder: Path) -> dict[str, list[str]]:
    (folder / "in.lp").write_text(RECORDING)
    return {
        "record": ["record", str(folder / "out.lp")],
        "export": ["export", str(folder / "out.csv"), "--measurement", "host"],
        "triage": ["triage"],
        "replay": ["replay", str(folder / "in.lp")],
    }


def invoked(arguments: Sequence[str], url: str, folder: Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*arguments, "--store", url, "--state-dir", str(folder / "state")])
    assert result.exception is None or isinstance(result.exception, SystemExit), arguments
    assert SECRET not in result.output
    return result.exit_code, result.output.strip()


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=pytest.mark.server) for n in CASES], indirect=True, ids=list(CASES)
)
def test_each_command_says_what_is_wrong_in_one_line_in_two_languages(
    case: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, says = case
    monkeypatch.setattr(replay, "PATIENCE_S", 0.0)
    shown = public_url(url)
    for name, arguments in commands(tmp_path).items():
        code, said = invoked(arguments, url, tmp_path)
        assert code == 2 and re.search(says, said), (name, said)
        assert "\n" not in said and said.isprintable() and said.startswith("pairscope: store "), (name, said)
        assert shown.removeprefix("sqlite://") in said, name
    for name in ("init", "check"):
        code, said = invoked(["store", name, "--json"], url, tmp_path)
        (finding,) = json.loads(said)["findings"]
        assert code == 2 and finding["level"] == "error" and re.search(says, finding["text"]), (name, said)
        assert finding["remedy"]
    (found,) = doctor.findings(url, "en")
    assert found.level == "error" and found.remedy and SECRET not in found.text
    assert re.search(says, found.text) or url.startswith("sqlite:")
    _, spoken = invoked([*commands(tmp_path)["replay"], "--lang", "zh"], url, tmp_path)
    assert re.search("[\u4e00-\u9fff]", spoken) and "\n" not in spoken
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "state") == ["in.lp"]


def test_a_bucket_that_is_missing_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "PATIENCE_S", 0.0)
    bare = Foreign(influxdb(404, 'bucket "fleet" not found'), headers={"X-Influxdb-Version": "v2.7.1"})
    with closing(bare):
        url = f"influxdb://127.0.0.1:{bare.server_port}/fleet?token={SECRET}"
        for name, arguments in commands(tmp_path).items():
            code, said = invoked(arguments, url, tmp_path)
            assert code == 2 and "\n" not in said and "127.0.0.1" in said, (name, said)
            assert ("create 'fleet'" if name == "replay" else "there is no store") in said, (name, said)


@pytest.mark.parametrize(
    ("said", "says", "spoken"),
    [
        (
            '{"error":"error parsing query"}',
            r"refuses a query \(error parsing query\); check its version",
            "服务器拒绝查询",
        ),
        ("[]", r"is no answer of an InfluxDB; check host and port", "不是 InfluxDB 的应答"),
        ('{"results":[{"series":7}]}', r"is no answer of an InfluxDB; check host and port", "不是 InfluxDB 的应答"),
    ],
)
def test_a_query_that_is_refused_or_answered_with_something_else_is_one_line(
    said: str, says: str, spoken: str, tmp_path: Path
) -> None:
    odd = Foreign(lambda path: (200, said) if "query" in path else (204, ""), headers={"X-Influxdb-Version": "1.8.0"})
    with closing(odd):
        url = f"influxdb://me:{SECRET}@127.0.0.1:{odd.server_port}/fleet"
        for name, arguments in commands(tmp_path).items():
            if name != "replay":
                for language, words in (("en", says), ("zh", spoken)):
                    code, told = invoked([*arguments, "--lang", language], url, tmp_path)
                    assert code == 2 and "\n" not in told and re.search(words, told), (name, told)
                    assert public_url(url) in told


# --- no server is to blame, or none is asked


@pytest.mark.parametrize("url", ["influxdb://127.0.0.1:http/fleet", "victoriametrics://127.0.0.1:99999"])
def test_a_port_that_is_none_is_told_with_the_usual_one(url: str, tmp_path: Path) -> None:
    usual = f"{url.rpartition(':')[0]}:{8086 if url.startswith('influx') else 8428}"
    for name, arguments in commands(tmp_path).items():
        for language, words in (
            ("en", "its port is no number up to 65535; write"),
            ("zh", "端口不是 65535 以内的数字"),
        ):
            code, told = invoked([*arguments, "--lang", language], url, tmp_path)
            assert code == 2 and "\n" not in told and words in told and usual in told, (name, told)


@pytest.mark.server
def test_what_only_reads_makes_no_database_and_no_file_and_says_so(
    influxd: Influxd,
    tmp_path: Path,
) -> None:
    for url in (influxd.new_url(), f"sqlite://{tmp_path}/typo.db"):
        for name, arguments in commands(tmp_path).items():
            if name != "replay":
                code, said = invoked(arguments, url, tmp_path)
                assert code == 2 and "there is no store" in said and "\n" not in said, name
        code, said = invoked(["store", "check"], url, tmp_path)
        assert code == 2 and "there is no such store" in " ".join(said.split())
        (found,) = doctor.findings(url, "en")
        assert found.level == "ok" and "will be made" in found.text
        assert open_existing(url) is None
        assert invoked(commands(tmp_path)["replay"], url, tmp_path)[0] == 0
        code, said = invoked([*commands(tmp_path)["record"], "--from", "2026-11-29"], url, tmp_path)
        assert code == 0 and (tmp_path / "out.lp").read_text().startswith("host,node=n1 load1=1")
        (tmp_path / "out.lp").unlink()


@pytest.mark.server
def test_a_database_that_may_not_be_made_is_left_to_an_administrator(guarded: dict[str, str]) -> None:
    url = guarded["influxdb, no right"].replace("/fleet", "/other")
    store = open_store(url)
    with pytest.raises(StoreError) as caught:
        store.prepare()
    assert re.search("grant read and write on other|let an administrator create it", str(caught.value))
    assert SECRET not in str(caught.value)
    store.close()


def test_an_embedded_store_on_a_full_disk_is_one_line_and_what_was_stored_stays(
    small_disk: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "PATIENCE_S", 0.0)
    small = small_disk(300 * 1024)
    (tmp_path / "in.lp").write_text("".join(f"host,node=n{n} load1=1 {n + 10**18}\n" for n in range(20_000)))
    for language, word in (("en", "the disk is full; free some space"), ("zh", "磁盘已满")):
        replayed = ["replay", str(tmp_path / "in.lp"), "--lang", language]
        code, said = invoked(replayed, f"sqlite://{small}/store.db", tmp_path)
        assert code == 2 and word in said and "\n" not in said
    code, said = invoked(["store", "init", "--json"], f"sqlite://{small}/deeper/store.db", tmp_path)
    assert code == 2 and "the disk is full" in said


# --- what runs on


def started(command: str, url: str, folder: Path, port: int = 0) -> subprocess.Popen[bytes]:
    folder.mkdir()
    arguments = [*command.split(), "--store", url, "--state-dir", str(folder / "state")]
    if port:
        arguments += ["--port", str(port)]
    with (folder / "said").open("wb") as said:
        return subprocess.Popen([sys.executable, "-m", "pairscope", *arguments], stdout=said, stderr=said)


HOPELESS = {
    "unknown kind": (f"postgres://me:{SECRET}@db/x", "unknown kind 'postgres'; use one of", "未知类型"),
    "an option": (f"influxdb://127.0.0.1/fleet?tokn={SECRET}", "unknown option tokn; known are", "未知选项 tokn"),
    "no port": ("influxdb://127.0.0.1:http/fleet", "its port is no number", "端口不是"),
    "no path": (f"influxdb://me:{SECRET}@127.0.0.1", "names no host or no database; use", "未指定主机或数据库"),
    "no ca_file": (
        "influxdbs://127.0.0.1/fleet?ca_file=/nowhere.pem",
        "name a file that this user may read",
        "请指定该用户可读的文件",
    ),
    "no token_file": (
        "victoriametrics://127.0.0.1?token_file=/nowhere",
        "name a file that this user may",
        "请指定该用户可读",
    ),
    "no database": ("sqlite://FOLDER/notes.txt", "is not a PairScope store; name another file", "不是 PairScope 存储"),
    "a folder": ("sqlite://FOLDER", "is a folder; name a file in it", "是目录"),
}
"""Stores that no waiting mends: (URL, what is said, the same in Chinese)."""
DAEMONS = ("agent", "triage --serve", "dashboard", "simulate 1x2")


@pytest.mark.parametrize("command", DAEMONS)
@pytest.mark.parametrize("wrong", HOPELESS)
def test_a_daemon_that_can_never_reach_its_store_ends_with_one_line_in_two_languages(
    command: str, wrong: str, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("by no means a database\n")
    url, says, spoken = HOPELESS[wrong]
    port = ["--port", "0"] if command in ("agent", "dashboard") else []
    for language, words in (("en", says), ("zh", spoken)):
        arguments = [*command.split(), *port, "--lang", language]
        code, told = invoked(arguments, url.replace("FOLDER", str(tmp_path)), tmp_path)
        *hello, last = told.splitlines()
        assert code == 2 and words in last and len(hello) <= 1, told
        assert language == "en" or all(re.search("[\u4e00-\u9fff]", line) for line in told.splitlines()), told
    assert {path.name for path in tmp_path.iterdir()} <= {"notes.txt", "state"}


def test_up_ends_with_the_words_of_the_part_that_cannot_work_and_leaves_none_running(
    free_port: Callable[[], int], tmp_path: Path
) -> None:
    ports = ["--agent-port", str(free_port()), "--dashboard-port", str(free_port())]
    arguments = ["up", "--no-engine", "--lang", "zh", *ports, "--store", f"sqlite://{tmp_path}"]
    state = tmp_path / "state"
    done = subprocess.run(
        [sys.executable, "-m", "pairscope", *arguments, "--state-dir", str(state)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert HOPELESS["a folder"][2] in line and str(tmp_path) in line and line.count("pairscope: ") == 1, line
    assert is_free(state / "up.lock") and is_free(state / "triage.lock")


def is_free(lock: Path) -> bool:
    """Whether nobody holds it any more, or ever did."""
    if not lock.exists():
        return True
    with lock.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def test_a_daemon_says_once_what_is_wrong_and_goes_on(free_port: Callable[[], int], tmp_path: Path) -> None:
    refusing = Foreign(influxdb(401, "unauthorized access"), headers={"X-Influxdb-Version": "v2.7.1"})
    ports = {"nobody": free_port(), "wrong token": free_port()}
    urls = {
        "nobody": f"influxdb://me:{SECRET}@127.0.0.1:{free_port()}/fleet",
        "wrong token": f"influxdb://127.0.0.1:{refusing.server_port}/fleet?token={SECRET}",
    }
    says = {"nobody": "is the server running?", "wrong token": "refuses the credentials (unauthorized access)"}
    running: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
    for name, url in urls.items():
        running["agent", name] = started("agent", url, tmp_path / f"agent {name}", ports[name])
        running["triage", name] = started("triage --serve", url, tmp_path / f"triage {name}")

    def said(command: str, name: str) -> str:
        return (tmp_path / f"{command} {name}" / "said").read_text()

    try:
        give_up_s = time.monotonic() + 240
        while any(says[name] not in said(*key) for key in running for name in key[1:]):
            assert time.monotonic() < give_up_s, {key: said(*key) for key in running}
            time.sleep(0.1)
        for name, port in ports.items():
            while says[name] not in (health := _health(port)):
                assert time.monotonic() < give_up_s, health
                time.sleep(0.1)
            assert SECRET not in health and json.loads(health)["status"] == "degraded"
        for key, process in running.items():
            assert process.poll() is None, key
            assert said(*key).count(says[key[1]]) == 1 and SECRET not in said(*key), said(*key)
    finally:
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        codes = {key: process.wait(120) for key, process in running.items()}
        refusing.close()
    assert set(codes.values()) == {0}


def _health(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except OSError:
        return ""

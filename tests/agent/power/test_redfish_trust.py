"""The password goes to the right BMC only: what a wrong certificate gets to see, and where the secrets turn up."""

from __future__ import annotations

import hashlib
import logging
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agent.collectors.bmc import BmcCollector
from agent.power.fault import BmcFault, Trouble
from agent.power.redfish.reader import RedfishReader
from agent.settings import BmcTarget
from tests.agent.power.conftest import Read, Serve
from tests.doubles.redfish.server import PASSWORD, USER, certificate, status

pytestmark = pytest.mark.server

Pair = tuple[Path, Path]


def fingerprint(pair: Pair) -> str:
    der = ssl.PEM_cert_to_DER_cert(pair[0].read_text())
    return hashlib.sha256(der).hexdigest()


def test_a_pinned_certificate_is_read_in_any_spelling_and_without_an_authority(
    serve: Serve, reader: Read, own_certificate: Pair
) -> None:
    bmc = serve("both", tls=own_certificate)
    plain = fingerprint(own_certificate)
    for spelling in (plain, plain.upper(), ":".join(plain[i : i + 2] for i in range(0, 64, 2))):
        assert reader(bmc, fingerprint_sha256=spelling).read().node_w == 3815.0


def test_behind_another_certificate_than_the_pinned_one_nothing_is_asked_at_all(
    serve: Serve, reader: Read, own_certificate: Pair
) -> None:
    bmc = serve("both", tls=own_certificate)
    for verify in (True, False):  # the pin holds, whatever else is switched off
        with pytest.raises(BmcFault) as fault:
            reader(bmc, fingerprint_sha256="ab" * 32, verify_tls=verify).read()
        assert fault.value.trouble is Trouble.UNTRUSTED
        assert fault.value.fingerprint.replace(":", "").lower() == fingerprint(own_certificate)
    assert bmc.asked == []


def test_a_certificate_changed_between_two_visits_gets_no_token(
    serve: Serve, reader: Read, own_certificate: Pair, tmp_path: Path, need_program: Callable[[str], str]
) -> None:
    bmc = serve("both", tls=own_certificate)
    one = reader(bmc, fingerprint_sha256=fingerprint(own_certificate))
    one.read()
    impostor = serve("both", tls=certificate(tmp_path, need_program("openssl"), "impostor"))
    one._client._base = one._client._base.copy_with(port=impostor.port)
    with pytest.raises(BmcFault) as fault:
        one.read()
    assert fault.value.trouble is Trouble.UNTRUSTED
    assert impostor.asked == []


def test_an_unknown_certificate_is_refused_and_its_fingerprint_told_for_pinning(
    serve: Serve, reader: Read, own_certificate: Pair
) -> None:
    bmc = serve("both", tls=own_certificate)
    with pytest.raises(BmcFault) as fault:
        reader(bmc).read()
    assert fault.value.trouble is Trouble.UNTRUSTED
    assert fault.value.fingerprint.replace(":", "").lower() == fingerprint(own_certificate)
    assert bmc.asked == []


def test_a_ca_file_makes_it_trusted_and_a_wrong_one_does_not(
    serve: Serve, reader: Read, own_certificate: Pair, tmp_path: Path, need_program: Callable[[str], str]
) -> None:
    bmc = serve("both", tls=own_certificate)
    assert reader(bmc, ca_file=own_certificate[0]).read().node_w == 3815.0
    bmc.asked.clear()
    other = certificate(tmp_path, need_program("openssl"), "bmc-two")
    for ca_file in (other[0], tmp_path / "missing.pem", other[1]):
        with pytest.raises(BmcFault) as fault:
            reader(bmc, ca_file=ca_file).read()
        assert fault.value.trouble is Trouble.UNTRUSTED
    assert bmc.asked == []


def test_verification_can_be_switched_off(serve: Serve, reader: Read, own_certificate: Pair) -> None:
    assert reader(serve("both", tls=own_certificate), verify_tls=False).read().node_w == 3815.0


def test_neither_password_nor_token_is_in_any_log_exception_sample_or_finding(
    serve: Serve, own_certificate: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    bmc = serve("both", tls=own_certificate)
    target = BmcTarget(bmc.url, USER, PASSWORD, fingerprint_sha256=fingerprint(own_certificate))
    said: list[str] = [repr(target)]
    caplog.set_level(logging.DEBUG)
    reader = RedfishReader(target)
    collector = BmcCollector({"node": "n7"}, target, reader)

    def visit() -> None:
        try:
            said.append(repr(reader.read()))
        except BmcFault as fault:
            said.extend((str(fault), repr(fault), repr(fault.__context__), repr(fault.__cause__)))
            said.extend(repr(collector._fault_finding(fault, language)) for language in ("en", "zh"))
            logging.getLogger("test").exception("as a caller may log it")

    visit()
    bmc.expire()
    visit()
    for fault in (status(401), status(403), status(500), lambda bmc: bmc.released.wait(0) or status(503)(bmc)):
        bmc.faults = dict.fromkeys(bmc.documents, fault)
        visit()
    bmc.faults = {}
    bmc.login_status = 503
    bmc.expire()
    visit()
    bmc.login_status = 401
    bmc.expire()
    visit()
    reader.close()
    wrong = RedfishReader(replace(target, fingerprint_sha256="00" * 32))
    try:
        wrong.read()
    except BmcFault as fault:
        said.append(repr(fault))
    bmc.close()
    try:
        RedfishReader(target).read()
    except BmcFault as fault:
        said.append(repr(fault))
    said.append(caplog.text)
    said += [repr(vars(record)) for record in caplog.records]
    everything = "\n".join(said)
    assert any(asked.auth == "basic" for asked in bmc.asked) and bmc.opened >= 2 and "HTTP" in everything
    for secret in (PASSWORD, "secret-of-the-session", "Basic "):
        assert secret not in everything

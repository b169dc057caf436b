"""Trust: whose certificate may be given the password, and which one was seen where it may not."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
from typing import Any

from agent.power.fault import BmcFault, Trouble
from agent.settings import BmcTarget


class Untrusted(ssl.SSLCertVerificationError):
    """The certificate of this very connection is not the one that was pinned."""

    def __init__(self, fingerprint: str) -> None:
        super().__init__("its certificate is not the pinned one")
        self.fingerprint = fingerprint


class PinnedContext(ssl.SSLContext):
    """TLS with one certificate and no other: whoever shows another is gone before a byte of any request is written to it."""

    pinned = ""

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        secured = super().wrap_socket(*args, **kwargs)  # the handshake is made here
        seen = fingerprint_of(secured)
        if not self.pinned or _plain(seen) != self.pinned:
            secured.close()
            raise Untrusted(seen)
        return secured

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        raise ssl.SSLError("a pinned certificate can't be checked on this kind of connection")


def context_of(target: BmcTarget) -> ssl.SSLContext:
    """By the fingerprint where one is given, else by `ca_file` or the system's authorities, else (verify_tls = false) none.

    BmcFault where `ca_file` can't be used.
    """
    if target.fingerprint_sha256:
        pinned = PinnedContext(ssl.PROTOCOL_TLS_CLIENT)
        pinned.check_hostname = False
        pinned.verify_mode = ssl.CERT_NONE
        pinned.pinned = _plain(target.fingerprint_sha256)
        return pinned
    if not target.verify_tls:
        return _unverified()
    try:
        return ssl.create_default_context(cafile=target.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise BmcFault(Trouble.UNTRUSTED, f"ca_file {target.ca_file}: {error.strerror or error}") from None


def why_untrusted(error: BaseException) -> ssl.SSLCertVerificationError | None:
    """The refusal of a certificate that lies behind an error of the HTTP library."""
    seen: BaseException | None = error
    for _ in range(8):
        if seen is None:
            return None
        if isinstance(seen, ssl.SSLCertVerificationError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def seen_fingerprint(host: str, port: int, within_s: float) -> str:
    """SHA-256 of the certificate that is shown there, "" where none can be seen. Nothing is sent but the handshake."""
    with (
        contextlib.suppress(OSError, ssl.SSLError, ValueError),
        socket.create_connection((host, port), within_s) as plain,
        _unverified().wrap_socket(plain, server_hostname=host) as secured,
    ):
        return fingerprint_of(secured)
    return ""


def fingerprint_of(secured: ssl.SSLSocket) -> str:
    """SHA-256 of the other side's certificate as colon-separated hexadecimal; "" where it has none."""
    certificate = secured.getpeercert(binary_form=True)
    return hashlib.sha256(certificate).digest().hex(":").upper() if certificate else ""


def _plain(fingerprint: str) -> str:
    return fingerprint.replace(":", "").lower()


def _unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context

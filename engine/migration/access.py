"""Who may move requests: whoever holds the token, or, where none is set, this machine alone. A browser never."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.requests import Request


class Forbidden(Exception):
    """Not for this caller. `code` is the HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def refuse_strangers(request: Request, token: str | None) -> None:
    """Forbidden unless the caller has the token, or, without one, comes from this machine."""
    if "origin" in request.headers:  # a page in a browser on this machine is not this machine's owner
        raise Forbidden(403, "requests are not moved for web pages")
    if token is None:
        if request.client is None or not is_loopback(request.client.host):
            raise Forbidden(403, "without migrate_token requests are moved between processes of one machine only")
        return
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise Forbidden(401, "the migrate_token is missing or wrong")


def refuse_target(url: str, token: str | None) -> str:
    """The base address of a target without its last slash. Forbidden unless it is http(s) and, without a token, on this machine."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise Forbidden(400, "target is no address of an engine") from None
    if parts.scheme not in ("http", "https") or not host or parts.username or parts.query or parts.fragment:
        raise Forbidden(400, "target must be the base address of an engine, such as http://10.0.0.2:8601")
    if token is None and not is_loopback(host):
        raise Forbidden(403, "without migrate_token requests are moved between processes of one machine only")
    return url.rstrip("/")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

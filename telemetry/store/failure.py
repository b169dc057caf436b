"""What is wrong with a server of a store, told in one line with its remedy: from an exception of the transport or a status."""

from __future__ import annotations

import contextlib
import json
import os
import re
import ssl
from base64 import b64encode
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from urllib3.exceptions import HTTPError, NameResolutionError, NewConnectionError, ProtocolError, SSLError
from urllib3.exceptions import TimeoutError as TimedOut

from telemetry.lineprotocol import printable
from telemetry.store.http_answer import TooLarge, TooLong
from telemetry.store.interface import StoreDown, StoreError

TOKEN_VARIABLE = "PAIRSCOPE_STORE_TOKEN"  # noqa: S105  the name of a variable, not a secret
_LONGEST = 200
# numbers of OpenSSL's x509_vfy.h
_EXPIRED, _NAMES, _UNKNOWN = 10, (62, 63, 64), (18, 19, 20, 21)
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG", "UNEXPECTED_MESSAGE")


@dataclass(frozen=True, slots=True)
class Target:
    """Who was asked. `plain` and `tls` are the schemes of the kind of store without and with TLS."""

    store: str  # the URL without secrets
    base: str  # http://host:port
    plain: str
    tls: str

    def error(self, key: str, **values: object) -> StoreError:
        return StoreError.of(f"store.failure.{key}", store=self.store, **values)

    def down(self, key: str, **values: object) -> StoreDown:
        return StoreDown.of(f"store.failure.{key}", store=self.store, **values)

    def unreached(self, error: HTTPError | OSError, *, answered: bool) -> StoreError:
        """StoreDown for what may pass, StoreError for what stays as it is until somebody mends it. `answered`: it has, before."""
        if isinstance(error, SSLError):
            return self._untrusted(error.args[0] if error.args else error)
        if isinstance(error, TooLarge):
            return self.down("too_large", base=self.base, most=f"{error.most_bytes / (1 << 20):g}")
        if isinstance(error, TooLong):
            return self.down("too_long", base=self.base, within=f"{error.within_s:g}")
        if isinstance(error, NameResolutionError):
            return self.down("unresolved", base=self.base)
        if isinstance(error, TimedOut) and not isinstance(error, NewConnectionError):
            return self.down("silent", base=self.base)
        if isinstance(error, ProtocolError):
            cause = error.args[1] if len(error.args) > 1 else None
            if type(cause).__name__ == "BadStatusLine":
                return self.error("no_http", base=self.base, reason=one_line(str(cause)))
            if isinstance(cause, ConnectionError) and self.base.startswith("http:"):
                if answered:
                    return self.down("broken_off", base=self.base)
                return self.down("hung_up", base=self.base, tls=self.tls)
        return self.down("down", base=self.base, reason=_system(error))

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """StoreError for what of an answer that looks right can't be read: a list where a number belongs, a text for a time.

        What the caller asks for must have been checked before.
        """
        try:
            yield
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            reason = one_line(f"{type(error).__name__}: {error}")
            raise self.error("not_understood", base=self.base, reason=reason) from error

    def _untrusted(self, error: object) -> StoreError:
        code = error.verify_code if isinstance(error, ssl.SSLCertVerificationError) else None
        name = str(getattr(error, "reason", None) or error)
        reason = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else one_line(name)
        if code == _EXPIRED:
            return self.error("tls_expired")
        if code in _NAMES:
            return self.error("tls_name", reason=reason)
        if code in _UNKNOWN:
            return self.error("tls_unknown", reason=reason)
        if any(word in name for word in _NO_TLS):
            return self.error("tls_absent", base=self.base, plain=self.plain)
        return self.error("tls", reason=reason)

    def answered(self, status: int, reason: str, *, has_credentials: bool, grant: str, after: str | None) -> StoreError:
        """An answer that is neither 2xx nor a refusal of what was sent. `grant` is what rights are needed on."""
        if status == 401:
            return self.error("credentials" if has_credentials else "no_credentials", reason=reason)
        if status == 403:
            return self.error("forbidden", reason=reason, grant=grant)
        if 300 <= status < 500 and status not in (408, 429):
            return self.error("status", status=status, reason=reason)
        if "read-only" in reason or "readonly" in reason:
            return self.down("read_only", reason=reason)
        if "no space left" in reason:
            return self.down("full", reason=reason)
        wait_s = StoreDown("", after).retry_after_s
        if wait_s is not None:
            return self.down("wait", status=status, reason=reason, after=f"{wait_s:.0f}").until(after)
        return self.down("trouble", status=status, reason=reason)

    def check_receipt(self, text: str) -> None:
        """StoreDown where a write was answered with 2xx and a text: a sign-in page of a proxy, say. A store that took it says nothing."""
        if text.strip():
            raise self.down("no_receipt", base=self.base, reason=one_line(text))

    def is_tls_wanted(self, reason: str) -> bool:
        """Go's servers answer a plain request on their TLS port so."""
        return self.base.startswith("http:") and "HTTP request to an HTTPS server" in reason

    def unreadable(self, option: str, path: str, error: OSError) -> StoreError:
        """A file that the URL names can't be read."""
        return self.error("file", option=option, path=path, reason=error.strerror or str(error))

    def authorization(self, kind: str, parts: SplitResult, options: Mapping[str, str]) -> str:
        """The header of that name, empty for none: of user and password (UTF-8, RFC 7617), else of a token, after its `kind`."""
        from_file = self.token_in(options["token_file"]) if "token_file" in options else ""
        if parts.username:
            credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            return f"Basic {b64encode(credentials.encode('utf-8', 'surrogateescape')).decode('ascii')}"
        token = from_file or (options.get("token") or os.environ.get(TOKEN_VARIABLE, "")).strip()
        if not is_token(token):
            raise self.error("bad_token", variable=TOKEN_VARIABLE)
        return f"{kind} {token}" if token else ""

    def token_in(self, path: str) -> str:
        """StoreError when it can't be read, or is empty."""
        try:
            token = Path(path).read_text("utf-8").strip()
        except UnicodeDecodeError:
            raise self.error("no_token", path=path) from None
        except OSError as error:
            raise self.unreadable("token_file", path, error) from None
        if not token or not is_token(token):
            raise self.error("no_token", path=path)
        return token

    def check_ca_file(self, path: str | None) -> None:
        """StoreError when the authorities in `path` can't be read."""
        if path is None:
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
        except ssl.SSLError:
            raise self.error("no_certificate", path=path) from None
        except OSError as error:
            raise self.unreadable("ca_file", path, error) from None


def is_token(text: str) -> bool:
    """Whether a header can hold it; what the transport says of one that it can't quotes the secret."""
    return text.isascii() and text.isprintable()


def parted(url: str) -> SplitResult:
    """The parts of a URL. StoreError for what is none, without a word of it: any of it may be of a password."""
    try:
        return urlsplit(url)
    except ValueError:
        raise StoreError.of("store.failure.no_url", kind=url.partition(":")[0]) from None


def port_of(parts: SplitResult, usual: int) -> int:
    """StoreError for a port that is none."""
    try:
        return parts.port or usual
    except ValueError:
        raise StoreError.of("store.failure.no_port", kind=parts.scheme, host=parts.hostname, usual=usual) from None


def check_options(parts: SplitResult, options: Collection[str], known: Collection[str]) -> None:
    """StoreError for an option that isn't known, and for a URL whose password seems to hold what ends a part of a URL.

    Nothing of a URL is shown that has a user, or may have had one before it was cut at the wrong place. Asked before all else.
    """
    unknown = sorted(set(options) - set(known))
    rest = (parts.path, parts.fragment, *unknown)
    has_user = "@" in parts.netloc
    is_cut = any("@" in text for text in rest) or ("@" in parts.query and not has_user and not _has_port(parts))
    if is_cut or (unknown and has_user):
        raise StoreError.of("store.failure.odd_password", kind=parts.scheme, known=", ".join(known))
    if unknown:
        shown = f"{parts.scheme}://{parts.netloc}{parts.path}"
        names = {"unknown": ", ".join(unknown), "known": ", ".join(known)}
        raise StoreError.of("store.failure.option", store=shown, **names)


def _has_port(parts: SplitResult) -> bool:
    try:
        return parts.port is None or parts.port >= 0
    except ValueError:
        return False


def one_line(text: str) -> str:
    """What a server said, fit for a terminal and a log."""
    found = " ".join(printable(text).split())
    return found if len(found) <= _LONGEST else found[:_LONGEST] + "..."


def _system(error: HTTPError | OSError) -> str:
    """What the system says, without what the libraries put before it."""
    return one_line(re.sub(r"^\[Errno -?\d+\] ", "", str(error).rsplit(": ", 1)[-1]))


def is_victoria(answer: str) -> bool:
    """Whether this is the answer to `1 default 2`, an operator that only MetricsQL has: of no Prometheus and no InfluxDB."""
    try:
        return bool(json.loads(answer)["data"]["result"][0]["value"][1] == "1")
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return False


VICTORIA_PROBE = ("/api/v1/query", {"query": "1 default 2"})

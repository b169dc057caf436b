"""An InfluxDB server over HTTP: its address and how to be let in, its generation found out by asking, what its refusals mean."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any
from urllib.parse import parse_qsl, unquote

from influxdb_client import InfluxDBClient
from influxdb_client.rest import ApiException
from urllib3.exceptions import HTTPError

from telemetry.store import http_answer, influxdb_bucket
from telemetry.store.failure import VICTORIA_PROBE, Target, check_options, is_victoria, one_line, parted, port_of
from telemetry.store.influxql import NoAnswer, each_result, identifier, results
from telemetry.store.interface import StoreError

DEFAULT_PORT = 8086
OPTIONS = ("org", "token", "token_file", "ca_file", "verify")
TIMEOUT_MS = (3_000, 20_000)  # to connect, to answer
_LONG_QUERY = 4000
_LONG_LINE = re.compile(r"'(.{60}).+'(?=: )", re.DOTALL)
"""The line that a server could not parse, which stands before what is wrong with it."""
_LEAST_SPAN_NS = 600 * 10**9
_NO_RIGHTS = ("store.failure.forbidden", "store.failure.credentials", "store.failure.no_credentials")


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is and how to be let in; made from influxdb://[user:password@]host[:port]/database[?options]."""

    base: str  # http://host:port/prefix
    shown: str  # the URL without secrets, for messages
    database: str
    org: str = ""
    verify_tls: bool = True
    ca_file: str | None = None
    authorization: str = dataclass_field(default="", repr=False)

    @property
    def target(self) -> Target:
        return Target(self.shown, self.base, "influxdb", "influxdbs")


def parse(url: str) -> Address:
    """StoreError names what is missing. Options: org, token, token_file, ca_file, verify=0; influxdbs:// means TLS."""
    parts = parted(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    check_options(parts, options, OPTIONS)
    port = port_of(parts, DEFAULT_PORT)
    prefix, _, database = parts.path.rpartition("/")
    database = unquote(database)
    host = parts.hostname or ""
    shown = f"{parts.scheme}://{host}:{port}{prefix}/{database}"
    if not host or not database:
        raise StoreError.of("store.failure.incomplete", store=shown, kind=parts.scheme, port=port)
    scheme = "https" if parts.scheme == "influxdbs" else "http"
    name = f"[{host}]" if ":" in host else host
    base = f"{scheme}://{name}:{port}{prefix}"
    target = Target(shown, base, "influxdb", "influxdbs")
    target.check_ca_file(options.get("ca_file"))
    return Address(
        base,
        shown,
        database,
        options.get("org", ""),
        options.get("verify", "1") not in ("0", "false", "no"),
        options.get("ca_file"),
        target.authorization("Token", parts, options),
    )


class Refused(Exception):
    """The server refused a batch for what is in it (400, 413, 422); the message is the server's."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class NoDatabase(StoreError):
    """The server has no bucket or database of that name."""


class TooMuchAtOnce(StoreError):
    """The server doesn't read so long a time in one query: InfluxDB 3 Core reads 432 files, of ten minutes each at best."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A retention policy of a 1.x database."""

    name: str
    keeps_s: float  # 0 for ever
    is_default: bool


class InfluxServer:
    """One database of a server. Nothing is asked before the first call. Thread-safe."""

    def __init__(self, url: str) -> None:
        self.address = parse(url)
        self.url = self.address.shown
        self._client: InfluxDBClient | None = InfluxDBClient(
            self.address.base,
            token="",
            timeout=TIMEOUT_MS,
            verify_ssl=self.address.verify_tls,
            ssl_ca_cert=self.address.ca_file,
            retries=False,
        )
        http_answer.bound(self._client.api_client.rest_client.pool_manager)
        self._target = self.address.target
        self.reading, self.error = self._target.reading, self._target.error
        self._answered = False
        self._version: tuple[int, int] | None = None
        self._is_there = False  # the database of a 1.x server was seen

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        *,
        body: bytes | None = None,
        form: Mapping[str, str] | None = None,
        document: Mapping[str, object] | None = None,
    ) -> tuple[str, Mapping[str, str]]:
        """(text, headers) of a 2xx answer; everything else is StoreDown, StoreError or Refused."""
        client = self._client
        if client is None:
            raise StoreError.of("store.file.closed", store=self.url)
        headers = {"Accept": "application/json"}
        if self.address.authorization:
            headers["Authorization"] = self.address.authorization
        if body is not None:
            headers |= {"Content-Type": "text/plain; charset=utf-8", "Content-Encoding": "gzip"}
        if document is not None:
            headers["Content-Type"] = "application/json"
        if form is not None:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        try:
            with http_answer.bounded(http_answer.QUERIES if body is None else http_answer.WRITES):
                # not preloaded: the library then hands over the response itself, which no other thread can replace
                response = client.api_client.call_api(
                    path,
                    method,
                    query_params=dict(query),
                    header_params=headers,
                    body=body if document is None else dict(document),
                    post_params=dict(form) if form is not None else None,
                    _preload_content=False,
                    _return_http_data_only=True,
                )
            self._answered = True
            return response.data.decode("utf-8", "replace"), response.headers
        except ApiException as error:
            if error.status in (0, None) and isinstance(error.__context__, HTTPError):
                raise self._target.unreached(error.__context__, answered=self._answered) from None
            self._answered = True
            raise self._as_store_error(error) from None
        except (HTTPError, OSError) as error:
            raise self._target.unreached(error, answered=self._answered) from None

    def _as_store_error(self, error: ApiException) -> Exception:
        reason = _reason(error)
        if self._target.is_tls_wanted(reason):
            return self._target.error("tls_wanted", base=self.address.base, tls=self._target.tls)
        if error.status in (400, 413, 422):
            return Refused(error.status, reason)
        if error.status == 404:
            return self._target.error("no_place", reason=reason, name=self.address.database)
        return self._target.answered(
            error.status or 0,
            reason,
            has_credentials=bool(self.address.authorization),
            grant=f"read and write on {self.address.database}",
            after=(error.headers or {}).get("Retry-After"),
        )

    def generation(self) -> int:
        """1, 2 or 3; asked once. StoreError for a server that is no InfluxDB."""
        version = self._version  # another thread may void it meanwhile
        if version is None:
            headers = self._ping()
            found = re.match(r"v?(\d+)\.(\d+)", headers.get("x-influxdb-version", ""))
            if (found is None or (found[1] == "1" and "x-influxdb-build" not in headers)) and self._is_victoria():
                raise self._target.error("is_victoria", base=self.address.base)
            if found is None:
                raise self._target.error("no_influxdb", base=self.address.base)
            version = self._version = int(found[1]), int(found[2])
        return version[0]

    def _ping(self) -> Mapping[str, str]:
        """The headers of its answer; none when there is no such path."""
        try:
            _, headers = self.call("GET", "/ping", {})
        except Refused:
            return {}
        except StoreError as error:
            if error.key not in ("store.failure.no_place", "store.failure.status"):
                raise
            return {}
        return {name.lower(): value for name, value in headers.items()}

    def _is_victoria(self) -> bool:
        """It takes InfluxDB's writes, and says in some versions that it is one, but answers no query as one."""
        path, query = VICTORIA_PROBE
        try:
            return is_victoria(self.call("GET", path, query)[0])
        except (StoreError, Refused):
            return False

    def version(self) -> str:
        self.generation()
        return ".".join(map(str, self._version or ()))

    def exists(self) -> bool:
        if self.generation() != 1:
            return self._has_bucket()
        if not self._is_there:
            self._is_there = bool(self.query(f"SHOW RETENTION POLICIES ON {identifier(self.address.database)}"))
        return self._is_there

    def _has_bucket(self) -> bool:
        if self.generation() == 2:
            try:
                return self.bucket() is not None
            except StoreError as error:
                if error.key not in _NO_RIGHTS:
                    raise
        try:
            self.query("SHOW MEASUREMENTS LIMIT 1")
        except NoDatabase:
            return False
        except StoreError as error:
            if error.key != influxdb_bucket.NOT_FOUND:
                raise
            return False
        return True

    def bucket(self) -> Mapping[str, Any] | None:
        """What a 2.x server says of it."""
        return influxdb_bucket.bucket(self._manage, self.address.database, self.address.org)

    def prepare(self, keep_s: float = 0.0) -> None:
        if self.exists():
            return
        name, generation = self.address.database, self.generation()
        if generation == 1:
            self._create_database()
            return
        try:
            if generation == 2:
                influxdb_bucket.make_bucket(self._manage, name, self.address.org, keep_s)
            else:
                influxdb_bucket.make_database(self._manage, name, keep_s)
        except influxdb_bucket.WhichOrganization as error:
            raise self.error("organization", count=error.count) from None
        except Refused as refused:
            raise self.error("not_created", name=name, reason=refused.reason) from None
        except StoreError as error:
            if error.key not in _NO_RIGHTS:
                raise
            raise self._target.error("no_right_to_create", name=name) from None

    def _manage(self, method: str, path: str, query: Mapping[str, str], document: Mapping[str, object] | None) -> str:
        return self.call(method, path, query, document=document)[0]

    def _create_database(self) -> None:
        """On 1.x, for who is about to write: creating one that exists is no error."""
        name = self.address.database
        try:
            text, _ = self.call("POST", "/query", {"q": f"CREATE DATABASE {identifier(name)}"})
            results(text)
        except NoAnswer:
            raise self.error("no_influxql", base=self.address.base) from None
        except (Refused, ValueError) as refused:
            raise self.error("not_created", name=name, reason=one_line(str(refused))) from None
        except StoreError as error:
            if error.key != "store.failure.forbidden":
                raise
            raise self._target.error("no_right_to_create", name=name) from None

    def policy_s(self) -> float | None:
        """How long the default retention policy of a 1.x database keeps samples; 0 for ever."""
        return next((policy.keeps_s for policy in self.policies() if policy.is_default), None)

    def policies(self) -> list[Policy]:
        """Of a 1.x database."""
        found: list[Policy] = []
        for series in self.query(f"SHOW RETENTION POLICIES ON {identifier(self.address.database)}"):
            places = {name: place for place, name in enumerate(series["columns"])}
            for row in series["values"]:
                parts = re.findall(r"(\d+)([hms])", str(row[places["duration"]]))
                keeps_s = float(sum(int(n) * {"h": 3600, "m": 60, "s": 1}[unit] for n, unit in parts))
                found.append(Policy(str(row[places["name"]]), keeps_s, bool(row[places["default"]])))
        return found

    def query(self, query: str) -> list[dict[str, Any]]:
        """The series of one InfluxQL statement, times in ns."""
        return self.query_each([query])[0]

    def query_each(self, statements: Sequence[str]) -> list[list[dict[str, Any]]]:
        """The series of every statement (at least one), which the server answers one after the other; times in ns."""
        generation = self.generation()
        query = "; ".join(statements)
        parameters = {"db": self.address.database, "epoch": "ns"}
        if generation == 2 and self.address.org:
            parameters["org"] = self.address.org
        try:
            if len(query) > _LONG_QUERY or not query.startswith(("SELECT", "SHOW")):
                text, _ = self.call("POST", "/query", parameters, form={"q": query})
            else:
                text, _ = self.call("GET", "/query", {**parameters, "q": query})
            found = each_result(text)
            if len(found) < len(statements):
                raise NoAnswer
            return found
        except NoAnswer:
            raise self.error("no_influxql", base=self.address.base) from None
        except (Refused, ValueError) as error:
            reason = one_line(str(error))
            if "database not found" in reason or "retention policy not found" in reason:
                if generation == 1:
                    self._is_there = False
                    return [[] for _ in statements]  # reading is no reason to make it
                name = self.address.database
                raise NoDatabase.of("store.failure.no_mapping", store=self.url, name=name) from None
            if "file limit" in reason:
                raise TooMuchAtOnce.of("store.failure.too_much", store=self.url, reason=reason) from None
            raise self.error("query", reason=reason) from None

    def query_at_once(self, requests: Sequence[Sequence[str]]) -> list[list[list[dict[str, Any]]]]:
        """What `query_each` answers to each, all asked at the same time: one request keeps one core of the server busy."""
        if not requests:
            return []
        with ThreadPoolExecutor(max(1, len(requests) - 1)) as others:
            later = [others.submit(self.query_each, statements) for statements in requests[1:]]
            return [self.query_each(requests[0]), *(answer.result() for answer in later)]

    def query_over(self, span: tuple[int, int], statement: Callable[[tuple[int, int]], str]) -> list[dict[str, Any]]:
        """The series for a span of time, of its halves one after the other if the server can't read it all at once."""
        try:
            return self.query(statement(span))
        except TooMuchAtOnce:
            middle_ns = (span[0] + span[1]) // 2
            if span[1] - span[0] < _LEAST_SPAN_NS:
                raise
            return self.query_over((span[0], middle_ns), statement) + self.query_over((middle_ns, span[1]), statement)

    def write(self, lines: str, policy: str = "") -> None:
        """One batch of line protocol, into a retention policy of 1.x if one is named; a database that isn't there is made first."""
        try:
            self._write(lines, policy)
        except StoreError as error:
            if "database not found" not in str(error) or self.generation() != 1:
                raise
            self._create_database()
            self._write(lines, policy)

    def _write(self, lines: str, policy: str) -> None:
        if self.generation() == 1:
            path, query = "/write", {"db": self.address.database} | ({"rp": policy} if policy else {})
        else:
            path, query = "/api/v2/write", {"bucket": self.address.database}
            if self.address.org:
                query["org"] = self.address.org
        text, _ = self.call("POST", path, query, body=gzip.compress(lines.encode("utf-8"), compresslevel=1, mtime=0))
        self._target.check_receipt(text)


def _reason(error: ApiException) -> str:
    """What the server says, on one line."""
    text = error.body or error.reason or ""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    try:
        plain = json.loads(text)
        text = plain.get("error") or plain.get("message") or text
    except (ValueError, AttributeError, RecursionError):
        pass
    return one_line(_LONG_LINE.sub(r"'\1...'", str(text)))

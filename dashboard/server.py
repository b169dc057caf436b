"""What the page is served with: the look as one JSON, the window as CSV, the health check, and the guards around them all."""

from __future__ import annotations

import csv
import gzip
import io
import json
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from flask import Flask, Response, request

from dashboard.filling import fill
from dashboard.lanes import drawn_lanes
from dashboard.selection import Selection, read
from dashboard.settings import DashboardSettings
from dashboard.units import moment
from dashboard.view import Fresh, View, Viewer

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
SMALLEST_GZIP = 1024
LOOKS_KEPT = 64
SCRIPTS_KEPT = 64


def content_security_policy(script_hashes: list[str]) -> str:
    """As tight as the libraries allow: mantine, plotly and ag-grid write styles of their own; scripts come from here only."""
    rules: Mapping[str, str] = {
        "default-src": "'none'",
        "script-src": " ".join(["'self'", *script_hashes]),
        "style-src": "'self' 'unsafe-inline'",
        "img-src": "'self' data: blob:",
        "font-src": "'self' data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def guard(server: Flask, settings: DashboardSettings, script_hashes: Callable[[], list[str]]) -> None:
    """Limits and headers on every answer; requests from other sites' pages are refused."""
    server.config["MAX_CONTENT_LENGTH"] = settings.body_limit_bytes
    policies: list[str] = []

    @server.before_request
    def refuse_strangers() -> Response | None:
        host = _hostname(f"//{request.host}")
        if settings.host in LOOPBACK and host not in LOOPBACK | set(settings.allowed_hosts):
            # a page elsewhere may give its own name this machine's loopback address
            return Response("dashboard: this host name is not served; see allowed_hosts\n", 403, mimetype="text/plain")
        origin = request.headers.get("Origin")
        if request.method not in ("GET", "HEAD") and origin is not None and urlsplit(origin).netloc != request.host:
            return Response("dashboard: requests from other sites are refused\n", 403, mimetype="text/plain")
        return None

    @server.after_request
    def add_headers(response: Response) -> Response:
        if not policies:  # the hashes are known only once Dash has laid out its scripts
            policies.append(content_security_policy(script_hashes()))
        response.headers["Content-Security-Policy"] = policies[0]
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["X-Frame-Options"] = "DENY"
        response.headers["Referrer-Policy"] = "same-origin"
        response.headers["Cross-Origin-Opener-Policy"] = "same-origin"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        return response


def _hostname(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""


def compress(server: Flask) -> None:
    """Scripts and styles as gzip, each compressed once."""
    kept: dict[str, bytes] = {}

    @server.after_request
    def squeeze(response: Response) -> Response:
        if (
            response.status_code != 200
            or "gzip" not in request.headers.get("Accept-Encoding", "")
            or "Content-Encoding" in response.headers
            or not (response.mimetype or "").startswith(("text/", "application/javascript", "application/json"))
        ):
            return response
        response.direct_passthrough = False
        static = request.path.startswith("/_dash-component-suites/")
        squeezed = kept.get(request.full_path) if static else None
        if squeezed is None:
            body = response.get_data()
            if len(body) < SMALLEST_GZIP:
                return response
            squeezed = gzip.compress(body, 6)
            if static and len(kept) < SCRIPTS_KEPT:
                kept[request.full_path] = squeezed
        response.set_data(squeezed)
        response.headers["Content-Encoding"] = "gzip"
        response.headers.add("Vary", "Accept-Encoding")
        response.headers.pop("ETag", None)
        return response


def add_routes(server: Flask, viewer: Viewer, settings: DashboardSettings) -> None:
    looks: Fresh[Selection, bytes] = Fresh(0.8 * settings.refresh_s, LOOKS_KEPT)

    def selection() -> Selection:
        return read(request.args, settings.language, time.time_ns())

    @server.get("/view")
    def view() -> Response:
        """One look: the parts of the page with their properties. All viewers of one thing get the same bytes."""
        chosen = selection()
        body = looks.get(chosen, lambda: gzip.compress(look_json(viewer.look(chosen), settings).encode(), 5))
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            response = Response(body, mimetype="application/json", headers={"Content-Encoding": "gzip"})
        else:
            response = Response(gzip.decompress(body), mimetype="application/json")
        response.headers["Cache-Control"] = "no-store"
        response.headers["Vary"] = "Accept-Encoding"
        return response

    @server.get("/window.csv")
    def window_csv() -> Response:
        headers = {"Cache-Control": "no-store", "Content-Disposition": "attachment; filename=pairscope.csv"}
        return Response(look_csv(viewer.look(selection())), mimetype="text/csv", headers=headers)

    @server.get("/healthz")
    def healthz() -> Response:
        """200 while the page can be served; `store` says whether it has something to show."""
        body = {"status": "ok", "store": viewer.trouble() or "ok"}
        return Response(json.dumps(body), mimetype="application/json", headers={"Cache-Control": "no-store"})


def look_json(view: View, settings: DashboardSettings) -> str:
    """`{"meta": ..., "parts": [[id, mark, {property: value}], ...]}`; an unchanged mark means an unchanged part."""
    filling, meta = fill(view, settings)
    parts: list[str] = []
    for name, properties in filling:
        text = _json(properties)
        parts.append(f"[{json.dumps(name)},{zlib.crc32(text.encode())},{text}]")
    return f'{{"meta":{json.dumps(meta, allow_nan=False)},"parts":[{",".join(parts)}]}}'


def _json(properties: Any) -> str:
    """JSON of what is shown. A number that JSON has no form for is not shown; it never costs the page."""
    try:
        return json.dumps(properties, default=_component, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except ValueError:
        plain = json.loads(
            json.dumps(properties, default=_component, ensure_ascii=False), parse_constant=lambda _: None
        )
        return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


def _component(value: Any) -> Any:
    return value.to_plotly_json()


def look_csv(view: View) -> str:
    """The curves of the shown window, one row a bucket; times in UTC at the bucket's start; empty where not known."""
    out = io.StringIO()
    writer = csv.writer(out)
    pair, history = view.pair, view.history
    if pair is None or history is None:
        return ""
    curves = [curve for lane in drawn_lanes(pair, history, "en") for curve in lane.curves]
    writer.writerow(["time_utc", *(f"{curve.measurement}.{curve.field}" for curve in curves)])
    for i in range(history.window.count):
        start_ns = history.window.start_ns + i * history.window.step_ns
        values = [curve.values[i] for curve in curves]
        writer.writerow([moment(start_ns, 0, day=True), *("" if v is None else f"{v:.6g}" for v in values)])
    return out.getvalue()

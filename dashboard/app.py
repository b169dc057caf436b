"""The dashboard: makes the app, and serves it with one process and a few threads until told to stop."""

from __future__ import annotations

import logging
import sys
import threading
from importlib.resources import files
from typing import Any

import waitress
from dash import ClientsideFunction, Dash, Input
from waitress import wasyncore

from dashboard.page import skeleton
from dashboard.server import LOOPBACK, add_routes, compress, guard
from dashboard.settings import DashboardSettings
from dashboard.view import Viewer
from telemetry.messages import say
from telemetry.process import notify, stop_event
from telemetry.store import Store, StoreError, open_store

log = logging.getLogger(__name__)

FIRST_SCRIPT = "first.js"
"""Runs before anything is drawn and sets the colour scheme, so that a dark page never flashes white."""
INDEX = """<!DOCTYPE html>
<html lang="{language}">
  <head>
    {{%metas%}}
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <title>{{%title%}}</title>
    {{%favicon%}}
    <script src="assets/{first}"></script>
    {{%css%}}
  </head>
  <body>
    {{%app_entry%}}
    <footer>{{%config%}}{{%scripts%}}{{%renderer%}}</footer>
  </body>
</html>"""

CHOICES = (
    # what a viewer can do; each ends in the page's address
    ("range", "value"),
    ("pair", "value"),
    ("zone", "value"),
    ("language", "value"),
    ("theme", "n_clicks"),
    ("live", "n_clicks"),
    ("copy", "n_clicks"),
    ("zoomed", "n_clicks"),
    ("table", "cellClicked"),
    ("fleet", "clickData"),
    ("chart", "relayoutData"),
)


def create_app(store: Store, settings: DashboardSettings) -> Any:
    """The Dash app over `store`; `app.server` is its WSGI application."""
    app = Dash(
        __name__,
        title="PairScope",
        update_title=None,
        assets_folder=str(files("dashboard") / "assets"),
        assets_ignore=FIRST_SCRIPT,
        serve_locally=True,
        suppress_callback_exceptions=False,
        enable_mcp=False,
    )
    app.index_string = INDEX.format(language=settings.language, first=FIRST_SCRIPT)
    app.layout = skeleton()
    app.clientside_callback(ClientsideFunction("pairscope", "start"), Input("mantine", "id"))
    app.clientside_callback(
        ClientsideFunction("pairscope", "chose"),
        *(Input(name, prop) for name, prop in CHOICES),
        prevent_initial_call=True,
    )
    guard(app.server, settings, app.csp_hashes)
    compress(app.server)
    add_routes(app.server, Viewer(store, settings), settings)
    return app


def run(settings: DashboardSettings) -> int:
    """Serve until SIGTERM or SIGINT: 0; 2 with one line for settings that can't be used."""
    language = settings.language
    if settings.host not in LOOPBACK and not settings.insecure:
        return _refuse(say("dashboard.start.not_loopback", language, host=settings.host))
    try:
        store = open_store(settings.store_url)
    except StoreError as error:
        return _refuse(say("dashboard.start.store_unusable", language, reason=error.told(language)))
    try:
        server, sockets = listen(create_app(store, settings), settings)
    except (OSError, ValueError) as error:  # ValueError: a host name that has no address
        store.close()
        reason = getattr(error, "strerror", None) or str(error)
        return _refuse(
            say("dashboard.start.port_taken", language, host=settings.host, port=settings.port, reason=reason)
        )
    stopping = stop_event()
    status = say("dashboard.start.serving", language, host=settings.host, port=settings.port)
    notify(READY="1", STATUS=status)
    log.info(status)
    serve(server, sockets, stopping)
    notify(STOPPING="1")
    store.close()
    return 0


def listen(app: Any, settings: DashboardSettings) -> tuple[Any, dict[int, Any]]:
    """The server and its sockets, bound and ready to be served. OSError when the port can't be had."""
    sockets: dict[int, Any] = {}
    server = waitress.create_server(
        app.server,
        map=sockets,
        host=settings.host,
        port=settings.port,
        threads=settings.threads,
        max_request_body_size=settings.body_limit_bytes,
        max_request_header_size=16_384,
        connection_limit=200,
        channel_timeout=60,
        ident=None,
    )
    return server, sockets


def serve(server: Any, sockets: dict[int, Any], stopping: threading.Event) -> None:
    """Answer until `stopping`; answers that are then under way get their chance. In one thread, so that nothing is closed under it."""
    while not stopping.is_set():
        wasyncore.loop(timeout=0.3, use_poll=True, map=sockets, count=1)
    server.task_dispatcher.shutdown(timeout=1.5)
    for socket in list(sockets.values()):
        socket.close()


def _refuse(reason: str) -> int:
    print(reason, file=sys.stderr)
    return 2

"""A process that behaves like an engine, for hosting: it loads, gets ready, and does what its arguments say. Standard library only.

hosted_engine.py PORT [--load SECONDS] [--load-until FILE] [--exit CODE] [--say TEXT]
    [--ignore-term] [--child FILE] [--env FILE] [--state FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--load", type=float, default=0.0)
    parser.add_argument("--load-until", default="", help="load until this file exists")
    parser.add_argument("--exit", type=int, help="end with this code instead of serving")
    parser.add_argument("--say", default="")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--child", help="start a process of its own and write its pid here")
    parser.add_argument("--env", help="write the environment here")
    parser.add_argument("--state", help="hang in /health once this file exists")
    wanted = parser.parse_args()
    if wanted.say:
        print(wanted.say.encode().decode("unicode_escape"), file=sys.stderr, flush=True)
    if wanted.env:
        Path(wanted.env).write_text(json.dumps(dict(os.environ)))
    if wanted.child:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(wanted.child).write_text(str(child.pid))
    if wanted.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if wanted.exit is not None:
        sys.exit(wanted.exit)
    ready_at = time.monotonic() + wanted.load

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            while wanted.state and Path(wanted.state).exists():
                time.sleep(0.05)
            loads = time.monotonic() < ready_at or (wanted.load_until and not Path(wanted.load_until).exists())
            body = {"status": "loading", "stage": "weights", "progress": 0.25} if loads else {"status": "ready"}
            text = json.dumps(body).encode()
            self.send_response(503 if loads else 200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    server = Server(("127.0.0.1", wanted.port), Handler)
    if not wanted.ignore_term:
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever(poll_interval=0.02)


if __name__ == "__main__":
    main()

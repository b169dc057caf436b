"""An engine's processes, without an engine: a root, a child that answers at the address, and workers. Standard library only.

engine_processes.py HOST PORT WORKERS: prints one line of JSON with the pids, {"root": , "front": , "workers": [ ]}. The root and the
front share the listening socket where PORT is negative; where it is positive only the front has it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

METRICS = b"vllm:num_requests_running 3\nvllm:generation_tokens_total 5\n"


def main() -> None:
    host, port, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    parent = os.getppid()
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    shared = listen(host, -port) if port < 0 else None
    front = fork(lambda: serve(shared or listen(host, port)))
    pids = {"root": os.getpid(), "front": front, "workers": [fork(lambda: time.sleep(600)) for _ in range(workers)]}
    os.write(1, json.dumps(pids).encode() + b"\n")  # in one write: two engines may share the pipe
    time.sleep(600)


def fork(run: Any) -> int:
    pid = os.fork()
    if pid == 0:
        threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
        run()
        os._exit(0)
    return pid


def end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.05)
    os._exit(0)


def listen(host: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((host, port))
    made.listen()
    return made


def serve(listener: socket.socket) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = METRICS if self.path == "/metrics" else b"{}"
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("", 0), Handler, bind_and_activate=False)
    server.socket = listener
    server.serve_forever()


if __name__ == "__main__":
    main()

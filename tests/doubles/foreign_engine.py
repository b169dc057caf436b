"""Engines of others, as far as their supervisor sees them: what they log while they start, and what /health says when.

foreign_engine.py KIND PORT FOLDER. It starts in steps and takes the next one when FOLDER/step holds a larger number; FOLDER/full makes
TGI's queue full; FOLDER/environment is written at the start. Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

STEPS: dict[str, Sequence[str]] = {
    # kind: what it logs at each step; it is ready after the last
    "vllm": (
        "INFO 11-29 [gpu_model_runner.py:1] Starting to load model org/M...",
        "\rLoading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:01,  1.60it/s]",
        "\rCapturing CUDA graphs (mixed prefill-decode, PIECEWISE):  35%|###  | 7/20",
    ),
    "llamacpp": ("load_tensors: loading model tensors, this can take a while...", "common_init: warming up the model"),
    "sglang": ("Load weight begin. avail mem=20 GB", "\rCapturing batches (bs=8 avail_mem=9 GB):  25%|## | 1/4"),
    "tgi": ("Starting to download weights", "Waiting for shard to be ready... rank=0"),
}
LISTENS_AT_ONCE = ("llamacpp", "sglang")
LOADING = {"llamacpp": b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}', "sglang": b""}


def main() -> None:
    kind, port, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    (folder / "environment").write_text(json.dumps(dict(os.environ)))
    ready = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not ready.is_set():
                self.answer(503, LOADING[kind])
            elif kind == "tgi" and (folder / "full").exists():
                self.answer(503, b'{"error":"unhealthy","error_type":"healthcheck"}')
            else:
                self.answer(200, b"")

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server: list[ThreadingHTTPServer] = []

    def listen() -> None:
        try:
            made = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
        made.daemon_threads = True
        server.append(made)
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if kind in LISTENS_AT_ONCE:
        listen()
    for number, line in enumerate(STEPS[kind], 1):
        print(line, end="" if line.startswith("\r") else "\n", file=sys.stderr, flush=True)
        while reached(folder) <= number:
            time.sleep(0.02)
    ready.set()
    if kind not in LISTENS_AT_ONCE:
        listen()
    while True:
        time.sleep(0.1)


def reached(folder: Path) -> int:
    try:
        return int((folder / "step").read_text() or 0)
    except (FileNotFoundError, ValueError):
        return 0


if __name__ == "__main__":
    main()

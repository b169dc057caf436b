"""An OpenAI-compatible endpoint that streams as a test tells it to: with usage or without, early, broken off, refusing, for ever."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKENS_A_WORD = 2
TEMPLATE_TOKENS = 7


@dataclass
class Behaviour:
    """`slots` answers go on at once, the others wait. `fails_above`: with more in flight every further one is refused."""

    models: tuple[str, ...] = ("first-model", "second-model")
    context: int | None = None
    slots: int = 1000
    token_s: float = 0.001
    completions: bool = True
    ignore_eos: bool = True
    usage: bool = True
    ends_after: int | None = None
    breaks_after: int | None = None
    fails_above: int | None = None
    kv_a_request_pct: float | None = None
    key: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    most_at_once: int = 0


class StreamingEndpoint:
    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        slots = threading.Semaphore(behaviour.slots)
        lock = threading.Lock()
        state = {"running": 0, "preempted": 0}

        class Handler(BaseHTTPRequestHandler):
            over = True

            def do_GET(self) -> None:
                if behaviour.key and self.headers.get("Authorization") != f"Bearer {behaviour.key}":
                    self._send(401, {"error": {"message": "no key"}})
                elif self.path == "/v1/models":
                    more = {"max_model_len": behaviour.context} if behaviour.context else {}
                    self._send(200, {"object": "list", "data": [{"id": name, **more} for name in behaviour.models]})
                elif self.path == "/metrics" and behaviour.kv_a_request_pct is not None:
                    used = min(1.0, state["running"] * behaviour.kv_a_request_pct / 100)
                    text = f"vllm:cache_config_info 1\nvllm:kv_cache_usage_perc {used}\nvllm:num_preemptions_total 3\n"
                    self._raw(200, text.encode(), "text/plain")
                else:
                    self._send(404, {"detail": "Not Found"})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))))
                self.over = False
                with lock:
                    state["running"] += 1
                    behaviour.most_at_once = max(behaviour.most_at_once, state["running"])
                    behaviour.asked.append(body)
                    behaviour.paths.append(self.path)
                    full = behaviour.fails_above is not None and state["running"] > behaviour.fails_above
                try:
                    if full:
                        self._send(429, {"error": {"message": "too many at once"}})
                    elif self.path == "/v1/completions" and not behaviour.completions:
                        self._send(404, {"detail": "Not Found"})
                    elif "ignore_eos" in body and not behaviour.ignore_eos:
                        self._send(400, {"error": {"message": "unknown field ignore_eos"}})
                    else:
                        with slots, contextlib.suppress(OSError):
                            self._stream(body)
                finally:
                    self._over()

            def _over(self) -> None:
                """Before the client hears of the end, since it then asks anew at once."""
                with lock:
                    state["running"] -= not self.over
                self.over = True

            def _stream(self, body: dict[str, Any]) -> None:
                chat = "messages" in body
                prompt = body["messages"][0]["content"] if chat else body["prompt"]
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                if chat:
                    self._event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
                count = min(body["max_tokens"], behaviour.ends_after or 10**9)
                for number in range(count):
                    if number == behaviour.breaks_after:
                        return
                    time.sleep(behaviour.token_s)
                    last = ("stop" if behaviour.ends_after else "length") if number == count - 1 else None
                    said: dict[str, Any] = {"delta": {"content": "a "}} if chat else {"text": "a "}
                    self._event({"choices": [{**said, "finish_reason": last}]})
                if behaviour.usage:
                    asked = TEMPLATE_TOKENS + TOKENS_A_WORD * len(prompt.split())
                    self._event({"choices": [], "usage": {"prompt_tokens": asked, "completion_tokens": count}})
                self._over()
                self.wfile.write(b"data: [DONE]\n\n")

            def _event(self, body: object) -> None:
                self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")
                self.wfile.flush()

            def _send(self, status: int, body: object) -> None:
                self._raw(status, json.dumps(body).encode(), "application/json")

            def _raw(self, status: int, body: bytes, kind: str) -> None:
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

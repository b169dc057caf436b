"""Engine probe: asks an engine for one token now and then, which is the only proof that it still computes.

An engine whose loop hangs answers /health and /metrics as before. The probe runs on a thread of its own and is one request more in
the engine's queue, so it takes as long as a client's would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import httpx

from agent.collectors.engine_route import first_served
from agent.collectors.engine_scrape import EngineClient
from agent.collectors.interface import Tick
from agent.exposition import TooLarge, Unreadable
from agent.periodic import Periodic
from agent.settings import EngineTarget
from telemetry.sample import Value

DEADLINE_S = 30.0
PROMPT = "Hi"

Trouble = Literal["", "refused", "failed", "no_route"]
"""refused: it wants a key, or another one. failed: it did not answer, or without a token. no_route: it can't be asked that way."""


@dataclass(frozen=True, slots=True)
class Probed:
    """How one probe ended: after `seconds` with a token, or with a trouble. `detail` says more, for a person."""

    seconds: float
    trouble: Trouble = ""
    detail: str = ""

    @property
    def fields(self) -> dict[str, Value]:
        """Fields of the `engine` measurement. An engine that can't be probed has neither failed nor succeeded."""
        if self.trouble == "no_route":
            return {}
        return {"probe_ok": 0} if self.trouble else {"probe_ok": 1, "probe_s": self.seconds}


@dataclass(frozen=True, slots=True)
class Route:
    """Where one token is asked for: the question, made for a model, and where its answer is."""

    path: str
    question: Callable[[str], Mapping[str, object]]
    answer: str  # a key that only an answer with a token has


def _named(model: str, question: Mapping[str, object]) -> Mapping[str, object]:
    return {"model": model, **question} if model else question


COMPLETIONS = Route(
    "/v1/completions", lambda model: _named(model, {"prompt": PROMPT, "max_tokens": 1, "temperature": 0}), "choices"
)
CHAT = Route(
    "/v1/chat/completions",
    lambda model: _named(model, {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1, "temperature": 0}),
    "choices",
)
OPENAI = (COMPLETIONS, CHAT)
ROUTES: Mapping[str, tuple[Route, ...]] = {
    "tgi": (
        Route(
            "/generate",
            # it takes no temperature of 0; without sampling it is greedy
            lambda _model: {"inputs": PROMPT, "parameters": {"max_new_tokens": 1, "do_sample": False}},
            "generated_text",
        ),
    ),
    "llamacpp": (
        Route(
            "/completion",
            lambda _model: {"prompt": PROMPT, "n_predict": 1, "temperature": 0, "cache_prompt": False},
            "content",
        ),
    ),
    "ollama": (
        Route(
            "/api/generate",
            lambda model: {
                "model": model,
                "prompt": PROMPT,
                "stream": False,
                "options": {"num_predict": 1, "temperature": 0},
            },
            "response",
        ),
    ),
}
"""By kind of engine; the others speak OpenAI's API."""

_NO_ROUTE = (400, 404, 405, 422, 501)


class EngineProbe:
    """The probe of one engine. Never more than one is under way; what it brought is taken once."""

    def __init__(
        self,
        target: EngineTarget,
        deadline_s: float = DEADLINE_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.last: Probed | None = None
        self._client = EngineClient(target.base_url, deadline_s, monotonic, target.api_key)
        self._monotonic = monotonic
        self._kind = ""
        self._model = ""
        self._jobs: Periodic[Probed | None] = Periodic(f"probe-{target.name}", target.probe_every_s, self._probe)

    def take(self, tick: Tick, kind: str, model: str, *, is_up: bool) -> dict[str, Value]:
        """The fields of a probe that has ended since the last call; starts the next one when it is due, of an engine that is up.
        Never waits.
        """
        self._kind, self._model = kind, model
        if not is_up and not self.pending:
            return {}
        probed = self._jobs.take(tick)
        if probed is None:
            return {}
        self.last = probed
        return probed.fields

    @property
    def pending(self) -> bool:
        """Whether a probe is under way."""
        return self._jobs.pending

    def close(self) -> None:
        self._jobs.close()

    def _probe(self, _tick: Tick) -> Probed | None:
        if self._kind == "ollama" and not self._model:
            return None  # no model is loaded, and the question would load one
        routes = ROUTES.get(self._kind, OPENAI)
        model = (self._served() if routes is OPENAI else "") or self._model
        probed = Probed(0.0, "no_route")
        for route in routes:
            probed = self._ask(route, model)
            if probed.trouble != "no_route":
                break
        return probed

    def _served(self) -> str:
        """The name under which the engine serves; its metrics may call the model otherwise."""
        answer = self._client.get_json("/v1/models")
        served = first_served(answer[1]) if answer else None
        name = served.get("id") if isinstance(served, dict) else None
        return name if isinstance(name, str) else ""  # whole, however long: it is asked for by this name

    def _ask(self, route: Route, model: str) -> Probed:
        started_s = self._monotonic()
        try:
            status, said = self._client.ask_json(route.path, route.question(model))
        except httpx.TimeoutException:
            return Probed(self._monotonic() - started_s, "failed", "timeout")
        except (httpx.HTTPError, httpx.InvalidURL, TooLarge, Unreadable) as error:
            return Probed(self._monotonic() - started_s, "failed", type(error).__name__)
        took_s = self._monotonic() - started_s
        if status in (401, 403):
            return Probed(took_s, "refused", f"HTTP {status}")
        if status in _NO_ROUTE:
            return Probed(took_s, "no_route", f"HTTP {status}")
        if status != 200:
            return Probed(took_s, "failed", f"HTTP {status}")
        if not isinstance(said, dict) or said.get(route.answer) in (None, []):
            return Probed(took_s, "failed", "HTTP 200 without a token")
        return Probed(took_s)

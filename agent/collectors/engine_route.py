"""Engine route: at which path an engine has its metrics, and who it is where it has none."""

from __future__ import annotations

import logging
from collections.abc import Callable

from agent.collectors.dialects import nim, ollama, trtllm
from agent.collectors.dialects.dialect import Get, Told, text
from agent.collectors.dialects.registry import KINDS, OTHER_PATHS, OWNERS, detect
from agent.collectors.engine_scrape import EngineClient, Outcome, Scrape

log = logging.getLogger(__name__)

USUAL_PATH = "/metrics"
SEARCH_EVERY_S = 30.0
"""How often an engine that has no metrics at its path is tried at the others."""

_FIRST_PATHS = {"trtllm": trtllm.PATH, "nim": nim.PATH, "ollama": ollama.PATH}


class MetricsRoute:
    """The path of one engine's metrics, found once and kept until the engine goes away.

    TensorRT-LLM's /metrics is a JSON list which each reader empties for all others, so it is asked for once at most.
    """

    def __init__(self, client: EngineClient, name: str, kind: str, monotonic: Callable[[], float]) -> None:
        self._client = client
        self._name = name
        self._configured = kind
        self._monotonic = monotonic
        self.kind = ""  # what the path itself told
        self._path = _FIRST_PATHS.get(kind, USUAL_PATH)
        self._searched_s: float | None = None

    def forget(self) -> None:
        """Another process may answer from here on."""
        self.kind = ""
        self._path = _FIRST_PATHS.get(self._configured, USUAL_PATH)
        self._searched_s = None

    def settle(self, kind: str) -> None:
        """The engine is of this kind, and has no metrics at the usual path."""
        self._path = _FIRST_PATHS.get(kind, self._path)

    def scrape(self, now_ms: int) -> Scrape:
        scrape = self._client.scrape(now_ms, self._path)
        if scrape.exposition is not None and scrape.exposition.is_json_list and self._path == USUAL_PATH:
            log.info(
                "engine %s: /metrics is a list that reading empties; asking %s from here on", self._name, trtllm.PATH
            )
            self.kind, self._path = "trtllm", trtllm.PATH
            return self._client.scrape(now_ms, self._path)
        if scrape.outcome is Outcome.STATUS and scrape.status == 404:
            return self._search(now_ms) or scrape
        return scrape

    def _search(self, now_ms: int) -> Scrape | None:
        now_s = self._monotonic()
        if self._searched_s is not None and now_s - self._searched_s < SEARCH_EVERY_S:
            return None
        self._searched_s = now_s
        drained = "trtllm" in (self.kind, self._configured)
        for path in OTHER_PATHS if drained else (USUAL_PATH, *OTHER_PATHS):
            if path != self._path:
                scrape = self._client.scrape(now_ms, path)
                if scrape.exposition is not None and detect(scrape.exposition, self._configured) is not None:
                    self._path = path
                    return scrape
        return None


def first_served(body: object) -> object:
    """The first model of an answer to /v1/models; None where it lists none."""
    listed = body.get("data") if isinstance(body, dict) else None
    return listed[0] if isinstance(listed, list) and listed else None


def who_serves(get: Get) -> tuple[str, Told]:
    """Kind and model of an engine that has no metrics: by the owner in its list of models, or by routes only one kind has."""
    entry = first_served(get("/v1/models"))
    owner = text(entry, "owned_by")
    kind = OWNERS.get(owner, owner if owner in KINDS else "")
    if kind in ("", "ollama"):
        resident = ollama.ask(get)
        if resident is not None:
            return "ollama", resident
    return ("" if kind == "ollama" else kind), Told(model=text(entry, "id"))

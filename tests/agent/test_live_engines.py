"""What is read of a real engine is what its clients counted. Runs where such a server is installed; `bench/live_engines.py` always does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.live.comparison import compare
from tests.live.servers import find, server

INSTALLED = [kind for kind in ("vllm", "llamacpp") if find(kind)]


@pytest.mark.server
@pytest.mark.skipif(
    not INSTALLED, reason="neither vllm nor llama-server is installed; they are optional here, as in CI"
)
@pytest.mark.parametrize("kind", INSTALLED or ["none"])
def test_what_is_read_of_a_real_engine_is_what_its_clients_counted(
    kind: str, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    port = free_port()
    lines = compare(server(kind, find(kind) or "", tmp_path, port), f"http://127.0.0.1:{port}", tmp_path)
    assert not [line for line in lines if not line.agrees]

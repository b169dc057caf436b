"""What can only be seen on a CUDA device: the libraries that are installed, torch's own graphs, and the bar of decoding's bandwidth."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.engine_mbu import report
from engine.assembly import assemble
from engine.attention.choice import BACKENDS, Trial, _made
from engine.attention.gather import GatherAttention
from engine.attention.interface import Place
from engine.modelconfig import ModelConfig
from engine.request import Request, Sampling
from engine.settings import EngineSettings
from tests.engine.checkpoints import write_checkpoint
from tests.engine.test_attention import CAPPED, MODEL, WINDOWED


@pytest.mark.parametrize("config", [MODEL, WINDOWED, CAPPED], ids=["plain", "windowed", "capped"])
@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_installed_agrees_with_torch(cuda: torch.device, name: str, config: ModelConfig) -> None:
    backend = BACKENDS[name]
    if backend.module is not None:
        pytest.importorskip(backend.module)
    place = Place(config, torch.bfloat16, cuda, 256 if name == "flash" else 16)
    with torch.inference_mode():
        Trial(place).hold(_made(name, place, importlib.import_module), GatherAttention(place.config))


def tokens_of(settings: EngineSettings) -> tuple[list[list[int]], list[str]]:
    """Of requests that come while others decode."""
    log: list[str] = []
    made = assemble(settings, lambda *told: None, log.append)
    requests = []
    for number, length in enumerate((3, 40, 17, 70, 9)):
        sampling = Sampling(temperature=0.0, max_tokens=12 + 5 * number, ignore_eos=True)
        requests.append(Request(f"r{number}", [(number + 3 * at) % 250 for at in range(length)], sampling, 0.0))
        made.engine.add(requests[-1])
        for _ in range(3):
            made.engine.step()
    while made.engine.has_work:
        made.engine.step()
    made.close()
    return [request.output for request in requests], log


def test_replayed_and_compiled_steps_give_the_tokens_of_eager_ones(cuda: torch.device, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, seed=11, tie_word_embeddings=False)
    plain = EngineSettings(
        model=str(folder),
        device=str(cuda),
        dtype="float32",
        kv_blocks=64,
        max_seqs=4,
        attention="sdpa",
        cuda_graphs=False,
        compile="off",
    )
    expected, _ = tokens_of(plain)
    found, log = tokens_of(replace(plain, cuda_graphs=True))
    assert found == expected
    assert any("sizes, up to 4 sequences" in line for line in log), log
    assert tokens_of(replace(plain, cuda_graphs=True, compile="on"))[0] == expected


@pytest.mark.long
def test_decoding_one_sequence_of_a_billion_weights_uses_60_pct_of_the_bandwidth(
    cuda: torch.device, tmp_path: Path
) -> None:
    assert report(str(cuda), "1b", 256, tmp_path, as_json=True) == 0

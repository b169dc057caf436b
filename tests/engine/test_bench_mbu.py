"""The measurement of decoding's share of bandwidth runs on CPU too, says that it is no figure then, and counts what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import engine_mbu
from bench.engine_mbu import SHAPES, RandomCheckpoint, report
from engine.accounting import Peaks
from engine.settings import EngineSettings
from tests.doubles.graph_recorder import GraphRecorder

CPU = torch.device("cpu")


def test_on_cpu_it_runs_one_by_one_and_captured_and_says_that_it_is_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def capturer_of(settings: EngineSettings, device: torch.device) -> GraphRecorder:
        return GraphRecorder()

    monkeypatch.setattr("engine.assembly.capturer_of", capturer_of)
    monkeypatch.setattr(engine_mbu, "capturer_of", capturer_of)
    monkeypatch.setattr(engine_mbu, "measure_peaks", lambda *given: Peaks(1e9, 2e6))
    assert report("cpu", "tiny", 12, tmp_path, as_json=False, attention="sdpa") == 0
    assert "This is no figure of a CUDA device" in capsys.readouterr().out
    found = json.loads((tmp_path / "decode_mbu_cpu_tiny.json").read_text())
    assert [way["way"] for way in found["ways"]] == ["eager", "captured"]
    layers = 2 * (64 * (64 + 64) + 64 * 64 + 3 * 64 * 96)
    assert (found["weights"], found["is_cuda"], found["dtype"]) == (layers + 300 * 64, False, "float32")
    for way in found["ways"]:
        assert way["steps"] == 12
        # float32: weights, a row of the embedding, 2 x 2 x 2 x 16 numbers of cache for each of some 143 tokens
        least, most = (4 * (found["weights"] + 64 + 128 * tokens) for tokens in (128, 160))
        moved = way["mbu_pct"] / 100 * way["step_ms"] / 1000 * 2e6
        assert least < moved < most
        assert way["mbu_pct"] == way["mbu_of_probe_pct"]
        assert way["tokens_per_s"] == pytest.approx(1000 / way["step_ms"])


def test_the_model_of_the_bar_has_more_than_a_billion_weights() -> None:
    shape = SHAPES["1b"]
    checkpoint = RandomCheckpoint(SHAPES["tiny"], CPU)
    assert checkpoint.tensor("model.layers.1.self_attn.k_proj.weight").shape == (32, 64)
    assert not torch.equal(*(checkpoint.tensor("model.layers.0.mlp.up_proj.weight") for _ in range(2)))
    layer = shape.hidden * (2 * shape.q_width + shape.kv_width + 3 * shape.intermediate)
    assert 1.2e9 < shape.num_layers * layer + shape.vocab * shape.hidden < 1.3e9

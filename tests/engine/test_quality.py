"""What quantisation costs is measured, shown, remembered and held to a bar."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from engine.assembly import assemble
from engine.checkpoints.find import open_checkpoint
from engine.divergence import measure
from engine.linear import Kernel, Linear, Plain
from engine.loader import load_decoder
from engine.model import Decoder
from engine.progress import silent
from engine.quality import PoorQuality, Quality, QualityCache, fingerprint, text
from engine.qualitycheck import check_quality
from engine.request import Request, Sampling
from engine.settings import EngineSettings, SettingsError, check
from tests.engine.checkpoints import write_checkpoint
from tests.engine.running import WAIT_S, start_process

GOOD = Quality("int8", tokens=100, full_perplexity=20.0, perplexity=20.1, kl=0.01, top1=0.95)


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of each test's own; the compiled kernels are taken from the usual one."""
    folder = tmp_path / "cache"
    monkeypatch.setattr("engine.quality.cache_folder", lambda: folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", vocab_size=300, hidden_size=64, intermediate_size=96)


def load(folder: Path, kernel: Kernel = Plain) -> Decoder:
    with torch.inference_mode():
        return load_decoder(open_checkpoint(folder), torch.float32, torch.device("cpu"), 64, lambda done: None, kernel)


def coarse(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Weights so roughly rounded that the model becomes another one."""
    return Plain(torch.round(weight * 4) / 4, bias)


def test_a_model_against_itself_costs_nothing(folder: Path) -> None:
    decoder = load(folder)
    heard: list[float] = []
    with torch.inference_mode():
        same = measure("int8", decoder, decoder, [token % 256 for token in range(0, 900, 7)], heard.append)
    assert (same.perplexity, same.kl, same.top1) == (same.full_perplexity, 0.0, 1.0)
    assert same.tokens == 126  # 129 tokens in passages of the context, 64, each without the first
    assert heard == sorted(heard) and heard[-1] == 1.0


def test_figures_are_those_of_the_definition(folder: Path) -> None:
    full, rough = load(folder), load(folder, coarse)
    tokens = [3, 77, 12, 200, 9]
    with torch.inference_mode():
        got = measure("int4", full, rough, tokens, lambda done: None)
        p, q = (_probabilities(decoder, tokens[:-1]) for decoder in (full, rough))
    rows = range(4)
    assert got.kl == pytest.approx(float((p * (p / q).log()).sum() / 4), rel=1e-4)
    losses = [-math.log(float(q[row, tokens[row + 1]])) for row in rows]
    assert got.perplexity == pytest.approx(math.exp(sum(losses) / 4), rel=1e-4)
    assert got.top1 == sum(int(p[row].argmax()) == int(q[row].argmax()) for row in rows) / 4
    assert got.kl > 0.01 and got.perplexity != got.full_perplexity


def _probabilities(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    from engine.divergence import _hidden_states, _log_probabilities

    return _log_probabilities(decoder, _hidden_states(decoder, [ids])[0]).double().exp()


@pytest.mark.parametrize(
    ("scheme", "perplexity", "kl", "passes"),
    [
        ("int8", 20.19, 0.019, True),
        ("int8", 20.21, 0.0, False),
        ("int8", 20.0, 0.021, False),
        ("int8", 15.0, 0.0, True),
        ("int4", 20.9, 0.09, True),
        ("int4", 21.1, 0.0, False),
        ("int4", 20.0, 0.11, False),
        ("int4", math.nan, 0.0, False),
        ("int8", 20.0, math.nan, False),
        ("int8", math.inf, 0.0, False),
    ],
)
def test_a_scheme_passes_within_its_bar_only(scheme: str, perplexity: float, kl: float, passes: bool) -> None:
    assert dataclasses.replace(GOOD, scheme=scheme, perplexity=perplexity, kl=kl).passes is passes


def test_the_bundled_text_has_some_two_thousand_tokens_of_many_kinds() -> None:
    assert 8000 < len(text()) < 10000
    assert all(part in text() for part in ("def ", "SELECT", '{"order"', "User:", "rivière", "WARN"))


def test_figures_are_remembered_for_this_checkpoint_scheme_and_kernel_only(caches: Path) -> None:
    QualityCache("a").put(GOOD, "k")
    assert QualityCache("a").get("int8", "k") == GOOD
    assert QualityCache("b").get("int8", "k") is None
    assert QualityCache("a").get("int4", "k") is None
    assert QualityCache("a").get("int8", "other") is None
    (kept,) = caches.iterdir()
    for damage in ("", "[]", "{}", json.dumps(dataclasses.asdict(GOOD) | {"kl": None}), '{"kl": 1'):
        kept.write_text(damage)
        assert QualityCache("a").get("int8", "k") is None
    caches.chmod(0o777)
    QualityCache("a").put(GOOD, "k")  # others can write there: nothing is kept and nothing is believed
    assert QualityCache("a").get("int8", "k") is None
    caches.chmod(0o700)


def test_a_fingerprint_changes_with_the_weights(tmp_path: Path) -> None:
    first = fingerprint(write_checkpoint(tmp_path / "a", seed=1))
    assert fingerprint(write_checkpoint(tmp_path / "b", seed=1)) == first
    assert fingerprint(write_checkpoint(tmp_path / "c", seed=2)) != first
    single = tmp_path / "a" / "model.safetensors"
    assert fingerprint(single) not in (first, fingerprint(tmp_path / "c" / "model.safetensors"))


@pytest.mark.parametrize("scheme", ["int8", "int4", "auto"])
def test_a_quantised_engine_answers_and_measures_its_quality_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setattr("engine.kernelchoice._fastest", min)  # by name: another kernel would be measured anew
    settings = EngineSettings(model=str(folder), quantize=scheme, kv_blocks=64, max_seqs=4)
    stages, lines = set[str](), list[str]()
    engine = assemble(settings, lambda stage, *_: stages.add(stage), lines.append).engine
    request = Request("r", [1, 2, 3], Sampling(temperature=0.0, max_tokens=5, ignore_eos=True), 0.0)
    engine.add(request)
    while engine.has_work:
        engine.step()
    assert request.num_output == 5
    told = [line for line in lines if "perplexity" in line and "KL" in line and "x at 1" in line]
    if scheme == "auto":
        return  # on a model this small full weights may be as fast
    assert len(told) == 1 and {"quality", "quantising", "kernels"} <= stages
    stages.clear()
    assemble(settings, lambda stage, *_: stages.add(stage), lines.append)
    assert "quality" not in stages


def test_a_scheme_that_costs_too_much_is_refused_with_the_figures(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poor = dataclasses.replace(GOOD, perplexity=30.0, kl=0.4)
    monkeypatch.setattr("engine.scheme.measure", lambda scheme, *rest: dataclasses.replace(poor, scheme=scheme))
    lines: list[str] = []
    with pytest.raises(PoorQuality, match=r"\+50\.0 %, KL 0\.400"):
        assemble(EngineSettings(model=str(folder), quantize="int8"), silent, lines.append)
    settings = EngineSettings(model=str(folder), quantize="auto", kv_blocks=64, max_seqs=4)
    assemble(settings, silent, lines.append)
    assert any(line.startswith("auto: full weights") for line in lines)


def test_the_server_says_the_refusal_in_one_line_and_ends_with_2(tmp_path: Path) -> None:
    """A model of large random weights in 4 bits, groups of 128: another model. Without a compiler, by torch alone."""
    wild = write_checkpoint(tmp_path / "wild", scale=1.5, hidden_size=128, num_hidden_layers=6)
    started = start_process(
        {"model": str(wild), "port": 0, "quantize": "int4", "quantize_group": 128},
        {"PAIRSCOPE_LANG": "zh", "XDG_CACHE_HOME": str(tmp_path / "xdg"), "CXX": shutil.which("false") or ""},
    )
    _, err = started.communicate(timeout=WAIT_S)
    assert started.returncode == 2, err
    said = [line for line in err.splitlines() if "损失过大" in line]
    assert len(said) == 1 and "int4" in said[0] and "KL" in said[0], err
    assert len([line for line in err.splitlines() if "no compiled kernels" in line]) == 1
    assert "Traceback" not in err


def test_checking_prints_cost_beside_yield(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAIRSCOPE_LANG", "en")
    code = check_quality(EngineSettings(model=str(folder)))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["int8", "int4"]
    assert code == (0 if all(" passes: " in line for line in lines[1:]) else 2)
    assert all("perplexity" in line and "KL" in line and "x at 16 streams" in line for line in lines[1:])
    assert check_quality(EngineSettings(model=str(folder / "nothing"))) == 2
    assert "no such file or folder" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("quantize", "int2"), ("quantize_group", 48)])
def test_an_unknown_scheme_is_refused(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=name):
        check(dataclasses.replace(EngineSettings(), **{name: value}))  # type: ignore[arg-type]

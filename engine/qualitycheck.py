"""`pairscope engine --check-quality`: what each scheme costs this model, beside what it yields on this machine."""

from __future__ import annotations

import logging
import statistics
import sys
import time
from collections.abc import Sequence

import torch

from engine.assembly import choose_device, choose_dtype
from engine.batch import Batch, DecodeGroup, Reach
from engine.checkpoints.find import ModelNotFound, find_model, name_of, open_checkpoint
from engine.kernelchoice import told
from engine.kvstore import KVStore
from engine.model import Decoder
from engine.modelconfig import UnsupportedModel
from engine.progress import silent
from engine.scheme import SchemeLoader
from engine.settings import EngineSettings, SettingsError, check
from engine.threads import usable_cores
from telemetry.messages import say, terminal_language

STREAMS = (1, 8, 16)
CONTEXT = 64
"""Tokens that each stream has before it when its step is timed."""

ROUNDS = 7

log = logging.getLogger("pairscope.engine")


def check_quality(settings: EngineSettings) -> int:
    """Measure the scheme of the settings, or every scheme when they name none; print a line for each. 0 when all that were
    measured pass, 2 when one doesn't, or for a user's mistake.
    """
    language = terminal_language()
    try:
        check(settings)
        return _check(settings, language)
    except ModelNotFound as error:
        line = say(error.key, language, **error.values)
    except UnsupportedModel as error:
        line = say("engine.model.unusable", language, model=settings.model, reason=str(error))
    except SettingsError as error:
        line = say("engine.start.bad_setting", language, reason=str(error))
    print(line, file=sys.stderr)
    return 2


@torch.inference_mode()
def _check(settings: EngineSettings, language: str) -> int:
    path = find_model(settings.model)
    checkpoint = open_checkpoint(path)
    device = choose_device("cpu" if settings.device == "auto" else settings.device)
    if device.type != "cpu":
        raise SettingsError(f"device is {settings.device!r}: weights are quantised on CPU only; use cpu or auto")
    torch.set_num_threads(min(settings.threads or usable_cores(), usable_cores()))
    loader = SchemeLoader(
        checkpoint,
        path,
        choose_dtype(settings.dtype, checkpoint.config, device),
        device,
        min(checkpoint.config.context, settings.max_context or checkpoint.config.context),
        settings.quantize_group,
        silent,
        log.info,
    )
    passed = True
    schemes = (settings.quantize,) if settings.quantize in ("int8", "int4") else ("int8", "int4")
    for number, scheme in enumerate(schemes):
        checked = loader.check(scheme, loader.choice(scheme), anew=True)
        figures = checked.quality.figures()
        if not number:
            print(say("engine.quantize.full", language, model=name_of(settings.model), **figures))
        verdict = say(f"engine.quantize.{'passes' if checked.quality.passes else 'fails'}", language)
        steps = (
            ", ".join(
                f"{_step_speedup(loader.full.decoder, checked.loaded.decoder, streams):.1f}x at {streams}"
                for streams in STREAMS
            )
            + " streams"
        )
        line = say(
            "engine.quantize.checked",
            language,
            verdict=verdict,
            speedups=told(checked.loaded.choice.speedups),
            steps=steps,
            kernel=checked.loaded.choice.name,
            **figures,
        )
        print(line, flush=True)
        passed = passed and checked.quality.passes
    return 0 if passed else 2


def _step_speedup(full: Decoder, quantised: Decoder, streams: int) -> float:
    """How many times as fast a decoding step is: median of pairs, taken in turns."""
    pairs = [(_step_s(full, streams), _step_s(quantised, streams)) for _ in range(ROUNDS)]
    return statistics.median(slow / fast for slow, fast in pairs[1:])


def _step_s(decoder: Decoder, streams: int) -> float:
    """Seconds of one decoding step of so many streams, from token ids to logits."""
    context = min(CONTEXT, len(decoder.rotations))
    cache = KVStore(decoder.config, streams, context, decoder.embedding.dtype, decoder.embedding.device)
    batch = _batch(streams, context, decoder)
    began = time.perf_counter()
    decoder.logits(decoder.forward(batch, cache))
    return time.perf_counter() - began


def _batch(streams: int, context: int, decoder: Decoder) -> Batch:
    at = torch.arange(streams)
    slots: Sequence[int] = [number * context + context - 1 for number in range(streams)]
    mask = torch.zeros(streams, 1, 1, context, dtype=decoder.embedding.dtype)
    lengths = torch.full((streams,), context)
    view = (0, context) if streams == 1 else None
    group = DecodeGroup(0, streams, view, at.clone(), None if view else mask, torch.zeros_like(lengths), lengths)
    return Batch(
        ids=at % decoder.config.vocab,
        positions=torch.full((streams,), context - 1),
        tokens=streams,
        slots=torch.tensor(slots),
        full=Reach((group,), ()),
        local=Reach((group,), ()),
        block_size=context,
        sampled=None,
        rows=(),
    )

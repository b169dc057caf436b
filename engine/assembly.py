"""Puts an engine together from settings: finds the model, loads it, sizes the cache, probes the device, warms up."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from engine.attention.choice import choose_attention
from engine.attention.interface import Attention, Place
from engine.blocks import BlockPool
from engine.checkpoints.find import find_model, open_checkpoint
from engine.checkpoints.interface import Checkpoint
from engine.compilation import compile_parts
from engine.contiguous import ContiguousPool
from engine.core import Engine, StepRunner
from engine.draft import Proposer
from engine.draftmodel import DraftModel, load_draft
from engine.graphs import Size, capture_all, capturer_of, graph_bytes, sizes_of
from engine.kvstore import KVStore, bytes_per_token
from engine.model import Decoder
from engine.modelconfig import ModelConfig
from engine.ngram import NGram
from engine.parallel.group import Group, join
from engine.parallel.ranks import LeadingRunner, Ranks, device_of
from engine.parallel.shard import ShardedCheckpoint
from engine.probe import measure_peaks
from engine.progress import Progress
from engine.quality import Quality, fingerprint
from engine.queue import POLICIES
from engine.request import Request, Sampling
from engine.runner import Runner, cost_of, stage_clock
from engine.scheduler import Batching, Scheduler
from engine.scheme import Loaded, SchemeLoader
from engine.settings import EngineSettings, SettingsError
from engine.speculation import Speculation
from engine.stages import nothing
from engine.stats import EngineStats, SpeculationStats
from engine.steplog import StepLog
from engine.threads import ThreadChooser, usable_cores
from engine.tokenizer import Tokenizer

DEFAULT_KV_GIB = 1.0
CUDA_KV_SHARE = 0.9
NGRAM_TOKENS, MODEL_TOKENS = 8, 4
"""Tokens of a draft at most: guesses of the text itself cost nothing, those of a model a step of its each."""


@dataclass(frozen=True, slots=True)
class Assembled:
    engine: Engine
    tokenizer: Tokenizer
    config: ModelConfig
    cache: KVStore
    identity: Mapping[str, object]  # what another engine must have in common to take over a KV cache
    quality: Quality | None  # of quantised weights, on the bundled text
    close: Callable[[], None]  # ends what runs beside this process for it


@dataclass(frozen=True, slots=True)
class Share:
    """What one process holds of a model, all of it or a rank's part, and the cache for it."""

    loaded: Loaded
    cache: KVStore
    context: int
    num_blocks: int
    host_blocks: int
    threads: int
    sizes: Sequence[
        Size
    ] = ()  # of decoding steps that are to be captured; then the cache has a block more than the pool


def assemble(settings: EngineSettings, progress: Progress, log: Callable[[str], None]) -> Assembled:
    """A warm engine. ModelNotFound, UnsupportedModel, PoorQuality, SettingsError and RankLost are the user's to mend; anything
    else is a defect.
    """
    path = find_model(settings.model)
    progress("weights", 0.0, path.name)
    checkpoint = open_checkpoint(path)
    device = choose_device(settings.device)
    if device.type != "cpu" and settings.quantize not in ("none", "auto"):
        raise SettingsError(f"quantize is {settings.quantize!r}: weights are quantised on CPU only; use none or auto")
    if settings.tensor_parallel == 1:
        return _assembled(settings, checkpoint, path, device, progress, log, None)
    ranks = Ranks(settings, checkpoint.config, device)
    try:
        checkpoint = ShardedCheckpoint(checkpoint, ranks.group.shard)
        return _assembled(settings, checkpoint, path, device_of(device, 0), progress, log, ranks)
    except BaseException as error:
        lost = ranks.lost(error) if isinstance(error, RuntimeError) else None
        ranks.close()
        if lost is not None:
            raise lost from None
        raise


def load_share(
    settings: EngineSettings,
    checkpoint: Checkpoint,
    path: Path,
    device: torch.device,
    progress: Progress,
    log: Callable[[str], None],
    group: Group | None,
    draft_token_bytes: int = 0,
) -> Share:
    """Load what a checkpoint gives and make room for its cache; with other ranks, as many blocks as each has room for. A draft
    model's cache, of as many blocks, needs so much room beside it.
    """
    config = checkpoint.config
    dtype = choose_dtype(settings.dtype, config, device)
    context = min(config.context, settings.max_context or config.context)
    if settings.max_context is not None and settings.max_context > context:
        log(f"max_context is {settings.max_context}: this model's context ends at {context}")
    cores = max(1, usable_cores() // settings.tensor_parallel)
    threads = min(settings.threads, cores) if settings.threads else cores
    torch.set_num_threads(threads)
    int8 = settings.kv_dtype == "int8"
    with torch.inference_mode():
        place = Place(config, dtype, device, settings.block_size, int8)
        progress("attention", 0.0, settings.attention)
        # before the weights come: a mistake is told at once, and there is room to try
        attention = choose_attention(settings.attention, place, log, device.type == "cuda")
        loader = SchemeLoader(checkpoint, path, dtype, device, context, settings.quantize_group, progress, log)
        loaded = loader.load(settings.quantize)
        del loader  # and with it full weights that were only compared with
        if group is not None:
            group.meet()
            join(loaded.decoder, checkpoint, loaded.choice.kernel, group)
        progress("cache", 0.0)
        attend_by(loaded.decoder, attention)
        compile_parts(loaded.decoder, settings.compile, log, device.type == "cuda")
        token_bytes = bytes_per_token(config, dtype, int8)
        sizes = sizes_of(settings.max_seqs, context, settings.block_size, loaded.decoder.attention.gathers)
        graph_room = room_for_graphs(settings, loaded.decoder, sizes, int8, log)
        num_blocks = choose_blocks(settings, token_bytes + draft_token_bytes, device, graph_room or 0)
        host_blocks = choose_host_blocks(settings, token_bytes)
        if group is not None:
            num_blocks, host_blocks = group.least(num_blocks), group.least(host_blocks)
        spare = 0 if graph_room is None else 1  # the last block is for rows that only fill up a captured step
        cache = KVStore(config, num_blocks + spare, settings.block_size, dtype, device, int8, host_blocks)
    # A request never outgrows the pool, so that the last one running can always finish.
    context = min(context, num_blocks * settings.block_size)
    threads = threads if device.type == "cpu" else 1
    return Share(loaded, cache, context, num_blocks, host_blocks, threads, sizes if spare else ())


def room_for_graphs(
    settings: EngineSettings, decoder: Decoder, sizes: Sequence[Size], int8: bool, log: Callable[[str], None]
) -> int | None:
    """Bytes that captured decoding steps will take; None where none are to be captured, or can be."""
    device, dtype = decoder.embedding.device, decoder.embedding.dtype
    if (capturer := capturer_of(settings, device)) is None:
        return None
    return graph_bytes(
        decoder, KVStore(decoder.config, 1, settings.block_size, dtype, device, int8), sizes, capturer, log
    )


def attend_by(decoder: Decoder, attention: Attention | None) -> None:
    """Let another than its own way of attending serve a decoder."""
    if attention is not None:
        decoder.attention = attention
        decoder.fused = None  # it computes all layers in one call, attention too


def _assembled(
    settings: EngineSettings,
    checkpoint: Checkpoint,
    path: Path,
    device: torch.device,
    progress: Progress,
    log: Callable[[str], None],
    ranks: Ranks | None,
) -> Assembled:
    config = checkpoint.config
    tokenizer = checkpoint.tokenizer()
    dtype = choose_dtype(settings.dtype, config, device)
    context = min(config.context, settings.max_context or config.context)
    with torch.inference_mode():
        draft = load_draft(settings, tokenizer, dtype, device, context, progress, log)
    draft_bytes = bytes_per_token(draft.config, dtype) if draft is not None else 0
    group = ranks.group if ranks else None
    share = load_share(settings, checkpoint, path, device, progress, log, group, draft_bytes)
    loaded, cache, decoder = share.loaded, share.cache, share.loaded.decoder
    progress("probe", 0.0)
    with torch.inference_mode():
        peaks = measure_peaks(loaded.choice.kernel, dtype, device)
    log(f"peak: {peaks.flops_per_s / 1e9:.0f} GFLOP/s, {peaks.bytes_per_s / 1e9:.1f} GB/s")
    usual_budget = 256 if device.type == "cpu" else 2048
    window = config.window if len(config.local_layers) == config.num_layers else None
    scheduler = make_scheduler(settings, share.num_blocks, share.host_blocks, share.context, usual_budget, window)
    clock = stage_clock(device) if settings.stage_timers else None
    runner = Runner(decoder, cache, ThreadChooser(share.threads), clock)
    steps: StepRunner = LeadingRunner(runner, ranks) if ranks else runner
    engine = Engine(
        scheduler,
        steps,
        cost_of(decoder, cache),
        EngineStats(started_s=time.monotonic(), peaks=peaks),
        tokenizer.end_tokens,
        share.context,
        settings.stall_timeout_s,
    )
    warm_up(engine, config.vocab, lambda done: progress("warm-up", done))
    scheduler.pool.forget()
    if share.sizes and (capturer := capturer_of(settings, device)) is not None:
        # after warming up: steps that went one by one have said how a step's time is shared out over its stages
        runner.graphs = capture_all(decoder, cache, share.num_blocks, share.sizes, capturer, log)
    stages = nothing() if settings.stage_timers else None
    engine.stats = EngineStats(
        started_s=time.monotonic(), peaks=peaks, stage_seconds=stages
    )  # what warming up counted is nobody's traffic
    engine.steps = StepLog()
    speculation = make_speculation(settings, share.num_blocks, share.context, config.vocab, draft, log)
    engine.speculate(speculation)
    if ranks:
        engine.stats.ranks = ranks.begin()
        engine.on_beat = ranks.check
    engine.beat()
    kv_dtype = "int8" if settings.kv_dtype == "int8" else str(dtype).removeprefix("torch.")
    identity = {
        "checkpoint": fingerprint(path)[:32],
        "weights": f"{loaded.quality.scheme} {settings.quantize_group}" if loaded.quality else "none",
        "dtype": str(dtype).removeprefix("torch."),
        "kv_dtype": kv_dtype,
        "layers": config.num_layers,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
    }
    return Assembled(
        engine, tokenizer, config, cache, identity, loaded.quality, ranks.close if ranks else nothing_to_close
    )


def nothing_to_close() -> None:
    """All is in this process and goes with it."""


def make_scheduler(
    settings: EngineSettings,
    num_blocks: int,
    host_blocks: int,
    context: int,
    usual_budget: int,
    window: int | None = None,
) -> Scheduler:
    """The scheduler that the settings describe, over so many blocks on the device and on the host, for a model of which no layer
    looks back further than `window` tokens.
    """
    paged = settings.kv_layout == "paged"
    size = settings.block_size
    return Scheduler(
        BlockPool(num_blocks, size) if paged else ContiguousPool(num_blocks, size, context),
        POLICIES[settings.policy](settings.ageing_s),
        settings.max_seqs,
        settings.token_budget or max(settings.max_seqs, usual_budget),
        settings.stream_buffer,
        prefix_cache=settings.prefix_cache and paged,
        host=BlockPool(host_blocks, size) if host_blocks else None,
        batching=Batching(settings.batching),
        window=window if paged else None,  # an extent is given back as a whole
    )


def make_speculation(
    settings: EngineSettings,
    num_blocks: int,
    context: int,
    vocab: int,
    draft: Decoder | None,
    log: Callable[[str], None],
) -> Speculation | None:
    """What the settings describe, with `draft` as the smaller model if they want one, whose cache has as many blocks as the
    large one's; None where nothing is to be guessed.
    """
    if settings.speculate == "off":
        return None
    proposer: Proposer = NGram(settings.speculate_ngram_min, settings.speculate_ngram_max)
    if draft is not None:
        size, dtype, device = settings.block_size, draft.embedding.dtype, draft.embedding.device
        cache = KVStore(draft.config, num_blocks, size, dtype, device)
        proposer = DraftModel(draft, cache, BlockPool(num_blocks, size), vocab)
    most = settings.speculate_tokens or (NGRAM_TOKENS if draft is None else MODEL_TOKENS)
    return Speculation(proposer, most, context, SpeculationStats(), time.monotonic, log)


def choose_device(wanted: str) -> torch.device:
    """SettingsError when CUDA is asked for and not there."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted)
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise SettingsError(
            f"device is {wanted!r}: torch sees {torch.cuda.device_count()} CUDA devices; use cpu or auto"
        )
    return device


def choose_dtype(wanted: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """float32 on CPU, the checkpoint's own half precision on CUDA, unless one is asked for."""
    if wanted == "auto":
        wanted = config.dtype if device.type == "cuda" and config.dtype in ("bfloat16", "float16") else "float32"
    dtype: torch.dtype = getattr(torch, wanted)
    return dtype


def choose_host_blocks(settings: EngineSettings, token_bytes: int) -> int:
    """How many blocks of preempted requests host memory may hold: none unless they are to be swapped."""
    if settings.preemption != "swap":
        return 0
    return max(1, int(settings.swap_memory_gib * 2**30) // (token_bytes * settings.block_size))


def choose_blocks(settings: EngineSettings, token_bytes: int, device: torch.device, kept_bytes: int = 0) -> int:
    """How many KV blocks fit where `kept_bytes` are for something else. SettingsError when not even one sequence of two blocks
    does.
    """
    if settings.kv_blocks is not None:
        return settings.kv_blocks
    block_bytes = token_bytes * settings.block_size
    if settings.kv_memory_gib is not None:
        room = int(settings.kv_memory_gib * 2**30)
    elif device.type == "cuda":
        torch.cuda.empty_cache()  # what loading and trials have left over
        room = int((torch.cuda.mem_get_info(device)[0] - kept_bytes) * CUDA_KV_SHARE)
    else:
        room = min(int(DEFAULT_KV_GIB * 2**30), psutil.virtual_memory().available // 2) - kept_bytes
    if room < 2 * block_bytes:
        raise SettingsError(
            f"kv_memory_gib: {room / 2**30:.3f} GiB hold less than two KV blocks of {block_bytes / 2**20:.1f} MiB; give it more"
        )
    return room // block_bytes


def warm_up(engine: Engine, vocab: int, progress: Callable[[float], None]) -> None:
    """Real prefills and decodes at the batch sizes that will come, so that the first client doesn't pay for first times.

    Every thread count gets its turn at each size, which gives the chooser something to choose from. No two prompts begin
    alike, or the prefix cache would spare the work.
    """
    sizes = [n for n in (1, 2, 4, 8, 16, 32) if n <= engine.scheduler.max_seqs]
    room = min(engine.context - 8, 24)
    numbers = itertools.count()
    for done, size in enumerate(sizes):
        for _ in range(size):
            serial = next(numbers)
            prompt = [(7 * number + 11 * serial) % vocab for number in range(max(1, room))]
            sampling = Sampling(temperature=0.0, max_tokens=6, ignore_eos=True)
            engine.add(Request(f"warm-up-{serial}", prompt, sampling, arrived_s=time.monotonic()))
        while engine.has_work:
            engine.step()
        progress((done + 1) / len(sizes))

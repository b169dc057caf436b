"""Compiles the C++ kernels at first use with the system's compiler, and keeps the result in a folder that only this user can write."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path

SOURCE, HEADERS = "quantized.cpp", ("attention.h", "exact.h", "full.h", "step.h", "team.h")
COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC")
THREADS = "-fopenmp"
BUILD_S = 120.0

Log = Callable[[str], None]


class NoKernels(Exception):
    """The kernels can't be had here; the reason in one line."""


def load(log: Log) -> ctypes.CDLL:
    """The compiled kernels, from the cache or freshly built. NoKernels says why there are none.

    Building takes some seconds, once for this source, compiler and processor. Processes that build at the same time do so
    each under a name of its own and rename what is whole.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise NoKernels(f"no kernels for {platform.machine()} processors")
    compiler = find_compiler()
    sources = {name: files(__package__).joinpath(name).read_bytes() for name in (SOURCE, *HEADERS)}
    name = f"quantized-{_key(b''.join(sources.values()), compiler)}.so"
    with contextlib.ExitStack() as stack:
        try:
            folder = own_folder(cache_folder())
        except OSError as error:
            log(
                f"kernels are built for this run only, as their cache can't be used ({_one_line(error)}); "
                "name a folder of this user alone in XDG_CACHE_HOME"
            )
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pairscope-kernels-")))
        library = folder / name
        if library.is_file():
            with contextlib.suppress(OSError):  # a damaged file is built again
                return ctypes.CDLL(str(library))
        log(f"compiling the kernels with {compiler}")
        _compile(compiler, sources, library)
        try:
            return ctypes.CDLL(str(library))
        except OSError as error:
            raise NoKernels(f"the compiled kernels can't be loaded: {_one_line(error)}") from None


def find_compiler() -> str:
    """$CXX, else the first compiler on the path. NoKernels when there is none."""
    for name in (os.environ.get("CXX", ""), *COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise NoKernels("no C++ compiler on this machine; install g++ or clang++ to be several times as fast")


def cache_folder() -> Path:
    """systemd's CacheDirectory, else the user's cache folder (XDG)."""
    given = os.environ.get("CACHE_DIRECTORY")
    if given:
        return Path(given.split(":", 1)[0])
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "pairscope"
    except RuntimeError as error:  # a user without a home
        raise OSError(str(error)) from None


def own_folder(folder: Path) -> Path:
    """Make `folder`, for this user alone. OSError when it can't be had, or when others could put a file or a folder in its place."""
    folder = folder.expanduser().absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = folder.resolve()
    for place in (folder, *folder.parents):
        at = place.stat()
        if at.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{place} belongs to another user")
        open_to_all = at.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if open_to_all and (place == folder or not at.st_mode & stat.S_ISVTX):
            raise PermissionError(f"others can write into {place}")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} can't be written")
    return folder


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; what stands there at the end of the block becomes `path` at once."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        yield Path(name)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def _compile(compiler: str, sources: Mapping[str, bytes], library: Path) -> None:
    reason = ""
    with tempfile.TemporaryDirectory(prefix="pairscope-build-") as room, written_whole(library) as target:
        for name, source in sources.items():
            (Path(room) / name).write_bytes(source)
        code = Path(room) / SOURCE
        for threads in ((THREADS,), ()):  # without OpenMP the kernels run on one thread
            command = [compiler, *FLAGS, *threads, str(code), "-o", str(target)]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, errors="replace", timeout=BUILD_S, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise NoKernels(f"{compiler} failed: {_one_line(error)}") from None
            if done.returncode == 0:
                return
            errors = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
            reason = reason or errors[0]
        raise NoKernels(f"{compiler} failed: {reason[:200]}")


def _key(source: bytes, compiler: str) -> str:
    """Changes with the source, the flags, the compiler and what this processor can do."""
    try:
        told = subprocess.run([compiler, "--version"], capture_output=True, timeout=BUILD_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernels(f"{compiler} failed: {_one_line(error)}") from None
    parts = (source, compiler.encode(), told, " ".join((*FLAGS, THREADS)).encode(), _processor())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return next((line for line in lines if line.startswith(b"flags")), b"")


def _one_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

"""A device graph in plain torch: it keeps the operators that run while it records, with the very tensors that they read and
wrote, and runs them again in the same places. What Python does is not kept: a number that was read on the host stays what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

Tensor = torch.Tensor

HOST_READS = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::lift_fresh", "aten::equal")
"""What waits for the device, or brings numbers from the host that would be the same in every replay."""


class CantCapture(RuntimeError):
    pass


class Recorder(TorchDispatchMode):
    now: Recorder | None = None

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.name().split(".")[0] in HOST_READS:
            raise CantCapture(f"{func.name()} can't be captured")
        out = func(*args, **kwargs)
        read = {
            tensor.untyped_storage().data_ptr() for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)
        }
        self.keep(lambda: func(*args, **kwargs), out, read, func._schema.is_mutable)
        return out

    def keep(self, run: Callable[[], Any], out: Any, read: set[int], mutates: bool = False) -> None:
        """`out` is written again by each replay, but for what shares its memory with something that was read."""

        def again() -> None:
            found = run()
            if mutates:
                return
            for old, new in zip(tree_leaves(out), tree_leaves(found), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in read:
                    old.copy_(new)

        self.kept.append(again)


def launched(kernel: Callable[[], Tensor]) -> Tensor:
    """A library's kernel as one piece of a graph, however it is done here."""
    recorder = Recorder.now
    with _disable_current_modes():
        out = kernel()
    if recorder is not None:
        recorder.keep(kernel, out, set())
    return out


class GraphRecorder:
    """A capturer. `free` is what the device has left, and each graph takes `bytes_each` of it."""

    def __init__(self, bytes_each: int = 1000) -> None:
        self.free = 1 << 40
        self.bytes_each = bytes_each
        self.captures = 0

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        step()
        recorder = Recorder.now = Recorder()
        try:
            with recorder:
                out = step()
        finally:
            Recorder.now = None
        self.captures += 1
        self.free -= self.bytes_each

        @torch.inference_mode()
        def replay() -> None:
            for again in recorder.kept:
                again()

        return replay, out

    def free_bytes(self) -> int:
        return self.free

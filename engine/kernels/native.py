"""The compiled kernels as Python calls them: plain C functions over tensors' memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from engine.kernels.build import NoKernels, load

Tensor = torch.Tensor

BLOCK = 16
"""Outputs that lie together in packed weights."""

INSTRUCTIONS = {1: "AVX2", 2: "AVX-512 VNNI"}


class Weights(ctypes.Structure):
    """As `Weights` in quantized.cpp; null pointers are None."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("padded_inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("group", ctypes.c_int64),
    )


class Kernels:
    """The loaded library, at the best instructions of this processor or, for a trial, at lower ones (`level`)."""

    def __init__(self, library: ctypes.CDLL, level: int | None = None) -> None:
        best = int(library.pairscope_level())
        if not best:
            raise NoKernels("this processor has no AVX2")
        self.level = min(best, level or best)
        self._product = library.pairscope_product
        pointer = ctypes.c_void_p
        self._product.argtypes = (
            *(ctypes.c_int, pointer, pointer, ctypes.c_int64, ctypes.c_int64, pointer, ctypes.c_double),
            *(ctypes.c_int64, pointer, pointer, ctypes.c_int),
        )
        self._product.restype = None

    @property
    def name(self) -> str:
        return INSTRUCTIONS[self.level]

    def product(
        self,
        weights: ctypes.c_void_p,
        x: Tensor,
        y: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
        residual: Tensor | None = None,
    ) -> None:
        """Fill y [rows, outputs]. All tensors are float32 and contiguous; `residual` may be y itself."""
        self._product(
            self.level,
            weights,
            x.data_ptr(),
            x.shape[0],
            x.shape[1],
            None if norm is None else norm.data_ptr(),
            eps,
            gated,
            None if residual is None else residual.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
        )


def kernels(log: Callable[[str], None]) -> Kernels | None:
    """The kernels for this machine; None, and one line that says why, where there are none."""
    try:
        return Kernels(load(log))
    except NoKernels as reason:
        log(f"no compiled kernels, torch's own operators instead: {reason}")
        return None

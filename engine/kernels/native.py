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
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("padded_inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("bits", ctypes.c_int64),
        ("exact", ctypes.c_int64),
        ("in_steps", ctypes.c_int64),
    )


class StepLayer(ctypes.Structure):
    """As `StepLayer` in step.h: addresses of Weights, of floats, and of a layer's slots."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in ("qkv", "attention_out", "gate_up", "down", "attention_norm", "mlp_norm", "cache")
    )


class StepModel(ctypes.Structure):
    """As `StepModel` in step.h."""

    _fields_ = (
        ("layers", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in ("num_layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "block_size")
        ),
        ("rotations", ctypes.c_void_p),
        ("eps", ctypes.c_double),
        ("scale", ctypes.c_double),
    )


class StepGroup(ctypes.Structure):
    """As `StepGroup` in step.h."""

    _fields_ = (
        ("begin", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
        ("firsts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
    )


class StepBatch(ctypes.Structure):
    """As `StepBatch` in step.h."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("groups", ctypes.c_void_p),
        ("num_groups", ctypes.c_int64),
        ("attention_s", ctypes.c_double),  # filled in by the step
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
        self._attention = library.pairscope_attention
        self._attention.argtypes = (
            *(ctypes.c_int, pointer, ctypes.c_int64, pointer, pointer, pointer, pointer),
            *([ctypes.c_int64] * 6),
            *(ctypes.c_double, pointer, ctypes.c_int),
        )
        self._attention.restype = None
        self._step = library.pairscope_step
        self._step.argtypes = (ctypes.c_int, pointer, pointer, ctypes.c_int)
        self._step.restype = None

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

    def attention(
        self,
        q: Tensor,
        cache: Tensor,
        table: Tensor,
        span: tuple[Tensor, Tensor],
        block_size: int,
        kv_heads: int,
        scale: float,
        out: Tensor,
    ) -> None:
        """Fill out [rows, heads, head_dim]: attention of the queries that begin each row of q, each over its own tokens.

        `cache` is [slots, 2 x KV heads x head_dim] float32, `table` [rows, blocks] int64; `span` says for each row at which
        token of its blocks it begins and before which it ends, [rows] int64 each. All are contiguous, but rows of q may lie
        apart. head_dim is a multiple of 8.
        """
        self._attention(
            self.level,
            q.data_ptr(),
            q.stride(0),
            cache.data_ptr(),
            table.data_ptr(),
            span[0].data_ptr(),
            span[1].data_ptr(),
            *table.shape,
            block_size,
            out.shape[1],
            kv_heads,
            out.shape[2],
            scale,
            out.data_ptr(),
            torch.get_num_threads(),
        )

    def step(self, model: StepModel, batch: StepBatch) -> None:
        """All layers over the rows of `batch`, in place. What the addresses name must live meanwhile."""
        self._step(self.level, ctypes.byref(model), ctypes.byref(batch), torch.get_num_threads())


def kernels(log: Callable[[str], None]) -> Kernels | None:
    """The kernels for this machine; None, and one line that says why, where there are none."""
    try:
        return Kernels(load(log))
    except NoKernels as reason:
        log(f"no compiled kernels, torch's own operators instead: {reason}")
        return None

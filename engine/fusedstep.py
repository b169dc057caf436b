"""All layers of a step in one call of the compiled kernels, where the model and the step allow it."""

from __future__ import annotations

import ctypes
import weakref

import torch

from engine.batch import Batch
from engine.kernels.native import Kernels, StepBatch, StepGroup, StepLayer, StepModel
from engine.kvstore import KVStore, PlainLayer
from engine.model import Decoder
from engine.quantized import Compiled

Tensor = torch.Tensor

LONG_CHUNK = 256
"""A chunk of a prompt with so much context is left to torch's attention, which takes many queries at once."""


class FusedStep:
    """Runs a decoder's layers over steps of single tokens and short chunks; the token rows of a chunk attend one by one.

    Python and the start of threads cost some 10 ms of a step of 30 layers otherwise, more than the products themselves.
    """

    def __init__(self, decoder: Decoder, kernels: Kernels) -> None:
        config = decoder.config
        self._decoder = decoder
        self._kernels = kernels
        self._layers = (StepLayer * config.num_layers)()
        self._cache: weakref.ref[KVStore] | None = None
        turns = torch.view_as_real(decoder.rotations).contiguous()
        self._kept = (turns, [(layer.attention_norm, layer.mlp_norm) for layer in decoder.layers])
        for to, layer in zip(self._layers, decoder.layers, strict=True):
            for name in ("qkv", "attention_out", "gate_up", "down"):
                linear = getattr(layer, name)
                assert isinstance(linear, Compiled)
                setattr(to, name, linear.address)
            to.attention_norm, to.mlp_norm = layer.attention_norm.data_ptr(), layer.mlp_norm.data_ptr()
        self._model = StepModel(
            ctypes.addressof(self._layers),
            config.num_layers,
            config.hidden,
            config.intermediate,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            0,
            turns.data_ptr(),
            config.norm_eps,
            config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
        )

    @staticmethod
    def suits(decoder: Decoder) -> bool:
        """Whether the kernel can do it: float32, compiled products, no norm after attention or within heads, no layer that
        reaches less far than others, no cap.
        """
        config = decoder.config
        return (
            decoder.embedding.dtype is torch.float32
            and config.head_dim % 8 == 0
            and config.attention_cap is None
            and not config.local_layers
            and all(
                layer.qk_norm is None
                and layer.attention_post_norm is None
                and layer.mlp_post_norm is None
                and all(
                    isinstance(linear, Compiled)
                    for linear in (layer.qkv, layer.attention_out, layer.gate_up, layer.down)
                )
                for layer in decoder.layers
            )
        )

    def __call__(self, x: Tensor, batch: Batch, cache: KVStore) -> float | None:
        """From the embeddings of the step's tokens to their hidden states, in place; rows beyond the tokens stay as they are.
        Seconds that attention took of it, as the first thread saw it; None where the step must go layer by layer.
        """
        if any(chunk.context > LONG_CHUNK for chunk in batch.full.prefill) or not self._knows(cache):
            return None
        kept: list[Tensor] = []
        groups = [
            StepGroup(
                group.begin,
                group.end,
                group.table.data_ptr(),
                len(group.table) // (group.end - group.begin),
                len(group.table) // (group.end - group.begin),
                group.firsts.data_ptr(),
                group.lengths.data_ptr(),
            )
            for group in batch.full.decode
        ]
        chunks = batch.full.prefill
        rows = batch.rows[len(batch.rows) - len(chunks) :]
        for chunk, row in zip(chunks, rows, strict=True):
            kept.append(torch.tensor(row.request.blocks[: -(-row.context // cache.block_size)]))
            kept.append(
                batch.positions[chunk.begin : chunk.end] + 1
            )  # each token sees what stands before it, and itself
            kept.append(torch.zeros(chunk.end - chunk.begin, dtype=torch.int64))
            at, lengths, firsts = (tensor.data_ptr() for tensor in kept[-3:])
            groups.append(StepGroup(chunk.begin, chunk.end, at, 0, len(kept[-3]), firsts, lengths))
        table = (StepGroup * len(groups))(*groups)
        given = StepBatch(
            x.data_ptr(),
            batch.tokens,
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            ctypes.addressof(table),
            len(groups),
        )
        self._kernels.step(self._model, given)
        return float(given.attention_s)

    def _knows(self, cache: KVStore) -> bool:
        """Whether the layers point into this cache, which they do from now on if it holds float32."""
        if self._cache is not None and self._cache() is cache:
            return True
        for to, kept in zip(self._layers, cache.layers, strict=True):
            if not isinstance(kept, PlainLayer):
                return False
            to.cache = kept.slots.data_ptr()
        self._model.block_size = cache.block_size
        self._cache = weakref.ref(cache)
        return True

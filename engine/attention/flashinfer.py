"""FlashInfer over the paged cache where it lies: a wrapper for single tokens, one for sequences of several, planned once a step.

Signatures and limits: flashinfer/decode.py, flashinfer/prefill.py and csrc/batch_decode.cu of flashinfer 0.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.attention.interface import Place
from engine.attention.paged import Sequences, pages, scale_of, sequences_of
from engine.batch import Batch
from engine.kvstore import LayerCache

Tensor = torch.Tensor

WORKSPACE_BYTES = 128 << 20
"""What its documentation recommends for parts of results. Wrappers share it: their steps never run at the same time."""
HEADS = (64, 128, 256)
PLAIN_GROUPS = (1, 2, 4, 8)
"""Query heads a KV head for which there is a kernel without tensor cores."""


class FlashInfer:
    """`library` is the module flashinfer."""

    name = "flashinfer"
    gathers = False

    def __init__(self, place: Place, library: Any) -> None:
        self._library = library
        self.place, self.config, self.block_size = place, place.config, place.block_size
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=place.device)
        self._singles: dict[bool, Any] = {local: self.decoder() for local in self.kinds}
        self._severals: dict[bool, Any] = {
            local: library.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD") for local in self.kinds
        }
        self._single: Sequences | None = None
        self._several: Sequences | None = None

    @staticmethod
    def unfit(place: Place) -> str | None:
        """Why it can't be used here; None when it can."""
        if place.dtype not in (torch.float16, torch.bfloat16):
            return "flashinfer computes in float16 and bfloat16 only: set dtype"
        if place.int8:
            return "flashinfer doesn't read this engine's cache in 8 bits: set kv_dtype = auto"
        if place.config.head_dim not in HEADS:
            return f"flashinfer takes heads of {', '.join(map(str, HEADS))} numbers, this model has {place.config.head_dim}"
        return None

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Of layers: all the same, or some with a window too. A plan holds for one kind."""
        return (False, True) if self.config.local_layers else (False,)

    def decoder(self, **buffers: object) -> Any:
        """A wrapper for single tokens; with buffers, one that can be captured."""
        group = self.config.num_heads // self.config.num_kv_heads
        # tensor cores pay from four queries a KV head on, by its documentation
        dense = group >= 4 or group not in PLAIN_GROUPS
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace, "NHD", use_tensor_cores=dense, **buffers
        )

    def begin(self, batch: Batch) -> None:
        self._single, self._several = sequences_of(batch, self.block_size)
        for local in self.kinds:
            if len(self._single):
                self.plan_decode(self._singles[local], self._single.tables, self._single.contexts, local)
            if len(self._several):
                self._plan_several(self._severals[local], self._several, local)

    def __call__(self, batch: Batch, local: bool, qkv: Tensor, cache: LayerCache) -> Tensor:
        config = self.config
        out = qkv.new_zeros(qkv.shape[0], config.num_heads, config.head_dim)
        queries = qkv[:, : config.q_width].view(-1, config.num_heads, config.head_dim)
        both = pages(cache, config)
        for sequences, wrappers in ((self._single, self._singles), (self._several, self._severals)):
            if sequences is not None and len(sequences):
                at = sequences.tokens
                out[at] = wrappers[local].run(queries[at].contiguous(), both)
        return out.view(-1, config.q_width)

    def stage(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> StagedFlashInfer:
        return StagedFlashInfer(self, rows, width, device)

    def plan_decode(self, wrapper: Any, tables: Sequence[Sequence[int]], contexts: Sequence[int], local: bool) -> None:
        """Tell a wrapper for single tokens what they attend to."""
        config = self.config
        wrapper.plan(
            *page_lists(tables, contexts, self.block_size),
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            self.block_size,
            **self._way(local),
        )

    def _plan_several(self, wrapper: Any, sequences: Sequences, local: bool) -> None:
        config = self.config
        wrapper.plan(
            torch.tensor(sequences.bounds, dtype=torch.int32),
            *page_lists(sequences.tables, sequences.contexts, self.block_size),
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            self.block_size,
            causal=True,
            **self._way(local),
        )

    def _way(self, local: bool) -> dict[str, object]:
        config = self.config
        return {
            "window_left": config.window - 1
            if local and config.window is not None
            else -1,  # the token's own not counted
            "logits_soft_cap": config.attention_cap or 0.0,
            "sm_scale": scale_of(config),
            "q_data_type": self.place.dtype,
            "kv_data_type": self.place.dtype,
        }


def page_lists(
    tables: Sequence[Sequence[int]], contexts: Sequence[int], block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Where each table begins [n + 1], the blocks of all, and the tokens in each one's last block [n], int32 on the host, where
    plans are made.
    """
    starts = [0]
    for table in tables:
        starts.append(starts[-1] + len(table))
    last = [(context - 1) % block_size + 1 for context in contexts]
    blocks = [block for table in tables for block in table]
    whole = [torch.tensor(numbers, dtype=torch.int32) for numbers in (starts, blocks, last)]
    return whole[0], whole[1], whole[2]


class StagedFlashInfer:
    """Wrappers whose plans lie in buffers of their own; planning is done on the host, between replays."""

    def __init__(self, attention: FlashInfer, rows: int, width: int, device: torch.device) -> None:
        self._attention = attention

        def room(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self._wrappers = {
            local: attention.decoder(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=room(rows + 1),
                paged_kv_indices_buffer=room(rows * width),
                paged_kv_last_page_len_buffer=room(rows),
            )
            for local in attention.kinds
        }

    def load(self, tables: Sequence[Sequence[int]], contexts: Sequence[int]) -> None:
        for local, wrapper in self._wrappers.items():
            self._attention.plan_decode(wrapper, tables, contexts, local)

    def begin(self, batch: Batch) -> None:
        pass  # planned when it was loaded

    def __call__(self, batch: Batch, local: bool, qkv: Tensor, cache: LayerCache) -> Tensor:
        config = self._attention.config
        queries = qkv[:, : config.q_width].reshape(-1, config.num_heads, config.head_dim)
        out: Tensor = self._wrappers[local].run(queries, pages(cache, config))
        return out.reshape(-1, config.q_width)

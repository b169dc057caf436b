"""What is used of flash-attn and flashinfer, in plain torch: published signatures, and refusals where the real ones refuse.

Facts from flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp (flash-attn 2.8), and from flashinfer/decode.py,
flashinfer/prefill.py, csrc/batch_decode.cu (flashinfer 0.6). They compute in float32, key by key, without any mask tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.doubles.graph_recorder import CantCapture, Recorder, launched

Tensor = torch.Tensor
HALVES = (torch.float16, torch.bfloat16)


def refuse_in_capture(what: str) -> None:
    if Recorder.now is not None:
        raise CantCapture(f"{what} can't be captured")


def check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, left: int, causal: bool) -> Tensor:
    """[queries, heads, head_dim] over [keys, KV heads, head_dim], aligned at their ends. A query that sees nothing gives zeros."""
    queries, heads, _ = q.shape
    keys, groups, _ = k.shape
    out = torch.zeros(q.shape, dtype=torch.float32)
    for at in range(queries):
        here = at + keys - queries
        last = here if causal else keys - 1
        first = max(0, here - left) if left >= 0 else 0
        if last < first:
            continue
        for head in range(heads):
            kv = head // (heads // groups)
            scores = k[first : last + 1, kv].float() @ q[at, head].float() * scale
            if cap > 0:
                scores = cap * torch.tanh(scores / cap)
            out[at, head] = scores.softmax(0) @ v[first : last + 1, kv].float()
    return out.to(q.dtype)


def of_pages(cache: Tensor, table: list[int], length: int) -> Tensor:
    """The first `length` rows of a table's pages. A page that isn't there is an error here, and would be any memory there."""
    check(all(0 <= page < cache.shape[0] for page in table), f"a table names pages that are not there: {table}")
    return torch.cat([cache[page] for page in table])[:length]


class FlashAttn:
    """The module flash_attn."""

    __version__ = "2.8.4"

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: int | Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Tensor | None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        refuse_in_capture("flash_attn_with_kvcache, which reads the greatest length on the host,")
        assert k is None and v is None and rotary_cos is None, "not used of it"
        assert isinstance(cache_seqlens, Tensor) and block_table is not None
        batch, _, _, head_dim = q.shape
        self._check(q.flatten(0, 1), k_cache, v_cache, block_table, batch)
        check(cache_seqlens.dtype is torch.int32, "seqlens_k must have dtype int32")
        check(cache_seqlens.is_contiguous() and cache_seqlens.shape == (batch,), "seqlens_k must have shape (batch)")
        most = block_table.shape[1] * k_cache.shape[1]
        check(int(cache_seqlens.max()) <= most, "max(seqlens_k) exceeds the capacity addressable by block_table")
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        rows = []
        for row in range(batch):
            length = int(cache_seqlens[row])
            used = block_table[row, : -(-length // k_cache.shape[1])].tolist()
            keys, values = (of_pages(cache, used, length) for cache in (k_cache, v_cache))
            rows.append(attended(q[row], keys, values, scale, softcap, window_size[0], causal))
        return torch.stack(rows)

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        assert block_table is not None and not dropout_p
        table, way = block_table, (softmax_scale, causal, window_size[0], softcap)
        return launched(
            lambda: self._varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k), table, way)
        )

    def _varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        most: tuple[int, int],
        block_table: Tensor,
        way: tuple[float | None, bool, int, float],
    ) -> Tensor:
        max_seqlen_q, max_seqlen_k = most
        softmax_scale, causal, left, softcap = way
        batch = block_table.shape[0]
        self._check(q, k, v, block_table, batch)
        check(q.shape[2] % 8 == 0, "query must have a head_size that is a multiple of 8")
        for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            check(starts.dtype is torch.int32, f"{name} must have dtype int32")
            check(starts.is_contiguous() and starts.shape == (batch + 1,), f"{name} must have shape (batch + 1)")
        check(int(cu_seqlens_q[-1]) == q.shape[0], "cu_seqlens_q doesn't end with the queries")
        check(int(cu_seqlens_q.diff().max()) <= max_seqlen_q, "max_seqlen_q is too small: queries would be left out")
        check(int(cu_seqlens_k.diff().max()) <= max_seqlen_k, "max_seqlen_k is too small: keys would be left out")
        scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
        out = torch.empty_like(q)
        for row in range(batch):
            begin, end = int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1])
            length = int(cu_seqlens_k[row + 1] - cu_seqlens_k[row])
            used = block_table[row, : -(-length // k.shape[1])].tolist()
            keys, values = (of_pages(cache, used, length) for cache in (k, v))
            out[begin:end] = attended(q[begin:end], keys, values, scale, softcap, left, causal)
        return out

    def _check(self, q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, batch: int) -> None:
        check(q.dtype in HALVES, "FlashAttention only support fp16 and bf16 data type")
        check(k.dtype is q.dtype and v.dtype is q.dtype, "query and key must have the same dtype")
        check(q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        check(block_table.dtype is torch.int32, "block_table must have dtype torch.int32")
        check(block_table.stride(-1) == 1 and block_table.dim() == 2, "block_table must have contiguous last dimension")
        check(block_table.shape[0] == batch, "block_table must have shape (batch, blocks)")
        check(k.dim() == 4 and k.shape == v.shape, "a paged cache has shape (blocks, page, heads, head_size)")
        check(k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
        check(q.shape[-1] == k.shape[3] <= 256, "FlashAttention forward only supports head dimension at most 256")
        check(q.shape[-2] % k.shape[2] == 0, "Number of heads in key/value must divide number of heads in query")


class PagedWrapper:
    """What flashinfer's wrappers of a paged cache have in common."""

    def __init__(self, workspace: Tensor, kv_layout: str, fixed: int) -> None:
        if workspace.dtype is not torch.uint8 or workspace.data_ptr() % 16:
            raise ValueError("the workspace must be 16-byte aligned")
        if kv_layout not in ("NHD", "HND"):
            raise KeyError(f"Invalid kv_layout {kv_layout}")
        assert kv_layout == "NHD", "not used of it"
        self.fixed = fixed  # rows of a wrapper that is captured; 0: any number
        self.planned: dict[str, Any] | None = None
        self.indptr = self.indices = self.last = torch.empty(0)

    def keep(self, indptr: Tensor, indices: Tensor, last: Tensor) -> None:
        """Take the page lists in: in memory of the wrapper's own where it is captured."""
        refuse_in_capture("plan")
        for name, numbers in (("indptr", indptr), ("indices", indices), ("last_page_len", last)):
            check(numbers.dtype is torch.int32 and numbers.dim() == 1, f"{name} must be one row of int32")
        check(len(indptr) == len(last) + 1 and int(indptr[-1]) == len(indices), "page lists don't fit together")
        if not self.fixed:
            self.indptr, self.indices, self.last = indptr.clone(), indices.clone(), last.clone()
            return
        if len(last) != self.fixed:
            raise ValueError("The batch size should be fixed in cudagraph mode")
        if len(indices) > len(self.indices):
            raise ValueError("The size of indices should be less than or equal to the allocated buffer")
        self.indptr.copy_(indptr)
        self.last.copy_(last)
        self.indices[: len(indices)].copy_(indices)

    def sequence(self, row: int, cache: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """A sequence's keys and values."""
        assert self.planned is not None
        size = self.planned["page_size"]
        begin, end, last = int(self.indptr[row]), int(self.indptr[row + 1]), int(self.last[row])
        check(1 <= last <= size, f"last_page_len is {last}")
        table = self.indices[begin:end].tolist()
        length = (end - begin - 1) * size + last
        return of_pages(cache[0], table, length), of_pages(cache[1], table, length)

    def check_run(self, q: Tensor, cache: tuple[Tensor, Tensor]) -> None:
        plan = self.planned
        if plan is None:
            raise AttributeError("plan comes before run")
        k, v = cache
        if q.dtype is not plan["q_data_type"] or k.dtype is not plan["kv_data_type"]:
            raise ValueError(f"The dtype of q {q.dtype} does not match the q_data_type that was planned")
        check(q.dtype in HALVES, "unsupported data type")
        shape = (k.shape[0], plan["page_size"], plan["num_kv_heads"], plan["head_dim"])
        check(k.shape == shape and v.shape == shape, f"K and V must have shape {shape}, not {tuple(k.shape)}")
        check(k.stride() == v.stride() and k.stride(-1) == 1, "K/V strides differ")
        check(q.shape[1:] == (plan["num_qo_heads"], plan["head_dim"]), "q has other heads than were planned")
        check(q.stride(-1) == 1, "q must be contiguous")
        check(plan["head_dim"] in (64, 128, 256), "Unsupported head_dim")


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        self.use_tensor_cores = use_tensor_cores
        if not use_cuda_graph:
            super().__init__(float_workspace_buffer, kv_layout, 0)
            return
        indptr, indices, last = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        if indptr is None or indices is None or last is None:
            raise ValueError("buffers should be torch.Tensors in cudagraph mode")
        if len(indptr) != len(last) + 1:
            raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")
        super().__init__(float_workspace_buffer, kv_layout, len(last))
        self.indptr, self.indices, self.last = indptr, indices, last

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        if not self.use_tensor_cores and num_qo_heads // num_kv_heads not in (1, 2, 3, 4, 8):
            raise RuntimeError("Unsupported group_size")
        self.keep(indptr, indices, last_page_len)
        self.planned = {
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "page_size": page_size,
            "window_left": window_left,
            "cap": logits_soft_cap or 0.0,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type or q_data_type,
            "scale": head_dim**-0.5 if sm_scale is None else sm_scale,
        }

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None) -> Tensor:
        plan = dict(self.planned or {})  # numbers that are a part of a captured launch; page lists are memory
        return launched(lambda: self._run(q, paged_kv_cache, plan))

    def _run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], plan: dict[str, Any]) -> Tensor:
        self.check_run(q, paged_kv_cache)
        check(q.shape[0] == len(self.last), "q has another number of rows than was planned")
        rows = []
        for row in range(q.shape[0]):
            k, v = self.sequence(row, paged_kv_cache)
            rows.append(attended(q[row : row + 1], k, v, plan["scale"], plan["cap"], plan["window_left"], True))
        return torch.cat(rows)


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False) -> None:
        assert not use_cuda_graph, "not used of it"
        super().__init__(float_workspace_buffer, kv_layout, 0)
        self.queries = torch.empty(0)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        check(qo_indptr.dtype is torch.int32 and len(qo_indptr) == len(paged_kv_indptr), "qo_indptr must be int32")
        self.keep(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self.queries = qo_indptr.clone()
        self.planned = {
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim_qk,
            "page_size": page_size,
            "window_left": window_left,
            "cap": logits_soft_cap or 0.0,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type or q_data_type,
            "scale": head_dim_qk**-0.5 if sm_scale is None else sm_scale,
            "causal": causal,
        }

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        self.check_run(q, paged_kv_cache)
        plan = self.planned
        assert plan is not None
        check(q.shape[0] == int(self.queries[-1]), "q has another number of tokens than was planned")
        parts = []
        for row in range(len(self.last)):
            own = q[int(self.queries[row]) : int(self.queries[row + 1])]
            k, v = self.sequence(row, paged_kv_cache)
            parts.append(attended(own, k, v, plan["scale"], plan["cap"], plan["window_left"], plan["causal"]))
        return torch.cat(parts)


class FlashInferModule:
    """The module flashinfer."""

    __version__ = "0.6.0"
    BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper

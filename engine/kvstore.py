"""The KV cache's memory: one tensor a layer, cut into blocks. Which block belongs to whom is the scheduler's business."""

from __future__ import annotations

import numpy as np
import torch

from engine.modelconfig import ModelConfig


class KVStore:
    """Per layer a tensor [blocks, block_size * width]; a slot's row holds K of all KV heads, then V of all KV heads.

    Zeroed, because padding reads slots that nobody has written: their weight is 0, and 0 times an old NaN would be NaN.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.width = config.kv_width
        self.layers = [_zeros(num_blocks, block_size * self.width, dtype, device) for _ in range(config.num_layers)]
        self.slots = [layer.view(num_blocks * block_size, self.width) for layer in self.layers]

    def write(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Put `rows` [tokens, width] into the slots [tokens] of a layer."""
        self.slots[layer].index_copy_(0, slots, rows)


def _zeros(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On CPU through numpy, whose zeros are pages that the kernel gives only when they are touched: unlike torch's, a cache
    costs the memory that is used, not all that it may grow to.
    """
    if device.type != "cpu":
        return torch.zeros(rows, width, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(rows * width * dtype.itemsize, dtype=np.uint8)).view(dtype).view(rows, width)


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Cache bytes of one token over all layers: layers x 2 x KV heads x head_dim x bytes per number."""
    return config.num_layers * config.kv_width * dtype.itemsize

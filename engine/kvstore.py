"""The KV cache's memory: one tensor a layer, cut into blocks. Which block belongs to whom is the scheduler's business."""

from __future__ import annotations

import torch

from engine.modelconfig import ModelConfig


class KVStore:
    """Per layer a tensor [blocks, block_size * width]; a slot's row holds K of all KV heads, then V of all KV heads.

    Zeroed, because padding reads slots that nobody has written: their weight is 0, and 0 times an old NaN would be NaN.
    On CPU the pages of untouched blocks cost no memory.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.width = config.kv_width
        self.layers = [
            torch.zeros(num_blocks, block_size * self.width, dtype=dtype, device=device)
            for _ in range(config.num_layers)
        ]
        self.slots = [layer.view(num_blocks * block_size, self.width) for layer in self.layers]

    def write(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Put `rows` [tokens, width] into the slots [tokens] of a layer."""
        self.slots[layer].index_copy_(0, slots, rows)


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Cache bytes of one token over all layers: layers x 2 x KV heads x head_dim x bytes per number."""
    return config.num_layers * config.kv_width * dtype.itemsize

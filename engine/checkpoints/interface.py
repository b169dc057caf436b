"""What every checkpoint format offers to the loader."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.modelconfig import ModelConfig
from engine.numbers import Quantised
from engine.tokenizer import Tokenizer


class Checkpoint(Protocol):
    """A model on disk. Tensors go by their Hugging Face names, whatever the format."""

    config: ModelConfig

    def has(self, name: str) -> bool: ...

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in its stored precision (quantised ones as float32). KeyError when there is none of that name."""

    def numbers(self, name: str) -> Quantised | None:
        """The numbers of 8 or 4 bits that the matrix is stored in, which stand for exactly what `tensor` gives; None when it is
        stored in full precision. NotKept when they are of a kind that this engine only widens. KeyError as for `tensor`.
        """

    def tokenizer(self) -> Tokenizer: ...

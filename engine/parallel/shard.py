"""Which part of a model a rank has: a checkpoint that gives no more than that, so that nothing else need know of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from engine.checkpoints.interface import Checkpoint
from engine.modelconfig import ModelConfig
from engine.numbers import NotKept, Quantised
from engine.settings import SettingsError
from engine.tokenizer import Tokenizer

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`."""

    rank: int
    size: int

    def of(self, count: int) -> slice:
        """Its share of `count` things in a row; the shares differ by one at most and cover all."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)


def refuse_unfit(config: ModelConfig, size: int) -> None:
    """SettingsError, which names the numbers of ranks that would do, unless heads and MLP can be split evenly over `size`."""
    if _fits(config, size):
        return
    fitting = [str(n) for n in range(1, config.num_heads + 1) if _fits(config, n)]
    raise SettingsError(
        f"tensor_parallel is {size}: {config.num_heads} attention heads, {config.num_kv_heads} KV heads and an MLP of "
        f"{config.intermediate} can't be split evenly over {size} ranks; this model takes {' or '.join(fitting)}"
    )


def _fits(config: ModelConfig, size: int) -> bool:
    kv = config.num_kv_heads
    return not (config.num_heads % size or config.intermediate % size or (kv % size and size % kv))


def part_of(config: ModelConfig, size: int) -> ModelConfig:
    """The shape of one rank's share. With fewer KV heads than ranks, each rank has the one that its heads use."""
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate=config.intermediate // size,
    )


class ShardedCheckpoint:
    """A rank's share of a checkpoint. Q, K, V, gate and up are cut by outputs, the products after them by inputs; embedding,
    norms and the head are whole. Biases after a sum are added once, by the first rank.
    """

    def __init__(self, whole: Checkpoint, shard: Shard) -> None:
        self.whole = whole
        self.shard = shard
        self.config = part_of(whole.config, shard.size)

    def has(self, name: str) -> bool:
        return self.whole.has(name)

    def tokenizer(self) -> Tokenizer:
        return self.whole.tokenizer()

    def tensor(self, name: str) -> Tensor:
        cut = self._cut(name)
        tensor = self.whole.tensor(name)
        return tensor if cut is None else cut(tensor)

    def numbers(self, name: str) -> Quantised | None:
        """NotKept where there are any: a rank's share of the inputs may begin within a group."""
        if self.whole.numbers(name) is not None:
            raise NotKept("of a model that is split over ranks")
        return None

    def _cut(self, name: str) -> Callable[[Tensor], Tensor] | None:
        layer, _, kind = name.rpartition(".")
        match layer.rpartition(".")[2]:
            case "q_proj":
                return lambda tensor: tensor[self._heads(self.whole.config.num_heads)]
            case "k_proj" | "v_proj":
                return lambda tensor: tensor[self._heads(self.whole.config.num_kv_heads)]
            case "gate_proj" | "up_proj":
                return lambda tensor: tensor[self.shard.of(self.whole.config.intermediate)]
            case "o_proj" | "down_proj" if kind == "bias":
                return lambda tensor: tensor if self.shard.rank == 0 else torch.zeros_like(tensor)
            case "o_proj":
                return lambda tensor: tensor[:, self._heads(self.whole.config.num_heads)]
            case "down_proj":
                return lambda tensor: tensor[:, self.shard.of(self.whole.config.intermediate)]
        return None

    def _heads(self, heads: int) -> slice:
        """The numbers of this rank's heads; the one that it shares with others where there are fewer heads than ranks."""
        width, rank, size = self.config.head_dim, self.shard.rank, self.shard.size
        own = self.shard.of(heads) if heads >= size else slice(rank * heads // size, rank * heads // size + 1)
        return slice(own.start * width, own.stop * width)

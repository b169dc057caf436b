"""From a checkpoint to a decoder: weights cast, fused, put into the order that the kernels want, one layer at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import overload

import torch

from engine.checkpoints.interface import Checkpoint
from engine.linear import Keep, Kernel, Linear, Plain
from engine.model import Decoder, Layer
from engine.modelconfig import ModelConfig, UnsupportedModel
from engine.numbers import NotKept, Quantised, stacked

Tensor = torch.Tensor
Progress = Callable[[float], None]
EMBEDDING = "model.embed_tokens.weight"


def load_decoder(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    context: int,
    progress: Progress,
    kernel: Kernel,
    head_kernel: Kernel | None = None,
    keep: Keep | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Decoder:
    """Read all weights, one product's at a time, for products by `kernel`, the last by `head_kernel` if that is another one; what
    `keep` says, as the checkpoint's own numbers. `progress` hears 0..1, `log` what became of such numbers. UnsupportedModel names a
    tensor that is missing or has another shape.
    """
    config = checkpoint.config
    source = _Source(checkpoint, dtype, device, kernel, keep)
    embedding = source.take(EMBEDDING, (config.vocab, config.hidden))
    layers = []
    for number in range(config.num_layers):
        layers.append(_layer(source, config, number))
        progress((number + 1) / (config.num_layers + 2))
    head = source.head(embedding, head_kernel or kernel)
    decoder = Decoder(config, embedding, layers, source.norm("model.norm"), head, context)
    if source.told:
        log(source.told)
    progress(1.0)
    return decoder


def full_decoder(checkpoint: Checkpoint, decoder: Decoder) -> Decoder:
    """The model of `decoder` with full weights, each layer's read whenever it is computed: one layer is in memory at a time."""
    embedding, config = decoder.embedding, checkpoint.config
    source = _Source(checkpoint, embedding.dtype, embedding.device, Plain)
    layers = _Unread(source, config)
    return Decoder(config, embedding, layers, decoder.norm, source.head(embedding, Plain), len(decoder.rotations))


class _Unread(Sequence[Layer]):
    """Layers that are read when they are asked for, and not kept."""

    def __init__(self, source: _Source, config: ModelConfig) -> None:
        self._source, self._config = source, config

    def __len__(self) -> int:
        return self._config.num_layers

    @overload
    def __getitem__(self, number: int) -> Layer: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[Layer]: ...

    def __getitem__(self, number: int | slice) -> Layer | Sequence[Layer]:
        if isinstance(number, slice):
            return [self[at] for at in range(len(self))[number]]
        return _layer(self._source, self._config, range(len(self))[number])


def trial_weight(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A weight of the model to try kernels with. UnsupportedModel when it is missing or has another shape."""
    config = checkpoint.config
    source = _Source(checkpoint, dtype, device, Plain)
    shape = (config.intermediate, config.hidden)
    return torch.cat([source.take(f"model.layers.0.mlp.{part}_proj.weight", shape) for part in ("gate", "up")])


def trial_numbers(checkpoint: Checkpoint) -> Quantised | None:
    """Numbers that the checkpoint holds, to try kernels with; None where its weights are full ones. NotKept when there are none
    in its first layer but such as must be widened.
    """
    reason = None
    for part in ("mlp.gate_proj", "mlp.down_proj", "self_attn.o_proj", "self_attn.q_proj"):
        try:
            numbers = checkpoint.numbers(f"model.layers.0.{part}.weight")
        except NotKept as error:
            reason = reason or error
        except KeyError:
            continue  # named when it is loaded
        else:
            if numbers is not None:
                return numbers
    if reason is not None:
        raise reason
    return None


class _Source:
    """A checkpoint's weights, and the products that are made of them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        kernel: Kernel,
        keep: Keep | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._kernel = kernel
        self._keep = keep
        self._products = self._kept = 0
        self._widened: Counter[str] = Counter()

    @property
    def told(self) -> str:
        """What became of the checkpoint's own numbers, in a line; nothing where it has none."""
        if not self._kept and not self._widened:
            return ""
        line = f"{self._kept} of {self._products} products by the checkpoint's own numbers"
        reasons = ", ".join(f"{count} {reason}" for reason, count in self._widened.items())
        return f"{line}; not kept: {reasons}" if reasons else line

    def product(self, weight: Tensor | Quantised, bias: Tensor | None) -> Linear:
        self._products += 1
        return self._own(weight, bias) or self._kernel(self._wide(weight), bias)

    def _own(self, weight: Tensor | Quantised, bias: Tensor | None) -> Linear | None:
        """The product by a checkpoint's own numbers; none where there are none, or the kernel doesn't take these."""
        if isinstance(weight, Tensor) or self._keep is None:
            return None
        try:
            linear = self._keep.kernel(weight, bias)
        except NotKept as reason:
            self._widened[str(reason)] += 1
            return None
        self._kept += 1
        return linear

    def _wide(self, weight: Tensor | Quantised) -> Tensor:
        return weight if isinstance(weight, Tensor) else weight.full().to(self._dtype)

    def head(self, embedding: Tensor, kernel: Kernel) -> Linear:
        """The product that ends in the vocabulary."""
        config = self._checkpoint.config
        tied = config.tied or not self._checkpoint.has("lm_head.weight")
        name, shape = EMBEDDING if tied else "lm_head.weight", (config.vocab, config.hidden)
        kept = self._numbers(name, shape, self._keep.head_kinds if self._keep is not None else ())
        self._products += 1
        own = None if kept is None else self._own(kept, None)
        return own or kernel(embedding if tied else self.take(name, shape), None)

    def matrix(self, name: str, shape: tuple[int, ...]) -> Tensor | Quantised:
        """The checkpoint's own numbers where they are to be kept, else full weights."""
        kept = self._numbers(name, shape, self._keep.kinds if self._keep is not None else ())
        return self.take(name, shape) if kept is None else kept

    def stack(self, parts: Sequence[Tensor | Quantised]) -> Tensor | Quantised:
        """The outputs of all parts as one matrix: of numbers where all parts are such, and of one kind."""
        kept = [part for part in parts if not isinstance(part, Tensor)]
        if len(kept) == len(parts):
            try:
                return stacked(kept)
            except NotKept as reason:
                self._widened[str(reason)] += len(kept)
        elif kept:
            self._widened["joined with full weights"] += len(kept)
        return torch.cat([self._wide(part) for part in parts])

    def _numbers(self, name: str, shape: tuple[int, ...], kinds: tuple[type, ...]) -> Quantised | None:
        if not kinds:
            return None
        try:
            numbers = self._checkpoint.numbers(name)
        except NotKept as reason:
            self._widened[str(reason)] += 1
            return None
        except KeyError:
            return None  # named when its weights are asked for
        if numbers is None or not isinstance(numbers, kinds):
            return None
        self._fit(name, (numbers.numbers.shape[0], numbers.inputs), shape)
        return numbers

    @staticmethod
    def _fit(name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if found != shape:
            raise UnsupportedModel(f"tensor {name} has shape {list(found)}, expected {list(shape)}")

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        try:
            tensor = self._checkpoint.tensor(name)
        except KeyError:
            raise UnsupportedModel(f"the checkpoint has no tensor {name}") from None
        self._fit(name, tuple(tensor.shape), shape)
        return tensor.to(device=self._device, dtype=self._dtype)

    def norm(self, name: str, size: int | None = None) -> Tensor:
        """The weights of an RMS norm over `size` numbers; none: over the model's width."""
        config = self._checkpoint.config
        return self.take(f"{name}.weight", (size or config.hidden,)) + config.norm_offset

    def bias(self, name: str, size: int) -> Tensor | None:
        return self.take(name, (size,)) if self._checkpoint.has(name) else None


def _layer(source: _Source, config: ModelConfig, number: int) -> Layer:
    prefix = f"model.layers.{number}"
    before_mlp = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    return Layer(
        attention_norm=source.norm(f"{prefix}.input_layernorm"),
        qkv=_qkv(source, config, f"{prefix}.self_attn"),
        attention_out=source.product(
            source.matrix(f"{prefix}.self_attn.o_proj.weight", (config.hidden, config.q_width)),
            source.bias(f"{prefix}.self_attn.o_proj.bias", config.hidden),
        ),
        mlp_norm=source.norm(f"{prefix}.{before_mlp}"),
        gate_up=_gate_up(source, config, f"{prefix}.mlp"),
        down=source.product(
            source.matrix(f"{prefix}.mlp.down_proj.weight", (config.hidden, config.intermediate)),
            source.bias(f"{prefix}.mlp.down_proj.bias", config.hidden),
        ),
        qk_norm=_qk_norm(source, config, f"{prefix}.self_attn") if config.qk_norm else None,
        attention_post_norm=source.norm(f"{prefix}.post_attention_layernorm") if config.post_norms else None,
        mlp_post_norm=source.norm(f"{prefix}.post_feedforward_layernorm") if config.post_norms else None,
    )


def _qk_norm(source: _Source, config: ModelConfig, prefix: str) -> Tensor:
    parts = (("q", config.num_heads), ("k", config.num_kv_heads))
    weights = [pair_up(source.norm(f"{prefix}.{part}_norm", config.head_dim), 1).repeat(n, 1) for part, n in parts]
    return torch.cat(weights)


def _qkv(source: _Source, config: ModelConfig, prefix: str) -> Linear:
    parts = (("q", config.num_heads, True), ("k", config.num_kv_heads, True), ("v", config.num_kv_heads, False))
    weights, biases = list[Tensor | Quantised](), []
    for letter, heads, rotary in parts:
        width = heads * config.head_dim
        weight = source.matrix(f"{prefix}.{letter}_proj.weight", (width, config.hidden))
        bias = source.bias(f"{prefix}.{letter}_proj.bias", width)
        weights.append(_paired_up(weight, heads) if rotary else weight)
        biases.append(pair_up(bias, heads) if rotary and bias is not None else bias)
    given = [bias for bias in biases if bias is not None]
    if given and len(given) < 3:
        raise UnsupportedModel(f"{prefix}: only some of q, k and v have a bias")
    return source.product(source.stack(weights), torch.cat(given) if given else None)


def _gate_up(source: _Source, config: ModelConfig, prefix: str) -> Linear:
    shape = (config.intermediate, config.hidden)
    weights = [source.matrix(f"{prefix}.{part}_proj.weight", shape) for part in ("gate", "up")]
    biases = [source.bias(f"{prefix}.{part}_proj.bias", config.intermediate) for part in ("gate", "up")]
    given = [bias for bias in biases if bias is not None]
    return source.product(source.stack(weights), torch.cat(given) if len(given) == 2 else None)


def _paired_up(weight: Tensor | Quantised, heads: int) -> Tensor | Quantised:
    if isinstance(weight, Tensor):
        return pair_up(weight, heads)
    return weight.reordered(lambda rows: pair_up(rows, heads))


def pair_up(rows: Tensor, heads: int) -> Tensor:
    """Rows of Q or K from halves (i turns with i + d/2) to neighbours (2i with 2i + 1), so that a pair is one complex number."""
    half = rows.shape[0] // heads // 2
    return rows.view(heads, 2, half, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

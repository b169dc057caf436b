"""From a checkpoint to a decoder: weights cast, fused, put into the order that the kernels want, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.checkpoints.interface import Checkpoint
from engine.linear import Kernel, Linear
from engine.model import Decoder, Layer
from engine.modelconfig import ModelConfig, UnsupportedModel

Tensor = torch.Tensor
Progress = Callable[[float], None]


def load_decoder(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    context: int,
    progress: Progress,
    kernel: Kernel,
    head_kernel: Kernel | None = None,
) -> Decoder:
    """Read all weights, for products by `kernel`, the last by `head_kernel` if that is another one. `progress` hears 0..1.
    UnsupportedModel names a tensor that is missing or has another shape.
    """
    config = checkpoint.config
    source = _Source(checkpoint, dtype, device)
    embedding = source.take("model.embed_tokens.weight", (config.vocab, config.hidden))
    layers = []
    for number in range(config.num_layers):
        layers.append(_layer(source, config, number, kernel))
        progress((number + 1) / (config.num_layers + 2))
    tied = config.tied or not checkpoint.has("lm_head.weight")
    head = embedding if tied else source.take("lm_head.weight", (config.vocab, config.hidden))
    norm = source.norm("model.norm")
    decoder = Decoder(config, embedding, layers, norm, (head_kernel or kernel)(head, None), context)
    progress(1.0)
    return decoder


def trial_weight(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A weight of the model to try kernels with. UnsupportedModel when it is missing or has another shape."""
    return _gate_up(_Source(checkpoint, dtype, device), checkpoint.config, 0)[0]


class _Source:
    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        try:
            tensor = self._checkpoint.tensor(name)
        except KeyError:
            raise UnsupportedModel(f"the checkpoint has no tensor {name}") from None
        if tuple(tensor.shape) != shape:
            raise UnsupportedModel(f"tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        return tensor.to(device=self._device, dtype=self._dtype)

    def norm(self, name: str, size: int | None = None) -> Tensor:
        """The weights of an RMS norm over `size` numbers; none: over the model's width."""
        config = self._checkpoint.config
        return self.take(f"{name}.weight", (size or config.hidden,)) + config.norm_offset

    def bias(self, name: str, size: int) -> Tensor | None:
        return self.take(name, (size,)) if self._checkpoint.has(name) else None


def _layer(source: _Source, config: ModelConfig, number: int, kernel: Kernel) -> Layer:
    prefix = f"model.layers.{number}"
    before_mlp = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    return Layer(
        attention_norm=source.norm(f"{prefix}.input_layernorm"),
        qkv=_qkv(source, config, f"{prefix}.self_attn", kernel),
        attention_out=kernel(
            source.take(f"{prefix}.self_attn.o_proj.weight", (config.hidden, config.q_width)),
            source.bias(f"{prefix}.self_attn.o_proj.bias", config.hidden),
        ),
        mlp_norm=source.norm(f"{prefix}.{before_mlp}"),
        gate_up=kernel(*_gate_up(source, config, number)),
        down=kernel(
            source.take(f"{prefix}.mlp.down_proj.weight", (config.hidden, config.intermediate)),
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


def _qkv(source: _Source, config: ModelConfig, prefix: str, kernel: Kernel) -> Linear:
    parts = (("q", config.num_heads, True), ("k", config.num_kv_heads, True), ("v", config.num_kv_heads, False))
    weights, biases = [], []
    for letter, heads, rotary in parts:
        width = heads * config.head_dim
        weight = source.take(f"{prefix}.{letter}_proj.weight", (width, config.hidden))
        bias = source.bias(f"{prefix}.{letter}_proj.bias", width)
        weights.append(pair_up(weight, heads) if rotary else weight)
        biases.append(pair_up(bias, heads) if rotary and bias is not None else bias)
    given = [bias for bias in biases if bias is not None]
    if given and len(given) < 3:
        raise UnsupportedModel(f"{prefix}: only some of q, k and v have a bias")
    return kernel(torch.cat(weights), torch.cat(given) if given else None)


def _gate_up(source: _Source, config: ModelConfig, number: int) -> tuple[Tensor, Tensor | None]:
    prefix = f"model.layers.{number}.mlp"
    shape = (config.intermediate, config.hidden)
    weights = [source.take(f"{prefix}.{part}_proj.weight", shape) for part in ("gate", "up")]
    biases = [source.bias(f"{prefix}.{part}_proj.bias", config.intermediate) for part in ("gate", "up")]
    given = [bias for bias in biases if bias is not None]
    return torch.cat(weights), torch.cat(given) if len(given) == 2 else None


def pair_up(rows: Tensor, heads: int) -> Tensor:
    """Rows of Q or K from halves (i turns with i + d/2) to neighbours (2i with 2i + 1), so that a pair is one complex number."""
    half = rows.shape[0] // heads // 2
    return rows.view(heads, 2, half, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

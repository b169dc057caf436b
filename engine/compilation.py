"""The parts of a layer around attention, compiled by torch where that pays: norms, rotations, gates and sums in few passes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from engine.kernelchoice import EXACT, HALF, LEAST_ROUNDS, MOST_ROUNDS, ROWS, TRIAL_S
from engine.linear import Plain
from engine.model import Decoder, EagerParts, Layer
from engine.modelconfig import ModelConfig

Tensor = torch.Tensor
Log = Callable[[str], None]

WORTH = 1.03
"""`auto` compiles where parts become so many times as fast: less is noise, and each new shape costs a compilation."""


def suits(decoder: Decoder) -> bool:
    """Whether all products are plain ones: packed, quantised and shared ones do in one pass already what they can."""
    return all(
        type(linear) is Plain
        for layer in decoder.layers
        for linear in (layer.qkv, layer.attention_out, layer.gate_up, layer.down)
    )


class CompiledParts:
    """As EagerParts. Where compiling a new shape fails later on, they go back to it for good, with one line in the log."""

    def __init__(
        self, config: ModelConfig, log: Log, compiler: Callable[[Callable[..., Any]], Any] = torch.compile
    ) -> None:
        self._eager = EagerParts(config)
        self._config, self._log = config, log
        self._heads = config.num_heads + config.num_kv_heads
        self._enter, self._leave, self._mlp = compiler(entered), compiler(left), compiler(gated)
        self.failed = False

    def enter(self, layer: Layer, x: Tensor, turn: Tensor) -> Tensor:
        qkv = layer.qkv
        assert isinstance(qkv, Plain)
        turns = of_any_length(torch.view_as_real(turn))
        given = (of_any_length(x), layer.attention_norm, qkv.weight, qkv.bias, layer.qk_norm, turns)
        return self._run(
            lambda: self._enter(*given, self._heads, self._config.norm_eps), lambda: self._eager.enter(layer, x, turn)
        )

    def leave(self, layer: Layer, attended: Tensor, x: Tensor) -> Tensor:
        out = layer.attention_out
        assert isinstance(out, Plain)
        given = (
            of_any_length(attended),
            of_any_length(x),
            out.weight,
            out.bias,
            layer.attention_post_norm,
            self._config.norm_eps,
        )
        return self._run(lambda: self._leave(*given), lambda: self._eager.leave(layer, attended, x))

    def mlp(self, layer: Layer, x: Tensor) -> Tensor:
        up, down = layer.gate_up, layer.down
        assert isinstance(up, Plain) and isinstance(down, Plain)
        given = (of_any_length(x), layer.mlp_norm, up.weight, up.bias, down.weight, down.bias, layer.mlp_post_norm)
        return self._run(lambda: self._mlp(*given, self._config.norm_eps), lambda: self._eager.mlp(layer, x))

    def _run(self, compiled: Callable[[], Tensor], eager: Callable[[], Tensor]) -> Tensor:
        if not self.failed:
            try:
                return compiled()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler's; nothing was changed in place
                self.failed = True
                self._log(f"compile: given up ({_first_line(error)})")
        return eager()


def of_any_length(x: Tensor) -> Tensor:
    """`x`, with word to the compiler that the number of rows varies, and nothing else does."""
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


def entered(
    x: Tensor,
    norm: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    qk_norm: Tensor | None,
    turn: Tensor,
    heads: int,
    eps: float,
) -> Tensor:
    """Norm, Q, K and V, and rotation of the first `heads` heads. `turn` [tokens, 1, head_dim / 2, 2]: cos and sin."""
    qkv = F.linear(F.rms_norm(x, x.shape[-1:], norm, eps), weight, bias)
    half = turn.shape[2]
    turned = qkv[:, : heads * half * 2].reshape(-1, heads, half * 2)
    if qk_norm is not None:
        turned = F.rms_norm(turned, turned.shape[-1:], None, eps) * qk_norm
    even, odd = turned.reshape(-1, heads, half, 2).float().unbind(-1)
    cos, sin = turn.unbind(-1)
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return torch.cat((pairs.to(qkv.dtype).flatten(1), qkv[:, heads * half * 2 :]), dim=1)


def left(
    attended: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, post_norm: Tensor | None, eps: float
) -> Tensor:
    """The product after attention, and the residual."""
    out = F.linear(attended, weight, bias)
    return x + (out if post_norm is None else F.rms_norm(out, x.shape[-1:], post_norm, eps))


def gated(
    x: Tensor,
    norm: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    post_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """The MLP, and the residual; with a norm after it, its gate is of GELU."""
    gate, value = F.linear(F.rms_norm(x, x.shape[-1:], norm, eps), up, up_bias).chunk(2, dim=-1)
    opened = F.silu(gate) if post_norm is None else F.gelu(gate, approximate="tanh")
    out = F.linear(opened * value, down, down_bias)
    return x + (out if post_norm is None else F.rms_norm(out, x.shape[-1:], post_norm, eps))


def compile_parts(
    decoder: Decoder, wanted: str, log: Log, on_cuda: bool, compiler: Callable[..., Any] = torch.compile
) -> None:
    """Let a decoder's layers run compiled if the setting says `on` and they can be, or if it says `auto`, it is on CUDA, and a
    trial shows a gain: on CPU products take nearly all the time, and compiling takes minutes. The log says what it cost and
    brought, or why not.
    """
    if wanted == "off" or (wanted == "auto" and not on_cuda):
        return
    if not suits(decoder):
        log("compile: not used (only plain products are compiled, not packed, quantised or shared ones)")
        return
    parts = CompiledParts(decoder.config, log, compiler)
    began = time.perf_counter()
    try:
        error, times = _tried(decoder, parts)
    except RuntimeError as reason:
        log(f"compile: not used ({_first_line(reason)})")
        return
    if parts.failed:
        return  # it has said why
    cost = f"{time.perf_counter() - began:.0f} s to compile and try"
    gains = [eager / compiled for eager, compiled in times]
    told = ", ".join(f"{gain:.2f}x at {rows}" for gain, rows in zip(gains, ROWS, strict=True)) + " rows"
    if not error <= (EXACT if decoder.embedding.dtype is torch.float32 else HALF):
        log(f"compile: not used (its results lie {error:.2g} from those before)")
    elif wanted == "auto" and math.prod(gains) ** (1 / len(gains)) < WORTH:
        log(f"compile: not used (layers without attention {told}; {cost})")
    else:
        decoder.parts = parts
        log(f"compile: layers without attention {told}; {cost}")


def _tried(decoder: Decoder, parts: CompiledParts) -> tuple[float, list[tuple[float, float]]]:
    """The largest distance of a part from what it was, and best seconds for each of ROWS, eager and compiled."""
    generator = torch.Generator().manual_seed(0)
    eager = EagerParts(decoder.config)
    error, times = 0.0, []
    for rows in ROWS:
        given = _inputs(decoder, rows, generator)
        for own, expected in zip(_outputs(parts, decoder, *given), _outputs(eager, decoder, *given), strict=True):
            distance = float(torch.dist(own.float(), expected.float()) / expected.float().norm())
            error = max(error, distance if math.isfinite(distance) else math.inf)
        times.append(_times(decoder, [eager, parts], given))
    return error, times


def _inputs(decoder: Decoder, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    config, like = decoder.config, decoder.embedding
    x = torch.randn(rows, config.hidden, generator=generator).to(like.device, like.dtype)
    attended = torch.randn(rows, config.q_width, generator=generator).to(like.device, like.dtype)
    turn = decoder.rotations[torch.arange(rows, device=like.device) % len(decoder.rotations)].unsqueeze(1)
    return x, attended, turn


def _outputs(
    parts: CompiledParts | EagerParts, decoder: Decoder, x: Tensor, attended: Tensor, turn: Tensor
) -> Sequence[Tensor]:
    layer = decoder.layers[0]
    return parts.enter(layer, x, turn), parts.leave(layer, attended, x.clone()), parts.mlp(layer, x.clone())


def _times(
    decoder: Decoder, ways: Sequence[CompiledParts | EagerParts], given: tuple[Tensor, Tensor, Tensor]
) -> tuple[float, float]:
    """Best seconds of each, in turns."""
    best = [math.inf] * len(ways)
    begun, rounds = time.perf_counter(), 0
    while rounds < LEAST_ROUNDS or (time.perf_counter() - begun < TRIAL_S and rounds < MOST_ROUNDS):
        rounds += 1
        for number, parts in enumerate(ways):
            began = time.perf_counter()
            _outputs(parts, decoder, *given)
            if decoder.embedding.device.type == "cuda":
                torch.cuda.synchronize(decoder.embedding.device)
            best[number] = min(best[number], time.perf_counter() - began)
    return best[0], best[1]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__

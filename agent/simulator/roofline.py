"""How long one engine step takes on one GPU of a group, and how busy it keeps the GPU's memory and arithmetic.

Fitted to public decode measurements of an 8B model on one H100 (ML.ENERGY v3, inter-token latency 7.3/8.9/11.5/16.5/26/47 ms
at batch 8/32/64/128/256/512): the model below gives 7.1/8.8/10.9/15.8/26.3/47.6 ms.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.simulator.sku import H100_SXM, Sku

WEIGHTS_S = 6.2e-3  # reading the weights of 8B once
SEQUENCE_S = 13e-6  # activations of one running sequence
CONTEXT_S = 39e-9  # reading the KV of one token of context at 131,072 bytes
COMPUTE_S = 1.8e-3  # the part of arithmetic that doesn't shrink with the batch
DECODE_S = 77e-6  # arithmetic of one decoded token
PREFILL_S = 27e-6  # arithmetic of one prompt token: larger tiles, better used
CONTEXT_BYTES = 131_072.0
BASE_PARAMETERS = 8e9


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine serves: a dense model with 16-bit weights, split over the GPUs of a group."""

    name: str
    parameters: float
    kv_bytes_per_token: int
    max_len: int
    block_tokens: int = 16
    overhead_s: float = 0.8e-3  # launches, sampling and the group's collectives, per step


CHAT_34B = Served("sim-chat-34b", 34e9, 458_752, 16_384)
CHAT_8B = Served("sim-chat-8b", 8e9, 131_072, 16_384, overhead_s=0.4e-3)


@dataclass(frozen=True, slots=True)
class Cost:
    """Coefficients in seconds for one GPU of a group of a given size."""

    weights_s: float
    sequence_s: float
    context_s: float
    compute_s: float
    decode_s: float
    prefill_s: float


def cost(served: Served, sku: Sku, group: int) -> Cost:
    """The coefficients for `served` split over `group` GPUs of `sku`."""
    memory = H100_SXM.bandwidth_bytes_s / sku.bandwidth_bytes_s
    arithmetic = H100_SXM.peak_flops / sku.peak_flops
    share = served.parameters / BASE_PARAMETERS / group
    return Cost(
        weights_s=WEIGHTS_S * share * memory,
        sequence_s=SEQUENCE_S * share * memory,
        context_s=CONTEXT_S * served.kv_bytes_per_token / CONTEXT_BYTES / group * memory,
        compute_s=COMPUTE_S * share * arithmetic,
        decode_s=DECODE_S * share * arithmetic,
        prefill_s=PREFILL_S * share * arithmetic,
    )


def memory_s(c: Cost, running: float, context: float) -> float:
    """Seconds of memory traffic of a step with `running` sequences that hold `context` tokens together."""
    return c.weights_s + c.sequence_s * running + c.context_s * context


def compute_s(c: Cost, running: float, prefill: float) -> float:
    """Seconds of arithmetic of a step at the highest clock, with `prefill` prompt tokens in it."""
    return c.compute_s + c.decode_s * running + c.prefill_s * prefill


def kernel_s(memory: float, compute: float) -> float:
    """Seconds that the kernels of a step run: traffic and arithmetic overlap, but not perfectly (a cubic norm)."""
    return float((memory**3 + compute**3) ** (1 / 3))


def activity(kernel_share: float, compute_share: float, waiting_share: float = 0.0) -> float:
    """SM activity 0..1 that draws dynamic power, from the shares of time a GPU spends in kernels, in arithmetic, and spinning
    in a collective for its slower partners. Fitted together with `sku.H100_SXM`."""
    return 0.17 * kernel_share + 0.714 * compute_share + 0.06 * waiting_share

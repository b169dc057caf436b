"""From the setting `quantize` to a loaded decoder: which scheme, by which kernel, and whether the model bears it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from engine.attention.gather import CompiledAttention
from engine.checkpoints.interface import Checkpoint
from engine.divergence import measure
from engine.fusedstep import FusedStep
from engine.kernelchoice import Choice, choose_kernel, told
from engine.kernels.native import Kernels, kernels
from engine.loader import full_decoder, load_decoder, trial_numbers, trial_weight
from engine.model import Decoder
from engine.numbers import NotKept, Quantised
from engine.progress import Progress
from engine.quality import PoorQuality, Quality, QualityCache, fingerprint, text

WORTH = 1.3
"""`auto` quantises only where products become so many times as fast: below that it is not worth any loss."""

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    decoder: Decoder
    choice: Choice
    quality: Quality | None = None  # None: full weights


@dataclass(frozen=True, slots=True)
class Checked:
    """A scheme on this model: what it costs beside what it yields."""

    loaded: Loaded
    quality: Quality

    def line(self) -> str:
        quality = self.quality
        return (
            f"{quality.scheme} against full weights: {told(self.loaded.choice.speedups)}; perplexity {quality.perplexity:.2f} "
            f"({quality.full_perplexity:.2f}, {quality.perplexity_pct:+.2f} %), KL {quality.kl:.4f}, "
            f"likeliest token equal {100 * quality.top1:.1f} %, {quality.tokens} tokens"
        )


class SchemeLoader:
    """Loads one checkpoint with full or quantised weights. Full ones are loaded once, and only if something needs all of them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        path: Path,
        dtype: torch.dtype,
        device: torch.device,
        context: int,
        group: int,
        progress: Progress,
        log: Log,
    ) -> None:
        self._checkpoint = checkpoint
        self._path = path
        self._dtype, self._device = dtype, device
        self._context = context
        self._group = group
        self._progress, self._log = progress, log

    @cached_property
    def full(self) -> Loaded:
        return self._load("none", self.choice("none"))

    @cached_property
    def _compiled(self) -> Kernels | None:
        self._progress("kernels", 0.0)
        return kernels(self._log) if self._device.type == "cpu" else None

    @cached_property
    def _sample(self) -> torch.Tensor:
        return trial_weight(self._checkpoint, self._dtype, self._device)

    @cached_property
    def _own(self) -> Quantised | None:
        """Numbers that the checkpoint holds; None where there are none, or they can't be served here, which is said."""
        try:
            numbers = trial_numbers(self._checkpoint)
            if numbers is not None and self._compiled is None:
                raise NotKept("no compiled kernels" if self._device.type == "cpu" else f"on {self._device.type}")
            return numbers
        except NotKept as reason:
            self._log(f"the checkpoint's own numbers are widened to full weights: {reason}")
            return None

    def choice(self, scheme: str) -> Choice:
        """The fastest kernel of a scheme here."""
        sample = self._sample if scheme != "none" or self._own is None else self._own
        compiled = self._compiled
        self._progress("kernels", 0.5, scheme)
        return choose_kernel(sample, self._log, compiled, scheme, self._group)

    def load(self, wanted: str) -> Loaded:
        """With the scheme that is wanted. PoorQuality when this model doesn't bear it; `auto` takes the fastest that it bears."""
        if wanted == "none" or (wanted == "auto" and self._device.type != "cpu"):
            return self.full
        if wanted != "auto":
            checked = self.check(wanted, self.choice(wanted))
            if not checked.quality.passes:
                raise PoorQuality(checked.quality)
            return checked.loaded
        choices = {scheme: self.choice(scheme) for scheme in ("int8", "int4")}
        for scheme in sorted(choices, key=lambda scheme: -choices[scheme].speedup):
            if choices[scheme].speedup >= WORTH:
                checked = self.check(scheme, choices[scheme])
                if checked.quality.passes:
                    return checked.loaded
        self._log("auto: full weights, as no scheme is both worth it and good enough")
        return self.full

    def unchecked(self, scheme: str) -> Loaded:
        """With a scheme whatever it costs: for a model whose words are only guesses."""
        return self._load(scheme, self.choice(scheme))

    def check(self, scheme: str, choice: Choice, anew: bool = False) -> Checked:
        """Load with a scheme and say its quality: as remembered for this checkpoint and kernel, or measured."""
        loaded = self._load(scheme, choice)
        decoder = loaded.decoder
        how = f"{scheme} {self._group} {choice.name} {self._dtype}"
        cache = QualityCache(fingerprint(self._path))
        quality = None if anew else cache.get(scheme, how)
        if quality is None:
            tokens = self._checkpoint.tokenizer().encode(text())
            # never both models whole in memory, unless the full one is there anyway
            full = self.full.decoder if "full" in vars(self) else full_decoder(self._checkpoint, decoder)
            quality = measure(scheme, full, decoder, tokens, lambda done: self._progress("quality", done))
            cache.put(quality, how)
        checked = Checked(Loaded(decoder, choice, quality), quality)
        self._log(checked.line())
        return checked

    def _load(self, scheme: str, choice: Choice) -> Loaded:
        stage = "weights" if scheme == "none" else "quantising"
        layers = self._checkpoint.config.num_layers

        def progress(done: float) -> None:
            layer = min(layers, round(done * (layers + 2)))  # what comes after the last layer counts as two
            self._progress(stage, done, f"layer {layer}/{layers}, {self._path.name}")

        decoder = load_decoder(
            self._checkpoint,
            self._dtype,
            self._device,
            self._context,
            progress,
            choice.kernel,
            choice.head,
            choice.keep,
            self._log,
        )
        if choice.compiled is not None and CompiledAttention.suits(decoder.config, self._dtype):
            decoder.attention = CompiledAttention(decoder.config, choice.compiled)
            if FusedStep.suits(decoder):
                decoder.fused = FusedStep(decoder, choice.compiled)
        return Loaded(decoder, choice)

"""Tokens to text as they come: no half characters, and nothing of a stop string is ever shown."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers.decoders import DecodeStream

CONTEXT_TOKENS = 6
"""How many prompt tokens the first output token is decoded after: it decides whether it begins with a space."""


class TextStream:
    """The text of one growing output.

    `push` gives the text that has become certain; text that may yet turn out to be the beginning of a stop string, or a
    character of which bytes are missing, is held until `push` or `flush` decides.
    """

    __slots__ = ("_held", "_pending", "_stops", "_stream", "_tokenizer")

    def __init__(self, tokenizer: tokenizers.Tokenizer, prompt: Sequence[int], stops: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=list(prompt[-CONTEXT_TOKENS:]), skip_special_tokens=True)
        self._pending: list[int] = []  # tokens without text yet
        self._stops = stops
        self._held = ""

    def push(self, token: int) -> tuple[str, bool]:
        """(certain new text, whether a stop string was met). The stop string and what follows it are dropped."""
        chunk = self._decode(token)
        return self._release(chunk) if chunk else ("", False)

    def flush(self) -> str:
        """What is still held when the output ends without a stop string."""
        tail = self._tokenizer.decode(self._pending, skip_special_tokens=True) if self._pending else ""
        text, _ = self._release(tail)
        text += self._held
        self._held = ""
        self._pending = []
        return text

    def _decode(self, token: int) -> str:
        self._pending.append(token)
        try:
            chunk = self._stream.step(self._tokenizer, token)
        except Exception as error:  # the library raises its bare Exception when byte tokens decode to another prefix
            if "prefix" not in str(error).lower():
                raise
            chunk = self._tokenizer.decode(self._pending, skip_special_tokens=True)
            self._stream = DecodeStream(skip_special_tokens=True)
        if chunk:
            self._pending.clear()
        return chunk or ""

    def _release(self, chunk: str) -> tuple[str, bool]:
        if not self._stops:
            return chunk, False
        self._held += chunk
        met = [at for at in map(self._held.find, self._stops) if at >= 0]
        if met:
            text, self._held = self._held[: min(met)], ""
            return text, True
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text, False


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

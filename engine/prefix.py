"""Names for full blocks of tokens: equal names mean equal tokens from the sequence's beginning to the block's end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16
"""128 bits of a cryptographic hash: nobody finds two prefixes of one name, by chance or on purpose, to read another's cache."""


def extend(keys: list[bytes], tokens: Sequence[int], block_size: int) -> None:
    """Append the names of the full blocks of `tokens` that `keys` does not have yet; each name covers the one before it."""
    for begin in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        parent = keys[-1] if keys else b""
        own = array("q", tokens[begin : begin + block_size]).tobytes()
        keys.append(blake2b(parent + own, digest_size=KEY_BYTES).digest())

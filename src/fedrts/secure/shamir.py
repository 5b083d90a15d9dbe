"""Shamir's secret sharing: `threshold` of the shares give the secret back, fewer say nothing of it.

The secret is the value at 0 of a polynomial of degree `threshold` − 1 over the field of `PRIME` elements, whose other
coefficients are drawn at random; a share is its value at another place. Given any `threshold` − 1 shares, every secret has
exactly one polynomial through them, so that all secrets stay equally likely.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

PRIME = 2**256 + 297
"""The least prime above 2^256: a field that holds every secret of 32 bytes."""
SHARE = 33
"""Bytes of a share."""
_SECRET = 32


def shares(secret: bytes, places: Sequence[int], threshold: int, draw: Callable[[int], int] = secrets.randbelow) -> dict[int, bytes]:
    """Return a share of a 32-byte `secret` for every distinct place from 1 on; `draw(n)` returns a number below n."""
    if len(secret) != _SECRET:
        raise ValueError(f"a secret has {_SECRET} bytes, this one {len(secret)}")
    if not 1 <= threshold <= len(places) or len(set(places)) != len(places) or min(places) < 1:
        raise ValueError(f"{threshold} of {len(places)} places cannot share a secret")
    coefficients = [int.from_bytes(secret, "big"), *(draw(PRIME) for _ in range(threshold - 1))]
    return {place: _value(coefficients, place).to_bytes(SHARE, "big") for place in places}


def secret_of(shares: Mapping[int, bytes], weights: Mapping[int, int] | None = None) -> bytes | None:
    """Reconstruct the 32-byte secret from exactly enough shares, by place; None if they give none.

    `weights` are those of these places, where they are known.
    """
    weights = weights or lagrange(list(shares))
    value = sum(weights[place] * int.from_bytes(share, "big") for place, share in shares.items()) % PRIME
    return value.to_bytes(_SECRET, "big") if value < 1 << 8 * _SECRET else None


def lagrange(places: Sequence[int]) -> dict[int, int]:
    """Return the weights with which a polynomial's values at these places add up to its value at 0."""
    found = {}
    for place in places:
        above = below = 1
        for other in places:
            if other != place:
                above, below = above * other % PRIME, below * (other - place) % PRIME
        found[place] = above * pow(below, -1, PRIME) % PRIME
    return found


def _value(coefficients: Sequence[int], place: int) -> int:
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * place + coefficient) % PRIME
    return total

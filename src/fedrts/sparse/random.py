"""Stateless randomness: every number is a hash of its purpose.

A *key* is a 64-bit integer made by `key(seed, purpose, round, client, …)`. From a key come streams of bits indexed by a
counter, in integer tensor operations only, so that every engine and device sees the same numbers; nothing has to be
stored to resume a run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def key(*parts: int | str) -> int:
    """Hash `parts` to a 64-bit key, the same on every machine and Python version."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _signed(value: int) -> int:
    """Return the int64 with the bits of a 64-bit unsigned `value`."""
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value


def _upper(by: int) -> int:
    """Shift 64 bits logically to the right; an arithmetic shift would repeat the sign."""
    return (1 << (64 - by)) - 1


def signed(key: int) -> int:
    """Return a key as the int64 with its bits, the form of keys in tensors."""
    return _signed(key)


def bits(key: int | Tensor, count: int, device: torch.device | str = "cpu") -> Tensor:
    """`count` int64 entries with 64 random bits each: splitmix64 of key + counter. Of several keys `[k]` (see `signed`): `[k, count]`."""
    counter = torch.arange(1, count + 1, dtype=torch.int64, device=device if isinstance(key, int) else key.device)
    counter *= _signed(_GOLDEN)
    x = counter.add_(_signed(key)) if isinstance(key, int) else counter + key[:, None]
    shifted = torch.empty_like(x)  # one place for all steps: new memory would take longer than they do
    for by, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        torch.bitwise_right_shift(x, by, out=shifted)
        shifted &= _upper(by)
        x ^= shifted
        x *= _signed(factor)
    return x


def uniform(key: int | Tensor, count: int, device: torch.device | str = "cpu") -> Tensor:
    """`[count]` float32 in [0, 1): the upper 24 bits, hence exact and equal on every device. Of several keys: `[k, count]`."""
    x = bits(key, count, device)
    x >>= 40
    x &= _upper(40)
    return x.to(torch.float32).mul_(2.0**-24)


def uniform_halves(key: int | Tensor, count: int, device: torch.device | str = "cpu") -> Tensor:
    """The same by half the hashes: the upper 24 bits of both halves of each, the lower half first."""
    halves = bits(key, (count + 1) // 2, device).view(torch.int32)[..., :count]
    return (halves >> 8 & 0xFFFFFF).to(torch.float32) * 2.0**-24


def permutation(key: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Return a random order of `range(count)`, int64 `[count]`."""
    return torch.argsort(bits(key, count, device), stable=True)


def first(key: int, count: int, picks: int) -> Tensor:
    """`permutation(key, count)[:picks]` without the rest: all `count` hashes are looked at, only `picks` are put in order.

    The same numbers, because the hash of one key is a bijection: no two of its numbers are equal.
    """
    return torch.topk(bits(key, count), min(picks, count), largest=False, sorted=True).indices


def permutations(keys: Sequence[int], counts: Sequence[int]) -> list[Tensor]:
    """Return `permutation(key, count)` of several keys at once."""
    most = max(counts, default=0)
    x = bits(torch.tensor([_signed(key) for key in keys], dtype=torch.int64), most)
    x[torch.arange(most) >= torch.tensor(counts)[:, None]] = torch.iinfo(torch.int64).max  # numbers that do not count come last
    return [order[:count] for order, count in zip(torch.argsort(x, dim=-1, stable=True), counts, strict=True)]


def choose(key: int, count: int, picks: int) -> list[int]:
    """Return `picks` different numbers out of `range(count)`, in ascending order."""
    return sorted(first(key, count, picks).tolist())


def seed(key: int) -> int:
    """Return the key as a seed that other libraries' generators accept (63 bits)."""
    return key >> 1

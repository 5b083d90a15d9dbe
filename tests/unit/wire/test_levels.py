"""Levels on the wire: what goes in comes out at the predicted length, near the entropy; every other byte is a WireError."""

from __future__ import annotations

import heapq
import itertools
import math
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrts.wire import levels
from fedrts.wire.errors import WireError
from fedrts.wire.levels import LONGEST, SEGMENT, Alphabet, Form
from fedrts.wire.packing import Reader, pack_integers
from fedrts.wire.quantise import Quantised

TOPS = (31, 7, 1)
MEMORY = 11
"""Bytes that decoding holds at most, for each level."""
GROUPS = {31: 1, 7: 2, 1: 5}


def decoded(data: bytes, count: int, top: int) -> list[int]:
    reader = Reader(data)
    found = levels.decode(reader, count, top)
    reader.end()
    return list(map(int, found))


def drawn(count: int, top: int, draw: Callable[[np.random.Generator, int], np.ndarray], seed: int = 0) -> torch.Tensor:
    """Levels of values from some distribution, as an upload has them."""
    values = torch.from_numpy(draw(np.random.default_rng(seed), count)).float()
    return Quantised.of(values, key=seed, top=top).levels


def gaussian(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.normal(size=count)


def laplacian(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.laplace(size=count)


def heavy_tailed(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.laplace(size=count) ** 3


def mostly_zero(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.normal(size=count) * (rng.random(count) < 0.03)


def uniform(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.uniform(-1, 1, size=count)


DRAWS = [gaussian, laplacian, heavy_tailed, mostly_zero, uniform]


def entropy(symbols: list[int]) -> float:
    """Bits of all `symbols` in their own empirical distribution."""
    counts = Counter(symbols).values()
    return -sum(count * math.log2(count / len(symbols)) for count in counts)


# What goes in comes out


@given(
    st.sampled_from(TOPS),
    st.integers(0, 3000),
    st.sampled_from([0.0, 0.001, 0.05, 0.5, 3.0, 1e9]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=300)
def test_levels_return_at_their_length(top: int, count: int, spread: float, seed: int) -> None:
    some = np.random.default_rng(seed).normal(size=count) * spread * top
    sent = torch.from_numpy(np.clip(np.round(some), -top, top).astype(np.int8))
    data = levels.encode(sent, top)
    assert decoded(data, count, top) == sent.tolist()
    assert len(data) == levels.size(sent, top) <= levels.most(count, top)


@given(st.sampled_from(TOPS), st.data())
def test_any_levels_return(top: int, data: st.DataObject) -> None:
    some = data.draw(st.lists(st.integers(-top, top), max_size=80)) * data.draw(st.sampled_from([1, 17, 100]))
    sent = torch.tensor(some, dtype=torch.int8)
    assert decoded(levels.encode(sent, top), len(some), top) == some


@pytest.mark.parametrize("top", TOPS)
@pytest.mark.parametrize("symbols", [SEGMENT - 1, SEGMENT, SEGMENT + 1, 5 * SEGMENT, 70_000, 2 * (1 << 15), 2 * (1 << 15) + 1, 70_001])
@pytest.mark.parametrize("short", [0, 1])
def test_the_ends_of_segments_and_blocks(top: int, symbols: int, short: int) -> None:
    count = symbols * GROUPS[top] - short
    sent = drawn(count, top, heavy_tailed)
    data = levels.encode(sent, top)
    assert data[0] == Form.CODED
    assert decoded(data, count, top) == sent.tolist()
    assert len(data) == levels.size(sent, top)


@pytest.mark.parametrize("top", TOPS)
@pytest.mark.parametrize("level", [-1, 0, 1])
def test_one_level_alone_takes_no_bits(top: int, level: int) -> None:
    """Nothing but shares and 13 zeros a segment."""
    count = 20 * SEGMENT * GROUPS[top]
    sent = torch.full((count,), level, dtype=torch.int8)
    data = levels.encode(sent, top)
    assert len(data) == 1 + math.ceil(10 * (2 * top + 1) / 8) + math.ceil(13 * 20 / 8) == levels.size(sent, top)
    assert decoded(data, count, top) == sent.tolist()


# Near the entropy


@pytest.mark.parametrize("top", TOPS)
@pytest.mark.parametrize("draw", [gaussian, laplacian])
def test_codes_are_within_two_per_cent_of_the_entropy(top: int, draw: Callable[[np.random.Generator, int], np.ndarray]) -> None:
    sent = drawn(100_000, top, draw)
    data = levels.encode(sent, top)
    assert data[0] == Form.CODED
    least = entropy(sent.tolist()) / 8
    assert least < len(data) < 1.02 * least


@pytest.mark.parametrize(("top", "floor"), [(31, 1.0), (7, 1 / 2), (1, 1 / 5)])
def test_rare_levels_cost_little(top: int, floor: float) -> None:
    """A code has a bit at least: of so many values as share one."""
    sent = torch.zeros(100_000, dtype=torch.int8)
    sent[::1000] = 1
    assert 8 * levels.size(sent, top) < 1.1 * floor * len(sent)


@pytest.mark.parametrize("top", TOPS)
def test_even_levels_are_packed(top: int) -> None:
    """Five values of three levels take a byte, two of fifteen, and one of 63 six bits."""
    rng = np.random.default_rng(0)
    sent = torch.from_numpy(rng.integers(-top, top + 1, 999).astype(np.int8))
    data = levels.encode(sent, top)
    assert data[0] == Form.PACKED
    assert len(data) == 1 + {31: math.ceil(6 * 999 / 8), 7: 500, 1: 200}[top] == levels.most(999, top)
    assert decoded(data, 999, top) == sent.tolist()


# The format, written out


def huffman_cost(weights: list[int]) -> int:
    """Σ weight · length of an unlimited Huffman code."""
    heap, cost = sorted(weights), 0
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        cost += merged
        heapq.heappush(heap, merged)
    return cost


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=40).filter(lambda weights: sum(map(bool, weights)) > 1))
def test_code_lengths_are_the_best(weights: list[int]) -> None:
    lengths = levels._code_lengths(np.array(weights)).tolist()
    assert sum(2.0**-length for length, weight in zip(lengths, weights, strict=True) if weight) == 1
    assert all(length == 0 for length, weight in zip(lengths, weights, strict=True) if not weight)
    cost = sum(length * weight for length, weight in zip(lengths, weights, strict=True))
    assert cost >= huffman_cost([weight for weight in weights if weight])
    if max(lengths) < LONGEST:
        assert cost == huffman_cost([weight for weight in weights if weight])


def test_no_code_is_longer_than_a_reader_looks() -> None:
    """Fibonacci's weights make the longest codes there are."""
    weights = [1, 1]
    while len(weights) < 40:
        weights.append(weights[-1] + weights[-2])
    lengths = levels._code_lengths(np.array(weights))
    assert lengths.max() == LONGEST
    assert sum(2.0 ** -int(length) for length in lengths) == 1


def by_hand(data: bytes, count: int, top: int) -> list[int]:
    """A CODED payload read bit by bit as the documentation says."""
    base, group = 2 * top + 1, GROUPS[top]
    number = -(-count // group)
    bits = [byte >> place & 1 for byte in data[1:] for place in range(8)]

    def planes(at: int, entries: int, width: int) -> list[int]:
        return [sum(bits[at + plane * entries + entry] << plane for plane in range(width)) for entry in range(entries)]

    shares = planes(0, base, 10)
    at = 8 * math.ceil(base * 10 / 8)
    segments = planes(at, -(-number // SEGMENT), 13)
    at += 8 * math.ceil(len(segments) * 13 / 8)
    symbols = list(itertools.product(range(base), repeat=group))
    weights = [math.prod(shares[digit] for digit in symbol) for symbol in symbols]
    lengths = levels._code_lengths(np.array(weights)).tolist()
    codes, code, last = {}, 0, 0
    for length, index in sorted((length, index) for index, length in enumerate(lengths) if weights[index]):
        code <<= length - last
        codes[format(code, f"0{length}b")] = symbols[index]
        code, last = code + 1, length
    found: list[int] = []
    for segment, length in enumerate(segments):
        end = at + length
        for _ in range(min(SEGMENT, number - segment * SEGMENT)):
            word = ""
            while word not in codes:
                word, at = word + str(bits[at]), at + 1
            found += [digit - top for digit in codes[word]]
        assert at == end
    assert len(bits) - at < 8
    assert not any(bits[at:])
    assert not any(found[count:])
    return found[:count]


@pytest.mark.parametrize("top", TOPS)
@pytest.mark.parametrize("draw", [gaussian, laplacian, mostly_zero])
def test_codes_are_what_the_documentation_says(top: int, draw: Callable[[np.random.Generator, int], np.ndarray]) -> None:
    sent = drawn(7001, top, draw)
    data = levels.encode(sent, top)
    assert data[0] == Form.CODED
    assert by_hand(data, 7001, top) == sent.tolist()


GOLDEN = [
    (1, [0] * 60 + [1, -1, 0, 1] + [0] * 16, "01636e48121c0000f0c701"),
    (1, [1, -1, 0, 0, 1, 1], "0088e5"),
    (7, [0] * 70 + [1, -1, 7, -7, 0, 2, 1], "01414280409030680818000400000001800040003f0000000000f8f8cf2b"),
    (7, [-7, 7, 3], "00f682"),
    (
        31,
        [0] * 200 + [1, -1] * 20 + [31],
        "01000000c0010000000000000000000000000000500000001000000000000000000000001c000000000000000000000000000000070000000000000000000000000000800000000000000040000000002f0100000000000000000000000000000000000000000000000000adb5d65a6badb5d65a6badb576",
    ),
    (31, [-31, 31, 0, 1], "006466a6"),
]


@pytest.mark.parametrize(("top", "some", "expected"), GOLDEN)
def test_levels_on_the_wire_are_stable(top: int, some: list[int], expected: str) -> None:
    sent = torch.tensor(some, dtype=torch.int8)
    assert levels.encode(sent, top).hex() == expected.replace(" ", "")
    assert decoded(bytes.fromhex(expected), len(some), top) == some


@pytest.mark.parametrize("top", TOPS)
def test_symbols_are_bytes(top: int) -> None:
    alphabet = Alphabet(top)
    assert alphabet.group == GROUPS[top]
    assert alphabet.symbols <= 255 < alphabet.symbols * alphabet.base
    sent = torch.arange(-top, top + 1, dtype=torch.int8).repeat(alphabet.group)
    assert alphabet.split(alphabet.join(sent).numpy())[: len(sent)].tolist() == sent.tolist()


# What a receiver refuses


def refused(data: bytes, count: int, top: int) -> str:
    with pytest.raises(WireError) as found:
        decoded(data, count, top)
    assert "\n" not in str(found.value)
    return str(found.value)


COUNT = 6000


def parts(top: int) -> tuple[torch.Tensor, np.ndarray, np.ndarray, bytes]:
    """(levels, shares, lengths of segments, stream) of a coded payload."""
    sent = drawn(COUNT, top, laplacian)
    reader = Reader(levels.encode(sent, top))
    assert reader.byte() == Form.CODED
    shares = reader.integers(2 * top + 1, 10).astype(int)
    lengths = reader.integers(-(-Alphabet(top).number(COUNT) // SEGMENT), 13).astype(int)
    return sent, shares, lengths, bytes(reader.take(reader.left))


def composed(shares: np.ndarray, lengths: np.ndarray, stream: bytes) -> bytes:
    return bytes([Form.CODED]) + pack_integers(shares, 10) + pack_integers(lengths, 13) + stream


@pytest.mark.parametrize("top", TOPS)
def test_what_no_encoder_writes_is_refused(top: int) -> None:
    sent, shares, lengths, stream = parts(top)
    assert composed(shares, lengths, stream) == levels.encode(sent, top)
    assert "form 2" in refused(b"\x02", COUNT, top)
    assert "missing" in refused(b"", COUNT, top)
    assert "missing" in refused(composed(shares, lengths, stream[:-1]), COUNT, top)
    assert "too many" in refused(composed(shares, lengths, stream + b"\0"), COUNT, top)
    assert "no level" in refused(composed(0 * shares, lengths, stream), COUNT, top)
    moved = lengths.copy()
    moved[:2] += [1, -1]
    assert "do not end" in refused(composed(shares, moved, stream), COUNT, top)
    other = shares.copy()
    other[0] += 1
    assert any(word in refused(composed(other, lengths, stream), COUNT, top) for word in ("other shares", "do not end"))
    packed = bytes([Form.PACKED]) + pack_integers(Alphabet(top).join(sent).numpy(), Alphabet(top).width)
    assert "shorter form" in refused(packed, COUNT, top)
    assert "shorter form" in refused(composed(shares, 0 * lengths + 8191, stream * 9), COUNT, top)


@pytest.mark.parametrize("top", TOPS)
def test_shares_of_another_code_with_the_same_lengths_are_refused(top: int) -> None:
    """Shares so near the right ones that all codes stay the same: one sequence of levels has one payload."""
    _, shares, lengths, stream = parts(top)
    found = 0
    for level, by in itertools.product(range(2 * top + 1), (-1, 1)):
        other = shares.copy()
        other[level] += by
        if other[level] > 0 and (by_shares(top, other) == by_shares(top, shares)).all():
            found += 1
            assert "other shares" in refused(composed(other, lengths, stream), COUNT, top)
    assert found or top == 1


def by_shares(top: int, shares: np.ndarray) -> np.ndarray:
    return levels._Code.of(Alphabet(top), shares).codes


def test_symbols_and_padding_that_mean_nothing_are_refused() -> None:
    assert "out of range" in refused(bytes([Form.PACKED]) + pack_integers(np.array([255]), 8), 2, 7)
    assert "out of range" in refused(bytes([Form.PACKED]) + pack_integers(np.array([243]), 8), 5, 1)
    assert "out of range" in refused(bytes([Form.PACKED]) + pack_integers(np.array([63]), 6), 1, 31)
    assert "padding" in refused(bytes([Form.PACKED]) + bytes([0x7F]), 1, 31)
    last = Alphabet(7).join(torch.tensor([3, 1], dtype=torch.int8)).numpy()
    assert decoded(bytes([Form.PACKED]) + pack_integers(last, 8), 2, 7) == [3, 1]
    assert "followed by others" in refused(bytes([Form.PACKED]) + pack_integers(last, 8), 1, 7)


@pytest.mark.parametrize("top", TOPS)
def test_bits_set_behind_the_last_code_are_refused(top: int) -> None:
    _, shares, lengths, stream = parts(top)
    free = -int(lengths.sum()) % 8
    if free:
        assert "padding" in refused(composed(shares, lengths, stream[:-1] + bytes([stream[-1] | 0x80])), COUNT, top)


@pytest.mark.parametrize("top", TOPS)
@pytest.mark.parametrize("draw", DRAWS)
def test_damage_is_an_error_or_other_levels(top: int, draw: Callable[[np.random.Generator, int], np.ndarray]) -> None:
    """Whatever is accepted is, byte for byte, what an encoder makes of it."""
    rng = np.random.default_rng(3)
    for count in (1, 7, 300, 3000):
        data = levels.encode(drawn(count, top, draw), top)
        for case in range(150):
            damaged = bytearray(data)
            if case % 3 == 0:
                damaged = bytearray(rng.bytes(len(data)))
                damaged[0] = case % 2
            elif case % 3 == 1:
                for bit in rng.integers(8 * len(data), size=case % 4 + 1):
                    damaged[bit // 8] ^= 1 << bit % 8
            else:
                damaged = damaged[: rng.integers(len(data))] + rng.bytes(int(rng.integers(5)))
            try:
                found = decoded(bytes(damaged), count, top)
            except WireError:
                continue
            assert len(found) == count
            assert levels.encode(torch.tensor(found, dtype=torch.int8), top) == bytes(damaged)


@pytest.mark.parametrize("top", TOPS)
def test_decoding_takes_a_few_bytes_a_level_and_no_time(top: int) -> None:
    """Random bytes that claim to be codes of a million levels, of every share and length."""
    count, rng = 1_000_000, np.random.default_rng(4)
    number = Alphabet(top).number(count)
    lengths = 8 * rng.integers(0, Alphabet(top).width * SEGMENT // 4 - 75, -(-number // SEGMENT))  # whole bytes have no padding
    for shares in (rng.integers(0, 1024, 2 * top + 1), np.full(2 * top + 1, 1023), np.eye(2 * top + 1, dtype=int)[top]):
        data = composed(shares, lengths, rng.bytes(2_000_000))
        started = time.perf_counter()
        tracemalloc.start()
        try:
            assert "do not end" in refused(data, count, top)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < MEMORY * count
        assert time.perf_counter() - started < 5


@pytest.mark.parametrize("top", TOPS)
@pytest.mark.parametrize("draw", [gaussian, uniform])
def test_reading_what_is_honest_takes_no_more(top: int, draw: Callable[[np.random.Generator, int], np.ndarray]) -> None:
    data = levels.encode(drawn(1_000_000, top, draw), top)
    tracemalloc.start()
    try:
        levels.decode(Reader(data), 1_000_000, top)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEMORY * 1_000_000

from __future__ import annotations

import itertools
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrts.wire.errors import WireError
from fedrts.wire.packing import Bits, pack_integers, varint
from fedrts.wire.positions import Coding, decode, encode, size, sizes, sizes_at

DENSITIES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0)
SHAPES = ((), (0,), (5, 0), (1,), (7,), (8,), (9,), (3, 3), (1, 40), (40, 1), (6, 50), (16, 3, 3, 3), (5, 7, 11), (4, 1, 300))
GENERAL = (Coding.BITMAP, Coding.COORDINATE, Coding.CSR, Coding.CSC, Coding.GAP)


def random_bits(links: int, density: float, seed: int = 0) -> Bits:
    return np.random.default_rng(seed).random(links) < density


def clustered_bits(links: int) -> Bits:
    """Some regions nearly full, most nearly empty: what a mask with dead neurons looks like."""
    regions = np.random.default_rng(1).beta(0.2, 0.8, size=links // 1000 + 1)
    return np.random.default_rng(2).random(links) < np.repeat(regions, 1000)[:links]


def entropy(p: float) -> float:
    return -p * math.log2(p) - (1 - p) * math.log2(1 - p)


def assert_exact(bits: Bits, shape: tuple[int, ...]) -> None:
    """Every coding that can carry the bits returns them, at its predicted size; the automatic choice is the smallest."""
    bits.setflags(write=False)
    lengths = sizes(bits, shape)
    assert set(GENERAL) <= set(lengths)
    assert sizes_at(np.flatnonzero(bits), shape) == lengths
    for coding, length in lengths.items():
        chosen, payload = encode(bits, shape, coding)
        assert chosen == coding
        assert len(payload) == length == size(bits, shape, coding)
        restored = decode(coding, payload, shape, int(bits.sum()))
        assert restored.dtype == np.bool_
        assert restored.flags.writeable
        np.testing.assert_array_equal(restored, bits)
    chosen, payload = encode(bits, shape)
    assert len(payload) == min(lengths.values()) == lengths[chosen]
    np.testing.assert_array_equal(decode(chosen, memoryview(payload), shape), bits)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_coding_returns_what_it_was_given(shape: tuple[int, ...]) -> None:
    for seed, density in enumerate(DENSITIES):
        assert_exact(random_bits(math.prod(shape), density, seed), shape)


@pytest.mark.parametrize(
    ("shape", "density"),
    [((2**20 - 1,), 0.2), ((2**10, 2**10), 0.01), ((2**10, 2**10), 0.9), ((17, 61681), 0.2), ((2**20 - 1,), 0.0), ((2**20,), 1.0)],
)
def test_large_layers_return(shape: tuple[int, ...], density: float) -> None:
    assert_exact(random_bits(math.prod(shape), density), shape)


def test_gaps_of_every_width_return() -> None:
    for links, active in [(300, [256]), (2**17 + 2, [0, 2**17 + 1]), (2**18 + 9, [1, 2, 2**18 + 8]), (2**20, [2**16 - 1, 2**20 - 1])]:
        bits = np.zeros(links, np.bool_)
        bits[active] = True
        assert_exact(bits, (links,))
        assert_exact(~bits, (links,))


def test_clustered_masks_return() -> None:
    assert_exact(clustered_bits(2**18), (2**6, 2**12))


@given(st.lists(st.booleans(), max_size=60).flatmap(lambda bits: st.tuples(st.just(bits), st.integers(1, 8))))
def test_any_bits_in_any_rows_return(case: tuple[list[bool], int]) -> None:
    listed, columns = case
    rows = len(listed) // columns
    assert_exact(np.array(listed[: rows * columns], np.bool_), (rows, columns))


def test_all_and_none_cost_nothing() -> None:
    assert encode(np.ones(100, np.bool_), (10, 10)) == (Coding.DENSE, b"")
    assert encode(np.zeros(100, np.bool_), (10, 10)) == (Coding.EMPTY, b"")


@pytest.mark.parametrize("density", [0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99])
def test_the_choice_is_within_five_percent_of_the_entropy(density: float) -> None:
    bits = random_bits(10**6, density)
    coding, payload = encode(bits, (1000, 1000))
    assert 8 * len(payload) <= 1.05 * len(bits) * entropy(bits.mean())
    assert coding == (Coding.GAP if not 0.35 < density < 0.65 else Coding.BITMAP)


def test_the_rice_parameter_is_the_best_for_clustered_bits() -> None:
    bits = clustered_bits(10**5) & random_bits(10**5, 0.3)
    payload = encode(bits, (10**5,), Coding.GAP)[1]
    gaps = np.diff(np.flatnonzero(bits), prepend=-1) - 1
    shortest = min(int((gaps >> k).sum()) + len(gaps) * (k + 1) for k in range(20))
    assert len(payload) == len(varint(len(gaps))) + 1 + math.ceil(shortest / 8)


def test_numbers_on_the_wire_are_stable() -> None:
    assert [(coding.name, coding.value) for coding in Coding] == [
        ("NONE", 0),
        ("DENSE", 1),
        ("EMPTY", 2),
        ("BITMAP", 3),
        ("COORDINATE", 4),
        ("CSR", 5),
        ("CSC", 6),
        ("GAP", 7),
    ]


def test_payloads_on_the_wire_are_stable() -> None:
    bits = np.zeros(24, np.bool_)
    bits[[1, 6, 20]] = True
    payloads = {coding: encode(bits, (4, 6), coding)[1].hex() for coding in GENERAL}
    assert payloads == {
        Coding.BITMAP: "420010",
        Coding.COORDINATE: "03" + "9141",  # planes 100, 010, 011, 000 and 001
        Coding.CSR: "03" + "0b" + "2100",  # rows of 1, 1, 0 and 1; columns 1, 0 and 2
        Coding.CSC: "03" + "0700" + "25",  # columns of 1, 1, 1, 0, 0 and 0; rows 1, 0 and 3
        Coding.GAP: "03" + "02" + "4511",  # gaps 1, 4 and 13: planes 101 and 000; quotients 1, 01 and 0001
    }


@pytest.mark.parametrize("coding", [Coding.NONE, Coding.DENSE, Coding.EMPTY])
def test_a_coding_that_cannot_carry_the_bits_is_the_senders_mistake(coding: Coding) -> None:
    with pytest.raises(ValueError, match="2 of 4 links"):
        encode(np.array([True, False, True, False]), (4,), coding)
    with pytest.raises(ValueError, match="2 of 4 links"):
        size(np.array([True, False, True, False]), (4,), coding)


@pytest.mark.parametrize("bits", [np.zeros(5, np.bool_), np.zeros((2, 2), np.bool_), np.zeros(4, np.uint8)])
def test_bits_must_be_those_of_the_layer(bits: Bits) -> None:
    with pytest.raises(ValueError, match="a layer of"):
        encode(bits, (2, 2))


# What an untrusted sender may do


def accepted(coding: int, payload: bytes, shape: tuple[int, ...]) -> bool:
    """Whether the payload is accepted; if so it is the one payload of its bits."""
    try:
        bits = decode(coding, payload, shape)
    except WireError:
        return False
    assert bits.dtype == np.bool_
    assert bits.shape == (math.prod(shape),)
    assert set(np.unique(bits.view(np.uint8))) <= {0, 1}
    assert encode(bits, shape, Coding(coding)) == (coding, payload)
    return True


@pytest.mark.parametrize("coding", GENERAL)
@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 3), (0,), (1,)])
def test_exactly_one_payload_per_vector_is_accepted(coding: Coding, shape: tuple[int, ...]) -> None:
    vectors = itertools.product([False, True], repeat=math.prod(shape))
    canonical = {encode(np.array(bits, np.bool_), shape, coding)[1] for bits in vectors}
    alphabet = sorted({*range(6), 8, 15, 16, 32, 64, 128, 255} | set(b"".join(canonical)))
    every = (bytes(some) for length in range(4) for some in itertools.product(alphabet, repeat=length))
    assert len(canonical) == 2 ** math.prod(shape)
    assert {payload for payload in every if accepted(coding, payload, shape)} == canonical


@pytest.mark.parametrize("coding", GENERAL)
def test_no_corruption_of_a_payload_escapes(coding: Coding) -> None:
    rng = np.random.default_rng(coding)
    shapes = ((9,), (3, 7), (16, 3, 3, 3), (24, 50))
    outcomes = set()
    for case in range(3000):
        shape = shapes[case % len(shapes)]
        payload = bytearray(encode(rng.random(math.prod(shape)) < rng.choice(DENSITIES), shape, coding)[1])
        match case % 5:
            case 0:  # one to three flipped bits
                for bit in rng.integers(8 * len(payload), size=rng.integers(1, 4)):
                    payload[bit // 8] ^= 1 << (bit % 8)
            case 1:
                del payload[rng.integers(len(payload)) :]
            case 2:
                payload += rng.bytes(int(rng.integers(1, 5)))
            case 3:  # a header that promises something else
                payload[: rng.integers(1, 3)] = rng.bytes(int(rng.integers(1, 3)))
            case 4:
                payload[:] = rng.bytes(int(rng.integers(40)))
        outcomes.add(accepted(coding, bytes(payload), shape))
    assert outcomes == {False, True}


@given(st.integers(-1, 300), st.binary(max_size=40), st.sampled_from(SHAPES))
def test_random_bytes_are_decoded_or_refused(coding: int, payload: bytes, shape: tuple[int, ...]) -> None:
    accepted(coding, payload, shape)


@pytest.mark.parametrize("coding", GENERAL)
@pytest.mark.parametrize("claimed", [1001, 2**20, 2**40, 2**63, 2**64, 2**700])
def test_a_huge_count_is_refused_before_anything_is_allocated(coding: Coding, claimed: int) -> None:
    for rest in (b"", b"\x00", b"\xff" * 300):
        assert not accepted(coding, varint(claimed) + rest, (10, 100))


@pytest.mark.parametrize("coding", GENERAL)
def test_memory_follows_the_layer_and_the_payload(coding: Coding) -> None:
    links = 1 << 16
    rng = np.random.default_rng(0)
    for count in (0, 1, 1000, links // 2, links - 1, links):
        for second in (0, 1, 5, 40, 255):
            payload = varint(count) + bytes([second]) + rng.bytes(20_000)
            tracemalloc.start()
            accepted(coding, payload, (1 << 8, 1 << 8))
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 32 * (links + len(payload))


@pytest.mark.parametrize("coding", [Coding.NONE, 8, 255, -1])
def test_an_unknown_coding_is_refused(coding: int) -> None:
    with pytest.raises(WireError, match="coding"):
        decode(coding, b"", (4,))


@pytest.mark.parametrize("coding", GENERAL)
def test_a_count_known_from_elsewhere_is_checked(coding: Coding) -> None:
    payload = encode(np.array([True, False, True, False]), (2, 2), coding)[1]
    with pytest.raises(WireError, match="2 active links instead of 3"):
        decode(coding, payload, (2, 2), count=3)


def integers(width: int, *values: int) -> bytes:
    return pack_integers(np.array(values), width)


@pytest.mark.parametrize(
    ("coding", "payload", "message"),
    [
        (Coding.DENSE, b"\x00", "too many"),
        (Coding.EMPTY, b"\x00", "too many"),
        (Coding.BITMAP, b"\x00\x00", "missing"),
        (Coding.BITMAP, b"\x00\x00\x40", "padding"),
        (Coding.BITMAP, b"\x00\x00\x00\x00", "too many"),
        (Coding.COORDINATE, b"\x17", "above 22"),
        (Coding.COORDINATE, b"\x80\x00", "longer than"),
        (Coding.COORDINATE, b"\x02" + integers(5, 6, 1), "ascending"),
        (Coding.COORDINATE, b"\x02" + integers(5, 6, 6), "ascending"),
        (Coding.COORDINATE, b"\x02" + integers(5, 6, 22), "out of range"),
        (Coding.CSR, b"\x02" + integers(2, 1, 0) + integers(4, 3, 4), "add up"),
        (Coding.CSR, b"\x02" + integers(2, 2, 1) + integers(4, 3, 4), "add up"),
        (Coding.CSR, b"\x02" + integers(2, 2, 0) + integers(4, 4, 3), "ascending"),
        (Coding.CSR, b"\x02" + integers(2, 1, 1) + integers(4, 11, 3), "out of range"),
        (Coding.CSC, b"\x01" + integers(1, *[0] * 11) + integers(1, 1), "add up"),
        (Coding.GAP, b"\x01\x00\x00", "0 gaps instead of 1"),
        (Coding.GAP, b"\x01\x00\x03", "2 gaps instead of 1"),
        (Coding.GAP, b"\x01\xff\x01", "k = 255"),
        (Coding.GAP, b"\x01\x00\x01\x00", "shorter"),  # a byte to spare
        (Coding.GAP, b"\x01\x01\x02", "shorter"),  # a gap of 0 needs no remainder
        (Coding.GAP, b"\x01\x04\x2f", "do not fit"),  # a gap of 31
        (Coding.GAP, b"\x01\x00" + bytes(9), "9 bytes are too many"),
    ],
)
def test_each_kind_of_malformed_payload_is_named(coding: Coding, payload: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode(coding, payload, (2, 11))

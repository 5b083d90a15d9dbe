from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrts.wire.errors import WireError
from fedrts.wire.packing import Reader, bytes_of, pack_integers, varint, varint_size


@given(st.integers(0, 2**63))
def test_a_varint_returns_and_its_size_is_exact(value: int) -> None:
    reader = Reader(varint(value))
    assert reader.varint(most=2**63) == value
    assert reader.left == 0
    assert varint_size(value) == len(varint(value))


@pytest.mark.parametrize("payload", [b"", b"\x80", b"\x80\x00", b"\xff\x80\x00", b"\x80" * 1_000_000 + b"\x01", b"\x66"])
def test_a_varint_that_is_missing_too_long_or_too_large_is_refused_at_once(payload: bytes) -> None:
    reader = Reader(payload)
    with pytest.raises(WireError):
        reader.varint(most=101)
    assert reader.left >= len(payload) - 3


@given(st.integers(0, 40).flatmap(lambda width: st.tuples(st.just(width), st.lists(st.integers(0, 2**width - 1)))))
def test_integers_return_in_exactly_their_bits(case: tuple[int, list[int]]) -> None:
    width, integers = case
    packed = pack_integers(np.array(integers, np.int64), width)
    assert len(packed) == bytes_of(width * len(integers))
    assert Reader(packed).integers(len(integers), width).tolist() == integers


def test_padding_must_be_zero_and_nothing_may_follow() -> None:
    assert Reader(b"\x07").bits(3).all()
    with pytest.raises(WireError, match="padding"):
        Reader(b"\x0f").bits(3)
    with pytest.raises(WireError, match="missing"):
        Reader(b"\x07").bits(9)
    with pytest.raises(WireError, match="too many"):
        Reader(b"\x07").end()

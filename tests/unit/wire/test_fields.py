"""What is wrong with a payload, in every way that it can be wrong; and what a field takes, puts and costs."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedrts.sparse.cost import Book
from fedrts.sparse.layout import Entry, Layout
from fedrts.sparse.mask import Mask
from fedrts.wire.checks import fetched
from fedrts.wire.fields import Frame, Indices, Masks, Payload, Selection, Short, Signs, Values
from fedrts.wire.packing import Reader
from fedrts.wire.quantise import Quantised
from fedrts.wire.value_types import FORMATS, ValueType
from helping import fault

LAYOUT = Layout((Entry(("a",), (2, 4)), Entry(("b",), (6,))), (Entry(("bias",), (3,)),), (Entry(("mean",), (2,)),))
MASK = Mask(torch.tensor([*(1, 0, 0, 1, 0, 0, 1, 0), *(0, 1, 1, 0, 0, 0)], dtype=torch.bool), LAYOUT.sizes)
"""Active: 0, 3, 6 of layer a (8 links), 9 and 10 of layer b (6 links)."""
FRAME = Frame(LAYOUT, MASK)
ACTIVE, PARAMETERS = 5, 5 + 3
KEPT = PARAMETERS + 2
VOTES = Indices(of="gradient", k=(2, 1))


def weights(count: int = KEPT, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(count).to(dtype) - 2


def halves(count: int = PARAMETERS, statistics: int = 2, dtype: torch.dtype = torch.float16) -> Short:
    return Short(weights(count, dtype), weights(statistics))


def levels(count: int = PARAMETERS, scales: int = 1, statistics: int = 2, top: int = 127, **dtypes: torch.dtype) -> Short:
    return Short(
        Quantised(
            weights(count, dtypes.get("levels", torch.int8)).clamp(-top, top),
            weights(scales, dtypes.get("scale", torch.float32)).abs(),
            top=top,
        ),
        weights(statistics, dtypes.get("buffers", torch.float32)),
    )


def named(*indices: int, size: int = LAYOUT.links, values: torch.Tensor | None = None, dtype: torch.dtype = torch.int64) -> Selection:
    return Selection(torch.tensor(indices, dtype=dtype), size, values)


def with_one(values: torch.Tensor, worst: float, at: int = -1) -> torch.Tensor:
    values = values.clone()
    values[at] = worst
    return values


HALVES, LEVELS = halves().values, levels().values
assert isinstance(HALVES, torch.Tensor)
assert isinstance(LEVELS, Quantised)
FEWER: dict[ValueType, int] = {"int6": 31, "int4": 7, "int2": 1}
RIGHT: list[tuple[Any, Payload]] = [
    (Values(), weights()),
    (Values(on="all"), weights(LAYOUT.length)),
    (Values(on="links"), weights(LAYOUT.links)),
    (Values(), torch.tensor([3.4e38, -3.4e38, 1e-45, -0.0, 0, 0, 0, 0, 0, 0])),
    (Values(type="float16"), halves()),
    (Values(type="int8"), levels()),
    (Values(type="int8"), Short(Quantised(torch.full((PARAMETERS,), -127, dtype=torch.int8), torch.zeros(1)), weights(2))),
    *[(Values(type=type), levels(top=top)) for type, top in FEWER.items()],
    (VOTES, named(1, 7, 13)),
    (VOTES, named(4, 5, 8)),
    (Indices(of="gradient", k=(0, 0)), named()),
    (Indices(of="gradient", k=(0, 4)), named(8, 11, 12, 13)),
    (Indices(of="gradient", k=(5, 4)), named(1, 2, 4, 5, 7, 8, 11, 12, 13)),
]


@pytest.mark.parametrize(("field", "payload"), RIGHT)
def test_nothing_is_wrong_with_a_right_payload(field: Any, payload: Payload) -> None:
    assert fault(field.checks(payload, FRAME)) is None


@pytest.mark.parametrize("field", [*[Values(type=type) for type in FORMATS], Values(on="all"), VOTES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_wrong_with_what_a_field_takes(field: Any, dtype: torch.dtype) -> None:
    frame = replace(FRAME, dtype=dtype)
    tensors = {"weights": torch.randn(LAYOUT.length, dtype=dtype), "gradient": torch.randn(LAYOUT.links, dtype=dtype)}
    assert fault(field.checks(field.take(tensors, frame), frame)) is None


WRONG_VALUES: list[tuple[Values, Any, str]] = [
    # shapes
    (Values(), weights(KEPT - 1), r"has \[\(\(9,\), torch.float32\)\]"),
    (Values(), weights(KEPT + 1), "asked for"),
    (Values(), weights().view(2, 5), "asked for"),
    (Values(), weights().view(1, KEPT), "asked for"),
    (Values(), weights(LAYOUT.length), "asked for"),
    (Values(), torch.zeros(()), "asked for"),
    (Values(on="all"), weights(), "asked for"),
    (Values(on="links"), weights(LAYOUT.length), "asked for"),
    (Values(type="float16"), halves(count=PARAMETERS + 1), "asked for"),
    (Values(type="float16"), halves(statistics=3), "asked for"),
    (Values(type="float16"), halves(count=KEPT, statistics=0), "asked for"),
    (Values(type="int8"), levels(count=PARAMETERS - 1), "asked for"),
    (Values(type="int8"), levels(scales=2), "asked for"),
    (Values(type="int8"), levels(scales=0), "asked for"),
    (Values(type="int8"), levels(statistics=1), "asked for"),
    # types of numbers
    (Values(), weights(dtype=torch.float64), "torch.float64"),
    (Values(), weights(dtype=torch.float16), "torch.float16"),
    (Values(), weights(dtype=torch.int64), "torch.int64"),
    (Values(), weights(dtype=torch.complex64), "torch.complex64"),
    (Values(type="float16"), halves(dtype=torch.float32), "asked for"),
    (Values(type="float16"), halves(dtype=torch.bfloat16), "asked for"),
    (Values(type="int8"), levels(levels=torch.int16), "asked for"),
    (Values(type="int8"), levels(levels=torch.float32), "asked for"),
    (Values(type="int8"), levels(scale=torch.float64), "asked for"),
    (Values(type="int8"), levels(buffers=torch.float64), "asked for"),
    # types of payloads
    (Values(), None, "not of the type"),
    (Values(), 3.0, "not of the type"),
    (Values(), [1.0] * KEPT, "not of the type"),
    (Values(), np.zeros(KEPT, np.float32), "asked for"),
    (Values(), halves(), "not of the type"),
    (Values(), levels(), "not of the type"),
    (Values(), named(1, 7, 13), "not of the type"),
    (Values(type="float16"), weights(), "'weights'"),
    (Values(type="float16"), levels(), "asked for"),
    (Values(type="float16"), None, "not of the type"),
    (Values(type="float16"), Short(None, None), "not of the type"),  # type: ignore[arg-type]
    (Values(type="int8"), weights(), "'weights'"),
    (Values(type="int8"), halves(), "asked for"),
    (Values(type="int8"), Short(Quantised(None, None), weights(2)), "not of the type"),  # type: ignore[arg-type]
    (Values(type="int8"), named(1, 7, 13), "'weights'"),
    (Values(type="int4"), levels(), "not of the type"),
    (Values(type="int8"), levels(top=7), "not of the type"),
    (Values(type="int2"), levels(count=PARAMETERS - 1, top=1), "asked for"),
    (Values(type="int2"), levels(scales=2, top=1), "asked for"),
    (Values(type="int6"), levels(statistics=1, top=31), "asked for"),
    (Values(type="int6"), levels(top=31, levels=torch.int16), "asked for"),
    # numbers that are none
    *[(Values(), with_one(weights(), worst, at), "not finite") for worst in (torch.nan, torch.inf, -torch.inf) for at in (0, -1)],
    (Values(type="float16"), Short(with_one(HALVES, torch.inf), weights(2)), "not finite"),
    (Values(type="float16"), Short(with_one(HALVES, torch.nan), weights(2)), "not finite"),
    (Values(type="float16"), Short(halves().values, with_one(weights(2), torch.nan)), "not finite"),
    (Values(type="int8"), Short(Quantised(LEVELS.levels, torch.tensor([torch.inf])), weights(2)), "not finite"),
    (Values(type="int8"), Short(Quantised(LEVELS.levels, torch.tensor([torch.nan])), weights(2)), "not finite"),
    (Values(type="int8"), Short(levels().values, with_one(weights(2), torch.inf)), "not finite"),
    *[
        (Values(type=type), Short(Quantised(weights(PARAMETERS, torch.int8), torch.tensor([worst]), top=top), weights(2)), "not finite")
        for type, top in FEWER.items()
        for worst in (torch.nan, torch.inf)
    ],
]


@pytest.mark.parametrize(("field", "payload", "reason"), WRONG_VALUES)
def test_wrong_values_get_a_reason(field: Values, payload: Payload, reason: str) -> None:
    found = fault(field.checks(payload, FRAME))
    assert isinstance(found, str)
    assert re.search(reason, found), found


def test_the_tensor_is_named() -> None:
    assert "'gradient'" in str(fault(Values(of="gradient", on="links").checks(None, FRAME)))  # type: ignore[arg-type]


def test_levels_and_scales_that_no_client_can_mean_get_a_reason() -> None:
    """Levels are −127 … 127 and scales are magnitudes: else one value would have several forms, and 128/127 would exceed the scale."""
    short, values = levels(), levels().values
    assert isinstance(values, Quantised)
    field = Values(type="int8")
    assert fault(field.checks(Short(Quantised(with_one(values.levels, -128), values.scales), short.statistics), FRAME)) is not None
    assert fault(field.checks(Short(Quantised(values.levels, -1 - values.scales), short.statistics), FRAME)) is not None


@pytest.mark.parametrize(("type", "top"), FEWER.items())
def test_fewer_levels_are_bounded_both_ways(type: ValueType, top: int) -> None:
    """In the guard as well as on the wire: a payload of our own process was never decoded."""
    field, ones = Values(type=type), torch.ones(PARAMETERS, dtype=torch.int8)
    for level, scale, right in ((top, 1.0, True), (-top, 1.0, True), (top + 1, 1.0, False), (-top - 1, 1.0, False), (1, -1.0, False)):
        payload = Short(Quantised(with_one(ones, level), torch.tensor([scale]), top=top), weights(2))
        assert (fault(field.checks(payload, FRAME)) is None) == right


WRONG_VOTES: list[tuple[Any, str]] = [
    # not a choice of these links
    (None, "not a choice"),
    (torch.tensor([1, 7, 13]), "not a choice"),
    ([1, 7, 13], "not a choice"),
    (named(1, 7, 13, size=LAYOUT.links + 1), "not a choice"),
    (named(1, 7, 13, size=LAYOUT.links - 1), "not a choice"),
    (named(1, 7, 13, values=torch.ones(3)), "not a choice"),
    # how many, of what
    (named(1, 7), "links are named where 3"),
    (named(1, 7, 11, 13), "links are named where 3"),
    (named(), "links are named where 3"),
    (Selection(torch.tensor([[1, 7, 13]]), LAYOUT.links), "links are named where 3"),
    (named(1, 7, 13, dtype=torch.int32), "where 3"),
    (named(1, 7, 13, dtype=torch.float32), "where 3"),
    (Selection(torch.tensor([True] * 3), LAYOUT.links), "where 3"),
    # which
    (named(1, 7, 14), "does not exist"),
    (named(1, 7, 2**62), "does not exist"),
    (named(-1, 1, 13), "does not exist"),
    (named(-14, 1, 13), "does not exist"),
    (named(7, 1, 13), "twice or out of order"),
    (named(13, 7, 1), "twice or out of order"),
    (named(7, 7, 13), "twice or out of order"),
    (named(1, 13, 13), "twice or out of order"),
    (named(0, 7, 13), "an active link"),
    (named(1, 7, 9), "an active link"),
    (named(1, 8, 13), r"layers have \[1, 2\]"),
    (named(1, 2, 4), r"layers have \[3, 0\]"),
    (named(8, 11, 13), r"layers have \[0, 3\]"),
]


@pytest.mark.parametrize(("payload", "reason"), WRONG_VOTES)
def test_wrong_votes_get_a_reason(payload: Payload, reason: str) -> None:
    found = fault(VOTES.checks(payload, FRAME))
    assert isinstance(found, str)
    assert re.search(reason, found), found


@pytest.mark.parametrize("indices", [None, 3, "abc", [1, 7, 13], np.array([1, 7, 13])])
def test_votes_that_are_no_tensor_get_a_reason(indices: Any) -> None:
    assert fault(VOTES.checks(Selection(indices, LAYOUT.links), FRAME)) is not None


@pytest.mark.parametrize("wrong", [2, -2, -128, 127])
def test_signs_are_minus_one_zero_or_one(wrong: int) -> None:
    signs = torch.tensor([1, -1, *[0] * (LAYOUT.links - 2)], dtype=torch.int8)
    assert fault(Signs("direction").checks(signs, FRAME)) is None
    assert "signs" in str(fault(Signs("direction").checks(with_one(signs, wrong), FRAME)))


def test_numbers_of_every_type_are_fetched_as_they_are() -> None:
    held = [torch.tensor(2**62), torch.tensor([True, False]), torch.tensor([[0.1], [torch.inf]], dtype=torch.float64), torch.zeros(0)]
    assert fetched([*held, torch.tensor(7)]) == [[2**62], [True, False], [0.1, math.inf], [], [7]]


def test_a_vote_where_none_was_asked_for_gets_a_reason() -> None:
    assert fault(Indices(of="gradient", k=(0, 0)).checks(named(1), FRAME)) is not None


# What fields take, put and cost


def test_values_are_put_where_they_were_taken() -> None:
    tensors = {"weights": torch.arange(1.0, 1 + LAYOUT.length)}
    taken = Values().take(tensors, FRAME)
    assert isinstance(taken, torch.Tensor)
    assert taken.tolist() == [1, 4, 7, 10, 11, *range(15, 20)]
    put = Values().put(taken, FRAME)
    assert put.tolist() == [1, 0, 0, 4, 0, 0, 7, 0, 0, 10, 11, 0, 0, 0, *range(15, 20)]
    everything = Values(on="all").take(tensors, FRAME)
    assert isinstance(everything, torch.Tensor)
    assert torch.equal(Values(on="all").put(everything, FRAME), tensors["weights"])
    assert everything.data_ptr() != tensors["weights"].data_ptr(), "a payload is a copy"


def test_votes_are_the_largest_magnitudes_among_the_inactive() -> None:
    gradient = torch.tensor([*(9.0, -1, 2, 9, -3, 0, 9, 0.5), *(0, 9, 9, -5, 4, 1)])
    assert VOTES.take({"gradient": gradient}, FRAME).indices.tolist() == [2, 4, 11]
    assert VOTES.put(VOTES.take({"gradient": gradient}, FRAME), FRAME).tolist() == [2, 4, 11]


@pytest.mark.parametrize(
    ("field", "size"),
    [
        (Values(), 4 * KEPT),
        (Values(on="all"), 4 * LAYOUT.length),
        (Values(on="links"), 4 * LAYOUT.links),
        (Values(type="float16"), 2 * PARAMETERS + 4 * 2),
        (Values(type="int8"), PARAMETERS + 4 + 4 * 2),
        (Values(type="int6"), 1 + 6 * PARAMETERS // 8 + 4 + 4 * 2),  # so few are packed
        (Values(type="int4"), 1 + PARAMETERS // 2 + 4 + 4 * 2),
        (Values(type="int2"), 1 + 2 + 4 + 4 * 2),
        (Indices(of="gradient", k=(5, 4)), 2 + 2),  # all inactive links: a coding and a length of 0 each
        (Indices(of="gradient", k=(0, 0)), 2 + 2),
    ],
)
def test_what_a_payload_costs(field: Any, size: int) -> None:
    links = torch.randn(LAYOUT.links)
    tensors = {"weights": links if field == Values(on="links") else torch.randn(LAYOUT.length), "gradient": links}
    payload = field.take(tensors, FRAME)
    assert field.size(payload, FRAME) == size == len(b"".join(field.write(payload, FRAME)))


def test_the_papers_accounting() -> None:
    sparse = 4 * 0.2 * 14 + 14 / 8 + 4 * 5
    book = Book.paper(LAYOUT, 0.2, 0.4)
    assert Values().charged(book) == pytest.approx(sparse)
    assert Values().charged(Book.paper(LAYOUT, 1.0, 0.4)) == 4 * 19
    assert Values(on="all").charged(book) == 4 * 19
    assert VOTES.charged(book) == pytest.approx(0.5 * 0.4 * sparse)


def test_a_server_and_a_client_take_the_same_values():
    """The server keeps what is on the mask, a client everything: both can send either."""
    layout = Layout((Entry(("a",), (3, 2)),), (Entry(("b",), (2,)),), ())
    mask = Mask(torch.tensor([True, False, True, False, False, True]), [6])
    frame = Frame(layout, mask)
    everything = mask.expand(mask.compact(torch.arange(8.0) + 1))
    for on in ("mask", "all"):
        of_client, of_server = (Values(on=on).take({"weights": w}, frame) for w in (everything, mask.compact(everything)))
        assert isinstance(of_client, torch.Tensor)
        assert isinstance(of_server, torch.Tensor)
        assert torch.equal(of_client, of_server)
        assert len(of_client) == (5 if on == "mask" else 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_named_links_with_their_values(dtype):
    layout = Layout((Entry(("a",), (3, 2)), Entry(("b",), (4,))), (), ())
    mask = Mask(torch.tensor([True, False, True, False, False, True, False, True, False, False]), [6, 4])
    frame = Frame(layout, mask, dtype)
    gradient = torch.tensor([9.0, -1.0, 9.0, 5.0, 0.5, 9.0, 0.1, 9.0, -7.0, 2.0], dtype=dtype)
    field = Indices(of="gradient", k=(2, 1), values=True)
    payload = field.take({"gradient": gradient}, frame)
    assert payload.indices.tolist() == [1, 3, 8]
    assert payload.values is not None
    assert payload.values.tolist() == [-1.0, 5.0, -7.0]
    data = b"".join(field.write(payload, frame))
    assert len(data) == field.size(payload, frame)
    again = field.read(Reader(data), frame)
    assert torch.equal(again.indices, payload.indices)
    assert again.values is not None
    assert torch.equal(again.values, payload.values)
    assert fault(field.checks(payload, frame)) is None
    assert "finite" in str(fault(field.checks(replace(payload, values=payload.values * float("nan")), frame)))
    assert fault(field.checks(replace(payload, values=payload.values[:2]), frame)) is not None
    assert fault(field.checks(replace(payload, values=None), frame)) is not None
    assert fault(Indices(of="gradient", k=(2, 1)).checks(payload, frame)) is not None


@pytest.mark.parametrize(
    ("payload", "wrong"),
    [
        (torch.ones(2, LAYOUT.links, dtype=torch.bool), False),
        (torch.ones(2, LAYOUT.links), True),
        (torch.ones(3, LAYOUT.links, dtype=torch.bool), True),
        (torch.ones(2, LAYOUT.links + 1, dtype=torch.bool), True),
        (named(1), True),
    ],
)
def test_several_masks_are_bits_of_all_links(payload: Payload, wrong: bool) -> None:
    found = fault(Masks("pool", 2).checks(payload, FRAME))
    assert found == ("'pool' is not 2 masks of this model" if wrong else None)

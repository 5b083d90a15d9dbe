"""Values in fewer bits: right on average, within the stated bound, and never NaN."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedrts.sparse.layout import Entry, Layout
from fedrts.sparse.mask import Mask
from fedrts.wire.fields import Frame, Short, Values
from fedrts.wire.quantise import BLOCK, LEVELS, Quantised, blocks_of
from fedrts.wire.value_types import FORMATS, Rounded, ValueType
from helping import fault

TOPS = (LEVELS, 31, 7, 1)
"""Levels above 0 of int8, int6, int4 and int2."""
SMALLEST = 2.0**-149
"""The smallest float32 above 0."""


def randn(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def unit_of(values: torch.Tensor, top: int = LEVELS) -> torch.Tensor:
    """scale / top of every value's block, in float64."""
    return torch.cat([torch.full_like(part, max(part.abs().tolist(), default=0.0) / top) for part in values.double().split(BLOCK)])


def short_of(values: torch.Tensor, key: int, top: int) -> Quantised:
    """`values` in the type with so many levels above 0."""
    (format,) = (format for format in FORMATS.values() if isinstance(format, Rounded) and format.top == top)
    return format.shorten(values, key, None, "linf")


def assert_within_bound(values: torch.Tensor, key: int, top: int = LEVELS) -> Quantised:
    """|Q(x) − x| ≤ scale / top, up to float32's own rounding."""
    quantised = short_of(values, key, top)
    restored = quantised.values()
    assert quantised.levels.dtype == torch.int8
    assert quantised.scales.dtype == restored.dtype == torch.float32
    assert quantised.levels.shape == values.shape == restored.shape
    assert quantised.scales.shape == (blocks_of(len(values)),)
    assert torch.isfinite(restored).all()
    assert (quantised.levels.abs() <= top).all()
    assert (quantised.levels >= -top).all()
    assert ((restored.double() - values.double()).abs() <= unit_of(values, top) * (1 + 1e-4) + SMALLEST).all()
    assert (restored[values == 0] == 0).all()
    return quantised


@pytest.mark.parametrize("top", TOPS)
def test_rounding_is_right_on_average(top: int) -> None:
    """The mean error of one value over K keys has a standard error of at most unit/(2√K); of all m values, of 0.5/√(K·m) units."""
    keys, values = 1000, torch.cat([randn(2 * BLOCK), 1e-3 * randn(BLOCK, 1)])
    unit = unit_of(values, top)
    errors = torch.stack([(short_of(values, 1_000_003 * key, top).values().double() - values.double()) / unit for key in range(keys)])
    assert errors.mean(0).abs().max() <= 5 * 0.5 / keys**0.5
    assert errors.mean().abs() <= 5 * 0.5 / (keys * len(values)) ** 0.5
    # both neighbouring levels are met, as often as the distance to them says: variance f·(1 − f)
    part = (values.double() / unit) % 1
    expected = (part * (1 - part)).mean()
    assert abs(errors.square().mean() / expected - 1) <= 0.02


@pytest.mark.parametrize("top", TOPS)
def test_neighbours_are_rounded_independently(top: int) -> None:
    """Two values by one hash: the errors of neighbours, and of those 2 and 256 apart, have a correlation of 0 ± 1/√n."""
    values = randn(200 * BLOCK)
    errors = (short_of(values, 7, top).values().double() - values.double()) / unit_of(values, top)
    errors /= errors.square().mean().sqrt()
    for apart in (1, 2, BLOCK):
        assert (errors[apart:] * errors[:-apart]).mean().abs() <= 5 / len(values) ** 0.5


@pytest.mark.parametrize("count", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
@pytest.mark.parametrize("magnitude", [1.0, 1e-6, 1e6, 1e-30, 1e30])
def test_the_error_is_bounded(count: int, magnitude: float) -> None:
    for seed, top in itertools.product(range(20), TOPS):
        assert_within_bound(magnitude * randn(count, seed), key=seed, top=top)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=300), st.integers(0, 2**64 - 1), st.sampled_from(TOPS))
def test_any_finite_values_stay_within_the_bound(values: list[float], key: int, top: int) -> None:
    assert_within_bound(torch.tensor(values, dtype=torch.float32), key, top)


@pytest.mark.parametrize("scale", [3.4028234663852886e38, 1e38, 1.1754943508222875e-38, 3e-37, 1e-38, 1e-40, 127 * SMALLEST, SMALLEST])
def test_huge_and_tiny_magnitudes_stay_within_the_bound(scale: float) -> None:
    shares = torch.tensor([1.0, -1.0, 0.5, -0.25, 0.01, 0.0, -0.0], dtype=torch.float64)
    for key, top in itertools.product(range(50), TOPS):
        assert_within_bound((scale * shares).float(), key, top)


@pytest.mark.parametrize("top", TOPS)
def test_the_largest_of_a_block_is_exact_and_zeros_stay_zero(top: int) -> None:
    values = randn(2 * BLOCK)
    values[::7] = 0
    values[BLOCK:] = 0
    quantised = assert_within_bound(values, 3, top)
    restored = quantised.values()
    assert quantised.scales.tolist() == [float(values.abs().max()), 0.0]
    assert restored[BLOCK:].count_nonzero() == 0
    assert restored[::7].count_nonzero() == 0


def test_no_level_is_beyond_the_ends() -> None:
    """127 and a dither above 1 − 2⁻¹⁸ are 128 in float32, and −127 and such a dither −126: about eight times in two million values."""
    ends = torch.ones(1 << 21)
    assert (Quantised.of(ends, 1).levels == 127).all()
    levels = Quantised.of(-ends, 1).levels
    assert set(levels.unique().tolist()) <= {-127, -126}
    assert (levels == -126).count_nonzero() < 100


def test_nothing_and_one_value() -> None:
    nothing = assert_within_bound(torch.zeros(0), key=1)
    assert nothing.values().shape == (0,)
    one = assert_within_bound(torch.tensor([-0.3]), key=1)
    assert one.values().item() == pytest.approx(-0.3, rel=1e-6)


@pytest.mark.parametrize("top", TOPS)
def test_rounding_is_decided_by_the_key_alone(top: int) -> None:
    values = randn(1000)
    before = torch.random.get_rng_state()
    first, again, other = (short_of(given, key, top) for given, key in ((values, 5), (values.clone(), 5), (values, 6)))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(first.levels, again.levels)
    assert torch.equal(first.scales, again.scales)
    assert not torch.equal(first.levels, other.levels)
    assert torch.equal(first.scales, other.scales)


def test_blocks_do_not_meet() -> None:
    values = randn(3 * BLOCK)
    changed = values.clone()
    changed[BLOCK : 2 * BLOCK] *= 1000
    first, second = Quantised.of(values, 5), Quantised.of(changed, 5)
    outside = torch.cat([torch.arange(BLOCK), torch.arange(2 * BLOCK, 3 * BLOCK)])
    assert torch.equal(first.levels[outside], second.levels[outside])
    assert torch.equal(first.scales[[0, 2]], second.scales[[0, 2]])
    assert second.scales[1] == 1000 * first.scales[1]
    # and each has roundings of its own
    same = Quantised.of(values[:BLOCK].repeat(3), 5).levels.view(3, BLOCK)
    assert not torch.equal(same[0], same[1])


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 512, 513])
def test_one_scale_per_block(count: int) -> None:
    assert blocks_of(count) == len(range(0, count, BLOCK)) == len(Quantised.of(torch.ones(count), 0).scales)


# As a client's upload

LAYOUT = Layout((Entry(("a",), (30, 40)), Entry(("b",), (500,))), (Entry(("bias",), (33,)),), (Entry(("mean",), (21,)),))


SHORT = [type for type, format in FORMATS.items() if not format.lossless]


def top_of(type: ValueType) -> int:
    format = FORMATS[type]
    assert isinstance(format, Rounded)
    return format.top


def an_upload(type: ValueType, dtype: torch.dtype, change: float) -> tuple[Frame, torch.Tensor, torch.Tensor]:
    """(frame, the client's weights on the mask, what the server makes of the upload)."""
    mask = Mask(torch.from_numpy(np.random.default_rng(0).random(LAYOUT.links) < 0.4), LAYOUT.sizes)
    reference = mask.compact(randn(LAYOUT.length, 1).to(dtype))
    frame = Frame(LAYOUT, mask, dtype, key=17, reference=reference)
    weights = reference + change * randn(len(reference), 2).to(dtype)
    field = Values(type=type)
    payload = field.take({"weights": mask.expand(weights)}, frame)
    assert isinstance(payload, Short)
    assert fault(field.checks(payload, frame)) is None
    return frame, weights, field.open(payload, frame)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("change", [1e-4, 1e-2, 10.0])
@pytest.mark.parametrize("type", SHORT)
def test_an_upload_is_a_change_from_what_the_client_received(type: ValueType, change: float, dtype: torch.dtype) -> None:
    frame, weights, opened = an_upload(type, dtype, change)
    assert opened.dtype == dtype
    kept = len(weights) - frame.statistics
    assert frame.reference is not None
    difference = (weights - frame.reference)[:kept]
    bound = unit_of(difference, top_of(type)) * (1 + 1e-4) if type != "float16" else difference.double().abs() * 2**-11 + 2**-25
    rounding = 2**-23 * (weights.double().abs() + frame.reference.double().abs())[:kept]  # of the model's own type
    assert ((opened - weights)[:kept].double().abs() <= bound + rounding).all()
    assert not torch.equal(opened[:kept], weights[:kept]), "something was saved"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("type", SHORT)
def test_statistics_stay_exact(type: ValueType, dtype: torch.dtype) -> None:
    frame, weights, opened = an_upload(type, dtype, 1e-2)
    assert frame.statistics == 21
    assert torch.equal(opened[-21:], weights[-21:])
    assert not torch.equal(opened[-22 - 32 : -21], weights[-22 - 32 : -21]), "dense parameters are no statistics"


@pytest.mark.parametrize("type", SHORT)
def test_a_client_that_changed_nothing_uploads_exactly_that(type: ValueType) -> None:
    frame, weights, opened = an_upload(type, torch.float32, 0.0)
    assert torch.equal(opened, weights)
    assert frame.reference is not None
    assert torch.equal(opened, frame.reference)


@pytest.mark.parametrize("type", SHORT)
def test_a_download_has_no_reference(type: ValueType) -> None:
    mask = Mask(torch.from_numpy(np.random.default_rng(0).random(LAYOUT.links) < 0.4), LAYOUT.sizes)
    frame = Frame(LAYOUT, mask, key=3)
    weights = mask.expand(mask.compact(randn(LAYOUT.length, 1)))
    field = Values(type=type)
    received = field.put(field.take({"weights": weights}, frame), frame)
    values = mask.compact(weights)[:-21]
    bound = unit_of(values, top_of(type)) * (1 + 1e-4) if type != "float16" else values.double().abs() * 2**-11 + 2**-25
    assert ((mask.compact(received)[:-21] - values).double().abs() <= bound).all()
    assert torch.equal(received[-21:], weights[-21:])
    assert received[: LAYOUT.links][~mask.bits].count_nonzero() == 0

"""Sizes, speeds and durations as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrts.errors import InputError
from fedrts.planning import units

SIZES = [("B", 1), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("KiB", 1024), ("MiB", 1024**2), ("GiB", 1024**3)]
SPEEDS = [("bit/s", 1 / 8), ("kbit/s", 125), ("Mbit/s", 125_000), ("Gbit/s", 1.25e8), ("MB/s", 1e6), ("KiB/s", 1024)]

numbers = st.one_of(st.integers(1, 10**6), st.decimals("0.01", 10**6, places=2))
space = st.sampled_from(["", " ", "  "])


@given(numbers, space, st.sampled_from(SIZES))
def test_sizes(number, gap, unit):
    word, factor = unit
    for text in (f"{number}{gap}{word}", f" {number}{gap}{word.lower()} "):
        assert units.size(text) == pytest.approx(float(number) * factor)


@given(numbers, space, st.sampled_from(SPEEDS))
def test_speeds(number, gap, unit):
    word, factor = unit
    assert units.speed(f"{number}{gap}{word}") == pytest.approx(float(number) * factor)


@given(numbers, space, st.sampled_from([("ms", 0.001), ("s", 1), ("min", 60), ("h", 3600), ("d", 86400)]))
def test_durations(number, gap, unit):
    word, factor = unit
    assert units.duration(f"{number}{gap}{word}") == pytest.approx(float(number) * factor)


def test_a_number_in_python_is_bytes():
    assert units.size(2_500_000) == units.size("2.5MB")


@pytest.mark.parametrize("text", ["", "200", "MB", "-3MB", "2 M B", "1e6B", "20 apples", "0MB", "1" + "0" * 400 + "MB", "nan"])
def test_no_sizes(text):
    with pytest.raises(InputError, match=r"^--budget "):
        units.size(text)


@pytest.mark.parametrize("text", ["5Mb/s", "5mb/s", "5", "5MB", "5Mbit", "fast"])
def test_no_speeds(text):
    """`Mb/s` may mean bits or bytes: eight times too much is no guess to make."""
    with pytest.raises(InputError, match=r"--link takes a speed such as 5Mbit/s or 600kB/s \(got"):
        units.speed(text)


@pytest.mark.parametrize("text", ["60", "1m", "soon", "5MB"])
def test_no_durations(text):
    with pytest.raises(InputError, match=r"--deadline takes a time such as 60s, 10min or 2h \(got"):
        units.duration(text)


@pytest.mark.parametrize(("count", "text"), [(12, "12 B"), (1_500, "1.5 kB"), (16_740_000, "16.7 MB"), (2e9, "2 GB")])
def test_shown(count, text):
    assert units.shown_size(count) == text

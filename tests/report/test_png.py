"""Figures as pictures."""

import warnings
from itertools import pairwise

import pytest

pytest.importorskip("matplotlib", reason="fedrts[plot] is not installed")

from matplotlib.figure import Figure
from matplotlib.image import imread

from fedrts.report import png
from fedrts.report.model import Axis, Bars, Heat, Lines, Point, Series


@pytest.mark.parametrize("letters", [5, 60, 150])
def test_a_legend_of_long_names_leaves_room_for_the_lines(tmp_path, letters):
    series = [Series("n" * letters + str(number), [Point(0, 0.1), Point(1, 0.5)], number) for number in range(12)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns where axes have no room
        png.draw(Lines("a", "A title", "", Axis("round"), Axis("accuracy"), series), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def drawn(picture):
    """The axes of a figure after layout."""
    canvas = Figure(figsize=(7, 4.5))
    axes = canvas.add_subplot()
    if isinstance(picture, Lines):
        png._lines(picture, axes)
    else:
        png._bars(picture, axes)
    canvas.draw_without_rendering()
    return axes


def texts(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def test_rounds_are_whole_and_none_is_named_twice():
    axes = drawn(Lines("a", "", "", Axis("rounds", "integer"), Axis("accuracy", "percent"), [Series("s", [Point(1, 0.1), Point(3, 0.2)])]))
    assert [text for text in texts(axes.xaxis) if text in "123"] == ["1", "2", "3"]


def test_a_logarithmic_axis_of_a_decade_has_more_than_one_number():
    points = [Point(1.2e5, 0.1), Point(7e5, 0.2)]
    axes = drawn(Lines("a", "", "", Axis("bytes", "bytes", "log"), Axis("accuracy", "percent"), [Series("s", points)]))
    low, high = axes.get_xlim()
    shown = [text for text, at in zip(texts(axes.xaxis), axes.get_xticks(), strict=True) if low <= at <= high]
    assert shown == ["200 kB", "300 kB", "500 kB", "700 kB"]


def test_a_legend_stands_beside_the_bars():
    axes = drawn(Bars("a", "", "", Axis("sent", "bytes", zero=True), ["r", "s"], [("upload", [1e6, 1e6]), ("download", [2e6, 1e6])]))
    assert axes.get_legend().get_window_extent().x0 >= axes.get_window_extent().x1


def test_curves_are_named_at_their_ends_in_their_colours():
    series = [Series(name, [Point(1, 0.1), Point(3, y)], hue) for hue, (name, y) in enumerate([("a", 0.5), ("b", 0.501), ("c", 0.2)])]
    axes = drawn(Lines("x", "", "", Axis("rounds", "integer"), Axis("accuracy", "percent"), series, [("dense", 0.6)]))
    named = {text.get_text(): text for text in axes.texts}
    assert {name: text.get_color() for name, text in named.items()} == dict(zip("abc", png._HUES, strict=False)) | {"dense": png._GREY}
    heights = sorted(text.xyann[1] for text in axes.texts)
    assert min(high - low for low, high in pairwise(heights)) >= 0.0449
    assert all(text.xyann[0] > 1 for text in axes.texts)


def test_long_names_are_not_cut(tmp_path):
    """The picture grows with them, and matplotlib has nothing to warn of."""

    def width(letters):
        names = ["n" * letters + str(number) for number in range(5)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            values = [[0.5] * 5 for _ in names]
            png.draw(Heat("a", "n" * letters, "", Axis("x"), Axis("y"), names, names, values), tmp_path / "heat.png")
            png.draw(
                Bars("a", "n" * letters, "", Axis("sent", "bytes"), names, [("up", [1.0] * 5), ("down", [1.0] * 5)]), tmp_path / "bars.png"
            )
        return [imread(tmp_path / name).shape[1] for name in ("heat.png", "bars.png")]

    for short, long in zip(width(5), width(150), strict=True):
        assert long > short + 145 * 4

"""Figures as pictures."""

import warnings

import pytest

pytest.importorskip("matplotlib", reason="fedrts[plot] is not installed")

from fedrts.report import png
from fedrts.report.model import Axis, Lines, Point, Series


@pytest.mark.parametrize("letters", [5, 60, 150])
def test_a_legend_of_long_names_leaves_room_for_the_lines(tmp_path, letters):
    series = [Series("n" * letters + str(number), [Point(0, 0.1), Point(1, 0.5)], number) for number in range(12)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns where axes have no room
        png.draw(Lines("a", "A title", "", Axis("round"), Axis("accuracy"), series), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")

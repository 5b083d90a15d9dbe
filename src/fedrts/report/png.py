"""The figures as PNG files, drawn by matplotlib from the same data as the charts in the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from fedrts.errors import optional
from fedrts.report.format import text
from fedrts.report.model import Axis, Bars, Figure, Heat, Lines

_HUES = ("#1f5fbf", "#c4500a", "#007a5a", "#a3327f", "#7a6400", "#5b48b5", "#0b7a92", "#5a5f66")
_MARKERS = ("o", "s", "^", "D", "x", "+", "v", "|")
_DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)))
_GREY = "#5a5f66"
_BESIDE: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5), "frameon": False, "fontsize": 8}
"""A legend outside the axes: it covers nothing."""
_MOST_LABELS = 40
_MOST_ENDS = 6
"""Curves that are named at their ends, as in the page."""


def draw(figure: Figure, file: Path) -> None:
    """Draw one picture."""
    canvas = optional("matplotlib.figure", "plot").Figure(figsize=_size(figure), dpi=110)
    axes = canvas.add_subplot()
    if isinstance(figure, Lines):
        _lines(figure, axes)
    elif isinstance(figure, Heat):
        _heat(figure, axes, canvas)
    else:
        _bars(figure, axes)
    axes.set_title("\n".join(wrap(figure.title, 70)), loc="left", fontsize=11, fontweight="bold")
    canvas.savefig(file, bbox_inches="tight", pad_inches=0.12)  # the picture grows around its words: none is cut, no axes shrink


def _size(figure: Figure) -> tuple[float, float]:
    if isinstance(figure, Lines):
        return 7.0, 4.5 if _named_at_ends(figure) else max(4.5, 0.19 * len(figure.series))  # a legend stands beside the axes
    rows = len(figure.rows)
    columns = len(figure.columns) if isinstance(figure, Heat) else 0
    return max(7.0, min(14.0, 2.5 + 0.35 * columns)), max(2.5, min(14.0, 1.6 + (0.3 if rows <= _MOST_LABELS else 0.12) * rows))


def _lines(figure: Lines, axes: Any) -> None:
    for series in figure.series:
        if not series.points:
            continue
        x, y = [point.x for point in series.points], [point.y for point in series.points]
        errors = [point.error or 0.0 for point in series.points]
        style = {
            "color": _HUES[series.hue % len(_HUES)],
            "linestyle": _DASHES[series.dash % len(_DASHES)],
            "marker": _MARKERS[series.hue % len(_MARKERS)],
            "markersize": 5,
            "markevery": 1 if figure.whiskers else max(1, -(-len(x) // 6)),
            "label": series.name,
        }
        if figure.whiskers:
            axes.errorbar(x, y, yerr=errors, capsize=3, **style)
            continue
        axes.plot(x, y, **style)
        if any(errors):
            low, high = ([value + sign * error for value, error in zip(y, errors, strict=True)] for sign in (-1, 1))
            axes.fill_between(x, low, high, color=style["color"], alpha=0.12, linewidth=0)
    for name, value in figure.references:
        axes.axhline(value, color=_GREY, linestyle=":", label=name)
    _axis(axes.xaxis, axes.set_xscale, figure.x)
    _axis(axes.yaxis, axes.set_yscale, figure.y)
    axes.grid(axis="y", color="#e3e6ea")
    axes.spines[["top", "right"]].set_visible(False)
    if _named_at_ends(figure):
        _name_ends(figure, axes)
    elif figure.series:
        axes.legend(**_BESIDE, labelcolor="linecolor")


def _named_at_ends(figure: Lines) -> bool:
    """Whether curves are few enough to be labelled at their ends."""
    return len(figure.series) + len(figure.references) <= _MOST_ENDS


def _name_ends(figure: Lines, axes: Any) -> None:
    """Label every curve at its end, in its colour, and move labels apart that would touch."""
    ends = [(s.points[-1].x, s.points[-1].y, s.name, _HUES[s.hue % len(_HUES)]) for s in figure.series if s.points]
    right = axes.get_xlim()[1]
    ends += [(right, value, name, _GREY) for name, value in figure.references]
    places = [axes.transAxes.inverted().transform(axes.transData.transform((x, y)))[1] for x, y, *_ in ends]
    for (x, y, name, colour), place in zip(ends, _spaced(places), strict=True):
        axes.annotate(
            name,
            (x, y),
            (1.07, place),
            textcoords=axes.transAxes,
            color=colour,
            fontsize=8,
            fontweight="bold",
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "alpha": 0.45, "relpos": (0, 0.5), "shrinkA": 1},
        )


def _spaced(places: Sequence[float], least: float = 0.045) -> list[float]:
    """Move places as little as possible so that they are `least` apart and, if they fit, between 0 and 1."""
    order = sorted(range(len(places)), key=places.__getitem__)
    moved = [min(max(places[index], 0.0), 1.0) for index in order]
    for index in range(1, len(moved)):
        moved[index] = max(moved[index], moved[index - 1] + least)
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], 1.0 - least * (len(moved) - 1 - index))
    return [moved[order.index(index)] for index in range(len(places))]


def _heat(figure: Heat, axes: Any, canvas: Any) -> None:
    nothing = float("nan")
    values = [[nothing if value is None else value for value in row] for row in figure.values]
    image = axes.imshow(values, cmap="Blues", aspect="auto", vmin=figure.low, vmax=figure.high, interpolation="nearest")
    places = range(0, len(figure.columns), max(1, -(-len(figure.columns) // _MOST_LABELS)))
    steep = max(map(len, figure.columns)) > 4
    axes.set_xticks(
        list(places),
        [figure.columns[place] for place in places],
        rotation=60 if steep else 0,
        ha="right" if steep else "center",
        fontsize=8,
    )
    places = range(0, len(figure.rows), max(1, -(-len(figure.rows) // _MOST_LABELS)))
    axes.set_yticks(list(places), [figure.rows[place] for place in places], fontsize=8)
    axes.set(xlabel=figure.x.title, ylabel=figure.y.title)
    canvas.colorbar(image, ax=axes, label=figure.what, format=lambda value, _: text(value, figure.format))


def _bars(figure: Bars, axes: Any) -> None:
    left = [0.0] * len(figure.rows)
    places = range(len(figure.rows))
    for number, (name, values) in enumerate(figure.parts):
        axes.barh(
            places,
            values,
            left=left,
            label=name,
            color=_HUES[0] if number == 0 else "white",
            edgecolor=_HUES[0],
            hatch="//" if number else None,
        )
        left = [start + value for start, value in zip(left, values, strict=True)]
    step = max(1, -(-len(figure.rows) // _MOST_LABELS))
    axes.set_yticks(list(places)[::step], list(figure.rows)[::step], fontsize=8)
    axes.set_ylim(len(figure.rows) - 0.4, -0.6)
    _axis(axes.xaxis, axes.set_xscale, figure.x)
    axes.spines[["top", "right"]].set_visible(False)
    if len(figure.parts) > 1:
        axes.legend(**_BESIDE)


def _axis(axis: Any, set_scale: Any, described: Axis) -> None:
    set_scale(described.scale)
    axis.set_label_text(described.title)
    ticker = optional("matplotlib.ticker", "plot")
    if described.scale == "log":
        low, high = axis.get_view_interval()
        marks = next((marks for most, marks in ((30, (1, 2, 3, 5, 7)), (1000, (1, 2, 5))) if high <= most * low), (1,))
        axis.set_major_locator(ticker.LogLocator(subs=marks))
        axis.set_minor_formatter(ticker.NullFormatter())
    elif described.format == "integer":
        axis.set_major_locator(ticker.MaxNLocator(integer=True))
    axis.set_tick_params(which="both", labelsize=8)
    if described.format != "number" or described.scale == "log":
        axis.set_major_formatter(lambda value, _: text(value, described.format))

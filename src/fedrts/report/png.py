"""The figures as PNG files, drawn by matplotlib from the same data as the charts in the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedrts.errors import optional
from fedrts.report.format import text
from fedrts.report.model import Axis, Bars, Figure, Heat, Lines

_HUES = ("#1f5fbf", "#c4500a", "#007a5a", "#a3327f", "#7a6400", "#5b48b5", "#0b7a92", "#5a5f66")
_MARKERS = ("o", "s", "^", "D", "x", "+", "v", "|")
_DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)))
_MOST_LABELS = 40


def draw(figure: Figure, file: Path) -> None:
    """One picture."""
    canvas = optional("matplotlib.figure", "plot").Figure(figsize=_size(figure), layout="constrained", dpi=110)
    axes = canvas.add_subplot()
    if isinstance(figure, Lines):
        _lines(figure, axes)
    elif isinstance(figure, Heat):
        _heat(figure, axes, canvas)
    else:
        _bars(figure, axes)
    axes.set_title(figure.title, loc="left", fontsize=11, fontweight="bold")
    canvas.savefig(file)


def _size(figure: Figure) -> tuple[float, float]:
    if isinstance(figure, Lines):
        longest = max((len(series.name) for series in figure.series), default=0)
        return max(8.0, 5.5 + 0.065 * longest), max(4.5, 1 + 0.2 * len(figure.series))  # the legend stands beside the axes
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
        axes.axhline(value, color="#5a5f66", linestyle=":", label=name)
    _axis(axes.xaxis, axes.set_xscale, figure.x)
    _axis(axes.yaxis, axes.set_yscale, figure.y)
    axes.grid(axis="y", color="#e3e6ea")
    axes.spines[["top", "right"]].set_visible(False)
    if figure.series:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)


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
        axes.legend(frameon=False, fontsize=8)


def _axis(axis: Any, set_scale: Any, described: Axis) -> None:
    set_scale(described.scale)
    axis.set_label_text(described.title)
    if described.format != "number":
        axis.set_major_formatter(lambda value, _: text(value, described.format))
        axis.set_minor_formatter(lambda value, _: text(value, described.format) if described.format == "percent" else "")
        axis.set_tick_params(which="both", labelsize=8)

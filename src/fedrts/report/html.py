"""The report as one HTML file that needs nothing else: styles, script and data are inside."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

import fedrts
from fedrts.report.format import cell, number
from fedrts.report.model import Figure, Lines, Report


def render(report: Report) -> str:
    """The file's text."""
    assets = files("fedrts.report") / "assets"
    css, js, page = ((assets / name).read_text("utf-8") for name in ("report.css", "report.js", "report.html.jinja"))
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(page).render(
        report=report,
        version=fedrts.__version__,
        css=Markup(css),
        js=Markup(js),
        figures=Markup(inlined({figure.id: plain(figure) for figure in report.figures})),
        cell=cell,
        number=number,
    )


def inlined(content: object) -> str:
    """JSON that may stand inside a script element: nothing in it can close that."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")


def plain(figure: Figure) -> dict[str, Any]:
    """A figure as JSON, points as short lists, numbers to six digits."""
    content: dict[str, Any] = asdict(figure)
    if isinstance(figure, Lines):
        for entry, series in zip(content["series"], figure.series, strict=True):
            entry["points"] = [[point.x, point.y, point.error, point.runs] for point in series.points]
    rounded: dict[str, Any] = _rounded(content)
    return {key: value for key, value in rounded.items() if key not in ("id", "caption")}


def _rounded(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _rounded(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_rounded(value) for value in content]
    if isinstance(content, float):
        return int(content) if content.is_integer() else float(f"{content:.6g}")
    return content

"""The report as one self-contained HTML file with styles, script and data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

import fedrts
from fedrts.report.format import cell, number
from fedrts.report.model import Folder, Point, Report

_SCRIPTS, _LIVE = ("numbers.js", "draw.js", "page.js"), "live.js"
"""One after the other in one function: later ones use what earlier ones define."""


def render(report: Report, folder: Path = Path(), live: str | None = None) -> str:
    """Return the text of the file for `folder`. `live`: the stamp of a served page, which reloads when the stamp changes.

    `live`: the stamp of a page that lies nowhere, but is renewed by whoever shows it as soon as there is another stamp.
    """
    assets = files("fedrts.report") / "assets"
    names = _SCRIPTS if live is None else (*_SCRIPTS, _LIVE)
    css, page, *scripts = ((assets / name).read_text("utf-8") for name in ("report.css", "report.html.jinja", *names))
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(page).render(
        report=report,
        version=fedrts.__version__,
        css=Markup(css),
        js=Markup('(() => {\n"use strict";\n' + "".join(scripts) + "})();"),
        figures=Markup(inlined({figure.id: plain(figure) for figure in report.figures})),
        cell=cell,
        number=number,
        address=lambda value: value.beside(folder) if isinstance(value, Folder) and live is None else None,
        live=live,
    )


def inlined(content: object) -> str:
    """Encode JSON for a script element, so that nothing in it can close the element."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")


def plain(content: Any) -> Any:
    """Return figures as JSON: points as short lists, numbers to six digits, without unused fields."""
    if isinstance(content, Point):
        return [plain(value) for value in (content.x, content.y, content.error, content.runs)]
    if is_dataclass(content):
        return {field.name: plain(getattr(content, field.name)) for field in fields(content) if field.name not in ("id", "caption")}
    if isinstance(content, Sequence) and not isinstance(content, str):
        return [plain(value) for value in content]
    if isinstance(content, float):
        return int(content) if content.is_integer() else float(f"{content:.6g}")
    return content

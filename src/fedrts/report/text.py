"""The report as CSV and Markdown."""

from __future__ import annotations

import re
from pathlib import Path

from fedrts.files import csv_text
from fedrts.report.format import cell
from fedrts.report.model import Bars, CellValue, Figure, Folder, Heat, Mean, Report, ReportTable

FILES = "report"
"""The folder beside report.html with pictures and CSV files."""


def table_csv(table: ReportTable) -> str:
    """Return plain numbers; a mean takes two columns, the second for its standard error."""
    with_error = [any(isinstance(row[place], Mean) for row in table.rows) for place in range(len(table.columns))]
    head = [
        name
        for column, more in zip(table.columns, with_error, strict=True)
        for name in ([column.title, f"{column.title} ±"] if more else [column.title])
    ]
    rows = [[part for value, more in zip(row, with_error, strict=True) for part in _plain(value, more)] for row in table.rows]
    return csv_text([head, *rows])


def figure_csv(figure: Figure) -> str:
    """Return tidy CSV: one line per value."""
    lines: list[list[CellValue]]
    if isinstance(figure, Heat):
        lines = [
            [name, column, value]
            for name, row in zip(figure.rows, figure.values, strict=True)
            for column, value in zip(figure.columns, row, strict=True)
        ]
        return csv_text([[figure.y.title, figure.x.title, figure.what], *lines])
    if isinstance(figure, Bars):
        head, rows = ["row", "part", figure.x.title], zip(figure.rows, *(values for _, values in figure.parts), strict=True)
        names = [name for name, _ in figure.parts]
        return csv_text([head, *([row, name, value] for row, *values in rows for name, value in zip(names, values, strict=True))])
    lines = [[series.name, point.x, point.y, point.error, point.runs] for series in figure.series for point in series.points]
    lines += [[name, None, value, None, None] for name, value in figure.references]
    return csv_text([["series", figure.x.title, figure.y.title, "standard error", "runs"], *lines])


def markdown(report: Report, pictures: bool, folder: Path = Path()) -> str:
    """Return the whole report for a file in `folder`; `pictures`: with links to the PNG files."""
    lines = [f"# {_escaped(report.title)}", "", report.text, "", "## Failures", ""]
    lines += [f"- {_escaped(line)}" for line in report.problems] or [
        "None: every run is finished, no reply was rejected, nothing was left out."
    ]
    for chapter in report.chapters:
        lines += ["", f"## {_escaped(chapter.title)}", "", _escaped(chapter.text)]
        for section in chapter.sections:
            lines += ["", f"### {section.title}", *(["", section.text] if section.text else [])]
            for item in section.items:
                lines += ["", f"#### {_escaped(item.title)}", "", _escaped(item.caption), ""]
                lines += table_lines(item, folder) if isinstance(item, ReportTable) else _figure_lines(item, pictures)
    return "\n".join(lines) + "\n"


def table_lines(table: ReportTable, folder: Path = Path()) -> list[str]:
    """Return a Markdown table, and the meaning of its columns."""
    sides = ["---" if column.format == "text" else "---:" for column in table.columns]
    rows = [[column.title for column in table.columns], sides]
    notes = [f"*{column.title}*: {column.note}" for column in table.columns if column.note]
    drawn = ["| " + " | ".join(entry if entry in sides else _escaped(entry) for entry in row) + " |" for row in rows]
    for row in table.rows:
        cells = [_linked(value, cell(value, column.format), folder) for value, column in zip(row, table.columns, strict=True)]
        drawn.append("| " + " | ".join(cells) + " |")
    return [*drawn, *(["", "; ".join(notes) + "."] if notes else [])]


def _linked(value: CellValue | Mean, words: str, folder: Path) -> str:
    return f"[{_escaped(words)}]({value.beside(folder)})" if isinstance(value, Folder) else _escaped(words)


def _figure_lines(figure: Figure, pictures: bool) -> list[str]:
    picture = [f"![{figure.title}]({FILES}/{figure.id}.png)", ""] if pictures else []
    return [*picture, f"[numbers]({FILES}/{figure.id}.csv)"]


def _plain(value: CellValue | Mean, with_error: bool) -> list[CellValue]:
    if isinstance(value, Mean):
        return [value.value, value.error]
    return [value, None] if with_error else [value]


def _escaped(words: str) -> str:
    """Escape text so that Markdown leaves it unchanged."""
    return re.sub(r"([\\|\[\]])", r"\\\1", words).replace("<", "&lt;").replace("\n", " ")

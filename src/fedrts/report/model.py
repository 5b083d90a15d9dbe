"""Figures and tables as plain data, from which HTML, PNG, CSV and Markdown are made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Literal
from urllib.parse import quote

Format = Literal["number", "percent", "bytes", "flops", "integer", "seconds"]
CellValue = str | float | int | None


class Folder(str):
    """A cell with the path of a run folder, shown by its name and linked."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return PurePath(self).name or str(self)

    def beside(self, page: Path) -> str:
        """Return the address of the folder in a page that lies in the folder `page`."""
        try:
            return quote(Path(os.path.relpath(self, page)).as_posix()) + "/"
        except ValueError:  # on another drive
            return Path(self).absolute().as_uri() + "/"


@dataclass(frozen=True)
class Axis:
    """One axis of a figure."""

    title: str
    format: Format = "number"
    scale: Literal["linear", "log"] = "linear"
    zero: bool = False
    """Begin at 0."""


@dataclass(frozen=True)
class Point:
    """A mean over runs."""

    x: float
    y: float
    error: float | None = None
    """Standard error over seeds; None of a single run."""
    runs: int = 1


@dataclass(frozen=True)
class Series:
    """A line of points."""

    name: str
    points: Sequence[Point]
    hue: int = 0
    """Chooses colour and marker."""
    dash: int = 0
    """Chooses the dash pattern."""


@dataclass(frozen=True)
class Lines:
    """Curves, with bands or bars of ± one standard error."""

    id: str
    title: str
    caption: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    references: Sequence[tuple[str, float]] = ()
    """Horizontal lines: (name, y)."""
    whiskers: bool = False
    """Errors as bars on points, not as bands."""
    kind: Literal["lines"] = "lines"


@dataclass(frozen=True)
class Heat:
    """A matrix in shades; None marks empty cells."""

    id: str
    title: str
    caption: str
    x: Axis
    y: Axis
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float | None]]
    format: Format = "number"
    what: str = "value"
    """What a shade stands for."""
    low: float | None = 0.0
    high: float | None = None
    """Ends of the shades; None: those of the values."""
    kind: Literal["heat"] = "heat"


@dataclass(frozen=True)
class Bars:
    """One stacked bar per row."""

    id: str
    title: str
    caption: str
    x: Axis
    rows: Sequence[str]
    parts: Sequence[tuple[str, Sequence[float]]]
    """(name, one value a row); a row's bar is their sum."""
    kind: Literal["bars"] = "bars"


Figure = Lines | Heat | Bars


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str
    format: Format | Literal["text"] = "text"
    note: str = ""
    """What it means, in a few words."""


@dataclass(frozen=True)
class Mean:
    """A cell with mean and standard error over seeds."""

    value: float
    error: float | None = None


@dataclass(frozen=True)
class ReportTable:
    """Rows of cells."""

    id: str
    title: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[CellValue | Mean]]
    folded: bool = False
    """Shown on demand: long, and seldom wanted."""


@dataclass(frozen=True)
class Section:
    """A heading with its content."""

    id: str
    title: str
    text: str = ""
    items: Sequence[Figure | ReportTable] = field(default_factory=tuple)


@dataclass(frozen=True)
class Chapter:
    """All sections about one problem."""

    id: str
    title: str
    text: str
    sections: Sequence[Section]


@dataclass(frozen=True)
class Report:
    """The whole report."""

    title: str
    text: str
    problems: Sequence[str]
    """Lines about what failed or was left out."""
    chapters: Sequence[Chapter]

    @property
    def items(self) -> list[Figure | ReportTable]:
        return [item for chapter in self.chapters for section in chapter.sections for item in section.items]

    @property
    def figures(self) -> list[Figure]:
        return [item for item in self.items if not isinstance(item, ReportTable)]

    @property
    def tables(self) -> list[ReportTable]:
        return [item for item in self.items if isinstance(item, ReportTable)]

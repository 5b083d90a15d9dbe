"""Reports of runs: one self-contained HTML file, and the same as PNG, CSV and Markdown."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedrts.report.model import Report


def write(
    folders: Sequence[str | Path],
    out: str | Path | None = None,
    pictures: bool = True,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> tuple[Path, Report]:
    """Report on all runs in and below `folders`; gives the HTML file and what it says.

    `out` is the folder for report.html, report.md and report/*.png, *.csv; default: the folder itself if it is one, else the current one.
    `pictures=False` leaves the PNG files out; `progress(what, done, total)` is told of every figure.
    """
    from fedrts.errors import InputError, note
    from fedrts.files import write_atomically
    from fedrts.report import html, png, text
    from fedrts.report.content import compose
    from fedrts.report.read import find

    paths = [Path(folder) for folder in folders]
    found = find(paths)
    if not found.runs:
        raise InputError("; ".join(found.problems) or "no folders were given")
    report = compose(found)
    target = Path(out) if out is not None else paths[0] if len(paths) == 1 else Path()
    if pictures and importlib.util.find_spec("matplotlib") is None:
        note("no PNG files without matplotlib: pip install 'fedrts[plot]'")
        pictures = False
    try:
        folder = target / text.FILES
        folder.mkdir(parents=True, exist_ok=True)
        for table in report.tables:
            write_atomically(folder / f"{table.id}.csv", text.table_csv(table).encode())
        for done, figure in enumerate(report.figures):
            progress("drawing", done, len(report.figures))
            write_atomically(folder / f"{figure.id}.csv", text.figure_csv(figure).encode())
            if pictures:
                png.draw(figure, folder / f"{figure.id}.png")
        write_atomically(target / "report.md", text.markdown(report, pictures, target).encode())
        write_atomically(target / "report.html", html.render(report, target).encode())
    except OSError as error:
        raise InputError(f"cannot write the report to {target}: {error.strerror}; choose another --out") from error
    return target / "report.html", report

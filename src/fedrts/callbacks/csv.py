"""The history as a CSV table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedrts.callbacks import register
from fedrts.callbacks.contract import Callback, RoundView, RunView
from fedrts.errors import InputError
from fedrts.files import csv_text, explained, write_atomically

FILE = "history.csv"


@register("csv")
class CSV(Callback):
    """Write `history.csv` to the run folder, or to the file `path`: one row per round, lists as their lengths.

    A resumed run writes the file anew from the history, so every round is there once.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = path

    def on_start(self, run: RunView) -> None:
        if self.path is None and run.folder is None:
            raise InputError("give out=…, or CSV(path): there is no run folder to write history.csv to")
        self.file = Path(self.path) if self.path is not None else Path(str(run.folder)) / FILE
        self.rows = [_row(line) for line in run.history]
        self.columns: list[str] = []
        self._write()

    def on_round(self, round: RoundView) -> None:
        row = _row(round.line)
        self.rows.append(row)
        if not row.keys() <= set(self.columns):
            self._write()
            return
        with explained(self.file), open(self.file, "a", encoding="utf-8", newline="") as file:
            file.write(self._text([row]))

    def _write(self) -> None:
        """Write the whole file, with a column for every key of any row."""
        self.columns = list(dict.fromkeys(key for row in self.rows for key in row))
        heading = csv_text([self.columns]) if self.columns else ""
        write_atomically(self.file, (heading + self._text(self.rows)).encode())

    def _text(self, rows: list[dict[str, Any]]) -> str:
        return csv_text([["" if (cell := row.get(column)) is None else cell for column in self.columns] for row in rows])


def _row(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: len(value) if isinstance(value, list) else value for key, value in line.items() if not isinstance(value, Mapping)}

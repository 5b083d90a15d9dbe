"""Print rows of dictionaries as tables, JSON or CSV."""

from __future__ import annotations

import json
from typing import Any


def print_table(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print rows with the same keys as a table or as JSON."""
    if as_json:
        print(json.dumps(rows, indent=2, default=str))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for number, heading in enumerate(rows[0]):
        table.add_column(heading, no_wrap=number == 0)  # a name that is cut off cannot be typed
    for row in rows:
        table.add_row(*(escape(_cell(value)) for value in row.values()))
    Console().print(table)


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={entry}" for key, entry in value.items())
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def print_csv(rows: list[dict[str, Any]]) -> None:
    """Print rows with the same keys as CSV."""
    from fedrts.files import csv_text

    print(csv_text([list(rows[0]), *(list(row.values()) for row in rows)]), end="")

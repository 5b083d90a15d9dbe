"""A picture of which client holds which data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrts.errors import InputError, optional

_LEGEND = 20
"""Labels up to which a legend helps."""


def check_drawable(file: Path) -> None:
    """Raise what prevents drawing to `file`, before anything costly happens."""
    optional("matplotlib", "plot")
    if file.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InputError(f"--out {file} must end in .png, .svg or .pdf")
    if not file.absolute().parent.is_dir():
        raise InputError(f"cannot write {file}: there is no folder {file.parent}")


def draw_clients(clients: Sequence[Mapping[str, Any]], title: str, file: Path) -> None:
    """Draw one bar per client, as long as its sample count, coloured by label; `clients` as in clients.json."""
    figure_kind, colours = optional("matplotlib.figure", "plot").Figure, optional("matplotlib", "plot").colormaps
    figure = figure_kind(figsize=(8, min(1.5 + 0.18 * len(clients), 40)), layout="constrained")
    axes = figure.add_subplot()
    places = [client["client"] for client in clients]
    counts = [client["labels"] or [client["samples"]] for client in clients]
    labels = len(counts[0])
    colour = colours["tab10" if labels <= 10 else "tab20" if labels <= _LEGEND else "turbo"].resampled(labels)
    left = [0] * len(clients)
    for label in range(labels):
        widths = [held[label] for held in counts]
        axes.barh(places, widths, left=left, height=0.9, color=colour(label), label=str(label))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set(title=title, xlabel="samples", ylabel="client", ylim=(len(clients) - 0.5, -0.5))
    if clients[0]["labels"] and labels <= _LEGEND:
        axes.legend(title="label", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}") from error

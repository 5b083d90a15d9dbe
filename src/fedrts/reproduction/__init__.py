"""The paper's tables and figures, one command each: presets that run as comparisons."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrts import config, data
from fedrts.comparison import Comparison, Watcher, make_pool, play_all, watched
from fedrts.comparison.grid import Grid
from fedrts.comparison.play import News
from fedrts.comparison.record import held
from fedrts.comparison.results import csv_of, write_failures
from fedrts.errors import InputError, note, optional
from fedrts.files import write_atomically
from fedrts.reproduction import estimate, preset
from fedrts.reproduction.document import Document, PartOutcome
from fedrts.reproduction.figure import draw
from fedrts.reproduction.preset import Preset, PresetPart, Scale, ScaleName

PRESET_FILE = "preset.toml"


@dataclass(frozen=True)
class Planned:
    """A part with the settings that its data allow."""

    part: PresetPart
    grid: Grid
    data: str
    missing: str
    """Which data set is not there; empty if it is."""


def planned(scale: Scale, data_dir: Path | None) -> list[Planned]:
    """Return the parts of a scale, each with the available data."""
    return [_planned(scale, part, data.home(data_dir)) for part in scale.parts]


def _planned(scale: Scale, part: PresetPart, home: Path) -> Planned:
    settings: Mapping[str, Any] = part.experiment
    if part.instead is not None and _missing(_data_of(scale, settings), home):
        settings = part.instead
    name = _data_of(scale, settings)
    return Planned(part, scale.grid_of(settings), name, _missing(name, home))


def _data_of(scale: Scale, settings: Mapping[str, Any]) -> str:
    return str(config.merged(scale.experiment, settings).get("data", data.DEFAULT))


def _missing(name: str, home: Path) -> str:
    source = data.source(name)
    if source is None or not source.missing(home):
        return ""
    return f"the data set '{name}' is not in {home}: `fedrts data prepare {name}` gets it"


@dataclass(frozen=True)
class Size:
    """The amount of work of a scale."""

    runs: int
    rounds: int
    """Rounds of the longest run."""
    samples: float | None
    """Training samples in all; None where a data set's size is not known beforehand."""


def size_of(scale: Scale) -> Size:
    """Return the size without looking at any data."""
    cells = [cell for part in scale.parts for cell in scale.grid_of(part.experiment).cells()]
    rows = {cell.experiment.data: estimate.known_rows(cell.experiment.data) for cell in cells}
    known = [(cell.experiment, rows[cell.experiment.data]) for cell in cells]
    samples = sum(estimate.samples_of(experiment, count) for experiment, count in known if count is not None)
    return Size(len(cells), max(cell.experiment.rounds for cell in cells), samples if None not in rows.values() else None)


def estimated(chosen: Preset, size: ScaleName, data_dir: Path | None) -> tuple[int, float]:
    """Return how many runs have their data, and their seconds in sequence, by timing a few training steps of each part."""
    parts = playable(chosen.scale(size), data_dir)
    cells = [part.grid.cells() for part in parts if not part.missing]
    return sum(map(len, cells)), sum(estimate.seconds(own, data_dir) for own in cells)


def playable(scale: Scale, data_dir: Path | None) -> list[Planned]:
    """Return the parts of a scale; refuse if the data of all are missing."""
    parts = planned(scale, data_dir)
    if all(part.missing for part in parts):
        raise InputError(f"nothing of it can be run: {parts[0].missing}")
    return parts


def reproduce(
    name: str,
    out: str | Path,
    size: ScaleName = "small",
    *,
    jobs: int | None = 1,
    data_dir: str | Path | None = None,
    watcher: Watcher | None = None,
) -> Document:
    """Run the unfinished part of a preset (from the package or a file), and write results.md, results.csv and its figure."""
    content = preset.text(name)
    chosen = preset.parsed(content, name)
    folder, home = Path(out), None if data_dir is None else Path(data_dir)
    parts = playable(chosen.scale(size), home)
    drawable = _drawable(chosen)
    pool, threads = make_pool([cell for part in parts if not part.missing for cell in part.grid.cells()], jobs)
    with contextlib.ExitStack() as stack:
        stack.enter_context(held(folder, PRESET_FILE, "reproduction"))
        _check_same(chosen, folder)
        if not (folder / PRESET_FILE).exists():
            write_atomically(folder / PRESET_FILE, content.encode())
        comparisons = {
            part.part.name: Comparison(part.grid, folder / part.part.name, home, threads, f"{part.part.name}/")
            for part in parts
            if not part.missing
        }
        for comparison in comparisons.values():
            stack.enter_context(comparison.opened())
        write_atomically(folder / PRESET_FILE, content.encode())  # not before its comparisons are taken for those that are there
        states = {part.part.name: part.missing or (_difference(part.data, home) if size == "paper" else "") for part in parts}
        with watched(watcher) as watching:
            failed = play_all(list(comparisons.values()), pool, watching)
        document = Document(
            name, chosen, size, [_outcome(part, states[part.part.name], comparisons.get(part.part.name), failed) for part in parts], home
        )
        _write(document, folder, drawable)
    return document


def _outcome(part: Planned, state: str, comparison: Comparison | None, failed: Mapping[str, News]) -> PartOutcome:
    compared = None if comparison is None else comparison.compared(failed)
    return PartOutcome(part.part, part.data, state, compared)


def _difference(name: str, home: Path | None) -> str:
    """Return how the available data differ from the release; empty if no difference shows."""
    source = data.source(name)
    if source is None:
        return ""
    found = source.differs(data.load(name, {}, home), data.home(home))
    return "" if found is None else f"{name} has {found}" if " of " in found else f"{name}: {found}"


def _drawable(chosen: Preset) -> bool:
    if not chosen.figure:
        return False
    try:
        optional("matplotlib", "plot")
    except InputError as error:
        note(f"no figure will be drawn: {error}")
        return False
    return True


def _check_same(chosen: Preset, folder: Path) -> None:
    """Refuse a folder in which another preset ran."""
    file = folder / PRESET_FILE
    if file.exists() and preset.load(str(file)).title != chosen.title:
        raise InputError(f"{folder} holds another reproduction (see its {PRESET_FILE}): choose another --out")


def _write(document: Document, folder: Path, drawable: bool) -> None:
    rows = []
    failures: dict[str, News] = {}
    for outcome in document.outcomes:
        if outcome.compared is not None:
            valued = [metric for metric in document.preset.metrics if outcome.compared.has(metric)]
            outcome.compared.write(*valued[:1])
            rows += [{"part": outcome.part.name, **row} for row in outcome.compared.rows]
            failures |= {f"{outcome.part.name}/{name}": news for name, news in outcome.compared.failures.items()}
    write_atomically(folder / "results.csv", csv_of(rows).encode())
    write_atomically(folder / "results.md", document.markdown().encode())
    write_failures(folder, failures)
    if drawable and rows:
        draw(document, folder / "figure.png")

"""The live page beyond the report: progress, participants, rejected replies, and recent events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedrts.audit.lines import parsed
from fedrts.audit.log import FILE as AUDIT
from fedrts.errors import InputError
from fedrts.flower import people, roster
from fedrts.report.content import compose
from fedrts.report.model import Chapter, Column, Report, ReportTable, Section
from fedrts.report.read import Found, Run, find
from fedrts.runs.folder import RunFolder
from fedrts.server.collect import EXCUSED

_RECENT, _TAIL = 30, 2**20
"""Events that are shown, and bytes at the end of an audit log in which they are looked for."""
_QUIET = ("asked", "sent", "received", "hello", "told", "head", "given", "round", "configured")
"""Events of every message and round, which say nothing that the other tables do not."""
_WRITTEN = ("experiment.toml", "history.jsonl", "topology.jsonl", "clients.json", "summary.json", "fairness.json", roster.FILE, AUDIT)


def stamp(folder: Path) -> str:
    """Return a stamp that changes whenever there is something new to show."""
    found = ["running" if RunFolder(folder).is_running else ""]
    for name in _WRITTEN:
        try:
            there = (folder / name).stat()
            found.append(f"{there.st_mtime_ns:x}.{there.st_size:x}")
        except OSError:
            found.append("")
    return "-".join(found)


def live(folder: Path) -> Report:
    """Return the current report of a run folder, preceded by what only a running one has."""
    found = find([folder])
    runs = [run for run in found.runs if Path(run.path) == folder]
    if not runs:
        return Report(folder.name, "", found.problems or [f"{folder} holds no run"], [])
    report = compose(Found(runs, found.problems))
    return Report(report.title, report.text, report.problems, [_now(folder, runs[0]), *report.chapters])


def _now(folder: Path, run: Run) -> Chapter:
    try:
        known = people.of(folder)
    except InputError:  # it is just being written
        known = roster.Roster(0)
    tables = [table for table in (_people(folder, known), _missing(run, known), _events(folder)) if table is not None]
    sections = [Section("now-federation", "Federation", "", tables)] if tables else []
    return Chapter("now", f"Now: {run.state}", _how_far(folder, run), sections)


def _how_far(folder: Path, run: Run) -> str:
    ended = ""
    if run.history:
        at = datetime.fromtimestamp((folder / "history.jsonl").stat().st_mtime, UTC)
        ended = f"; the last one ended at {at:%Y-%m-%d %H:%M:%S} UTC"
    return f"{run.played} of {run.settings['rounds']} rounds are finished{ended}."


def _people(folder: Path, known: roster.Roster) -> ReportTable | None:
    if not known.entries:
        return None
    titles = ("client", "name", "key", "samples", "since", "state")
    rows = [[row[title] for title in titles] for row in people.rows(folder, known)]
    columns = [Column(title, "integer" if title == "samples" else "text") for title in titles]
    return ReportTable("people", "Clients", "Clients that have connected, and the state of each.", columns, rows)


def _missing(run: Run, known: roster.Roster) -> ReportTable | None:
    """Return a row for every client and reason."""
    rounds: dict[tuple[int, str], list[int]] = {}
    for line in run.history:
        for entry in line["rejected"]:
            rounds.setdefault((entry["client"], str(entry["reason"])), []).append(line["round"])
    if not rounds:
        return None
    rows: list[list[Any]] = [
        [known.called(client), "missing" if reason in EXCUSED else "rejected", reason, len(which), which[-1]]
        for (client, reason), which in sorted(rounds.items(), key=lambda item: -item[1][-1])
    ]
    columns = [Column("client"), Column("what"), Column("why"), Column("times", "integer"), Column("last round", "integer")]
    caption = "Replies that do not count, and clients that were missing from rounds; newest first."
    return ReportTable("missing", "Rejected and missing", caption, columns, rows[: 10 * _RECENT])


def _events(folder: Path) -> ReportTable | None:
    found = list(_recorded(folder / AUDIT))[-_RECENT:]
    if not found:
        return None
    rows = [[line["at"][:19].replace("T", " "), line["event"], _words(line)] for line in reversed(found)]
    caption = f"The last {_RECENT} entries of {AUDIT} other than messages: who connected, left or was refused, and why. Times are UTC."
    return ReportTable("record", "Events", caption, [Column("at"), Column("event"), Column("what")], rows)


def _recorded(file: Path) -> Iterator[dict[str, Any]]:
    """Return events near the end of an audit log, complete lines only."""
    try:
        with open(file, "rb") as log:
            log.seek(0, 2)
            log.seek(start := max(0, log.tell() - _TAIL))
            lines = log.read(_TAIL).split(b"\n")[start > 0 : -1]
    except OSError:
        return
    for text in lines:
        content = parsed(text)
        if content is not None and content["event"] not in _QUIET:
            yield content


def _words(line: dict[str, Any]) -> str:
    facts = {key: value for key, value in line.items() if key not in ("line", "at", "event", "before", "hash")}
    return "; ".join(f"{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in facts.items())

"""The table that `fedrts roster` shows for a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedrts.flower.roster import FILE, HERE, Member, Roster
from fedrts.runs.folder import RunFolder
from fedrts.server.collect import LATE, LATE_AGAIN, REMOVED, WITHDRAWN

__all__ = ["REMOVED", "consequence", "of", "rows"]


def of(path: Path) -> Roster:
    """Return the roster of a run folder."""
    RunFolder(path).experiment_file()
    return Roster(0, path / FILE)


def rows(path: Path, roster: Roster) -> list[dict[str, Any]]:
    """Return a row for every client that has introduced itself."""
    runs, last = RunFolder(path).is_running, _last_words(path)
    return [
        {
            "client": str(client),
            "name": entry.name,
            "key": entry.key,
            "samples": entry.samples,
            "since": entry.since,
            "state": _state(entry, runs, last.get(client)),
        }
        for client, entry in sorted(roster.entries.items())
    ]


def _state(entry: Member, runs: bool, last: tuple[int, str] | None) -> str:
    """Describe where a client is; `last`: the last round that missed it, and why, if no later one had it."""
    if entry.left:
        return f"{entry.state} since round {last[0]}" if last and last[1] == entry.state else f"{entry.state} since {entry.at}"
    if not runs:
        return "the server is stopped"
    if entry.state != HERE:
        return f"{entry.state} since {entry.at}" if entry.state else "not here"
    words = {LATE: "late", LATE_AGAIN: "late again and again, asked less often"}
    return f"{HERE}, {words[last[1]]} in round {last[0]}" if last and last[1] in words else HERE


def _last_words(path: Path) -> dict[int, tuple[int, str]]:
    """Return by client the last round without it, and why; for departed clients, the round from which on."""
    found: dict[int, tuple[int, str]] = {}
    for line in RunFolder(path).history():
        for client in line["clients"]:
            found.pop(client, None)
        for entry in line["rejected"]:
            if found.get(entry["client"], (0, ""))[1] not in (WITHDRAWN, REMOVED):
                found[entry["client"]] = (line["round"], entry["reason"])
    return found


def consequence(path: Path) -> str:
    """Describe what removing a client means at this point."""
    if RunFolder(path).begun:
        return "the study goes on without it; only a node with the same data may take its number"
    return "its number is free for another node"

"""Units that lost all their links or are cancelled on them, and the clients that worked against them, from a run's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedrts.client.order import called

Log = Sequence[Mapping[str, Any]]
_WORDS = {"cancelled": "cancelled in the mean", "not_kept": "most links not kept"}
_MOST = 20
"""Clients that a line names."""


def lost_units(topology: Log, history: Log) -> list[str]:
    """Return a line for every outer round in which units lost all inputs or outputs, with the clients that worked against them.

    And one for the run if clients cancel units that keep their links, and so do nothing all the same.
    """
    present = {line["round"]: line["clients"] for line in history}
    found = []
    for line in topology:
        lost = line.get("cut_off") or {}
        parts = [f"{count} of {layer} lost all {side}" for layer, sides in lost.items() for side, count in sides.items() if count]
        if parts:
            told = f"units lost their links in round {line['round']}: {', '.join(parts)}"
            found.append(f"{told}; {_who(line, present.get(line['round'], []))}")
    return found + _silenced(topology)


def _silenced(topology: Log) -> list[str]:
    """Return a line about units that keep links on which they are cancelled, with the largest number of each client."""
    lines = [line for line in topology if line.get("silenced")]
    most: dict[str, int] = {}
    for line in lines:
        for client, count in line["silenced"].items():
            most[client] = max(count, most.get(client, 0))
    if not lines:
        return []
    first, last = lines[0]["round"], lines[-1]["round"]
    when = f"in round {last}" if first == last else f"in {len(lines)} outer rounds from {first} to {last}"
    ranked = dict(sorted(most.items(), key=lambda entry: (-entry[1], int(entry[0]))))
    return [f"units that keep their links were cancelled in the mean {when}: by {_named(ranked)}"]


def _who(line: Mapping[str, Any], present: Sequence[int]) -> str:
    """Return who worked against these units in the round, with the number of units; older folders know only who took part."""
    if "against" not in line:
        return f"{called(present)} took part" if present else "nobody known took part"
    if line["against"] is None:
        return "secure sums do not tell by whom"
    told = [f"{words} by {_named(line['against'][what])}" for what, words in _WORDS.items() if line["against"].get(what)]
    return "; ".join(told) or "by nobody in particular"


def _named(counts: Mapping[str, int]) -> str:
    named = [f"{client} ({count})" for client, count in counts.items()]
    return f"client{'s' if len(named) > 1 else ''} {', '.join(named[:_MOST])}{', …' if len(named) > _MOST else ''}"

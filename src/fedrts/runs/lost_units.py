"""What a run's files say of units that lost all their links, and of who took part when they did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedrts.client.order import called

Log = Sequence[Mapping[str, Any]]


def lost_units(topology: Log, history: Log) -> list[str]:
    """A line for every outer round in which units lost all inputs or outputs, with the clients whose replies and votes counted in it."""
    voters = {line["round"]: line["clients"] for line in history}
    found = []
    for line in topology:
        lost = line.get("cut_off") or {}
        parts = [f"{count} of {layer} lost all {side}" for layer, sides in lost.items() for side, count in sides.items() if count]
        if parts:
            who = called(voters[line["round"]]) if voters.get(line["round"]) else "nobody known"
            found.append(f"units lost their links in round {line['round']}: {', '.join(parts)}; {who} voted")
    return found

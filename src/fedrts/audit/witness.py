"""Witnesses of what happens between a server and its nodes: an audit log, metrics, or nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fedrts import logs
from fedrts.audit.lines import Seal

Trace = list[int | str]
"""How long some bytes are, and their SHA-256."""


class Witness:
    """A witness receives events by name, with facts as JSON, and changes nothing. This one ignores them."""

    def __call__(self, event: str, **facts: Any) -> None:
        """Record that something happened."""

    def heard(self, head: object, **whose: Any) -> None:
        """Receive the other side's head, the proof of its own log."""

    def seal(self, always: bool = False) -> None:
        """Sign everything so far; called at suitable moments."""

    def succeeded(self, seal: Seal) -> None:
        """From now on this key signs, in the place of the one before."""

    @property
    def head(self) -> str:
        """Return the proof of everything so far that the other side may keep; empty if there is none."""
        return ""


class Details(Witness):
    """Print every event, for those who want to see all details."""

    def __call__(self, event: str, **facts: Any) -> None:
        if logs.tells(logs.LogLevel.debug):
            logs.tell(logs.debug("audit", f"{event}: {json.dumps(facts, default=str)}", entry=event, **facts))


class Witnesses(Witness):
    """Several witnesses, told one after the other; the head is the first that any of them has."""

    def __init__(self, *witnesses: Witness) -> None:
        self.witnesses = witnesses

    def __call__(self, event: str, **facts: Any) -> None:
        for witness in self.witnesses:
            witness(event, **facts)

    def heard(self, head: object, **whose: Any) -> None:
        for witness in self.witnesses:
            witness.heard(head, **whose)

    def seal(self, always: bool = False) -> None:
        for witness in self.witnesses:
            witness.seal(always)

    def succeeded(self, seal: Seal) -> None:
        for witness in self.witnesses:
            witness.succeeded(seal)

    @property
    def head(self) -> str:
        return next((head for witness in self.witnesses if (head := witness.head)), "")


def entry(data: bytes) -> Trace:
    """Return the record of a message: nothing of its content can be read from it, and no other message has it."""
    return [len(data), hashlib.sha256(data).hexdigest()]


def entries(blobs: Mapping[int, bytes]) -> dict[str, Trace]:
    """Return the records of messages by client."""
    return {str(client): entry(data) for client, data in blobs.items()}


def facts_entry(facts: Mapping[str, Any]) -> Trace:
    """Return the record of facts, which both sides write in the same way."""
    return entry(json.dumps(facts, sort_keys=True, default=str).encode())

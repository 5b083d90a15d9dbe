"""Witnesses are told what happens between a server and its nodes: an audit log, metrics, or nobody."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fedrts.audit.lines import Seal

Trace = list[int | str]
"""How long some bytes are, and their SHA-256."""


class Witness:
    """Told of events by name, with facts that JSON can say; it changes nothing. This one forgets."""

    def __call__(self, event: str, **facts: Any) -> None:
        """Something happened."""

    def heard(self, head: object, **whose: Any) -> None:
        """The other side gave what it has as proof of its own log."""

    def seal(self, always: bool = False) -> None:
        """This is a good moment to vouch for everything so far."""

    def succeeded(self, seal: Seal) -> None:
        """From now on this key signs, in the place of the one before."""

    @property
    def head(self) -> str:
        """What the other side may keep as proof of everything so far; empty if there is nothing of the kind."""
        return ""


class Witnesses(Witness):
    """Several, told one after the other; the head is that of the first which has one."""

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
    """What is kept of a message: nothing of its content can be read from it, and no other message has it."""
    return [len(data), hashlib.sha256(data).hexdigest()]


def entries(blobs: Mapping[int, bytes]) -> dict[str, Trace]:
    """The same of messages by client."""
    return {str(client): entry(data) for client, data in blobs.items()}


def facts_entry(facts: Mapping[str, Any]) -> Trace:
    """The same of facts, which both sides write alike."""
    return entry(json.dumps(facts, sort_keys=True, default=str).encode())

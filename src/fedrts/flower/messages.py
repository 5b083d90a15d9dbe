"""Our bytes in Flower's messages, and replies read under limits that apply before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedrts.flower import inside
from fedrts.flower.inside import ObjectPullError, ObjectTree, ObjectUnavailableError, inflate_object_from_contents
from fedrts.wire.errors import WireError

SUM = "sum"
"""The fact that names a step of a secure sum."""
HEAD = "head"
"""The fact that gives the head of the sender's audit log to the other side."""
_BLOBS, _FACTS = "blobs", "facts"
_PIECE = 2**20
"""Flower's pieces of an array are five times as long; this bounds their number."""

Facts = Mapping[str, Any]
"""Strings, numbers and lists of them."""


def content(facts: Facts, blobs: Mapping[int, bytes] | None = None) -> RecordDict:
    """Return what a message carries: a few facts, and encoded messages by client."""
    arrays = {str(client): Array("uint8", (len(data),), "fedrts", data) for client, data in (blobs or {}).items()}
    return RecordDict({_FACTS: ConfigRecord(dict(facts)), _BLOBS: ArrayRecord(arrays)})


def memory_facts(names: Mapping[int, int]) -> dict[str, list[int]]:
    """Return names of memories by client: from the node, after an upload; from the server, of the last upload that counted."""
    return {"remembering": list(names), "memories": list(names.values())} if names else {}


def named_memories(facts: Facts) -> dict[int, int]:
    """Parse the names, ignoring everything that is not a number."""
    return dict(zip(numbers(facts.get("remembering")), numbers(facts.get("memories")), strict=False))


def numbers(value: object) -> list[int]:
    """Parse the whole numbers of what should be a list of them."""
    return [number for number in value if isinstance(number, int)] if isinstance(value, list) else []


def opened(message: Message) -> tuple[dict[str, Any], dict[int, bytes]]:
    """Return facts and blobs of a message; a `WireError` if it is not one of ours."""
    try:
        records = message.content
        facts, arrays = records.config_records[_FACTS], records.array_records[_BLOBS]
        return dict(facts), {int(name): array.data for name, array in arrays.items()}
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise WireError(f"this is no fedrts message: {error}") from error


@dataclass
class Incoming:
    """A message whose pieces are still arriving; it never holds more than `limit` bytes."""

    message_id: str
    tree: ObjectTree
    limit: int
    contents: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.missing: list[str] = []
        most = 64 + self.limit // _PIECE
        for node in inside.iterate_object_tree(self.tree):
            self.missing.append(node.object_id)
            if len(self.missing) > most:
                raise WireError(f"a message in more than {most} pieces")

    def advance(self, pull: Callable[[str], bytes]) -> bool:
        """Receive the pieces that have arrived; return whether the message is complete."""
        while self.missing:
            try:
                piece = pull(self.missing[-1])
            except ObjectUnavailableError:
                return False
            except ObjectPullError as error:
                raise WireError("a part of the message was never sent") from error
            self._fits(sum(map(len, self.contents.values())) + len(piece))
            self.contents[self.missing.pop()] = piece
        return True

    def message(self) -> Message:
        """Build the message from all pieces; a `WireError` if they do not form one."""
        try:
            self._fits(sum(map(self._unpacked, self.contents.values())))
            message = inflate_object_from_contents(self.message_id, self.contents)
        except WireError:
            raise
        except Exception as error:  # whatever a stranger's bytes do to the parser
            raise WireError(f"the message cannot be read: {str(error)[:200]}") from error
        if not isinstance(message, Message):
            raise WireError("this is no message")
        return message

    def _unpacked(self, piece: bytes) -> int:
        """Return the bytes of an array that names pieces, some perhaps many times; 0 for anything else."""
        kind, children, _ = inside.get_object_head_values_from_object_content(piece)
        if kind != Array.__qualname__:
            return 0
        named = json.loads(inside.get_object_body(piece, Array))["arraychunk_ids"]
        return sum(len(self.contents[children[index]]) for index in named)

    def _fits(self, size: int) -> None:
        if size > self.limit:
            raise WireError(f"a message of more than {self.limit:,} bytes, which is the most that was asked for")

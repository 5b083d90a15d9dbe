"""The lines of an audit log: numbered JSON, each with the hash of the line before and, at its end, its own hash.

    {"line":7,"at":"…","event":"sent",…,"before":"<hash of line 6>","hash":"<SHA-256 of all before this key>"}

Every `head` line is a signature under everything before it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FIRST = "0" * 64
"""What stands for the line before the first."""
HEAD = "head"
"""The event of a line that signs what is before it."""
SUCCEEDED = "key succeeded"
"""The event of a line that says that another key signs the log from now on."""
_ENDED = re.compile(rb'(\{"line":.*),"hash":"([0-9a-f]{64})"\}', re.DOTALL)


@dataclass(frozen=True)
class Seal:
    """The key that signs a log."""

    key: str
    """Names the key."""
    sign: Callable[[bytes], bytes]


@dataclass(frozen=True)
class Head:
    """The last line of a log at some time, signed if there was a key. Whoever holds it can check whether the log has changed since."""

    line: int
    hash: str
    key: str = ""
    signature: str = ""
    """Base64; empty without a key."""

    @staticmethod
    def signed(line: int, hash: str, seal: Seal | None) -> Head:
        if seal is None:
            return Head(line, hash)
        return Head(line, hash, seal.key, base64.b64encode(seal.sign(_meant(line, hash))).decode())

    @staticmethod
    def parsed(content: object) -> Head | None:
        """Parse JSON or its text; None if it is not a head."""
        try:
            known = json.loads(content) if isinstance(content, str | bytes) else content
            head = Head(**known if isinstance(known, dict) else {})
            int(head.hash, 16)
            base64.b64decode(head.signature, validate=True)
            well = type(head.line) is int and type(head.key) is str and len(head.key) <= 64 and len(head.hash) == 64
        except (ValueError, TypeError, RecursionError, binascii.Error):
            return None
        return head if well else None

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    def is_signed(self, public_key: bytes) -> bool:
        """Whether the owner of this public key (PEM) signed it."""
        from fedrts.secure.identity import is_signed

        return is_signed(public_key, base64.b64decode(self.signature), _meant(self.line, self.hash))


def _meant(line: int, hash: str) -> bytes:
    """The bytes that a signature covers; they cannot be confused with those of another kind of message."""
    return f"fedrts audit head: line {line} is {hash}".encode()


def written(line: int, at: str, event: str, facts: Mapping[str, Any], before: str) -> tuple[bytes, str]:
    """Return a line, with its line end, and its hash."""
    content = json.dumps({"line": line, "at": at, "event": event, **facts, "before": before}, separators=(",", ":"))
    body = content.encode()[:-1]
    found = hashlib.sha256(body).hexdigest()
    return body + f',"hash":"{found}"}}\n'.encode(), found


def parsed(text: bytes) -> dict[str, Any] | None:
    """Parse a line without its end; None if it is not a valid line."""
    found = _ENDED.fullmatch(text)
    if found is None or hashlib.sha256(found[1]).hexdigest().encode() != found[2]:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(content, dict) and type(content.get("line")) is int and isinstance(content.get("event"), str)
    return content if whole and isinstance(content.get("before"), str) else None


def head_file(log: Path) -> Path:
    """Return the path of the file beside a log that holds its last head."""
    return log.with_suffix(".head")

"""Writing an audit log, append-only."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import fedrts
from fedrts.audit.check import AuditError, Checked, chained, checked
from fedrts.audit.lines import HEAD, SUCCEEDED, Head, Seal, head_file, written
from fedrts.audit.witness import Witness
from fedrts.errors import InputError
from fedrts.files import explained, require_known, write_atomically

FILE = "audit.jsonl"
FORMAT = 1
SIGNED = 5.0
"""Seconds after which a checkpoint of the log is worth another signature."""
CONFIGURED = "configured"
"""The event that tells all settings; only what has changed of them is written."""


class AuditLog(Witness):
    """The log of a server, or of a node. Its file is opened with the first event.

    One process at a time writes to it: the lock of the run folder, or of the site's folder, sees to that.
    """

    def __init__(self, file: Path, role: str, seal: Seal | None = None, say: Callable[[str], None] = lambda text: None) -> None:
        self.file, self.role, self.signing, self.say = file, role, seal, say
        self._log: IO[bytes] | None = None
        self._found = Checked(file)
        self._last: Head | None = None
        self._sealed = float("-inf")
        self._settings: dict[str, Any] | None = None
        self._theirs: dict[str, str] = {}
        self._turn = threading.RLock()
        """Who was refused at the door is told by another thread."""

    def __call__(self, event: str, **facts: Any) -> None:
        """Write a line. It has reached the operating system when this returns, so it survives any end of this process."""
        with self._turn:
            self._opened()
            if event == CONFIGURED:
                facts = self._changed(facts["settings"])
            if facts or event != CONFIGURED:
                self._append(event, facts)

    @property
    def head(self) -> str:
        return "" if self._last is None else self._last.text

    def heard(self, head: object, **whose: Any) -> None:
        """Record the other side's head if it differs from the last one."""
        name = str(whose.get("key", ""))
        if isinstance(head, str) and head and self._theirs.get(name) != head and (known := Head.parsed(head)) is not None:
            self._theirs[name] = head
            self("given", **whose, head=vars(known))

    def _changed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings to write: all of them the first time, later only those that changed."""
        before, now = self._settings, dict(settings)
        self._settings = now
        if before is None:
            return {"settings": now}
        changed = {key: [before.get(key), now.get(key)] for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
        return {"changed": dict(sorted(changed.items()))} if changed else {}

    def seal(self, always: bool = False) -> None:
        """Sign everything so far and sync it to disk, at most once every few seconds."""
        with self._turn:
            if self._log is None or (not always and time.monotonic() - self._sealed < SIGNED):
                return
            self._sealed = time.monotonic()
            head = Head.signed(self._found.lines, self._found.hash, self.signing)
            self._append(HEAD, {"of": vars(head)})
            with explained(self.file):
                os.fsync(self._log.fileno())
            write_atomically(head_file(self.file), head.text.encode() + b"\n")
            self._last = head

    def succeeded(self, seal: Seal) -> None:
        """Another key signs from now on; the one before vouches for that."""
        with self._turn:
            self._opened()
            before = {} if self.signing is None else {"before_key": self.signing.key}
            self._append(SUCCEEDED, {"key": seal.key, **before})
            self.seal(always=True)
            self.signing = seal
            self.seal(always=True)

    def close(self) -> None:
        """Sign the last line and close the log."""
        with self._turn, contextlib.ExitStack() as stack:
            if self._log is not None:
                stack.enter_context(self._log)
                self.seal(always=True)
                self._log = None

    def _opened(self) -> None:
        """Continue at the end of the file; cut off a half-written last line and report it."""
        if self._log is not None:
            return
        found = Checked(self.file)
        self._settings = None
        if self.file.exists():
            try:
                checked(self.file)
                for content in chained(self.file, found):
                    require_known(content.get("format"), FORMAT, self.file)
                    if content["event"] == CONFIGURED:
                        self._settings = _settings_after(self._settings, content)
            except AuditError as error:
                raise InputError(
                    f"{error}. Keep it as it is and move it away, with {head_file(self.file).name}: then a new log begins"
                ) from error
        self._found = found
        with explained(self.file):
            self._log = open(self.file, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115
            if found.torn:
                self._log.truncate(found.whole)
        key = {} if self.signing is None else {"key": self.signing.key}
        self._append("began", {"format": FORMAT, "role": self.role, "fedrts": fedrts.__version__, **key})
        if found.torn:
            self.say(f"the last line of {self.file} was not written to its end: it is cut off")
            self._append("healed", {"bytes": found.torn})
        self.seal(always=True)

    def _append(self, event: str, facts: Mapping[str, Any]) -> None:
        assert self._log is not None
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        text, hash = written(self._found.lines + 1, at, event, facts, self._found.hash)
        with explained(self.file):
            self._log.write(text)
            self._log.flush()
        self._found.lines, self._found.hash = self._found.lines + 1, hash


def _settings_after(settings: dict[str, Any] | None, content: Mapping[str, Any]) -> dict[str, Any]:
    """Apply a line that states settings, or changes of them."""
    if "settings" in content:
        return dict(content["settings"])
    now = {**(settings or {}), **{key: value[1] for key, value in content.get("changed", {}).items()}}
    return {key: value for key, value in now.items() if value is not None}

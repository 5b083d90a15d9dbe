"""The clients of a federation by number, as they first introduced themselves: `roster.json` in the run folder.

The server and `fedrts roster` both write it. Whoever changes it holds its lock and reads it first, so that neither undoes what
the other did; the server looks every second whether it was changed.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from fedrts.errors import InputError, printable
from fedrts.files import write_atomically
from fedrts.server.collect import REMOVED, WITHDRAWN

FILE = "roster.json"
HERE, GONE = "here", "gone"
_LONGEST_NAME = 64


@dataclass(frozen=True)
class Member:
    """What is known about a client from its first introduction on."""

    samples: int
    data: str
    """Fingerprint of its data."""
    key: str
    """Fingerprint of its node's public key: nobody else may stand for this client."""
    name: str = ""
    since: str = ""
    """When it was first admitted."""
    state: str = ""
    """here, gone, withdrawn or removed."""
    at: str = ""
    """Since when it is in this state."""
    held_out: int = 0
    """Samples on which a site judges the global model."""
    statistics: tuple[float, ...] = ()
    """What a site's inputs are like, see `normalisation`; empty: it does not tell."""
    channels: int = 0
    """Channels of whose images a site tells what they are like in a secure sum."""
    barred: tuple[str, ...] = ()
    """Fingerprints of keys that stood for it and may take part no more."""

    @property
    def left(self) -> bool:
        """Whether it no longer takes part."""
        return self.state in (WITHDRAWN, REMOVED)

    @property
    def holds(self) -> tuple[int, str]:
        """A fingerprint of its data, by which it is recognised."""
        return self.samples, self.data


_ENTRIES = TypeAdapter(dict[int, Member])


@dataclass
class Roster:
    """Which node runs which client; without a `file` it is lost with the process."""

    total: int
    file: Path | None = None
    keyed: bool = True
    """Do keys outlast a node's restart? Without registered keys they do not."""
    fixed: bool = False
    """Has the study begun? Then a number's data stays what it was."""
    entries: dict[int, Member] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._seen: tuple[int, int, int] | None = None
        self._depth = 0
        self.refresh()

    def refresh(self) -> None:
        """Read the file again if somebody changed it."""
        if self.file is None or (now := _stamp(self.file)) is None or now == self._seen:
            return
        try:
            self.entries = _ENTRIES.validate_json(self.file.read_bytes(), strict=True)
        except (ValidationError, OSError) as error:
            what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
            raise InputError(f"{self.file} is damaged: {what}; restore it from a backup") from error
        self._seen = now

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Change entries: the block's changes are written together at its end, or not at all."""
        if self._depth or self.file is None:
            with self._or_nothing():
                yield
            return
        with _locked(self.file.with_name(f".{self.file.name}.lock")), self._or_nothing():
            self.refresh()
            before = dict(self.entries)
            yield
            if self.entries != before:
                text = json.dumps({str(client): asdict(self.entries[client]) for client in sorted(self.entries)}, indent=2)
                write_atomically(self.file, text.encode())
                self._seen = _stamp(self.file)

    @contextlib.contextmanager
    def _or_nothing(self) -> Iterator[None]:
        before = dict(self.entries)
        self._depth += 1
        try:
            yield
        except BaseException:
            self.entries = before
            raise
        finally:
            self._depth -= 1

    def admit(self, client: int | None, entry: Member, preferred: int | None = None, reserved: Collection[int] = ()) -> int:
        """The number of a client that introduces itself; an `InputError` says why it is not admitted.

        A site (`client` None) gets the number it had, else the `preferred` one, else the first free one that is not `reserved`.
        """
        with self.changing():
            if any(entry.key in known.barred for known in self.entries.values()):
                again = "only the coordinator can let it in again, with `fedrts roster RUN_DIR readmit CLIENT`"
                raise InputError(f"the node with key {entry.key} withdrew or was removed: {again}")
            if client is None:
                client = self._number(entry, preferred, reserved)
            known = self.entries.get(client)
            barred = known.barred if known is not None else ()
            if known is not None and known.left:
                if self.fixed and known.holds != entry.holds:
                    raise InputError(f"client {client} is {known.state}: once a study has begun only the same data may take its place")
                known = None
            if known is not None:
                if self.keyed and known.key != entry.key:
                    raise InputError(f"client {client} belongs to the node with key {known.key}")
                if known.holds != entry.holds:
                    raise InputError(f"client {client} has {entry.samples} samples of other data than before ({known.samples})")
            base = known or replace(entry, since=_now(), barred=barred)
            mind = {name: getattr(entry, name) for name in ("held_out", "statistics", "channels")}  # which a site may change
            now = replace(base, **mind)
            self.entries[client] = replace(now, key=entry.key, name=base.name or entry.name, state=HERE, at=_now())
            return client

    def _number(self, entry: Member, preferred: int | None, reserved: Collection[int]) -> int:
        for number, known in self.entries.items():
            if not known.left and (known.key == entry.key or (not self.keyed and known.holds == entry.holds)):
                return number
        free = [number for number in range(self.total) if self._is_free(number, entry)]
        if preferred in free:
            return preferred
        if not (free := [number for number in free if number not in reserved]):
            raise InputError(f"all {self.total} sites of the experiment are known, and this is none of them")
        return free[0]

    def _is_free(self, number: int, entry: Member) -> bool:
        known = self.entries.get(number)
        return known is None or (known.left and (not self.fixed or known.holds == entry.holds))

    @property
    def vacant(self) -> list[int]:
        """Numbers without which a study cannot begin."""
        return [n for n in range(self.total) if n not in self.entries or (self.entries[n].left and not self.fixed)]

    @property
    def departed(self) -> dict[int, str]:
        """Clients that no longer take part, with their state."""
        return {client: entry.state for client, entry in self.entries.items() if entry.left}

    def note(self, clients: Collection[int], state: str) -> None:
        """Record that they came or went."""
        with self.changing():
            for client in clients:
                entry = self.entries.get(client)
                if entry is not None and not entry.left and entry.state != state:
                    self.entries[client] = replace(entry, state=state, at=_now())

    def leave(self, client: int, state: str) -> Member:
        """Remove a client and its key."""
        with self.changing():
            entry = self.known(client)
            if not entry.left:
                entry = replace(entry, state=state, at=_now(), barred=(*entry.barred, entry.key))
                self.entries[client] = entry
            return entry

    def readmit(self, client: int) -> None:
        """Readmit a client that withdrew or was removed."""
        with self.changing():
            entry = self.known(client)
            entry = replace(entry, state=GONE, at=_now()) if entry.left else entry
            self.entries[client] = replace(entry, barred=())

    def follow(self, former: Collection[str], key: str) -> None:
        """A node's key has replaced these: what was theirs is its own, being barred too."""
        with self.changing():
            for client, entry in self.entries.items():
                barred = (*entry.barred, key) if set(entry.barred) & set(former) and key not in entry.barred else entry.barred
                self.entries[client] = replace(entry, key=key if entry.key in former else entry.key, barred=barred)

    def rename(self, client: int, name: str) -> None:
        if not name or printable(name, _LONGEST_NAME) != name:
            raise InputError(f"{name!r} is no name: give up to {_LONGEST_NAME} printable characters")
        with self.changing():
            self.entries[client] = replace(self.known(client), name=name)

    def known(self, client: int) -> Member:
        """Return the entry of a client that has introduced itself."""
        if client not in self.entries:
            raise InputError(f"no client {client} has introduced itself; known: {', '.join(map(str, sorted(self.entries))) or 'none'}")
        return self.entries[client]

    def called(self, client: int) -> str:
        """`client 3 (clinic-a)`."""
        entry = self.entries.get(client)
        return f"client {client} ({entry.name})" if entry is not None and entry.name else f"client {client}"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """Return an identity of a file's version; None if there is no file."""
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock; others wait for it."""
    try:
        file = open(path, "ab")  # noqa: SIM115
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
    with file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except ImportError:  # not on Windows: two who change the roster at once are then the user's care
            pass
        yield

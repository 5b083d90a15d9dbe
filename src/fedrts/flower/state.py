"""What a site remembers between starts: its secret, accepted experiments, the privacy spent, and its clients' memories.

    records = Records.of(Path("clinic-a.site"))
    records.accept(digest)                       # accepted.json
    records.spend(digest, 0, now)                # privacy.json, on disk before anything leaves
    records.memories.keep(0, 12, left)           # memory/, with error feedback
    records.open(digest, 0, 12)                  # openings.json, with secure sums: on disk before a share is revealed

One folder belongs to one process at a time. Without a folder everything is forgotten at the end.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import secrets
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import IO, Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedrts.client.order import fingerprint
from fedrts.client.privacy import Account
from fedrts.errors import InputError
from fedrts.files import require_known, write_privately
from fedrts.flower.memory import Memories, Shelf
from fedrts.runs.folder import lock
from fedrts.secure.call import UPDATE

FORMAT = 1
"""Format of a site's folder; raised where earlier versions could not read it any more."""
_SECRET = 32
"""Bytes of the secret."""
_NAME = 15
"""Hexadecimal digits of a memory's name: it fits in a number of 64 bits."""
_OPENINGS = "openings.json"
_FORMAT = "format"
_TRY_AGAIN = 0.1
_ANEW = "a new folder means a new site, which has spent no privacy"

Content = TypeVar("Content", bound=BaseModel)
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
"""None: without bound."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Spent(_Part):
    """An `Account` on disk."""

    square: Amount = 0.0
    indices: Amount = 0.0

    @staticmethod
    def of(account: Account) -> _Spent:
        square, indices = (amount if math.isfinite(amount) else None for amount in (account.square, account.indices))
        return _Spent(square=square, indices=indices)

    def account(self) -> Account:
        return Account(*(math.inf if amount is None else amount for amount in (self.square, self.indices)))


class _Privacy(_Part):
    """privacy.json: the cost of everything that has left this site."""

    before: _Spent = Field(default_factory=_Spent)
    """In experiments before this one, whose clients may have held the same data under other numbers."""
    experiment: str | None = None
    sent: dict[int, _Spent] = Field(default_factory=dict)
    """In this one, by client."""


class _Accepted(_Part):
    """accepted.json: the experiments that the owner accepted, by digest and time."""

    accepted: dict[str, str] = Field(default_factory=dict)
    in_force: str | None = None


class _Openings(_Part):
    """openings.json: the last round whose secure sum each client helped to open, by experiment or by experiment and kind of sum."""

    opened: dict[str, dict[int, int]] = Field(default_factory=dict)


@dataclass
class Records:
    """The records of one site."""

    path: Path | None = None
    """Its folder; None: nothing outlasts the process."""
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(_SECRET))
    privacy: _Privacy = field(default_factory=_Privacy)
    consent: _Accepted = field(default_factory=_Accepted)
    openings: _Openings | None = field(default_factory=_Openings)
    """None: the file is missing, and nobody knows what was opened."""
    _locked: IO[bytes] | None = None

    def __post_init__(self) -> None:
        shelf = Shelf(None if self.path is None else self.path / "memory")
        self.memories = Memories(shelf, lambda left: int(self.keyed(fingerprint(left))[:_NAME], 16))
        """What its clients' uploads have not told."""

    @staticmethod
    def of(path: Path | None, patience: float = 0.0) -> Records:
        """Open the records in a folder, created if missing; wait for another process as long as `patience` says."""
        if path is None:
            return Records()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            locked = open(path / "lock", "ab", opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115
        except OSError as error:
            raise InputError(f"cannot write the site's folder {path}: {error.strerror}; choose another with --state") from error
        try:
            _lock(locked, path, patience)
            _require_known(path)
            found = _read(path / "secret")
            secret = _begun(path) if found is None else found
            if len(secret) != _SECRET:
                raise InputError(f"{path / 'secret'} is damaged ({len(secret)} bytes, not {_SECRET}): restore it from a backup; {_ANEW}")
            privacy, accepted = _parsed(path / "privacy.json", _Privacy), _parsed(path / "accepted.json", _Accepted)
            openings = path / _OPENINGS  # which folders of before there were secure sums do not have
            return Records(path, secret, privacy, accepted, _parsed(openings, _Openings) if openings.exists() else None, locked)
        except InputError:
            locked.close()
            raise

    def close(self) -> None:
        """Release the folder for another process."""
        if self._locked is not None:
            self._locked.close()

    def keyed(self, fingerprint: str) -> str:
        """Return a fingerprint keyed by the secret: stable as long as the secret is, and useless without it."""
        return hmac.new(self.secret, fingerprint.encode(), hashlib.sha256).hexdigest()

    # -- consent ------------------------------------------------------------------------------------------------------

    def accepts(self, digest: str) -> bool:
        """Whether the owner has accepted this experiment before."""
        return digest in self.consent.accepted

    def accept(self, digest: str) -> None:
        """Record that the owner accepts an experiment, now and at later starts."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._consented({**self.consent.accepted, digest: self.consent.accepted.get(digest, now)}, digest)

    def begin(self, digest: str) -> None:
        """Make this experiment the one in force."""
        self._consented(self.consent.accepted, digest)

    def _consented(self, accepted: dict[str, str], digest: str) -> None:
        found = _Accepted(accepted=accepted, in_force=digest)
        if found != self.consent:
            self._keep("accepted.json", found)
            self.consent = found

    # -- privacy ------------------------------------------------------------------------------------------------------

    @property
    def given_away(self) -> Account:
        """The cost of the client that has spent most, over all experiments."""
        return self.privacy.before.account() + reduce(Account.either, (one.account() for one in self.privacy.sent.values()), Account())

    def spent(self, digest: str, client: int) -> Account:
        """Return what a client of an experiment has spent, including all experiments before it."""
        if self.privacy.experiment != digest:
            return self.given_away
        return self.privacy.before.account() + self.privacy.sent.get(client, _Spent()).account()

    def spend(self, digest: str, client: int, more: Account) -> None:
        """Record the cost of what is about to leave; it is on disk when this returns."""
        before, sent = self.privacy.before, self.privacy.sent
        if self.privacy.experiment != digest:
            before, sent = _Spent.of(self.given_away), {}
        sent = {**sent, client: _Spent.of(sent.get(client, _Spent()).account() + more)}
        found = _Privacy(before=before, experiment=digest, sent=sent)
        if found != self.privacy:
            self._keep("privacy.json", found)
            self.privacy = found

    # -- secure sums --------------------------------------------------------------------------------------------------

    def opened(self, digest: str, client: int, purpose: bytes = UPDATE) -> int:
        """Return the last round of an experiment in which a client helped to open a sum for this purpose; −1: none."""
        return self._opened.get(_place(digest, purpose), {}).get(client, -1)

    def open(self, digest: str, client: int, round: int, purpose: bytes = UPDATE) -> None:
        """Record that a client is about to help open a round; it is on disk when this returns."""
        place = _place(digest, purpose)
        found = _Openings(opened={**self._opened, place: {**self._opened.get(place, {}), client: round}})
        self._keep(_OPENINGS, found)
        self.openings = found

    @property
    def _opened(self) -> dict[str, dict[int, int]]:
        if self.openings is None:
            file = self.path / _OPENINGS if self.path else _OPENINGS
            raise InputError(f"{file} is missing, and rounds might be opened twice: restore it from a backup; {_ANEW}")
        return self.openings.opened

    def _keep(self, name: str, content: BaseModel) -> None:
        if self.path is not None:
            write_privately(self.path / name, _encoded(content))


def _lock(file: IO[bytes], path: Path, patience: float) -> None:
    due = time.monotonic() + patience
    while True:
        try:
            lock(file, path)
            return
        except InputError as error:
            if time.monotonic() > due:
                raise InputError(f"another client uses {path}: stop it, or give this one a folder of its own with --state") from error
        time.sleep(_TRY_AGAIN)


def _require_known(path: Path) -> None:
    """Refuse a site's folder of a later format; one of before there were such numbers has none."""
    text = (_read(path / _FORMAT) or b"").strip()
    require_known(int(text) if text.isdigit() else None, FORMAT, path)


def _begun(path: Path) -> bytes:
    """Create a new site's records. The secret is written last: if it exists, so do the others."""
    secret = secrets.token_bytes(_SECRET)
    for name, content in (("privacy.json", _Privacy()), ("accepted.json", _Accepted()), (_OPENINGS, _Openings())):
        if _read(path / name) not in (None, _encoded(content)):
            raise InputError(f"{path / 'secret'} is missing, beside {name}: restore it from a backup; {_ANEW}")
        write_privately(path / name, _encoded(content))
    write_privately(path / _FORMAT, f"{FORMAT}\n".encode())
    write_privately(path / "secret", secret)
    return secret


def _place(digest: str, purpose: bytes) -> str:
    """Return the key under which openings for a purpose are stored."""
    return digest if purpose == UPDATE else f"{digest} {purpose.decode()}"


def _encoded(content: BaseModel) -> bytes:
    return content.model_dump_json(indent=2).encode() + b"\n"


def _read(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error


def _parsed(file: Path, kind: type[Content]) -> Content:
    data = _read(file)
    if data is None:
        raise InputError(f"{file} is missing, beside a secret: restore it from a backup; {_ANEW}")
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise InputError(f"{file} is damaged ({error.errors()[0]['msg']}): restore it from a backup; {_ANEW}") from error

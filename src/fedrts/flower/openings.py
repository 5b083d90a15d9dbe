"""What the server must not lose of secure sums: attempts it called for, openings that have begun, and opened sums.

A round is opened once. So the sum is on disk before anything is made of it, and what is needed to open it is on disk before anybody
is asked to reveal a share: a server that goes on reads the one, or asks the same nodes for the same shares again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fedrts.errors import InputError
from fedrts.files import explained, write_atomically
from fedrts.secure.call import UPDATE, joined, parted
from fedrts.secure.errors import SecureError
from fedrts.secure.ring import Words

FOLDER = "openings"
_DIGITS = 8


@dataclass(frozen=True)
class Opened:
    """The sum of a round."""

    round: int
    model: str
    """Names the server's weights before the round, or those that are judged."""
    form: str
    clients: tuple[int, ...]
    """Whose words are in it."""
    invited: int
    """n of the ring."""
    upload_bytes: int
    words: Words
    purpose: str = UPDATE.decode()
    samples: int = 0
    """What all of these clients count for; 0 where fedrts 0.2.0 wrote it, which did not say."""
    most_samples: int = 0
    """n_max of the call."""


@dataclass
class Openings:
    """The folder of a run's openings; without one everything is lost with the process."""

    path: Path | None
    oldest: Callable[[], int] = lambda: 0
    """The first round that a server may have to play again: what is of rounds before it is of no more use."""

    def __post_init__(self) -> None:
        self._held: dict[str, bytes] = {}

    def next_attempt(self, round: int, purpose: bytes = UPDATE) -> int:
        """Return and record a new number for another attempt at a round."""
        name = _name(round, purpose, "attempts")
        found = int((self._read(name) or b"0").decode())
        self._write(name, str(found + 1).encode())
        return found

    def begin(self, round: int, data: bytes, purpose: bytes = UPDATE) -> None:
        """Record everything that is needed to open a round, before shares are revealed."""
        self._write(_name(round, purpose, "begun"), data)

    def begun(self, round: int, purpose: bytes = UPDATE) -> bytes | None:
        """Return what `begin` wrote, if the round has not been opened since."""
        return self._read(_name(round, purpose, "begun"))

    def keep(self, opened: Opened) -> None:
        """Store a sum; it is on disk when this returns."""
        facts = {name: value for name, value in asdict(opened).items() if name != "words"}
        purpose = opened.purpose.encode()
        self._write(_name(opened.round, purpose, "sum"), joined([json.dumps(facts).encode(), opened.words.astype("<u4").tobytes()]))
        for kind in ("begun", "attempts"):
            self._drop(_name(opened.round, purpose, kind))
        needed = self.oldest()
        for name in list(self._held) if self.path is None else [file.name for file in self.path.glob("[0-9]*")]:
            if int(name[:_DIGITS]) < needed:
                self._drop(name)

    def opened(self, round: int, model: str, purpose: bytes = UPDATE) -> Opened | None:
        """Return the sum of a round, if there is one; it must be of the server's model."""
        data = self._read(_name(round, purpose, "sum"))
        if data is None:
            return None
        try:
            head, words = parted(data)
            facts = json.loads(head)
            facts["clients"] = tuple(facts["clients"])
            found = Opened(words=np.frombuffer(words, "<u4").astype(np.uint32), **facts)
        except (SecureError, ValueError, TypeError) as error:
            raise InputError(f"the opened sum of round {round} in {self.path} is damaged: restore it from a backup") from error
        if (found.round, found.model, found.purpose) != (round, model, purpose.decode()):
            raise InputError(f"the opened sum of round {round} in {self.path} is of another model: restore the run's checkpoints")
        return found

    def _read(self, name: str) -> bytes | None:
        if self.path is None:
            return self._held.get(name)
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InputError(f"cannot read {self.path / name}: {error.strerror}") from error

    def _write(self, name: str, data: bytes) -> None:
        if self.path is None:
            self._held[name] = data
            return
        with explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / name, data)

    def _drop(self, name: str) -> None:
        self._held.pop(name, None)
        if self.path is not None:
            with explained(self.path):
                (self.path / name).unlink(missing_ok=True)


def _name(round: int, purpose: bytes, kind: str) -> str:
    """Return the file name for a round."""
    return f"{round:0{_DIGITS}d}{'' if purpose == UPDATE else '-' + purpose.decode()}.{kind}"

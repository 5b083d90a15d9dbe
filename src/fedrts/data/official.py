"""Where a data set's files come from and where they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fedrts.data.download import verify
from fedrts.errors import InputError
from fedrts.files import require_plain

if TYPE_CHECKING:
    from fedrts.data.contract import Data


@dataclass(frozen=True)
class File:
    """A file to download."""

    url: str
    to: str
    """Where it goes under the folder of data sets: a file, or for an archive the folder that holds its content."""
    checksum: str | None = None
    """As published, `md5:…` or `sha256:…`; None where the publisher names none."""
    archive: bool = False

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Official:
    """Properties that identify the released data set: its sizes and, if known, the first bytes of its arrays."""

    train: int
    test: int
    """Samples at least."""
    classes: int
    begins: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The first values of `x` (of its first row) or of `y`, as stored."""

    def differs(self, held: Data) -> str | None:
        """Return how `held`, read without options, differs from the release; None if no difference shows."""
        sizes = (("classes", held.classes, self.classes), ("training samples", len(held.y), self.train))
        for what, found, wanted in (*sizes, ("test samples", len(held.test_y), self.test)):
            if found < wanted:
                return f"{found:,} of {wanted:,} {what}"
        for name, values in self.begins.items():
            if tuple(getattr(held, name).flatten()[: len(values)].tolist()) != values:
                return f"other {'labels' if name == 'y' else 'values'} than in the release, or in another order"
        return None


@dataclass(frozen=True)
class Source:
    """All files of a data set."""

    files: tuple[File, ...]
    needed: tuple[str, ...]
    """Paths under the folder of data sets without which the data set is not there."""
    official: Official | None = None

    def missing(self, home: Path) -> list[str]:
        return [path for path in self.needed if not (home / path).exists()]

    def lacks(self, file: File, home: Path) -> bool:
        """Whether anything that `file` provides is missing."""
        return any(path == file.to or path.startswith(f"{file.to}/") for path in self.missing(home))

    def require(self, name: str, home: Path) -> None:
        """Raise one line that says what to download and where to put it, if it is missing."""
        missing = self.missing(home)
        if not missing:
            for path in self.needed:
                require_plain(home / path)
            return
        wanted = [file for file in self.files if self.lacks(file, home)]
        what = " and ".join(f"{file.url} ({'its content into' if file.archive else 'as'} {home / file.to})" for file in wanted)
        raise InputError(
            f"the data set '{name}' is not in {home} (no {missing[0]}): run `fedrts data prepare {name}`, or get {what}; "
            "--data-dir or FEDRTS_DATA name another folder"
        )

    def differs(self, held: Data, home: Path) -> str | None:
        """Return how the data in `home`, read as `held` without options, differ from the release; None if no difference shows."""
        if self.official is not None and (found := self.official.differs(held)) is not None:
            return found
        for file in self.files:
            if file.checksum is not None and not file.archive and (home / file.to).is_file():
                try:
                    verify(home / file.to, file.checksum, file.to)
                except InputError:
                    return f"{file.to} is not the published file (its checksum differs)"
        return None

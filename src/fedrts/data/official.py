"""Where the files of a data set come from and where they go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedrts.errors import InputError


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
class Source:
    """All files of a data set."""

    files: tuple[File, ...]
    needed: tuple[str, ...]
    """Paths under the folder of data sets without which the data set is not there."""

    def missing(self, home: Path) -> list[str]:
        return [path for path in self.needed if not (home / path).exists()]

    def lacks(self, file: File, home: Path) -> bool:
        """Is anything missing that `file` brings?"""
        return any(path == file.to or path.startswith(f"{file.to}/") for path in self.missing(home))

    def require(self, name: str, home: Path) -> None:
        """One line on what to get and where to put it, if it is not there."""
        missing = self.missing(home)
        if not missing:
            return
        wanted = [file for file in self.files if self.lacks(file, home)]
        what = " and ".join(f"{file.url} ({'its content into' if file.archive else 'as'} {home / file.to})" for file in wanted)
        raise InputError(
            f"the data set '{name}' is not in {home} (no {missing[0]}): run `fedrts data prepare {name}`, or get {what}; "
            "--data-dir or FEDRTS_DATA name another folder"
        )

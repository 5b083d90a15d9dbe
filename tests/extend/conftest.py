"""Every test here has a folder of its own, with the user's code in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outside import Beside


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Beside]:
    """Modules that are written into the current folder, and forgotten before and afterwards."""
    monkeypatch.chdir(tmp_path)
    written = []

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text, "utf-8")
        sys.modules.pop(name, None)  # another test's
        written.append(name)

    yield write
    for name in written:
        sys.modules.pop(name, None)

"""The kernels are on here."""

import pytest

from fedrts.programs import library


@pytest.fixture(autouse=True)
def kernels_on(monkeypatch):
    monkeypatch.setenv(library.OFF, "1")

"""Fixtures for real federations; their parts are in `federating.py`, which needs fedrts[flower]."""

import pytest


@pytest.fixture
def start():
    """`start("server", …)` starts a command of ours; whatever still runs afterwards is ended."""
    from federating import processes

    with processes() as begin:
        yield begin


@pytest.fixture
def folder(tmp_path):
    """Keys and an experiment for three nodes."""
    from federating import Folder

    return Folder(tmp_path)

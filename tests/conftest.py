"""Settings of every test, and the small federations of `toys`."""

import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

import toys
from fedrts.runs.folder import RunFolder

TREE = Path(__file__).resolve().parent.parent

torch.set_num_threads(1)  # two test processes share two cores

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and so would every command that a test starts

settings.register_profile(
    "fedrts",
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),  # a change is judged by the same examples every time; elsewhere they are new ones
)
settings.load_profile("fedrts")


@pytest.fixture
def toy():
    """Assemble a small run: `toy("fedrts", "cnn", rounds=5, …)`."""
    return toys.toy


@pytest.fixture(autouse=True)
def _no_run_folder_in_the_working_tree(monkeypatch):
    """A test that runs something says where: a run without `out` would leave its folder here."""
    create = RunFolder.create

    def elsewhere(folder, experiment):
        assert not folder.path.resolve().is_relative_to(TREE), f"a test writes {folder.path}: give it an out under tmp_path"
        create(folder, experiment)

    monkeypatch.setattr(RunFolder, "create", elsewhere)

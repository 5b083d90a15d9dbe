"""Settings of every test, and the small federations of `fedrts.testing`."""

import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from fedrts.runs.folder import RunFolder
from fedrts.testing import federations

TREE = Path(__file__).resolve().parent.parent
CACHES = {".git", ".venv", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__", "build"}
BEFORE = pytest.StashKey[set[Path]]()

os.environ.setdefault("FEDRTS_KERNELS", "0")  # the dense kernels are everybody's; tests of the sparse ones turn them on

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


def present() -> set[Path]:
    """Files and folders of the working tree, without the caches of tools."""
    found = set()
    for folder, folders, files in os.walk(TREE):
        folders[:] = set(folders) - CACHES
        found |= {Path(folder, name) for name in (*folders, *files)}
    return found


def pytest_sessionstart(session):
    if not hasattr(session.config, "workerinput"):  # one process looks for all
        session.config.stash[BEFORE] = present()


def pytest_sessionfinish(session):
    """Tests leave nothing in the working tree."""
    new = sorted(present() - session.config.stash[BEFORE]) if BEFORE in session.config.stash else []
    if new:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        shown = ", ".join(str(path.relative_to(TREE)) for path in new[:5])
        session.config.get_terminal_writer().line(
            f"\n{len(new)} new files or folders in the working tree: {shown}: write under tmp_path", red=True
        )


@pytest.fixture
def toy():
    """Assemble a small run: `toy("fedrts", "cnn", rounds=5, …)`."""
    return federations.toy


@pytest.fixture(autouse=True)
def _no_run_folder_in_the_working_tree(monkeypatch):
    """A test that runs something says where: a run without `out` would leave its folder here."""
    create = RunFolder.create

    def elsewhere(folder, *given):
        assert not folder.path.resolve().is_relative_to(TREE), f"a test writes {folder.path}: give it an out under tmp_path"
        create(folder, *given)

    monkeypatch.setattr(RunFolder, "create", elsewhere)

"""Real small runs and a real browser, each made once for all test processes, respectively once for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch

import fedrts
from browser import Browser, executable
from fedrts.report import write

SMALL: dict[str, Any] = {
    "data": "digits",
    "rounds": 12,
    "clients": 6,
    "per_round": 3,
    "epochs": 1,
    "model_options": {"hidden": [32]},
    "topology": {"interval": 3},
    "eval": {"every": 2},
    "engine": "serial",
}


def make_runs(folder: Path) -> None:
    """Three methods × two densities × two seeds on digits, one run on toy text, an unfinished one and a damaged one."""
    torch.set_num_threads(1)
    for seed in (0, 1):
        fedrts.run(**SMALL, method="fedavg", density=1.0, seed=seed, out=folder / f"fedavg-{seed}")
        for method in ("fedrts", "random"):
            for density in (0.5, 0.3):
                fedrts.run(**SMALL, method=method, density=density, seed=seed, out=folder / f"{method}-{density}-{seed}")
    text: dict[str, Any] = {
        "data": "toy_text",
        "model": "tiny_gpt",
        "model_options": {"width": 8, "layers": 1, "heads": 2},
        "engine": "serial",
    }
    federation = {"total": 5, "per_round": 3, "partition": "quantity", "min_size": 2}
    fedrts.run(**text, clients=federation, rounds=4, epochs=1, density=0.5, batch_size=8, topology={"interval": 2}, out=folder / "text")
    unfinished = folder / "fedrts-0.3-1"
    (unfinished / "summary.json").unlink()
    (folder / "damaged").mkdir()
    (folder / "damaged" / "experiment.toml").write_text("method =", "utf-8")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The folder of the runs; tests only read it."""
    base = tmp_path_factory.getbasetemp() if worker_id == "master" else tmp_path_factory.getbasetemp().parent
    folder = base / "report-runs"
    with filelock.FileLock(f"{folder}.lock"):
        if not folder.exists():
            make_runs(folder)
    return folder


@pytest.fixture(scope="session")
def written(runs: Path, tmp_path_factory: pytest.TempPathFactory):
    """The report on them: (report.html, what it says)."""
    return write([runs], tmp_path_factory.mktemp("report"), pictures=False)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = executable()
    if path is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    opened = Browser(path)
    yield opened
    opened.close()

"""Backups: a folder that is copied while its run goes on, as docs/deployment.md says, goes on elsewhere to the same bits."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import fedrts
from documented import commands
from fedrts.errors import InputError
from fedrts.observe import Silent
from fedrts.server.rounds import Record

TINY: dict[str, Any] = {
    "data": "digits",
    "method": "fedrts",
    "rounds": 6,
    "clients": {"total": 4, "per_round": 2},
    "train": {"epochs": 1},
    "model_options": {"hidden": [8]},
    "device": "cpu",
    "checkpoint": {"every": 1},
}
STEPS = [command for command in commands() if "backup/study" in command]


class BackedUp(Silent):
    """Copies as the page says: the first step after one round, the others after two more, when the first copy is out of date."""

    def __init__(self, there: Path) -> None:
        self.there = there

    def played(self, record: Record) -> None:
        steps = {2: STEPS[:2], 4: STEPS[2:]}.get(record.round, [])
        for step in steps:
            subprocess.run(step, shell=True, check=True, cwd=self.there)


def test_a_backup_of_a_running_study_goes_on_elsewhere(tmp_path: Path):
    result = fedrts.run(out=tmp_path / "runs" / "study", observer=BackedUp(tmp_path), **TINY)
    restored = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "backup" / "study", restored)
    assert sorted(file.name[:8] for file in (restored / "checkpoint").iterdir()) == ["00000002", "00000003"]
    assert len((restored / "history.jsonl").read_text().splitlines()) == 5, "the logs are newer than the checkpoints"
    again = fedrts.resume(restored)
    assert again.summary["accuracy"] == result.summary["accuracy"]
    for name in ("model.safetensors", "masks.safetensors", "topology.jsonl"):
        assert (restored / name).read_bytes() == (tmp_path / "runs" / "study" / name).read_bytes(), name


def test_logs_that_are_older_than_the_checkpoint_are_refused(tmp_path: Path):
    """Why the order matters: nothing is made up, and one line says what is wrong."""
    fedrts.run(out=tmp_path / "run", **TINY)
    (tmp_path / "run" / "summary.json").unlink()
    lines = (tmp_path / "run" / "history.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "history.jsonl").write_text("".join(lines[:3]))
    with pytest.raises(InputError, match="is shorter"):
        fedrts.resume(tmp_path / "run")

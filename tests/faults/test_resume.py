"""Kill a run at any byte: `fedrts resume` ends with the same bits as a run that was left alone."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from helping import instruction_sets

ROUNDS = 12
FLAGS = ["--rounds", ROUNDS, "--seed", 5, "--epochs", 1, "--clients", 8, "--per-round", 5, "--set", "topology.interval=3", "--quiet"]
FLAGS += ["--set", "clients.dropout=0.2"]  # who holds which mask, and so the bytes, must survive too
FLAGS += ["--set", "train.average=ema"]
EVERY_ROUND = ["--set", "checkpoint.every=1"]


def lines(file: Path, *without: str) -> list[dict[str, Any]]:
    """The lines of a log, with all their keys but `without`."""
    text = file.read_text("utf-8")
    assert text.endswith("\n")
    return [{key: value for key, value in json.loads(line).items() if key not in without} for line in text.splitlines()]


def checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted((folder / "checkpoint").glob("*.safetensors"))


def results(folder: Path) -> dict[str, object]:
    """Everything that a run leaves behind, apart from how long it took."""
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    del summary["digests"]["history.jsonl"]  # whose lines say how long rounds took
    final = safetensors.torch.load_file(checkpoints(folder)[-1])
    exact = ("model.safetensors", "masks.safetensors", "average.safetensors", "topology.jsonl", "clients.json", "fairness.json")
    return {
        **{name: (folder / name).read_bytes() for name in exact},
        **{f"checkpoint {name}": (str(tensor.dtype), tensor.numpy().tobytes()) for name, tensor in final.items()},
        "checkpoint round": int(checkpoints(folder)[-1].name[:8]),
        "history": lines(folder / "history.jsonl", "seconds"),
        "summary": {key: value for key, value in summary.items() if key not in ("seconds", "samples_per_second")},
    }


def assert_same_bits(folder: Path, reference: dict[str, object]) -> None:
    found = results(folder)
    assert found.keys() == reference.keys()
    assert [name for name in reference if found[name] != reference[name]] == []


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.fixture(scope="module")
def reference(start, tmp_path_factory) -> dict[str, object]:
    """What the run comes to when nothing happens to it."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    assert start("run", *FLAGS, *EVERY_ROUND, "--out", folder).ended() == 0
    found = results(folder)
    assert {
        "checkpoint values",
        "checkpoint mask",
        "checkpoint memory.alpha",
        "checkpoint memory.beta",
        "checkpoint memory.average",
    } <= found.keys()
    assert len(lines(folder / "topology.jsonl")) == 3  # rounds 0, 3 and 6; T_end is 7
    assert found["checkpoint round"] == ROUNDS
    return found


@pytest.fixture(scope="module")
def half(start, moment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed when it had just written its sixth checkpoint; tests work on copies."""
    folder = tmp_path_factory.mktemp("half") / "run"
    assert start("run", *FLAGS, *EVERY_ROUND, "--out", folder, moment=moment("after", "00000006-*")).ended() == -signal.SIGKILL
    assert [int(file.name[:8]) for file in checkpoints(folder)][-2:] == [5, 6]
    return folder


@pytest.fixture
def killed(half: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    return shutil.copytree(half, tmp_path / "run")


# -- killed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param([("before", "clients.json")], id="before anything but experiment.toml is there"),
        pytest.param([("before", "00000001-*")], id="while the first checkpoint is written"),
        pytest.param([("after", "00000007-*")], id="before an old checkpoint is removed"),
        pytest.param([("torn", "history.jsonl", 5)], id="in a line of history"),
        pytest.param([("torn", "topology.jsonl", 3)], id="in a line of topology, after that of history"),
        pytest.param([("before", "model.safetensors")], id="after the last round"),
        pytest.param([("after", "masks.safetensors")], id="before clients are judged"),
        pytest.param([("after", "fairness.json")], id="before the summary"),
        pytest.param(
            [
                ("before", "00000001-*"),
                ("torn", "history.jsonl", 3),
                ("before", "00000005-*"),
                ("after", "00000006-*"),
                ("before", "summary.json"),
            ],
            id="again and again",
        ),
    ],
)
def test_killed_at(start, moment, reference, tmp_path, moments):
    folder = tmp_path / "run"
    for number, chosen in enumerate(moments):
        arguments = ["resume", folder, "--quiet"] if number else ["run", *FLAGS, *EVERY_ROUND, "--out", folder]
        assert start(*arguments, moment=moment(*chosen)).ended() == -signal.SIGKILL
        assert not (folder / "summary.json").exists()
    last = start("resume", folder, "--quiet")
    assert (last.ended(), last.err) == (0, "")
    assert_same_bits(folder, reference)


@pytest.mark.parametrize(("seed", "every"), [(0, "1"), (1, "5"), (2, "auto")])
def test_killed_from_outside_at_random_moments(start, reference, tmp_path, seed, every):
    """Three times, somewhere in a round, with many or few checkpoints to go back to."""
    draw = random.Random(seed)
    folder = tmp_path / "run"
    history = folder / "history.jsonl"
    arguments = ["run", *FLAGS, "--set", f"checkpoint.every={every}", "--out", folder]
    for _ in range(3):
        running = start(*arguments)
        until = draw.randrange(6)
        running.until(lambda until=until: history.exists() and history.read_bytes().count(b"\n") >= until)
        time.sleep(draw.random() * 0.05)
        running.signal(signal.SIGKILL)
        assert running.ended() == -signal.SIGKILL
        arguments = ["resume", folder, "--quiet"]
    last = start(*arguments)
    assert (last.ended(), last.err) == (0, "")
    assert_same_bits(folder, reference)


def test_killed_before_there_is_a_run(start, moment, reference, tmp_path):
    """Without experiment.toml there is nothing to resume, and nothing in the way of a new try."""
    folder = tmp_path / "run"
    arguments = ["run", *FLAGS, *EVERY_ROUND, "--out", folder]
    assert start(*arguments, moment=moment("before", "experiment.toml")).ended() == -signal.SIGKILL
    refused = start("resume", folder)
    assert refused.ended() == 2
    assert "no run folder" in refused.err
    assert start(*arguments).ended() == 0
    assert_same_bits(folder, reference)


# -- what is on disk ------------------------------------------------------------------------------------------------


def test_what_was_logged_after_the_checkpoint_is_cut(start, reference, killed):
    """Whole lines and a torn one: those rounds are played again."""
    with (killed / "history.jsonl").open("ab") as log:
        log.write(b'{"round": 6, "loss": 0.5}\n{"round": 7, "lo')
    with (killed / "topology.jsonl").open("ab") as log:
        log.write(b'{"round": 6}\n{"rou')
    assert start("resume", killed, "--quiet").ended() == 0
    assert_same_bits(killed, reference)


def test_a_log_shorter_than_its_checkpoint_says_is_refused(start, killed):
    log = killed / "history.jsonl"
    log.write_bytes(log.read_bytes()[:-5])
    before = contents(killed)
    refused = start("resume", killed)
    assert refused.ended() == 2
    assert re.fullmatch(r"error: .*history\.jsonl is shorter .*\n", refused.err)
    assert contents(killed) == before


@pytest.mark.parametrize(
    ("key", "line", "changed", "old", "new"),
    [
        ("train.lr", "lr = 0.8", "lr = 0.1", "0.8", "0.1"),
        ("density", "density = 0.2", "density = 0.3", "0.2", "0.3"),
        ("seed", "seed = 5", "seed = 6", "5", "6"),
        ("rounds", "rounds = 12", "rounds = 20", "12", "20"),
        ("method_options.gamma", "gamma = 0.5", "gamma = 0.25", "0.5", "0.25"),
        ("model_options.hidden", "[model_options]", "[model_options]\nhidden = [8, 8]", "None", "[8, 8]"),
    ],
)
def test_an_experiment_edited_after_its_checkpoint_is_refused(start, killed, key, line, changed, old, new):
    file = killed / "experiment.toml"
    text = file.read_text("utf-8")
    assert text.count(line) == 1
    file.write_text(text.replace(line, changed), "utf-8")
    before = contents(killed)
    refused = start("resume", killed)
    assert refused.ended() == 2
    assert refused.err.startswith("error: ")
    assert refused.err.count("\n") == 1
    assert f"{key} (was {old}, is {new})" in refused.err
    assert contents(killed) == before


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_damaged_newest_checkpoint(start, reference, killed):
    """One round more is played again; the user is told."""
    newest = checkpoints(killed)[-1]
    damage(newest)
    resumed = start("resume", killed, "--quiet")
    assert resumed.ended() == 0
    assert re.fullmatch(rf"note: checkpoint {newest.name} is damaged .*\n", resumed.err)
    assert_same_bits(killed, reference)


def test_damaged_checkpoints(start, reference, killed):
    """Refused, every time, with nothing lost; without the folder the run starts at round 0 and ends the same."""
    for file in checkpoints(killed):
        damage(file)
    before = contents(killed)
    for _ in range(2):
        refused = start("resume", killed, "--quiet")
        assert refused.ended() == 2
        assert re.search(r"^error: all checkpoints in .* are damaged: .*", refused.err, re.MULTILINE)
        assert "Traceback" not in refused.err
        assert sorted(contents(killed).values()) == sorted(before.values())
    shutil.rmtree(killed / "checkpoint")
    assert start("resume", killed, "--quiet").ended() == 0
    assert_same_bits(killed, reference)


def test_a_moved_folder_goes_on(start, reference, killed, tmp_path):
    moved = killed.rename(tmp_path / "moved")
    assert start("resume", moved, "--quiet").ended() == 0
    assert_same_bits(moved, reference)
    assert not killed.exists()


def test_only_one_process_writes_to_a_folder(start, moment, reference, tmp_path):
    """The second is refused and harms nothing; the first, frozen meanwhile, ends as if it had been alone."""
    folder = tmp_path / "run"
    first = start("run", *FLAGS, *EVERY_ROUND, "--out", folder, moment=moment("after", "00000003-*", by=signal.SIGSTOP))
    first.until(lambda: any(file.name.startswith("00000003-") for file in checkpoints(folder)))
    for arguments, words in (
        (["resume", folder], "another process is writing"),
        (["run", *FLAGS, "--out", folder], f"fedrts resume {folder}"),
    ):
        second = start(*arguments)
        assert second.ended() == 2
        assert second.err.startswith("error: ")
        assert second.err.count("\n") == 1
        assert words in second.err
    first.signal(signal.SIGCONT)
    assert (first.ended(), first.err) == (0, "")
    assert_same_bits(folder, reference)


# -- in the sparse kernel -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("isa", instruction_sets())
def test_killed_in_the_sparse_kernel(tmp_path, isa):
    """It goes on in that kernel, on the instruction set on which it began, whether that is the best of this machine or not.

    The forked processes of the other tests have the kernels turned off, as their server had.
    """
    here = {**os.environ, "FEDRTS_KERNELS": "1"}
    sparse = ["--set", "engine.kernel=sparse", "--set", f"engine.isa={isa}", "--rounds", 80, *FLAGS[2:], *EVERY_ROUND]

    def begun(*arguments: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "fedrts", *map(str, arguments)], env=here)

    assert begun("run", *sparse, "--out", tmp_path / "whole").wait() == 0
    running = begun("run", *sparse, "--out", tmp_path / "part")
    history = tmp_path / "part" / "history.jsonl"
    while running.poll() is None and not (history.exists() and len(history.read_bytes().splitlines()) > 20):
        time.sleep(0.005)
    running.kill()
    assert running.wait() == -signal.SIGKILL
    assert begun("resume", tmp_path / "part", "--quiet").wait() == 0
    assert f'kernel = "sparse"\nisa = "{isa}"\n' in (tmp_path / "part" / "experiment.toml").read_text("utf-8")
    assert_same_bits(tmp_path / "part", results(tmp_path / "whole"))

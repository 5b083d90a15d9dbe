"""`fedrts compare`: the folder it leaves, going on after an interruption, failures, tuning, and what it refuses."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import time
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

import fedrts as package
from fedrts.comparison import play, pool
from fedrts.errors import InputError
from fedrts.observe import Silent
from fedrts.report import read

GRID = ["--methods", "fedrts,random,fedavg", "--densities", "0.1,0.2", "--seeds", "0,1", "--reference", "random"]
CELLS = {f"{method}-d{density}-s{seed}" for method in ("fedrts", "random") for density in (0.1, 0.2) for seed in (0, 1)}
CELLS |= {"fedavg-s0", "fedavg-s1"}


def read_csv(file: Path) -> list[dict[str, str]]:
    with open(file, newline="", encoding="utf-8") as text:
        return list(csv.DictReader(text))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def compared(fedrts, tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished comparison; tests that write work on copies."""
    out = tmp_path_factory.mktemp("compared") / "out"
    ended = fedrts("compare", *GRID, *tiny, "--jobs", 1, "--out", out)
    assert (ended.code, ended.err) == (0, "")
    assert "10 of 10" in ended.out
    return out


# -- the folder -----------------------------------------------------------------------------------------------------


def test_the_folder(compared):
    assert {entry.name for entry in compared.iterdir() if not entry.name.startswith(".")} == {
        "compare.toml",
        "runs",
        "results.csv",
        "results.md",
    }
    assert {entry.name for entry in (compared / "runs").iterdir()} == CELLS


def test_a_cell_is_an_ordinary_run(fedrts, compared, tiny, tmp_path):
    cell = compared / "runs" / "fedrts-d0.2-s1"
    assert fedrts("inspect", cell).code == 0
    assert fedrts("run", *tiny, "--method", "fedrts", "--density", 0.2, "--seed", 1, "--out", tmp_path / "run", "--quiet").code == 0
    assert (cell / "model.safetensors").read_bytes() == (tmp_path / "run" / "model.safetensors").read_bytes()


def test_the_record(compared):
    content = tomllib.loads((compared / "compare.toml").read_text("utf-8"))
    assert (content["methods"], content["seeds"], content["densities"]) == (["fedrts", "random", "fedavg"], [0, 1], [0.1, 0.2])
    assert content["shared"]["clients"]["total"] == 6
    assert content["cells"]["fedavg-s1"]["density"] == 1.0


def test_results_are_those_of_the_summaries(compared):
    rows = read_csv(compared / "results.csv")
    assert {row["cell"] for row in rows} == CELLS
    for row in rows:
        summary = json.loads((compared / "runs" / row["cell"] / "summary.json").read_text("utf-8"))
        assert set(row) == {"cell", *summary} - {"digests"}
        assert float(row["accuracy_last10"]) == summary["accuracy_last10"]


def test_the_table(compared):
    text = (compared / "results.md").read_text("utf-8")
    rows = read_csv(compared / "results.csv")
    values = [float(row["accuracy_last10"]) for row in rows if (row["method"], row["density_target"]) == ("fedrts", "0.2")]
    assert f"{sum(values) / 2:.4f} ± {abs(values[0] - values[1]) / 2:.4f}" in text
    assert "| method | density 1 | density 0.2 | density 0.1 |" in text
    assert text.count("| fedavg |") == 3  # its mean, its difference, its cost: once each
    assert "paired, two-sided t-test" in text
    assert "With 2 seeds" in text


# -- going on -------------------------------------------------------------------------------------------------------


def test_finished_cells_are_not_run_again_and_another_metric_costs_nothing(fedrts, compared, tiny, tmp_path):
    out = shutil.copytree(compared, tmp_path / "out")
    before = contents(out / "runs")
    ended = fedrts("compare", *GRID, *tiny, "--jobs", 1, "--out", out, "--metric", "loss")
    assert ended.code == 0
    assert "10 of them finished already" in ended.out
    assert contents(out / "runs") == before
    assert "# Test loss" in (out / "results.md").read_text("utf-8")


def test_what_is_missing_is_run_and_what_is_half_done_resumed(fedrts, compared, tiny, tmp_path):
    out = shutil.copytree(compared, tmp_path / "out")
    shutil.rmtree(out / "runs" / "random-d0.1-s0")
    half = out / "runs" / "fedrts-d0.2-s0"
    for name in ("summary.json", "model.safetensors", "masks.safetensors"):
        (half / name).unlink()
    (out / "results.md").unlink()
    assert fedrts("compare", *GRID, *tiny, "--jobs", 1, "--out", out, "--quiet").code == 0
    assert (out / "results.md").read_bytes() == (compared / "results.md").read_bytes()
    assert (half / "model.safetensors").read_bytes() == (compared / "runs" / half.name / "model.safetensors").read_bytes()


def test_more_values_join(fedrts, compared, tiny, tmp_path):
    out = shutil.copytree(compared, tmp_path / "out")
    more = [word.replace("fedavg", "fedavg,snip") for word in GRID]
    ended = fedrts("compare", *more, *tiny, "--jobs", 1, "--out", out)
    assert ended.code == 0
    assert "14" in ended.out
    assert "10 of them finished already" in ended.out
    assert "| snip |" in (out / "results.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--seeds", "0"], ["holds another comparison", "-s1 is not in this grid", "another --out"]),
        (["--lr", "0.5"], ["holds another comparison", "train.lr is 0.8, not 0.5"]),
    ],
)
def test_another_grid_in_the_same_folder_is_refused(fedrts, compared, tiny, change, words):
    before = contents(compared)
    ended = fedrts("compare", *GRID, *tiny, *change, "--out", compared)
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert all(word in ended.err for word in words), ended.err
    assert contents(compared) == before


@pytest.mark.slow
@pytest.mark.timeout(400)  # three processes import torch, which takes its time on a busy machine
def test_killed_and_started_again(fedrts, process, tmp_path):
    """SIGKILL in the midst of two cells at once: nobody goes on writing, and the same command ends with the same table."""
    flags = ["compare", "--methods", "fedrts,random", "--densities", "0.2", "--seeds", "0,1", "--reference", "random", "--rounds", 20]
    flags += ["--epochs", 1, "--clients", 6, "--per-round", 3, "--set", "checkpoint.every=5", "--quiet"]
    assert fedrts(*flags, "--jobs", 1, "--out", tmp_path / "alone").code == 0
    out = tmp_path / "killed"
    running = process(*flags, "--jobs", 2, "--out", out)
    wait_for(lambda: list(out.glob("runs/*/summary.json")) and unfinished_lines(out) >= 3, running)
    workers = children(running.pid)
    assert len(workers) >= 2
    running.send_signal(signal.SIGKILL)
    running.wait(30)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() and not is_zombie(pid) for pid in workers))
    finished = {file: file.stat().st_mtime_ns for file in out.glob("runs/*/summary.json")}
    assert 1 <= len(finished) < 4
    assert fedrts(*flags, "--jobs", 1, "--out", out).code == 0
    assert {file: file.stat().st_mtime_ns for file in finished} == finished
    assert (out / "results.md").read_bytes() == (tmp_path / "alone" / "results.md").read_bytes()
    timing = ("seconds", "samples_per_second")
    ours, theirs = (
        [{key: value for key, value in row.items() if key not in timing} for row in read_csv(folder / "results.csv")]
        for folder in (out, tmp_path / "alone")
    )
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(process, tmp_path, number):
    out = tmp_path / "out"
    running = process(
        "compare", "--methods", "fedrts", "--seeds", "0,1", "--rounds", 2000, "--epochs", 1, "--jobs", 2, "--out", out, "--quiet"
    )
    wait_for(lambda: unfinished_lines(out) >= 1, running)
    workers = children(running.pid)
    running.send_signal(number)
    _, err = running.communicate(timeout=30)
    assert running.returncode == 130
    assert err == f"interrupted; the same command goes on in {out}\n"
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() and not is_zombie(pid) for pid in workers), seconds=10)


def wait_for(condition, running=None, seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert running is None or running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def unfinished_lines(out: Path) -> int:
    logs = [log for log in out.glob("runs/*/history.jsonl") if not (log.parent / "summary.json").exists()]
    return max((log.read_bytes().count(b"\n") for log in logs), default=0)


def children(pid: int) -> list[int]:
    return [
        int(child) for task in os.listdir(f"/proc/{pid}/task") for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    ]


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# -- failures -------------------------------------------------------------------------------------------------------


def test_a_cell_that_fails_is_told_and_the_rest_finished(fedrts, tiny, tmp_path):
    """A density that this model cannot have is found when the cell begins."""
    out = tmp_path / "out"
    flags = ["--methods", "fedrts,fedavg", "--densities", "0.2,0.001", "--jobs", 1, "--out", out]
    ended = fedrts("compare", *flags, *tiny, "--quiet")
    assert ended.code == 1
    assert ended.out == ""
    assert "failed: fedrts-d0.001-s0: density" in ended.err
    assert "1 cell failed" in ended.err
    assert "Traceback" not in ended.err
    failures = json.loads((out / "failures.json").read_text("utf-8"))
    assert list(failures) == ["fedrts-d0.001-s0"]
    assert failures["fedrts-d0.001-s0"]["reason"] in (out / "results.md").read_text("utf-8")
    assert {row["cell"] for row in read_csv(out / "results.csv")} == {"fedrts-d0.2-s0", "fedavg-s0"}


def test_an_unexpected_failure_keeps_its_traceback(fedrts, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(
        "from fedrts.methods.base import Method\n\n\nclass Broken(Method):\n    def update(self, *_):\n        raise RuntimeError('no')\n"
    )
    ended = fedrts("compare", "--methods", "broken:Broken,fedavg", *tiny, "--jobs", 1, "--out", "out", "--quiet")
    assert ended.code == 1
    assert "failed: broken_Broken-s0: RuntimeError: no\n" in ended.err
    failure = json.loads(Path("out/failures.json").read_text("utf-8"))["broken_Broken-s0"]
    assert "raise RuntimeError" in failure["traceback"]
    assert [row["cell"] for row in read_csv(Path("out/results.csv"))] == ["fedavg-s0"]


# -- tuning ---------------------------------------------------------------------------------------------------------


def test_tuning_chooses_on_the_validation_split(fedrts, tiny, tmp_path):
    out = tmp_path / "out"
    flags = ["--methods", "fedrts,fedavg", "--densities", "0.2", "--seeds", "0,1", "--tune-lr", "0.0001,0.2", "--tune-rounds", 2]
    ended = fedrts("compare", *flags, *tiny, "--jobs", 1, "--out", out)
    assert ended.code == 0, ended.err
    assert "tuning: 4" in ended.out
    trials = {path.name: path for path in (out / "tuning").iterdir()}
    assert set(trials) == {"fedrts-d0.2-lr0.0001", "fedrts-d0.2-lr0.2", "fedavg-lr0.0001", "fedavg-lr0.2"}
    for row in read_csv(out / "results.csv"):
        stem = row["cell"].rpartition("-")[0]
        scores = {}
        for rate in (0.0001, 0.2):
            history = [json.loads(line) for line in (trials[f"{stem}-lr{rate:g}"] / "history.jsonl").read_text("utf-8").splitlines()]
            assert len(history) == 2
            scores[rate] = sum(line["valid_accuracy"] for line in history) / 2
        assert float(row["train.lr"]) == max(scores, key=lambda rate: scores[rate])
        experiment = tomllib.loads((out / "runs" / row["cell"] / "experiment.toml").read_text("utf-8"))
        assert experiment["train"]["lr"] == float(row["train.lr"])
        assert experiment["data_options"]["validation"] == 0.1
    text = (out / "results.md").read_text("utf-8")
    assert "## Learning rates" in text
    assert "seed 1000" in text
    before = contents(out)
    assert fedrts("compare", *flags, *tiny, "--jobs", 1, "--out", out, "--quiet").code == 0
    assert contents(out) == before


def lost(task, tell):
    """A trial at 0.2 whose process died; others as they are."""
    if "lr0.2" not in task.name:
        return play.play(task, tell)
    tell(play.News(task.name, "failed", text="its process died"))
    return True


TUNED: dict[str, Any] = {
    "methods": ["random"],
    "densities": [0.5],
    "tune_lr": [0.0001, 0.2],
    "rounds": 12,
    "epochs": 1,
    "clients": 4,
    "data": "digits",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*may lie beyond:UserWarning")
def test_a_rate_stays_once_it_is_used(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(pool, "play", lost)
        package.compare(out=tmp_path / "out", **TUNED)
    found = package.compare(out=tmp_path / "out", seeds=[0, 1], **TUNED)
    assert not found.failures
    assert [row["train.lr"] for row in found.rows] == [0.0001, 0.0001]
    for row in found.rows:
        assert tomllib.loads((tmp_path / "out" / "runs" / row["cell"] / "experiment.toml").read_text())["train"]["lr"] == 0.0001
    high, low = (found.chosen[0].scores[rate] for rate in (0.2, 0.0001))
    assert high is not None
    assert low is not None
    assert high > low
    assert "| 0.0001 (runs began with it) |" in found.markdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*may lie beyond:UserWarning")
def test_runs_of_several_rates_are_not_mixed(tmp_path):
    out = tmp_path / "out"
    package.compare(out=out, seeds=[0, 1], **TUNED)
    file = out / "runs" / "random-d0.5-s1" / "experiment.toml"
    file.write_text(file.read_text().replace("lr = 0.2", "lr = 0.3"))
    with pytest.raises(InputError, match=r"train\.lr is 0\.2 in random-d0\.5-s0 and 0\.3 in random-d0\.5-s1\): remove"):
        package.compare(out=out, seeds=[0, 1], **TUNED)


AUTO = ["compare", "--methods", "fedavg,random", "--densities", "0.5", "--tune-lr", "auto", "--lr", 0.06, "--jobs", 1, "--rounds", 4]
AUTO += ["--epochs", 1, "--clients", 6, "--per-round", 3, "--set", "checkpoint.every=1"]


@pytest.fixture(scope="module")
def widened(fedrts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished comparison whose first rates are too small."""
    out = tmp_path_factory.mktemp("widened") / "out"
    ended = fedrts(*AUTO, "--out", out)
    assert ended.code == 0, ended.err
    assert ended.out.startswith("tuning: 6\n")
    assert "\ntuning, wider: " in ended.out
    return out


def valid_accuracy(trial: Path) -> float | None:
    """The mean over a finished trial; None: it diverged."""
    if not (trial / "summary.json").exists():
        return None
    history = [json.loads(line) for line in (trial / "history.jsonl").read_text("utf-8").splitlines()]
    return float(sum(line["valid_accuracy"] for line in history) / len(history))


def test_rates_widen_until_the_best_is_inside(widened):
    """Every rate that was tried is there for a reason, and the best has a worse one on either side."""
    record = tomllib.loads((widened / "compare.toml").read_text("utf-8"))
    assert record["tuning"]["rates"] == "auto"
    rows = {row["cell"]: row for row in read_csv(widened / "results.csv")}
    text = (widened / "results.md").read_text("utf-8")
    for name in ("fedavg", "random-d0.5"):
        trials = {float(path.name.removeprefix(f"{name}-lr")): valid_accuracy(path) for path in widened.glob(f"tuning/{name}-lr*")}
        assert {0.02, 0.06, 0.18} < set(trials)
        ladder = sorted(trials)
        assert all(after / before == pytest.approx(3, rel=0.01) for before, after in pairwise(ladder))
        found = max((rate for rate in ladder if trials[rate] is not None), key=lambda rate: trials[rate] or 0.0)
        assert float(rows[f"{name}-s0"]["train.lr"]) == found
        assert ladder[0] < found < ladder[-1] <= found * 3.01, "no rate was tried beyond the neighbour of the best"
        noted = {float(rate): None if score == "failed" else score for rate, score in record["tried"][name].items()}
        assert noted == pytest.approx(trials)
        assert f"| {name} | {found:g} |" in text
    assert "until its best lay between two others, at most 7" in text
    assert "may lie beyond" not in text


@pytest.mark.slow
def test_tuning_without_named_rates_goes_on_where_it_was_interrupted(fedrts, widened, tmp_path, monkeypatch):
    """In the midst of a trial that joined later; the folder then ends with the same files, and finished trials are left alone."""
    out = tmp_path / "out"
    interrupt_in("fedavg-lr0.54", monkeypatch, lambda: fedrts(*AUTO, "--out", out, "--quiet"))
    half = len((out / "tuning" / "fedavg-lr0.54" / "history.jsonl").read_text("utf-8").splitlines())
    assert half == 2
    finished = {file: file.stat().st_mtime_ns for file in out.glob("tuning/*/summary.json")}
    assert len(finished) == 6
    assert not (out / "runs").exists()
    assert fedrts(*AUTO, "--out", out, "--quiet").code == 0
    assert {file: file.stat().st_mtime_ns for file in finished} == finished
    for name in ("results.md", "compare.toml"):
        assert (out / name).read_bytes() == (widened / name).read_bytes()


def interrupt_in(cell: str, monkeypatch, call) -> None:
    """Ctrl-C after two rounds of this cell."""
    with monkeypatch.context() as patched:
        played = play.Reporter.played

        def interrupted(self, record):
            played(self, record)
            if self.cell == cell and record.round == 1:
                raise KeyboardInterrupt

        patched.setattr(play.Reporter, "played", interrupted)
        ended = call()
    assert ended.code == 130
    assert "interrupted" in ended.err


def test_the_best_at_the_end_of_named_rates_is_told(fedrts, tiny, tmp_path):
    out = tmp_path / "out"
    flags = ["--methods", "fedavg", "--tune-lr", "0.0001,0.2", "--jobs", 1, "--out", out, "--quiet"]
    ended = fedrts("compare", *flags, *tiny)
    line = "fedavg: the best learning rate, 0.2, is the largest tried; a better one may lie beyond: use --tune-lr auto, or name more rates"
    assert (ended.code, ended.err) == (0, f"note: {line}\n")
    assert f"\n- {line}\n" in (out / "results.md").read_text("utf-8")


def test_a_rate_that_diverges_is_the_worst_and_no_failure(fedrts, tiny, tmp_path):
    out = tmp_path / "out"
    ended = fedrts("compare", "--methods", "fedavg", "--tune-lr", "0.1,0.3,1e30", "--jobs", 1, "--out", out, "--quiet", *tiny)
    assert (ended.code, ended.err) == (0, ""), "the best has a rate on either side"
    text = (out / "results.md").read_text("utf-8")
    assert text.count("| fedavg | 0.3 |") == 1
    assert "| failed |" in text
    assert tomllib.loads((out / "compare.toml").read_text("utf-8"))["tried"]["fedavg"]["1e+30"] == "failed"


# -- a run that is tuned first --------------------------------------------------------------------------------------

RUN = ["run", "--method", "fedavg", "--tune-lr", "auto", "--lr", 0.06, "--rounds", 4, "--epochs", 1, "--clients", 6, "--per-round", 3]
RUN += ["--set", "checkpoint.every=1"]


@pytest.mark.slow
def test_a_run_tunes_its_rate_first(fedrts, widened, tmp_path, monkeypatch):
    """With the trials of a comparison, then the run that a comparison would have; interrupted in between, with the same result."""
    out = tmp_path / "run"
    interrupt_in("fedavg-lr0.18", monkeypatch, lambda: fedrts(*RUN, "--out", out, "--quiet"))
    refused = fedrts("resume", out)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "trials of learning rates, and no run yet: go on with the same `fedrts run`" in refused.err
    untuned = fedrts("run", "--out", out)
    assert (untuned.code, "is not empty" in untuned.err) == (2, True)
    changed = fedrts(*RUN, "--out", out, "--batch-size", 8)
    assert (changed.code, "train.batch_size" in changed.err) == (2, True)
    ended = fedrts(*RUN, "--out", out)
    assert (ended.code, ended.err) == (0, "")
    rate = float(next(row for row in read_csv(widened / "results.csv") if row["method"] == "fedavg")["train.lr"])
    assert f"learning rate {rate:g}, by accuracy on the validation split; tried: 0.02, 0.06, 0.18, 0.54" in ended.out
    assert tomllib.loads((out / "experiment.toml").read_text("utf-8"))["train"]["lr"] == rate
    tried, same = (tomllib.loads(file.read_text("utf-8"))["tried"]["fedavg"] for file in (out / "tuning.toml", widened / "compare.toml"))
    assert tried == same
    assert {path.name for path in (out / "tuning").iterdir()} == {path.name for path in (widened / "tuning").glob("fedavg-*")}
    assert (out / "model.safetensors").read_bytes() == (widened / "runs" / "fedavg-s0" / "model.safetensors").read_bytes()
    again = fedrts(*RUN, "--out", out)
    assert (again.code, "holds a run already: continue it with `fedrts resume" in again.err) == (2, True)
    assert len(read.find([out]).runs) == 1, "trials are no runs of a report"


@pytest.mark.slow
def test_python_tunes_as_the_command_line_does(fedrts, tiny, tmp_path):
    """`fedrts.run(tune_lr=…)`: the same trials, the same rate, the same bytes."""
    common: dict[str, Any] = {"method": "fedavg", "lr": 0.06, "rounds": 4, "epochs": 1, "clients": 6, "per_round": 3, "out": tmp_path / "a"}
    result = package.run(**common, tune_lr="auto", checkpoint={"every": 1}, observer=Silent())
    assert fedrts(*RUN, "--out", tmp_path / "b", "--quiet").code == 0
    tried = [tomllib.loads((tmp_path / name / "tuning.toml").read_text("utf-8"))["tried"] for name in "ab"]
    assert tried[0] == tried[1]
    lines = [(tmp_path / name / "experiment.toml").read_text("utf-8").replace(str(tmp_path / name), "") for name in "ab"]
    assert lines[0] == lines[1]
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert result.summary["rounds"] == 4
    named = package.run(**common | {"out": tmp_path / "c"}, tune_lr=(0.0001, 0.2, 1e30), observer=Silent())
    assert tomllib.loads((tmp_path / "c" / "experiment.toml").read_text("utf-8"))["train"]["lr"] == 0.2
    assert named.summary["accuracy"] is not None


@pytest.mark.parametrize(
    ("rates", "words"), [(0.1, "must be a list"), ("best", "or auto"), ([], "names no rate"), ([0.1, 0.1], "two cells")]
)
def test_what_python_cannot_tune_by(tmp_path, rates, words):
    with pytest.raises(InputError, match=words):
        package.run(method="fedavg", rounds=4, tune_lr=rates, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_rate_is_tried_in_the_folder_of_another_run(fedrts, run_dir):
    before = contents(run_dir)
    ended = fedrts("run", "--tune-lr", "auto", "--out", run_dir)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert f"{run_dir} holds a run already: continue it with `fedrts resume" in ended.err
    assert contents(run_dir) == before


def test_a_run_that_no_rate_can_mend_leaves_nothing(fedrts, tmp_path):
    ended = fedrts("run", "--density", "0.0001", "--tune-lr", "0.1,0.2", "--out", tmp_path / "out")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert ended.err.startswith("error: density 0.0001 is infeasible")
    assert not (tmp_path / "out").exists()


def test_a_run_for_which_every_rate_diverges(fedrts, tiny, tmp_path):
    ended = fedrts("run", *tiny, "--method", "fedavg", "--tune-lr", "1e30,1e35", "--out", tmp_path / "out", "--quiet")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "no learning rate of 1e+30, 1e+35 could be trained with" in ended.err
    assert "is not finite" in ended.err
    assert "another --out" in ended.err


# -- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["--methods"]),
        (["--methods", "fedrtz"], ["'fedrtz'", "did you mean 'fedrts'"]),
        (["--methods", "fedrts", "--tune-lr", "automatic"], ["--tune-lr takes learning rates, or auto", "'automatic'"]),
        (["--methods", "fedrts", "--seeds", "a"], ["--seeds takes whole numbers", "'a'"]),
        (["--methods", "fedrts", "--metric", "accurcy"], ["'accurcy'", "did you mean 'accuracy'"]),
        (["--methods", "fedrts,random", "--reference", "fedavg"], ["--reference fedavg is not among the methods"]),
        (["--methods", "fedrts", "--jobs", 0], ["--jobs must be at least 1"]),
        (["--methods", "fedrts", "--grid", "train.lr"], ["--grid takes table.key=a,b"]),
        (["--methods", "fedrts", "--grid", "train.lr=1", "--grid", "train.lr=2"], ["names train.lr twice"]),
        (["--methods", "fedrts", "--set", "train.rate=1"], ["cell fedrts-d0.2-s0", "train.rate"]),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(fedrts, tmp_path, flags, words):
    ended = fedrts("compare", *flags, "--out", tmp_path / "out")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert all(word in ended.err for word in words), ended.err
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_refused(fedrts, tmp_path):
    (tmp_path / "thesis.doc").write_text("precious")
    ended = fedrts("compare", "--methods", "fedrts", "--out", tmp_path)
    assert ended.code == 2
    assert "holds 'thesis.doc'" in ended.err


# -- Python ---------------------------------------------------------------------------------------------------------


def test_from_python(tmp_path):
    found = package.compare(
        methods=["fedrts", "random"],
        densities=[0.2],
        seeds=range(1),
        grid={"topology.interval": [1, 2]},
        reference="random",
        data="digits",
        rounds=2,
        epochs=1,
        clients=4,
        out=tmp_path / "out",
    )
    assert len(found.rows) == 4
    assert {row["topology.interval"] for row in found.rows} == {1, 2}
    assert not found.failures
    assert "interval 1, density 0.2" in found.markdown("accuracy", "random")


def test_lists_as_values_of_a_key(tmp_path):
    settings: dict[str, Any] = {"data": "digits", "rounds": 1, "epochs": 1, "clients": 4}
    found = package.compare(methods=["random"], grid={"model_options.hidden": [[8], [16, 8]]}, out=tmp_path / "out", **settings)
    assert [row["cell"] for row in found.rows] == ["random-d0.2-hidden8-s0", "random-d0.2-hidden16_8-s0"]
    assert "hidden [16, 8], density 0.2" in (tmp_path / "out" / "results.md").read_text("utf-8")


def test_other_data_under_the_same_name_are_refused(tmp_path):
    """What an earlier version began has no fingerprint: it goes on, and has one from then on."""
    file, out = tmp_path / "mine.npz", tmp_path / "out"
    settings = {"methods": ["fedavg"], "data": f"npz:{file}", "rounds": 1, "epochs": 1, "clients": 2, "out": out}

    def write(seed):
        np.savez(file, x=np.random.default_rng(seed).normal(size=(60, 4)).astype("f4"), y=np.arange(60) % 3)

    write(0)
    package.compare(seeds=[0], **settings)
    declared = tomllib.loads((out / "compare.toml").read_text())
    (out / "compare.toml").write_text(tomli_w.dumps({key: value for key, value in declared.items() if key != "fingerprints"}))
    package.compare(seeds=[0], **settings)
    assert tomllib.loads((out / "compare.toml").read_text()) == declared
    write(1)
    with pytest.raises(InputError, match=r"other data under the name npz:.*mine\.npz: restore them"):
        package.compare(seeds=[0, 1], **settings)
    write(0)
    assert len(package.compare(seeds=[0, 1], **settings).rows) == 2

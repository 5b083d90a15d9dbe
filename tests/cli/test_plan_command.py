"""`fedrts plan`, `fedrts run --budget` and `fedrts compare --budget`."""

from __future__ import annotations

import csv
import json
import shlex
import tomllib

import pytest

from fedrts.report import write
from fedrts.report.model import Lines
from helping import assert_one_line_error

NET = ("--set", "model_options.hidden=[32]", "--set", "topology.interval=3")
SMALL = (*NET, "--epochs", "1", "--clients", "12", "--set", "clients.per_round=4")


def sent(path) -> int:
    summary = json.loads((path / "summary.json").read_text("utf-8"))
    return int(summary["upload_bytes"] + summary["download_bytes"])


def test_the_table_marks_one_and_ends_with_the_command(fedrts, tmp_path):
    ended = fedrts("plan", *SMALL, "--budget", "300kB")
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert sum(line.lstrip().startswith("→ ") for line in lines) == 2, "a row, and why"
    assert max(map(len, lines[:-1])) <= 80
    assert "…" not in ended.out
    program, *arguments = shlex.split(lines[-1])
    assert (program, arguments[0]) == ("fedrts", "run")
    assert fedrts(*arguments, "--quiet", "--out", tmp_path / "run").code == 0
    assert 0.5 * 300_000 < sent(tmp_path / "run") <= 300_000


def test_json(fedrts):
    ended = fedrts("plan", "--data", "digits", *SMALL, "--link", "1Mbit/s", "--deadline", "50ms", "--json")
    assert (ended.code, ended.err) == (0, "")
    content = json.loads(ended.out)
    marked = [row for row in content["fitting"] if row.pop("recommended")]
    assert marked == [content["recommended"]]
    assert all(row["seconds"] <= 0.05 and row["client_bytes"] <= 6250 for row in content["fitting"])
    assert content["budget"] == "6.25 kB a client and round (1Mbit/s for 50ms)"
    assert f"--density {marked[0]['density']}" in content["command"]


def test_a_file_is_named_in_the_command_and_what_it_says_is_kept(fedrts, tmp_path):
    file = tmp_path / "my.toml"
    file.write_text("density = 0.4\nmodel_options.hidden = [32]\n", "utf-8")
    ended = fedrts("plan", file, "--method", "random", "--budget", "2MB")
    assert shlex.split(ended.out.splitlines()[-1])[2:] == [str(file), "--method", "random", "--value-type", "int8", "--rounds", "50"]


def test_a_run_says_what_was_planned_and_why(fedrts, tmp_path):
    ended = fedrts("run", *SMALL, "--budget", "300kB", "--quiet", "--out", tmp_path / "run")
    assert ended.code == 0
    assert ended.err.startswith("note: planned for 300 kB in all: density 0.")
    assert "value_type int4, rounds 50 (first all 50 rounds" in ended.err
    assert len(ended.err.splitlines()) == 1
    assert sent(tmp_path / "run") <= 300_000


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan",),
        ("plan", "--budget", "lots"),
        ("plan", "--budget", "1MB", "--per-round", "1kB"),
        ("plan", "--per-round", "10"),
        ("plan", "--link", "5Mb/s", "--deadline", "60s"),
        ("plan", "--deadline", "60s"),
        ("plan", *SMALL, "--budget", "1kB"),
        ("plan", "--data", "digits", "--input-shape", "1,8,8", "--budget", "1MB"),
        ("run", "--budget", "200"),
        ("run", *SMALL, "--rounds", "50", "--density", "0.5", "--budget", "100kB"),
        ("compare", "--methods", "random", "--out", "nowhere", "--budget", "tiny"),
        ("compare", "--methods", "random", "--out", "nowhere", *SMALL, "--budget", "1kB"),
        ("compare", "--methods", "random", "--out", "nowhere", "--budget", "1MB", "--grid", "rounds=5,10"),
    ],
)
def test_mistakes(fedrts, arguments):
    assert_one_line_error(fedrts(*arguments))


def test_too_small_a_budget_says_what_would_do(fedrts):
    ended = fedrts("run", *SMALL, "--rounds", "50", "--density", "0.5", "--budget", "100kB")
    assert "nothing fits 100 kB in all: the least that 50 rounds can do with, density 0.5 as int2, needs " in ended.err
    compared = fedrts("compare", "--methods", "fedrts,random", "--densities", "0.5", "--out", "nowhere", *SMALL, "--budget", "1kB")
    assert "error: cell fedrts-d0.5-s0: 1 kB do not pay for one round, which takes " in compared.err


# -- comparisons ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def equal(fedrts, tmp_path_factory):
    """Two methods × two densities × two seeds with the same bytes."""
    out = tmp_path_factory.mktemp("equal") / "out"
    grid = ("--methods", "fedrts,random,fedavg", "--densities", "0.2,0.6", "--seeds", "0,1", "--budget", "200kB", "--rounds", "30")
    ended = fedrts(
        "compare", *grid, "--epochs", "1", "--clients", "12", "--per-round", "4", *NET, "--value-type", "int8", "--jobs", 1, "--out", out
    )
    assert (ended.code, ended.err) == (0, "")
    return out


def test_every_run_has_the_same_bytes(equal):
    """None more, and none so much less that another round would fit, unless it has the most rounds that are allowed."""
    with open(equal / "results.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    rounds: dict[tuple[str, str], set[int]] = {}
    for row in rows:
        both = int(row["upload_bytes"]) + int(row["download_bytes"])
        played = int(row["rounds"])
        rounds.setdefault((row["method"], row["density_target"]), set()).add(played)
        assert both <= 200_000
        assert played == 30 or both * (played + 1) / played > 0.95 * 200_000
    assert len(rounds) == 5
    assert all(len(found) == 1 for found in rounds.values()), "seeds are runs of one setting"
    most = {key: max(found) for key, found in rounds.items()}
    assert 30 >= most["random", "0.2"] > most["random", "0.6"] > most["fedavg", "1.0"]


def test_schedules_run_over_the_rounds_of_each(equal):
    for folder in (equal / "runs").iterdir():
        experiment = tomllib.loads((folder / "experiment.toml").read_text("utf-8"))
        assert experiment["topology"]["end"] == max(1, int(0.6 * experiment["rounds"]))


def test_the_table_shows_rounds_and_bytes(equal):
    text = (equal / "results.md").read_text("utf-8")
    assert "at most 200 kB sent by each run" in text
    assert "| method | density | rounds | MB sent | relative to dense | FLOPs |" in text


def test_the_same_command_goes_on_and_another_budget_is_refused(fedrts, equal):
    grid = ("--methods", "fedrts,random,fedavg", "--densities", "0.2,0.6", "--seeds", "0,1,2", "--rounds", "30")
    small = ("--epochs", "1", "--clients", "12", "--per-round", "4", *NET, "--value-type", "int8")
    same = (*grid, *small, "--jobs", 1, "--out", equal)
    ended = fedrts("compare", *same, "--budget", "200kB")
    assert (ended.code, ended.err) == (0, "")
    assert "15 of 15" in ended.out
    assert_one_line_error(fedrts("compare", *same, "--budget", "150kB"), "rounds is")


def test_its_report_begins_with_the_frontier(equal, tmp_path):
    _, report = write([equal], tmp_path, pictures=False)
    first = report.figures[0]
    assert isinstance(first, Lines)
    assert first.id == "digits-mlp-accuracy-frontier"
    assert all("end=" not in series.name for series in first.series), "T_end follows from the rounds"

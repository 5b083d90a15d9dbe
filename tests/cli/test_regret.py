"""`fedrts regret` as a user calls it."""

import csv
import json
import sys

import pytest

SMALL = ["--arms", "12", "--pick", "3", "--steps", "60", "--repetitions", "3"]


def test_a_study_ends_with_its_table_and_files(fedrts, tmp_path):
    out = tmp_path / "new" / "study"
    ended = fedrts("regret", *SMALL, "--seed", "4", "--out", out)
    assert (ended.code, ended.err) == (0, "")
    assert "TSAdj λ=1" in ended.out
    assert "vacuous" in ended.out
    assert sorted(path.name for path in out.iterdir()) == ["regret.csv", "regret.json", "regret.md", "regret.png"]
    summary = json.loads((out / "regret.json").read_text("utf-8"))
    assert summary["settings"]["seed"] == 4
    assert summary["version"]
    assert summary["bound"]["vacuous"] is True
    with open(out / "regret.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    last = {row["policy"]: float(row["regret"]) for row in rows if row["step"] == "60"}
    assert last == pytest.approx({name: entry["regret"] for name, entry in summary["policies"].items()}, rel=1e-5)
    assert "| TSAdj λ=10 |" in (out / "regret.md").read_text("utf-8")
    assert (out / "regret.png").read_bytes().startswith(b"\x89PNG")

    again = fedrts("regret", *SMALL, "--out", out)
    assert again.code == 2
    assert "holds a regret study already" in again.err
    assert fedrts("regret", *SMALL, "--seed", "4", "--out", tmp_path / "same", "--quiet").out == ""
    assert (tmp_path / "same" / "regret.csv").read_bytes() == (out / "regret.csv").read_bytes()


def test_own_means_and_an_own_reward(fedrts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_for_regret.py").write_text("def worth(actions, means):\n    return ((actions * means).sum(-1) + 1).log()\n", "utf-8")
    (tmp_path / "means.txt").write_text("0.9\n0.8\n0.2\n0.2\n0.1\n", "utf-8")
    ended = fedrts(
        "regret", "--means", "means.txt", "--pick", "2", "--steps", "40", "--repetitions", "2", "--scale", "2", "--reward",
        "mine_for_regret:worth", "--epsilon", "0.001", "--clients", "5", "--out", "own",
    )  # fmt: skip
    sys.modules.pop("mine_for_regret", None)
    assert (ended.code, ended.err) == (0, "")
    summary = json.loads((tmp_path / "own" / "regret.json").read_text("utf-8"))
    assert summary["settings"]["arms"] == 5
    assert list(summary["policies"]) == ["TSAdj λ=2", "CUCB", "greedy", "random"]
    assert summary["bound"]["epsilon"] == 0.001
    assert summary["least_slope"] is None


def test_without_matplotlib_the_rest_is_written(fedrts, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ended = fedrts("regret", *SMALL, "--out", tmp_path / "plain")
    assert ended.code == 0
    assert ended.err.splitlines() == ["note: no regret.png: this needs matplotlib, which is not installed: pip install 'fedrts[plot]'"]
    assert not (tmp_path / "plain" / "regret.png").exists()


@pytest.mark.parametrize(
    ("extreme", "said"),
    [
        (["--epsilon", "1e-60"], "with ε = 1e-60 no number is as large"),
        (["--lipschitz", "1e60"], "no number is as large"),
        (["--epsilon", "0.9"], "ε is not below every"),
    ],
)
def test_a_bound_that_says_nothing_is_said_to(fedrts, tmp_path, extreme, said):
    ended = fedrts("regret", *SMALL, *extreme, "--out", tmp_path / "study")
    assert (ended.code, ended.err) == (0, "")
    assert said in ended.out


def test_a_file_without_means(fedrts, tmp_path):
    (tmp_path / "means.txt").write_text("\n", "utf-8")
    ended = fedrts("regret", *SMALL, "--means", tmp_path / "means.txt", "--out", tmp_path / "none")
    assert ended.code == 2
    assert "holds no means: write numbers in [0, 1] into it, one a line" in ended.err
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--pick", "12"], "--pick must be at least 1 and less than the 12 arms"),
        (["--scale", "-1"], "--scale must be a number above 0"),
        (["--steps", "3"], "--steps must be at least 10"),
        (["--reward", "totl"], "did you mean 'total'?"),
        (["--reward", "math:nothing"], "cannot import the reward"),
        (["--reward", "math:sqrt"], "fails on actions"),
        (["--means", "nowhere.txt"], "cannot read means from 'nowhere.txt'"),
        (["--arms", "many"], "--arms"),
    ],
)
def test_bad_input_is_one_line(fedrts, tmp_path, wrong, said):
    ended = fedrts("regret", *SMALL, *wrong, "--out", tmp_path / "none")
    assert ended.code == 2
    assert said in ended.err
    assert len(ended.err.splitlines()) == 1
    assert not (tmp_path / "none").exists()


def test_a_place_that_cannot_be_written(fedrts, tmp_path):
    (tmp_path / "file").write_text("", "utf-8")
    ended = fedrts("regret", *SMALL, "--out", tmp_path / "file" / "deeper")
    assert ended.code == 2
    assert "is a file; choose another --out" in ended.err

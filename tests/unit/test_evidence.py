"""benchmarks/evidence.py: the committed tables are those of the committed raw results, and `fedrts compare` takes every command."""

import importlib
import json
import shlex
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def evidence(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("evidence")


def test_tables_are_those_of_the_raw_results(evidence):
    assert evidence.render() == (ROOT / "benchmarks" / "results" / "evidence.md").read_text("utf-8")


def test_a_mean_by_hand(evidence):
    raw = json.loads((evidence.RAW / "digits.json").read_text("utf-8"))
    own = [run["summary"]["accuracy_last10"] for run in raw["runs"] if run["summary"]["method"] == "fedrts"]
    error = statistics.stdev(own) / len(own) ** 0.5
    assert f"| fedrts | {statistics.mean(own):.4f} ± {error:.4f} |" in evidence.render()


def test_accuracies_are_those_of_the_runs(evidence):
    """What a summary says is the mean over the last ten evaluations, which are of the last ten rounds."""
    for file in evidence.RAW.glob("*.json"):
        for run in json.loads(file.read_text("utf-8"))["runs"]:
            last = run["evaluations"][-10:]
            assert [index for index, *_ in last] == list(range(last[-1][0] - 9, last[-1][0] + 1)), run["cell"]
            assert statistics.mean(accuracy for _, accuracy, _ in last) == pytest.approx(run["summary"]["accuracy_last10"])


def test_longer_means_by_hand(evidence):
    """Of 500 rounds the last 100 have twenty evaluations that lie five rounds apart; those of the last ten rounds count no more."""
    raw = json.loads((evidence.RAW / "main.json").read_text("utf-8"))
    accuracies = {index: accuracy for index, accuracy, _ in raw["runs"][0]["evaluations"]}
    found = evidence.of_last(raw, 100)["runs"][0]["summary"]["accuracy_last10"]
    assert found == pytest.approx(statistics.mean(accuracies[index] for index in range(404, 500, 5)))
    assert found != raw["runs"][0]["summary"]["accuracy_last10"]


def test_runs_of_the_main_comparison_are_borrowed(evidence):
    """At paper scale the ablation's table has the runs of FedRTS that the main comparison made, and no others of it."""
    main = json.loads((evidence.RAW / "main.json").read_text("utf-8"))
    borrowed = [run for run in main["runs"] if run["summary"]["method"] in evidence.COMPARISONS["ablation"].borrowed]
    assert {run["summary"]["method"] for run in borrowed} == {"fedrts"}
    other = {**borrowed[0], "summary": {**borrowed[0]["summary"], "method": "fedcucb", "accuracy_last10": 0.5}}
    text = "\n".join(evidence.tables({"command": "c", "axes": [], "runs": [other], "trials": []}, borrowed))
    assert "| fedcucb | *0.5000* (1 of 3 seeds) |" in text
    assert "| fedrts | **0." in text


@pytest.mark.parametrize("scale", ["", "digits_"])
def test_commands_are_understood(evidence, scale):
    """Every comparison names known methods and keys; the values that the main one has are left out at paper scale."""
    from fedrts import config, methods

    for name, comparison in evidence.COMPARISONS.items():
        if name.startswith("digits") != bool(scale):
            continue
        words = shlex.split(evidence.command(name))
        assert words[:2] == ["fedrts", "compare"]
        options = list(zip(words[2::2], words[3::2], strict=True))
        assert set(dict(options)["--methods"].split(",")) <= set(methods.names())
        pairs = [value for flag, value in options if flag == "--set"]
        pairs += [value.split("=")[0] + "=" + value.split("=")[1].split(",")[0] for flag, value in options if flag == "--grid"]
        own = {"data": dict(options)["--data"], "method": comparison.methods[-1], "device": "cpu"}
        config.resolve(own, {"model": dict(options).get("--model", "auto")}, config.from_assignments(pairs))
    assert "interval=3,5,20" in evidence.command("interval")
    assert "interval=3,5,10,20" in evidence.command("digits_interval")


def test_pieces_are_collected_one_after_the_other(evidence, monkeypatch, tmp_path):
    """A folder's runs join those that are there; a cell that was played again has the new run. The order is that of the names."""
    monkeypatch.setattr(evidence, "RAW", tmp_path / "raw")
    monkeypatch.setattr(evidence, "run_of", lambda folder: {"cell": folder.name, "from": folder.parts[-3]})
    for piece, cells in {"first": ("b-s0", "c-s0"), "second": ("a-s0", "b-s0")}.items():
        for cell in cells:
            (tmp_path / piece / "runs" / cell).mkdir(parents=True)
            (tmp_path / piece / "runs" / cell / "summary.json").touch()
        (tmp_path / piece / "compare.toml").write_text('grid = {"clients.alpha" = [5]}', "utf-8")
        file = evidence.collect("heterogeneity", tmp_path / piece)
    raw = json.loads(file.read_text("utf-8"))
    assert [(run["cell"], run["from"]) for run in raw["runs"]] == [("a-s0", "second"), ("b-s0", "second"), ("c-s0", "first")]
    assert raw["axes"] == ["clients.alpha"]
    assert raw["command"] == evidence.command("heterogeneity")


def test_what_a_key_does_to_a_method_by_hand(evidence):
    """Over the seeds that both values have: the run with the usual one is subtracted."""
    found = {}
    for name in ("short", "interval"):
        for run in json.loads((evidence.RAW / f"{name}.json").read_text("utf-8"))["runs"]:
            if run["summary"]["method"] == "fedrts":
                found[run["settings"]["topology.interval"], run["summary"]["seed"]] = run["summary"]["accuracy_last10"]
    less = [found[3, seed] - found[10, seed] for seed in (0, 1, 2)]
    error = statistics.stdev(less) / len(less) ** 0.5
    line = next(line for line in evidence.render().splitlines() if line.startswith("| interval 3 |"))
    assert f"| {statistics.mean(less):+.4f} ± {error:.4f} (p" in line

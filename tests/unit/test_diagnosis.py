"""The measures of benchmarks/diagnosis.py, against examples worked out by hand."""

import importlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedrts.sparse.mask import Mask

ROOT = Path(__file__).parents[2]


@pytest.fixture
def diagnosis(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("diagnosis")


def mask_of(active, size=8):
    bits = torch.zeros(size, dtype=torch.bool)
    bits[list(active)] = True
    return Mask(bits, [size])


def test_votes_are_counted_and_compared_with_chance(diagnosis):
    """Three clients name two of six inactive links each."""
    ballot = diagnosis.Ballot([torch.tensor(pair) for pair in ([2, 3], [2, 4], [2, 3])], mask_of([0, 1]))
    found = ballot.counted()
    assert found["links_by_votes"] == [3, 1, 1, 1]
    assert found["overlap"]["share"] == pytest.approx((1 / 2 + 1 + 1 / 2) / 3)
    assert found["overlap"]["chance"] == pytest.approx(2 * 2 / 6 / 2)
    assert found["chance"] == pytest.approx([6 * p for p in ((2 / 3) ** 3, 3 * (1 / 3) * (2 / 3) ** 2, 3 * (1 / 9) * (2 / 3), 1 / 27)])
    before = diagnosis.Ballot([torch.tensor([1, 3])], mask_of([0, 2]))
    assert ballot.overlap_with(before) == {"share": pytest.approx(2 / 3), "chance": pytest.approx(1 / 5)}  # off both masks: 3 to 7
    assert ballot.grown(mask_of([2, 3, 7]))["grown_by_votes"] == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])


def test_overlaps_of_random_votes_are_what_chance_says(diagnosis):
    sizes, mask = [400, 100], Mask(torch.arange(500) % 4 == 0, [400, 100])
    rng, free = np.random.default_rng(0), [np.flatnonzero(~mask.bits.numpy()[:400]), 400 + np.flatnonzero(~mask.bits.numpy()[400:])]
    votes = [torch.from_numpy(np.concatenate([rng.choice(part, 30, replace=False) for part in free])) for _ in range(10)]
    overlap = diagnosis.Ballot(votes, mask).counted()["overlap"]
    assert sum(sizes) == 500
    assert overlap["share"] == pytest.approx(overlap["chance"], rel=0.1)


def test_lives_of_links(diagnosis):
    lives = diagnosis.Lives()
    masks = [mask_of(active) for active in ([0, 1, 2], [0, 3, 4], [0, 3, 1], [1, 5, 4])]
    found = [lives.outer(before, after) for before, after in itertools.pairwise(masks)]
    assert found[0] == {"dropped_just_grown": 0, "active_just_grown": 0, "grown_again": 0}
    assert found[1] == {"dropped_just_grown": 1, "active_just_grown": 2 / 3, "grown_again": 1}  # 4 goes, 1 returns
    assert found[2] == {"dropped_just_grown": 0, "active_just_grown": 1 / 3, "grown_again": 1 / 2}  # 0 and 3 go, 1 stays
    assert lives.survival() == {"sizes": [2, 1, 2], "alive": [[1, 1 / 2, 0], [1, 1], [1]]}


def test_how_often_draws_tell_links_apart(diagnosis):
    rng = np.random.default_rng(0)
    groups = {}
    for name, (a, b) in {"1 vote": (40.0, 80.0), "no vote": (35.0, 85.0)}.items():
        mean = a / (a + b)
        groups[name] = {"mean": mean, "spread": (mean * (1 - mean) / (a + b + 1)) ** 0.5}
    drawn = np.mean(rng.beta(40, 80, 200_000) > rng.beta(35, 85, 200_000))
    assert diagnosis.told_apart(groups, "1 vote", "no vote") == pytest.approx(drawn, abs=0.01)
    assert diagnosis.told_apart({}, "1 vote", "no vote") is None


def test_overlap_with_a_dense_model_leaves_out_full_layers(diagnosis):
    mask = Mask(torch.tensor([1, 1, 0, 0, 1, 1], dtype=torch.bool), [4, 2])
    found = diagnosis.overlap_with_dense(mask, torch.tensor([0.1, -9.0, 3.0, 0.2, 1.0, 1.0]))
    assert found == {"share": 1 / 2, "chance": 1 / 2}


def test_links_spread_over_units(diagnosis):
    """Four links: two outputs have half of them each; of three inputs one has two, the others one; a full layer does not count."""
    bits = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]], dtype=torch.bool).flatten()
    found = diagnosis.spread_over_units(Mask(torch.cat([bits, torch.ones(4, dtype=torch.bool)]), [9, 4]), [(3, 3), (2, 2)])
    assert found["outputs"] == pytest.approx(2 / 3)
    assert found["inputs"] == pytest.approx(np.exp(-(0.5 * np.log(0.5) + 2 * 0.25 * np.log(0.25))) / 3)


@pytest.mark.slow
def test_one_command_runs_and_renders(tmp_path):
    """A few short rounds of digits, measured in a process of their own; then tables again of the raw numbers alone."""
    command = [sys.executable, str(ROOT / "benchmarks/diagnosis.py"), "--out", str(tmp_path)]
    tables = {"topology.interval": 1, "train.epochs": 2, "clients.per_round": 3, "model_options.hidden": [32, 32], "eval.fairness": "false"}
    short = ["--methods", "fedrts,feddst", "--variant", "sure:fedrts:scale=100", "--rounds", "4", "--density", "0.3"]
    settings = [part for key, value in tables.items() for part in ("--set", f"{key}={value}")]
    first = subprocess.run([*command, *short, *settings], capture_output=True, text=True, check=True)
    table = (tmp_path / "diagnosis.md").read_text("utf-8")
    assert table in first.stdout
    assert all(word in table for word in ("| sure |", "| feddst |", "## Votes", "## Posteriors of fedrts"))
    raw = json.loads((tmp_path / "raw/run_fedrts.json").read_text("utf-8"))
    assert [outer["round"] for outer in raw["outers"]] == [0, 1]
    assert sum(raw["outers"][0]["votes"]["grown_by_votes"]) == pytest.approx(1)
    (tmp_path / "diagnosis.md").unlink()
    subprocess.run([*command, "--render"], capture_output=True, text=True, check=True)
    assert (tmp_path / "diagnosis.md").read_text("utf-8") == table
    assert (tmp_path / "diagnosis.svg").exists()

"""benchmarks/transplant.py: a recipient keeps the links of its donor from the first round on."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "transplant"
SMALL = ["--model", "mlp", "--rounds", "3", "--seeds", "0", "--donors", "fedrts,fedavg", "--density", "0.3"]
KEYS = ["--set", "topology.interval=1", "--set", "topology.end=2", "--set", "model_options.hidden=[16,16]"]


@pytest.fixture
def transplant(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("transplant")


@pytest.mark.slow
def test_recipients_have_the_masks_of_their_donors(tmp_path):
    runs, out = tmp_path / "runs", tmp_path / "out"
    command = [sys.executable, str(ROOT / "benchmarks" / "transplant.py"), *SMALL, *KEYS, "--runs", str(runs), "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    of_sparse, of_dense = (load_file(runs / f"mask_of_{donor}-s0" / "masks.safetensors") for donor in ("fedrts", "fedavg"))
    donated, dense = load_file(runs / "fedrts-s0" / "masks.safetensors"), load_file(runs / "fedavg-s0" / "model.safetensors")
    first = load_file(runs / "random-s0" / "masks.safetensors")
    assert donated.keys() == of_sparse.keys() == of_dense.keys()
    for name, mask in donated.items():
        assert torch.equal(mask, of_sparse[name])
        assert int(of_dense[name].sum()) == int(mask.sum()), "as many links of every layer"
        assert dense[name].abs()[of_dense[name]].min() >= dense[name].abs()[~of_dense[name]].max(), "the largest of the dense model"
    assert any(not torch.equal(mask, first[name]) for name, mask in donated.items()), "the donor has moved from its first mask"
    lines = (runs / "mask_of_fedrts-s0" / "history.jsonl").read_text("utf-8").splitlines()
    assert all(json.loads(line)["links_changed"] == 0 for line in lines), "and the recipient does not"

    again = subprocess.run([*command, "--render"], check=True, capture_output=True, text=True)
    assert not again.stderr, "nothing is played"
    other = subprocess.run([*command, "--rounds", "4"], capture_output=True, text=True)
    assert other.returncode == 2
    assert other.stderr == f"error: {runs} holds runs with other settings: choose another folder --runs, or delete it\n"
    summary = json.loads((runs / "mask_of_fedrts-s0" / "summary.json").read_text("utf-8"))
    assert f"| mask of fedrts | – | {summary['accuracy_last10']:.4f} |" in (out / "transplant.md").read_text("utf-8").replace("*", "")


def test_tables_are_those_of_the_raw_results(transplant):
    found = sorted(RESULTS.glob("*/raw.json"))
    assert found
    for raw in found:
        assert transplant.render(json.loads(raw.read_text("utf-8"))) == (raw.parent / "transplant.md").read_text("utf-8")

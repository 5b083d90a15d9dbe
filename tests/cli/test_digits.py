"""Every method by its name on real data: the handwritten digits at a density of 0.15."""

from __future__ import annotations

import json
import tomllib

import pytest
import safetensors.torch

from fedrts import methods, models
from fedrts.sparse import budget
from fedrts.sparse.layout import Layout

DENSITY = 0.15


def run(fedrts, method, out, *flags):
    """Accuracy of a finished run, whose masks have the density asked for."""
    ended = fedrts("run", "--method", method, "--density", DENSITY, "--out", out, "--quiet", *flags)
    dense = methods.get(method).dense
    assert ended.code == 0, ended.err
    assert ended.err == "" or (dense and "density 0.15 is ignored" in ended.err)
    layout = Layout.of(models.get("mlp")((1, 8, 8), 10))
    masks = safetensors.torch.load_file(out / "masks.safetensors")
    assert set(masks) == {entry.name for entry in layout.layers}
    active = sum(int(mask.count_nonzero()) for mask in masks.values())
    assert active == (layout.links if dense else budget.links_to_keep(layout, DENSITY))
    density = (active + layout.parameters - layout.links) / layout.parameters
    weights = safetensors.torch.load_file(out / "model.safetensors")
    assert all(weights[name][~mask].count_nonzero() == 0 for name, mask in masks.items())
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    assert summary["density"] == pytest.approx(density)
    assert dense or DENSITY - 1e-3 < density <= DENSITY
    return summary


SHORT = ["--rounds", 6, "--clients", 6, "--per-round", 3, "--epochs", 3, "--set", "clients.partition=iid"]
SHORT += ["--set", "topology.interval=2", "--set", "topology.end=4"]


@pytest.mark.parametrize("method", methods.names())
def test_a_few_rounds_of_every_method_learn_something(fedrts, tmp_path, method):
    summary = run(fedrts, method, tmp_path / "run", *SHORT)
    assert summary["best_accuracy"] > 0.5, "chance is 0.1"


@pytest.mark.slow
@pytest.mark.parametrize("method", methods.names())
def test_thirty_rounds_of_every_method(fedrts, tmp_path, method):
    summary = run(fedrts, method, tmp_path / "run", "--rounds", 30)
    assert summary["accuracy"] >= 0.6


# -- what can be mistaken on the command line ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--set", "train.server_optimizer=adagrad"], ["train.server_optimizer", "'adam'"]),
        (["--set", "train.server_lr=0"], ["train.server_lr", "> 0"]),
        (["--set", "train.server_momentum=1"], ["train.server_momentum", "< 1"]),
        (["--set", "train.server_tau=-1"], ["train.server_tau", "> 0"]),
        (["--set", "train.proximal=-1"], ["train.proximal", "≥ 0"]),
        (["--set", "method_options.score=fishr"], ["no score 'fishr'", "did you mean 'fisher'"]),
        (["--set", "method_options.scale=client"], ["method_options.scale must be", "'clients'"]),
        (["--method", "snip", "--set", "method_options.scope=layer"], ["method_options.scope", "'global'", "'erk'"]),
        (["--method", "synflow", "--set", "method_options.iterations=0"], ["method_options.iterations", "≥ 1"]),
        (["--method", "grasp", "--set", "method_options.temperature=0"], ["method_options.temperature", "> 0"]),
        (["--method", "snip", "--density", "0.001"], ["density 0.001 is infeasible", "smallest feasible density"]),
        (["--method", "synflow", "--density", "0.001"], ["density 0.001 is infeasible", "smallest feasible density"]),
        (["--method", "fedtiny", "--density", "0.001"], ["density 0.001 is infeasible", "smallest feasible density"]),
    ],
)
def test_mistakes_are_one_line(fedrts, tmp_path, flags, words):
    ended = fedrts("run", *flags, "--out", tmp_path / "run")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1, ended.err
    assert all(word in ended.err for word in words), ended.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("flags", "rate"), [([], 1.0), (["--set", "train.server_optimizer=adam"], 0.01)])
def test_the_rate_of_the_server_stands_in_the_folder(fedrts, tmp_path, tiny, flags, rate):
    assert fedrts("run", *tiny, *flags, "--out", tmp_path / "run").code == 0
    assert tomllib.loads((tmp_path / "run" / "experiment.toml").read_text("utf-8"))["train"]["server_lr"] == rate

"""Classes and clients are judged by the final model, each on its own samples."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedrts
from fedrts.api import playing
from fedrts.observe import Silent
from fedrts.runs import fairness
from fedrts.runs.folder import RunFolder
from fedrts.tasks import Classification


def judged(run, folder):
    """The run played to its end in a folder, and its fairness.json."""
    store = RunFolder(folder)
    store.create(run.experiment)
    result = playing.play(run, store, Silent())
    return result, json.loads((folder / "fairness.json").read_text("utf-8"))


def test_classes_and_clients_are_judged_on_their_own_samples(toy, tmp_path):
    run = toy(eval={"every": 1, "batch_size": 7})
    result, found = judged(run, tmp_path / "run")
    data = run.data
    with torch.no_grad():
        test, train = (result.model(x).argmax(-1) for x in (data.test_x, data.x))
    right = [float((test[data.test_y == label] == label).float().mean()) for label in range(3)]
    assert [entry["accuracy"] for entry in found["classes"]] == pytest.approx(right)
    assert [entry["samples"] for entry in found["classes"]] == [int((data.test_y == label).sum()) for label in range(3)]
    assert found["share"] == 1.0
    assert len(found["clients"]) == len(run.rows)
    for entry, rows in zip(found["clients"], run.rows, strict=True):
        assert entry["accuracy"] == pytest.approx(float((train[rows] == data.y[rows]).float().mean()))
        assert entry["expected_accuracy"] == pytest.approx(sum(right[int(label)] for label in data.y[rows]) / len(rows))
        assert entry["samples"] == len(rows)


def test_language_is_judged_by_client_alone(toy, tmp_path):
    run = toy(model="tiny_gpt")
    result, found = judged(run, tmp_path / "run")
    assert found["classes"] is None
    rows = run.rows[1]
    expected = run.data.task.evaluate(result.model, run.data.x[rows], run.data.y[rows], 512)
    assert found["clients"][1]["perplexity"] == pytest.approx(expected["perplexity"])
    assert "expected_accuracy" not in found["clients"][1]


def test_the_result_is_the_same_with_and_without(toy, tmp_path):
    with_it, _ = judged(toy(), tmp_path / "with")
    run = toy(eval={"every": 5, "fairness": False})
    store = RunFolder(tmp_path / "without")
    store.create(run.experiment)
    without = playing.play(run, store, Silent())
    assert not (tmp_path / "without" / "fairness.json").exists()
    assert torch.equal(with_it.state.weights, without.state.weights)


@pytest.mark.parametrize(
    ("rows", "share", "count"), [(100, 1.0, 100), (100, 0.5, 50), (100, 0.01, 16), (10, 0.1, 10), (0, 0.5, 0), (33, 0.7, 24)]
)
def test_large_clients_are_judged_on_an_even_part(rows, share, count):
    numbers = torch.arange(rows) * 3
    part = fairness.spread_out(numbers, share)
    assert len(part) == count == len(set(part.tolist()))
    assert set(part.tolist()) <= set(numbers.tolist())
    if count > 1:
        assert int(part.diff().max()) <= 3 * -(-rows // count)


def test_the_work_is_bounded_by_the_test_set(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(fairness, "MOST", 1)
    monkeypatch.setattr(fairness, "_FEWEST", 1)
    run = toy()
    _, found = judged(run, tmp_path / "run")
    assert found["share"] == pytest.approx(40 / 120)
    seen = []
    fairness.judged(run, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] <= 40 + 40 + len(run.rows)
    assert seen == sorted(seen)


@pytest.mark.parametrize("task", [Classification(), Classification(nn.functional.cross_entropy, lambda o, y: (o.argmax(-1) != y).sum())])
def test_it_is_the_same_as_judging_every_group_alone(toy, task, monkeypatch):
    """Batches that end in the middle of a class or of a client change nothing."""
    monkeypatch.setattr(fairness, "_ON_CPU", 7)
    run = toy(model="cnn")
    run = replace(run, data=replace(run.data, task=task))
    found, data = fairness.judged(run), run.data
    for entry in found["classes"]:
        rows = data.test_y == entry["class"]
        assert entry["accuracy"] == pytest.approx(data.judge(run.module, data.test_x[rows], data.test_y[rows], 512)["accuracy"], rel=1e-6)
    for entry, rows in zip(found["clients"], run.rows, strict=True):
        alone = data.judge(run.module, data.x[rows], data.y[rows], 512)
        assert {name: entry[name] for name in alone} == pytest.approx(alone, rel=1e-5)


def test_the_model_looks_at_every_sample_once_in_full_batches(toy):
    """Not one forward pass for each class and client."""
    run = toy()
    batches = []
    run.module.register_forward_hook(lambda module, inputs, output: batches.append(len(output)))
    fairness.judged(run)
    assert batches == [40, 64, 56]


def test_a_class_that_the_test_set_lacks_is_left_open():
    classes: list[dict[str, Any]] = [{"accuracy": 0.5}, {"accuracy": None}, {"accuracy": 1.0}]
    assert fairness.expected([1, 7, 1], classes) == 0.75
    assert fairness.expected([0, 7, 0], classes) is None


def test_own_data_and_targets_that_are_no_labels(tmp_path):
    generator = torch.Generator().manual_seed(0)
    sets = [TensorDataset(torch.randn(20, 4, generator=generator), torch.randn(20, 1, generator=generator)) for _ in range(3)]
    fedrts.train(
        model=nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)),
        clients=sets[:2],
        test=sets[2],
        method="fedrts",
        density=0.6,
        rounds=2,
        loss=nn.functional.mse_loss,
        correct=lambda output, target: (output.sign() == target.sign()).sum(),
        out=tmp_path / "run",
    )
    found = json.loads((tmp_path / "run" / "fairness.json").read_text("utf-8"))
    assert found["classes"] is None
    assert [sorted(entry) for entry in found["clients"]] == [["accuracy", "client", "loss", "samples"]] * 2

"""Classes and clients are judged by the final model, each on its own samples."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedrts
from fedrts import api, fairness
from fedrts.folder import RunFolder
from fedrts.observe import Silent


def judged(run, folder):
    """The run played to its end in a folder, and its fairness.json."""
    store = RunFolder(folder)
    store.create(run.experiment)
    result = api._play(run, store, Silent())
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
    without = api._play(run, store, Silent())
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
    seen = []
    judge = type(run.data).judge
    monkeypatch.setattr(type(run.data), "judge", lambda self, module, x, y, size: seen.append(len(x)) or judge(self, module, x, y, size))
    _, found = judged(run, tmp_path / "run")
    assert found["share"] == pytest.approx(40 / 120)
    assert sum(seen[-len(run.rows) :]) <= 40 + len(run.rows)


def test_a_class_that_the_test_set_lacks_is_left_open():
    classes = [{"accuracy": 0.5}, {"accuracy": None}, {"accuracy": 1.0}]
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

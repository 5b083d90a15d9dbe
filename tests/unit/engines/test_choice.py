"""Which engine, how many slots: by model, device and memory; whatever is set stays."""

import tomllib

import pytest
import torch
from torch import nn

import fedrts
from fedrts.client.training import LocalTraining
from fedrts.engines import choice, memory
from fedrts.engines.batched import BatchedEngine
from fedrts.engines.kernels import Objective
from fedrts.engines.memory import Need
from fedrts.engines.settings import EngineSettings
from fedrts.sparse.layout import Layout
from fedrts.tasks import Classification


def test_small_models_train_side_by_side_on_a_cpu(toy):
    bench = toy("fedavg", "mlp").bench
    assert choice.decided(EngineSettings(), bench, 3) == EngineSettings(name="batched", kernel="vectorised", slots=3, workers=1)
    assert choice.decided(EngineSettings(name="serial"), bench, 3) == EngineSettings(name="serial")


def test_large_models_train_one_after_the_other_on_a_cpu(toy):
    bench = toy("fedavg", "mlp").bench
    bench.training = bench.training.but(batch_size=10**6)
    assert choice.decided(EngineSettings(), bench, 3).name == "serial"
    assert choice.decided(EngineSettings(name="batched"), bench, 3) == EngineSettings(name="batched", kernel="streamed", slots=1, workers=1)


def test_attention_has_no_vectorised_form_on_a_cpu(toy):
    assert choice.decided(EngineSettings(), toy("fedavg", "tiny_gpt").bench, 3) == EngineSettings(
        name="batched", kernel="streamed", slots=1, workers=1
    )


def test_what_is_set_stays(toy):
    bench = toy("fedavg", "mlp").bench
    asked = EngineSettings(name="batched", kernel="streamed", slots=7, workers=3)
    assert choice.decided(asked, bench, 10) == asked
    assert choice.decided(asked.but(slots=2), bench, 10).workers == 2, "no thread without a slot"


def test_deciding_twice_decides_nothing_new(toy):
    bench = toy("fedavg", "cnn").bench
    once = choice.decided(EngineSettings(), bench, 4)
    assert choice.decided(once, bench, 4) == once


def test_slots_follow_the_free_memory(toy, monkeypatch):
    run = toy("fedavg", "mlp")
    need = choice._need(run.bench, Objective(run.module, run.data.task, run.layout))
    for clients in (1, 2, 5):
        free = (clients + 0.5) * (need.slot + need.held) / memory.USABLE
        monkeypatch.setattr(choice, "free_bytes", lambda device, free=free: int(free))
        assert choice.decided(EngineSettings(), run.bench, 10).slots == clients
    monkeypatch.setattr(choice, "free_bytes", lambda device: 0)
    engine = choice.make(choice.decided(EngineSettings(), run.bench, 10), run.bench, run.rows, 64)
    assert isinstance(engine, BatchedEngine)
    assert engine.slots == engine.together == 1, "one client always runs"


def test_a_run_says_how_many_slots_it_took(tmp_path):
    fedrts.run(data="digits", rounds=1, out=tmp_path / "a", device="cpu")
    assert "slots = 10\nworkers = 1\n" in (tmp_path / "a" / "experiment.toml").read_text()
    fedrts.run(data="digits", rounds=1, out=tmp_path / "b", device="cpu", engine={"slots": 4, "workers": 1})
    assert "slots = 4\nworkers = 1\n" in (tmp_path / "b" / "experiment.toml").read_text()


def test_activations_are_counted_by_what_the_backward_pass_needs():
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    layout = Layout.of(module)
    objective = Objective(module, Classification(), layout)
    weights, x, y = layout.flatten(module.state_dict()), torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    relu, log_softmax = 4 * 5 * 4, 4 * 3 * 4
    assert memory.saved_bytes(objective, weights, x, y) == relu + log_softmax
    plain = Need.of(objective, LocalTraining(batch_size=4), weights, x, y)
    adam = Need.of(objective, LocalTraining(batch_size=4, optimizer="adam"), weights, x, y)
    wide = Need.of(objective, LocalTraining(batch_size=8), weights, x, y)
    assert adam.slot - plain.slot == 2 * 4 * layout.length
    assert wide.slot - plain.slot == 2 * (relu + log_softmax)


def test_free_memory_is_some():
    assert 2**20 < memory.free_bytes(torch.device("cpu")) < 2**50


@pytest.mark.parametrize(("width", "engine"), [(256, "batched"), (600, "batched"), (800, "serial")])
def test_large_models_run_one_after_the_other(tmp_path, width, engine):
    """64 · w + w² + 10 · w parameters and as many biases as units: 0.08, 0.4 and 0.7 million; at most 1.1e7 MACs a batch."""
    fedrts.run(rounds=1, epochs=1, clients=4, per_round=2, device="cpu", model_options={"hidden": [width, width]}, out=tmp_path / "run")
    assert tomllib.loads((tmp_path / "run" / "experiment.toml").read_text("utf-8"))["engine"]["name"] == engine

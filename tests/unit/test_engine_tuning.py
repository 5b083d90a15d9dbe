"""Tuning measures what is possible, keeps what was asked for, and remembers."""

import pytest

from fedrts import api, config
from fedrts.observe import Silent
from fedrts.runs import engine_tuning


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def experiment(**engine):
    small = {"data": "digits", "model_options": {"hidden": [16]}, "rounds": 2, "clients": {"total": 8, "per_round": 4}, "device": "cpu"}
    return config.resolve({**small, "engine": engine})


def test_the_fastest_is_taken_and_remembered(monkeypatch):
    speeds = {"vectorised": 300.0, "streamed": 500.0}
    monkeypatch.setattr(engine_tuning, "_measure", lambda run, settings: speeds.get(settings.kernel, 100.0) + settings.slots)
    first = engine_tuning.tune(experiment())
    assert not first.remembered
    assert first.experiment.engine.name == "batched"
    assert first.experiment.engine.kernel == "streamed"
    assert {settings.name for settings in first.samples_per_second} == {"serial", "batched"}
    assert list(first.samples_per_second.values()) == sorted(first.samples_per_second.values(), reverse=True)
    monkeypatch.setattr(engine_tuning, "_measure", None)  # would fail
    second = engine_tuning.tune(experiment())
    assert second.remembered
    assert second.experiment == first.experiment


def test_another_experiment_is_measured_anew(monkeypatch):
    monkeypatch.setattr(engine_tuning, "_measure", lambda run, settings: 1.0)
    engine_tuning.tune(experiment())
    other = config.resolve(experiment().model_dump(exclude_none=True), {"train": {"batch_size": 8}})
    assert not engine_tuning.tune(other).remembered


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"x": 3}'])
def test_a_damaged_memory_is_no_obstacle(monkeypatch, content):
    monkeypatch.setattr(engine_tuning, "_measure", lambda run, settings: 1.0)
    engine_tuning.cache_file().parent.mkdir(parents=True)
    engine_tuning.cache_file().write_text(content)
    assert not engine_tuning.tune(experiment()).remembered
    assert engine_tuning.tune(experiment()).remembered


def test_what_is_set_is_not_tuned(monkeypatch):
    monkeypatch.setattr(engine_tuning, "_measure", lambda run, settings: 1.0)
    found = engine_tuning.tune(experiment(name="batched", slots=3, kernel="vectorised")).samples_per_second
    assert [(settings.name, settings.slots, settings.kernel) for settings in found] == [("batched", 3, "vectorised")]
    assert [settings.name for settings in engine_tuning.tune(experiment(name="serial")).samples_per_second] == ["serial"]


def test_measured_for_real_a_run_has_the_same_masks(tmp_path):
    tuned = engine_tuning.tune(experiment())
    assert all(speed > 0 for speed in tuned.samples_per_second.values())
    assert tuned.experiment.engine in tuned.samples_per_second
    results = [
        api.start(some.model_copy(update={"out": str(tmp_path / name)}), Silent())
        for name, some in (("a", tuned.experiment), ("b", experiment(name="serial")))
    ]
    assert results[0].state.mask == results[1].state.mask
    assert results[0].summary["accuracy"] == pytest.approx(results[1].summary["accuracy"], abs=0.02)

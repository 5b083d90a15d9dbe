"""MLflow and Weights & Biases: what is told to them, and that a resumed run goes on as the same one."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fedrts
from fedrts.callbacks import MLflow, WandB
from fedrts.callbacks.hooks import CallbackError
from fedrts.errors import InputError
from fedrts.observe import Silent

RUN: dict[str, Any] = {
    "data": "digits",
    "model_options": {"hidden": [16]},
    "density": 0.4,
    "clients": 4,
    "engine": "serial",
    "rounds": 6,
    "topology": {"interval": 2, "end": 6},
    "train": {"epochs": 1, "batch_size": 32},
    "eval": {"every": 1, "fairness": False},
    "checkpoint": {"every": 2},
}


class Cut(Exception):
    pass


class Cuts(Silent):
    def played(self, record):
        if record.round == 3:
            raise Cut


class Store:
    """What we call of MLflow, as strict as it is."""

    def __init__(self):
        self.runs: dict[str, dict[str, Any]] = {}
        self.entities = SimpleNamespace(
            Param=lambda key, value: SimpleNamespace(key=key, value=value),
            Metric=lambda key, value, timestamp, step: SimpleNamespace(key=key, value=value, timestamp=timestamp, step=step),
        )
        self.experiments: dict[str, str] = {}

    def MlflowClient(self, tracking_uri=None):
        assert tracking_uri == "sqlite:///a.db"
        return self

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name):
        assert name not in self.experiments
        self.experiments[name] = str(len(self.experiments))
        return self.experiments[name]

    def create_run(self, experiment_id, run_name):
        id = f"run{len(self.runs)}"
        self.runs[id] = {"name": run_name, "params": {}, "metrics": [], "files": {}, "status": "RUNNING", "in": experiment_id}
        return SimpleNamespace(info=SimpleNamespace(run_id=id))

    def update_run(self, run_id, status):
        self.runs[run_id]["status"] = status

    def log_batch(self, run_id, metrics=(), params=()):
        assert len(params) <= 100
        for param in params:
            assert isinstance(param.value, str)
            assert self.runs[run_id]["params"].setdefault(param.key, param.value) == param.value, "a setting never changes"
        for metric in metrics:
            assert isinstance(metric.value, float)
            self.runs[run_id]["metrics"].append((metric.key, metric.step, metric.value))

    def log_artifact(self, run_id, local_path):
        self.runs[run_id]["files"][Path(local_path).name] = Path(local_path).read_bytes()

    def set_terminated(self, run_id, status):
        self.runs[run_id]["status"] = status


class Boards:
    """What we call of Weights & Biases."""

    def __init__(self):
        self.runs: list[Any] = []
        self.Settings = SimpleNamespace

    def init(self, project, name, mode, config, reinit, settings, dir=None, id=None, resume=None):
        assert (mode, reinit, settings.console) == ("offline", "create_new", "off")
        assert Path(dir).is_dir()
        assert (id is None) == (resume is None)
        found = Board(id or f"board{len(self.runs)}", config)
        self.runs.append(found)
        return found

    def Artifact(self, name, type):
        files: list[str] = []
        return SimpleNamespace(name=name, type=type, files=files, add_file=lambda path: files.append(Path(path).name))


class Board:
    def __init__(self, id, config):
        self.id, self.config, self.summary = id, config, dict[str, Any]()
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.artefacts: list[Any] = []

    def log(self, numbers, step):
        assert not self.lines or step >= self.lines[-1][0], "it takes no step back"
        self.lines.append((step, numbers))

    def log_artifact(self, artefact):
        self.artefacts.append(artefact)

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def store(monkeypatch):
    found = Store()
    monkeypatch.setitem(sys.modules, "mlflow", found)
    return found


@pytest.fixture
def boards(monkeypatch):
    found = Boards()
    monkeypatch.setitem(sys.modules, "wandb", found)
    return found


def curve(metrics, key):
    return [(step, value) for name, step, value in metrics if name == key]


def test_mlflow_has_curves_settings_layers_results_and_the_report(store, tmp_path):
    result = fedrts.run(**RUN, callbacks=[MLflow("mine", "sqlite:///a.db", model=True)], out=tmp_path / "run")
    (run,) = store.runs.values()
    assert (run["name"], run["status"], store.experiments) == ("run", "FINISHED", {"mine": "0"})
    for key in ("accuracy", "upload_bytes", "links_changed"):
        assert curve(run["metrics"], key) == [(line["round"], line[key]) for line in result.history]
    assert (run["params"]["train.batch_size"], run["params"]["model_options.hidden"]) == ("32", "[16]")
    (name,) = result.masks
    layers = curve(run["metrics"], f"density/{name}")
    assert [step for step, _ in layers] == [0, 2, 4], "at first, and where it may have changed"
    assert layers[-1][1] == pytest.approx(float(result.masks[name].float().mean()))
    assert curve(run["metrics"], "result/accuracy") == [(6, result.summary["accuracy"])]
    files = {"experiment.toml", "summary.json", "history.jsonl", "topology.jsonl", "model.safetensors", "masks.safetensors", "report.html"}
    assert set(run["files"]) == files
    assert json.loads(run["files"]["summary.json"])["accuracy"] == result.summary["accuracy"]
    assert b"<html" in run["files"]["report.html"][:200]


def test_a_resumed_run_keeps_its_id_and_says_no_round_twice(store, boards, tmp_path):
    def both():
        return [MLflow("mine", "sqlite:///a.db"), WandB(mode="offline")]

    with pytest.raises(Cut):
        fedrts.run(**RUN, callbacks=both(), observer=Cuts(), out=tmp_path)
    assert [run["status"] for run in store.runs.values()] == ["KILLED"]
    assert boards.runs[0].exit_code == 1
    assert json.loads((tmp_path / "mlflow.json").read_text()) == {"id": "run0", "next": 4}
    result = fedrts.resume(tmp_path, callbacks=both())
    (run,) = store.runs.values()
    expected = [(line["round"], line["accuracy"]) for line in result.history]
    assert run["status"] == "FINISHED"
    assert curve(run["metrics"], "accuracy") == expected
    first, second = boards.runs
    assert first.id == second.id == "board0"
    told = [(step, line["accuracy"]) for board in (first, second) for step, line in board.lines]
    assert told == expected
    assert second.exit_code == 0
    assert second.summary["result/accuracy"] == result.summary["accuracy"]
    assert "report.html" in second.artefacts[0].files
    assert second.config["density"] == 0.4


def test_a_set_up_has_names_of_its_own(store, tmp_path):
    fedrts.run(**{**RUN, "rounds": 1, "topology": {}}, method="snip", callbacks=[MLflow("mine", "sqlite:///a.db")], out=tmp_path)
    (run,) = store.runs.values()
    assert [step for step, _ in curve(run["metrics"], "set-up/upload_bytes")] == [0]
    assert len(curve(run["metrics"], "upload_bytes")) == 1


def test_what_is_missing_or_damaged_is_one_line(store, monkeypatch, tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(Cut):
        fedrts.run(**RUN, callbacks=[MLflow("mine", "sqlite:///a.db")], observer=Cuts(), out=tmp_path / "run")
    store.runs.clear()
    with pytest.raises(CallbackError, match="MLflow failed in on_start: MLflow: the store has no run run0, as which this one began"):
        fedrts.resume(tmp_path / "run", callbacks=[MLflow("mine", "sqlite:///a.db")])
    (tmp_path / "run" / "mlflow.json").write_text("[]")
    with pytest.raises(CallbackError, match=r"mlflow\.json is damaged: .*; delete it"):
        fedrts.resume(tmp_path / "run", callbacks=[MLflow("mine", "sqlite:///a.db")])
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"pip install 'fedrts\[wandb\]'"):
        WandB()


# -- the real ones ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="without the extra mlflow")
def test_the_real_mlflow(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with pytest.raises(Cut):
        fedrts.run(**RUN, callbacks=[MLflow(uri=uri)], observer=Cuts(), out=tmp_path / "run")
    result = fedrts.resume(tmp_path / "run", callbacks=[MLflow(uri=uri)])
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("fedrts")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_id, found.info.status) == (json.loads((tmp_path / "run" / "mlflow.json").read_text())["id"], "FINISHED")
    told = client.get_metric_history(found.info.run_id, "accuracy")
    assert [(entry.step, entry.value) for entry in told] == [(line["round"], line["accuracy"]) for line in result.history]
    assert found.data.params["train.batch_size"] == "32"
    assert "report.html" in {entry.path for entry in client.list_artifacts(found.info.run_id)}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="without the extra wandb")
def test_the_real_wandb(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(Cut):
        fedrts.run(**RUN, callbacks=["wandb"], observer=Cuts(), out=tmp_path / "run")
    fedrts.resume(tmp_path / "run")
    id = json.loads((tmp_path / "run" / "wandb.json").read_text())["id"]
    written = [name for name in os.listdir(tmp_path / "run" / "wandb") if name.endswith(f"-{id}")]
    assert len(written) == 2, "two parts of one run, which `wandb sync` joins"
    assert all((tmp_path / "run" / "wandb" / name / f"run-{id}.wandb").stat().st_size > 1000 for name in written)

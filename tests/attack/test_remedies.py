"""The remedy that a line names is one that works."""

import contextlib
import importlib
import shlex
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedrts
from fedrts import data
from fedrts.config import Experiment, flat, from_assignments, from_file, from_keywords, resolve, validated
from fedrts.errors import InputError
from fedrts.export.inspection import inspect_run
from fedrts.observe import Silent
from fedrts.runs.folder import RunFolder


class Stop(Exception):
    """A run is cut off."""


class Stopper(Silent):
    """Looks at a run while it runs, and cuts it off."""

    def __init__(self, look=lambda: None):
        self.look, self.seen = look, []

    def played(self, record):
        self.seen.append(self.look())
        raise Stop


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["lr=0.1"], r"unknown key 'lr'; did you mean 'train\.lr'\?"),
        (["schedule=cosine"], r"unknown key 'schedule'; did you mean 'train\.schedule'\?"),
        (["shedule=cosine"], r"unknown key 'shedule'; did you mean 'train\.schedule'\?"),
        (["every=3"], r"did you mean 'eval\.every' or 'checkpoint\.every'\?"),
        (["train.interval=3"], r"unknown key 'train\.interval'; did you mean 'topology\.interval'\?"),
        (["train.epoch=3"], r"unknown key 'train\.epoch'; did you mean 'epochs'\?"),
        (["metod=fedrts"], r"unknown key 'metod'; did you mean 'method'\?"),
        (["clients=20"], r"clients must be a table of keys, such as clients\.total \(got 20\)"),
        (["data=csv:x"], r"no kind of data 'csv:' as in 'csv:x': files are read as folder:PATH or npz:PATH, own code as PKG\.MODULE:NAME"),
        (["data=csv:/a/b.csv"], r"no kind of data 'csv:' as in 'csv:/a/b\.csv': files are read as folder:PATH or npz:PATH"),
        (["data=https://a.example/b.npz"], r"no kind of data 'https:' as in 'https://a\.example/b\.npz': files are read as"),
        (["data=json:load"], r"no kind of data 'json:' as in 'json:load': files are read as"),
        (["data=parquet:x"], r"no kind of data 'parquet:' as in 'parquet:x', nor such code \(No module named 'parquet'\): files are read"),
        (["data=torch:rows"], r"no kind of data 'torch:' as in 'torch:rows', nor such code \(module 'torch' has no attribute 'rows'\)"),
        (["data=npz"], r"there is no data set 'npz'; did you mean 'npz:PATH'\?"),
        (["train.epochs=99999999999999999999"], r"train\.epochs must be a whole number below 2,147,483,648 \(got 9{20}\)"),
        (["topology.end=2147483648", "rounds=2147483647"], r"topology\.end"),
        (["model_options.hidden=3000000000"], r"model_options\.hidden must be a whole number below"),
        (["method_options.update_after_end=3000000000"], r"method_options\.update_after_end"),
    ],
)
def test_settings(given, words):
    with pytest.raises(InputError, match=words) as caught:
        resolve(from_assignments(given))
    assert "\n" not in str(caught.value)


def test_a_word_of_files_leads_to_no_import(monkeypatch):
    """`csv` and `json` are modules, too."""
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"imported {name}"))
    for name in ("csv:x", "json:load", "sqlite3:connect"):
        with pytest.raises(InputError, match="there is no kind of data"):
            data.get(name)


@pytest.mark.parametrize("module", ["readings", "wave"])
def test_own_code_is_data_whatever_its_name(tmp_path, monkeypatch, module):
    """A file in the current folder, even one that is named like a module of Python that nobody has loaded."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{module}.py").write_text("def load():\n    pass\n", "utf-8")
    monkeypatch.delitem(sys.modules, module, raising=False)
    loader = data.get(f"{module}:load")
    del sys.modules[module]
    assert loader.__code__.co_filename == str(tmp_path / f"{module}.py")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("import no_such_package\n", "cannot import the data set 'broken:load': No module named 'no_such_package'"),
        ("import json\njson.no_such_name\n", "cannot import the data set 'broken:load': module 'json' has no attribute 'no_such_name'"),
    ],
)
def test_own_code_that_fails_is_not_said_to_be_absent(tmp_path, monkeypatch, content, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(content, "utf-8")
    with pytest.raises(InputError) as caught:
        data.get("broken:load")
    assert str(caught.value) == words


def test_large_numbers_that_may_be():
    found = validated(Experiment, from_assignments([f"seed={2**62}", "guard.value_bound=100000000000", "rounds=2147483647"]))
    assert (found.seed, found.guard.value_bound, found.rounds) == (2**62, 1e11, 2**31 - 1)


def test_a_top_level_rate_in_a_file(tmp_path):
    (tmp_path / "my.toml").write_text("lr = 0.1\n")
    with pytest.raises(InputError, match=r"did you mean 'train\.lr'"):
        fedrts.run(tmp_path / "my.toml")


def site(seed):
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, :3].sum(1) > 0).long())


def trained(path, **given):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    return fedrts.train(model=model, clients=[site(0), site(1)], test=site(9), rounds=2, density=0.8, out=path, **given)


def test_a_run_of_own_objects_goes_on_in_python(tmp_path):
    path = tmp_path / "run"
    with pytest.raises(Stop):
        trained(path, observer=Stopper())
    again = f"fedrts.train(…, out={str(path)!r}, resume=True)"
    assert inspect_run(path)["state"] == f"unfinished; continue with: {again}"
    with pytest.raises(InputError) as caught:
        trained(path)
    assert f"`{again}`" in str(caught.value)
    assert trained(path, resume=True).summary["rounds"] == 2


def test_a_run_of_sites_goes_on_by_its_server(tmp_path):
    settings = {"data": "elsewhere", "data_options": {"shape": [1, 8, 8], "classes": 10}, "engine": "flower", "rounds": 2}
    experiment = resolve(from_keywords({**settings, "clients": {"total": 2, "partition": "sites"}}))
    folder = RunFolder(tmp_path / "a run")
    folder.create(experiment)
    command = shlex.join(["fedrts", "server", str(folder.path / "experiment.toml"), "--out", str(folder.path), "--tls", "DIR"])
    assert inspect_run(folder.path)["state"] == f"unfinished; continue with: {command}"
    with pytest.raises(InputError, match="holds a run already") as caught:
        folder.create(experiment)
    assert f"`{command}`" in str(caught.value)
    with pytest.raises(InputError, match="trains at sites") as caught:
        fedrts.resume(folder.path)
    assert f"`{command}`" in str(caught.value)
    own = flat(from_file(folder.experiment_file())).keys() - {"out", "engine.name"}  # as `fedrts server` reads its own file
    again = resolve(from_file(folder.experiment_file()), {"engine": "flower", "out": str(folder.path)})
    assert folder.revised(again, sorted(own)) == {}


def test_a_running_run_is_running(tmp_path):
    path = tmp_path / "run"
    watcher = Stopper(lambda: inspect_run(path)["state"])
    with contextlib.suppress(Stop):
        fedrts.run(data="digits", rounds=2, clients=4, epochs=1, out=path, observer=watcher)
    assert watcher.seen == ["running"]
    assert inspect_run(path)["state"] == f"unfinished; continue with: fedrts resume {path}"
    fedrts.resume(path)
    assert inspect_run(path)["state"] == "finished"

"""The remedy that a line names is one that works."""

import contextlib
import importlib
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedrts
from fedrts import data
from fedrts.config import Experiment, flat, from_assignments, from_file, from_keywords, resolve, validated
from fedrts.errors import InputError
from fedrts.export import inspection
from fedrts.export.formats import export_run
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
        (["train.epoch=3"], r"unknown key 'train\.epoch'; did you mean 'train\.epochs'\?"),
        (["method_options.gama=1"], r"unknown key 'method_options\.gama'; did you mean 'method_options\.gamma'\?"),
        (["model_options.hiden=[3]"], r"unknown key 'model_options\.hiden'; did you mean 'model_options\.hidden'\?"),
        (["train=5"], r"train must be a table of keys, such as train\.epochs \(got 5\)"),
        (["tags=[1,2]"], r"tags must be a valid string \(got 1\)"),
        (["zzzzz=true"], r"unknown key 'zzzzz'; known: callbacks, checkpoint, clients"),
        (["clients.shards=3"], r"unknown key 'clients\.shards'; known: alpha"),
        (["metod=fedrts"], r"unknown key 'metod'; did you mean 'method'\?"),
        (["clients=20"], r"clients must be a table of keys, such as clients\.total \(got 20\)"),
        (
            ["data=pickle:x"],
            r"no kind of data 'pickle:' as in 'pickle:x': files are read as csv:PATH or folder:PATH or npz:PATH or parquet",
        ),
        (["data=json:/a/b.json"], r"no kind of data 'json:' as in 'json:/a/b\.json': files are read as .* own code as PKG\.MODULE:NAME"),
        (["data=https://a.example/b.npz"], r"no kind of data 'https:' as in 'https://a\.example/b\.npz': files are read as"),
        (["data=json:load"], r"no kind of data 'json:' as in 'json:load': files are read as"),
        (["data=feather:x"], r"no kind of data 'feather:' as in 'feather:x', nor such code \(No module named 'feather'\): files are read"),
        (["data=torch:rows"], r"no kind of data 'torch:' as in 'torch:rows', nor such code \(module 'torch' has no attribute 'rows'\)"),
        (["data=npz"], r"there is no data set 'npz'; did you mean 'npz:PATH'\?"),
        (["data=site/rows.CSV"], r"there is no data set 'site/rows\.CSV': a file is read as csv:site/rows\.CSV"),
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
    """`pickle` and `json` are modules, too."""
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"imported {name}"))
    for name in ("pickle:load", "json:load", "sqlite3:connect"):
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
    monkeypatch.delitem(sys.modules, "broken", raising=False)  # another test's
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
    given = {"clients": [site(0), site(1)], **given}
    return fedrts.train(model=model, test=site(9), rounds=2, density=0.8, out=path, **given)


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gama": 1}, "FedRTS: unknown key 'gama'; did you mean 'gamma'?"),
        ({"gamma": 3}, "FedRTS: gamma must be a number ≥ 0 and ≤ 1 (got 3)"),
        ({"density": 5}, "FedRTS: density must be a number > 0 and ≤ 1 (got 5)"),
    ],
)
def test_an_option_of_a_method_that_is_an_object(options, words):
    with pytest.raises(InputError) as caught:
        fedrts.methods.FedRTS(**options)
    assert str(caught.value) == words


def test_what_is_far_from_every_name_is_not_taken_for_one():
    with pytest.raises(InputError, match=r"there is no model 'nothing'; known: cnn, "):
        fedrts.cost(model="nothing")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fedrts.run({"rounds": 1}), r"named by its path \(got \{'rounds': 1\}\): settings are keywords"),  # type: ignore[arg-type]
        (lambda: fedrts.run(model=nn.Linear(2, 2)), r"model is a Linear: fedrts\.run takes names .* objects are for fedrts\.train"),
        (lambda: fedrts.run(method=fedrts.methods.FedRTS()), r"method is a FedRTS: fedrts\.run takes names \(and method_options\)"),
        (lambda: trained(None, clients=4), r"clients is one int: give a list of datasets"),
        (lambda: trained(None, clients=site(0)), r"clients is one TensorDataset: give a list of datasets"),
        (lambda: trained(None, clients={}), r"clients is empty: give one dataset per client"),
        (lambda: trained(None, loss="mse"), r"loss must be a function \(got 'mse'\)"),
        (lambda: trained(None, correct=lambda output, target: output.argmax(1) == target), r"`correct` must give one number.*add \.sum"),
    ],
)
def test_calls(call, words):
    with pytest.raises(InputError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"grid": ["train.lr=0.1"]}, r"grid must name keys and their values"),
        ({"grid": {"train.lr": 0.1}}, r"grid\['train\.lr'\] must be a list \(got 0\.1\)"),
        ({"grid": {"train.schedule": "cosine"}}, r"grid\['train\.schedule'\] must be a list \(got 'cosine'\)"),
        ({"densities": "0.2"}, r"densities must be a list \(got '0\.2'\)"),
        ({"tune_lr": 0.1}, r"tune_lr must be a list \(got 0\.1\)"),
        ({"jobs": "two"}, r"jobs must be a whole number \(got 'two'\)"),
        ({"tune_rounds": 3}, r"--tune-rounds is of the trials of learning rates: name these with --tune-lr"),
        ({"tune_seed": 3}, r"--tune-seed is of the trials of learning rates: name these with --tune-lr"),
    ],
)
def test_comparisons(tmp_path, given, words):
    with pytest.raises(InputError, match=words):
        fedrts.compare(methods=["random"], out=tmp_path / "compared", rounds=1, **given)
    assert not (tmp_path / "compared").exists()


def test_numbers_of_numpy_are_numbers():
    found = from_keywords({"rounds": np.int64(3), "density": np.float32(0.5), "train": {"lr": torch.tensor(0.25)}, "seed": np.arange(2)[1]})
    assert [type(value) for value in flat(found).values()] == [int, float, float, int]
    experiment = validated(Experiment, found)
    assert (experiment.rounds, experiment.density, experiment.train.lr, experiment.seed) == (3, 0.5, 0.25, 1)


def test_seeds_of_numpy(tmp_path):
    compared = fedrts.compare(methods=["random"], seeds=np.arange(2), rounds=1, clients=4, epochs=1, out=tmp_path / "compared")
    assert [row["seed"] for row in compared.rows] == [0, 1]


@pytest.mark.parametrize("name", ["experiment.toml", "model.safetensors", "summary.json", "history.jsonl"])
def test_an_export_leaves_the_files_of_a_run_alone(finished, name):
    before = (finished / name).read_bytes()
    with pytest.raises(InputError, match="it is the run's own; choose another --out"):
        export_run(finished, "dense", finished / name)
    assert (finished / name).read_bytes() == before


def test_an_export_goes_to_a_file(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, Path()):
        with pytest.raises(InputError, match=r"it is a folder; name a file in it, such as .*model\.pt"):
            export_run(finished, "dense", folder)
    assert export_run(finished, "dense", finished / "export.pt") == export_run(finished, "dense", None)


def test_a_file_of_a_run_leads_to_its_folder(finished):
    with pytest.raises(InputError, match=r"experiment\.toml is a file of a run: name its folder, "):
        fedrts.resume(finished / "experiment.toml")


def test_a_model_that_was_trained_is_a_module(finished):
    with pytest.raises(InputError, match=r"model is 'mlp': give the torch\.nn\.Module that was trained"):
        fedrts.load(finished, model="mlp")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["help"], "error: No such command 'help'; `fedrts --help` says what there is"),
        (["data", "list"], "error: No such command 'list'; `fedrts data --help` says what there is"),
        (["methods", "fedrts"], "error: Got unexpected extra argument (fedrts); `fedrts methods --help` says what there is"),
        (["run", "--metod", "fedrts"], "error: No such option '--metod'. (Did you mean one of: '--method', '--model', '--set'?)"),
        (["run", "--rounds", "x"], "error: Invalid value for '--rounds': 'x' is not a valid integer."),
    ],
)
def test_words_that_no_command_knows(command, words, said):
    ended = command(*words)
    assert (ended.code, ended.err.strip()) == (2, said)


@pytest.mark.parametrize("error", [MemoryError("728 TiB"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 728 TiB")])
def test_what_no_memory_holds_is_a_line(command, monkeypatch, error):
    monkeypatch.setattr(inspection, "inspect_run", raising(error))
    ended = command("inspect", "anything")
    assert (ended.code, ended.err.strip()) == (2, f"error: there is not enough memory ({error}): lower what makes it so large")


def test_another_error_keeps_its_traceback(command, monkeypatch):
    monkeypatch.setattr(inspection, "inspect_run", raising(RuntimeError("a defect")))
    with pytest.raises(RuntimeError, match="a defect"):
        command("inspect", "anything")


def raising(error):
    def call(*_):
        raise error

    return call

"""The commands, the run folder they write, and what they say when something is wrong: a contract that others script against."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedrts as package
from fedrts import api, models
from fedrts.config import resolve
from helping import assert_one_line_error

FILES = {
    "experiment.toml",
    "history.jsonl",
    "topology.jsonl",
    "clients.json",
    "fairness.json",
    "summary.json",
    "model.safetensors",
    "masks.safetensors",
    "average.safetensors",
    "checkpoint",
}
HISTORY = "round outer clients rejected loss accuracy perplexity density links_changed upload_bytes download_bytes flops seconds"
SUMMARY = (
    "method data model seed rounds density_target density accuracy accuracy_last10 best_accuracy loss perplexity perplexity_corpus "
    "upload_bytes download_bytes comm_ratio paper_comm_mb flops seconds samples_per_second rejected_replies version "
    "average_loss average_accuracy digests"
)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def read(file: Path):
    return json.loads(file.read_text("utf-8"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# -- the run folder -------------------------------------------------------------------------------------------------


def test_the_folder_has_exactly_the_files_of_the_contract(run_dir):
    assert {entry.name for entry in run_dir.iterdir()} == FILES
    assert len(list((run_dir / "checkpoint").iterdir())) == 2


def test_experiment_file(run_dir):
    content = tomllib.loads((run_dir / "experiment.toml").read_text("utf-8"))
    assert set(content["versions"]) == {"format", "fedrts", "torch", "device"}
    assert content["versions"]["fedrts"] == package.__version__
    assert content["versions"]["torch"] == torch.__version__
    assert (content["rounds"], content["seed"], content["clients"]["total"], content["train"]["epochs"]) == (3, 3, 6, 1)
    assert (content["model"], content["engine"]["name"], content["topology"]["end"]) == ("mlp", "batched", 1)


def test_history(run_dir):
    history = lines(run_dir / "history.jsonl")
    assert [line["round"] for line in history] == [0, 1, 2]
    assert [line["outer"] for line in history] == [True, False, False]
    for line in history:
        late = ["average_loss", "average_accuracy"] if line is history[-1] else []
        assert list(line) == [*HISTORY.split(), *late]
        assert len(set(line["clients"])) == 3
        assert set(line["clients"]) <= set(range(6))
        assert line["rejected"] == []
        assert line["perplexity"] is None
        assert 0 <= line["accuracy"] <= 1
        assert line["seconds"] > 0
        assert line["upload_bytes"] > 0
        assert (line["links_changed"] > 0) == line["outer"]


def test_accuracy_is_null_where_not_evaluated(fedrts, tmp_path, tiny):
    out = tmp_path / "run"
    assert fedrts("run", *tiny, "--rounds", 14, "--set", "eval.every=3", "--out", out).code == 0
    evaluated = [line["round"] for line in lines(out / "history.jsonl") if line["accuracy"] is not None]
    assert evaluated == [2, *range(4, 14)]  # every third, and always the last ten
    assert [line["round"] for line in lines(out / "history.jsonl") if line["loss"] is not None] == evaluated


def test_topology(run_dir):
    topology = lines(run_dir / "topology.jsonl")
    masks = safetensors.torch.load_file(run_dir / "masks.safetensors")
    assert [line["round"] for line in topology] == [0]
    line = topology[0]
    active = sum(int(mask.count_nonzero()) for mask in masks.values())
    assert line["active"] == {name: int(mask.count_nonzero()) for name, mask in masks.items()}
    assert set(line["changed"]) == set(masks)
    assert 1 - line["overlap"] == pytest.approx(sum(line["changed"].values()) / active)
    assert [len(line[f"belief_{kind}"]) for kind in ("active", "inactive")] == [20, 20]
    assert sum(line["belief_active"]) == active
    assert sum(line["belief_inactive"]) == sum(mask.numel() for mask in masks.values()) - active


def test_clients(run_dir):
    clients = read(run_dir / "clients.json")
    assert [set(client) for client in clients] == [{"client", "samples", "labels"}] * 6
    assert [client["client"] for client in clients] == list(range(6))
    assert all(sum(client["labels"]) == client["samples"] for client in clients)
    assert sum(client["samples"] for client in clients) == 1438  # four fifths of the 1,797 digits


def test_summary(run_dir):
    summary, history = read(run_dir / "summary.json"), lines(run_dir / "history.jsonl")
    assert list(summary) == SUMMARY.split()
    assert [summary[key] for key in ("method", "data", "model", "seed", "rounds")] == ["fedrts", "digits", "mlp", 3, 3]
    for total in ("upload_bytes", "download_bytes", "flops", "seconds"):
        assert summary[total] == pytest.approx(sum(line[total] for line in history))
    accuracies = [line["accuracy"] for line in history]
    assert summary["accuracy"] == accuracies[-1]
    assert summary["best_accuracy"] == max(accuracies)
    assert summary["accuracy_last10"] == pytest.approx(sum(accuracies) / 3)
    assert (summary["rejected_replies"], summary["version"]) == (0, package.__version__)
    assert 0.025 < summary["comm_ratio"] < 0.04, "an eighth of the bytes of 32 bits, and masks"


MODELS = [
    pytest.param("digits", "mlp", ["--set", "model_options.hidden=[24,16]"], id="mlp"),
    pytest.param("digits", "cnn", ["--set", "model_options.width=4"], id="cnn with BatchNorm"),
    pytest.param("toy_text", "tiny_gpt", ["--lr", "0.1", "--set", "clients.partition=iid"], id="gpt with tied embeddings"),
]


@pytest.mark.parametrize("density", [0.5, 0.75])
@pytest.mark.parametrize(("data", "model", "options"), MODELS)
def test_model_and_masks(fedrts, tmp_path, tiny, data, model, options, density):
    out = tmp_path / "run"
    ended = fedrts("run", *tiny, "--data", data, "--model", model, *options, "--density", density, "--out", out)
    assert (ended.code, ended.err) == (0, "")
    shape = {"digits": ((1, 8, 8), 10), "toy_text": ((8,), 20)}[data]
    written = tomllib.loads((out / "experiment.toml").read_text("utf-8"))["model_options"]
    module = models.get(model)(*shape, **written)
    tensors = safetensors.torch.load_file(out / "model.safetensors")
    masks = safetensors.torch.load_file(out / "masks.safetensors")
    module.load_state_dict(tensors, strict=True)
    assert set(tensors) == set(module.state_dict())
    parameters = dict(module.named_parameters())
    assert set(masks) < set(parameters)
    for name, mask in masks.items():
        assert mask.dtype == torch.bool
        assert mask.shape == tensors[name].shape
        assert bool((tensors[name][~mask] == 0).all())
        assert bool((tensors[name][mask] != 0).any())
    every = sum(p.numel() for p in parameters.values())
    links = sum(mask.numel() for mask in masks.values())
    active = sum(int(mask.count_nonzero()) for mask in masks.values())
    promised = read(out / "summary.json")["density"]
    assert promised == (active + every - links) / every == lines(out / "history.jsonl")[-1]["density"]
    assert density - 1 / every < promised <= density
    for file in ("model.safetensors", "masks.safetensors"):
        data_ = (out / file).read_bytes()
        header = json.loads(data_[8 : 8 + int.from_bytes(data_[:8], "little")])
        assert len(header.get("__metadata__", {})) <= 1


def test_language_runs_report_perplexity(fedrts, tmp_path, tiny):
    out = tmp_path / "run"
    language = ["--data", "toy_text", "--model", "tiny_gpt", "--set", "clients.partition=iid"]
    assert fedrts("run", *tiny, *language, "--density", "0.5", "--out", out).code == 0
    summary = read(out / "summary.json")
    assert summary["perplexity"] > 1
    assert summary["perplexity_corpus"] > 1
    assert lines(out / "history.jsonl")[-1]["perplexity"] == summary["perplexity"]


def test_dense_method_says_once_that_it_ignores_the_density(fedrts, tmp_path, tiny):
    out = tmp_path / "run"
    ended = fedrts("run", *tiny, "--method", "fedavg", "--density", "0.1", "--out", out, "--quiet")
    assert (ended.code, ended.out) == (0, "")
    assert ended.err == "note: fedavg is a dense method: density 0.1 is ignored\n"
    summary = read(out / "summary.json")
    assert (summary["density"], summary["density_target"]) == (1.0, 1.0)
    assert all(bool(mask.all()) for mask in safetensors.torch.load_file(out / "masks.safetensors").values())


def test_default_folder_is_named_after_time_data_method_and_seed(fedrts, tmp_path, tiny, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # also twice in one second
        assert fedrts("run", *tiny, "--rounds", "1", "--seed", "5").code == 0
    names = sorted(path.name for path in Path("runs").iterdir())
    assert len(names) == 2
    assert all(re.fullmatch(r"\d{8}-\d{6}-digits-fedrts-5(-2)?", name) for name in names)


def test_run_shows_progress_and_result(fedrts, tmp_path, tiny):
    out = tmp_path / "run"
    ended = fedrts("run", *tiny, "--out", out)
    assert ended.err == ""
    assert f"writing to {out}" in ended.out
    assert "round    3 of 3" in ended.out
    assert f"{read(out / 'summary.json')['accuracy']:.4f}" in ended.out
    assert fedrts("run", *tiny, "--quiet", "--out", tmp_path / "quiet").out == ""


def test_file_with_flags_on_top(fedrts, tmp_path):
    file = tmp_path / "experiment.toml"
    file.write_text('method = "random"\nrounds = 9\n[clients]\ntotal = 6\nper_round = 2\n[train]\nepochs = 1\n', "utf-8")
    out = tmp_path / "run"
    assert fedrts("run", file, "--rounds", "2", "--out", out).code == 0
    summary = read(out / "summary.json")
    assert (summary["method"], summary["rounds"]) == ("random", 2)
    assert [len(line["clients"]) for line in lines(out / "history.jsonl")] == [2, 2]


def test_a_resolved_file_repeats_its_run(fedrts, run_dir, tmp_path):
    again = tmp_path / "again"
    assert fedrts("run", run_dir / "experiment.toml", "--out", again).code == 0
    for file in ("model.safetensors", "masks.safetensors", "topology.jsonl", "clients.json"):
        assert (again / file).read_bytes() == (run_dir / file).read_bytes()


# -- looking at a run -----------------------------------------------------------------------------------------------


def test_inspect(fedrts, run_dir):
    ended = fedrts("inspect", run_dir, "--json")
    assert (ended.code, ended.err) == (0, "")
    shown, summary = json.loads(ended.out), read(run_dir / "summary.json")
    assert (shown["state"], shown["rounds_played"]) == ("finished", 3)
    for key in ("method", "data", "model", "seed", "rounds", "density", "accuracy", "upload_bytes", "download_bytes"):
        assert shown[key] == summary[key]
    masks = safetensors.torch.load_file(run_dir / "masks.safetensors")
    expected = {name: (mask.numel(), int(mask.count_nonzero())) for name, mask in masks.items()}
    assert {layer["layer"]: (layer["links"], layer["active"]) for layer in shown["layers"]} == expected
    table = fedrts("inspect", run_dir).out
    assert all(name in table for name in masks)
    assert "finished" in table


def test_inspect_shows_layers_in_the_order_of_the_model(fedrts, tmp_path, tiny):
    """Finished or not, and with their names."""
    out = tmp_path / "run"
    assert fedrts("run", *tiny, "--set", "model_options.hidden=[16,15,14,13,12,11]", "--out", out).code == 0
    names = ["1.weight", "3.weight", "5.weight", "7.weight", "9.weight", "11.weight"]
    finished = json.loads(fedrts("inspect", out, "--json").out)["layers"]
    assert [layer["layer"] for layer in finished] == names
    for name in ("summary.json", "model.safetensors", "masks.safetensors"):
        (out / name).unlink()
    assert json.loads(fedrts("inspect", out, "--json").out)["layers"] == finished


@pytest.fixture
def unfinished(run_dir, tmp_path: Path) -> Path:
    """As if killed after the last checkpoint, before any result was written."""
    path = tmp_path / "unfinished"
    shutil.copytree(run_dir, path)
    for name in ("summary.json", "model.safetensors", "masks.safetensors"):
        (path / name).unlink()
    return path


def test_inspect_an_unfinished_run(fedrts, unfinished, run_dir):
    with (unfinished / "history.jsonl").open("ab") as log:
        log.write(b'{"round": 3, "ou')  # torn
    before = contents(unfinished)
    ended = fedrts("inspect", unfinished, "--json")
    assert (ended.code, ended.err) == (0, "")
    shown = json.loads(ended.out)
    assert f"fedrts resume {unfinished}" in shown["state"]
    assert shown["rounds_played"] == 3
    assert shown["accuracy"] == lines(run_dir / "history.jsonl")[-1]["accuracy"]
    masks = safetensors.torch.load_file(run_dir / "masks.safetensors")
    assert [layer["active"] for layer in shown["layers"]] == [int(masks[name].count_nonzero()) for name in sorted(masks)]
    assert contents(unfinished) == before


@pytest.mark.parametrize("command", ["inspect", "evaluate", "export"])
def test_looking_changes_nothing(fedrts, unfinished, tmp_path, command):
    """Not even where a checkpoint is damaged: the folder may be read-only, or another process may be writing to it."""
    newest = max((unfinished / "checkpoint").iterdir())
    newest.write_bytes(newest.read_bytes()[:-1])
    before = contents(unfinished)
    ended = fedrts(command, unfinished, *(["--out", tmp_path / "exported"] if command == "export" else []))
    assert ended.code == 0
    assert ended.err.startswith(f"note: checkpoint {newest.name} is damaged")
    assert ended.err.count("\n") == 1
    assert contents(unfinished) == before


def test_inspect_a_run_that_has_not_begun(fedrts, unfinished):
    shutil.rmtree(unfinished / "checkpoint")
    for name in ("history.jsonl", "topology.jsonl", "clients.json"):
        (unfinished / name).unlink()
    shown = json.loads(fedrts("inspect", unfinished, "--json").out)
    assert (shown["rounds_played"], shown["layers"]) == (0, [])
    assert fedrts("inspect", unfinished).code == 0
    assert_one_line_error(fedrts("evaluate", unfinished), "neither a model nor a checkpoint", f"fedrts resume {unfinished}")


@pytest.mark.parametrize("source", ["run_dir", "unfinished"])
def test_evaluate_equals_the_summary(fedrts, run_dir, source, request):
    summary = read(run_dir / "summary.json")
    ended = fedrts("evaluate", request.getfixturevalue(source), "--json")
    assert (ended.code, ended.err) == (0, "")
    assert json.loads(ended.out) == {"loss": summary["loss"], "accuracy": summary["accuracy"]}


def test_evaluate_for_people_and_on_named_data(fedrts, run_dir):
    summary = read(run_dir / "summary.json")
    expected = f"loss {summary['loss']:.4f}\naccuracy {summary['accuracy']:.4f}\n"
    assert fedrts("evaluate", run_dir).out == expected
    assert fedrts("evaluate", run_dir, "--data", "digits").out == expected


def test_evaluate_on_data_of_another_shape(fedrts, run_dir):
    assert_one_line_error(fedrts("evaluate", run_dir, "--data", "toy_images"), "toy_images")


@pytest.mark.parametrize("source", ["run_dir", "unfinished"])
@pytest.mark.parametrize(
    ("format_", "name", "load"),
    [
        ("safetensors", "export.safetensors", safetensors.torch.load_file),
        ("dense", "export.pt", lambda file: torch.load(file, weights_only=True)),
    ],
)
def test_export(fedrts, run_dir, tmp_path, source, request, format_, name, load):
    folder = tmp_path / "copy"
    shutil.copytree(request.getfixturevalue(source), folder)
    module = models.get("mlp")((1, 8, 8), 10)
    expected = safetensors.torch.load_file(run_dir / "model.safetensors")
    for arguments, target in (((), folder / name), (("--out", tmp_path / "elsewhere"), tmp_path / "elsewhere")):
        ended = fedrts("export", folder, "--format", format_, *arguments)
        assert (ended.code, ended.out, ended.err) == (0, f"{target}\n", "")
        tensors = load(target)
        module.load_state_dict(tensors, strict=True)
        assert set(tensors) == set(expected)
        assert all(torch.equal(tensors[key], expected[key]) for key in expected)


def test_load_in_python(run_dir, unfinished):
    expected = safetensors.torch.load_file(run_dir / "model.safetensors")
    for folder in (run_dir, unfinished):
        model = package.load(folder)
        assert not model.training
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("methods", {"fedavg", "fedrts", "fedrts_gamma0", "fedrts_gamma1", "random"}),
        ("models", {"mlp", "cnn", "tiny_gpt"}),
        ("data", {"digits"}),
    ],
)
def test_lists(fedrts, command, expected):
    rows = json.loads(fedrts(command, "--json").out)
    assert expected <= {row["name"] for row in rows}
    assert all(isinstance(row["options"], dict) for row in rows)
    for row in rows:
        if row["name"] in expected:
            assert any(row[key] for key in row if key.startswith("what"))
    table = fedrts(command)
    assert (table.code, table.err) == (0, "")
    assert all(name in table.out for name in expected)


def test_methods_list_the_options_that_the_experiment_file_takes(fedrts):
    options = {row["name"]: row["options"] for row in json.loads(fedrts("methods", "--json").out)}
    assert options["fedrts"] == resolve().method_options != {}
    assert options["fedavg"] == {}


def test_version(fedrts):
    assert fedrts("--version").out.strip() == package.__version__


# -- bad input ------------------------------------------------------------------------------------------------------


def test_existing_run_folder_is_refused_with_the_command_to_use(fedrts, run_dir, tiny):
    before = contents(run_dir)
    assert_one_line_error(fedrts("run", *tiny, "--out", run_dir), str(run_dir), f"fedrts resume {run_dir}")
    assert contents(run_dir) == before


def test_folder_with_other_files_is_refused(fedrts, tmp_path, tiny):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert_one_line_error(fedrts("run", *tiny, "--out", tmp_path), str(tmp_path), "not empty", "thesis.tex")
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--density", "0"], ["density", "> 0 and ≤ 1"]),
        (["--density", "nan"], ["density", "> 0 and ≤ 1"]),
        (["--density", "half"], ["density", "valid"]),
        (["--density", "0.001"], ["density 0.001", "smallest feasible density"]),
        (["--method", "fedrst"], ["fedrst", "did you mean 'fedrts'"]),
        (["--model", "mpl"], ["mpl", "did you mean 'mlp'"]),
        (["--data", "digit"], ["digit", "did you mean 'digits'"]),
        (["--method", "math:pi"], ["math:pi"]),
        (["--data", "math:pi"], ["math:pi"]),
        (["--model", "math:pi"], ["math:pi"]),
        (["--set", "topology.prunable=math:pi"], ["topology.prunable", "math:pi"]),
        (["--set", "topology.prunable=nowhere:rule"], ["topology.prunable", "nowhere:rule"]),
        (["--model", "tiny_gpt"], ["tiny_gpt", "(1, 8, 8)"]),
        (["--model", "nowhere:net"], ["nowhere:net"]),
        (["--set", "model_options.hidden=5"], ["model_options.hidden must be a list", "got 5"]),
        (["--set", "model_options.hidden=abc"], ["model_options.hidden must be a list", "'abc'"]),
        (["--set", "clients.total=true"], ["clients.total must be a whole number ≥ 1"]),
        (["--init", "/"], ["'/' is a folder"]),
        (["--out", "x" * 300], ["File name too long", "choose another --out"]),
        (["--set", "model_options.hidden=[-5]"], ["model_options", "hidden"]),
        (["--set", "model_options.hidden=[]"], ["no prunable weights", "prune_output"]),
        (["--set", "model_options.hidden=[0]"], ["error"]),
        (["--set", "model_options.widht=5"], ["model_options.widht", "hidden"]),
        (["--per-round", "7"], ["clients.per_round = 7", "clients.total = 6"]),
        (["--clients", "5000"], ["clients.total = 5000", "1,438"]),
        (["--set", "clients.min_size=239"], ["clients"]),
        (["--set", "topology.end=4"], ["topology.end = 4", "rounds = 3"]),
        (["--rounds", "many"], ["rounds", "integer"]),
        (["--device", "cuda:99"], ["cuda:99", "--device cpu"]),
        (["--set", "train.lr"], ["--set", "train.lr"]),
        (["--set", "train.lrr=1"], ["train.lrr", "did you mean 'train.lr'"]),
        (["--no-such-flag"], ["--no-such-flag"]),
        (["missing.toml"], ["missing.toml", "No such file"]),
        (["--out", "/dev/null/run"], ["/dev/null/run"]),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) and value[0].startswith("-") else "",
)
def test_bad_input_is_one_line_and_leaves_nothing_behind(fedrts, tmp_path, tiny, monkeypatch, arguments, words):
    """Whatever shows before training starts: the next try finds the place as it was."""
    monkeypatch.chdir(tmp_path)
    assert_one_line_error(fedrts("run", *tiny, "--out", "run", *arguments), *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("out", [[], ["--out", "new/folders/run"]], ids=["default folder", "new folders"])
@pytest.mark.parametrize("bad", [["--density", "2"], ["--clients", "5000"]], ids=["seen at once", "seen with the data"])
def test_bad_input_leaves_no_parent_folders_behind(fedrts, tmp_path, tiny, monkeypatch, bad, out):
    monkeypatch.chdir(tmp_path)
    assert_one_line_error(fedrts("run", *tiny, *bad, *out))
    assert list(tmp_path.iterdir()) == []


def test_a_parent_folder_that_was_there_stays(fedrts, tmp_path, tiny):
    (tmp_path / "runs").mkdir()
    assert_one_line_error(fedrts("run", *tiny, "--clients", "5000", "--out", tmp_path / "runs" / "a"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["runs"]


def test_dirichlet_needs_one_label_per_sample(fedrts, tmp_path, tiny):
    """Text has many targets per sample: dividing by them would hand out rows that do not exist."""
    language = ["--data", "toy_text", "--model", "tiny_gpt", "--density", "0.5", "--set", "clients.min_size=1"]
    ended = fedrts("run", *tiny, *language, "--set", "clients.partition=dirichlet", "--out", tmp_path / "run")
    assert_one_line_error(ended, "clients.partition", "iid")


def test_bad_toml(fedrts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text("density = \n")
    assert_one_line_error(fedrts("run", "bad.toml"), "bad.toml", "TOML")
    Path("bad.toml").write_text("[train]\nlearning_rate = 1\n")
    assert_one_line_error(fedrts("run", "bad.toml"), "train.learning_rate")
    assert [file.name for file in tmp_path.iterdir()] == ["bad.toml"]


@pytest.mark.parametrize("command", ["resume", "inspect", "evaluate", "export"])
def test_folder_that_is_no_run(fedrts, tmp_path, command):
    for path in (tmp_path, tmp_path / "missing"):
        assert_one_line_error(fedrts(command, path), str(path), "no run folder")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], ["nonsense"]),
        (["resume"], ["RUN_DIR"]),
        (["run", "a.toml", "b.toml"], ["b.toml"]),
        (["data", "nonsense"], ["nonsense"]),
        (["export", "RUN", "--format", "onnyx"], ["onnyx", "did you mean 'onnx'"]),
        (["export", "RUN", "--out", "no/such/folder/file"], ["no/such/folder"]),
        (["evaluate", "RUN", "--data", "digit"], ["digit", "did you mean 'digits'"]),
    ],
)
def test_bad_command_line(fedrts, run_dir, arguments, words):
    assert_one_line_error(fedrts(*(str(run_dir) if word == "RUN" else word for word in arguments)), *words)


@pytest.mark.parametrize(
    ("file", "commands"),
    [
        ("model.safetensors", ["evaluate", "export"]),
        ("summary.json", ["inspect", "resume"]),
        ("history.jsonl", ["inspect"]),
        ("experiment.toml", ["inspect", "evaluate", "export"]),
    ],
)
def test_damaged_file_of_a_run_is_named(fedrts, run_dir, tmp_path, file, commands):
    folder = tmp_path / "damaged"
    shutil.copytree(run_dir, folder)
    (folder / file).write_bytes(b'{"torn": \n')
    for command in commands:
        assert_one_line_error(fedrts(command, folder), file)


@pytest.fixture
def own_run(tmp_path: Path) -> Path:
    """A run of a model and of data that were given in Python: no command line can build them again."""
    draw = torch.Generator().manual_seed(0)
    sets = [TensorDataset(torch.randn(20, 4, generator=draw), torch.arange(20) % 3) for _ in range(3)]
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    package.train(model=model, clients=sets, test=sets[0], rounds=2, density=0.9, out=tmp_path / "own")
    return tmp_path / "own"


def test_commands_on_a_run_of_ones_own_model(fedrts, own_run):
    assert json.loads(fedrts("inspect", own_run, "--json").out)["state"] == "finished"
    assert_one_line_error(fedrts("evaluate", own_run), "given in Python", "fedrts.load")
    ended = fedrts("export", own_run)
    assert (ended.code, ended.err) == (0, "")  # the tensors are all there


def test_resume_of_ones_own_model_names_the_call_to_use(fedrts, own_run):
    (own_run / "summary.json").unlink()
    assert_one_line_error(fedrts("resume", own_run), "given in Python", "fedrts.train", "resume=True")


def test_load_of_an_unfinished_run_of_ones_own_model(own_run):
    expected = safetensors.torch.load_file(own_run / "model.safetensors")
    for name in ("summary.json", "model.safetensors", "masks.safetensors"):
        (own_run / name).unlink()
    model = package.load(own_run, nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_training_that_diverges_is_one_line(fedrts, tmp_path, tiny):
    ended = fedrts("run", *tiny, "--lr", "1e30", "--quiet", "--out", tmp_path / "run")
    note, error = ended.err.splitlines()
    assert note.startswith("note: round 0: most replies were rejected ('weights' is not finite)")
    assert_one_line_error(replace(ended, err=f"{error}\n"), "not finite", "round 0", "train.lr")


# -- interrupted and resumed ----------------------------------------------------------------------------------------


def test_resume_of_a_finished_run_changes_nothing(fedrts, run_dir):
    before = contents(run_dir)
    ended = fedrts("resume", run_dir)
    assert (ended.code, ended.err) == (0, "")
    assert "finished" in ended.out
    assert contents(run_dir) == before
    assert package.resume(run_dir).summary["accuracy"] == read(run_dir / "summary.json")["accuracy"]


def test_resume_of_a_moved_folder(fedrts, unfinished, run_dir, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    ended = fedrts("resume", unfinished.name)
    assert (ended.code, ended.err) == (0, "")
    assert (unfinished / "model.safetensors").read_bytes() == (run_dir / "model.safetensors").read_bytes()
    assert {entry.name for entry in unfinished.iterdir()} == FILES


def test_resume_with_another_version_says_so(fedrts, unfinished):
    file = unfinished / "experiment.toml"
    file.write_text(file.read_text("utf-8").replace(f'torch = "{torch.__version__}"', 'torch = "1.0"'), "utf-8")
    ended = fedrts("resume", unfinished, "--quiet")
    assert ended.code == 0
    assert ended.err == f"note: the run began with torch 1.0, this is {torch.__version__}: results may differ in the last bits\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_interrupted_during_training(process, fedrts, tmp_path, number):
    """A real process: exit 130, one line that says how to go on, and that command then finishes the run."""
    out = tmp_path / "run"
    running = process("run", "--rounds", "20", "--epochs", "1", "--clients", "6", "--per-round", "3", "--engine", "serial", "--out", out)
    deadline = time.monotonic() + 60
    history = out / "history.jsonl"
    while not (history.exists() and history.read_bytes().count(b"\n") >= 2):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    running.send_signal(number)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert err == f"interrupted; continue with: fedrts resume {out}\n"
    assert not (out / "summary.json").exists()
    assert 2 <= len(lines(history)) < 20
    command = err.rpartition("fedrts ")[2].split()
    assert fedrts(*command, "--quiet").code == 0
    assert [line["round"] for line in lines(history)] == list(range(20))
    assert {entry.name for entry in out.iterdir()} == FILES


@pytest.mark.parametrize(("command", "step"), [("run", "with_folder"), ("evaluate", "loading.load")])
def test_interrupted_before_or_without_training(fedrts, run_dir, tmp_path, monkeypatch, command, step):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"fedrts.api.{step}", interrupt)
    ended = fedrts(command, *([run_dir] if command == "evaluate" else ["--out", tmp_path / "run"]))
    assert ended.code == 130
    assert "Traceback" not in ended.err
    assert not (tmp_path / "run").exists()


def test_interrupted_while_the_data_loads(fedrts, tmp_path, tiny, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(api, "assemble", interrupt)
        ended = fedrts("run", *tiny, "--out", out)
    assert (ended.code, ended.err) == (130, f"interrupted; continue with: fedrts resume {out}\n")
    assert fedrts("resume", out).code == 0
    assert {entry.name for entry in out.iterdir()} == FILES


# -- start-up -------------------------------------------------------------------------------------------------------


def python(code: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    started = time.perf_counter()
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return time.perf_counter() - started, ended


HEAVY = "{'torch', 'numpy', 'sklearn', 'safetensors'} & set(sys.modules)"


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments):
    call = f"import sys\nfrom fedrts.cli import main\nsys.argv = {['fedrts', *arguments]!r}"
    code = f"{call}\ntry:\n    main()\nfinally:\n    assert not {HEAVY}, {HEAVY}"
    _, ended = python(code)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.strip()


def test_help_answers_at_once(process):
    """Under a second; on a busy machine, at any rate faster than torch alone could be imported."""

    def seconds(*arguments: str) -> float:
        started = time.perf_counter()
        child = process(*arguments)
        out, err = child.communicate(timeout=60)
        assert (child.returncode, err) == (0, "")
        assert "--help" in out
        return time.perf_counter() - started

    slowest = max(min(seconds(*arguments) for _ in range(2)) for arguments in (["--help"], ["run", "--help"]))
    if slowest > 1:
        assert slowest < min(2, python("import torch")[0])


def test_importing_the_package_does_not_import_torch():
    _, ended = python(f"import sys, fedrts\nassert not {HEAVY}, {HEAVY}\nassert callable(fedrts.run)\nassert 'torch' in sys.modules")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_help_lists_every_command(fedrts):
    out, flags = fedrts("--help").out, fedrts("run", "--help").out
    for command in ("run", "resume", "inspect", "evaluate", "export", "methods", "models", "data"):
        assert re.search(rf"\b{command}\b", out)
    names = "method data model density rounds clients per-round epochs batch-size lr seed engine device out set quiet"
    assert [name for name in names.split() if f"--{name}" not in flags] == []


def test_export_to_onnx_is_checked_and_readable(fedrts, run_dir, tmp_path):
    import numpy as np
    import onnxruntime

    import fedrts as package
    from fedrts import data

    ended = fedrts("export", run_dir, "--format", "onnx", "--out", tmp_path / "model.onnx")
    assert (ended.code, ended.err, ended.out.strip()) == (0, "", str(tmp_path / "model.onnx"))
    inputs = data.load("digits", {}, None).test_x[:3].float()
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    with torch.no_grad():
        np.testing.assert_allclose(session.run(None, {"input": inputs.numpy()})[0], package.load(run_dir)(inputs).numpy(), atol=1e-4)


@pytest.mark.parametrize("absent", ["onnxruntime", "onnxscript"])
def test_export_to_onnx_without_the_extra_says_how_to_get_it(fedrts, run_dir, tmp_path, monkeypatch, absent):
    monkeypatch.setitem(sys.modules, absent, None)
    ended = fedrts("export", run_dir, "--format", "onnx", "--out", tmp_path / "model.onnx")
    assert (ended.code, ended.err) == (2, f"error: this needs {absent}, which is not installed: pip install 'fedrts[onnx]'\n")
    assert not (tmp_path / "model.onnx").exists()

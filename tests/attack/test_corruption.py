"""Silent corruption: whatever changed in the files of a run, or in its data, is noticed, named, and ends with exit code 2."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import fedrts
from fedrts.data.contract import Data
from fedrts.errors import InputError
from fedrts.runs import checkpoint
from fedrts.runs.folder import RunFolder

WRITTEN = ("model.safetensors", "masks.safetensors", "average.safetensors", "history.jsonl", "topology.jsonl")
TINY: dict[str, Any] = {
    "clients": {"total": 4, "per_round": 2},
    "train": {"epochs": 1},
    "model": "mlp",
    "model_options": {"hidden": [8]},
    "device": "cpu",
}


def flip(file: Path, position: int = -20) -> None:
    """One bit; in the logs within a number, so that the file stays valid JSON."""
    content = bytearray(file.read_bytes())
    if file.suffix == ".jsonl":
        position = next(place for place in range(len(content) // 2, len(content)) if chr(content[place]) in "2468")
    content[position] ^= 1
    file.write_bytes(content)


def newest(folder: Path) -> Path:
    return sorted((folder / "checkpoint").glob("*.safetensors"))[-1]


def rewritten(folder: Path, change) -> None:
    """The only checkpoint of a run, changed and given the checksum that it then has."""
    last = newest(folder)
    header = json.loads(last.read_bytes()[8 : 8 + int.from_bytes(last.read_bytes()[:8], "little")])
    facts, tensors = json.loads(header["__metadata__"]["fedrts"]), safetensors.torch.load(last.read_bytes())
    changed = change(facts, tensors)
    facts, tensors = changed if changed is not None else (facts, tensors)
    content = safetensors.torch.save(tensors, metadata={"fedrts": json.dumps(facts)})
    for file in (folder / "checkpoint").iterdir():
        file.unlink()
    last.with_name(f"{last.name[:8]}-{checkpoint._digest(content)}.safetensors").write_bytes(content)


# -- finished runs ----------------------------------------------------------------------------------------------------


def test_the_summary_names_the_bytes_of_every_file(finished):
    digests = json.loads((finished / "summary.json").read_text())["digests"]
    assert digests == {name: f"sha256:{hashlib.sha256((finished / name).read_bytes()).hexdigest()}" for name in WRITTEN}
    assert (finished / "topology.jsonl").stat().st_size > 0


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("words", [("inspect",), ("resume",)])
def test_a_flipped_bit_in_a_finished_run_is_named(finished, command, name, words):
    assert command(*words, finished).code == 0
    flip(finished / name)
    ended = command(*words, finished)
    assert ended.code == 2
    assert ended.err.count("\n") == 1
    assert f"{finished / name} is damaged" in ended.err


@pytest.mark.parametrize("words", [("evaluate",), ("export",), ("export", "--format", "dense"), ("export", "--format", "onnx")])
def test_a_flipped_bit_in_the_model_is_never_used(finished, command, words):
    flip(finished / "model.safetensors")
    ended = command(words[0], finished, *words[1:])
    assert (ended.code, "model.safetensors is damaged" in ended.err) == (2, True)
    with pytest.raises(InputError, match=r"model\.safetensors is damaged"):
        fedrts.load(finished)
    with pytest.raises(InputError, match=r"model\.safetensors is damaged"):
        fedrts.resume(finished)


@pytest.mark.parametrize("name", ["masks.safetensors", "history.jsonl", "topology.jsonl"])
def test_a_report_leaves_a_damaged_run_out_and_says_why(finished, name):
    from fedrts.report.read import find

    flip(finished / name)
    found = find([finished])
    assert not found.runs
    assert name in found.problems[0]


def test_a_comparison_does_not_count_a_damaged_cell(tmp_path, command):
    words = ["compare", "--methods", "random", "--seeds", "0", "--rounds", "1", "--clients", "4", "--set", "train.epochs=1", "--jobs", "1"]
    words += ["--set", "model_options.hidden=[8]", "--quiet", "--out", tmp_path / "compared"]
    assert command(*words).code == 0
    assert "digests" not in (tmp_path / "compared" / "results.csv").read_text()
    (cell,) = (tmp_path / "compared" / "runs").iterdir()
    flip(cell / "history.jsonl")
    ended = command(*words)
    assert (ended.code, f"{cell / 'history.jsonl'} is damaged" in ended.err) == (2, True)


def test_a_deleted_file_of_a_finished_run_is_missed(finished, command):
    (finished / "topology.jsonl").unlink()
    assert command("inspect", finished).code == 2


def test_a_damaged_model_is_written_anew_as_the_message_says(finished):
    whole = (finished / "model.safetensors").read_bytes()
    flip(finished / "model.safetensors")
    (finished / "summary.json").unlink()
    fedrts.resume(finished)
    assert (finished / "model.safetensors").read_bytes() == whole
    RunFolder(finished).verify()


def test_a_folder_of_an_earlier_version_loads_as_before(finished, command):
    summary = json.loads((finished / "summary.json").read_text())
    del summary["digests"]
    (finished / "summary.json").write_text(json.dumps(summary))
    flip(finished / "history.jsonl")
    assert [command(word, finished).code for word in ("evaluate", "inspect", "resume")] == [0, 0, 0]


# -- models that are not finite ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("word", ["evaluate", "export"])
def test_a_model_that_is_not_finite_is_refused_by_name(finished, command, value, word):
    """Its digest is right: somebody wrote it so."""
    tensors = safetensors.torch.load_file(finished / "model.safetensors")
    name = list(tensors)[-1]
    tensors[name].view(-1)[0] = value
    safetensors.torch.save_file(tensors, finished / "model.safetensors")
    summary = json.loads((finished / "summary.json").read_text())
    del summary["digests"]
    (finished / "summary.json").write_text(json.dumps(summary))
    ended = command(word, finished)
    assert (ended.code, f"'{name}' in" in ended.err, "not finite" in ended.err) == (2, True, True)


@pytest.mark.parametrize("word", ["evaluate", "export", "resume"])
def test_a_checkpoint_that_is_not_finite_is_refused(stopped, command, word):
    def spoil(facts, tensors):
        tensors["values"][0] = float("nan")

    rewritten(stopped, spoil)
    ended = command(word, stopped)
    assert (ended.code, "not finite" in ended.err) == (2, True)


# -- while a run is stopped -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["history.jsonl", "topology.jsonl"])
def test_a_log_that_changed_while_a_run_was_stopped_is_named(stopped, command, name):
    flip(stopped / name)
    ended = command("resume", stopped)
    assert (ended.code, f"{stopped / name} is not what it was" in ended.err) == (2, True)


def test_a_checkpoint_of_an_earlier_version_still_resumes(stopped):
    """It says nothing of the content of logs, nor of all data."""

    def older(facts, tensors):
        del facts["log_digests"], facts["identity"]["data"]

    rewritten(stopped, older)
    assert fedrts.resume(stopped).summary["rounds"] == 4


def test_a_resumed_run_goes_on_with_the_digest_of_its_logs(stopped):
    fedrts.resume(stopped)
    RunFolder(stopped).verify()
    summary = RunFolder(stopped).summary()
    assert summary is not None
    assert summary["digests"]["history.jsonl"] == f"sha256:{hashlib.sha256((stopped / 'history.jsonl').read_bytes()).hexdigest()}"


def arrays(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(3000, 6)).astype(np.float32),
        "y": np.arange(3000) % 3,
        "x_test": rng.normal(size=(50, 6)).astype(np.float32),
        "y_test": np.arange(50) % 3,
    }


@pytest.mark.parametrize(("name", "row"), [("x", 1), ("x", 2999), ("y", 7), ("x_test", 49), ("y_test", 0)])
def test_data_that_changed_while_a_run_was_stopped_is_noticed(tmp_path, command, name, row):
    """Any row of any array: of 3,000 inputs every second one used to be looked at."""
    file, run = tmp_path / "data.npz", tmp_path / "run"
    held = arrays()
    np.savez(file, **held)
    fedrts.run(**TINY, data=f"npz:{file}", density=0.6, rounds=1, out=run)
    (run / "summary.json").unlink()
    held[name][row] = (held[name][row] + 1) % 3 if name.startswith("y") else -held[name][row]
    np.savez(file, **held)
    ended = command("resume", run)
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "data" in ended.err
    assert "is not that of the checkpoint" in ended.err


def test_the_validation_set_counts_too():
    x, y = torch.randn(40, 3), torch.arange(40) % 2
    held = Data(x, y, x[:4], y[:4], 2).with_validation(0.5)
    assert held.valid_x is not None
    changed = held.valid_x.clone()
    changed[-1, -1] += 1
    assert dataclasses.replace(held, valid_x=changed).fingerprint != held.fingerprint


def test_a_fingerprint_names_the_content_and_not_where_it_lies(tmp_path):
    """On a device, in a file, as a view or a copy: the same rows have the same name."""
    from fedrts.data.digests import mapped

    np.save(tmp_path / "x.npy", np.arange(240, dtype=np.uint8).reshape(20, 4, 3))
    x, y = mapped(tmp_path / "x.npy"), torch.arange(20)
    view, copied = Data(x[:12, 1:], y[:12], x[12:, 1:], y[12:], 20), Data(x[:12, 1:].clone(), y[:12], x[12:, 1:].clone(), y[12:], 20)
    assert view.fingerprint == copied.fingerprint == view.to("cpu").fingerprint


def test_a_digest_is_kept_until_its_file_changes(tmp_path, monkeypatch):
    """By size and time of change: the second look at gigabytes costs nothing."""
    from fedrts.data import digests

    file = tmp_path / "x.npy"
    np.save(file, np.zeros((20, 4), np.uint8))
    first = digests.digest_of(digests.mapped(file)[:10])
    with monkeypatch.context() as patch:
        patch.setattr(digests, "_computed", lambda tensor: pytest.fail("computed again"))
        assert digests.digest_of(digests.mapped(file)[:10]) == first
    np.save(file, np.ones((20, 4), np.uint8))
    assert digests.digest_of(digests.mapped(file)[:10]) != first


def test_a_comparison_notices_data_that_changed_beyond_the_sample(tmp_path, command):
    file = tmp_path / "data.npz"
    held = arrays()
    np.savez(file, **held)
    words = ["compare", "--methods", "random", "--seeds", "0", "--rounds", "1", "--clients", "4", "--data", f"npz:{file}", "--jobs", "1"]
    words += [
        "--set",
        "train.epochs=1",
        "--densities",
        "0.6",
        "--set",
        "model_options.hidden=[8]",
        "--quiet",
        "--out",
        tmp_path / "compared",
    ]
    assert command(*words).code == 0
    held["x_test"][3] *= -1
    np.savez(file, **held)
    ended = command(*words)
    assert (ended.code, "begun with other data" in ended.err) == (2, True)

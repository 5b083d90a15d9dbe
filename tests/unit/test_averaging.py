"""The average of late models, link by link; and that nothing else changes by it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import fedrts
from fedrts.errors import InputError, Note
from fedrts.methods.contract import State
from fedrts.runs import checkpoint
from fedrts.server import rounds
from fedrts.server.averaging import LateAverage, average_of
from outside import TINY, command

OFTEN = {"interval": 2, "end": 6}


def by_hand(played: list[rounds.Played], start: State, first: int, share: Any) -> np.ndarray:
    """The average of the models of a run `[n]`, one number after the other; `share(i)` is that of the i-th model that enters."""
    links = len(start.mask.bits)
    average: list[float] = []
    for number, (before, now) in enumerate(zip([start, *(p.state for p in played)], [p.state for p in played], strict=False)):
        if number < first:
            continue
        weights, was, active = now.weights.double().numpy(), before.mask.bits.numpy(), now.mask.bits.numpy()
        if number == first:
            average = list(weights)
            continue
        for place, weight in enumerate(weights):
            joined = place < links and active[place] and not was[place]
            gone = place < links and not active[place]
            old = weight if joined else average[place]
            average[place] = 0.0 if gone else old + share(number - first) * (weight - old)
    return np.array(average)


@pytest.mark.parametrize("method", ["fedrts", "feddst", "fedavg"])
@pytest.mark.parametrize(
    ("train", "first", "share"),
    [
        ({"average": "tail", "average_share": 0.7}, 2, lambda i: 1 / (i + 1)),
        ({"average": "tail", "average_share": 0.01}, 6, lambda i: 1 / (i + 1)),
        ({"average": "ema", "average_decay": 0.75}, 0, lambda i: 0.25),
    ],
)
def test_the_average_is_what_it_says(toy, method: str, train: dict[str, Any], first: int, share: Any):
    """Links that join begin with their weight; BatchNorm's statistics are averaged like the rest."""
    run = toy(method, "cnn", rounds=7, topology=OFTEN, train=train)
    start = run.method.begin(run.setup)
    played = list(rounds.play(run.plan, start, -1))
    late = average_of(played[-1].state)
    assert late is not None
    expected = by_hand(played, start, first, share)
    np.testing.assert_allclose(late.weights.double().numpy(), expected, rtol=1e-4, atol=1e-6)
    if method != "fedavg":
        masks = [one.state.mask for one in played[first:]]
        assert any(one != other for one, other in pairwise(masks)) == (first < 5), "links change meanwhile"
    assert len(played[-1].state.memory["average"]) == len(played[-1].state.values), "one number for every active link"


def test_shares():
    tail = LateAverage("tail", rounds=10, share=0.3)
    assert [tail.entering(index) for index in (6, 7, 8, 9, 10)] == [0, 1, 1 / 2, 1 / 3, 1 / 4], "rounds beyond the plan enter too"
    assert LateAverage("tail", rounds=1000, share=0.1).entering(899) == 0
    assert LateAverage("tail", rounds=1000, share=0.1).entering(900) == 1, "0.1 · 1000 is 100 rounds, whatever its last digit"
    assert [LateAverage("off").entering(index) for index in (0, 1)] == [0, 0]


def test_nothing_else_changes(tmp_path: Path):
    common: dict[str, Any] = {
        "data": "digits",
        "rounds": 6,
        "device": "cpu",
        "train": {"epochs": 1, "average": "off"},
        "topology": {"interval": 2},
    }
    plain = fedrts.run(**common, out=tmp_path / "plain")
    averaged = fedrts.run(**{**common, "train": {"epochs": 1, "average": "ema"}}, out=tmp_path / "averaged")
    assert plain.average is None
    assert (tmp_path / "plain/model.safetensors").read_bytes() == (tmp_path / "averaged/model.safetensors").read_bytes()
    costs = ("upload_bytes", "download_bytes", "flops")
    assert all(plain.summary[key] == averaged.summary[key] for key in costs), "the average costs no byte"
    assert not (tmp_path / "plain/average.safetensors").exists()
    assert not any(key.startswith("average") for key in plain.summary)


def test_the_average_is_judged_exported_and_loaded(tmp_path: Path):
    train = {"average": "tail", "average_share": 0.5, "epochs": 1}
    folder = tmp_path / "run"
    result = fedrts.run(data="digits", rounds=6, device="cpu", train=train, data_options={"validation": 0.2}, out=folder)
    assert result.average is not None
    tensors = safetensors.torch.load_file(folder / "average.safetensors")
    for module in (result.average, fedrts.load(folder, average=True)):
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in module.state_dict().items())
    assert any(not torch.equal(tensor, tensors[name]) for name, tensor in fedrts.load(folder).state_dict().items())
    masks = safetensors.torch.load_file(folder / "masks.safetensors")
    assert all(bool((tensors[name][~mask] == 0).all()) for name, mask in masks.items()), "exact zeros outside the mask"
    code, said = command("evaluate", str(folder), "--average", "--json")
    assert code == 0, said
    told = json.loads(said)
    assert told["accuracy"] == pytest.approx(result.summary["average_accuracy"])
    assert told["loss"] == pytest.approx(result.summary["average_loss"], rel=1e-5)
    assert told["valid_accuracy"] == pytest.approx(result.summary["average_valid_accuracy"])
    assert result.history[-1]["average_accuracy"] == result.summary["average_accuracy"]
    assert command("export", str(folder), "--average", "--out", str(tmp_path / "a.safetensors"))[0] == 0
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in safetensors.torch.load_file(tmp_path / "a.safetensors").items())


def test_where_there_is_no_average_one_line_says_so(tmp_path: Path):
    fedrts.run(data="digits", rounds=1, device="cpu", train={"epochs": 1, "average": "off"}, out=tmp_path / "run")
    for words in (["evaluate"], ["export"]):
        code, said = command(*words, str(tmp_path / "run"), "--average")
        assert (code, said.count("\n")) == (2, 1)
        assert "has no average of models" in said
        assert "train.average" in said


def test_an_average_of_another_size_is_damage(toy, tmp_path: Path):
    folder = tmp_path / "run"
    fedrts.run(data="digits", rounds=3, device="cpu", train={"epochs": 1, "average": "ema"}, out=folder)
    saved = checkpoint.load(folder / "checkpoint")
    assert saved is not None
    saved.state.memory["average"] = saved.state.memory["average"][:-1]  # type: ignore[index]
    for file in (folder / "checkpoint").iterdir():
        file.unlink()
    checkpoint.save(folder / "checkpoint", saved)
    with pytest.warns(Note, match="its average of models has"), pytest.raises(InputError, match="are damaged"):
        fedrts.resume(folder)


def test_the_average_is_compared_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    settings = ["--set", "train.average=tail", "--metric", "average_accuracy"]
    code, said = command("compare", "--methods", "random,fedavg", "--seeds", "0,1", "--jobs", "1", "--out", "both", *TINY, *settings)
    assert code == 0, said
    assert "est accuracy of the average of late models" in (tmp_path / "both/results.md").read_text("utf-8")
    assert command("report", "both", "--no-png")[0] == 0
    tables = [file.read_text("utf-8").splitlines() for file in (tmp_path / "both").rglob("*results*.csv")]
    heads = [table[0] for table in tables if "average" in table[0]]
    assert heads, "a column of the average"

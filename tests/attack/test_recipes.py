"""Recipes meet what was there before them: own models, comparisons and folders of earlier versions, budgets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedrts
from fedrts import config
from fedrts.errors import InputError
from fedrts.testing.federations import toy
from outside import TINY, command


def part(seed: int) -> TensorDataset:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > 0).long())


def trained(out: Path, **keywords: Any) -> dict[str, Any]:
    """The flat settings of a run of one's own model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    fedrts.train(model=model, clients=[part(1), part(2)], test=part(3), density=0.5, device="cpu", out=out, **{"rounds": 2, **keywords})
    return config.flat(config.from_file(out / "experiment.toml"))


@pytest.mark.parametrize(
    ("keywords", "rate", "value_type"),
    [
        ({}, 0.1, "int8"),
        ({"recipe": "paper"}, 0.01, "float32"),
        ({"train": {"optimizer": "adam"}}, 0.001, "int8"),
        ({"lr": 0.3, "value_type": "float16"}, 0.3, "float16"),
    ],
)
def test_own_models_have_recipes_too(tmp_path: Path, keywords: dict[str, Any], rate: float, value_type: str):
    settings = trained(tmp_path / "run", **keywords)
    assert (settings["train.lr"], settings["wire.value_type"]) == (rate, value_type)
    assert settings["recipe"] == keywords.get("recipe", "tuned")


def without_recipe(file: Path) -> None:
    """A file as it was before there were recipes."""
    text = re.sub(r'^recipe = "paper"\n', "", file.read_text("utf-8"), count=1, flags=re.M)
    assert text != file.read_text("utf-8")
    file.write_text(text, "utf-8")


def test_an_own_model_of_before_goes_on(tmp_path: Path):
    trained(tmp_path / "run", recipe="paper")
    without_recipe(tmp_path / "run" / "experiment.toml")
    with pytest.warns(fedrts.errors.Note, match="4 rounds instead of 2"):
        settings = trained(tmp_path / "run", rounds=4, resume=True)
    assert (settings["recipe"], settings["train.lr"], settings["wire.value_type"]) == ("paper", 0.01, "float32")


def test_a_comparison_of_before_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    grid = ["compare", "--methods", "random,fedavg", "--jobs", "1", "--out", "old", *TINY]
    assert command(*grid, "--seeds", "0", "--recipe", "paper")[0] == 0
    for file in [Path("old/compare.toml"), *Path("old").rglob("experiment.toml")]:
        without_recipe(file)
    code, said = command(*grid, "--seeds", "0,1")
    assert (code, said.count("\n")) == (2, 1)
    assert "it is older than recipes: add --recipe paper" in said
    code, said = command(*grid, "--seeds", "0,1", "--recipe", "paper")
    assert code == 0, said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--budget", "5MB", "--set", "topology.density_start=0.5", "--density", "0.8"], "densities only fall"),
        (["--budget", "5MB", "--density", "0.00001"], "density"),
        (["--budget", "300kB", "--set", "topology.end=40", "--value-type", "float32"], "nothing fits 300 kB"),
    ],
)
def test_what_no_budget_can_be_planned_for_is_one_line(words: list[str], said: str):
    code, text = command("plan", "--data", "digits", "--set", "model_options.hidden=[16]", *words)
    assert (code, text.count("\n")) == (2, 1), text
    assert said in text


def test_a_type_that_nobody_asked_for_is_not_said_to_be():
    plan = fedrts.plan(data="digits", model_options={"hidden": [16]}, density=0.5, budget="120kB")
    assert "as you set it" not in plan.why
    assert "as you set it" in fedrts.plan(data="digits", model_options={"hidden": [16]}, value_type="int2", budget="120kB").why


@pytest.mark.parametrize("horizon", [1, 40])
def test_the_tail_is_of_the_rounds_whatever_the_rates_horizon(horizon: int):
    run = toy("random", "mlp", rounds=10, train={"average": "tail", "average_share": 0.3, "schedule_rounds": horizon})
    assert [run.plan.average.entering(index) for index in (6, 7, 8)] == [0, 1, 1 / 2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train": {"server_optimizer": "momentum"}}, r"set train\.server_optimizer = 'sgd' and train\.server_lr = 1"),
        ({"train": {"server_lr": 0.5}}, r"set train\.server_optimizer = 'sgd' and train\.server_lr = 1"),
        ({"guard": {"reducer": "median"}}, r"guard\.reducer = 'median' may leave out: use 'clip' or 'mean'"),
    ],
)
def test_what_would_lose_what_clients_count_as_told_is_refused(settings: dict[str, Any], words: str):
    with pytest.raises(InputError, match=words):
        toy("fedtopk", "mlp", **settings)
    assert toy("fedtopk", "mlp", guard={"reducer": "clip"}, train={"server_momentum": 0.5})

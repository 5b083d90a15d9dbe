"""Every file in examples/ runs, and learns."""

import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("name", "accuracy", "density"), [("own_model.py", 0.8, 0.25), ("folder_data.py", 0.8, 0.35)])
def test_scripts(name, accuracy, density, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    found = [float(number) for number in re.findall(r"\d\.\d+", capsys.readouterr().out)]
    assert found[0] > accuracy
    assert found[1] == pytest.approx(density, abs=0.01)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


FULL = {
    "table_regression.py": "pandas",
    "multi_label.py": "sklearn",
    "segmentation.py": "torch",
    "text_gru.py": "torch",
    "tiny_bert.py": "transformers",
    "lora_gpt2.py": "peft",
    "data_loaders.py": "sklearn",
}
"""Scripts that assert what they learned, and a package that each needs. They have a short form."""


def run(name, monkeypatch, tmp_path, *arguments):
    pytest.importorskip(FULL[name], reason=f"{FULL[name]} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
@pytest.mark.parametrize("name", FULL)
def test_scripts_in_short(name, tmp_path, monkeypatch, capsys):
    run(name, monkeypatch, tmp_path, "--short")
    assert "density" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
@pytest.mark.parametrize("name", FULL)
def test_scripts_in_full(name, tmp_path, monkeypatch, capsys):
    run(name, monkeypatch, tmp_path)
    assert "density" in capsys.readouterr().out


def test_own_data(fedrts, tmp_path, monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.delitem(sys.modules, "rings", raising=False)
    ended = fedrts("run", "own_data.toml", "--out", tmp_path / "run", "--quiet")
    assert (ended.code, ended.err) == (0, "")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy"] > 0.8
    clients = json.loads((tmp_path / "run" / "clients.json").read_text())
    assert all(sum(count > 0 for count in client["labels"]) == 2 for client in clients)
    assert sum(client["samples"] for client in clients) == 900


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="without the extra mlflow")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("flags", [["--short"], pytest.param([], marks=pytest.mark.slow)], ids=["short", "in full"])
def test_early_stopping_with_mlflow(flags, tmp_path, monkeypatch, capsys):
    """It asserts itself what it learned."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setattr(sys, "argv", ["early_stopping_mlflow.py", *flags])
    runpy.run_path(str(EXAMPLES / "early_stopping_mlflow.py"), run_name="__main__")
    assert "with the model of round" in capsys.readouterr().out
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_page_lists_them_all():
    page = (EXAMPLES.parent / "docs/examples.md").read_text("utf-8")
    for file in EXAMPLES.iterdir():
        assert file.name.startswith("__") or f"examples/{file.name}" in page

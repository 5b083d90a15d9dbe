"""`fedrts reproduce`: every table and figure at small scale, two of them whenever tests run."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from fedrts.reproduction import preset

QUICK = ("fig-lambda", "tab-quantization")
EVERY = [pytest.param(name, marks=() if name in QUICK else (pytest.mark.slow, pytest.mark.timeout(1800))) for name in preset.names()]


@pytest.fixture
def no_data(monkeypatch, tmp_path) -> None:
    """A machine without any data set's files."""
    monkeypatch.setenv("FEDRTS_DATA", str(tmp_path / "nothing"))


@pytest.mark.parametrize("name", EVERY)
def test_small_scale_ends_with_its_table_and_figure(fedrts, no_data, tmp_path, name):
    out = tmp_path / "out"
    ended = fedrts("reproduce", name, "--out", out, "--jobs", 1)
    assert (ended.code, ended.err) == (0, "")
    assert f"written to {out}" in ended.out
    found = preset.load(name)
    text = (out / "results.md").read_text("utf-8")
    assert text.startswith(f"# {found.title}\n")
    assert "Not finished" not in text
    assert "(published" not in text
    assert all(f"| {method} |" in text for method in found.small.methods if method != found.target)
    if found.target:
        assert "| method | density | seeds that reach it | rounds | FLOPs | GB sent |" in text
    with open(out / "results.csv", newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == len(list(out.glob("*/runs/*/summary.json"))) > 3
    assert all(0 < float(row["accuracy_last10"]) <= 1 for row in rows)
    drawn = (out / "figure.png").exists()
    assert drawn == bool(found.figure)
    if drawn:
        assert (out / "figure.png").stat().st_size > 5000
    before = {file: file.read_bytes() for file in Path(out).rglob("summary.json")}
    again = fedrts("reproduce", name, "--out", out, "--jobs", 1, "--quiet")
    assert (again.code, again.out, again.err) == (0, "", "")
    assert (out / "results.md").read_text("utf-8") == text
    assert {file: file.read_bytes() for file in before} == before


def test_without_a_name_they_are_listed(fedrts):
    ended = fedrts("reproduce")
    assert (ended.code, ended.err) == (0, "")
    assert all(name in ended.out for name in preset.names())


def test_a_preset_is_shown_as_it_is(fedrts):
    assert fedrts("reproduce", "fig-gamma", "--show").out == preset.text("fig-gamma")


def test_a_typo(fedrts):
    ended = fedrts("reproduce", "fig-gama")
    assert (ended.code, ended.err) == (2, "error: there is no preset 'fig-gama'; did you mean 'fig-gamma'?\n")


def test_paper_scale_asks_first(fedrts, tmp_path, monkeypatch):
    """With an estimate; where nobody can answer it is a no."""
    copy = tmp_path / "mine.toml"
    copy.write_text(_swapped(preset.text("fig-lambda")), "utf-8")
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115
    ended = fedrts("reproduce", copy, "--scale", "paper", "--out", tmp_path / "out")
    assert ended.code == 2
    assert ended.err.startswith("error: 6 runs take about ")
    assert "--yes" in ended.err
    assert not (tmp_path / "out").exists()


def _swapped(text: str) -> str:
    """A preset whose small scale is its paper scale and the other way round."""
    return text.replace("[paper", "[tmp").replace("[small", "[paper").replace("[tmp", "[small")


def test_a_figure_without_matplotlib_is_a_note(fedrts, no_data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    copy = tmp_path / "mine.toml"
    copy.write_text(preset.text("fig-lambda").replace("rounds = 10", "rounds = 1").replace("[1.0, 10.0, 50.0]", "[10.0]"), "utf-8")
    ended = fedrts("reproduce", copy, "--out", tmp_path / "out", "--jobs", 1, "--quiet")
    assert ended.code == 0
    assert ended.err == "note: no figure will be drawn: this needs matplotlib, which is not installed: pip install 'fedrts[plot]'\n"
    assert (tmp_path / "out" / "results.md").exists()
    assert not (tmp_path / "out" / "figure.png").exists()

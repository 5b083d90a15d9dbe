"""Results as a person at a notebook meets them: short, and as tables."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import fedrts
from fedrts.errors import InputError

SMALL: dict[str, Any] = {
    "data": "digits",
    "rounds": 3,
    "clients": 4,
    "per_round": 2,
    "epochs": 1,
    "engine": "serial",
    "model_options": {"hidden": [8]},
}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return fedrts.run(**SMALL, density=0.5, out=tmp_path_factory.mktemp("result") / "run")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    out = tmp_path_factory.mktemp("compared") / "it"
    return fedrts.compare(methods=["fedrts", "random"], densities=[0.5], seeds=[0, 1], out=out, **SMALL)


def test_a_result_is_shown_in_a_line(result):
    shown = repr(result)
    assert len(shown) < 250
    assert "\n" not in shown
    assert f"fedrts on digits, mlp, seed 0: accuracy {result.summary['accuracy']:.4f} after 3 rounds" in shown


def test_a_comparison_is_shown_in_a_line(compared):
    shown = repr(compared)
    assert len(shown.replace(str(compared.out), "")) < 200
    assert "4 of 4 cells finished" in shown


def test_tables_need_pandas_and_say_so(result, compared, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)  # as if it were not installed
    for found in (result, compared):
        with pytest.raises(InputError, match=r"this needs pandas, which is not installed: pip install 'fedrts\[pandas\]'"):
            found.frame()


def test_tables_have_a_row_a_round_and_a_row_a_cell(result, compared, monkeypatch):
    """By a stand-in that gives back what it is given."""
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda rows: rows))
    assert [row["round"] for row in result.frame()] == [0, 1, 2]
    assert [(row["method"], row["seed"]) for row in compared.frame()] == [("fedrts", 0), ("random", 0), ("fedrts", 1), ("random", 1)]


def test_tables_in_pandas(result, compared):
    pandas = pytest.importorskip("pandas", reason="fedrts[pandas] is not installed")
    frame = result.frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["round"]) == [0, 1, 2]
    assert len(compared.frame()) == 4

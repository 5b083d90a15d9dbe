"""`fedrts cost`: tables, JSON, CSV, and one line for every mistake."""

from __future__ import annotations

import csv
import io
import json

import pytest

from helping import assert_one_line_error

FAST = ("cost", "--model", "cnn", "--input-shape", "1,8,8", "--set", "model_options.width=4")


def test_a_table_for_each_accounting(fedrts):
    ended = fedrts(*FAST, "--method", "fedrts", "--density", "0.5")
    assert (ended.code, ended.err) == (0, "")
    places = [ended.out.index(f"{name}: ") for name in ("paper", "rules", "measured")]
    assert places == sorted(places)
    assert ended.out.count("inner") == ended.out.count("outer") == 4, "measured has a client with the mask and a fresh one"
    assert "…" not in ended.out, "nothing is cut off at 80 columns"
    assert max(map(len, ended.out.splitlines())) <= 80


def test_json(fedrts):
    ended = fedrts(*FAST, "--method", "prunefl", "--density", "0.5", "--samples", "100", "--epochs", "2", "--batch-size", "20", "--json")
    assert (ended.code, ended.err) == (0, "")
    content = json.loads(ended.out)
    assert (content["model"], content["method"], content["density"]) == ("cnn", "prunefl", 0.5)
    assert (content["input_shape"], content["classes"], content["samples"]) == ([1, 8, 8], 10, 100)
    assert set(content["accountings"]) == {"paper", "rules", "measured"}
    keys = "accounting round case download_bytes upload_bytes flops memory_bytes memory_on_mask_bytes memory_parts"
    assert all(set(row) == set(keys.split()) for row in content["rows"])
    cases = [row["case"] for row in content["rows"] if (row["accounting"], row["round"]) == ("paper", "outer")]
    assert cases == ["as published", "strictly"]


def test_csv(fedrts):
    ended = fedrts(*FAST, "--method", "fedtiny", "--density", "0.5", "--csv")
    assert (ended.code, ended.err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(ended.out)))
    assert {(row["accounting"], row["round"]) for row in rows} == {
        (accounting, round) for accounting in ("paper", "rules", "measured") for round in ("set-up", "inner", "outer")
    }
    assert all(float(row["upload_bytes"]) > 0 and row["method"] == "fedtiny" for row in rows)


def test_an_experiment_file_and_a_data_set(fedrts, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('data = "digits"\nmethod = "feddst"\ndensity = 0.3\n[clients]\ntotal = 10\nper_round = 5\n', "utf-8")
    content = json.loads(fedrts("cost", file, "--density", "0.4", "--set", "train.epochs=1", "--json").out)
    assert (content["method"], content["model"], content["density"], content["samples"]) == ("feddst", "mlp", 0.4, 143)
    assert (content["epochs"], content["batch_size"]) == (1, 16)


def test_a_dense_method_says_that_it_ignores_the_density(fedrts):
    ended = fedrts(*FAST, "--method", "fedavg", "--density", "0.2", "--json")
    assert ended.code == 0
    assert ended.err.startswith("note: fedavg is a dense method")
    assert json.loads(ended.out)["density"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--json", "--csv"), ("--json", "--csv", "choose one")),
        (("--data", "digits"), ("--data", "--input-shape")),
        (("--input-shape", "3x8x8"), ("--input-shape", "3x8x8", "3,32,32")),
        (("--input-shape", "7"), ("cnn", "images")),
        (("--method", "fedrtz"), ("fedrtz", "did you mean 'fedrts'")),
        (("--model", "cn"), ("'cn'", "did you mean 'cnn'")),
        (("--density", "2"), ("density", "≤ 1")),
        (("--density", "0.0001"), ("infeasible", "smallest feasible density")),
        (("--samples", "0"), ("samples",)),
        (("--set", "train.nothing=1"), ("train.nothing",)),
        (("--value-type", "int5"), ("value_type",)),
    ],
)
def test_mistakes_are_one_line(fedrts, arguments, words):
    assert_one_line_error(fedrts(*FAST, *arguments), *words)

"""benchmarks/hostile.py and honest.py: committed tables are those of the raw results, and what the documents promise is in them."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def raw(name: str):
    return json.loads((RESULTS / "raw" / f"{name}.json").read_text("utf-8"))


def test_the_tables_of_hostile_clients_are_those_of_the_raw_results(benchmark):
    hostile = benchmark("hostile")
    found = raw("hostile")
    assert hostile.document(found) == (RESULTS / "hostile.md").read_text("utf-8")
    page = (ROOT / "docs/security.md").read_text("utf-8")
    assert hostile.documented(found, page) == page
    changed = {key: cell | {"accuracy": 0.5} for key, cell in found.items()}
    assert hostile.document(changed) != hostile.document(found)
    assert hostile.documented(changed, page) != page


def test_the_table_of_honest_clients_is_that_of_the_raw_results(benchmark):
    honest = benchmark("honest")
    found = raw("honest")
    assert honest.document(found) == (RESULTS / "honest.md").read_text("utf-8")
    played = {tuple(key.split(" | ")) for key in found}
    assert played == {
        (name, recipe, method) for name, (_, methods) in honest.PROBLEMS.items() for recipe in honest.RECIPES for method in methods
    }


def test_one_hostile_client_of_ten_costs_at_most_three_points_and_stops_nothing(benchmark):
    hostile, found = benchmark("hostile"), raw("hostile")
    for problem, attacks in hostile.SOME.items():
        for seed in hostile.REPORTING:
            honest = found[hostile.name_of(problem, "default", hostile.HONEST, 0.0, seed)]
            for attack in attacks - set(hostile.ADAPTIVE):
                cell = found[hostile.name_of(problem, "default", attack, 0.1, seed)]
                assert cell["stopped"] is None
                assert cell["accuracy"] > honest["accuracy"] - 0.03, (problem, attack, seed)


def test_the_recommended_guard_keeps_nine_tenths_and_costs_at_most_a_point(benchmark):
    hostile, found = benchmark("hostile"), raw("hostile")
    for problem, attacks in hostile.SOME.items():
        means = {guard: float(hostile.mean(found, hostile.REPORTING, problem, guard, hostile.HONEST, 0.0)) for guard in hostile.MAIN}
        assert means["robust"] >= means["default"] - 0.01
        for attack in attacks:
            assert float(hostile.mean(found, hostile.REPORTING, problem, "robust", attack, 0.2)) >= 0.9, (problem, attack)
    cells = {(problem, attack, seed) for problem, attacks in hostile.SOME.items() for attack in attacks for seed in hostile.REPORTING}
    low = {cell for cell in cells if found[hostile.name_of(cell[0], "robust", cell[1], 0.2, cell[2])]["accuracy"] < 0.9}
    assert low == {  # docs/security.md names them
        ("mlp", "sign flip", 1),
        ("mlp", "label flip", 1),
        ("mlp, attacks that know the bounds", "− ½ mean", 1),
        ("resnet18_small", "posterior", 2),
    }


def test_no_honest_reply_is_refused_but_where_training_diverges():
    refused = {key for key, run in raw("honest").items() if run["refused"] or run["stopped"]}
    assert refused == {f"cifar10, shufflenet_v2 | {recipe} | fedrts" for recipe in ("paper", "tuned")}

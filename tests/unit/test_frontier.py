"""benchmarks/frontier.py: configurations are chosen alike, results keep to their budgets, and tables are those of the raw results."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedrts import config
from fedrts.errors import InputError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def frontier(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("frontier")


@pytest.fixture
def frontiers(frontier):
    return importlib.import_module("frontiers")


@pytest.fixture
def tiny(frontiers):
    """Two contestants: one with two shapes and three rates, one with one shape and four rates."""
    few, many = frontiers.Shape("few", {"density": 0.1}), frontiers.Shape("many", {"density": 0.2})
    return frontiers.Frontier(
        "tiny",
        {"data": "digits", "model": "mlp"},
        budgets=(1, 2, 4),
        chosen_at=2,
        most_rounds=50,
        contestants=(
            frontiers.Contestant("sparse", "random", (few, many)),
            frontiers.Contestant("dense", "fedpaq", (frontiers.Shape("all", {}),), (1.0, 0.25, 0.5, 2.0)),
        ),
        rates=(1.0, 0.5, 2.0),
        seeds=range(2),
    )


def priced(shapes=("sparse-few", "sparse-many", "dense-all"), first=50_000.0, later=40_000.0):
    """Scores of short runs: their price, and the bytes of their rounds."""
    found = {}
    for shape in shapes:
        found[f"{shape}-price"] = later
        found |= {f"{shape}-price:{index}": first for index in range(30)}
    return found


def scored(**trials):
    """Scores of trials under seed 200, with the bytes of their later rounds."""
    found: dict[str, float] = {}
    for name, score in trials.items():
        cell = name.replace("__", "-").replace("_", ".") + "-s200"
        found |= {cell: score, f"{cell}:later": 40_000.0}
    return found


def names(study, scores):
    return [cell.name for cell in study.cells("tiny", scores) if cell.name not in scores]


SHAPES = {"sparse__few__lr1": 0.6, "sparse__many__lr1": 0.7, "dense__all__lr1": 0.5}
RATES = {"sparse__many__lr0_5": 0.6, "sparse__many__lr2": 0.65, "dense__all__lr0_25": 0.1, "dense__all__lr0_5": 0.4, "dense__all__lr2": 0.3}


def test_prices_come_first_then_shapes_then_rates_of_the_best_shape(tiny):
    assert names(tiny, {}) == ["sparse-few-price", "sparse-many-price", "dense-all-price"]
    assert names(tiny, priced()) == ["sparse-few-lr1-s200", "sparse-many-lr1-s200", "dense-all-lr1-s200"]
    assert names(tiny, priced() | scored(**SHAPES)) == [
        "sparse-many-lr0.5-s200",
        "sparse-many-lr2-s200",
        "dense-all-lr0.25-s200",
        "dense-all-lr0.5-s200",
        "dense-all-lr2-s200",
    ]


def test_a_trial_has_the_rounds_that_its_budget_pays_for(tiny):
    trial = next(cell for cell in tiny.cells("tiny", priced()) if cell.name == "sparse-few-lr1-s200")
    assert trial.settings["rounds"] == 50  # 2 MB / 40 kB
    assert trial.settings["data_options.validation"] == 0.1
    costly = next(cell for cell in tiny.cells("tiny", priced(later=90_000.0)) if cell.name == "sparse-few-lr1-s200")
    assert costly.settings["rounds"] == 22


def test_results_keep_to_their_budgets(tiny):
    """The first thirty rounds of 50 kB, then some of 40 kB: 1 MB pays for 20, 2 MB for 30 + 500/40, 4 MB for more than the most."""
    runs = [cell for cell in tiny.cells("tiny", priced() | scored(**SHAPES, **RATES)) if "MB" in cell.name and cell.settings["seed"] == 0]
    assert [cell.settings["rounds"] for cell in runs] == [20, 42, 50] * 2
    assert [cell.settings["train.lr"] for cell in runs] == [1.0] * 6
    assert [cell.settings.get("density") for cell in runs] == [0.2] * 3 + [None] * 3
    assert all("data_options.validation" not in cell.settings for cell in runs)


def test_a_best_rate_at_an_edge_gives_all_one_more(tiny):
    """The one at the edge goes beyond it; the other, whose best lies inside, beyond the edge that is nearer."""
    scores = priced() | scored(**SHAPES, **RATES | {"sparse__many__lr2": 0.8})
    assert names(tiny, scores) == ["sparse-many-lr3-s200", "dense-all-lr3-s200"]
    over = scores | scored(sparse__many__lr3=0.7, dense__all__lr3=0.1)
    assert [choice.best.rate for choice in tiny.choices(over)] == [2.0, 1.0]
    assert tiny.is_over(tiny.choices(over))
    assert len({len(choice.tried) for choice in tiny.choices(over)}) == 1


def test_what_diverges_is_the_worst_and_is_not_priced(tiny):
    scores = priced() | {"sparse-few-price": None} | scored(sparse__many__lr1=0.1, dense__all__lr1=0.5)
    choice = tiny.choices(scores)[0]
    assert choice.scores["few-lr1"] is None
    assert choice.best.shape.name == "many"
    assert not any(name.startswith("sparse-few") for name in names(tiny, scores))


@pytest.mark.parametrize(
    "change",
    [{"seeds": (100,)}, {"choosing_seeds": (150,)}, {"chosen_at": 3}, {"rates": (1.0, 2.0)}],
    ids=["seed", "choosing", "budget", "sizes"],
)
def test_unfair_frontiers_are_refused(tiny, change):
    with pytest.raises(InputError):
        replace(tiny, **change)


def test_rounds_by_hand(frontiers):
    assert frontiers.affordable(100, [30, 30], 10) == 6
    assert frontiers.affordable(59, [30, 30], 10) == 1
    assert frontiers.affordable(29, [30, 30], 10) == 0


def test_declared_frontiers_are_understood(frontier, frontiers):
    """Every configuration resolves into an experiment; every contestant of a frontier has as many."""
    for name, declared in frontiers.FRONTIERS.items():
        for contestant in declared.contestants:
            assert contestant.name in frontier.TITLES
            for shape in contestant.shapes:
                cell = declared._play(name, contestant, frontiers.Configuration(shape, 0.1), "s200", 9, 200)
                settings = {key: value for key, value in cell.settings.items() if key != "device"}
                assert config.resolve(config.nested(settings)).rounds == 9


def test_tables_are_those_of_the_raw_results(frontier):
    assert frontier.document() == (ROOT / "benchmarks" / "results" / "frontier.md").read_text("utf-8")


def test_a_mean_by_hand(frontier):
    """FedRTS on digits with the smallest budget."""
    raw = json.loads((frontier.RAW / "digits.json").read_text("utf-8"))
    own = [run["result"] for run in raw["runs"] if run["cell"].startswith("fedrts-") and "-5MB-" in run["cell"]]
    assert len(own) == 5
    assert f"{sum(own) / 5:.4f} ± " in frontier.document()


def test_runs_keep_to_their_budgets(frontier, frontiers):
    """What was really sent is at most a twentieth above the budget: rounded values are coded, so that their length is not foreseen."""
    for name, declared in frontiers.FRONTIERS.items():
        for point in frontier.points(name, declared, frontier.known_of(name)):
            if point.contestant != "dense":
                assert point.sent <= 1.05 * point.budget, (name, point)

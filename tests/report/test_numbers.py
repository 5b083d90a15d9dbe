"""The numbers of a report against written-out references."""

import csv
import io
import math
import statistics
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from fedrts.comparison.target import cost_to_target
from fedrts.report import differences, people, tables, text
from fedrts.report.content import compose, headline
from fedrts.report.format import cell
from fedrts.report.format import text as written
from fedrts.report.frontier import undominated
from fedrts.report.model import Heat, Lines, Mean, Point
from fedrts.report.quantities import by_bytes, by_flops, curve, last_ten, mean, metrics_of, spread, thinned, worst_decile
from fedrts.report.read import Run, find
from fedrts.report.settings import grouped
from fedrts.tasks.metrics import ACCURACY, PERPLEXITY
from handmade import fairness, line, write

values = st.lists(st.floats(0, 1), min_size=1, max_size=40)


def problem_of(folder):
    (problem,), _ = grouped(find([folder]).runs)
    return problem


def rows(table):
    return {row[0]: dict(zip([column.title for column in table.columns], row, strict=True)) for row in table.rows}


# -- statistics -------------------------------------------------------------------------------------------------------


@given(values)
def test_mean_and_standard_error(found):
    made = mean(found)
    assert made is not None
    assert made.value == pytest.approx(np.mean(found))
    if len(found) == 1:
        assert made.error is None
    else:
        assert made.error == pytest.approx(np.std(found, ddof=1) / math.sqrt(len(found)), abs=1e-12)


@given(values)
def test_worst_decile_and_spread(found):
    worst = math.ceil(len(found) / 10)
    assert worst_decile(found) == pytest.approx(np.sort(found)[:worst].mean())
    assert worst_decile(found, lower_is_better=True) == pytest.approx(np.sort(found)[::-1][:worst].mean())
    assert spread(found) == pytest.approx(np.std(found), abs=1e-9)


@given(st.integers(1, 900), st.integers(2, 300))
def test_thinned_curves_keep_their_ends_and_order(count, most):
    points = [Point(place, 0.0) for place in range(count)]
    kept = thinned(points, most)
    assert len(kept) == min(count, most)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert [point.x for point in kept] == sorted({point.x for point in kept})


def test_a_curve_is_a_mean_over_seeds_along_what_was_spent(tmp_path):
    setup = line(-1, None, upload_bytes=7, download_bytes=0, flops=5.0)
    write(tmp_path / "a", [0.1, None, 0.3], seed=0, history=[setup, line(0, 0.1), line(1, None), line(2, 0.3)])
    write(tmp_path / "b", [0.3, None, 0.5], seed=1)
    (setting,) = problem_of(tmp_path).settings
    first, last = curve(setting, lambda entry: entry["accuracy"], by_bytes)
    assert (first.x, first.runs) == (150 + 7 / 2, 2)
    assert first.y == pytest.approx(0.2)
    assert first.error == pytest.approx(statistics.stdev([0.1, 0.3]) / math.sqrt(2))
    assert last.x == 450 + 7 / 2
    assert last.y == pytest.approx(0.4)
    assert [point.x for point in curve(setting, lambda entry: entry["accuracy"], by_flops)] == [1002.5, 3002.5]
    assert [point.x for point in curve(setting, lambda entry: entry["accuracy"])] == [1, 3]


# -- cost to target ---------------------------------------------------------------------------------------------------

scores = st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=40)


@given(scores, st.floats(0, 1), st.booleans())
def test_the_target_is_reached_in_the_first_round_whose_running_mean_does(found, wanted, lower):
    history = [line(-1, None, perplexity=None), *(line(index, None, perplexity=value) for index, value in enumerate(found))]
    expected = None
    for index, value in enumerate(found):
        window = [past for past in found[max(0, index - 9) : index + 1] if past is not None]
        if index >= 9 and value is not None and (sum(window) / len(window) <= wanted if lower else sum(window) / len(window) >= wanted):
            expected = index
            break
    cost = cost_to_target(history, wanted, key="perplexity", lower_is_better=lower)
    if expected is None:
        assert cost is None
    else:
        assert cost is not None
        assert (cost.round, cost.bytes, cost.flops) == (expected, 150 * (expected + 2), 1000 * (expected + 2))


def test_cost_to_target_goes_seed_by_seed(tmp_path):
    dense: dict[str, Any] = {"method": "fedavg", "summary": {"comm_ratio": 1.0, "density": 1.0}}
    write(tmp_path / "d0", [0.5] * 12, seed=0, **dense)
    write(tmp_path / "d1", [0.9] * 12, seed=1, **dense)
    write(tmp_path / "q0", [0.1] * 12, seed=0, method="fedpaq", summary={"comm_ratio": 0.3, "density": 1.0})
    write(tmp_path / "s0", [0.4] + [0.6] * 11, seed=0)
    write(tmp_path / "s1", [0.6] * 12, seed=1)
    write(tmp_path / "s2", [0.6] * 12, seed=2)  # without a dense run of its seed
    found = rows(tables.to_target(problem_of(tmp_path), ACCURACY))
    assert found["fedrts"]["target"].value == pytest.approx(0.7)
    assert found["fedrts"]["reached"] == "1 of 2"
    assert found["fedrts"]["rounds"] == Mean(10.0)
    assert found["fedrts"]["sent until then"] == Mean(1500)
    assert found["fedpaq"]["reached"] == "not reached"
    assert found["fedpaq"]["rounds"] is None


def test_the_dense_run_most_like_a_run_sets_its_target(tmp_path):
    for alpha, value in ((0.1, 0.3), (0.5, 0.9)):
        clients = {"total": 2, "alpha": alpha}
        write(tmp_path / f"d{alpha}", [value] * 10, method="fedavg", clients=clients, summary={"comm_ratio": 1.0, "density": 1.0})
        write(tmp_path / f"s{alpha}", [0.5] * 10, clients=clients)
    found = rows(tables.to_target(problem_of(tmp_path), ACCURACY))
    assert found["fedrts alpha=0.1"]["reached"] == "1 of 1"
    assert found["fedrts alpha=0.5"]["reached"] == "not reached"


def test_without_a_dense_run_there_is_no_target(tmp_path):
    write(tmp_path / "a", [0.5] * 12)
    assert tables.to_target(problem_of(tmp_path), ACCURACY) is None


# -- tables and figures -----------------------------------------------------------------------------------------------


def test_results_and_cost(tmp_path):
    write(tmp_path / "a", [0.2] * 10, seed=0)
    write(tmp_path / "b", [0.4] * 10, seed=1)
    problem = problem_of(tmp_path)
    result = rows(tables.results(problem, ACCURACY))["fedrts"]
    assert (result["runs"], result["density"]) == (2, 0.2)
    assert result["accuracy"].value == pytest.approx(0.3)
    assert result["accuracy"].error == pytest.approx(0.1)
    cost = rows(tables.cost(problem))["fedrts"]
    assert (cost["up"].value, cost["down"].value, cost["paper, outer round"].value) == (1000, 500, 1.5e6)
    assert headline(problem, ACCURACY).startswith("Best sparse setting: fedrts with accuracy 30.0 ± 10.0 %, sending 20.0 % of dense")


def test_sites_are_shown_by_what_they_said_of_the_final_model(tmp_path):
    sites = [{"client": 0, "samples": 30, "accuracy": 0.9, "loss": 0.1}, {"client": 1, "samples": 10, "accuracy": 0.5, "loss": 0.9}]
    means = {"mean": {"accuracy": 0.8, "loss": 0.3}, "mean_of_clients": {"accuracy": 0.7, "loss": 0.5}}
    told = {**means, "samples": 40, "clients": sites, "missing": [], "bytes": 99}
    write(tmp_path / "a", [0.2], fairness=None, summary={"federated": told})
    row = rows(tables.fairness(problem_of(tmp_path), ACCURACY))["fedrts"]
    assert row["clients' mean"].value == pytest.approx(0.7)
    assert row["worst decile"].value == 0.5
    (figure,) = people.by_client(problem_of(tmp_path), ACCURACY)
    assert figure.title == "Accuracy by client"
    assert isinstance(figure, Lines)
    assert [point.y for point in figure.series[0].points] == [0.5, 0.9]
    assert "rows that each site holds out" in figure.caption


def test_fairness(tmp_path):
    clients = [0.1, *[0.9] * 10]
    write(tmp_path / "a", [0.2], seed=0, fairness=fairness(clients, [0.5, 0.3, 1.0]))
    row = rows(tables.fairness(problem_of(tmp_path), ACCURACY))["fedrts"]
    assert row["clients' mean"].value == pytest.approx(np.mean(clients))
    assert row["worst decile"].value == pytest.approx((0.1 + 0.9) / 2)
    assert row["spread"].value == pytest.approx(np.std(clients))
    assert row["worst decile, expected"].value == pytest.approx((0.05 + 0.45) / 2)
    assert (row["worst class"].value, row["which"]) == (0.3, "1")
    assert row["spread over classes"].value == pytest.approx(np.std([0.5, 0.3, 1.0]))


def test_language_is_judged_by_perplexity_and_low_is_good(tmp_path):
    history = [line(index, 0.1, perplexity=100.0 - index) for index in range(12)]
    judged = {
        "share": 1.0,
        "classes": None,
        "clients": [{"client": n, "samples": 3, "accuracy": 0.1, "perplexity": 10.0 + n} for n in range(20)],
    }
    write(tmp_path / "a", [0.1] * 12, history=history, fairness=judged)
    problem = problem_of(tmp_path)
    assert metrics_of(problem)[0] is PERPLEXITY
    assert rows(tables.fairness(problem, PERPLEXITY))["fedrts"]["worst decile"].value == 28.5
    assert rows(tables.results(problem, PERPLEXITY))["fedrts"]["perplexity"].value == pytest.approx(np.mean(range(89, 99)))
    ids = [figure.id for figure in compose(find([tmp_path])).figures]
    assert "digits-mlp-perplexity-rounds" in ids
    assert not any("accuracy" in name for name in ids)


def test_the_first_figure_is_what_one_gets_for_the_bytes(tmp_path):
    sizes = {"a": (0.1, 100, [0.5] * 12), "b": (0.2, 300, [0.25] * 12), "c": (0.3, 800, [0.75] * 12)}
    for name, (density, size, accuracies) in sizes.items():
        write(tmp_path / name, accuracies, density=density, summary={"upload_bytes": size, "download_bytes": 50, "density": density})
    first = compose(find([tmp_path])).figures[0]
    assert isinstance(first, Lines)
    assert (first.id, first.x.scale) == ("digits-mlp-accuracy-frontier", "log")
    series = {entry.name: [(point.x, point.y) for point in entry.points] for entry in first.series}
    assert series.pop("frontier") == [(150.0, 0.5), (850.0, 0.75)], "b sends more than a and is worse"
    assert {points[0] for points in series.values()} == {(150.0, 0.5), (350.0, 0.25), (850.0, 0.75)}


def test_one_setting_has_no_frontier(tmp_path):
    write(tmp_path / "a", [0.5] * 12)
    assert not any(figure.id.endswith("frontier") for figure in compose(find([tmp_path])).figures)


@given(st.lists(st.tuples(st.floats(1, 9), st.floats(0, 1)), min_size=1, max_size=12), st.booleans())
def test_no_point_beats_the_frontier(pairs, lower):
    points = [Point(x, y) for x, y in pairs]
    kept = undominated(points, lower)
    assert kept == sorted(kept, key=lambda point: point.x)
    for point in points:
        rivals = [other for other in kept if other.x <= point.x]
        assert any(other.y <= point.y if lower else other.y >= point.y for other in rivals)
        beaten = any(o.x <= point.x and (o.y < point.y if lower else o.y > point.y) for o in points)
        assert not (beaten and (point.x, point.y) in {(k.x, k.y) for k in kept})


def test_every_figure_of_the_issue_is_there(tmp_path):
    for seed in (0, 1):
        write(tmp_path / f"d{seed}", [0.9] * 12, seed=seed, method="fedavg", summary={"comm_ratio": 1.0, "density": 1.0})
        for density in (0.1, 0.2):
            write(tmp_path / f"s{seed}{density}", [0.5] * 12, seed=seed, density=density, summary={"density": density})
    report = compose(find([tmp_path]))
    names = {figure.id.removeprefix("digits-mlp-"): figure for figure in report.figures}
    wanted = "accuracy-rounds accuracy-bytes accuracy-flops accuracy-density sent changed overlap layers classes clients holds-0"
    assert set(wanted.split()) <= set(names)
    assert {f"posterior-{n}-{which}" for n in (0, 1) for which in ("active", "inactive")} <= set(names)
    assert {table.id.removeprefix("digits-mlp-") for table in report.tables} == {
        "results",
        "differences",
        "pairs",
        "cost",
        "target",
        "fairness",
        "differs",
        "common",
        "runs",
    }
    layers, held, by_density, posterior = (names[name] for name in ("layers", "holds-0", "accuracy-density", "posterior-0-active"))
    assert isinstance(layers, Heat)
    assert layers.values == [[0.5, 0.5], [0.1, 0.1]]
    assert isinstance(held, Heat)
    assert held.values == [[5, 0], [3, 4]]
    assert isinstance(by_density, Lines)
    assert [point.x for point in by_density.series[0].points] == [0.1, 0.2]
    ((label, reference),) = by_density.references
    assert label == "fedavg"
    assert reference == pytest.approx(0.9)
    assert isinstance(posterior, Heat)
    assert posterior.rows[0] == "0.95–1.00"
    assert [row[0] for row in posterior.values] == [0.1] * 10 + [0.0] * 10
    assert posterior.columns == ["1", "6", "11"]
    assert report.problems == []


# -- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "format", "expected"),
    [
        (0.9312, "percent", "93.1 %"),
        (68_470_000, "bytes", "68.5 MB"),
        (999_600, "bytes", "1.00 MB"),
        (12.0, "bytes", "12.0 B"),
        (2.45e10, "flops", "24.5 G"),
        (1234.4, "integer", "1,234"),
        (13.34, "seconds", "13.3 s"),
        (0.13791, "number", "0.1379"),
        (2.5e96, "number", "2.500e+96"),
        (float("inf"), "number", "–"),
    ],
)
def test_numbers_for_people(value, format, expected):
    assert written(value, format) == expected


def test_means_for_people():
    assert cell(Mean(0.9312, 0.004), "percent") == "93.1 ± 0.4 %"
    assert cell(Mean(20_500_000, 24), "bytes") == "20.5 ± 0.0 MB"
    assert cell(Mean(7598, 1228), "integer") == "7,598 ± 1,228"
    assert cell(Mean(13.3, 2.0), "seconds") == "13.3 ± 2.0 s"
    assert cell(None, "percent") == "–"
    assert cell("not reached", "text") == "not reached"


def test_csv_has_plain_numbers(tmp_path):
    write(tmp_path / "a", [0.25] * 10, seed=0)
    write(tmp_path / "b", [0.75] * 10, seed=1)
    report = compose(find([tmp_path]))
    table = next(table for table in report.tables if table.id.endswith("results"))
    (row,) = csv.DictReader(io.StringIO(text.table_csv(table)))
    assert (float(row["accuracy"]), float(row["accuracy ±"]), row["runs"]) == (0.5, 0.25, "2")
    figure = next(figure for figure in report.figures if figure.id.endswith("accuracy-rounds"))
    points = list(csv.DictReader(io.StringIO(text.figure_csv(figure))))
    assert len(points) == 10
    assert (points[0]["series"], float(points[0]["rounds"]), float(points[0]["test accuracy"])) == ("fedrts", 1.0, 0.5)
    for entry in report.figures:
        assert len(list(csv.reader(io.StringIO(text.figure_csv(entry))))) > 1


def test_markdown_escapes_what_would_break_a_table(tmp_path):
    write(tmp_path / "a|b<c", [0.5] * 10)
    page = text.markdown(compose(find([tmp_path])), pictures=True)
    (row,) = [entry for entry in page.splitlines() if "a\\|b&lt;c" in entry]
    assert row.replace("\\|", "").count("|") == 9
    assert "![Accuracy against rounds](report/digits-mlp-accuracy-rounds.png)" in page


@given(st.lists(st.floats(0, 1), min_size=10, max_size=10))
def test_a_run_reaches_its_own_mean(values):
    """In the last digit too: both are added up in the same way."""
    history = [line(index, value) for index, value in enumerate(values)]
    run = Run("r", {"seed": 0, "method": "fedavg"}, {}, True, history)
    mean_of_all = last_ten(run, "accuracy")
    assert mean_of_all is not None
    reached = cost_to_target(history, mean_of_all)
    assert reached is not None
    assert reached.round == 9


def test_the_spread_of_perplexities_that_no_square_can_hold():
    assert spread([1e200, 3e200]) == pytest.approx(1e200)


# -- differences ------------------------------------------------------------------------------------------------------


def seeds_of(folder, **methods):
    """A run for every value of every method, the value being its accuracy throughout."""
    for method, found in methods.items():
        for seed, value in enumerate(found):
            write(folder / f"{method}-{seed}", [value] * 10, seed=seed, method=method)
    return problem_of(folder)


def test_differences_are_tested_as_a_comparison_tests_them(tmp_path):
    fedrts, random, dense = [0.90, 0.92, 0.93, 0.91, 0.95], [0.85, 0.88, 0.91, 0.87, 0.90], [0.91, 0.95, 0.92, 0.93, 0.96]
    problem = seeds_of(tmp_path, fedrts=fedrts, random=random, fedavg=dense)
    best, pairs = differences.tables(problem, ACCURACY)
    assert best.title == "Differences to fedrts"
    row = rows(best)["random"]
    expected = scipy.stats.ttest_rel(random, fedrts)
    assert row["less fedrts"].value == pytest.approx(np.mean(random) - np.mean(fedrts))
    assert row["less fedrts"].error == pytest.approx(np.std(np.subtract(random, fedrts), ddof=1) / math.sqrt(5))
    assert (row["seeds"], row["sure"]) == (5, "‡")
    assert row["p"] == pytest.approx(expected.pvalue)
    assert row["p, corrected"] == pytest.approx(2 * expected.pvalue)
    assert [(row[0], row[1]) for row in pairs.rows] == [("fedrts", "random"), ("fedrts", "fedavg"), ("random", "fedavg")]


def test_a_best_that_is_not_sure_says_so(tmp_path):
    problem = seeds_of(tmp_path, feddst=[0.923, 0.933], fedrts=[0.932, 0.920], random=[0.80, 0.79])
    said = headline(problem, ACCURACY)
    assert said.startswith("Best sparse setting: feddst with accuracy 92.8 ± 0.5 %")
    assert "The difference to fedrts (92.6 ± 0.6 %)" in said
    assert "is not significant" in said
    assert "2 seeds can hardly show one" in said


def test_a_best_that_is_sure_says_so_and_one_without_rivals_says_nothing(tmp_path):
    sure = seeds_of(tmp_path / "sure", fedrts=[0.9, 0.91, 0.92, 0.93, 0.94], random=[0.8, 0.812, 0.82, 0.83, 0.84])
    assert "significantly better than all other sparse settings (paired t-tests over 5 seeds" in headline(sure, ACCURACY)
    assert headline(seeds_of(tmp_path / "alone", fedrts=[0.9, 0.8]), ACCURACY).endswith("(mean of the last ten rounds).")
    one = seeds_of(tmp_path / "one", fedrts=[0.9], random=[0.8])
    assert headline(one, ACCURACY).endswith("One seed is too few to tell which setting is better.")

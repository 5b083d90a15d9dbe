"""Tables of results that were written by hand."""

import pytest

from fedrts.comparison.table import Results, costs_table, differences_table, means_table, words_on_test
from fedrts.errors import InputError


def row(method, density, seed, accuracy, interval=5, perplexity=None):
    own = {"accuracy_last10": accuracy, "perplexity": perplexity, "upload_bytes": 1, "download_bytes": 1, "comm_ratio": 0.1, "flops": 1.0}
    return {"method": method, "density_target": density, "seed": seed, "topology.interval": interval, **own}


ROWS = [row("a", 0.2, 0, 0.8), row("a", 0.2, 1, 0.9), row("b", 0.2, 0, 0.7), row("b", 0.2, 1, 0.6)]
ROWS += [row("c", 0.2, 0, 0.5), row("c", 0.2, 1, 0.5), row("dense", 1.0, 0, 0.9), row("dense", 1.0, 1, 0.95)]


def cells(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_means_and_marks():
    table = cells(means_table(Results.of(ROWS, [], "accuracy_last10"), seeds=2))
    assert table[0] == ["method", "density 1", "density 0.2"]
    assert table[2:] == [
        ["a", "–", "**0.8500 ± 0.0500**"],
        ["b", "–", "*0.6500 ± 0.0500*"],
        ["c", "–", "0.5000 ± 0.0000"],
        ["dense", "0.9250 ± 0.0250", "–"],  # alone in its column: best of nothing
    ]


def test_lower_is_better_for_perplexity():
    rows = [row(name, 0.5, 0, 0.5, perplexity=value) for name, value in (("a", 30.0), ("b", 20.0), ("c", 40.0))]
    assert [line[1] for line in cells(means_table(Results.of(rows, [], "perplexity"), 1))[2:]] == ["*30.00*", "**20.00**", "40.00"]


def test_equal_methods_are_marked_alike():
    rows = [row(name, 0.5, 0, value) for name, value in (("a", 0.5), ("b", 0.5), ("c", 0.25))]
    assert [line[1] for line in cells(means_table(Results.of(rows, [], "accuracy_last10"), 1))[2:]] == [
        "**0.5000**",
        "**0.5000**",
        "*0.2500*",
    ]


def test_missing_seeds_are_told():
    assert "(1 of 2 seeds)" in means_table(Results.of(ROWS[:1], [], "accuracy_last10"), seeds=2)


def test_columns_by_other_keys():
    rows = [row("a", d, 0, 0.5, interval) for interval in (5, 10) for d in (0.1, 0.2)]
    found = cells(means_table(Results.of(rows, ["topology.interval"], "accuracy_last10"), 1))[0]
    assert found[1:] == ["interval 5, density 0.2", "interval 5, density 0.1", "interval 10, density 0.2", "interval 10, density 0.1"]


def test_lists_as_values_of_a_key():
    rows = [row("a", 0.2, seed, 0.5, widths) for widths in ([8], [16, 16]) for seed in (0, 1)]
    found = cells(means_table(Results.of(rows, ["topology.interval"], "accuracy_last10"), 2))
    assert found[0][1:] == ["interval [8], density 0.2", "interval [16, 16], density 0.2"]
    assert [line[1] for line in cells(costs_table(rows, ["topology.interval"]))[2:]] == ["[8]", "[16, 16]"]


def test_differences():
    """The dense method stands beside the reference at its density; p of two pairs by hand is 1 − 2/π · atan |t|."""
    results = Results.of(ROWS, [], "accuracy_last10")
    table = cells(differences_table(results, "a"))
    assert table[0] == ["less a", "density 0.2"]
    assert table[2] == ["b", "-0.2000 ± 0.1000 (p = 0.295)"]  # t = −2
    assert table[4] == ["dense", "+0.0750 ± 0.0250 (p = 0.205)"]  # t = 3
    difference = results.against("b", "a", (0.2,))
    assert difference is not None
    assert difference.p == pytest.approx(0.2951672)


def test_a_dense_reference_stands_beside_every_density():
    rows = [*ROWS, row("a", 0.1, 0, 0.4), row("a", 0.1, 1, 0.45)]
    table = cells(differences_table(Results.of(rows, [], "accuracy_last10"), "dense"))
    assert table[0] == ["less dense", "density 0.2", "density 0.1", "together"]
    assert table[2][2] == "-0.5000 ± 0.0000 (no test)"


def test_columns_together_by_hand():
    """With two densities, b minus a is 0.1 and 0.3 (mean 0.2) with seed 0, 0.0 and 0.2 (mean 0.1) with seed 1; seed 2 lacks a density."""
    low, high = {"a": (0.4, 0.5), "b": (0.7, 0.7, 0.1)}, {"a": (0.5, 0.6, 0.7), "b": (0.6, 0.6, 0.9), "c": (0, 1, 2)}
    rows = [
        row(method, density, seed, value)
        for density, values in ((0.2, high), (0.1, low))
        for method, own in values.items()
        for seed, value in enumerate(own)
    ]
    results = Results.of(rows, [], "accuracy_last10")
    table = cells(differences_table(results, "a"))
    assert table[2][0] == "b"
    assert table[2][-1] == "+0.1500 ± 0.0500 (p = 0.205)"  # t = 3
    assert table[3][0] == "c"
    assert table[3][-1] == "–", "it has one density of two"
    assert "Together" in words_on_test(results, "a")
    assert "Together" not in words_on_test(Results.of(ROWS, [], "accuracy_last10"), "a")


def test_too_few_seeds_are_told():
    one = Results.of([line for line in ROWS if line["seed"] == 0], [], "accuracy_last10")
    assert "too few for a test" in words_on_test(one, "a")
    assert "(no test)" in differences_table(one, "a")
    assert "2 seeds" in words_on_test(Results.of(ROWS, [], "accuracy_last10"), "a")


def test_unknown_metric():
    with pytest.raises(InputError, match="did you mean 'accuracy"):
        Results.of(ROWS, [], "acuracy")


def test_what_stays_sure_among_several_has_another_mark():
    """With three pairs t = √3·mean/s: differences 0.10, 0.11, 0.12 (p = 0.003, three times that below 0.05), 0.1, 0.16, 0.22 (p = 0.04)."""
    rows = [row("a", 0.2, seed, 0.5) for seed in range(3)]
    for name, steps in (("sure", (0.10, 0.11, 0.12)), ("alone", (0.1, 0.16, 0.22)), ("none", (-0.1, 0.1, 0.05))):
        rows += [row(name, 0.2, seed, 0.5 + step) for seed, step in enumerate(steps)]
    marks = [line[1].rpartition(")")[2].strip() for line in cells(differences_table(Results.of(rows, [], "accuracy_last10"), "a"))[2:]]
    assert marks == ["‡", "†", ""]

"""The accountings on paper: every number that the paper's tables can be made of, with its formula, and the rules of its text."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedrts import methods, models
from fedrts.client.training import LocalTraining
from fedrts.costs.on_paper import flops_on_paper
from fedrts.methods.contract import Exchange, ProbeGradient, Round, Train
from fedrts.methods.fedmef import FedMef
from fedrts.methods.fedtiny import FedTiny
from fedrts.sparse import budget
from fedrts.sparse.cost import Book, Macs, as_published, bitmap, by_density
from fedrts.sparse.layout import Entry, Layout
from fedrts.wire.fields import Indices, Masks, Signs, Values
from fedrts.wire.value_types import ValueType

AT_START = 0.4
"""ζ_0 = α_adj."""


@pytest.fixture(scope="module")
def resnet18():
    return models.get("resnet18")((3, 32, 32), 10)


@pytest.fixture(scope="module")
def layouts(resnet18):
    with torch.device("meta"):  # shapes alone
        gpt2 = models.get("gpt2_32m")((256,), 50_257)
    return {"resnet18": Layout.of(resnet18), "gpt2_32m": Layout.of(gpt2)}


def outer_round(layout: Layout) -> Round:
    nothing = (0,) * len(layout.layers)
    return Round(0, outer=True, frozen=False, counts=nothing, quota=nothing, layout=layout)


def exchange_of(method: str, layout: Layout) -> Exchange:
    (exchange,) = methods.get(method)(density=1.0).exchanges(outer_round(layout))
    return exchange


def megabytes(method: str, layout: Layout, density: float, published: bool = True) -> float:
    exchange = exchange_of(method, layout)
    charged = methods.get(method)(density=1.0).published(exchange) if published else exchange
    return sum(charged.charged(Book.paper(layout, density, AT_START))) / 1e6


# -- the published tables -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "method", "density", "formula", "expected"),
    [
        ("resnet18", "fedavg", 1.0, "2·O_d", "89.530"),
        ("resnet18", "feddst", 0.2, "2·O_s", "20.853"),
        ("resnet18", "fedpaq", 1.0, "2·(8-bit parameters + statistics + one scale an output channel)", "22.479"),
        ("gpt2_32m", "fedavg", 1.0, "8n", "260.413"),
        ("gpt2_32m", "feddst", 0.5, "2·O_s", "138.345"),
        ("gpt2_32m", "feddst", 0.3, "2·O_s", "86.262"),
        ("gpt2_32m", "feddst", 0.2, "2·O_s", "60.221"),
        ("gpt2_32m", "fedsgc", 0.5, "3·O_s", "207.52"),
        ("gpt2_32m", "fedsgc", 0.3, "3·O_s", "129.39"),
        ("gpt2_32m", "fedsgc", 0.2, "3·O_s", "90.33"),
        ("gpt2_32m", "fedmef", 0.5, "2·O_s + O_ξ", "166.01"),
        ("gpt2_32m", "fedmef", 0.3, "2·O_s + O_ξ", "103.51"),
        ("gpt2_32m", "fedmef", 0.2, "2·O_s + O_ξ", "72.26"),
        ("gpt2_32m", "fedtiny", 0.3, "2·O_s + O_ξ", "103.51"),
        ("gpt2_32m", "fedrts", 0.5, "2·O_s + O_ξ/2", "152.18"),
        ("gpt2_32m", "fedrts", 0.3, "2·O_s + O_ξ/2", "94.89"),
        ("gpt2_32m", "fedrts", 0.2, "2·O_s + O_ξ/2", "66.24"),
    ],
)
def test_megabytes_of_an_outer_round(layouts, model, method, density, formula, expected):
    digits = len(expected.partition(".")[2])
    assert f"{megabytes(method, layouts[model], density):.{digits}f}" == expected, formula


@pytest.mark.parametrize("method", ["random", "snip", "synflow", "grasp", "feddst", "fedrts", "fedtiny", "fedmef", "fedsgc", "prunefl"])
def test_inner_rounds_of_sparse_methods_cost_twice_the_model(layouts, method):
    layout = layouts["resnet18"]
    inner = Round(1, outer=False, frozen=False, counts=(), quota=(), layout=layout)
    (exchange,) = methods.get(method)().exchanges(inner)
    assert round(sum(exchange.charged(Book.paper(layout, 0.2, AT_START))) / 1e6, 3) == 20.853


@pytest.mark.parametrize(("density", "formula", "expected"), [(1.0, "3·O_d", 134.295), (0.2, "3·O_s", 31.280)])
def test_megabytes_of_memory(layouts, density, formula, expected):
    assert round(3 * Book.paper(layouts["resnet18"], density, AT_START).sparse() / 1e6, 3) == expected, formula


def test_squares_that_travel_whole_are_charged_twice(layouts):
    """PruneFL: O_d + O_s as published, 2·O_s + O_d strictly."""
    layout = layouts["resnet18"]
    book = Book.paper(layout, 0.2, AT_START)
    assert megabytes("prunefl", layout, 0.2) == pytest.approx((book.dense + book.sparse()) / 1e6)
    assert megabytes("prunefl", layout, 0.2, published=False) == pytest.approx((book.dense + 2 * book.sparse()) / 1e6)


def test_what_the_tables_count(layouts):
    assert layouts["resnet18"].links == 11_166_912
    assert layouts["resnet18"].length == 11_191_242
    assert as_published(layouts["resnet18"]) is layouts["resnet18"]
    assert layouts["gpt2_32m"].parameters == 19_708_672
    counted = as_published(layouts["gpt2_32m"])
    assert counted.links == counted.length == 32_551_680, "the tied matrix twice, no biases, all of it prunable"


PAPER = LocalTraining(epochs=5, batch_size=64, lr=0.01)


@pytest.mark.parametrize(
    ("method", "density", "formula", "expected"),
    [
        ("fedavg", 1.0, "3·F_d·E", "1.777e+13"),
        ("fedpaq", 1.0, "3·F_d·E", "1.777e+13"),
        ("feddst", 0.2, "3·F_s·(E − 1) + F_s + 2·F_d", "3.796e+12"),
        ("fedrts", 0.2, "3·F_s·(E − 1) + F_s + 2·F_d", "3.796e+12"),
        ("fedtiny", 0.2, "3·F_s·(E − 1) + F_s + 2·F_d", "3.796e+12"),
        ("fedsgc", 0.2, "3·F_s·(E − 1) + F_s + 2·F_d", "3.796e+12"),
        ("prunefl", 0.2, "(2·F_d + F_s)·E", f"{2.2 * 64 * 64 * 37_016_576 * 2500 / 64:.3e}"),
        ("random", 0.2, "3·F_s·E", "3.554e+12"),
    ],
)
def test_published_flops_of_resnet18(resnet18, layouts, method, density, formula, expected):
    dense = 64 * 64 * Macs.of(resnet18, layouts["resnet18"], torch.zeros(1, 3, 32, 32)).dense
    exchange = exchange_of(method, layouts["resnet18"])
    assert f"{flops_on_paper(exchange, PAPER, 500, density * dense, dense, density * dense):.3e}" == expected, formula


def test_overhead_of_extrusion_and_of_pruned_activations(layouts):
    """FedMef: F_o = 4·d·n in outer rounds, n_a·log n_a in all of them."""
    now = outer_round(layouts["resnet18"])
    assert methods.get("fedmef")().overhead(now, 1000.0, 64.0) == 4000
    assert FedMef(sap=True).overhead(now, 1000.0, 64.0) == 4000 + 64 * 6
    assert FedMef(bae=False).overhead(now, 1000.0, 64.0) == 0
    assert methods.get("fedrts")().overhead(now, 1000.0, 64.0) == 0
    inner = replace(now, outer=False)
    assert methods.get("fedmef")().overhead(inner, 1000.0, 64.0) == 0
    assert FedMef(sap=True).overhead(inner, 1000.0, 64.0) == 64 * 6


def test_passes_over_candidates_and_over_all_data():
    """Before round 0: C candidates, passed over p times, cost C·p·E/epochs forward passes at the target density."""
    training = LocalTraining(epochs=5, batch_size=10, lr=0.1)
    layout = Layout((Entry(("a.weight",), (4, 3)),), (), (Entry(("mean",), (2,)),))
    before = Round(-1, outer=False, frozen=False, counts=(12,), quota=(0,), layout=layout)
    calibrate, evaluate = FedTiny(candidates=3, passes=2).exchanges(before)
    assert flops_on_paper(calibrate, training, 50, 7.0, 10.0, 2.0) == 3 * 2 * 5 * 2.0
    assert flops_on_paper(evaluate, training, 50, 7.0, 10.0, 2.0) == 3 * 5 * 2.0
    gradient, curvature = methods.get("grasp")().exchanges(before)
    assert flops_on_paper(gradient, training, 50, 10.0, 10.0, 2.0) == 5 * 30
    assert flops_on_paper(curvature, training, 50, 10.0, 10.0, 2.0) == 5 * 60


def test_a_gradient_of_one_batch_takes_the_place_of_an_iteration():
    training = LocalTraining(epochs=2, batch_size=10, lr=0.1)
    halves = Exchange({}, (Train(stop=0.5), ProbeGradient(), Train(start=0.5)), {})
    whole = Exchange({}, (Train(), ProbeGradient()), {})
    expected = 3 * 2.0 * (10 - 1) + 2.0 + 2 * 5.0
    assert flops_on_paper(halves, training, 50, 2.0, 5.0, 0.0) == flops_on_paper(whole, training, 50, 2.0, 5.0, 0.0) == expected


# -- the rules of the text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("active", "bits"),
    [
        (10_000, 10_000 * 32),
        (9_000, 10_000 * 32),
        (8_999, 10_000 + 8_999 * 32),
        (3_000, 10_000 + 3_000 * 32),
        (2_999, 2_999 * (14 + 32)),
        (1_000, 1_000 * (14 + 32)),
        (999, 999 * (6 + 32) + 200 * 10),  # 200 columns of 50; 50 rows of 200 would take more
        (99, 99 * (8 + 32) + 50 * 7),  # rows
        (1, 1 * (6 + 32)),  # columns: their index has 6 bits, and log2 of one entry is 0
    ],
)
def test_coding_by_density(active, bits):
    assert by_density((50, 20, 10), active, 32) == bits


def test_a_bitmap_is_dense_where_nothing_is_missing():
    assert bitmap((10, 10), 100, 32) == 3200
    assert bitmap((10, 10), 99.5, 32) == 100 + 99.5 * 32


def test_rules_with_erk_densities_are_far_from_the_published_table(layouts):
    layout = layouts["resnet18"]
    counts = budget.erk([entry.shape for entry in layout.layers], budget.links_to_keep(layout, 0.2))
    assert round(2 * Book.rules(layout, counts, AT_START).sparse() / 1e6, 2) == 26.20


def test_every_field_is_charged_by_the_book():
    layout = Layout((Entry(("a",), (10, 10)),), (Entry(("bias",), (10,)),), (Entry(("mean",), (5,)),))
    book = Book.rules(layout, [20], fraction=0.4)
    sparse = 20 * (7 + 32) / 8 + 4 * 15
    assert book.sparse() == sparse
    assert book.dense == 4 * 115
    assert Values(on="active").charged(book) == 80
    assert Values(on="links").charged(book) == Values(on="all").charged(book) == book.dense
    assert Values(on="statistics", copies=3).charged(book) == 60
    assert Values(on="scalars", copies=3).charged(book) == 12
    assert Values(type="float16").charged(book) == (20 * (7 + 16) + 10 * 16) / 8 + 4 * 5
    assert Values(type="int8").charged(book) == (20 * (7 + 8) + 10 * 8) / 8 + 4 * 5 + 4 * 1, "one block of 256 values"
    fewer: dict[ValueType, int] = {"int6": 6, "int4": 4, "int2": 2}
    for type, bits in fewer.items():
        assert Values(type=type).charged(book) == (20 * (7 + bits) + 10 * bits) / 8 + 4 * 5 + 4 * 1, "packed, which is the most"
    assert Values(type="int8", scales="tensor").charged(book) == (20 * (7 + 8) + 10 * 8) / 8 + 4 * 5 + 4 * 1
    assert Indices("gradient", (4,)).charged(book) == pytest.approx(0.5 * 0.4 * sparse)
    assert Indices("gradient", (4,), values=True).charged(book) == pytest.approx(0.4 * sparse)
    assert Signs("direction").charged(book) == sparse
    assert Masks("pool", 3).charged(book) == 3 * 100 / 8
    assert math.isclose(sum(Exchange({"w": Values()}, (), {"w": Values()}).charged(book)), 2 * sparse)

"""Grids: which cells there are, what they are called, and what is refused."""

from typing import Any

import pytest

import fedrts
from fedrts import config, planning
from fedrts.comparison.grid import Grid, Tuning, parsed_axis, parsed_values
from fedrts.comparison.record import described, record
from fedrts.errors import InputError

TINY: dict[str, Any] = {"rounds": 3, "clients": {"total": 6, "per_round": 3}}


def names(cells):
    return [cell.name for cell in cells]


def test_cells_are_the_product_seed_by_seed_and_dense_methods_have_no_density():
    cells = Grid(TINY, ["fedrts", "fedavg"], [0.1, 0.25], [0, 3]).cells()
    assert names(cells) == ["fedrts-d0.1-s0", "fedrts-d0.25-s0", "fedavg-s0", "fedrts-d0.1-s3", "fedrts-d0.25-s3", "fedavg-s3"]
    assert [cell.experiment.density for cell in cells[:3]] == [0.1, 0.25, 1.0]
    assert {cell.experiment.rounds for cell in cells} == {3}


def test_a_dense_method_is_not_told_off_for_the_grids_densities(recwarn):
    Grid({**TINY, "density": 0.3}, ["fedavg", "random"], [0.1]).cells()
    assert [str(warning.message) for warning in recwarn] == []


def test_other_keys():
    axes: dict[str, list[Any]] = {"topology.interval": [1, 2], "train.momentum": [0.0, 0.9]}
    cells = Grid(TINY, ["random"], [0.5], [0], axes).cells()
    assert names(cells)[:2] == ["random-d0.5-interval1-momentum0-s0", "random-d0.5-interval1-momentum0.9-s0"]
    assert [(c.experiment.topology.interval, c.experiment.train.momentum) for c in cells] == [(1, 0.0), (1, 0.9), (2, 0.0), (2, 0.9)]


def test_data_as_a_key_brings_its_recipe():
    cells = Grid({}, ["random"], [0.5], [0], {"data": ["digits", "sentences"]}).cells()
    assert [cell.experiment.model for cell in cells] == ["mlp", "tiny_gpt"]


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ({"methods": ["fedrtz"]}, "did you mean 'fedrts'"),
        ({"methods": []}, "--methods names no value"),
        ({"seeds": [0, 1, 0]}, "--seeds lists 0 twice"),
        ({"densities": [0.1, 1.5]}, "density must be a number"),
        ({"axes": {"seed": [1, 2]}}, "use --seeds"),
        ({"axes": {"topology.intervall": [1]}}, "did you mean 'topology.interval'"),
        ({"axes": {"train.lr": [0.1]}, "tuning": Tuning((0.1,))}, "give one of the two"),
        ({"seeds": [0, 1000], "tuning": Tuning((0.1,))}, "no result uses"),
        ({"tuning": Tuning(())}, "names no rate"),
        ({"tuning": Tuning("automatic")}, "takes learning rates, or auto \\(got 'automatic'\\)"),
        ({"base": {"data_options": {"validation": 0.0}}, "tuning": Tuning((0.1,))}, "must not be 0"),
        ({"base": {"data": "cinic10", "data_options": {"train": "train+valid"}}, "tuning": Tuning((0.1,))}, "must not be 'train\\+valid'"),
        ({"densities": [0.1, 0.1000001]}, "two cells would have the name"),
    ],
)
def test_refused(grid, words):
    with pytest.raises(InputError, match=words):
        Grid(**{"base": TINY, "methods": ["fedrts"], **grid}).cells()


def test_tuning_has_the_same_rates_for_all_and_a_validation_split():
    grid = Grid({**TINY, "topology": {"end": 3}}, ["fedrts", "fedavg"], [0.1, 0.2], [0, 1], tuning=Tuning((0.1, 0.3), rounds=2))
    trials = grid.trials()
    assert len(trials) == 3 * 2
    assert names(cell for cell, _ in trials)[:2] == ["fedrts-d0.1-lr0.1", "fedrts-d0.1-lr0.3"]
    for cell, rate in trials:
        assert (cell.experiment.train.lr, cell.experiment.seed, cell.experiment.rounds) == (rate, 1000, 2)
    for cell in [*grid.cells(), *(cell for cell, _ in trials)]:
        assert cell.experiment.data_options["validation"] == 0.1
    assert {cell.group for cell in grid.cells()} == {cell.group for cell, _ in trials}


def test_rates_that_nobody_names_lie_around_each_cells_own():
    grid = Grid(TINY, ["random", "fedavg"], [0.1], axes={"data": ["digits", "sentences"]}, tuning=Tuning("auto"))
    own = {cell.group: cell.experiment.train.lr for cell in grid.cells()}
    assert len(own) == 4
    assert len(set(own.values())) == 2
    rates: dict[Any, list[float]] = {}
    for cell, rate in grid.trials():
        assert cell.experiment.train.lr == rate
        rates.setdefault(cell.group, []).append(rate)
    assert rates == {group: pytest.approx([rate, rate / 3, rate * 3], rel=0.005) for group, rate in own.items()}
    group = next(iter(own))
    more = [(cell.group, rate) for cell, rate in grid.trials({group: [7.0]})]
    assert set(more) - {(cell.group, rate) for cell, rate in grid.trials()} == {(group, 7.0)}


def test_a_data_set_with_a_validation_part_of_its_own_keeps_it():
    cells = Grid({"data": "cinic10"}, ["fedavg"], tuning=Tuning((0.1,))).cells()
    assert "validation" not in cells[0].experiment.data_options


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("3,5,10", [3, 5, 10]),
        ("0.1", [0.1]),
        ("cifar10, svhn", ["cifar10", "svhn"]),
        ('"a,b",true', ["a,b", True]),
        ("[8, 8],[16]", [[8, 8], [16]]),
        ("sgd,0.5", ["sgd", 0.5]),
    ],
)
def test_values(text, values):
    assert parsed_values(text) == values


def test_axis():
    assert parsed_axis("train.lr=0.1,0.2") == ("train.lr", [0.1, 0.2])
    with pytest.raises(InputError, match=r"takes table\.key=a,b"):
        parsed_axis("train.lr")


# -- compare.toml ---------------------------------------------------------------------------------------------------


def grid_of(**changes):
    return Grid(**{"base": TINY, "methods": ["fedrts", "random"], "densities": [0.1], "seeds": [0, 1], **changes})


def test_the_record_is_complete():
    """Shared settings and a cell's own make its whole experiment again."""
    grid = grid_of()
    content = described(grid, grid.cells(), 1)
    for cell in grid.cells():
        settings = config.flat(content["shared"]) | content["cells"][cell.name]
        assert settings == cell.settings()


def test_more_values_are_welcome_and_threads_stay(tmp_path):
    assert record(tmp_path, grid_of(), grid_of().cells(), 1) == 1
    more = grid_of(seeds=[0, 1, 2], methods=["fedrts", "random", "fedavg"])
    assert record(tmp_path, more, more.cells(), 4) == 1
    assert record(tmp_path, more, more.cells(), 2) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seeds": [0]}, "its cell fedrts-d0.1-s1 is not in this grid"),
        ({"base": {**TINY, "rounds": 4}}, "rounds is 3, not 4"),
        ({"axes": {"topology.interval": [5]}}, "is not in this grid"),
        ({"tuning": Tuning((0.1,))}, "tuned otherwise"),
    ],
)
def test_another_grid_is_refused(tmp_path, changes, words):
    record(tmp_path, grid_of(), grid_of().cells(), 1)
    before = (tmp_path / "compare.toml").read_bytes()
    with pytest.raises(InputError, match=words):
        record(tmp_path, grid_of(**changes), grid_of(**changes).cells(), 1)
    assert (tmp_path / "compare.toml").read_bytes() == before


def test_rates_join_until_a_run_of_the_table_begins(tmp_path):
    """Later the best of the rates before is in use: other cells would choose among more."""

    def tuned(*rates, **others):
        grid = grid_of(tuning=Tuning(rates, **others))
        return record(tmp_path, grid, grid.cells(), 1)

    tuned(0.1, 0.3)
    tuned(0.1, 0.3, 1.0)
    for changed in (lambda: tuned(0.1, 0.3), lambda: tuned(0.1, 0.3, 1.0, 3.0, seed=7)):
        with pytest.raises(InputError, match="tuned otherwise"):
            changed()
    (tmp_path / "runs" / "random-d0.1-s0").mkdir(parents=True)
    tuned(0.1, 0.3, 1.0)
    with pytest.raises(InputError, match=r"runs began with the best of the learning rates 0\.1,0\.3,1\.0; give these again"):
        tuned(0.1, 0.3, 1.0, 3.0)


def test_rates_that_nobody_names_start_from_the_same_one_when_a_comparison_goes_on(tmp_path):
    """Named rates do not depend on the experiment's own, which may then change; those around it do."""

    def tuned(rates, lr):
        grid = grid_of(base={**TINY, "train": {"lr": lr}}, tuning=Tuning(rates))
        return record(tmp_path / str(rates), grid, grid.cells(), 1)

    for rates in ("auto", (0.1,)):
        (tmp_path / str(rates)).mkdir()
        tuned(rates, 0.1)
    tuned((0.1,), 0.2)
    tuned("auto", 0.1)
    with pytest.raises(InputError, match=r"train\.lr is 0\.1, not 0\.2"):
        tuned("auto", 0.2)


@pytest.mark.parametrize(("first", "then"), [("auto", (0.1, 0.3)), ((0.1, 0.3), "auto")])
def test_named_rates_and_others_are_not_mixed(tmp_path, first, then):
    record(tmp_path, grid_of(tuning=Tuning(first)), grid_of().cells(), 1)
    with pytest.raises(InputError, match="tuned otherwise"):
        record(tmp_path, grid_of(tuning=Tuning(then)), grid_of().cells(), 1)


def test_the_seed_of_an_experiment_is_that_of_its_comparison(tmp_path):
    found = fedrts.compare(methods=["random"], seed=4, out=tmp_path / "out", **TINY)
    assert [row["seed"] for row in found.rows] == [4]


@pytest.mark.parametrize("wrong", [{"tune_seed": -4}, {"tune_rounds": 0}, {"tune_lr": [0.1, 0.1]}, {"tune_lr": [float("nan")]}])
def test_a_mistake_in_the_trials_leaves_the_folder_as_it_was(tmp_path, wrong):
    with pytest.raises(InputError):
        fedrts.compare(methods=["random"], out=tmp_path / "out", **{"tune_lr": [0.1], **wrong}, **TINY)
    assert not (tmp_path / "out" / "compare.toml").exists()


@pytest.mark.parametrize("wrong", [{"methods": [fedrts.methods.FedRTS()]}, {"methods": "random"}, {"densities": 0.3}, {"seeds": 3}])
def test_what_is_no_list_of_names_or_numbers(tmp_path, wrong):
    with pytest.raises(InputError, match="must be a list"):
        fedrts.compare(**{"methods": ["random"], **wrong}, out=tmp_path / "out", **TINY)


# -- the same bytes for all -------------------------------------------------------------------------------------------

SMALL = {"model_options": {"hidden": [16]}, "clients": {"total": 4, "per_round": 2}}


def rounds_of(budget, **base):
    return {cell.name: cell.experiment.rounds for cell in Grid({**SMALL, **base}, ["fedrts", "fedavg"], [0.5], budget=budget).cells()}


def test_a_budget_decides_the_rounds_and_the_base_says_the_most():
    few = rounds_of(60_000)
    assert few["fedavg-s0"] < few["fedrts-d0.5-s0"] < 50
    assert rounds_of(60_000, rounds=2) == dict.fromkeys(few, 2)
    assert rounds_of(1e9) == dict.fromkeys(few, 200), "four times those of digits"


def test_seeds_of_a_setting_have_the_same_rounds(monkeypatch):
    """They are planned once, with a seed that none of them need have: more seeds may join later."""
    asked: list[dict[str, Any]] = []

    def planned(settings, *rest):
        asked.append(settings)
        return 7 + len(asked)

    monkeypatch.setattr(planning, "rounds_within", planned)
    cells = Grid(SMALL, ["fedrts", "random"], [0.5], seeds=[3, 4], budget=1e6).cells()
    assert [settings["seed"] for settings in asked] == [0, 0]
    assert [(cell.experiment.method, cell.experiment.seed, cell.experiment.rounds) for cell in cells] == [
        ("fedrts", 3, 8),
        ("random", 3, 9),
        ("fedrts", 4, 8),
        ("random", 4, 9),
    ]


def test_trials_have_the_rounds_of_their_runs_unless_told_otherwise():
    plain, short = (Grid(SMALL, ["random"], [0.5], tuning=Tuning((0.1,), rounds=rounds), budget=60_000) for rounds in (None, 3))
    (cell,), ((trial, _),), ((shorter, _),) = plain.cells(), plain.trials(), short.trials()
    assert trial.experiment.rounds == cell.experiment.rounds > 3
    assert (shorter.experiment.rounds, shorter.experiment.end) == (3, 1)

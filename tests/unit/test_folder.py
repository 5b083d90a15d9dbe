"""A run folder that is begun again with other settings: what may change changes, the rest is another experiment."""

import tomllib
from typing import Any

import pytest

import fedrts
from fedrts import config
from fedrts.errors import InputError
from fedrts.runs.folder import RunFolder

TINY: dict[str, Any] = {
    "data": "digits",
    "rounds": 3,
    "clients": {"total": 4, "per_round": 2},
    "train": {"epochs": 1},
    "model_options": {"hidden": [8]},
    "device": "cpu",
}


def revised(folder, **changes):
    given = config.merged(TINY, config.from_keywords(changes))
    return folder.revised(config.resolve(given), list(config.flat(given)))


@pytest.fixture
def folder(tmp_path):
    begun = RunFolder(tmp_path / "run")
    begun.create(config.resolve(TINY))
    return begun


def stored(folder):
    return tomllib.loads(folder.experiment_file().read_text("utf-8"))


def test_the_same_settings_change_nothing(folder):
    before = folder.experiment_file().read_bytes()
    assert revised(folder) == {}
    assert folder.experiment_file().read_bytes() == before


def test_what_may_change_is_passed_on(folder):
    assert revised(folder, engine={"wait": 7.0}, guard={"quorum": 0.1}) == {"engine": {"wait": 7.0}, "guard": {"quorum": 0.1}}
    assert stored(folder)["engine"]["wait"] == 600.0


def test_before_the_first_round_anything_may_change(folder):
    revised(folder, clients={"total": 3}, rounds=9)
    assert stored(folder)["clients"]["total"] == 3
    assert stored(folder)["rounds"] == 9


def test_who_came_to_another_experiment_comes_again(folder):
    roster = folder.path / "roster.json"
    roster.write_text("{}")
    revised(folder, guard={"quorum": 0.5})
    assert roster.exists()
    revised(folder, seed=5)
    assert not roster.exists()


def test_an_experiment_is_not_changed_under_a_process_that_runs_it(folder):
    before = folder.experiment_file().read_bytes()
    with folder.writing(), pytest.raises(InputError, match="another process"):
        revised(RunFolder(folder.path), rounds=9)
    assert folder.experiment_file().read_bytes() == before


def test_what_cannot_be_is_refused_after_a_change_too(folder):
    revised(folder, method="feddst", guard={"reducer": "median"})
    with pytest.raises(InputError, match="masks of their own"):
        fedrts.resume(folder.path)


def test_later_another_experiment_is_refused_and_named(tmp_path):
    fedrts.run(**TINY, out=tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    before = folder.experiment_file().read_bytes()
    with pytest.raises(InputError, match=r"another experiment \(rounds is 3 there, not 9, train.lr is 0.8 there, not 0.5\)"):
        revised(folder, rounds=9, lr=0.5)
    assert revised(folder, guard={"attempts": 2}) == {"guard": {"attempts": 2}}
    assert folder.experiment_file().read_bytes() == before

"""Sites with data of their own, in this process: what they train on, what they say of the model, how they read their images."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedrts.data.pixels import Pixels

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")

import torch

from federating import trusting
from fedrts import config
from fedrts.data.contract import Data
from fedrts.data.images import statistics
from fedrts.flower import deployment
from fedrts.flower.deployment import introduction
from fedrts.flower.engine import FlowerEngine
from fedrts.flower.fleet import Fleet
from fedrts.flower.host import Host
from fedrts.flower.node import Worker
from fedrts.flower.normalisation import Normalisation, common
from fedrts.flower.roster import Roster
from fedrts.flower.site import Site
from fedrts.runs.build import Assembled, assemble
from fedrts.runs.summary import summarise
from fedrts.server.client_records import ClientRecords
from fedrts.server.rounds import play
from fedrts.wire.errors import WireError
from linkhere import LinkHere, nobody_waits


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_waits(monkeypatch)


def arrays(folder: Path, name: str, count: int, seed: int, bright: int = 0, **more: Any) -> str:
    """A site's images: two classes that differ in brightness, the whole site brighter by `bright`."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % 2
    x = (rng.integers(0, 80, (count, 3, 4, 4)) + 90 * y[:, None, None, None] + bright).astype(np.uint8)
    np.savez(folder / f"{name}.npz", x=x, y=y, **more)
    return f"npz:{folder / name}.npz"


def data_of(link: LinkHere) -> list[Data]:
    """What each site trains on and judges by."""
    return [worker.site.run.bench.data for worker in link.workers.values() if worker.site is not None]


def pixels(data: Data) -> Pixels:
    """How a site reads its images."""
    assert isinstance(data.view, Pixels)
    return data.view


def site_with(data: str, options: dict[str, Any] | None = None, **decided: Any) -> Host:
    return trusting(data=data, options=options or {}, **decided)


def study(**keywords: Any) -> Assembled:
    base = {
        "method": "fedrts",
        "model": "mlp",
        "model_options": {"hidden": [12]},
        "data": "elsewhere",
        "data_options": {"shape": [3, 4, 4], "classes": 2},
        "density": 0.5,
        "rounds": 4,
        "clients": {"total": 2, "per_round": 2},
        "train": {"epochs": 1, "batch_size": 8, "lr": 0.1},
        "eval": {"every": 1},
        "engine": {"name": "flower", "timeout": 5, "wait": 0.5},
    }
    if "data" in keywords:
        del base["data_options"]
    return assemble(config.resolve(base, config.from_keywords(keywords)))


def federated(run: Assembled, link: LinkHere, hosts: list[Host], folder: Path | None = None) -> Assembled:
    for number, host in enumerate(hosts):
        link.start(7 + number, [])
        link.workers[7 + number] = Worker(host, link.said.append)
    roster = Roster(len(hosts), folder / "roster.json" if folder else None, keyed=False)
    people = Fleet(link, introduction(run), roster, None, "", None, link.said.append)  # type: ignore[arg-type]
    return deployment._with_fleet(run, people, folder)


def lines_of(run: Assembled) -> list[dict[str, Any]]:
    return [played.record.as_dict() for played in play(run.plan, run.method.begin(run.setup), -1, ClientRecords.of(run.plan.guard))]


def test_a_site_trains_on_all_that_it_is_given(tmp_path: Path):
    """Before, only 400 of 500 rows took part, whatever the owner set."""
    host = site_with(arrays(tmp_path, "a", 500, 0))
    said = introduction(study())
    site = Site.of(host, said["experiment"], said)
    assert site.introduction()["samples"] == [500]
    assert site.introduction()["held_out"] == 0
    some = Site.of(replace(host, options={"test": 0.2}), said["experiment"], said)
    assert (some.introduction()["samples"], some.introduction()["held_out"]) == ([400], 100)


def test_the_server_cannot_choose_what_a_site_holds_out(tmp_path: Path):
    host = site_with(arrays(tmp_path, "a", 500, 0))
    said = introduction(study(data=arrays(tmp_path, "server", 40, 1), data_options={"test": 0.5}, clients={"partition": "sites"}))
    assert "test = 0.5" in said["experiment"]
    assert Site.of(host, said["experiment"], said).introduction()["samples"] == [500]


def test_sites_judge_the_global_model_on_what_they_hold_out(tmp_path: Path):
    hosts = [site_with(arrays(tmp_path, "a", 100, 0), {"test": 0.2}), site_with(arrays(tmp_path, "b", 60, 1, bright=60), {"test": 0.5})]
    run = federated(study(), LinkHere(), hosts)
    assert dict(run.plan.held_out) == {0: 20, 1: 30}
    lines = lines_of(run)
    assert len(lines) == 4
    for line in lines:
        told = line["federated"]
        assert [(entry["client"], entry["samples"]) for entry in told["clients"]] == [(0, 20), (1, 30)]
        accuracies = [entry["accuracy"] for entry in told["clients"]]
        assert line["accuracy"] == told["mean"]["accuracy"] == pytest.approx((20 * accuracies[0] + 30 * accuracies[1]) / 50)
        assert told["mean_of_clients"]["accuracy"] == pytest.approx(sum(accuracies) / 2)
        assert told["missing"] == []
        assert told["bytes"] > 0
    assert lines[-1]["federated"]["mean"]["loss"] < lines[0]["federated"]["mean"]["loss"]


def test_a_site_that_claims_to_judge_on_many_rows_counts_ten_medians(tmp_path: Path):
    hosts = [site_with(arrays(tmp_path, name, 40, seed), {"test": 0.5}) for seed, name in enumerate("abc")]
    run = federated(study(rounds=1, clients={"total": 3, "per_round": 3}), LinkHere(), hosts)
    run = replace(run, plan=replace(run.plan, held_out={0: 20, 1: 20, 2: 10**9}))
    (line,) = lines_of(run)
    told = line["federated"]
    assert [entry["samples"] for entry in told["clients"]] == [20, 20, 10**9]
    losses = [entry["loss"] for entry in told["clients"]]
    assert told["mean"]["loss"] == pytest.approx((losses[0] + losses[1] + 10 * losses[2]) / 12)


def test_what_sites_say_is_what_the_model_is(tmp_path: Path):
    """Their metrics are those of the server's own state on their held-out rows, read by the common statistics."""
    link = LinkHere()
    hosts = [site_with(arrays(tmp_path, "a", 100, 0), {"test": 0.2}), site_with(arrays(tmp_path, "b", 60, 1, bright=60), {"test": 0.5})]
    run = federated(study(), link, hosts)
    *_, last = play(run.plan, run.method.begin(run.setup), -1, ClientRecords.of(run.plan.guard))
    run.layout.bind(run.module, last.state.weights.clone())
    assert last.record.federated is not None
    for entry, data in zip(last.record.federated["clients"], data_of(link), strict=True):
        assert entry["accuracy"] == pytest.approx(data.evaluate(run.module, 64)["accuracy"])


def test_sites_tell_further_metrics_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the experiment adds every site measures, and a share above 1 nobody believes."""
    link = LinkHere()
    hosts = [site_with(arrays(tmp_path, "a", 100, 0), {"test": 0.2}), site_with(arrays(tmp_path, "b", 60, 1), {"test": 0.5})]
    run = federated(study(rounds=1, eval={"metrics": ["f1"]}), link, hosts)
    ledger = ClientRecords.of(run.plan.guard)
    (played,) = play(run.plan, run.method.begin(run.setup), -1, ledger)
    line = played.record.as_dict()
    run.layout.bind(run.module, played.state.weights.clone())
    told = {entry["client"]: entry["f1"] for entry in line["federated"]["clients"]}
    assert told == pytest.approx({client: data.evaluate(run.module, 64)["f1"] for client, data in enumerate(data_of(link))})
    assert line["f1"] == pytest.approx((20 * told[0] + 30 * told[1]) / 50)
    assert summarise(run, played.state, ledger, [line])["f1_last10"] == line["f1"]
    honest = Data.judge
    monkeypatch.setattr(Data, "judge", lambda self, *rest: {**honest(self, *rest), "f1": 2.0})
    (line,) = lines_of(run)
    assert line["f1"] is None
    assert [entry["reason"] for entry in line["federated"]["missing"]] == ["an F1 of 2", "an F1 of 2"]


def test_training_and_its_bytes_are_the_same_with_judges_and_without(tmp_path: Path):
    """The rows that are held out are others' (a test set of its own), so that the same rows train in both."""
    given = np.load(arrays(tmp_path, "given", 30, 5).removeprefix("npz:"))
    found = []
    for more in ({}, {"x_test": given["x"], "y_test": given["y"]}):
        names = [arrays(tmp_path, f"{name}{len(more)}", 48, seed, **more) for seed, name in enumerate("ab")]
        found.append(lines_of(federated(study(), LinkHere(), [site_with(name) for name in names])))
    without, judged = found
    for key in ("upload_bytes", "clients", "links_changed", "flops"):
        assert [line[key] for line in without] == [line[key] for line in judged], key
    assert all("federated" not in line and line["accuracy"] is None for line in without)
    assert all(line["accuracy"] is not None for line in judged)


def test_a_study_that_nobody_tests_is_played_and_says_so(tmp_path: Path):
    link = LinkHere()
    run = federated(study(), link, [site_with(arrays(tmp_path, "a", 40, 0)), site_with(arrays(tmp_path, "b", 40, 1))])
    assert any("nobody has data to test the model on" in line for line in link.said)
    ledger = ClientRecords.of(run.plan.guard)
    played = list(play(run.plan, run.method.begin(run.setup), -1, ledger))
    summary = summarise(run, played[-1].state, ledger, [entry.record.as_dict() for entry in played])
    assert [summary[key] for key in ("accuracy", "accuracy_last10", "best_accuracy", "loss")] == [None] * 4


def test_the_coordinators_own_test_set_comes_first(tmp_path: Path):
    hosts = [site_with(arrays(tmp_path, "a", 100, 0), {"test": 0.2}), site_with(arrays(tmp_path, "b", 60, 1), {"test": 0.5})]
    own = arrays(tmp_path, "coordinator", 50, 9)
    run = federated(study(data=own, data_options={"test": 0.5}, clients={"partition": "sites"}), LinkHere(), hosts)
    *_, last = play(run.plan, run.method.begin(run.setup), -1, ClientRecords.of(run.plan.guard))
    assert last.record.accuracy == run.plan.engine.evaluate(last.state)["accuracy"]
    assert last.record.federated is not None
    assert last.record.federated["samples"] == 50


@pytest.mark.parametrize("lie", [float("nan"), float("inf"), -0.1, 1.5, 1e30])
def test_an_accuracy_that_cannot_be_does_not_count(tmp_path: Path, lie: float, monkeypatch: pytest.MonkeyPatch):
    link = LinkHere()
    hosts = [site_with(arrays(tmp_path, "a", 100, 0), {"test": 0.2}), site_with(arrays(tmp_path, "b", 60, 1), {"test": 0.5})]
    run = federated(study(rounds=1), link, hosts)
    honest = Data.judge

    def lying(self: Data, *arguments: Any) -> dict[str, float]:
        return {**honest(self, *arguments), "accuracy": lie} if len(self.test_y) == 30 else honest(self, *arguments)

    monkeypatch.setattr(Data, "judge", lying)
    (line,) = lines_of(run)
    assert [entry["client"] for entry in line["federated"]["clients"]] == [0]
    assert [entry["client"] for entry in line["federated"]["missing"]] == [1]
    assert 0 <= line["accuracy"] <= 1


@pytest.mark.parametrize(
    ("decided", "table"),
    [
        ({"epsilon": 8.0}, {"clip": 1.0, "noise": 5.0, "index_epsilon": 1.0}),
        ({"epsilon": 8.0}, {}),
        ({}, {"clip": 1.0, "noise": 5.0, "index_epsilon": 1.0}),
    ],
)
def test_where_privacy_is_asked_for_nothing_unprotected_is_told(tmp_path: Path, decided: dict[str, Any], table: dict[str, float]):
    said = introduction(study(privacy=table))
    site = Site.of(site_with(arrays(tmp_path, "a", 100, 0), {"test": 0.2}, **decided), said["experiment"], said)
    told = site.introduction()
    assert told["held_out"] == 0
    assert bool(told["statistics"]) == ("epsilon" not in decided)


# -- common normalisation ---------------------------------------------------------------------------------------------


def test_common_statistics_are_those_of_all_rows_together():
    rng = np.random.default_rng(0)
    parts = [torch.from_numpy(rng.integers(0, high, (count, 3, 5, 5)).astype(np.uint8)) for high, count in ((256, 40), (90, 7), (20, 13))]
    whole = Normalisation(*map(tuple, statistics(torch.cat(parts))))
    found = common((len(part), Normalisation(*map(tuple, statistics(part)))) for part in parts)
    assert found is not None
    assert found.numbers == pytest.approx(whole.numbers, rel=1e-12)


def test_all_sites_read_their_images_alike(tmp_path: Path):
    link = LinkHere()
    names = [arrays(tmp_path, "a", 90, 0), arrays(tmp_path, "b", 60, 1, bright=60)]
    run = federated(study(), link, [site_with(names[0]), site_with(names[1])], tmp_path)
    lines_of(run)
    first, second = (pixels(data) for data in data_of(link))
    assert torch.equal(first.scale, second.scale)
    assert torch.equal(first.shift, second.shift)
    rows = torch.cat([torch.from_numpy(np.load(name.removeprefix("npz:"))["x"]) for name in names])
    inputs = torch.cat([data.inputs(data.x) for data in data_of(link)])
    assert inputs.mean((0, 2, 3)).tolist() == pytest.approx([0] * 3, abs=1e-4)
    assert inputs.std((0, 2, 3), correction=0).tolist() == pytest.approx([1] * 3, abs=1e-4)
    assert len(rows) == len(inputs)


def test_a_site_that_claims_many_samples_moves_the_normalisation_by_ten_medians_at_most(tmp_path: Path):
    link = LinkHere()
    names = [arrays(tmp_path, "a", 90, 0), arrays(tmp_path, "b", 60, 1, bright=60), arrays(tmp_path, "c", 60, 2)]
    run = federated(study(clients={"total": 3, "per_round": 3}), link, [site_with(name) for name in names])
    engine = run.plan.engine
    assert isinstance(engine, FlowerEngine)
    entries = engine.fleet.roster.entries
    entries[1] = replace(entries[1], samples=10**9)
    found = deployment._normalisation(engine, run, None)
    told = [Normalisation.told(list(entries[client].statistics)) for client in range(3)]
    expected = common((weight, part) for weight, part in zip((90, 900, 60), told, strict=True) if part is not None)
    assert found is not None
    assert expected is not None
    assert found.numbers == pytest.approx(expected.numbers, rel=1e-12)


def test_the_normalisation_of_a_study_stays(tmp_path: Path):
    names = [arrays(tmp_path, "a", 90, 0), arrays(tmp_path, "b", 60, 1, bright=60)]
    federated(study(), LinkHere(), [site_with(names[0]), site_with(names[1])], tmp_path)
    first = json.loads((tmp_path / "normalisation.json").read_text())
    link = LinkHere()
    again = federated(study(), link, [site_with(names[0]), site_with(names[1], keep_statistics=True)], tmp_path)
    assert json.loads((tmp_path / "normalisation.json").read_text()) == first
    assert isinstance(again.plan.engine, FlowerEngine)
    assert again.plan.engine.facts["normalisation"] == [*first["mean"], *first["std"]]


def test_a_site_may_keep_its_statistics_to_itself(tmp_path: Path):
    link = LinkHere()
    names = [arrays(tmp_path, "a", 90, 0), arrays(tmp_path, "b", 60, 1, bright=60)]
    run = federated(study(), link, [site_with(names[0]), site_with(names[1], keep_statistics=True)])
    own, other = link.workers[7].site, link.workers[8].site
    assert own is not None
    assert other is not None
    assert other.introduction()["statistics"] == []
    measured = Normalisation.measured(own.run.data)
    assert measured is not None
    assert isinstance(run.plan.engine, FlowerEngine)
    assert run.plan.engine.facts["normalisation"] == measured.numbers
    lines_of(run)
    first, second = (pixels(data) for data in data_of(link))
    assert torch.equal(first.shift, second.shift)


@pytest.mark.parametrize("numbers", [[0.5] * 3, [0.5, float("nan")], [0.5, 0.0], [2.0, 0.5], ["0.5", "0.5"], 3.0, [0.5] * 8, [True, True]])
def test_statistics_that_cannot_be_are_refused(tmp_path: Path, numbers: object):
    said = introduction(study())
    site = Site.of(site_with(arrays(tmp_path, "a", 40, 0)), said["experiment"], said)
    with pytest.raises(WireError):
        site.normalise(numbers)


def test_a_server_cannot_change_the_normalisation_in_the_middle(tmp_path: Path):
    said = introduction(study())
    site = Site.of(site_with(arrays(tmp_path, "a", 40, 0)), said["experiment"], said)
    site.normalise([0.5] * 6)
    site.normalise([0.5] * 6)
    with pytest.raises(WireError, match="changes the normalisation"):
        site.normalise([0.4] * 6)


def patients(folder: Path, name: str, words: str, seed: int) -> str:
    rng = np.random.default_rng(seed)
    lines = ["age,ward,stay"]
    for _ in range(40):
        age, ward = rng.normal(), rng.choice(list(words))
        lines.append(f"{age:.4f},{ward},{100 + 10 * age + 5 * (ward == 'b'):.4f}")
    (folder / f"{name}.csv").write_text("\n".join(lines))
    return f"csv:{folder / name}.csv"


def test_sites_train_on_tables_of_their_own(tmp_path: Path):
    """Each lacks a word that the other has: the coordinator's options say which there are, and in which units the target is learned."""
    options = {"target": "stay", "categories": {"ward": ["a", "b", "c"]}, "units": [100.0, 10.0]}
    own = patients(tmp_path, "coordinator", "abc", 0)
    run = study(data=own, data_options=options, clients={"partition": "sites"}, model_options={}, model="tabular", rounds=12)
    hosts = [site_with(patients(tmp_path, name, words, seed)) for name, words, seed in (("a", "ab", 1), ("b", "bc", 2))]
    link = LinkHere()
    lines = lines_of(federated(run, link, hosts))
    assert [data.input_shape for data in data_of(link)] == [(4,), (4,)]
    assert {data.task for data in data_of(link)} == {run.data.task}
    assert lines[-1]["mae"] < 0.7 * lines[0]["mae"]

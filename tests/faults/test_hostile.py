"""Clients that send well-formed lies: who is found out, what the reducers make of the rest, and what one of them can do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedrts
from fedrts import config
from fedrts.client.order import DRIFT
from fedrts.engines.serial import SerialEngine
from fedrts.errors import InputError, Note
from fedrts.export.inspection import inspect_run
from fedrts.observe import Silent
from fedrts.runs.build import assemble
from fedrts.runs.lost_units import lost_units
from fedrts.server import reducers, rounds
from fedrts.server.aggregate import Sums
from fedrts.server.client_records import ClientRecords
from fedrts.server.guard import Guard
from fedrts.server.outliers import Suspicion, excesses
from fedrts.sparse.layout import Entry
from fedrts.sparse.mask import Mask
from fedrts.sparse.units import CutOff, cut_off
from fedrts.testing.hostile import ADAPTIVE, ATTACKS, Attack, Infiltrated, infiltrated
from helping import order_of
from outside import TINY, command

HOSTILE = 2


def scaled(factor: float):
    """The honest update times a factor."""

    def attack(message, scene):
        n = scene.parameters
        weights = message["weights"].clone()
        weights[:n] = scene.reference[:n] + factor * (weights[:n] - scene.reference[:n])
        return {**message, "weights": weights}

    return attack


@dataclass
class Claiming:
    """An engine whose clients claim so many samples."""

    engine: Any
    samples: Sequence[int]

    def run(self, order, clients):
        yield from (replace(reply, samples=self.samples[reply.client]) for reply in self.engine.run(order, clients))


def hostile(run, attack, clients=(HOSTILE,), **guard):
    guarded = run.plan.guard.model_copy(update=guard)
    return replace(run.plan, engine=Infiltrated(run.plan.engine, frozenset(clients), attack), guard=guarded)


@pytest.fixture
def run(toy):
    return toy("fedrts", "mlp", clients={"total": 6, "per_round": 6}, rounds=12)


# -- who is found out ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ["−W", "zeros"])
def test_an_update_that_undoes_the_model_is_refused(run, attack):
    state = run.method.begin(run.setup)
    played = rounds.play_round(hostile(run, ATTACKS[attack]), state, 1)
    (rejected,) = played.record.rejected
    assert rejected["client"] == HOSTILE
    assert "undoes the model" in rejected["reason"]
    lenient = hostile(run, ATTACKS[attack], undo_bound=3.0, median_bound=1e9)
    assert rounds.play_round(lenient, state, 1).record.rejected == []


def test_noise_that_hides_a_client_undoes_nothing(run):
    """Noise far larger than the model goes back along it by more than half of it now and then; its cosine tells."""

    def noisy(message, scene):
        n, noise = scene.parameters, torch.randn(scene.parameters, generator=torch.Generator().manual_seed(scene.order.round.index))
        away = noise - scene.reference[:n] * (noise @ scene.reference[:n]) / scene.reference[:n].square().sum()
        weights = message["weights"].clone()
        weights[:n] = scene.reference[:n] - 0.6 * scene.order.reference_norm / scene.reference[:n].norm() * scene.reference[:n] + 5 * away
        return {**message, "weights": weights}

    assert rounds.play_round(hostile(run, noisy, median_bound=1e9), run.method.begin(run.setup), 1).record.rejected == []


def test_a_round_with_an_outlier_is_repeated_without_it(run):
    """The result is the round as the others play it, to the bit, and no attempt is spent."""
    state, ledger = run.method.begin(run.setup), ClientRecords.of(run.plan.guard)
    plan = hostile(run, scaled(500.0), norm_bound=1e9, undo_bound=1e9, attempts=1)
    played = rounds.play_round(plan, state, 1, ledger)
    (rejected,) = played.record.rejected
    assert rejected["client"] == HOSTILE
    assert "times as large as the median of its round: the round is repeated without it" in rejected["reason"]
    assert ledger.strikes.counts == {HOSTILE: 1}
    assert played.record.clients == [0, 1, 3, 4, 5]
    others = ClientRecords.of(run.plan.guard)
    others.strikes.counts[HOSTILE] = 99
    alone = rounds.play_round(run.plan, state, 1, others)
    assert torch.equal(played.state.values, alone.state.values)
    assert all(torch.equal(played.state[name], alone.state[name]) for name in alone.state.memory)


def test_who_is_large_again_and_again_is_asked_no_more(run):
    plan = hostile(run, scaled(30.0), norm_bound=1e9, undo_bound=1e9, median_bound=1e9, large_bound=27.0)
    ledger, state = ClientRecords.of(plan.guard), run.method.begin(run.setup)
    for index in (1, 2):
        played = rounds.play_round(plan, state, index, ledger)
        assert played.record.rejected == []
        state = played.state
    assert 2.0 < ledger.large.weights[HOSTILE] < 3.0
    again = ClientRecords.restored(ledger.tensors(), state.mask.sizes, plan.guard, "cpu")
    assert again.large.weights == ledger.large.weights
    with pytest.warns(
        Note, match=f"client {HOSTILE} is asked no more: it sent an update .*, the last of several above guard.large_bound = 3"
    ):
        last = rounds.play_round(hostile(run, scaled(100.0), norm_bound=1e9, undo_bound=1e9, median_bound=1e9), state, 3, again)
    assert again.strikes.quarantined == {HOSTILE}
    assert HOSTILE not in last.record.clients  # the round that gave it away is repeated
    assert [entry["client"] for entry in last.record.rejected] == [HOSTILE]
    before = dict(ledger.large.weights)
    rounds.play_round(run.plan, state, 3, ledger)  # an honest reply in between: less weighs against it
    assert ledger.large.weights == {HOSTILE: before[HOSTILE] - 0.25}


def found_out(pattern: str, ratio: float, rounds: int = 100) -> bool:
    """Is a client found that is large (L) and usual (.) in turns?"""
    suspicion = Suspicion(3)
    return any(suspicion.add({1: ratio if pattern[index % len(pattern)] == "L" else 0.5, 2: 1.0}) == [1] for index in range(rounds))


@pytest.mark.parametrize("pattern", ["L", "LL.", "L.", "L..", "L....", "L" + 6 * "."])
def test_who_rests_between_large_replies_is_found_too(pattern):
    assert found_out(pattern, 6.0)


def test_single_large_replies_prove_nothing():
    assert not found_out("L" + 8 * ".", 1000.0)
    assert not found_out("L" + 99 * ".", 1000.0)
    assert not found_out("L", 1.0)  # at the bound nothing is large
    suspicion = Suspicion(3)
    suspicion.add({1: 2.0})
    suspicion.add({2: 2.0})  # client 1 was not asked
    assert suspicion.weights == {1: 2.0, 2: 2.0}
    assert suspicion.add({1: 1.5, 2: 0.0}) == [1]
    assert suspicion.weights == {1: 2.0, 2: 2.0}  # the round is played again


@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
@pytest.mark.parametrize("attackers", [(0,), (0, 1)])
def test_colluders_that_send_nothing_get_nobody_struck(run, attackers):
    """They make the median smaller, by which the others are measured."""
    plan = hostile(run, scaled(0.0), clients=attackers)
    ledger = ClientRecords.of(plan.guard)
    played = list(rounds.play(plan, run.method.begin(run.setup), -1, ledger))
    assert all(len(each.record.clients) == 6 for each in played)
    assert ledger.strikes.quarantined == set()


def test_sizes_are_compared_with_the_rounds_median_and_the_numbers_of_samples():
    sizes = {0: 1.1, 1: 2.0, 2: 3.0, 3: 40.0, 4: 40.0}
    samples = {0: 10, 1: 10, 2: 10, 3: 10, 4: 50}
    found = excesses({"update": sizes}, samples, norm=5.0)
    assert {client: entry.ratio for client, entry in found.items()} == pytest.approx({0: 1.1 / 3, 1: 2 / 3, 2: 1.0, 3: 40 / 3, 4: 8 / 3})
    assert excesses({"update": {0: 1.0, 1: 100.0}}, samples, 1.0) == {}  # two have no median that means anything
    assert excesses({"update": dict.fromkeys(range(4), 0.0) | {4: 1.0}}, samples, 1.0) == {}
    tiny = excesses({"update": {0: 1e-2, 1: 1e-2, 2: 1e-2, 3: 0.19}}, samples, 1.0)
    assert tiny[3].ratio == 0.0  # far above the others, and harmless
    both = excesses({"update": sizes, "statistics": {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 500.0}}, samples, 5.0)
    assert both[4].ratio == pytest.approx(100.0)
    assert "statistics" in both[4].reason


def test_statistics_that_no_data_have_are_outliers(toy):
    run = toy("fedrts", "cnn", clients={"total": 6, "per_round": 6})
    played = rounds.play_round(hostile(run, ATTACKS["statistics"]), run.method.begin(run.setup), 1)
    (rejected,) = played.record.rejected
    assert "statistics that move" in rejected["reason"]
    assert played.record.clients == [0, 1, 3, 4, 5]


def test_statistics_of_candidates_are_held_to_the_others_too(toy):
    """Before the first round clients of FedTiny send statistics for every mask of a pool: there too one may send what no data have."""
    run = toy("fedtiny", "cnn", clients={"total": 6, "per_round": 6})
    honest = rounds.play_round(run.plan, run.method.begin(run.setup), -1)
    assert honest.record.rejected == []
    serial = run.plan.engine

    @dataclass
    class Lying:
        def run(self, order, clients):
            for reply in serial.run(order, clients):
                told = {name: torch.full_like(numbers, 9e8) for name, numbers in reply.message.items() if name == "statistics"}
                yield replace(reply, message={**reply.message, **told}) if reply.client == HOSTILE else reply

    played = rounds.play_round(replace(run.plan, engine=Lying()), run.method.begin(run.setup), -1)
    (rejected,) = played.record.rejected
    assert rejected["client"] == HOSTILE
    assert "statistics that move" in rejected["reason"]
    assert played.record.clients == [0, 1, 3, 4, 5]


def test_who_votes_at_random_hides_behind_honest_weights(run):
    state = run.method.begin(run.setup)
    outer = next(index for index in range(1, run.plan.rounds) if run.plan.schedule.is_outer(index))
    exchange = run.method.exchanges(run.plan.round(outer, state.mask))[0]
    honest = {reply.client: reply for reply in run.plan.engine.run(order_of(run, exchange, state, outer), range(4))}
    order = order_of(run, exchange, state, outer)
    lying = {reply.client: reply for reply in hostile(run, ATTACKS["votes"]).engine.run(order, range(4))}
    for client, reply in lying.items():
        assert torch.equal(reply.message["weights"], honest[client].message["weights"])
        same = torch.equal(reply.message["votes"].indices, honest[client].message["votes"].indices)
        assert same == (client != HOSTILE)
    assert rounds.play_round(hostile(run, ATTACKS["votes"]), state, outer).record.rejected == []


def test_nobody_is_blamed_where_most_replies_are_refused(run):
    state, ledger = run.method.begin(run.setup), ClientRecords.of(run.plan.guard)
    most = hostile(run, ATTACKS["zeros"], clients=(0, 1, 2, 3))
    with (
        pytest.warns(Note, match="most replies were rejected .*undoes the model.*: nobody is blamed"),
        pytest.raises(rounds.TooFewError) as stopped,
    ):
        rounds.play_round(most, state, 1, ledger)
    assert ledger.strikes.counts == {}
    assert {entry["client"] for entry in stopped.value.refused} == {0, 1, 2, 3}
    assert stopped.value.missing == {}
    half = hostile(run, ATTACKS["zeros"], clients=(0, 1, 2))
    assert rounds.play_round(half, state, 1, ledger).record.clients == [3, 4, 5]
    assert ledger.strikes.counts == {0: 1, 1: 1, 2: 1}


# -- reducers -----------------------------------------------------------------------------------------------------------------------


def reduced(run, rows: Tensor, weights=None, drift: Tensor | None = None, **guard: Any) -> Tensor:
    """What a reducer makes of updates `rows [k, n]`, as an update."""
    state = run.method.begin(run.setup)
    order = replace(order_of(run, run.method.exchanges(run.plan.round(1, state.mask))[0], state, 1), drift=drift)
    reference = order.values[: rows.shape[1]].double()
    order = replace(order, values=reference)
    made = reducers.reduction(Guard(**guard), order)
    assert made is not None
    for row, weight in zip(rows, weights or [1] * len(rows), strict=True):
        made.add(reference + row, weight)
    found: Tensor = made.result() - reference
    return found


def points(count=9, size=5, seed=0) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_geometric_median_is_where_all_pulls_cancel(run):
    rows, weights = points(), [3, 1, 4, 1, 5, 9, 2, 6, 5]
    centre = reduced(run, rows, weights, reducer="geometric_median")
    apart = rows - centre
    pulls = torch.tensor(weights, dtype=torch.float64)[:, None] * apart / apart.norm(dim=1, keepdim=True)
    assert float(pulls.sum(0).norm()) < 1e-3 * sum(weights)
    near = reduced(run, rows, reducer="geometric_median")
    for factor in (1e3, 1e6, 1e18):  # however far one of them goes
        far = rows.clone()
        far[0] *= factor
        assert float((reduced(run, far, reducer="geometric_median") - near).norm()) < 1.0


def test_krum_is_the_textbooks(run):
    trim = 0.25  # of eight f = 2: the k − f − 2 = 4 nearest count
    for seed in range(6):
        rows = points(8, seed=seed)
        distances = [[float((a - b).square().sum()) for b in rows] for a in rows]
        scores = [sum(sorted(row[:i] + row[i + 1 :])[:4]) for i, row in enumerate(distances)]
        ranked = sorted(range(8), key=lambda i: scores[i])
        torch.testing.assert_close(reduced(run, rows, reducer="krum", trim=trim), rows[ranked[0]])
        torch.testing.assert_close(reduced(run, rows, reducer="multi_krum", trim=trim), rows[ranked[:6]].mean(0))


def test_centred_clipping_is_around_what_the_last_round_did(run):
    rows, drift, weights = points(5), points(1, seed=7)[0], [3, 1, 4, 1, 5]
    expected = drift.clone()
    for _ in range(3):
        apart = [row - expected for row in rows]
        middle = sorted(float(way.norm()) for way in apart)[2]
        expected = (
            expected + sum(weight * way * min(1.0, middle / float(way.norm())) for weight, way in zip(weights, apart, strict=True)) / 14
        )
    torch.testing.assert_close(reduced(run, rows, weights, drift=drift, reducer="centred_clip"), expected)
    assert not torch.allclose(reduced(run, rows, weights, reducer="centred_clip"), expected)


def test_aligned_leaves_out_who_points_against_the_others_and_nobody_else(run):
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, -0.1], [0.9, 0.2], [-1.0, 0.0]], dtype=torch.float64)

    def cut(some, trim):
        norms = some.norm(dim=1, keepdim=True)
        return some * (norms.quantile(1 - trim) / norms).clamp(max=1)

    torch.testing.assert_close(reduced(run, rows, reducer="aligned", trim=0.2), cut(rows, 0.2)[:4].mean(0))
    torch.testing.assert_close(reduced(run, rows, reducer="aligned", trim=0.0), rows.mean(0))
    honest = rows[:4]
    torch.testing.assert_close(reduced(run, honest, reducer="aligned", trim=0.4), cut(honest, 0.4).mean(0))
    long = torch.cat([honest, 1e6 * honest[:1]])
    assert float(reduced(run, long, reducer="aligned", trim=0.4).norm()) < 1.2


@pytest.mark.parametrize("reducer", ["geometric_median", "aligned", "centred_clip", "krum", "multi_krum"])
def test_statistics_are_medians_and_say_nothing_of_the_updates(toy, reducer):
    run = toy("fedrts", "cnn")
    state = run.method.begin(run.setup)
    order = order_of(run, run.method.exchanges(run.plan.round(1, state.mask))[0], state, 1)
    first = len(order.values) - order.frame.statistics
    assert first < len(order.values)

    def result(statistics: Tensor) -> Tensor:
        made = reducers.reduction(Guard(reducer=reducer), order)
        assert made is not None
        for row, told in zip(points(5, first), statistics, strict=True):
            made.add(torch.cat([row, told]).float(), 1)
        return made.result()

    told = points(5, order.frame.statistics, seed=3).float()
    found, far = result(told), result(torch.cat([torch.full_like(told[:1], 9e8), told[1:]]))
    middle = [sorted(column)[2] for column in told.T.tolist()]
    assert found[first:].tolist() == pytest.approx(middle)
    assert float(far[first:].max()) <= float(told[1:].max())
    assert torch.equal(found[:first], far[:first])


def test_nearest_mixes_everybody_with_their_neighbours(run):
    rows = points(5)
    mixed = [rows[sorted(range(5), key=lambda j: float((rows[i] - rows[j]).norm()))[:4]].mean(0) for i in range(5)]
    torch.testing.assert_close(reduced(run, rows, mixing="nearest", trim=0.2), torch.stack(mixed).mean(0))
    torch.testing.assert_close(reduced(run, rows, mixing="nearest", reducer="median", trim=0.2), torch.stack(mixed).median(0).values)


def test_parameters_alone_say_who_is_near(toy):
    """Two clients of each kind, whose statistics are those of the other kind."""
    rows = torch.tensor([[0.0, 100.0], [0.1, 900.0], [5.0, 100.0], [5.1, 900.0]])
    mixed = reducers.nearest(rows, 1, Guard(trim=0.49), 0)  # of four, each with all but one
    first, last = rows[[0, 1, 2]].mean(0), rows[[1, 2, 3]].mean(0)
    torch.testing.assert_close(mixed, torch.stack([first, first, last, last]))
    run = toy("fedrts", "cnn")
    state = run.method.begin(run.setup)
    made = reducers.reduction(Guard(mixing="nearest"), order_of(run, run.method.exchanges(run.plan.round(1, state.mask))[0], state, 1))
    assert isinstance(made, reducers.Mixed)
    assert made.parameters == state.mask.number + run.layout.parameters - run.layout.links < len(state.values)


@pytest.mark.parametrize(("trim", "clients", "expected"), [(0.29, 100, 29), (0.25, 10, 2), (0.2, 5, 1), (0.49, 2, 0), (0.0, 7, 0)])
def test_a_share_of_clients_is_rounded_down_but_not_by_floating_point(trim, clients, expected):
    assert reducers.few(trim, clients) == expected
    rows = torch.arange(clients, dtype=torch.float64).square().view(-1, 1)
    cut = reducers.Sorted(trim)
    for row in rows:
        cut.add(row, 1)
    assert float(cut.result()) == pytest.approx(float(rows[expected : clients - expected].mean()))


def test_buckets_are_random_pairs(run):
    rows = points(6)
    guard = Guard(mixing="bucketing")
    mixed = reducers.bucketing(rows, 5, guard, 3)
    assert mixed.shape == (3, 5)
    torch.testing.assert_close(mixed.mean(0), rows.mean(0))
    assert torch.equal(mixed, reducers.bucketing(rows, 5, guard, 3))
    assert not torch.equal(mixed, reducers.bucketing(rows, 5, guard, 4))


def test_what_is_mixed_cannot_be_merged_nor_be_on_own_masks(toy, tmp_path):
    with pytest.raises(InputError, match=r"guard\.mixing = 'nearest' needs every client's weights in one place"):
        toy("random", engine="ray", guard={"mixing": "nearest"})
    with pytest.raises(InputError, match=r"guard\.mixing = 'nearest' needs weights on one mask.*guard\.mixing = 'none'"):
        fedrts.run(data="digits", method="feddst", rounds=1, guard={"mixing": "nearest"}, device="cpu", out=str(tmp_path / "run"))


@pytest.mark.parametrize(("trim", "share"), [(0.2, 0.5), (0.1, 0.3), (0.2, 0.1), (0.4, 0.7)])
def test_trimmed_counts_are_trimmed_means_of_noughts_and_ones(trim, share):
    votes = torch.arange(10) < round(10 * share)
    sums = Sums(trim=trim)
    for vote in votes:
        sums.add({"vote": vote.view(1), "value": vote.view(1).double()}, 1)
    cut = round(10 * trim)
    expected = votes.double().sort().values[cut : 10 - cut].mean()
    assert sums.mean()["vote"].tolist() == pytest.approx([float(expected)])
    assert sums.mean()["value"].tolist() == pytest.approx([share])  # numbers are no votes


def test_how_a_round_moved_the_weights_is_remembered_where_it_is_needed(run):
    state = run.method.begin(run.setup)
    plan = replace(run.plan, guard=Guard(reducer="centred_clip"))
    after = rounds.play_round(plan, state, 1).state  # an inner round: the mask stays
    torch.testing.assert_close(after[DRIFT], after.weights - state.weights)
    assert torch.equal(
        order_of(run, run.method.exchanges(run.plan.round(2, after.mask))[0], after, 2).drift, after.mask.compact(after[DRIFT])
    )
    assert DRIFT not in rounds.play_round(run.plan, state, 1).state.memory


@pytest.mark.parametrize("reducer", ["centred_clip", "aligned"])
def test_a_run_with_a_robust_reducer_resumes_to_the_bit(tmp_path, reducer):
    class Stop(Exception):
        pass

    class Stopper(Silent):
        def played(self, record):
            if record.round == 5:
                raise Stop

    common: dict[str, Any] = {"recipe": "paper", "data": "toy_images", "model": "mlp", "density": 0.5, "rounds": 9, "engine": "serial"}
    common |= {"train": {"epochs": 1}, "checkpoint": {"every": 1}, "guard": {"reducer": reducer}, "topology": {"interval": 2, "end": 8}}
    common |= {"clients": {"total": 5, "per_round": 4, "partition": "iid", "min_size": 1}}
    fedrts.run(**common, out=str(tmp_path / "whole"))
    with pytest.raises(Stop):
        fedrts.run(**common, out=str(tmp_path / "cut"), observer=Stopper())
    fedrts.resume(tmp_path / "cut")
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert models[0] == models[1]


# -- the preset ---------------------------------------------------------------------------------------------------------------------


def test_a_guard_by_one_word():
    robust = config.resolve({"guard": "robust"}).guard
    assert (robust.reducer, robust.trim, robust.max_share) == ("aligned", 0.25, 0.15)
    assert config.resolve({"guard": "robust"}, {"guard": {"trim": 0.1}}).guard == robust.but(trim=0.1)
    assert config.resolve(config.from_assignments(["guard=robust", "guard.trim=0.1"])).guard == robust.but(trim=0.1)
    assert config.resolve({"guard": "default"}).guard == config.resolve({}).guard
    with pytest.raises(InputError, match=r"guard must be a table of keys, or 'default' or 'robust' \(got 'strict'\)"):
        config.resolve({"guard": "strict"})


def test_the_word_is_resolved_in_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said = command("run", *TINY, "--set", "guard=robust", "--out", "run")
    assert code == 0, said
    assert config.from_file(Path("run/experiment.toml"))["guard"]["reducer"] == "aligned"


def test_a_claim_excuses_no_more_than_it_counts_for(run):
    """A site that claims a million samples is not held for one whose updates may be a million times as large."""
    samples = [1_000_000 if client == HOSTILE else 10 for client in range(6)]
    plan = replace(hostile(run, scaled(500.0), norm_bound=1e9, undo_bound=1e9, max_claim=10.0), samples=samples)
    plan = replace(plan, engine=Claiming(plan.engine, samples))
    played = rounds.play_round(plan, run.method.begin(run.setup), 1)
    (rejected,) = played.record.rejected
    assert rejected["client"] == HOSTILE
    assert "times as large as the median" in rejected["reason"]


def test_what_sites_claim_is_capped():
    elsewhere = {"data": "elsewhere", "data_options": {"shape": [1, 8, 8], "classes": 10}, "model": "mlp"}
    assert config.resolve({**elsewhere, "clients": {"partition": "sites", "total": 3, "per_round": 3}}).guard.max_claim == 10.0
    assert config.resolve({}).guard.max_claim is None


# -- units that lose their links ----------------------------------------------------------------------------------------------------


def test_units_without_links_are_found():
    layers = [Entry(("first",), (3, 2)), Entry(("second",), (2, 3))]
    before = Mask(torch.tensor([1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0]).bool(), [6, 6])
    after = Mask(torch.tensor([1, 1, 0, 0, 1, 0, 1, 0, 1, 0, 0, 1]).bool(), [6, 6])
    assert cut_off(layers, before) == []
    assert cut_off(layers, after) == [CutOff("first", 1, 0), CutOff("second", 0, 1)]
    assert cut_off(layers, after, before) == [CutOff("first", 1, 0), CutOff("second", 0, 1)]
    assert cut_off(layers, after, after) == []


def test_lost_units_are_told_with_those_who_voted(tmp_path):
    history: list[dict[str, Any]] = [{"round": 0, "clients": [1, 4]}, {"round": 3, "clients": [2]}]

    def told(**further: Any) -> str:
        (line,) = lost_units([{"round": 0, "cut_off": {"fc1": {"inputs": 7, "outputs": 0}}, **further}, {"round": 3}], history)
        return line.removeprefix("units lost their links in round 0: 7 of fc1 lost all inputs; ")

    assert told() == "clients 1, 4 took part"  # folders of before
    both = {"cancelled": {"4": 7}, "not_kept": {"1": 5, "4": 2}}
    assert told(against=both) == "cancelled in the mean by client 4 (7); most links not kept by clients 1 (5), 4 (2)"
    assert told(against={"not_kept": {str(client): 1 for client in range(21)}}).endswith("19 (1), …")
    assert told(against={"cancelled": {}, "not_kept": {}}) == "by nobody in particular"
    assert told(against=None) == "secure sums do not tell by whom"
    silent: list[dict[str, Any]] = [{"round": 3, "silenced": {"2": 5, "11": 7}}, {"round": 6}, {"round": 9, "silenced": {"2": 9}}]
    cancelled = "units that keep their links were cancelled in the mean in"
    assert lost_units(silent, history) == [f"{cancelled} 2 outer rounds from 3 to 9: by clients 2 (9), 11 (7)"]
    assert lost_units(silent[:2], history) == [f"{cancelled} round 3: by clients 11 (7), 2 (5)"]
    assert lost_units(silent[1:2], history) == []
    sparse: dict[str, Any] = {"recipe": "paper", "data": "toy_images", "model": "mlp", "density": 0.1, "rounds": 4, "engine": "serial"}
    sparse |= {"train": {"epochs": 1}, "model_options": {"hidden": [60, 60]}, "topology": {"interval": 1, "end": 4}}
    sparse |= {"clients": {"total": 5, "per_round": 4, "partition": "iid", "min_size": 1}, "out": str(tmp_path / "run")}
    fedrts.run(**sparse)
    lines = [json.loads(line) for line in (tmp_path / "run/topology.jsonl").read_text().splitlines()]
    assert any("cut_off" in line for line in lines)
    assert any(line["against"]["not_kept"] for line in lines if "cut_off" in line)
    assert not any(line["against"]["cancelled"] for line in lines if "cut_off" in line)  # nobody did
    warnings = inspect_run(tmp_path / "run")["warnings"]
    assert len(warnings) == sum("cut_off" in line for line in lines)
    code, said = command("inspect", str(tmp_path / "run"))
    assert code == 0, said
    code, _ = command("report", str(tmp_path / "run"), "--out", str(tmp_path / "report"))
    assert code == 0
    page = next((tmp_path / "report").glob("*.html")) if (tmp_path / "report").is_dir() else tmp_path / "report"
    assert "units lost their links" in page.read_text("utf-8")


def cut_by(run, attack, clients, rounds_played=12, **guard):
    """Return, for every outer round with lost units, their number and who worked against them."""
    plan = hostile(run, attack, clients=clients, **guard)
    ledger, state, found = ClientRecords.of(plan.guard), run.method.begin(run.setup), []
    for index in range(rounds_played):
        played = rounds.play_round(plan, state, index, ledger)
        state = played.state
        if played.topology is not None and "cut_off" in played.topology:
            found.append((sum(sum(sides.values()) for sides in played.topology["cut_off"].values()), played.topology["against"]))
    return found


def test_who_cuts_units_off_is_named_and_those_who_did_not_are_not(toy):
    """One client cancels what goes into the first units of the first layer, in the mean of all six."""

    def cancel(message, scene):
        layout, mask = scene.order.frame.layout, scene.order.frame.mask
        victims = torch.zeros(len(mask.bits), dtype=torch.bool)
        victims[: layout.layers[0].size // 4] = True
        at = victims[mask.active].nonzero().squeeze(-1)
        weights = message["weights"].clone()
        weights[at] = -len(scene.honest) / scene.hostile * scene.honest[:, at].mean(0)
        return {**message, "weights": weights}

    settings = {"clients": {"total": 6, "per_round": 6, "partition": "iid"}, "topology": {"interval": 3, "end": 12}, "density": 0.3}
    run = toy("fedrts", "mlp", rounds=12, model_options={"hidden": [24, 24]}, **settings)
    found = cut_by(run, cancel, (4,), undo_bound=1e9, median_bound=1e9, large_bound=1e9)
    assert sum(lost for lost, _ in found) >= 3
    for lost, against in found:
        assert against["cancelled"] == {"4": lost}


def test_units_that_are_cancelled_and_keep_their_links_are_told_of(toy):
    """Two of eight cancel the first layer: its units keep links, and nothing comes through."""

    def told(attack):
        run = toy("fedrts", "mlp", clients={"total": 8, "per_round": 8, "partition": "iid"}, topology={"interval": 2, "end": 6}, rounds=6)
        plan = hostile(run, attack, clients=(0, 3), undo_bound=1e9, median_bound=1e9, large_bound=1e9)
        return [played.topology for played in rounds.play(plan, run.method.begin(run.setup), -1) if played.topology is not None]

    def cancel(message, scene):
        links = scene.order.frame.mask.counts[0]
        weights = message["weights"].clone()
        weights[:links] = -len(scene.honest) / scene.hostile * scene.honest[:, :links].mean(0)
        return {**message, "weights": weights}

    lines = told(cancel)
    assert lines
    for line in lines:
        assert line["silenced"].keys() == {"0", "3"}
        assert min(line["silenced"].values()) > 10
    assert not any("silenced" in line for line in told(lambda message, _: message))


def test_secure_sums_do_not_tell_who_cut_units_off(toy):
    settings = {"clients": {"total": 5, "per_round": 5}, "topology": {"interval": 1, "end": 4}, "density": 0.1}
    run = toy("fedrts", "mlp", rounds=4, model_options={"hidden": [60, 60]}, secure={"aggregation": True}, **settings)
    found = [played.topology for played in rounds.play(run.plan, run.method.begin(run.setup), -1) if played.topology]
    cut = [line for line in found if "cut_off" in line]
    assert cut
    assert all(line["against"] is None for line in cut)


# -- what one of ten can do ---------------------------------------------------------------------------------------------------------


@cache
def accuracy_of_ten(attack: str | None) -> float:
    """The mean of the last ten of 25 rounds on digits with default settings, where client 0 of ten attacks."""
    played, _ = ten_on_digits((0,), attack)
    return sum(each.record.accuracy or 0.0 for each in played[-10:]) / 10


def ten_on_digits(attackers: tuple[int, ...], attack: str | Attack | None) -> tuple[list[rounds.Played], ClientRecords]:
    """Play 25 rounds on digits with default settings and ten clients; return them and what the server remembers of clients."""
    settings: dict[str, Any] = {"data": "digits", "rounds": 25, "engine": "serial", "device": "cpu", "eval": {"every": 1}}
    run = assemble(config.resolve({**settings, "clients": {"total": 10, "per_round": 10, "alpha": 1.0}}))
    plan, ledger = run.plan, ClientRecords.of(run.plan.guard)
    assert isinstance(plan.engine, SerialEngine)
    if isinstance(attack, str):
        plan = replace(plan, engine=infiltrated(plan.engine, frozenset(attackers), attack))
    elif attack is not None:
        plan = hostile(run, attack, clients=attackers)
    return list(rounds.play(plan, run.method.begin(run.setup), -1, ledger)), ledger


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
@pytest.mark.parametrize("attack", [name for name in (*ATTACKS, *ADAPTIVE) if name != "statistics"])
def test_one_hostile_client_of_ten_costs_little_and_stops_nothing(attack):
    assert accuracy_of_ten(attack) > accuracy_of_ten(None) - 0.03


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_colluders_of_ten_that_send_nothing_get_nobody_struck():
    played, ledger = ten_on_digits((0, 1, 2, 3), scaled(0.0))
    assert all(len(each.record.clients) == 10 for each in played)
    assert ledger.strikes.quarantined == set()

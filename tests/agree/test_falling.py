"""A density that falls over the outer rounds, for every method that re-draws its mask."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import byhand
import fedrts
from fedrts import config, methods
from fedrts.client.envelope import decode_reply, encode_reply
from fedrts.errors import InputError
from fedrts.methods.contract import Rewire
from fedrts.observe import Silent
from fedrts.server import rounds
from fedrts.server.guard import faults
from fedrts.sparse import budget
from fedrts.sparse.mask import Mask
from fedrts.testing.agreement import UNEQUAL, agree, both
from fedrts.wire import codec
from fedrts.wire.codec import Header, Kind
from fedrts.wire.fields import OnOwnMask, OwnValues
from helping import order_of, round_of

START, END = 0.9, 0.4
OUTER = [0, 2, 4, 6]
TOPOLOGY: dict[str, Any] = {"interval": 2, "end": 8, "density_start": START}
FALLING = [name for name in methods.names() if methods.get(name)().steady() is None]
STEADY = [name for name in methods.names() if name not in FALLING]
OWN = [name for name in FALLING if name in ("feddst", "fedsgc", "fedrts_trial")]
CURVES = {"cubic": lambda p: (1 - p) ** 3, "cosine": lambda p: 0.5 * (1 + math.cos(math.pi * p)), "linear": lambda p: 1 - p}


def falling(toy, method, model="cnn", curve="cubic", **keywords):
    topology = {**TOPOLOGY, "density_schedule": curve, **keywords.pop("topology", {})}
    return toy(method, model, **{"density": END, "rounds": 9, "topology": topology, **keywords})


def erk(layout, density):
    """K^l at a density over all parameters."""
    kept = math.floor(density * layout.parameters) - (layout.parameters - layout.links)
    return tuple(budget.erk([entry.shape for entry in layout.layers], kept))


def densities(curve):
    """d(t) = d_end + (d_start − d_end) · left(p), p = 0 … 1 over the outer rounds."""
    return {t: END + (START - END) * CURVES[curve](place / (len(OUTER) - 1)) for place, t in enumerate(OUTER)}


@pytest.mark.parametrize("model", ["mlp", "cnn", "tiny_gpt"])
@pytest.mark.parametrize("method", FALLING)
def test_every_outer_round_leaves_the_counts_of_the_formula(toy, method, model):
    run = falling(toy, method, model)
    expected, links = densities("cubic"), run.layout.links
    before = counts = None
    for step in rounds.play(run.plan, run.method.begin(run.setup), -1):
        index, mask = step.record.round, step.state.mask
        if index < 0:  # a set-up chose the first mask
            assert sum(mask.counts) == sum(erk(run.layout, START))
            before = mask
            continue
        if index in expected:
            assert step.record.outer
            counts = erk(run.layout, expected[index])
            if method != "fedtiny" or index == OUTER[-1]:  # whose pool has layers of its own
                assert mask.counts == counts
            assert mask.number == sum(counts)
        else:
            assert mask == before
        assert before is None or all(new <= old for new, old in zip(mask.counts, before.counts, strict=True))
        assert step.state.weights[:links][~mask.bits].count_nonzero() == 0
        assert torch.isfinite(step.state.weights).all()
        assert step.record.rejected == []
        before = mask
    fixed = toy(method, model, density=END)
    assert tuple(fixed.setup.counts(END)) == counts, "what a run at the target has"


@pytest.mark.parametrize("curve", CURVES)
def test_every_curve(toy, curve):
    run = falling(toy, "fedrts", "mlp", curve)
    found = {s.record.round: s.state.mask.counts for s in rounds.play(run.plan, run.method.begin(run.setup), -1) if s.record.outer}
    assert found == {t: erk(run.layout, density) for t, density in densities(curve).items()}


@pytest.mark.parametrize("method", ["fedrts", "feddst", "fedrts_trial", "fedcucb"])
def test_layers_that_exchange_links_have_the_same_number_in_all(toy, method):
    run = falling(toy, method, method_options={"scope": "global"})
    for step in rounds.play(run.plan, run.method.begin(run.setup), -1):
        if step.record.outer:
            assert step.state.mask.number == sum(erk(run.layout, densities("cubic")[step.record.round]))
            assert step.record.rejected == []


@pytest.mark.parametrize("options", [{"score": "outcome"}, {"score": "blend"}])
def test_other_scores_fall_too(toy, options):
    run = falling(toy, "fedrts_no_ts", method_options=options)
    last = list(rounds.play(run.plan, run.method.begin(run.setup), -1))[-1]
    assert last.state.mask.counts == erk(run.layout, END)


@pytest.mark.parametrize("group", ["layer", "block"])
def test_all_layers_fall_where_links_are_exchanged_in_one_group(toy, group):
    run = falling(toy, "fedtiny", method_options={"abns": False, "group": group})
    found = {s.record.round: s.state.mask.counts for s in rounds.play(run.plan, run.method.begin(run.setup), -1) if s.record.outer}
    assert found == {t: erk(run.layout, density) for t, density in densities("cubic").items()}


@pytest.mark.parametrize("method", ["fedrts", "feddst", "prunefl", "fedtiny", "fedmef"])
def test_a_run_may_start_dense_and_late(toy, method):
    run = falling(toy, method, topology={"density_start": 1.0, "first_outer": 2, "outer_at_end": True, "end": 6}, rounds=8)
    played = list(rounds.play(run.plan, run.method.begin(run.setup), -1))
    found = {step.record.round: step.state.mask.counts for step in played}
    assert [step.record.round for step in played if step.record.outer] == [2, 4, 6]
    assert found[1] == found[3] == run.layout.sizes
    assert found[4] == found[6] == found[7] == erk(run.layout, END), "the last outer round before T_end, not T_end itself"


def test_the_first_weights_are_scaled_to_the_first_mask(toy):
    plain, scaled = (falling(toy, "fedrts", "mlp", topology={"init_scale": scale}) for scale in ("dense", "sparse"))
    one, other = plain.method.begin(plain.setup), scaled.method.begin(scaled.setup)
    assert one.mask == other.mask
    assert one.mask.counts == erk(plain.layout, START)
    start = 0
    for size, count in zip(plain.layout.sizes, one.mask.counts, strict=True):
        part = slice(start, start + size)
        torch.testing.assert_close(other.weights[part], one.weights[part] * math.sqrt(size / count))
        start += size


@pytest.mark.parametrize("method", STEADY)
def test_a_mask_that_never_changes_has_one_density(toy, method):
    with pytest.raises(InputError, match=f"topology.density_start is not for {method}: .*; leave it out"):
        toy(method, density=END, topology=TOPOLOGY, rounds=9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"topology": {**TOPOLOGY, "density_start": 0.3}}, "topology.density_start = 0.3 must not be below density = 0.4"),
        ({"topology": {**TOPOLOGY, "density_start": 1.5}}, "topology.density_start must be a number > 0 and ≤ 1"),
        ({"topology": {**TOPOLOGY, "interval": 8}}, "two outer rounds before topology.end = 8 to fall between, and there is one"),
        ({"topology": {**TOPOLOGY, "interval": 8, "outer_at_end": True}}, "and there is one: lower topology.interval = 8"),
        ({"topology": {**TOPOLOGY, "interval": 8, "first_outer": 8}}, "and there is none: lower topology.interval = 8"),
        (
            {"topology": {**TOPOLOGY, "density_schedule": "quick"}},
            "topology.density_schedule must be 'cosine', 'cubic', 'linear' or an import",
        ),
        ({"method": "prunefl", "method_options": {"adaptive": True}}, "not for prunefl: with adaptive = true it chooses its size itself"),
    ],
)
def test_mistakes_are_one_line(changes, words):
    with pytest.raises(InputError) as told:
        config.resolve({"density": END, "rounds": 9, "topology": TOPOLOGY, **changes})
    assert words in str(told.value)
    assert "\n" not in str(told.value)


def test_a_curve_of_ones_own_comes_by_import_path(toy, tmp_path, monkeypatch):
    (tmp_path / "mine_falls.py").write_text("def square(progress):\n    return (1 - progress) ** 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    run = falling(toy, "fedrts", "mlp", "mine_falls:square")
    found = {s.record.round: s.state.mask.counts for s in rounds.play(run.plan, run.method.begin(run.setup), -1) if s.record.outer}
    assert found == {t: erk(run.layout, END + (START - END) * (1 - place / 3) ** 2) for place, t in enumerate(OUTER)}


# -- what methods do with it ---------------------------------------------------------------------------------------------


def thinned(run, index=2):
    """The state before the first round in which links are lost, and what is known of that round."""
    state = run.method.begin(run.setup)
    for step in rounds.play(replace(run.plan, rounds=index), state, -1):
        state = step.state
    return state, run.plan.round(index, state.mask)


@pytest.mark.parametrize(("method", "score"), [("prunefl", "squares"), ("fedtiny", "growth"), ("feddst", "gradient")])
def test_drop_and_grow_link_by_link(toy, method, score):
    """The weakest go until T^l − Q^l are left, the Q^l most promising come."""
    run = falling(toy, method, method_options={"abns": False} if method == "fedtiny" else {})
    state, current = thinned(run)
    sizes, generator = state.mask.sizes, torch.Generator().manual_seed(5)
    weights, promise = torch.randn(run.layout.length, generator=generator), torch.randn(run.layout.links, generator=generator).abs()
    kept, new = run.method.rewired({"weights": weights, score: promise}, state.mask, current)
    active = set(state.mask.active.tolist())
    quotas = [
        min(math.floor(byhand.fraction(2, 8, 0.4) * target), size - count)
        for target, size, count in zip(erk(run.layout, densities("cubic")[2]), sizes, state.mask.counts, strict=True)
    ]
    assert sum(quotas) > 0
    stay, there = set(), set()
    for layer, q, target in zip(byhand.spans(sizes), quotas, erk(run.layout, densities("cubic")[2]), strict=True):
        mine = set(byhand.largest({i: abs(float(weights[i])) for i in layer if i in active}, target - q))
        stay |= mine
        there |= mine | set(byhand.largest({i: float(promise[i]) for i in layer if i not in mine}, q))
    assert set(kept.active.tolist()) == stay
    assert set(new.active.tolist()) == there
    assert new.counts == erk(run.layout, densities("cubic")[2])


def test_bandits_judge_as_many_links_important_as_are_sure_to_stay(toy):
    run = falling(toy, "fedrts")
    state, current = thinned(run)
    weights = torch.randn(len(state.values), generator=torch.Generator().manual_seed(1))
    found = run.method.core({"weights": weights}, current).split(list(state.mask.counts))
    targets = erk(run.layout, densities("cubic")[2])
    assert [int(part.sum()) for part in found] == [t - q for t, q in zip(targets, current.quota, strict=True)]
    start = 0
    for part, count in zip(found, state.mask.counts, strict=True):
        strength = weights[start : start + count].abs()
        assert strength[part].min() >= (strength[~part].max() if bool((~part).any()) else 0)
        start += count


def test_fedmef_extrudes_all_that_goes(toy):
    run = falling(toy, "fedmef")
    state, current = thinned(run)
    marks = run.method.training(current).marked(state.weights[: run.layout.parameters], state.mask)
    gone = [k - t + q for k, t, q in zip(state.mask.counts, erk(run.layout, densities("cubic")[2]), current.quota, strict=True)]
    assert [int(part.sum()) for part in marks[: run.layout.links].split(list(state.mask.sizes))] == gone
    assert sum(gone) > sum(current.quota)


def test_fedrts_early_drops_by_draw_what_goes(toy):
    run = falling(toy, "fedrts_early")
    state, current = thinned(run)
    kept = run.method.dropped(state, current, lambda purpose: 3)
    assert [t - q for t, q in zip(erk(run.layout, densities("cubic")[2]), current.quota, strict=True)] == list(kept.counts)
    assert not (kept.bits & ~state.mask.bits).any()


# -- what travels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value_type", ["float32", "int8"])
@pytest.mark.parametrize("method", FALLING)
def test_messages_survive_the_wire_and_are_as_long_as_counted(toy, method, value_type):
    run = falling(toy, method, wire={"value_type": value_type})
    state, current = thinned(run)
    assert current.targets != current.counts
    (exchange,) = run.plan.exchanges(current)
    order = order_of(run, exchange, state, 2)
    samples = dict(enumerate(run.plan.samples))
    for reply in run.plan.engine.run(order, [0, 3]):
        data = encode_reply(reply, order)
        assert len(data) == codec.size(Kind.UPLOAD, exchange.up, reply.message, order.upload_frame())
        assert len(data) <= codec.most(exchange.up, order.frame)
        assert faults([decode_reply(data, order)], order, run.plan.guard, samples) == [None]
    after = rounds.play_round(run.plan, state, 2).state
    changed = order_of(run, run.plan.exchanges(run.plan.round(3, after.mask))[0], after, 3)
    header = Header(Kind.DOWNLOAD, bytes.fromhex(run.layout.fingerprint), after.mask.fingerprint, 3, 0, 0)
    data = codec.encode(header, changed.exchange.down, changed.sent, changed.frame, held=state.mask)
    assert len(data) == codec.size(Kind.DOWNLOAD, changed.exchange.down, changed.sent, changed.frame, state.mask)
    _, mask, _ = codec.open_download(data, run.layout, state.mask)
    assert mask == after.mask


@pytest.mark.parametrize("method", OWN)
def test_the_guard_wants_masks_of_the_target(toy, method):
    run = falling(toy, method)
    state, current = thinned(run)
    (exchange,) = run.plan.exchanges(current)
    order, samples = order_of(run, exchange, state, 2), dict(enumerate(run.plan.samples))
    (reply,) = run.plan.engine.run(order, [0])
    assert reply.message["weights"].mask.counts == current.targets
    old = replace(reply, message={"weights": OwnValues(state.mask, state.values)})
    again = decode_reply(encode_reply(old, order), order)
    (told,) = faults([again], order, run.plan.guard, samples)
    assert told == f"layers have {current.counts} links where {current.targets} were asked for"


def test_clients_that_lose_links_on_the_way_count_the_work_that_is_left(toy):
    """FedDST trains half of its epochs before links go, and half after."""
    run = falling(toy, "feddst", clients={"total": 1, "per_round": 1}, train={"epochs": 2, "batch_size": 60})
    state, _ = thinned(run)
    record = rounds.play_round(run.plan, state, 2).record
    macs, sizes = run.bench.macs, state.mask.sizes
    before, after = macs.at(state.mask.counts, sizes), macs.at(erk(run.layout, densities("cubic")[2]), sizes)
    assert record.flops == pytest.approx(120 * 3 * before + 60 * (before + 2 * macs.dense) + 120 * 3 * after)


def test_without_counts_an_own_mask_has_as_many_links_as_the_one_that_was_sent(toy):
    run = toy("feddst")
    state = run.method.begin(run.setup)
    (exchange,) = run.method.exchanges(run.plan.round(0, state.mask))
    assert any(isinstance(step, Rewire) for step in exchange.steps)
    order = order_of(run, replace(exchange, up={"weights": OnOwnMask()}), state, 0)
    (reply,) = run.plan.engine.run(order, [0])
    samples = dict(enumerate(run.plan.samples))
    assert faults([reply], order, run.plan.guard, samples) == [None]
    fewer = Mask.top(torch.zeros(len(state.mask.bits)), [1] * len(state.mask.sizes), state.mask.sizes)
    short = replace(reply, message={"weights": OwnValues(fewer, fewer.compact(state.weights))})
    assert "were asked for" in str(faults([short], order, run.plan.guard, samples)[0])


# -- engines, checkpoints, reports ---------------------------------------------------------------------------------------

FEW = ("fedrts", "feddst", "fedmef", "prunefl", "fedsgc")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("method", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in FALLING])
def test_clients_side_by_side_are_clients_one_after_the_other(toy, method):
    agree(*both(falling(toy, method, clients=UNEQUAL, topology={"end": 5}, train={"epochs": 2}, rounds=6)))


class Stop(Exception):
    """A run is cut off."""


class Stopper(Silent):
    def __init__(self, after):
        self.after = after

    def played(self, record):
        if record.round == self.after:
            raise Stop


RUN: dict[str, Any] = {"data": "digits", "model_options": {"hidden": [16]}, "density": 0.4, "clients": 4, "engine": "serial"}
RUN |= {"train": {"epochs": 1, "batch_size": 32, "lr": 0.1}, "topology": {"interval": 2, "density_start": 0.8}}
RUN |= {"checkpoint": {"every": 1}, "eval": {"fairness": False}}


@pytest.mark.parametrize("method", ["fedrts", "feddst"])
def test_a_run_that_is_cut_off_or_prolonged_falls_as_it_was_planned(tmp_path, method):
    reference = fedrts.run(**RUN, method=method, rounds=8, out=tmp_path / "whole")  # T_end is 4: outer rounds 0 and 2
    with pytest.raises(Stop):
        fedrts.run(**RUN, method=method, rounds=8, out=tmp_path / "cut", observer=Stopper(1))
    resumed = fedrts.resume(tmp_path / "cut")
    assert torch.equal(resumed.state.weights, reference.state.weights)
    assert resumed.state.mask == reference.state.mask
    without = [[{key: line[key] for key in line if key != "seconds"} for line in result.history] for result in (resumed, reference)]
    assert without[0] == without[1]
    assert (reference.history[1]["density"] > 0.75, reference.history[2]["density"] <= 0.4) == (True, True)
    assert reference.summary["density_target"] == 0.4
    assert reference.summary["density"] == reference.history[-1]["density"] <= 0.4
    with pytest.warns(match="the topology is fixed from round 4 on, as planned"):
        longer = fedrts.resume(tmp_path / "whole", rounds=12)
    assert [line["density"] for line in longer.history[:8]] == [line["density"] for line in reference.history]
    assert {line["density"] for line in longer.history[8:]} == {reference.summary["density"]}


def test_costs_are_those_of_the_first_rounds(toy):
    alone = {"total": 1, "per_round": 1, "partition": "iid", "min_size": 1}
    run = falling(toy, "feddst", clients=alone)
    settings = {name: value for name, value in run.experiment.model_dump().items() if name != "out"}
    cost = fedrts.cost(**settings, exact=True)
    assert (cost.density, cost.density_start, cost.as_dict()["density_start"]) == (END, START, START)
    records = [step.record for step in rounds.play(replace(run.plan, rounds=2), run.method.begin(run.setup), -1)]
    for name, record in zip(("outer", "inner"), records, strict=True):
        assert cost.row("measured", name).upload_bytes == record.upload_bytes
        assert cost.row("measured", name).flops == pytest.approx(record.flops)
    at_start, at_end = (fedrts.cost(**{**settings, "density": density, "topology": {"interval": 2, "end": 8}}) for density in (START, END))
    for accounting in ("paper", "rules"):
        assert cost.row(accounting, "inner").upload_bytes == at_start.row(accounting, "inner").upload_bytes
        assert cost.row(accounting, "inner").upload_bytes > at_end.row(accounting, "inner").upload_bytes


def test_a_round_without_a_fall_keeps_its_counts(toy):
    run = toy("fedrts")
    mask = run.method.begin(run.setup).mask
    current = round_of(0, run.plan.schedule, mask)
    assert (current.targets, current.fewer, current.outgoing) == (mask.counts, None, current.quota)

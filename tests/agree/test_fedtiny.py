"""FedTiny against its equations: progressive pruning link by link, groups, and the choice of the starting mask."""

import copy
import itertools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import byhand
import fedrts
from fedrts.client.envelope import encode_reply
from fedrts.methods import FedTiny
from fedrts.methods.contract import Calibrate, Evaluate, Exchange, Means, ProbeGradient, Round, Setup, State, Train
from fedrts.observe import Silent
from fedrts.server import rounds
from fedrts.server.aggregate import Sums
from fedrts.sparse import budget, random
from fedrts.sparse.layout import Entry, Layout
from fedrts.sparse.mask import Mask
from fedrts.sparse.schedule import Schedule
from fedrts.wire import codec
from fedrts.wire.codec import Header, Kind
from fedrts.wire.fields import Masks, Selection, Values
from helping import ask, order_of, round_of

PLAIN = {"abns": False}


# -- progressive pruning --------------------------------------------------------------------------------------------------


def test_a_client_trains_by_plain_sgd_and_names_its_largest_gradients(toy):
    """Training, the probe and the choice in NumPy, from the weights that the client received."""
    run = toy("fedtiny", "mlp", method_options=PLAIN, train={"epochs": 2, "lr": 0.1}, clients=byhand.UNEQUAL)
    state = run.method.begin(run.setup)
    current = run.plan.round(0, state.mask)
    (exchange,) = run.method.exchanges(current)
    client = 3
    (reply,) = ask(run, exchange, state, 0, [client])
    sizes, active = run.layout.sizes, set(state.mask.active.tolist())
    assert list(current.quota) == byhand.quota(0, 6, 0.4, byhand.counts(active, sizes), sizes)

    model = byhand.Perceptron(run.layout.views(state.weights))
    masks = {name: bits.numpy() for name, bits in run.layout.by_name(state.mask.bits).items()}
    for x, y in byhand.batches(run, 0, client, range(2)):
        model.step(model.gradient(x, y), masks, 0.1)
    trained = state.mask.expand(reply.message["weights"])
    torch.testing.assert_close(trained.double(), torch.from_numpy(model.flat(run.layout.entries)), rtol=1e-4, atol=1e-6)

    gradient = model.gradient(*byhand.batches(run, 0, client, [2])[0])
    flat = [float(g) for entry in run.layout.layers for g in gradient[entry.name].ravel()]
    expected = byhand.uploads(flat, active, sizes, current.quota)
    growth = reply.message["growth"]
    assert growth.indices.tolist() == sorted(expected)
    assert growth.values.tolist() == pytest.approx([expected[i] for i in sorted(expected)], rel=1e-3, abs=1e-6)
    assert any(value < 0 for value in growth.values.tolist()), "values keep their sign"


@pytest.mark.parametrize("model", ["mlp", "cnn"])
@pytest.mark.parametrize("first_outer", [0, 2])
def test_rounds_link_by_link(toy, model, first_outer):
    """Outer, inner, outer, … (or inner, inner, outer, …): uploads, weighted sums, the RigL step, zeros for what is new."""
    schedule = {"interval": 2, "end": 6, "first_outer": first_outer, "adjust": 0.5}
    run = toy("fedtiny", model, method_options=PLAIN, topology=schedule, clients=byhand.UNEQUAL)
    state = run.method.begin(run.setup)
    links, sizes = run.layout.links, run.layout.sizes
    outers = []
    for index in range(4):
        _, samples, trained, gradients, replies = byhand.asked_for_everything(run, state, index)
        assert len(set(samples)) > 1
        after = rounds.play_round(run.plan, state, index).state
        averaged = byhand.mean(trained, samples)
        active = set(state.mask.active.tolist())
        kept = new = active
        if gradients is not None:
            outers.append(index)
            quotas = byhand.quota(index, 6, 0.5, byhand.counts(active, sizes), sizes)
            assert sum(quotas) > 0
            named = [byhand.uploads(gradient, active, sizes, quotas) for gradient in gradients]
            for mine, reply in zip(named, replies, strict=True):
                selection = reply.message["growth"]
                assert dict(zip(selection.indices.tolist(), selection.values.tolist(), strict=True)) == mine
            promise = [abs(g) for g in byhand.mean_of_named(named, samples, links)]
            kept, new = byhand.rigl([abs(w) for w in averaged], promise, active, sizes, quotas)
            assert [len(new.intersection(layer) - kept) for layer in byhand.spans(sizes)] == quotas
        assert set(after.mask.active.tolist()) == new
        expected = [w if i in kept or i >= links else 0.0 for i, w in enumerate(averaged)]
        torch.testing.assert_close(after.weights.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-7)
        assert [float(after.weights[i]) for i in new - kept] == [0.0] * len(new - kept)
        state = after
    assert outers == ([0, 2] if first_outer == 0 else [2])


@st.composite
def uploads(draw):
    """A mask, quotas, and up to four clients that name up to Q inactive links of each layer with values above 0."""
    sizes = draw(st.lists(st.integers(2, 8), min_size=1, max_size=3))
    counts = [draw(st.integers(1, size - 1)) for size in sizes]
    mask = Mask.top(random.uniform(draw(st.integers(0, 10**6)), sum(sizes)), counts, sizes)
    weights = torch.tensor(draw(st.lists(st.integers(-5, 5), min_size=sum(counts), max_size=sum(counts)))).float()
    quotas = byhand.quota(0, 10, 1.0, counts, sizes)
    clients = []
    for _ in range(draw(st.integers(1, 4))):
        named: dict[int, float] = {}
        for layer, q in zip(byhand.spans(sizes), quotas, strict=True):
            off = [i for i in layer if not mask.bits[i]]
            chosen = draw(st.lists(st.sampled_from(off), unique=True, max_size=q)) if q else []
            named |= {i: float(draw(st.integers(1, 4))) for i in chosen}
        clients.append((draw(st.integers(1, 9)), dict(sorted(named.items()))))
    return mask, weights, quotas, clients


@given(uploads())
def test_a_link_that_nobody_named_grows_only_where_too_few_were_named(case):
    mask, weights, quotas, clients = case
    method, current = FedTiny(density=0.5, abns=False), round_of(0, Schedule(1, 10, adjust=1.0), mask)
    assert list(current.quota) == quotas
    state, sums = State(torch.zeros(mask.number), mask), Sums()
    for samples, named in clients:
        selection = Selection(torch.tensor(list(named), dtype=torch.int64), len(mask.bits), torch.tensor(list(named.values())))
        sums.add(method.contribution({"weights": weights, "growth": selection}, state, current), samples)
    after = method.update(state, sums.mean(), current, lambda purpose: 0)
    promise = byhand.mean_of_named([named for _, named in clients], [n for n, _ in clients], len(mask.bits))
    strength = mask.expand(weights).abs().tolist()
    kept, new = byhand.rigl(strength, promise, set(mask.active.tolist()), mask.sizes, quotas)
    assert set(after.mask.active.tolist()) == new
    anyone = set().union(*(named for _, named in clients))
    for layer, q in zip(byhand.spans(mask.sizes), quotas, strict=True):
        grown = new.intersection(layer) - kept
        assert grown <= anyone or len(anyone.intersection(layer)) < q
        assert len(grown) == q


# -- groups ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_outer", [0, 3])
def test_one_layer_at_a_time_from_the_output_to_the_input(toy, first_outer):
    """Three layers and an interval of three: by the round's number always the same layer would be visited."""
    schedule = {"interval": 3, "end": 20, "first_outer": first_outer, "layer_density": "uniform", "adjust": 0.5}
    run = toy("fedtiny", "cnn", method_options={"abns": False, "group": "layer"}, topology=schedule, rounds=20)
    state = run.method.begin(run.setup)
    visited = []
    for step in rounds.play(run.plan, state, -1):
        changed = [
            layer
            for layer, (before, after) in enumerate(
                zip(*(s.mask.bits.split(list(run.layout.sizes)) for s in (state, step.state)), strict=True)
            )
            if not torch.equal(before, after)
        ]
        if step.record.outer and sum(run.plan.round(step.record.round, state.mask).quota) > 0:
            assert len(changed) <= 1
            visited += changed
        else:
            assert changed == []
        assert step.state.mask.counts == state.mask.counts
        state = step.state
    assert visited[:5] == [2, 1, 0, 2, 1]


def test_clients_name_links_of_the_current_group_only(toy):
    run = toy("fedtiny", "cnn", method_options={"abns": False, "group": "layer"}, topology={"layer_density": "uniform"})
    state = run.method.begin(run.setup)
    bounds = [0, *itertools.accumulate(run.layout.sizes)]
    for index, layer in ((0, 2), (3, 1)):
        (exchange,) = run.method.exchanges(run.plan.round(index, state.mask))
        (reply,) = ask(run, exchange, state, index, [1])
        indices = reply.message["growth"].indices
        assert len(indices) == run.plan.round(index, state.mask).quota[layer] > 0
        assert bool(((indices >= bounds[layer]) & (indices < bounds[layer + 1])).all())


RESNET = [
    "conv1.weight",
    *(
        f"layer{stage}.{block}.{part}.weight"
        for stage in (1, 2, 3, 4)
        for block in (0, 1)
        for part in ("conv1", "conv2", *(["downsample.0"] if stage > 1 and block == 0 else []))
    ),
]
GPT = [f"transformer.h.{block}.{part}.weight" for block in (0, 1) for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]


def named_layout(names):
    return Layout(tuple(Entry((name,), (10,)) for name in names), (), ())


def blocks_by_name(names):
    return [[names[i] for i in block] for block in named_layout(names).blocks()]


@pytest.mark.parametrize(
    ("names", "lengths"),
    [
        (RESNET, [5, 5, 5, 5]),  # the stem with the first stage
        ([*RESNET, "fc.weight"], [5, 5, 5, 6]),  # a prunable output with the last
        ([f"model.{name}" for name in RESNET], [5, 5, 5, 5]),
        (["model.stem.weight", *(f"model.{name}" for name in RESNET[1:]), "model.fc.weight"], [5, 5, 5, 6]),
        (["transformer.wte.weight", *GPT], [5, 4]),
        (["transformer.wte.weight", "transformer.wpe.weight", *GPT], [6, 4]),
        (["tokens.weight", "positions.weight", *(name.replace("transformer.h", "blocks") for name in GPT)], [6, 4]),
        (["tokens.weight", *(name.replace("transformer.h", "blocks") for name in GPT), "head.weight"], [5, 5]),
        (["gpt.wte.weight", *(name.replace("transformer", "gpt") for name in GPT), "gpt.lm_head.weight"], [5, 5]),
        (["0.weight", "2.weight", "4.weight"], [1, 1, 1]),
        (["0.0.weight", "1.0.weight", "2.0.weight"], [1, 1, 1]),
        (["features.0.weight", "features.3.weight", "classifier.1.weight"], [1, 1, 1]),
        (["encoder.weight", "decoder.weight"], [1, 1]),
        (["only.weight"], [1]),
    ],
)
def test_blocks_are_runs_of_neighbours_from_input_to_output(names, lengths):
    blocks = named_layout(names).blocks()
    assert [i for block in blocks for i in block] == list(range(len(names)))
    assert [len(block) for block in blocks] == lengths


def test_the_blocks_of_a_resnet_are_its_stages():
    for number, block in enumerate(blocks_by_name(RESNET), start=1):
        assert {name.split(".")[0] for name in block} == ({"conv1", "layer1"} if number == 1 else {f"layer{number}"})


@pytest.mark.parametrize("interval", [1, 2, 4, 10, 12])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("group", ["layer", "block"])
def test_every_group_has_its_turn_whatever_the_interval(interval, late, group):
    """The cycle follows the number of the outer round; round mod 4 with an interval of ten would see two of four stages."""
    layout = named_layout(RESNET)
    mask = Mask.top(random.uniform(1, layout.links), [5] * len(RESNET), layout.sizes)
    schedule = Schedule(interval, 10_000, adjust=1.0, first_outer=interval if late else 0)
    groups = [[i] for i in range(len(RESNET))] if group == "layer" else layout.blocks()
    method, seen = FedTiny(density=0.5, group=group), []
    for t in range(interval * (2 * len(groups) + 1)):
        if schedule.is_outer(t):
            quotas = method.quota(Round.of(t, schedule, mask, layout))
            seen.append([layer for layer, q in enumerate(quotas) if q])
    assert seen[: 2 * len(groups)] == groups[::-1] * 2


def test_one_block_at_a_time_in_a_running_federation(toy):
    """A transformer of two blocks, the embeddings with the first: the second is adjusted first."""
    schedule = {"interval": 2, "end": 8, "adjust": 0.5, "layer_density": "uniform"}
    options = {"width": 8, "layers": 2, "heads": 2}
    run = toy("fedtiny", "tiny_gpt", method_options={"abns": False, "group": "block"}, topology=schedule, model_options=options, rounds=8)
    names = [entry.name for entry in run.layout.layers]
    state, turns = run.method.begin(run.setup), []
    for step in rounds.play(replace(run.plan, rounds=6), state, -1):
        if step.record.outer:
            assert step.topology is not None
            turns.append({name for name, count in step.topology["changed"].items() if count})
    second = {name for name in names if name.startswith("transformer.h.1")}
    assert turns[0]
    assert turns[1]
    assert turns[0] <= second
    assert not turns[1] & second
    assert turns[2] <= second


# -- the choice of the starting mask --------------------------------------------------------------------------------------


def test_every_candidate_has_exactly_the_budget(toy):
    run = toy("fedtiny", "cnn", density=0.3, method_options={"candidates": 7})
    state = run.method.begin(run.setup)
    assert state.mask.is_full
    assert torch.equal(state.weights, run.setup.weights)
    masks = [Mask(bits, run.layout.sizes) for bits in state["pool"]]
    kept = math.floor(0.3 * run.layout.parameters) - (run.layout.parameters - run.layout.links)
    assert [mask.number for mask in masks] == [kept] * 7
    assert len({mask.counts for mask in masks}) > 1, "the layers' densities vary"
    assert len({mask.fingerprint for mask in masks}) == 7


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5),
    st.floats(0.05, 1.0),
    st.integers(0, 10**6),
)
def test_candidates_spread_the_budget_within_half_and_one_and_a_half(shapes, density, seed):
    layout = Layout(tuple(Entry((f"{i}.weight",), shape) for i, shape in enumerate(shapes)), (Entry(("b",), (2,)),), ())
    setup = Setup(layout, torch.randn(layout.length), (1,), rng=lambda purpose: random.key(seed, purpose))
    kept = math.floor(density * layout.parameters) - 2
    if kept < len(shapes):
        return
    mask = FedTiny(density=density).candidate(setup, 0)
    assert mask.number == min(kept, layout.links)
    ratios = [
        ((count - 1) / plan, (count + 1) / plan)
        for count, plan, size in zip(mask.counts, budget.erk(shapes, mask.number), layout.sizes, strict=True)
        if 1 < count < size
    ]
    for (low, _), (_, high) in itertools.permutations(ratios, 2):
        assert low <= 3 * high + 1e-9, "1.5 / 0.5 is the most that two layers' densities can drift apart, up to rounding"


def hand_made_choice(run, state, passes):
    """(mean losses, mean statistics by name) of every candidate, with a plain module: train-mode passes, then evaluation."""
    clients = run.plan.sample(0)
    samples = [len(run.rows[client]) for client in clients]
    shares = [n / sum(samples) for n in samples]
    losses, statistics = [], []
    for bits in state["pool"]:
        masked = state.weights.clone()
        masked[: run.layout.links] *= bits
        module = copy.deepcopy(run.module)
        module.load_state_dict(run.layout.state_dict(masked))
        averaged = {entry.name: torch.zeros((), dtype=torch.float64) for entry in run.layout.buffers}
        for client, share in zip(clients, shares, strict=True):
            mine = copy.deepcopy(module).train()
            with torch.no_grad():
                for x, _ in byhand.batches(run, -1, client, range(passes)):
                    mine(x)
            for name in averaged:
                averaged[name] = averaged[name] + share * mine.state_dict()[name].double()
        module.load_state_dict({**module.state_dict(), **{name: value.float() for name, value in averaged.items()}})
        module.eval()
        with torch.no_grad():
            mean = [float(F.cross_entropy(module(run.data.x[run.rows[c]]), run.data.y[run.rows[c]])) for c in clients]
        losses.append(sum(share * loss for share, loss in zip(shares, mean, strict=True)))
        statistics.append(averaged)
    return losses, statistics


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_clients_choose_the_candidate_of_least_mean_loss(toy, seed):
    run = toy("fedtiny", "cnn", seed=seed, clients=byhand.UNEQUAL, method_options={"candidates": 4, "passes": 2})
    state = run.method.begin(run.setup)
    first, second = run.method.exchanges(run.plan.round(-1, state.mask))
    assert [type(step) for step in first.steps + second.steps] == [Calibrate, Evaluate]
    losses, statistics = hand_made_choice(run, state, passes=2)
    best = min(range(4), key=losses.__getitem__)
    assert sorted(losses)[1] - losses[best] > 1e-5, "the choice does not hang on rounding"

    after = rounds.play_round(run.plan, state, -1).state
    assert torch.equal(after.mask.bits, state["pool"][best])
    assert after.memory == {}
    views = run.layout.views(after.weights)
    for name, expected in statistics[best].items():
        torch.testing.assert_close(views[name].double(), expected, rtol=1e-4, atol=1e-6)
        assert not torch.equal(views[name], run.layout.views(state.weights)[name])
    parameters = run.layout.parameters
    assert torch.equal(after.weights[:parameters], after.mask.expand(after.mask.compact(state.weights))[:parameters])


def test_statistics_and_losses_are_those_of_each_client(toy):
    """What one client uploads in either exchange, candidate by candidate."""
    run = toy("fedtiny", "cnn", clients={**byhand.UNEQUAL, "per_round": 1}, method_options={"candidates": 3, "passes": 3})
    state = run.method.begin(run.setup)
    losses, statistics = hand_made_choice(run, state, passes=3)
    first, second = run.method.exchanges(run.plan.round(-1, state.mask))
    (reply,) = ask(run, first, state, -1, run.plan.sample(0))
    expected = torch.cat([torch.cat([found[e.name].flatten() for e in run.layout.buffers]) for found in statistics])
    torch.testing.assert_close(reply.message["statistics"].double(), expected, rtol=1e-4, atol=1e-6)
    state = state.remember(statistics=reply.message["statistics"])
    order = order_of(run, second, state, -1, 1)
    (reply,) = run.plan.engine.run(order, run.plan.sample(0))
    assert reply.message["losses"].tolist() == pytest.approx(losses, rel=1e-4)


def test_averages_over_all_batches_do_not_mix_candidates(toy):
    """BatchNorm(momentum=None) divides by the number of batches so far; every candidate starts to count anew."""
    run = toy("fedtiny", "cnn", clients={**byhand.UNEQUAL, "per_round": 1}, method_options={"candidates": 3, "passes": 2})
    for part in run.module.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.momentum = None
    state = run.method.begin(run.setup)
    _, statistics = hand_made_choice(run, state, passes=2)
    first, _ = run.method.exchanges(run.plan.round(-1, state.mask))
    (reply,) = ask(run, first, state, -1, run.plan.sample(0))
    expected = torch.cat([torch.cat([found[e.name].flatten() for e in run.layout.buffers]) for found in statistics])
    torch.testing.assert_close(reply.message["statistics"].double(), expected, rtol=1e-4, atol=1e-6)


def test_a_probe_leaves_the_count_of_batches_alone(toy):
    run = toy("random", "cnn", train={"epochs": 2})
    for part in run.module.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.momentum = None
    state = run.method.begin(run.setup)
    trained = []
    for probes in ((), (ProbeGradient(),)):
        exchange = Exchange({"weights": Values()}, (Train(stop=0.5), *probes, Train(start=0.5)), {"weights": Values()})
        (reply,) = ask(run, exchange, state, 0, [1])
        trained.append(reply.message["weights"])
    assert torch.equal(*trained)


def test_losses_are_weighted_by_samples():
    """30 and 10 samples: 0.6 and 2.0 against 0.9 and 0.9 are 0.95 and 0.9; without weights 1.3 and 0.9; the third has 0.6 and 1.2."""
    pool = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]], dtype=torch.bool)
    mask = Mask.full([4])
    state = State(torch.arange(1.0, 5.0), mask).remember(pool=pool)
    method, current, sums = FedTiny(density=0.5, candidates=3), round_of(-1, Schedule(1, 10), mask), Sums()
    sums.add({"losses": torch.tensor([0.6, 0.9, 0.8])}, 30)
    sums.add({"losses": torch.tensor([1.9, 0.9, 0.9])}, 10)  # means 0.925, 0.9, 0.825; plain means 1.25, 0.9, 0.85
    assert torch.equal(method.update(state, sums.mean(), current, lambda purpose: 0).mask.bits, pool[2])
    sums = Sums()
    sums.add({"losses": torch.tensor([0.6, 0.9, 0.8])}, 30)
    sums.add({"losses": torch.tensor([1.0, 0.5, 1.9])}, 10)  # means 0.7, 0.8, 1.075; plain means 0.8, 0.7, 1.35
    after = method.update(state, sums.mean(), current, lambda purpose: 0)
    assert torch.equal(after.mask.bits, pool[0])
    assert after.values.tolist() == [1.0, 2.0]


def test_models_without_batchnorm_are_judged_in_one_exchange_by_loss(toy):
    run = toy("fedtiny", "mlp", clients=byhand.UNEQUAL, method_options={"candidates": 4})
    state = run.method.begin(run.setup)
    (exchange,) = run.method.exchanges(run.plan.round(-1, state.mask))
    assert [type(step) for step in exchange.steps] == [Evaluate]
    assert set(exchange.up) == {"losses"}
    losses, _ = hand_made_choice(run, state, passes=0)
    best = min(range(4), key=losses.__getitem__)
    assert sorted(losses)[1] - losses[best] > 1e-5
    after = rounds.play_round(run.plan, state, -1).state
    assert torch.equal(after.mask.bits, state["pool"][best])
    assert after.memory == {}


def test_without_selection_there_is_no_set_up(toy):
    run = toy("fedtiny", "cnn", method_options=PLAIN, rounds=1, topology={"end": 1})
    plain = toy("random", "cnn")
    state = run.method.begin(run.setup)
    assert state.memory == {}
    assert state.mask == plain.method.begin(plain.setup).mask
    assert run.method.exchanges(run.plan.round(-1, state.mask)) == ()
    assert [step.record.round for step in rounds.play(run.plan, state, -1)] == [0]


RUN: dict[str, Any] = {
    "data": "toy_images",
    "model": "cnn",
    "model_options": {"width": 4},
    "method": "fedtiny",
    "density": 0.5,
    "rounds": 4,
    "clients": {"total": 5, "per_round": 3, "partition": "iid", "min_size": 1},
    "train": {"epochs": 1, "batch_size": 8, "lr": 0.1},
    "topology": {"interval": 2, "end": 4},
    "checkpoint": {"every": 1},
}


class Stopped(Exception):
    """The run ends here."""


class StopsAfterTheSetUp(Silent):
    def played(self, record):
        if record.round == -1:
            raise Stopped


def lines(folder, name):
    return [{**json.loads(line), "seconds": 0} for line in (folder / name).read_text("utf-8").splitlines()]


def test_the_set_up_is_a_line_of_the_history_and_a_run_resumes_after_it(tmp_path, toy):
    whole = fedrts.run(**RUN, out=tmp_path / "whole")
    history = lines(tmp_path / "whole", "history.jsonl")
    assert [line["round"] for line in history] == [-1, 0, 1, 2, 3]
    assert history[0]["clients"] == history[1]["clients"]
    assert history[0]["accuracy"] is None
    assert not history[0]["outer"]
    assert [line["round"] for line in lines(tmp_path / "whole", "topology.jsonl")] == [0, 2]

    with pytest.raises(Stopped):
        fedrts.run(**RUN, out=tmp_path / "broken", observer=StopsAfterTheSetUp())
    assert [line["round"] for line in lines(tmp_path / "broken", "history.jsonl")] == [-1]
    resumed = fedrts.resume(tmp_path / "broken")
    assert lines(tmp_path / "broken", "history.jsonl") == history
    assert lines(tmp_path / "broken", "topology.jsonl") == lines(tmp_path / "whole", "topology.jsonl")
    assert torch.equal(resumed.state.weights, whole.state.weights)
    assert resumed.state.mask == whole.state.mask
    for file in ("model.safetensors", "masks.safetensors"):
        assert (tmp_path / "broken" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert resumed.summary["upload_bytes"] == whole.summary["upload_bytes"]


def test_the_set_up_costs_what_its_messages_are_long(toy):
    run = toy("fedtiny", "cnn", method_options={"candidates": 3})
    state = run.method.begin(run.setup)
    record = rounds.play_round(run.plan, state, -1).record
    pool = {"pool": Masks("pool", 3)}
    up = down = 0
    held = None
    for number, exchange in enumerate(run.method.exchanges(run.plan.round(-1, state.mask))):
        assert pool.items() <= exchange.down.items()
        order = order_of(run, exchange, state, -1, number)
        sums = Sums()
        for reply in run.plan.engine.run(order, record.clients):
            up += len(encode_reply(reply, order))
            header = Header(Kind.DOWNLOAD, bytes.fromhex(run.layout.fingerprint), state.mask.fingerprint, -1, number, reply.client)
            down += len(codec.encode(header, exchange.down, order.sent, order.frame, held))
            sums.add(reply.message, reply.samples)
        state, held = run.method.update(state, sums.mean(), order.round, lambda purpose: 0), state.mask
    assert (record.upload_bytes, record.download_bytes) == (up, down)
    statistics = run.layout.length - run.layout.parameters
    empty = len(codec.encode(header_of(run), {}, {}, order.frame))
    assert up == len(record.clients) * (2 * empty + 4 * 3 * statistics + 4 * 3)


def header_of(run):
    return Header(Kind.UPLOAD, bytes.fromhex(run.layout.fingerprint), Mask.full(run.layout.sizes).fingerprint, -1, 0, 0)


def test_means_know_nothing_of_the_set_up():
    """Update by update: statistics first, then losses; the pool is forgotten and the statistics of the best one kept."""
    layout = Layout((Entry(("a.weight",), (4,)),), (Entry(("b",), (1,)),), (Entry(("mean",), (2,)),))
    mask = Mask.full([4])
    pool = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0]], dtype=torch.bool)
    state = State(torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0, 0.0, 0.0]), mask).remember(pool=pool)
    method, current = FedTiny(density=0.5, candidates=2), Round.of(-1, Schedule(), mask, layout)
    state = method.update(state, Means({"statistics": torch.tensor([0.1, 0.2, 0.3, 0.4])}), current, lambda purpose: 0)
    state = method.update(state, Means({"losses": torch.tensor([2.0, 1.0])}), current, lambda purpose: 0)
    assert state.weights.tolist() == torch.tensor([0.0, 2.0, 3.0, 0.0, 9.0, 0.3, 0.4]).tolist()
    assert state.memory == {}

"""FedRTS without Thompson sampling against its rules, link by link: moments of weights and gradients, or of outcomes."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import byhand
from fedrts.methods import FedRTSNoTS
from fedrts.methods.contract import ProbeGradient, State
from fedrts.server import rounds
from fedrts.server.aggregate import Sums
from fedrts.sparse import random
from fedrts.sparse.mask import Mask
from fedrts.sparse.schedule import Schedule
from fedrts.wire.fields import Message, Selection
from helping import ask, round_of

B1, B2, TAU = 0.9, 0.99, 1e-3


def close(found, expected):
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("model", ["mlp", "cnn"])
@pytest.mark.parametrize("first_outer", [0, 2])
def test_rounds_link_by_link(toy, model, first_outer):
    """Outer, inner, outer, …: M_w every round, M_g and V_g in outer ones; what is dropped or grown starts with M_w = 0."""
    schedule = {"interval": 2, "end": 6, "adjust": 0.5, "first_outer": first_outer}
    run = toy("fedrts_no_ts", model, topology=schedule, clients=byhand.UNEQUAL, rounds=8)
    state, links, sizes = run.method.begin(run.setup), run.layout.links, run.layout.sizes
    strength, gradient, square = ([0.0] * links for _ in range(3))
    for index in range(5):
        _, samples, trained, gradients, replies = byhand.asked_for_everything(run, state, index)
        assert len(set(samples)) > 1
        after = rounds.play_round(run.plan, state, index).state
        averaged = byhand.mean(trained, samples)
        active = set(state.mask.active.tolist())
        for i in active:
            strength[i] = B1 * strength[i] + (1 - B1) * abs(averaged[i])
        kept = new = active
        if gradients is not None:
            quotas = byhand.quota(index, 6, 0.5, byhand.counts(active, sizes), sizes)
            assert sum(quotas) > 0
            named = [byhand.uploads(g, active, sizes, quotas) for g in gradients]
            for mine, reply in zip(named, replies, strict=True):
                selection = reply.message["growth"]
                assert dict(zip(selection.indices.tolist(), selection.values.tolist(), strict=True)) == mine
            summed = byhand.mean_of_named(named, samples, links)
            gradient = [B1 * m + (1 - B1) * g for m, g in zip(gradient, summed, strict=True)]
            square = [B2 * v + (1 - B2) * g * g for v, g in zip(square, summed, strict=True)]
            promise = [abs(m) / (math.sqrt(v) + TAU) for m, v in zip(gradient, square, strict=True)]
            kept, new = byhand.rigl(strength, promise, active, sizes, quotas)
            strength = [m if i in kept else 0.0 for i, m in enumerate(strength)]
        assert set(after.mask.active.tolist()) == new
        expected = [w if i in kept or i >= links else 0.0 for i, w in enumerate(averaged)]
        torch.testing.assert_close(after.weights.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-7)
        close(after["strength"], strength)
        close(after["gradient"], gradient)
        close(after["square"], square)
        assert after["strength"][~after.mask.bits].count_nonzero() == 0
        assert [float(after["strength"][i]) for i in new - kept] == [0.0] * len(new - kept)
        state = after


@st.composite
def histories(draw):
    """Four rounds on a small mask, interval 2: weights of each, and gradients that up to three clients name."""
    sizes = draw(st.lists(st.integers(2, 6), min_size=1, max_size=2))
    counts = [draw(st.integers(1, size - 1)) for size in sizes]
    mask = Mask.top(random.uniform(draw(st.integers(0, 10**6)), sum(sizes)), counts, sizes)
    options = {name: draw(st.sampled_from(choices)) for name, choices in (("beta1", [0.0, 0.5, 0.9]), ("beta2", [0.0, 0.5, 0.99]))}
    seeds = draw(st.lists(st.integers(0, 10**6), min_size=4, max_size=4))
    return mask, options, draw(st.sampled_from([1e-3, 1.0])), seeds, draw(st.integers(1, 3))


@given(histories())
def test_any_history_link_by_link(history):
    mask, options, tau, seeds, clients = history
    method = FedRTSNoTS(density=0.5, tau=tau, **options)
    nothing = torch.zeros(len(mask.bits))
    state = State(torch.zeros(mask.number), mask).remember(strength=nothing, gradient=nothing, square=nothing)
    strength, gradient, square = ([0.0] * len(mask.bits) for _ in range(3))
    for index, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        current = round_of(index, Schedule(2, 10, adjust=0.9), state.mask)
        active, sums, named, samples = set(state.mask.active.tolist()), Sums(), [], [3, 7, 2][:clients]
        weights = torch.randn(state.mask.number, generator=generator)
        for n in samples:
            message: Message = {"weights": weights}
            if current.outer:
                g = torch.randn(len(mask.bits), generator=generator).tolist()
                named.append(byhand.uploads(g, active, mask.sizes, current.quota))
                chosen = sorted(named[-1])
                values = torch.tensor([named[-1][i] for i in chosen])
                message["growth"] = Selection(torch.tensor(chosen, dtype=torch.int64), len(mask.bits), values)
            sums.add(method.contribution(message, state, current), n)
        after = method.update(state, sums.mean(), current, lambda purpose: 0)
        full = state.mask.expand(weights).tolist()
        b1, b2 = options["beta1"], options["beta2"]
        for i in active:
            strength[i] = b1 * strength[i] + (1 - b1) * abs(full[i])
        kept = new = active
        if current.outer:
            summed = byhand.mean_of_named(named, samples, len(mask.bits))
            gradient = [b1 * m + (1 - b1) * x for m, x in zip(gradient, summed, strict=True)]
            square = [b2 * v + (1 - b2) * x * x for v, x in zip(square, summed, strict=True)]
            promise = [abs(m) / (math.sqrt(v) + tau) for m, v in zip(gradient, square, strict=True)]
            kept, new = byhand.rigl(strength, promise, active, mask.sizes, current.quota)
            strength = [m if i in kept else 0.0 for i, m in enumerate(strength)]
        assert set(after.mask.active.tolist()) == new
        assert [float(w) for w in after.weights] == [w if i in kept else 0.0 for i, w in enumerate(full)]
        assert after["strength"].tolist() == pytest.approx(strength, rel=1e-5)
        assert after["gradient"].tolist() == pytest.approx(gradient, rel=1e-5, abs=1e-9)
        assert after["square"].tolist() == pytest.approx(square, rel=1e-5, abs=1e-9)
        state = after


def test_links_are_dropped_by_their_history_not_by_the_round():
    """Link 0 was strong for long and is weak once; link 1 the other way round: without memory 0 would go, with it 1 does."""
    mask = Mask(torch.tensor([1, 1, 0, 0], dtype=torch.bool), [4])
    for beta1, gone in ((0.9, 1), (0.0, 0)):
        method, nothing = FedRTSNoTS(density=0.5, beta1=beta1), torch.zeros(4)
        state = State(torch.zeros(2), mask).remember(strength=nothing, gradient=nothing, square=nothing)
        for index, weights in ((1, [5.0, 0.1]), (2, [5.0, 0.1]), (3, [0.1, 0.2])):
            current = round_of(index, Schedule(3, 10, adjust=0.9), state.mask)
            message: Message = {"weights": torch.tensor(weights)}
            if current.outer:
                assert current.quota == (1,)
                message["growth"] = Selection(torch.tensor([3]), 4, torch.tensor([-0.5]))
            state = method.update(state, message_mean(message), current, lambda purpose: 0)
        assert set(state.mask.active.tolist()) == {1 - gone, 3}


def message_mean(message):
    sums = Sums()
    sums.add(message, 5)
    return sums.mean()


@pytest.mark.parametrize("score", ["moments", "outcome"])
def test_everything_rests_after_the_end(toy, score):
    run = toy("fedrts_no_ts", "cnn", method_options={"score": score}, rounds=9, topology={"interval": 2, "end": 5})
    states = [step.state for step in rounds.play(run.plan, run.method.begin(run.setup), -1)]
    last = states[4]
    for state in states[5:]:
        assert state.mask == last.mask
        assert all(torch.equal(state[name], last[name]) for name in last.memory)
        assert not torch.equal(state.weights, last.weights)
    assert any(not torch.equal(states[3][name], last[name]) for name in last.memory), "until then they moved"


def test_inner_rounds_remember_active_weights_alone(toy):
    run = toy("fedrts_no_ts", "cnn")
    first = rounds.play_round(run.plan, run.method.begin(run.setup), 0).state
    second = rounds.play_round(run.plan, first, 1).state
    assert second.mask == first.mask
    assert torch.equal(second["gradient"], first["gradient"])
    assert torch.equal(second["square"], first["square"])
    assert not torch.equal(second["strength"], first["strength"])


# -- score = "outcome" ----------------------------------------------------------------------------------------------------


def chosen_and_tied(outcome, layer, count):
    """(links that are in for sure, links among which chance decides, how many of them) for the `count` largest of a layer."""
    ranked = sorted((outcome[i] for i in layer), reverse=True)
    threshold = ranked[count - 1]
    near = [i for i in layer if abs(outcome[i] - threshold) < 1e-6]
    above = [i for i in layer if outcome[i] > threshold + 1e-6]
    return above, near, count - len(above)


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_outcomes_link_by_link(toy, model):
    """M ← 0.9·M + 0.1·X: X is 1 for the κ largest |W^agg| of a layer, 0 for its other active links, ½ for inactive ones in outer rounds."""
    schedule = {"interval": 2, "end": 8, "adjust": 0.5}
    run = toy("fedrts_no_ts", model, method_options={"score": "outcome"}, topology=schedule, clients=byhand.UNEQUAL, rounds=8)
    state, links, sizes = run.method.begin(run.setup), run.layout.links, run.layout.sizes
    outcome, decided = [0.0] * links, 0
    for index in range(6):
        (exchange,) = run.method.exchanges(run.plan.round(index, state.mask))
        assert not any(isinstance(step, ProbeGradient) for step in exchange.steps), "gradients have no part in it"
        clients = run.plan.sample(index)
        replies = ask(run, exchange, state, index, clients)
        after = rounds.play_round(run.plan, state, index).state
        samples = [len(run.rows[client]) for client in clients]
        averaged = byhand.mean([state.mask.expand(reply.message["weights"]).tolist() for reply in replies], samples)
        active = set(state.mask.active.tolist())
        quotas = byhand.quota(index, 8, 0.5, byhand.counts(active, sizes), sizes)
        for layer, q in zip(byhand.spans(sizes), quotas, strict=True):
            mine = {i: abs(averaged[i]) for i in layer if i in active}
            core = set(byhand.largest(mine, len(mine) - q))
            for i in layer:
                if i in active or index % 2 == 0:
                    x = float(i in core) if i in active else 0.5
                    outcome[i] = B1 * outcome[i] + (1 - B1) * x
        torch.testing.assert_close(after["outcome"].double(), torch.tensor(outcome, dtype=torch.float64), rtol=1e-5, atol=1e-7)
        if index % 2 == 0:
            new = set(after.mask.active.tolist())
            for layer, count in zip(byhand.spans(sizes), state.mask.counts, strict=True):
                above, near, left = chosen_and_tied(outcome, layer, count)
                assert set(above) <= new
                assert len(new.intersection(near)) == left
                assert new.intersection(layer) <= set(above) | set(near)
                decided += 0 < left < len(near)
        else:
            assert after.mask == state.mask
        kept = active.intersection(after.mask.active.tolist())
        expected = [w if i in kept or i >= links else 0.0 for i, w in enumerate(averaged)]
        torch.testing.assert_close(after.weights.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-7)
        state = after
    assert decided > 0, "chance had something to decide"


def tied_choice(key):
    """A layer of 40 links, 10 active of which 5 are weak: 5 of the 30 inactive ones, all at ½, are grown by chance."""
    mask = Mask(torch.arange(40) < 10, [40])
    state = State(torch.zeros(10), mask).remember(outcome=torch.zeros(40))
    current = round_of(0, Schedule(1, 10, adjust=0.5), mask)
    mean = message_mean({"weights": torch.arange(10.0, 0.0, -1.0)})
    return FedRTSNoTS(density=0.5, score="outcome").update(state, mean, current, lambda purpose: random.key(key, purpose)).mask


def test_ties_are_broken_by_chance_and_again_the_same_way():
    seen = torch.zeros(40)
    for key in range(200):
        mask = tied_choice(key)
        assert mask == tied_choice(key)
        assert mask.bits[:5].all()
        assert not mask.bits[5:10].any()
        seen += mask.bits
    # each of 30 tied links is taken in 1/6 of 200 cases: mean 33.3, standard deviation 5.3
    assert (seen[10:] - 200 / 6).abs().max() < 5 * math.sqrt(200 * 5 / 36)


def test_another_seed_breaks_ties_in_another_way(toy):
    masks = [
        rounds.play_round(run.plan, state, 0).state.mask
        for run in (toy("fedrts_no_ts", "cnn", method_options={"score": "outcome"}) for _ in range(2))
        for state in [run.method.begin(run.setup)]
    ]
    assert masks[0] == masks[1]
    run = toy("fedrts_no_ts", "cnn", method_options={"score": "outcome"})
    state = run.method.begin(run.setup)
    other = rounds.play_round(replace(run.plan, seed=99), state, 0).state.mask
    assert other != masks[0]

"""Methods that rewire, against their rules written out link by link."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedrts.errors import InputError
from fedrts.methods import FedCUCB, FedDST, FedSGC
from fedrts.methods.bandit import Outcome
from fedrts.methods.contract import State
from fedrts.methods.prunefl import greedy
from fedrts.server import rounds
from fedrts.server.aggregate import Sums
from fedrts.sparse import random, rigl
from fedrts.sparse.mask import Mask
from fedrts.sparse.schedule import Schedule
from fedrts.wire.fields import Message, OwnValues, Selection
from helping import round_of


def largest(values, k):
    return sorted(values, key=lambda i: (-values[i], i))[:k]


@st.composite
def networks(draw):
    """Layers, their active links, quotas, and four numbers for every link, with many ties."""
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    counts = [draw(st.integers(0, size)) for size in sizes]
    quota = tuple(draw(st.integers(0, min(active, size - active))) for active, size in zip(counts, sizes, strict=True))
    number = st.sampled_from([0.0, 0.5, -0.5, 1.0, -1.0]) | st.floats(-2, 2, width=32)
    vectors = [torch.tensor(draw(st.lists(number, min_size=sum(sizes), max_size=sum(sizes)))) for _ in range(4)]
    mask = Mask.top(random.uniform(draw(st.integers(0, 10**6)), sum(sizes)), counts, sizes)
    return mask, quota, vectors


def layers_of(mask):
    start = 0
    for size in mask.sizes:
        yield range(start, start + size)
        start += size


@given(networks())
def test_rigl_drops_the_weakest_and_grows_the_most_promising(network):
    mask, quota, (strength, promise, _, _) = network
    kept, new = rigl.step(strength.abs(), promise.abs(), mask, quota)
    expected_kept, expected = set(), set()
    for layer, q in zip(layers_of(mask), quota, strict=True):
        active = {i: abs(float(strength[i])) for i in layer if mask.bits[i]}
        stay = set(largest(active, len(active) - q))
        grown = largest({i: abs(float(promise[i])) for i in layer if i not in stay}, q)
        expected_kept |= stay
        expected |= stay | set(grown)
    assert set(kept.active.tolist()) == expected_kept
    assert set(new.active.tolist()) == expected
    assert new.counts == mask.counts


@given(networks(), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0]))
def test_direction_first_then_magnitude(network, drop_guided, grow_guided):
    mask, quota, (weights, gradient, received, direction) = network
    direction = torch.sign(direction).to(torch.int8)
    received = received * mask.bits
    weights = weights * mask.bits
    tensors = {"weights": weights, "gradient": gradient, "received": received, "direction": direction}
    method = FedSGC(drop_guided=drop_guided, grow_guided=grow_guided)
    _, new = method.rewired(tensors, mask, replace(round_of(0, Schedule(), mask), quota=quota))
    expected = set()
    for layer, q in zip(layers_of(mask), quota, strict=True):
        sign = {i: math.copysign(1, x) if (x := float(weights[i] - received[i] if mask.bits[i] else -gradient[i])) else 0.0 for i in layer}
        active = {i: -abs(float(weights[i])) for i in layer if mask.bits[i]}
        conflict = {i: v for i, v in active.items() if sign[i] * float(direction[i]) < 0}
        gone = set(largest(conflict, math.floor(drop_guided * q)))
        gone |= set(largest({i: v for i, v in active.items() if i not in gone}, q - len(gone)))
        stay = set(active) - gone
        free = {i: abs(float(gradient[i])) for i in layer if i not in stay}
        accord = {i: v for i, v in free.items() if sign[i] * float(direction[i]) > 0}
        grown = set(largest(accord, math.floor(grow_guided * q)))
        grown |= set(largest({i: v for i, v in free.items() if i not in grown}, q - len(grown)))
        expected |= stay | grown
    assert set(new.active.tolist()) == expected
    assert new.counts == mask.counts


def test_without_guidance_directions_do_not_matter(toy):
    guided = toy("fedsgc", "cnn", method_options={"drop_guided": 0.0, "grow_guided": 0.0})
    plain = toy("feddst", "cnn")
    states = [list(rounds.play(run.plan, run.method.begin(run.setup), -1)) for run in (guided, plain)]
    for a, b in zip(*states, strict=True):
        assert torch.equal(a.state.weights, b.state.weights)
        assert a.state.mask == b.state.mask
    assert guided.method.begin(guided.setup)["direction"].dtype == torch.int8
    assert set(states[0][-1].state["direction"].unique().tolist()) <= {-1, 0, 1}
    directed, _ = (list(rounds.play(run.plan, run.method.begin(run.setup), -1)) for run in (toy("fedsgc", "cnn"), plain))
    assert directed[3].state.mask != states[1][3].state.mask, "with guidance the second outer round differs"


def own(bits, values, rest=1):
    mask = Mask(torch.tensor(bits, dtype=torch.bool), [4])
    return OwnValues(mask, torch.tensor([*values, *[9.0] * rest]))


@pytest.mark.parametrize(("merge", "expected"), [("sparse", {1: 6.0, 3: -5.0}), ("plain", {1: 6.0, 0: 1.5})])
def test_merging_masks_by_hand(merge, expected):
    """30 and 10 samples; link 0: 2 on the first client alone, link 1: 6 on both, link 3: −5 on the second alone."""
    mask = Mask(torch.tensor([1, 1, 0, 0], dtype=torch.bool), [4])
    method = FedDST(density=0.5, merge=merge)
    state = State(torch.zeros(3), mask)
    current = round_of(0, Schedule(1, 10), mask)
    sums = Sums()
    sums.add(method.contribution({"weights": own([1, 1, 0, 0], [2.0, 6.0])}, state, current), 30)
    sums.add(method.contribution({"weights": own([0, 1, 0, 1], [6.0, -5.0])}, state, current), 10)
    after = method.update(state, sums.mean(), current, lambda purpose: 0)
    assert {i: float(after.weights[i]) for i in after.mask.active.tolist()} == pytest.approx(expected)
    assert float(after.weights[4]) == 9.0


def test_merging_identical_clients_changes_nothing():
    mask = Mask(torch.tensor([1, 1, 0, 0], dtype=torch.bool), [4])
    method, state = FedDST(density=0.5), State(torch.zeros(3), mask)
    current, sums = round_of(0, Schedule(1, 10), mask), Sums()
    for samples in (3, 70, 11):
        sums.add(method.contribution({"weights": own([0, 1, 1, 0], [0.3, -0.7])}, state, current), samples)
    after = method.update(state, sums.mean(), current, lambda purpose: 0)
    assert after.weights.tolist() == torch.tensor([0, 0.3, -0.7, 0, 9]).tolist()


def test_robust_reducers_refuse_masks_of_the_clients_own(toy):
    run = toy("feddst", "mlp", guard={"reducer": "median"})
    with pytest.raises(InputError, match="masks of their own"):
        rounds.play_round(run.plan, run.method.begin(run.setup), 0)


@given(networks(), st.floats(0, 5), st.integers(0, 25))
def test_greedy_adds_while_the_gain_exceeds_gamma(network, cost, most):
    mask, _, (squares, _, _, _) = network
    squares = squares.square()
    cost = max(cost, 0.5)
    chosen = set(mask.active.tolist())
    for i in largest({i: float(squares[i]) for i in mask.inactive.tolist()}, len(mask.inactive)):
        gamma = sum(float(squares[j]) for j in chosen) / (cost + len(chosen))
        if len(chosen) >= most or float(squares[i]) <= gamma:
            break
        chosen.add(i)
    assert set(greedy(squares, mask, cost, most).active.tolist()) == chosen


def test_adaptive_models_shrink_and_never_exceed_their_budget(toy):
    run = toy("prunefl", "cnn", method_options={"adaptive": True}, rounds=7)
    most = run.method.begin(run.setup).mask.number
    sizes = [played.state.mask.number for played in rounds.play(run.plan, run.method.begin(run.setup), -1)]
    assert max(sizes) <= most
    assert sizes[0] != sizes[-1] or sizes[0] < most


def test_upper_confidence_bounds_by_hand():
    """Four links, two active, γ = 0.5; three updates: outer, inner, outer."""
    mask = Mask(torch.tensor([1, 1, 0, 0], dtype=torch.bool), [4])
    method = FedCUCB(density=0.5)
    state = State(torch.zeros(2), mask).remember(mean=torch.zeros(4), tried=torch.zeros(4), updates=torch.zeros(1))
    schedule = Schedule(2, 10, adjust=0.5)
    mean, tried = [0.0] * 4, [0] * 4
    for updates, index in enumerate((0, 1, 2), start=1):
        active = state.mask.active.tolist()
        inactive = [i for i in range(4) if i not in active]
        current = round_of(index, schedule, state.mask)
        message: Message = {"weights": torch.tensor([3.0, 1.0])}
        if current.outer:
            message["votes"] = Selection(torch.tensor(inactive[: sum(current.quota)], dtype=torch.int64), 4)
        sums = Sums()
        sums.add(method.contribution(message, state, current), 5)
        state = method.update(state, sums.mean(), current, lambda purpose: 7)
        core = active[: current.core[0]]
        outcome = {i: float(i in core) for i in active}
        if current.outer:
            outcome |= {i: 0.25 + 0.5 * (i in inactive[: sum(current.quota)]) for i in inactive}
        for i, x in outcome.items():
            tried[i] += 1
            mean[i] = (mean[i] * (tried[i] - 1) + x) / tried[i]
        assert state["mean"].tolist() == pytest.approx(mean)
        assert state["tried"].tolist() == tried
        if current.outer:
            bound = {i: mean[i] + math.sqrt(3 * math.log(max(updates, 2)) / (2 * tried[i])) for i in range(4)}
            assert sorted(state.mask.active.tolist()) == sorted(largest(bound, 2))


@pytest.mark.parametrize(("confidence", "narrow", "wide"), [(1.0, 0.905, 0.92), (0.5, 0.4525, 0.46)])
def test_how_wide_the_confidence_bound_is(confidence, narrow, wide):
    """c·√(3 ln 100 / (2·5)) − c·√(3 ln 100 / (2·100)) = 0.9125·c: means that differ by less let the link tried 5 times win, by more not."""
    mask = Mask(torch.tensor([True, False]), [2])
    for gap, winner in ((narrow, 1), (wide, 0)):
        means = torch.tensor([0.95, 0.95 - gap])
        state = State(torch.zeros(1), mask).remember(mean=means, tried=torch.tensor([99.0, 4.0]), updates=torch.tensor([99.0]))
        method = FedCUCB(density=0.5, confidence=confidence)
        after = method.learn(state, state, Outcome(means, None, clients=1), round_of(0, Schedule(2, 10), mask), lambda purpose: 7)
        assert after["tried"].tolist() == [100, 5]
        assert after.mask.active.tolist() == [winner]


def test_untried_links_come_first_in_the_literal_formula(toy):
    run = toy("fedcucb", "mlp", method_options={"observe_inactive": False})
    state = run.method.begin(run.setup)
    after = rounds.play_round(run.plan, state, 0).state
    unsaturated = [i for i, (count, size) in enumerate(zip(state.mask.counts, state.mask.sizes, strict=True)) if 2 * count <= size]
    assert unsaturated
    before, now = (m.bits.split(list(m.sizes)) for m in (state.mask, after.mask))
    assert all(not bool((before[i] & now[i]).any()) for i in unsaturated)
    assert torch.equal(after["tried"] > 0, state.mask.bits)


def test_untried_links_are_chosen_at_random():
    """A hundred of 50,000: from all of them, not from the first ones."""
    links = 50_000
    mask = Mask(torch.arange(links) < 100, [links])
    method = FedCUCB(observe_inactive=False)
    state = State(torch.zeros(100), mask).remember(mean=torch.zeros(links), tried=torch.zeros(links), updates=torch.zeros(1))
    outcome = Outcome(torch.full((links,), 0.5), None, clients=1)
    chosen = method.learn(state, state, outcome, round_of(0, Schedule(2, 10), mask), lambda purpose: 7).mask.active
    assert not bool((chosen < 100).any()), "tried ones come last"
    quarters = torch.bincount(chosen * 4 // links, minlength=4)
    assert int(quarters.min()) > 10, quarters

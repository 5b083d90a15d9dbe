"""TSAdj against equations 2 to 6 of the paper, written out link by link."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrts.methods import FedRTS
from fedrts.methods.contract import State
from fedrts.server.aggregate import Sums
from fedrts.sparse import posterior, random
from fedrts.sparse.mask import Mask
from fedrts.sparse.schedule import Schedule
from fedrts.wire.fields import Selection
from helping import round_of


def top_set(values: dict[int, float], k: int) -> set[int]:
    """Top(x, k): the indices of the k largest, the lowest index first among equals."""
    return set(sorted(values, key=lambda i: (-values[i], i))[:k])


def reference(layers, active, clients, gamma, scale, alpha, beta, fraction, outer):
    """Algorithm 1 without its draw: posteriors after one round, in plain loops over layers, clients and links."""
    total = sum(samples for samples, _, _ in clients)
    aggregate = {i: float(np.float32(sum(n * w[i] for n, w, _ in clients) / total)) for i in active}
    alpha, beta, outcomes = dict(alpha), dict(beta), {}
    for layer in layers:
        on = [i for i in layer if i in active]
        off = [i for i in layer if i not in active]
        quota = min(math.floor(fraction * len(on)), len(off))
        kappa = len(on) - quota
        core = top_set({i: abs(aggregate[i]) for i in on}, kappa)
        for i in on:  # Eq. 3 and 4
            x_n = sum(n / total * (i in top_set({j: abs(w[j]) for j in on}, kappa)) for n, w, _ in clients)
            outcomes[i] = gamma * (i in core) + (1 - gamma) * x_n
        if outer:
            for i in off:  # Eq. 3 and 5
                outcomes[i] = gamma * 0.5 + (1 - gamma) * sum(n / total * (i in votes) for n, _, votes in clients)
    for i, x in outcomes.items():  # Eq. 6
        alpha[i] += scale * x
        beta[i] += scale * (1 - x)
    return aggregate, alpha, beta, outcomes


@st.composite
def problems(draw):
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    counts = [draw(st.integers(1, size)) for size in sizes]  # K = n: a saturated layer
    weight = st.sampled_from([0.0, -0.5, 0.5, 0.25, 1.0, -1.0]) | st.floats(-2, 2, width=32)  # many ties
    seed = draw(st.integers(0, 10**6))
    outer = draw(st.booleans())
    clients = []
    for _ in range(draw(st.integers(1, 4))):
        clients.append((draw(st.integers(1, 50)), draw(st.lists(weight, min_size=sum(sizes), max_size=sum(sizes)))))
    return sizes, counts, clients, seed, outer


@settings(max_examples=150)
@given(problems(), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([1.0, 10.0]), st.floats(0.0, 1.0))
def test_tsadj_is_equations_2_to_6(problem, gamma, scale, adjust):
    sizes, counts, clients, seed, outer = problem
    links = sum(sizes)
    mask = Mask.top(random.uniform(seed, links), counts, sizes)
    schedule = Schedule(interval=2, end=10, adjust=adjust)
    current = round_of(0 if outer else 1, schedule, mask)
    assert current.outer == outer
    starts = [0, *np.cumsum(sizes)]
    layers = [range(starts[i], starts[i + 1]) for i in range(len(sizes))]
    active = set(mask.active.tolist())

    method = FedRTS(density=0.5, gamma=gamma, scale=scale)
    alpha0, beta0 = 1 + 5 * random.uniform(seed + 1, links), 1 + 5 * random.uniform(seed + 2, links)
    rest = 2  # unpruned values behind the links
    state = State(torch.zeros(mask.number + rest), mask).remember(alpha=alpha0, beta=beta0)
    sums, written = Sums(), []
    for number, (samples, weights) in enumerate(clients):
        w = torch.tensor(weights, dtype=torch.float32)
        values = mask.compact(torch.cat([w, torch.full((rest,), float(number))]))
        votes: list[int] = []
        for layer, quota in zip(layers, current.quota, strict=True):
            off = [i for i in layer if i not in active]
            order = random.permutation(random.key(seed, number, layer.start), len(off)).tolist()
            votes += sorted(off[j] for j in order[:quota])
        message = {"weights": values} | ({"votes": Selection(torch.tensor(sorted(votes), dtype=torch.int64), links)} if outer else {})
        sums.add(method.contribution(message, state, current), samples)
        written.append((samples, dict(enumerate(w.tolist())), set(votes)))

    after = method.update(state, sums.mean(), current, lambda purpose: random.key(seed, purpose))

    fraction = schedule.fraction(current.index)
    aggregate, alpha, beta, outcomes = reference(
        layers, active, written, gamma, scale, dict(enumerate(alpha0.tolist())), dict(enumerate(beta0.tolist())), fraction, outer
    )
    assert after["alpha"].tolist() == pytest.approx([alpha[i] for i in range(links)], rel=1e-5)
    assert after["beta"].tolist() == pytest.approx([beta[i] for i in range(links)], rel=1e-5)
    assert all(0 <= x <= 1 + 1e-12 for x in outcomes.values())
    for before, now in ((alpha0, after["alpha"]), (beta0, after["beta"])):
        assert bool((now >= before).all())
        assert bool((now - before <= scale * (1 + 1e-6)).all())

    if outer:  # Eq. 2: the top K of one draw from the updated posteriors, in every layer
        xi = posterior.draw(after["alpha"], after["beta"], random.key(seed, "topology")).tolist()
        chosen = set()
        for layer, count in zip(layers, counts, strict=True):
            chosen |= top_set({i: xi[i] for i in layer}, count)
        assert set(after.mask.active.tolist()) == chosen
    else:
        assert after.mask is mask
    expected = [aggregate[i] if i in active and bool(after.mask.bits[i]) else 0.0 for i in range(links)]
    assert after.weights[:links].tolist() == expected


LINKS = 8


def one_outer_round(gamma=0.5, scale=10.0, voters=(0, 1, 2)):
    """Layer of eight links, four active: 0 and 1 strong on all three clients, 2 and 3 weak; all `voters` vote for link 4 (and 5)."""
    mask = Mask(torch.tensor([1, 1, 1, 1, 0, 0, 0, 0], dtype=torch.bool), [LINKS])
    method = FedRTS(density=0.5, gamma=gamma, scale=scale)
    state = State(torch.zeros(4), mask).remember(alpha=torch.ones(LINKS), beta=torch.ones(LINKS))
    current = round_of(0, Schedule(10, 100, adjust=0.5), mask)
    assert current.quota == (2,)
    assert current.core == (2,)
    sums = Sums()
    for client in range(3):
        votes = [4, 5] if client in voters else [6, 7]
        message = {"weights": torch.tensor([2.0, -3.0, 0.1, 0.0]), "votes": Selection(torch.tensor(votes), LINKS)}
        sums.add(method.contribution(message, state, current), 20)
    return method.update(state, sums.mean(), current, lambda purpose: random.key(purpose))


def test_hand_computed_posteriors():
    after = one_outer_round()
    pairs = list(zip(after["alpha"].tolist(), after["beta"].tolist(), strict=True))
    assert pairs[0] == pairs[1] == (11, 1), "a unanimous core link"
    assert pairs[2] == pairs[3] == (1, 11), "a unanimous weak link"
    assert pairs[4] == pairs[5] == (8.5, 3.5), "inactive with all votes: X = 0.75"
    assert pairs[6] == pairs[7] == (3.5, 8.5), "inactive without a vote: X = 0.25"


@pytest.mark.parametrize(("gamma", "voted", "unvoted"), [(0.0, 1.0, 0.0), (0.5, 0.75, 0.25), (1.0, 0.5, 0.5)])
def test_gamma_weighs_the_aggregate_against_the_clients(gamma, voted, unvoted):
    after = one_outer_round(gamma=gamma)
    assert ((after["alpha"] - 1) / 10)[4:].tolist() == pytest.approx([voted, voted, unvoted, unvoted])


def test_votes_count_by_share_of_samples():
    after = one_outer_round(gamma=0.0, voters=(0,))
    assert ((after["alpha"] - 1) / 10)[4:].tolist() == pytest.approx([1 / 3, 1 / 3, 2 / 3, 2 / 3])


def test_a_huge_scale_makes_the_draw_the_posterior_mean():
    after = one_outer_round(gamma=0.4, scale=1e8)
    means = posterior.mean(after["alpha"], after["beta"])
    assert set(after.mask.active.tolist()) == set(torch.topk(means, 4).indices.tolist())


def test_the_posterior_rests_after_the_end_unless_told_otherwise():
    mask = Mask(torch.tensor([1, 1, 0, 0], dtype=torch.bool), [4])
    current = round_of(100, Schedule(10, 100), mask)
    message = {"weights": torch.tensor([1.0, 2.0])}
    for go_on in (False, True):
        method = FedRTS(density=0.5, update_after_end=go_on)
        state = State(torch.zeros(2), mask).remember(alpha=torch.ones(4), beta=torch.ones(4))
        sums = Sums()
        sums.add(method.contribution(dict(message), state, current), 3)
        after = method.update(state, sums.mean(), current, lambda purpose: 0)
        assert after.mask is mask
        assert after.values.tolist() == [1.0, 2.0]
        assert after["alpha"].tolist() == ([11, 11, 1, 1] if go_on else [1, 1, 1, 1])

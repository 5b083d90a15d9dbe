"""How far clients can move posteriors and masks by whatever well-formed lie: the bounds of docs/wire.md."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrts.server.aggregate import Sums
from fedrts.server.guard import Guard
from fedrts.sparse import posterior, random
from fedrts.sparse.mask import Mask
from fedrts.sparse.topk import by_layer, top
from fedrts.testing.federations import toy
from fedrts.wire.fields import Selection

CLIENTS = 6


class Reach:
    """An outer round of six clients: what the server's posteriors are after it, whoever lies."""

    def __init__(self, gamma: float, max_share: float, key: int) -> None:
        self.run = toy("fedrts", "mlp", rounds=7, method_options={"gamma": gamma})
        self.state = self.run.method.begin(self.run.setup)
        links, device = len(self.state.mask.bits), "cpu"
        past = [1 + 9 * random.uniform(random.key(key, name), links, device) for name in ("alpha", "beta")]
        self.state = self.state.remember(alpha=past[0], beta=past[1])
        self.round = self.run.plan.round(3, self.state.mask)
        assert self.round.outer
        self.guard, self.key = Guard(max_share=max_share), key
        self.samples = {client: int(1 + 99 * random.uniform(random.key(key, client), 1)) for client in range(CLIENTS)}
        self.weights = self.guard.weights(self.samples)

    def message(self, client: int, kind: str, scale: float = 1.0):
        """Some weights, and votes for as many inactive links of each layer as are asked for."""
        state, key = self.state, random.key(self.key, client, kind)
        weights = scale * (random.uniform(random.key(key, "weights"), len(state.values)) - 0.5)
        wishes = random.uniform(random.key(key, "votes"), len(state.mask.bits)).masked_fill(state.mask.bits, -1.0)
        named = top(wishes, self.round.quota, state.mask.sizes).nonzero().squeeze(-1)
        return {"weights": weights, "votes": Selection(named, len(state.mask.bits))}

    def after(self, liars: int, scale: float):
        """The state after a round in which the first `liars` clients send something else."""
        sums = Sums()
        for client in range(CLIENTS):
            message = self.message(client, "lie", scale) if client < liars else self.message(client, "honest")
            sums.add(self.run.method.contribution(message, self.state, self.round), self.samples[client], self.weights[client])
        return self.run.method.update(self.state, sums.mean(), self.round, lambda purpose: random.key(self.key, purpose))

    def share(self, liars: int) -> float:
        return sum(self.weights[client] for client in range(liars)) / sum(self.weights.values())


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    st.sampled_from([0.17, 0.2, 0.4, 1.0]),
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.sampled_from([0.01, 1.0, 1e4]),
)
def test_what_liars_move_in_a_posterior_is_bounded(gamma, max_share, key, liars, scale):
    reach = Reach(gamma, max_share, key)
    mask, round, scaled = reach.state.mask, reach.round, 10.0
    honest, moved = reach.after(0, 1.0), reach.after(liars, scale)
    share = reach.share(liars)
    assert share <= liars * max(max_share, 1 / CLIENTS) + 0.03  # whole numbers of samples are capped
    apart = [(after - before).double().abs() for before, after in ((honest[name], moved[name]) for name in ("alpha", "beta"))]
    torch.testing.assert_close(apart[0], apart[1], atol=1e-4, rtol=0)  # what a link gains on one side it loses on the other
    active, inactive = scaled * (gamma + (1 - gamma) * share), scaled * (1 - gamma) * share
    assert float(apart[0][mask.bits].max()) <= active + 1e-4
    assert float(apart[0][~mask.bits].max()) <= inactive + 1e-4
    few = [2 * min(core, count - core) for core, count in zip(round.core, round.counts, strict=True)]
    for part, on, bits, quota in zip(apart[0].split(list(mask.sizes)), few, mask.bits.split(list(mask.sizes)), round.quota, strict=True):
        assert float(part[bits].sum()) <= active * on + 1e-3
        assert float(part[~bits].sum()) <= inactive * 2 * quota + 1e-3
    touched = by_layer(apart[0] > 1e-4, mask.sizes)
    most = [on * (1 + liars) + 2 * liars * quota for on, quota in zip(few, round.quota, strict=True)]
    assert all(number <= limit for number, limit in zip(touched, most, strict=True))
    best = [Mask.top(posterior.mean(state["alpha"], state["beta"]), round.targets, mask.sizes) for state in (honest, moved)]
    flipped = by_layer(best[0].bits & ~best[1].bits, mask.sizes)
    assert all(number <= limit for number, limit in zip(flipped, touched, strict=True))


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_the_bound_is_reached(gamma):
    """With γ = 1 by the aggregate, with γ = 0 by a client's own word: no smaller bound would hold."""
    reach = Reach(gamma, 1.0, 5)
    honest, moved = reach.after(0, 1.0), reach.after(1, 1e6)
    bits = reach.state.mask.bits
    expected = 10.0 * (gamma + (1 - gamma) * reach.share(1))
    assert float((honest["alpha"] - moved["alpha"])[bits].abs().max()) == pytest.approx(expected, rel=1e-3)


@given(st.lists(st.floats(0, 1), min_size=12, max_size=12), st.lists(st.floats(0, 1), max_size=5), st.integers(1, 11))
def test_as_many_links_change_places_as_scores_change(scores, others, count):
    """Whatever else is drawn: a mask of the best differs by no more links than have other scores."""
    before, after = torch.tensor(scores), torch.tensor(others + scores[len(others) :])
    kept = [Mask.top(values, [count], [12]).bits for values in (before, after)]
    assert int((kept[0] & ~kept[1]).count_nonzero()) <= len(others)

"""Local protection: what leaves a client has the distribution that the documents state, and ε is what it says."""

import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

import fedrts
from fedrts import config
from fedrts.api import playing
from fedrts.client import privacy
from fedrts.client.privacy import Account, Protection, Repeatable, Response, Unpredictable, gaussian_delta, gaussian_epsilon, respond, spent
from fedrts.client.workbench import Workbench
from fedrts.errors import InputError
from fedrts.runs.build import put_together
from fedrts.runs.summary import describe_privacy
from fedrts.server import guard
from fedrts.server.client_records import ClientRecords
from helping import order_of


def replies(run, **changes):
    state = run.method.begin(run.setup)
    order = order_of(run, run.plan.exchanges(run.plan.round(0, state.mask))[0], state, 0)
    return order, list(run.plan.engine.run(order, [0, 1]))


def updates(order, reply):
    return reply.message["weights"] - order.reference


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_updates_are_clipped_and_only_scaled(toy, engine):
    order, plain = replies(toy(engine=engine))
    _, bounded = replies(toy(engine=engine, privacy={"clip": 0.02}))
    for before, after in zip(plain, bounded, strict=True):
        u, v = updates(order, before), updates(order, after)
        assert float(u.norm()) > 0.02 >= float(v.norm()) - 1e-6
        assert torch.allclose(v, u * (0.02 / u.norm()), atol=1e-6)
        assert torch.equal(before.message["votes"].indices, after.message["votes"].indices)


def test_a_small_update_is_not_touched_by_clipping(toy):
    _, plain = replies(toy())
    _, bounded = replies(toy(privacy={"clip": 1e6}))
    assert torch.allclose(plain[0].message["weights"], bounded[0].message["weights"], atol=1e-6)


def test_noise_is_gaussian_of_the_stated_size_and_repeatable(toy):
    _, bounded = replies(toy(model_options={"hidden": [60, 60]}, privacy={"clip": 0.5}))
    _, noisy = replies(toy(model_options={"hidden": [60, 60]}, privacy={"clip": 0.5, "noise": 2.0}))
    _, again = replies(toy(model_options={"hidden": [60, 60]}, privacy={"clip": 0.5, "noise": 2.0}))
    drawn = (noisy[0].message["weights"] - bounded[0].message["weights"]).numpy()
    assert len(drawn) > 2000
    assert stats.kstest(drawn / (2.0 * 0.5), "norm").pvalue > 1e-3
    assert torch.equal(noisy[0].message["weights"], again[0].message["weights"])
    other = (noisy[1].message["weights"] - bounded[1].message["weights"]).numpy()
    assert abs(np.corrcoef(drawn, other)[0, 1]) < 0.1


def test_whoever_makes_a_bench_says_which_noise(toy):
    """A simulation asks for repeatable noise; nothing is repeatable, or unpredictable, because somebody said nothing."""
    run = toy(privacy={"clip": 0.5, "noise": 1.0})
    assert run.bench.noise is Repeatable
    with pytest.raises(TypeError, match="noise"):
        put_together(run.experiment, run.module, run.data, run.rows)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="noise"):
        Workbench(run.module, run.layout, run.data, run.training, 0, run.bench.macs)  # type: ignore[call-arg]


def test_on_a_node_noise_is_never_the_same(toy):
    run = toy(privacy={"clip": 0.5, "noise": 1.0})
    run.bench.noise = Unpredictable
    (_, first), (_, second) = replies(run), replies(run)
    assert not torch.equal(first[0].message["weights"], second[0].message["weights"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_of_an_update_that_is_not_finite_nothing_leaves(bad):
    assert torch.equal(privacy.clipped(torch.tensor([bad, 1000.0, 5.0]), 1.0), torch.zeros(3))


@pytest.mark.parametrize("engine", ["serial", "batched"])
@pytest.mark.parametrize("method", ["feddst", "fedsgc", "fedrts_trial"])
def test_clipping_leaves_weights_on_a_mask_of_the_clients_own_where_they_are(toy, method, engine):
    _, plain = replies(toy(method, engine=engine))
    order, bounded = replies(toy(method, engine=engine, privacy={"clip": 1e6}))
    _, tight = replies(toy(method, engine=engine, privacy={"clip": 0.02}))
    for before, after, short in zip(plain, bounded, tight, strict=True):
        before, after, short = (reply.message["weights"] for reply in (before, after, short))
        assert before.mask == after.mask == short.mask
        assert before.mask != order.frame.mask
        assert torch.allclose(before.values, after.values, atol=1e-6)
        received = short.mask.compact(order.frame.mask.expand(order.reference))
        assert 0 < float((short.values - received).norm()) < 0.0201


NOISE, NAMES = {"clip": 1.0, "noise": 1.0}, {"index_epsilon": 1.0}


@pytest.mark.parametrize(("method", "table", "index"), [("feddst", NOISE, 0), ("prunefl", NOISE, 0), ("fedtiny", NAMES, 0)])
def test_nothing_leaves_unprotected_beside_what_is_protected(toy, method, table, index):
    run = toy(method, privacy=table)
    state = run.method.begin(run.setup)
    order = order_of(run, run.plan.exchanges(run.plan.round(index, state.mask))[0], state, index)
    with pytest.raises(InputError, match="no protection"):
        playing.check_uploads(run, state)
    with pytest.raises(InputError, match="no protection"):
        list(run.plan.engine.run(order, [0]))


def test_noise_without_a_bound_is_refused():
    with pytest.raises(InputError, match=r"privacy\.noise needs privacy\.clip"):
        config.resolve({"privacy": {"noise": 1.0}})


# -- index sets -------------------------------------------------------------------------------------------------------


def law(k, m, epsilon):
    """P(Y | S) by the definition, for every Y and S: ∝ e^ε where the overlap reaches the threshold."""
    threshold = Response.of(k, m, epsilon).threshold
    sets = list(itertools.combinations(range(m), k))
    table = np.array([[math.exp(epsilon) if len({*y} & {*s}) >= threshold else 1.0 for y in sets] for s in sets])
    return sets, table / table.sum(1, keepdims=True)


@pytest.mark.parametrize("draws", [Repeatable(1), Unpredictable()], ids=["repeatable", "unpredictable"])
@pytest.mark.parametrize(("k", "m", "epsilon"), [(1, 4, 1.0), (2, 5, 0.5), (3, 7, 2.0), (3, 4, 1.5)])
def test_no_set_is_more_than_e_to_the_epsilon_likelier_under_one_truth_than_another(k, m, epsilon, draws):
    sets, table = law(k, m, epsilon)
    ratio = (table[:, None] / table[None, :]).max()
    assert ratio <= math.exp(epsilon) * (1 + 1e-12)
    true, number = np.array(sets[len(sets) // 2]), 20_000
    counts = Counter(tuple(respond(true, np.arange(m), epsilon, draws).tolist()) for _ in range(number))
    expected = table[len(sets) // 2] * number
    least = 1e-4 if isinstance(draws, Repeatable) else 1e-9  # what no seed decides must not fail by chance
    assert stats.chisquare([counts[y] for y in sets], expected).pvalue > least
    overlap = sum(table[len(sets) // 2, i] * len({*y} & {*true.tolist()}) for i, y in enumerate(sets))
    assert Response.of(k, m, epsilon).expected == pytest.approx(overlap)


@given(k=st.integers(1, 40), more=st.integers(0, 200), epsilon=st.floats(0.01, 50))
def test_the_threshold_is_the_best_one(k, more, epsilon):
    response = Response.of(k, k + more, epsilon)
    reference = stats.hypergeom(k + more, k, k)
    overlap = np.arange(response.first, k + 1)
    best = 0.0
    for threshold in overlap:
        weights = reference.pmf(overlap) * np.where(overlap >= threshold, math.exp(epsilon), 1.0)
        best = max(best, float((weights * overlap).sum() / weights.sum()))
    assert response.expected == pytest.approx(best, rel=1e-6)
    assert response.probabilities.sum() == pytest.approx(1.0)


def test_randomised_votes_pass_the_guard_and_carry_a_signal(toy):
    order, plain = replies(toy())
    for epsilon, least in ((0.1, 0.0), (2000.0, 0.99)):
        run = toy(privacy={"index_epsilon": epsilon})
        _, answers = replies(run)
        for before, after in zip(plain, answers, strict=True):
            assert guard.faults([after], order, run.plan.guard, dict(enumerate(run.plan.samples))) == [None]
            kept = np.isin(after.message["votes"].indices, before.message["votes"].indices).mean()
            assert kept >= least
            assert torch.equal(before.message["weights"], after.message["weights"])


# -- ε ----------------------------------------------------------------------------------------------------------------


def hockey_stick(epsilon, mu):
    """∫ max(0, p(x) − e^ε q(x)) dx of N(μ, 1) and N(0, 1), by quadrature."""
    edge = epsilon / mu + mu / 2
    return integrate.quad(lambda x: stats.norm.pdf(x, mu) - math.exp(epsilon) * stats.norm.pdf(x), edge, edge + 40, epsabs=1e-14)[0]


@pytest.mark.parametrize(("epsilon", "mu"), [(0.1, 0.05), (1.0, 0.3), (1.0, 1.0), (5.0, 2.0), (0.5, 3.0)])
def test_delta_of_the_gaussian_is_the_hockey_stick_divergence(epsilon, mu):
    assert gaussian_delta(epsilon, mu) == pytest.approx(hockey_stick(epsilon, mu), rel=1e-6, abs=1e-13)


def test_epsilon_agrees_with_a_published_value():
    assert gaussian_epsilon(1 / 3.730631634, 1e-5) == pytest.approx(1.0, abs=1e-6)  # σ of the analytic mechanism for (1, 1e-5)


@given(mu=st.floats(1e-3, 30), delta=st.floats(1e-12, 0.1))
def test_epsilon_is_the_least_for_its_delta(mu, delta):
    epsilon = gaussian_epsilon(mu, delta)
    assert gaussian_delta(epsilon, mu) <= delta * (1 + 1e-6)
    if epsilon > 1e-6:
        assert gaussian_delta(epsilon * 0.999, mu) > delta * (1 - 1e-6)


def test_what_is_spent():
    protection = Protection(clip=1.0, noise=4.0, index_epsilon=0.5, delta=1e-6)
    assert spent(protection, 9, 2)["values"] == pytest.approx(gaussian_epsilon(2 / 4 * 3, 1e-6))
    assert spent(protection, 9, 2)["indices"] == 1.0
    of_values = spent(protection, 9, 0)["total"]
    assert of_values is not None
    assert spent(protection, 9, 2)["total"] == pytest.approx(of_values + 1.0)
    assert spent(Protection(), 1, 0)["total"] is None
    assert spent(privacy.Protection(clip=1.0, noise=1.0), 1, 1)["total"] is None


def test_messages_of_different_protection_add_up():
    weak, strong = Protection(clip=1.0, noise=2.0, index_epsilon=1.0), Protection(clip=1.0, noise=8.0, index_epsilon=0.25)
    both = Account.of(weak, 1, 1) + Account.of(strong, 16, 2)
    assert both.values(1e-5) == pytest.approx(gaussian_epsilon(math.sqrt((2 / 2) ** 2 + 16 * (2 / 8) ** 2), 1e-5))
    assert both.indices == 1.5
    assert both.epsilon(1e-5) == both.values(1e-5) + 1.5
    either = Account(1.0, 5.0).either(Account(2.0, 3.0))
    assert (either.square, either.indices) == (2.0, 5.0)
    assert Account.of(Protection(clip=1.0, noise=1e-200), 1, 0).epsilon(1e-5) == math.inf


def test_who_gave_most_is_told_by_what_it_is_worth(toy):
    run = toy(privacy={"clip": 1.0, "noise": 3.0, "index_epsilon": 2.0})
    ledger = ClientRecords.of(run.plan.guard)
    ledger.uploads = {1: (10, 0), 4: (9, 9)}
    stated = describe_privacy(run, ledger)["most"]
    assert (stated["client"], stated["messages"], stated["index_sets"]) == (4, 9, 9)
    assert stated["epsilon"] == spent(run.bench.protection, 9, 9)
    assert describe_privacy(run, ClientRecords.of(run.plan.guard))["most"] == {
        "client": None,
        "messages": 0,
        "index_sets": 0,
        "epsilon": spent(run.bench.protection, 0, 0),
    }


def test_a_run_states_what_it_gave_away(tmp_path):
    table = {"clip": 1.0, "noise": 3.0, "index_epsilon": 0.5}
    fedrts.run(data="toy_images", rounds=3, clients=2, topology={"interval": 2}, train={"epochs": 1}, privacy=table, out=tmp_path / "run")
    stated = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert stated["most"] == {"client": 0, "messages": 3, "index_sets": 1, "epsilon": spent(Protection(**table), 3, 1)}
    assert stated["epsilon_of_a_message"]["values"] == pytest.approx(gaussian_epsilon(2 / 3, 1e-5))

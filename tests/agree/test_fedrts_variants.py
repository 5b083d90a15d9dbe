"""What goes beyond the paper in FedRTS, against its rules written out link by link."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from byhand import largest, spans
from fedrts import config
from fedrts.errors import InputError
from fedrts.methods import FedRTS, FedRTSTrial
from fedrts.methods.contract import State
from fedrts.server import rounds
from fedrts.server.aggregate import Sums
from fedrts.sparse import posterior, random
from fedrts.sparse.mask import Mask
from fedrts.sparse.schedule import Schedule
from fedrts.wire.fields import Message, OwnValues, Selection
from helping import round_of

SIZES = [9, 6, 4]
COUNTS = [3, 2, 4]
"""The last layer is full: it has nothing to grow."""
LINKS, REST = sum(SIZES), 2
SCHEDULE = Schedule(interval=2, end=10, adjust=1.0)


def start(seed: int) -> tuple[State, list[float], list[float]]:
    """A state of three layers with some history."""
    mask = Mask.top(random.uniform(seed, LINKS), COUNTS, SIZES)
    alpha, beta = 1 + 20 * random.uniform(seed + 1, LINKS), 1 + 20 * random.uniform(seed + 2, LINKS)
    values = mask.compact(random.uniform(seed + 3, LINKS + REST) - 0.5)
    return State(values, mask).remember(alpha=alpha, beta=beta), alpha.double().tolist(), beta.double().tolist()


def replies(seed: int, state: State, quota: tuple[int, ...] | None, clients: int = 3) -> list[tuple[int, torch.Tensor, list[int]]]:
    """(samples, weights on the mask, links named) of every client."""
    found = []
    for client in range(clients):
        named: list[int] = []
        for layer, q in zip(spans(SIZES), quota or (0,) * len(SIZES), strict=True):
            off = [i for i in layer if not state.mask.bits[i]]
            order = random.permutation(random.key(seed, client, layer.start), len(off)).tolist()
            named += sorted(off[j] for j in order[:q])
        weights = state.mask.compact(random.uniform(random.key(seed, "weights", client), LINKS + REST) - 0.5)
        found.append((5 * client + 3, weights, named))
    return found


def updated(method: FedRTS, state: State, index: int, seed: int) -> State:
    current = round_of(index, SCHEDULE, state.mask)
    sums = Sums()
    for samples, weights, named in replies(seed, state, current.quota if current.outer else None):
        message: Message = {"weights": weights}
        if current.outer:
            message["votes"] = Selection(torch.tensor(named, dtype=torch.int64), LINKS)
        sums.add(method.contribution(message, state, current), samples)
    after: State = method.update(state, sums.mean(), current, lambda purpose: random.key(seed, purpose))
    return after


seeds = st.integers(0, 10**6)


@settings(max_examples=40)
@given(seeds, st.sampled_from([0.3, 0.9]), st.booleans())
def test_discounted_history(seed, keep, outer):
    """A link that is observed keeps ρ of what was known of it, then learns as ever; the others keep all."""
    index = 2 if outer else 3
    state, alpha, beta = start(seed)
    plain, faded = (updated(FedRTS(discount=rho), state, index, seed) for rho in (1.0, keep))
    for i in range(LINKS):
        seen = outer or bool(state.mask.bits[i])
        for name, before in (("alpha", alpha[i]), ("beta", beta[i])):
            learned = float(plain[name][i]) - before
            expected = 1 + keep * (before - 1) + learned if seen else before
            assert float(faded[name][i]) == pytest.approx(expected, rel=1e-5, abs=1e-4)


def test_discounts_leave_what_they_are_given():
    alpha, beta = torch.tensor([11.0, 3.0]), torch.tensor([1.0, 5.0])
    assert posterior.faded(alpha, beta, 1.0) == (alpha, beta)
    assert [part.tolist() for part in posterior.faded(alpha, beta, 0.5)] == [[6, 2], [1, 3]]
    assert [part.tolist() for part in posterior.faded(alpha, beta, 0.5, torch.tensor([1]))] == [[11, 2], [1, 3]]
    assert alpha.tolist() == [11, 3]


@settings(max_examples=60)
@given(seeds)
def test_only_links_just_named_are_grown(seed):
    state, _, _ = start(seed)
    after = updated(FedRTS(candidates="named"), state, 2, seed)
    current = round_of(2, SCHEDULE, state.mask)
    named = {i for _, _, names in replies(seed, state, current.quota) for i in names}
    xi = posterior.draw(after["alpha"], after["beta"], random.key(seed, "topology")).tolist()
    expected: set[int] = set()
    for layer, count in zip(spans(SIZES), COUNTS, strict=True):
        expected |= set(largest({i: xi[i] for i in layer if bool(state.mask.bits[i]) or i in named}, count))
    assert set(after.mask.active.tolist()) == expected
    assert after.mask.counts == tuple(COUNTS)
    free = updated(FedRTS(), state, 2, seed)
    assert torch.equal(after["alpha"], free["alpha"]), "what is learned does not depend on who may be chosen"


def test_without_a_vote_nothing_is_grown():
    """K links can always be chosen: those that are active."""
    state, _, _ = start(1)
    current = round_of(2, Schedule(interval=2, end=10, adjust=0.0), state.mask)
    assert not any(current.quota)
    method, sums = FedRTS(candidates="named"), Sums()
    message = {"weights": state.values, "votes": Selection(torch.zeros(0, dtype=torch.int64), LINKS)}
    sums.add(method.contribution(message, state, current), 1)
    after = method.update(state, sums.mean(), current, lambda purpose: random.key(purpose))
    assert after.mask == state.mask


def best_of_each(scores: dict[int, float]) -> set[int]:
    """K^l of each layer."""
    return {i for layer, k in zip(spans(SIZES), COUNTS, strict=True) for i in largest({i: scores[i] for i in layer if i in scores}, k)}


def best_of_all(scores: dict[int, float]) -> set[int]:
    """As many as all layers have together, of which each has at least its best one."""
    first = {i for layer in spans(SIZES) for i in largest({i: scores[i] for i in layer if i in scores}, 1)}
    return first | set(largest({i: score for i, score in scores.items() if i not in first}, sum(COUNTS) - len(first)))


@settings(max_examples=60)
@given(seeds, st.sampled_from([0.0, 0.4, 1.0]), st.booleans())
def test_links_of_all_layers_compete(seed, gamma, outer):
    """Importance is judged among all active links, with Σ κ^l important ones, and links are drawn over all layers."""
    index = 2 if outer else 3
    state, alpha, beta = start(seed)
    current = round_of(index, SCHEDULE, state.mask)
    after = updated(FedRTS(gamma=gamma, scope="global"), state, index, seed)
    clients = replies(seed, state, current.quota if outer else None)
    total, active = sum(samples for samples, _, _ in clients), state.mask.active.tolist()

    def core(weights: torch.Tensor) -> set[int]:
        return set(largest({i: abs(float(weights[place])) for place, i in enumerate(active)}, sum(current.core)))

    mean = core(sum((samples * weights.double() for samples, weights, _ in clients), torch.zeros((), dtype=torch.float64)) / total)
    own = [core(weights) for _, weights, _ in clients]
    for i in range(LINKS):
        if i in active:
            x = gamma * (i in mean) + (1 - gamma) * sum(n for (n, _, _), best in zip(clients, own, strict=True) if i in best) / total
        elif outer:
            x = gamma / 2 + (1 - gamma) * sum(n for n, _, names in clients if i in names) / total
        else:
            assert float(after["alpha"][i]) == pytest.approx(alpha[i])
            continue
        assert float(after["alpha"][i]) == pytest.approx(alpha[i] + 10 * x, rel=1e-5, abs=1e-4)
        assert float(after["beta"][i]) == pytest.approx(beta[i] + 10 * (1 - x), rel=1e-5, abs=1e-4)
    if outer:
        xi = posterior.draw(after["alpha"], after["beta"], random.key(seed, "topology")).tolist()
        assert set(after.mask.active.tolist()) == best_of_all(dict(enumerate(xi)))
    else:
        assert after.mask == state.mask


@pytest.mark.parametrize("method", ["fedrts", "fedrts_trial", "feddst", "fedsgc", "fedcucb"])
def test_a_run_whose_layers_exchange_links(toy, method):
    """Layers gain and lose links, the whole does not, and messages still fit the mask that clients were sent."""
    run = toy(method, "cnn", method_options={"scope": "global"}, topology={"interval": 2, "end": 6}, rounds=7)
    first = run.method.begin(run.setup).mask
    played = list(rounds.play(run.plan, run.method.begin(run.setup), -1))
    assert {one.state.mask.number for one in played} == {first.number}
    assert all(min(one.state.mask.counts) >= 1 for one in played)
    assert played[-1].state.mask.counts != first.counts
    assert not any(one.record.rejected for one in played)


@settings(max_examples=60)
@given(seeds)
def test_the_core_of_the_average_stays(seed):
    """The κ^l links of largest |W^agg| are active whatever is drawn; the largest draws have the other K^l − κ^l places."""
    state, _, _ = start(seed)
    after = updated(FedRTS(keep="core"), state, 2, seed)
    current = round_of(2, SCHEDULE, state.mask)
    total, mean = 0, torch.zeros(len(state.values), dtype=torch.float64)
    for samples, weights, _ in replies(seed, state, current.quota):
        total, mean = total + samples, mean + samples * weights.double()
    strength = dict(zip(state.mask.active.tolist(), (mean / total).abs().tolist(), strict=False))
    xi = posterior.draw(after["alpha"], after["beta"], random.key(seed, "topology")).tolist()
    expected: set[int] = set()
    for layer, count, kappa in zip(spans(SIZES), COUNTS, current.core, strict=True):
        core = set(largest({i: strength[i] for i in layer if i in strength}, kappa))
        expected |= core | set(largest({i: xi[i] for i in layer if i not in core}, count - kappa))
    assert set(after.mask.active.tolist()) == expected
    free = updated(FedRTS(), state, 2, seed)
    assert torch.equal(after["alpha"], free["alpha"]), "what is learned does not depend on who may stay"


@settings(max_examples=40)
@given(seeds, st.integers(1, 4), st.booleans())
def test_new_links_are_not_judged_before_their_time(seed, patience, outer):
    """X = None for links that have been active for no more than so many rounds; inactive links are judged as ever."""
    index = 6 if outer else 7
    state, alpha, beta = start(seed)
    since = (random.uniform(seed + 9, LINKS) * 8).int() - 1
    state = state.remember(since=since)
    after = updated(FedRTS(patience=patience), state, index, seed)
    plain = updated(FedRTS(), state, index, seed)
    for i in range(LINKS):
        young = bool(state.mask.bits[i]) and index <= int(since[i]) + patience
        for name, before in (("alpha", alpha[i]), ("beta", beta[i])):
            expected = before if young else float(plain[name][i])
            assert float(after[name][i]) == pytest.approx(expected, rel=1e-5)
        grown = bool(after.mask.bits[i]) and not bool(state.mask.bits[i])
        assert int(after["since"][i]) == (index if grown else int(since[i]))


def test_first_links_are_judged_at_once(toy):
    run = toy("fedrts", "cnn", method_options={"patience": 3})
    usual = toy("fedrts", "cnn")
    first, other = (rounds.play_round(one.plan, one.method.begin(one.setup), 0).state for one in (run, usual))
    assert torch.equal(first["alpha"], other["alpha"])
    assert first.mask == other.mask


@settings(max_examples=40)
@given(seeds, st.sampled_from([0.1, 1.0]))
def test_new_links_start_down_the_gradient(seed, step):
    """W_i = −η·mean|W^agg of the layer|·Σ p_k sign(g^k_i) of a new link, where g^k_i counts as 0 unless client k named it."""
    state, _, _ = start(seed)
    current, method, sums = round_of(2, SCHEDULE, state.mask), FedRTS(start=step), Sums()
    total, mean, signs = 0, torch.zeros(len(state.values), dtype=torch.float64), [0.0] * LINKS
    for samples, weights, named in replies(seed, state, current.quota):
        gradient = 1e30 * (random.uniform(random.key(seed, samples), len(named)) - 0.5)
        message: Message = {"weights": weights, "votes": Selection(torch.tensor(named, dtype=torch.int64), LINKS, gradient)}
        sums.add(method.contribution(message, state, current), samples)
        total, mean = total + samples, mean + samples * weights.double()
        for link, slope in zip(named, gradient.tolist(), strict=True):
            signs[link] += samples * (1.0 if slope > 0 else -1.0)
    after = method.update(state, sums.mean(), current, lambda purpose: random.key(seed, purpose))
    aggregate = dict(zip(state.mask.active.tolist(), (mean / total).tolist(), strict=False))
    for layer in spans(SIZES):
        own = [abs(aggregate[i]) for i in layer if i in aggregate]
        for i in layer:
            fresh = -step * sum(own) / len(own) * signs[i] / total
            expected = aggregate.get(i, fresh) if bool(after.mask.bits[i]) else 0.0
            assert float(after.weights[i]) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    free = updated(FedRTS(), state, 2, seed)
    assert after.mask == free.mask
    assert torch.equal(after["alpha"], free["alpha"]), "a vote counts as ever"


def test_gradients_travel_only_where_new_links_start_with_them(toy):
    run, usual = toy("fedrts", "cnn", method_options={"start": 0.5}), toy("fedrts", "cnn")
    state = run.method.begin(run.setup)
    played, other = (rounds.play_round(one.plan, state, 0) for one in (run, usual))
    named = 3 * sum(run.plan.round(0, state.mask).quota)
    assert played.record.upload_bytes - other.record.upload_bytes == 4 * named, "four bytes for every link that three clients name"
    grown = played.state.mask.bits & ~state.mask.bits
    assert bool((played.state.weights[: len(grown)][grown] != 0).any())
    assert played.state.mask == other.state.mask


def test_groups_have_no_sign_to_start_with(toy):
    run = toy("fedrts", "cnn", method_options={"start": 0.5}, topology={"unit": "kernel"})
    with pytest.raises(InputError, match=r"method_options\.start needs topology\.unit = link"):
        run.method.begin(run.setup)


@pytest.mark.parametrize("option", [{"keep": "core"}, {"patience": 2}])
@pytest.mark.parametrize("method", ["fedrts", "fedrts_trial", "fedrts_gamma1"])
def test_a_run_whose_new_links_have_time(toy, method, option):
    """Every variant of FedRTS takes them, with grouped links too; no reply is refused and K^l stays."""
    run = toy(method, "cnn", method_options=option, topology={"interval": 2, "end": 6, "unit": "kernel"}, rounds=7)
    first = run.method.begin(run.setup).mask
    played = list(rounds.play(run.plan, run.method.begin(run.setup), -1))
    assert {one.state.mask.counts for one in played} == {first.counts}
    assert not any(one.record.rejected for one in played)


@pytest.mark.parametrize(
    ("option", "value"),
    [("discount", 0.0), ("discount", 1.5), ("candidates", "nobody"), ("scope", "unit"), ("keep", "all"), ("patience", -1), ("start", 2.0)],
)
def test_options_that_are_none(option, value):
    with pytest.raises(InputError, match=rf"method_options\.{option}") as caught:
        config.resolve({"method": "fedrts", "method_options": {option: value}})
    assert "\n" not in str(caught.value)


# -- trials ----------------------------------------------------------------------------------------------------------


def own_models(seed: int, state: State, quota: tuple[int, ...], clients: int = 3) -> list[tuple[int, dict[int, float], torch.Tensor]]:
    """(samples, {link: weight} on the client's own mask, the rest) of clients that have each exchanged Q^l links."""
    found = []
    for client in range(clients):
        links: list[int] = []
        for layer, q in zip(spans(SIZES), quota, strict=True):
            on, off = ([i for i in layer if bool(state.mask.bits[i]) == active] for active in (True, False))
            dropped, grown = (
                random.permutation(random.key(seed, client, layer.start, w), len(s)).tolist() for w, s in (("-", on), ("+", off))
            )
            links += [on[j] for j in dropped[: len(on) - q]] + [off[j] for j in grown[:q]]
        numbers = (random.uniform(random.key(seed, "own", client), LINKS) - 0.5).tolist()
        found.append((5 * client + 3, {i: numbers[i] for i in sorted(links)}, torch.full((REST,), float(client))))
    return found


@settings(max_examples=60)
@given(seeds, st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from(["all", "named"]), st.sampled_from([1.0, 0.5]), st.booleans())
def test_trials_by_hand(seed, gamma, candidates, keep, apart):
    state, alpha, beta = start(seed)
    current = round_of(2, SCHEDULE, state.mask)
    method = FedRTSTrial(gamma=gamma, candidates=candidates, discount=keep, scale=7.0, scope="layer" if apart else "global")
    models, sums = own_models(seed, state, current.quota), Sums()
    for samples, model, rest in models:
        bits = torch.zeros(LINKS, dtype=torch.bool)
        bits[list(model)] = True
        own = OwnValues(Mask(bits, SIZES), torch.cat([torch.tensor(list(model.values())), rest]))
        sums.add(method.contribution({"weights": own}, state, current), samples)
    after = method.update(state, sums.mean(), current, lambda purpose: random.key(seed, purpose))

    best = best_of_each if apart else best_of_all
    total = sum(samples for samples, _, _ in models)
    share = [sum(n for n, model, _ in models if i in model) / total for i in range(LINKS)]
    merged = [
        np.float32(sum(n * model.get(i, 0.0) for n, model, _ in models) / total) / np.float32(share[i]) if share[i] else np.float32(0)
        for i in range(LINKS)
    ]
    strongest = best({i: float(abs(value)) for i, value in enumerate(merged)})
    for i in range(LINKS):
        aggregate = (i in strongest) if state.mask.bits[i] else 0.5
        x = gamma * aggregate + (1 - gamma) * share[i]
        assert float(after["alpha"][i]) == pytest.approx(1 + keep * (alpha[i] - 1) + 7 * x, rel=1e-5, abs=1e-4)
        assert float(after["beta"][i]) == pytest.approx(1 + keep * (beta[i] - 1) + 7 * (1 - x), rel=1e-5, abs=1e-4)
    xi = posterior.draw(after["alpha"], after["beta"], random.key(seed, "topology")).tolist()
    chosen = best({i: xi[i] for i in range(LINKS) if candidates == "all" or bool(state.mask.bits[i]) or share[i]})
    assert set(after.mask.active.tolist()) == chosen
    expected = [float(merged[i]) if i in chosen else 0.0 for i in range(LINKS)]
    assert after.weights[:LINKS].tolist() == pytest.approx(expected, rel=1e-5), "a link that was tried keeps its weight"
    assert after.weights[LINKS:].tolist() == pytest.approx([sum(n * k for k, (n, _, _) in enumerate(models)) / total] * REST)


def test_trials_are_feddst_on_clients_and_fedrts_in_inner_rounds(toy):
    """The same messages as FedDST's in outer rounds; in inner rounds the same step as FedRTS's."""
    trial, dst, rts = toy("fedrts_trial", "cnn"), toy("feddst", "cnn"), toy("fedrts", "cnn", method_options={"discount": 0.8})
    state = trial.method.begin(trial.setup)
    assert trial.plan.round(3, state.mask).outer
    outer = [rounds.play_round(run.plan, state, 3) for run in (trial, dst)]
    assert outer[0].record.upload_bytes == outer[1].record.upload_bytes
    assert outer[0].record.download_bytes == outer[1].record.download_bytes
    assert outer[0].state.mask.counts == outer[1].state.mask.counts
    both = outer[0].state.mask.bits & outer[1].state.mask.bits
    links = len(both)
    assert torch.equal(outer[0].state.weights[:links][both], outer[1].state.weights[:links][both]), "the merge is FedDST's"
    inner = [rounds.play_round(run.plan, state, 2).state for run in (trial, rts)]
    assert torch.equal(inner[0].weights, inner[1].weights)
    assert all(torch.equal(inner[0][name], inner[1][name]) for name in ("alpha", "beta"))

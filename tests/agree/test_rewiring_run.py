"""PruneFL, FedDST, FedSGC and FedCUCB in a running federation: an inner, an outer and an inner round against plain clients and sets."""

import math
from dataclasses import replace

import pytest
import torch

from fedrts.methods.contract import State
from fedrts.server import rounds
from fedrts.server.aggregate import Sums
from fedrts.server.guard import Guard
from fedrts.sparse.mask import Mask
from fedrts.wire.fields import OwnValues
from helping import ask
from plain import Plain, bits_of, largest, rigl, spans

SKEWED = {"partition": "dirichlet", "alpha": 1.0, "min_size": 3}
EPOCHS = 3
ROUNDS = (2, 3, 4)  # inner, outer, inner: the interval is 3


def federation(toy, method, adjust=0.4, **options):
    run = toy(method, "cnn", topology={"adjust": adjust}, clients=SKEWED, train={"epochs": EPOCHS}, method_options=options)
    assert [run.plan.schedule.is_outer(index) for index in ROUNDS] == [False, True, False]
    return run, Plain(run)


def quota_by_hand(run, index, mask):
    """Q^l = min(⌊f(t)·K^l⌋, n^l − K^l) with f(t) = α/2·(1 + cos(πt/T_end))."""
    fraction = run.experiment.topology.adjust / 2 * (1 + math.cos(math.pi * index / 6))
    return [min(math.floor(fraction * k), n - k) for k, n in zip(mask.counts, run.layout.sizes, strict=True)]


def trained_plainly(plain, state, index, clients):
    """The clients' models after training on the server's mask, and their mean squared gradients."""
    model, masks = plain.model(state.weights), plain.masks(state.mask)
    return {client: plain.train(model, masks, client, index, range(EPOCHS)) for client in clients}


def check_inner(run, plain, before, after, index, old_share=0.0):
    """W = Σ p_k W^k on the mask that there was."""
    clients = run.plan.sample(index)
    mean = plain.mean({client: plain.vector(model) for client, (model, _) in trained_plainly(plain, before, index, clients).items()})
    expected = (1 - old_share) * mean + old_share * before.weights
    torch.testing.assert_close(after.weights.double(), expected, rtol=1e-5, atol=1e-6)
    assert after.mask == before.mask
    return expected


def check_state(after, links, weights):
    """The links of the mask, and weights `[n]` of which those on it stay."""
    assert set(after.mask.active.tolist()) == links
    expected = after.mask.expand(after.mask.compact(weights))
    torch.testing.assert_close(after.weights.double(), expected.double(), rtol=1e-5, atol=1e-6)


# -- PruneFL ---------------------------------------------------------------------------------------------------------


def test_prunefl(toy):
    run, plain = federation(toy, "prunefl")
    state, links = run.method.begin(run.setup), run.layout.links
    for index in ROUNDS:
        after = rounds.play_round(run.plan, state, index).state
        if index != 3:
            check_inner(run, plain, state, after, index)
        else:
            trained = trained_plainly(plain, state, index, run.plan.sample(index))
            mean = plain.mean({client: plain.vector(model) for client, (model, _) in trained.items()})
            squares = plain.mean({client: plain.over_links(squares) for client, (_, squares) in trained.items()})
            assert float(squares[~state.mask.bits].max()) > 0, "unmasked"
            stay, now = rigl(mean[:links].abs(), squares, state.mask.bits, quota_by_hand(run, index, state.mask), run.layout.sizes)
            mean[:links][~bits_of(stay, links)] = 0
            check_state(after, now, mean)
            uploads = ask(run, run.method.exchanges(run.plan.round(3, state.mask))[0], state, 3, run.plan.sample(index))
            for reply in uploads:
                own = plain.over_links(trained[reply.client][1])
                torch.testing.assert_close(reply.message["squares"], own, rtol=1e-3, atol=1e-8)
        state = after


@pytest.mark.parametrize(("adjust", "shrinks"), [(0.4, False), (1.0, True)])
def test_adaptive_prunefl_maximises_gamma(toy, adjust, shrinks):
    """Γ = Σ g² / (c + links), c the unpruned parameters; no prefix of the sorted candidates has a larger Γ than the final set."""
    run, plain = federation(toy, "prunefl", adjust, adaptive=True)
    before = rounds.play_round(run.plan, run.method.begin(run.setup), 2).state
    after = rounds.play_round(run.plan, before, 3).state
    trained = trained_plainly(plain, before, 3, run.plan.sample(3))
    mean = plain.mean({client: plain.vector(model) for client, (model, _) in trained.items()})
    squares = plain.mean({client: plain.over_links(squares) for client, (_, squares) in trained.items()})
    links, quota = run.layout.links, quota_by_hand(run, 3, before.mask)
    stay, _ = rigl(mean[:links].abs(), squares, before.mask.bits, quota, run.layout.sizes)
    cost = run.layout.parameters - links
    assert cost != run.layout.length - links, "statistics are no parameters"
    order = sorted(set(range(links)) - stay, key=lambda i: (-float(squares[i]), i))
    gammas = [float(squares[sorted(stay)].sum()) / (cost + len(stay))]
    for taken in range(1, len(order) + 1):
        gammas.append(float(squares[sorted(stay | set(order[:taken]))].sum()) / (cost + len(stay) + taken))
    allowed = before.mask.number - len(stay)
    best = max(range(allowed + 1), key=lambda taken: (gammas[taken], -taken))
    chosen = stay | set(order[:best])
    assert set(after.mask.active.tolist()) == chosen
    final = gammas[best]
    assert all(final >= gamma for gamma in gammas[: allowed + 1])
    assert (len(chosen) < before.mask.number) == shrinks
    mean[:links][~bits_of(stay, links)] = 0
    check_state(after, chosen, mean)


def test_what_an_adaptive_model_costs_counts_no_statistics(toy, monkeypatch):
    from fedrts.methods import prunefl

    costs = []
    greedy = prunefl.greedy

    def watched(squares, kept, cost, most):
        costs.append(cost)
        return greedy(squares, kept, cost, most)

    monkeypatch.setattr(prunefl, "greedy", watched)
    run, _ = federation(toy, "prunefl", adaptive=True)
    rounds.play_round(run.plan, run.method.begin(run.setup), 3)
    assert costs == [run.layout.parameters - run.layout.links]


# -- FedDST and FedSGC -----------------------------------------------------------------------------------------------


def in_two_steps(values, preferred, guided, wanted):
    """Up to `guided` of the preferred links first, then whatever is largest."""
    first = largest({i: v for i, v in values.items() if i in preferred}, guided)
    return first | largest({i: v for i, v in values.items() if i not in first}, wanted - len(first))


def rewired_plainly(run, plain, state, index, client, direction=None):
    """A client's own links and model after an outer round: half of the epochs, one gradient, the RigL step, the other half."""
    received, masks, links = plain.model(state.weights), plain.masks(state.mask), run.layout.links
    half, _ = plain.train(received, masks, client, index, range(EPOCHS // 2))
    gradient = plain.over_links(plain.gradient(half, plain.batches(client, index, EPOCHS)[:1]))
    weights, old = plain.over_links(half), plain.over_links(received)
    stay, now = set(), set()
    for layer, q in zip(spans(run.layout.sizes), quota_by_hand(run, index, state.mask), strict=True):
        active = {i for i in layer if state.mask.bits[i]}
        accord = dict.fromkeys(layer, 0.0)
        if direction is not None:
            local = {i: float(torch.sign(weights[i] - old[i]) if i in active else -torch.sign(gradient[i])) for i in layer}
            accord = {i: local[i] * float(direction[i]) for i in layer}
        guided = math.floor(0.5 * q)
        dropped = in_two_steps({i: -abs(float(weights[i])) for i in active}, {i for i in active if accord[i] < 0}, guided, q)
        kept = active - dropped
        free = {i: abs(float(gradient[i])) for i in layer if i not in kept}
        grown = in_two_steps(free, {i for i in free if accord[i] > 0}, guided, q)
        stay |= kept
        now |= kept | grown
    for name, kept in run.layout.by_name(bits_of(stay, links)).items():
        half[name] = half[name] * kept
    whole, _ = plain.train(half, run.layout.by_name(bits_of(now, links)), client, index, range(EPOCHS // 2, EPOCHS))
    return now, plain.vector(whole)


def merged_plainly(run, plain, state, own, absent):
    """Per link the mean over those who have it, weighted by samples; `absent` samples hold the old model on the old mask."""
    links = run.layout.links
    models = [(plain.samples(client), bits_of(has, links), weights.double()) for client, (has, weights) in own.items()]
    models += [(absent, state.mask.bits, state.weights.double())] if absent else []
    total = sum(samples for samples, _, _ in models)
    merged = sum(samples / total * weights for samples, _, weights in models)
    for i in range(links):
        holders = [(samples, float(weights[i])) for samples, has, weights in models if has[i]]
        merged[i] = sum(n * w for n, w in holders) / sum(n for n, _ in holders) if holders else 0.0
    return merged


@pytest.mark.parametrize(("method", "residual"), [("feddst", None), ("fedsgc", False), ("fedsgc", True)])
def test_clients_that_rewire(toy, method, residual):
    run, plain = federation(toy, method, **({} if residual is None else {"residual": residual}))
    state, links = run.method.begin(run.setup), run.layout.links
    everybody = sum(len(rows) for rows in run.rows)
    direction = torch.zeros(links)
    for index in (0, *ROUNDS):  # an outer round more: its merge leaves directions of inactive links behind
        clients = run.plan.sample(index)
        absent = everybody - sum(plain.samples(client) for client in clients) if residual else 0
        after = rounds.play_round(run.plan, state, index).state
        if not run.plan.schedule.is_outer(index):
            expected = check_inner(run, plain, state, after, index, absent / everybody)
            change = (expected[:links] - state.weights[:links]).double()
            direction = torch.where(state.mask.bits, torch.sign(change), direction.double())
        else:
            guide = direction if method == "fedsgc" else None
            assert bool(direction[~state.mask.bits].any()) == (index > 0)
            own = {client: rewired_plainly(run, plain, state, index, client, guide) for client in clients}
            assert len({frozenset(has) for has, _ in own.values()}) > 1, "masks of their own"
            (exchange,) = run.method.exchanges(run.plan.round(index, state.mask))
            for reply in ask(run, exchange, state, index, clients):
                has, weights = own[reply.client]
                upload = reply.message["weights"]
                assert set(upload.mask.active.tolist()) == has
                assert upload.mask.counts == state.mask.counts
                torch.testing.assert_close(upload.mask.expand(upload.values), weights, rtol=1e-5, atol=1e-6)
            merged = merged_plainly(run, plain, state, own, absent)
            layers = zip(spans(run.layout.sizes), state.mask.counts, strict=True)
            now = set().union(*(largest({i: abs(float(merged[i])) for i in layer}, k) for layer, k in layers))
            check_state(after, now, merged)
            change = (merged[:links] - state.weights[:links]).double()
            direction = torch.sign(change)
        if method == "fedsgc":
            differs = after["direction"].double() != direction
            assert bool((change[differs].abs() < 1e-6).all()), "rounding may turn the sign of a change next to nothing"
            assert int(differs.sum()) < links / 100
            direction = after["direction"].double()
        state = after


def test_absent_clients_that_are_nobody_change_nothing(toy):
    clients = {**SKEWED, "per_round": 5}
    states = []
    for residual in (False, True):
        run = toy("fedsgc", "cnn", clients=clients, method_options={"residual": residual})
        states.append([played.state for played in rounds.play(run.plan, run.method.begin(run.setup), -1)])
    for a, b in zip(*states, strict=True):
        assert a.mask == b.mask
        torch.testing.assert_close(a.weights, b.weights, rtol=0, atol=0)
        assert torch.equal(a["direction"], b["direction"])


def test_clients_that_drop_out_count_as_absent(toy):
    run = toy("fedsgc", "cnn", clients={**SKEWED, "dropout": 0.4}, method_options={"residual": True})
    plain, state = Plain(run), run.method.begin(run.setup)
    played = next(
        (index, found) for index in (1, 2, 4, 5) if 0 < len((found := rounds.play_round(run.plan, state, index)).record.clients) < 3
    )
    index, found = played
    replies = ask(run, run.method.exchanges(run.plan.round(index, state.mask))[0], state, index, found.record.clients)
    mean = plain.mean({reply.client: state.mask.expand(reply.message["weights"]) for reply in replies})
    share = sum(plain.samples(client) for client in found.record.clients) / sum(len(rows) for rows in run.rows)
    torch.testing.assert_close(found.state.weights.double(), share * mean + (1 - share) * state.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["feddst", "fedsgc"])
def test_a_cap_on_votes_does_not_bend_the_mean_over_those_who_have_a_link(toy, method):
    """Who has a link is no vote: the mean is weighted by samples above and below the line."""
    run = toy(method, "mlp", guard={"max_share": 0.4})
    bits = [Mask(torch.tensor(b, dtype=torch.bool), [4]) for b in ([1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0])]
    state = State(torch.zeros(2), bits[0]).remember(direction=torch.zeros(4, dtype=torch.int8))
    samples = {0: 80, 1: 10, 2: 10}
    votes = Guard(max_share=0.4).weights(samples)
    assert votes != samples
    sums = Sums()
    current = replace(run.plan.round(0, state.mask), counts=(2,), quota=(1,))
    for client, mask in enumerate(bits):
        message = {"weights": OwnValues(mask, torch.tensor([3.0, 1.0] if client == 0 else [1.0, 2.0]))}
        sums.add(run.method.contribution(message, state, current), samples[client], votes[client])
    after = run.method.update(state, sums.mean(), current, lambda purpose: 0)
    assert after.weights.tolist() == pytest.approx([3.0, 0.0, 2.0, 0.0])


# -- FedCUCB ---------------------------------------------------------------------------------------------------------


def test_fedcucb(toy):
    run, plain = federation(toy, "fedcucb")
    state, links = run.method.begin(run.setup), run.layout.links
    mean_x, tried = [0.0] * links, [0] * links
    for updates, index in enumerate(ROUNDS, start=1):
        clients = run.plan.sample(index)
        trained = {client: model for client, (model, _) in trained_plainly(plain, state, index, clients).items()}
        vectors = {client: plain.vector(model) for client, model in trained.items()}
        aggregate, quota = plain.mean(vectors), quota_by_hand(run, index, state.mask)
        total = sum(plain.samples(client) for client in clients)
        shares = {client: plain.samples(client) / total for client in clients}
        gradients = {
            client: plain.over_links(plain.gradient(model, plain.batches(client, index, EPOCHS)[:1])).abs()
            for client, model in trained.items()
        }
        outcome: dict[int, float] = {}
        for layer, q in zip(spans(run.layout.sizes), quota, strict=True):
            active = [i for i in layer if state.mask.bits[i]]
            core = largest({i: abs(float(aggregate[i].float())) for i in active}, len(active) - q)
            own = {c: largest({i: abs(float(vectors[c][i])) for i in active}, len(active) - q) for c in clients}
            outcome |= {i: 0.5 * (i in core) + 0.5 * sum(shares[c] * (i in own[c]) for c in clients) for i in active}
            if index == 3:
                free = [i for i in layer if not state.mask.bits[i]]
                votes = {c: largest({i: float(gradients[c][i]) for i in free}, q) for c in clients}
                outcome |= {i: 0.25 + 0.5 * sum(shares[c] * (i in votes[c]) for c in clients) for i in free}
        for i, x in outcome.items():
            tried[i] += 1
            mean_x[i] = (mean_x[i] * (tried[i] - 1) + x) / tried[i]
        after = rounds.play_round(run.plan, state, index).state
        assert after["tried"].tolist() == tried
        assert after["mean"].tolist() == pytest.approx(mean_x, abs=1e-5)
        if index == 3:
            bound = after["mean"].double() + torch.sqrt(3 * math.log(updates) / (2 * after["tried"].double()))
            layers = zip(spans(run.layout.sizes), state.mask.counts, strict=True)
            now = set().union(*(largest({i: float(bound[i].float()) for i in layer}, k) for layer, k in layers))
            worst = {i: float(bound[i]) for i in now ^ set(after.mask.active.tolist())}
            assert len({round(value, 4) for value in worst.values()}) <= 1, "links may change places only where they tie"
            check_state(
                after,
                set(after.mask.active.tolist()),
                aggregate.where(torch.cat([state.mask.bits, torch.ones(len(aggregate) - links, dtype=torch.bool)]), 0.0),
            )
        else:
            check_inner(run, plain, state, after, index)
        state = after


@pytest.mark.parametrize(("type", "share"), [("float16", 0.62), ("int8", 0.5), ("int6", 0.48), ("int4", 0.44), ("int2", 0.4)])
def test_values_on_ones_own_mask_travel_in_fewer_bits_and_the_server_keeps_its_precision(toy, type, share):
    """Clients that learn nothing: however the weights are rounded on the way, the server's stay as they were."""
    whole, short = (
        toy("feddst", "cnn", train={"lr": 1e-12}, topology={"adjust": 0.0}, wire={"value_type": kind}) for kind in ("float32", type)
    )
    before = whole.method.begin(whole.setup)
    (first, second) = (rounds.play_round(run.plan, before, 0) for run in (whole, short))
    assert second.record.upload_bytes < share * first.record.upload_bytes
    parameters = whole.layout.parameters
    torch.testing.assert_close(second.state.weights[:parameters], before.weights[:parameters], rtol=0, atol=1e-7)

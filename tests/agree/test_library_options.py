"""Options that follow the authors' library where it differs from the paper: each against its rule, link by link."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import byhand
import fedrts
from fedrts.errors import InputError
from fedrts.methods import FedMef, FedRTSEarly, FedRTSNoTS
from fedrts.methods.contract import State, Train
from fedrts.methods.fedmef import weak_marks
from fedrts.server import rounds
from fedrts.server.aggregate import Sums
from fedrts.sparse import posterior, random
from fedrts.sparse.mask import Mask
from fedrts.sparse.schedule import Schedule
from fedrts.wire.fields import Message, Selection
from helping import ask, round_of
from plain import Plain, bits_of, rigl


def played(run):
    return [step.state for step in rounds.play(run.plan, run.method.begin(run.setup), -1)]


# -- train.amsgrad --------------------------------------------------------------------------------------------------------


def amsgrad_by_hand(run, state, index, client, rate, decay):
    """m ← 0.9m + 0.1g, v ← 0.999v + 0.001g², v̂ ← max(v̂, v): W ← W − η/(1 − 0.9^s) · m / (√v̂/√(1 − 0.999^s) + 1e-8), in float64."""
    model = byhand.Perceptron(run.layout.views(state.weights))
    masks = {name: bits.numpy() for name, bits in run.layout.by_name(state.mask.bits).items()}
    first, second, most = ({name: 0.0 * value for name, value in model.values.items()} for _ in range(3))
    for step, (x, y) in enumerate(byhand.batches(run, index, client, range(run.training.epochs)), start=1):
        for name, gradient in model.gradient(x, y).items():
            g = (gradient + decay * model.values[name]) * masks.get(name, 1.0)
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.999 * second[name] + 0.001 * g**2
            most[name] = (most[name] + second[name] + abs(most[name] - second[name])) / 2
        for name, value in model.values.items():
            scale = most[name] ** 0.5 / math.sqrt(1 - 0.999**step) + 1e-8
            value -= rate / (1 - 0.9**step) * first[name] / scale
    return torch.from_numpy(model.flat(run.layout.entries))


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_amsgrad_divides_by_the_largest_second_moment(toy, engine):
    train = {"optimizer": "adam", "lr": 0.02, "weight_decay": 0.01, "epochs": 9, "batch_size": 3}
    ends = {}
    for amsgrad in (False, True):
        run = toy("random", "mlp", engine={"name": engine}, train={**train, "amsgrad": amsgrad})
        state = run.method.begin(run.setup)
        (exchange,) = run.method.exchanges(run.plan.round(1, state.mask))
        (reply,) = ask(run, exchange, state, 1, [2])
        ends[amsgrad] = state.mask.expand(reply.message["weights"]).double()
    torch.testing.assert_close(ends[True], amsgrad_by_hand(run, state, 1, 2, 0.02, 0.01), rtol=1e-3, atol=2e-5)
    assert (ends[True] - ends[False]).abs().max() > 1e-3, "without it the result is another"


def test_amsgrad_without_adam_is_a_mistake():
    with pytest.raises(InputError, match=r"train\.amsgrad belongs to train\.optimizer = 'adam'"):
        fedrts.config.resolve({"train": {"amsgrad": True}})


# -- topology.outer_at_end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedrts", "fedcucb", "fedtiny", "feddst", "fedrts_early"])
def test_the_last_outer_round_may_be_the_end(toy, method):
    """T_end = 4, ΔT = 2: rounds 0, 2 and, where asked for, 4 are outer. f is 0 there, yet the bandits choose all links anew."""
    states = {}
    for at_end in (False, True):
        run = toy(method, "cnn", rounds=7, topology={"interval": 2, "end": 4, "outer_at_end": at_end})
        steps = list(rounds.play(run.plan, run.method.begin(run.setup), -1))
        states[at_end] = {step.record.round: step.state for step in steps}
        assert [step.record.round for step in steps if step.record.outer] == ([0, 2, 4] if at_end else [0, 2])
    assert states[True][3].mask == states[False][3].mask
    assert (states[True][4].mask != states[True][3].mask) == (method in ("fedrts", "fedcucb")), "f = 0: RigL changes nothing"
    assert states[True][4].mask == states[True][5].mask == states[True][6].mask
    assert states[True][4].mask.counts == states[True][3].mask.counts


def test_at_the_end_fedrts_observes_and_draws_once_more(toy):
    """κ = K: every active link has X = 1, every inactive one γ/2; then α and β rest."""
    run = toy("fedrts", "mlp", rounds=7, topology={"interval": 2, "end": 4, "outer_at_end": True})
    steps = {step.record.round: step.state for step in rounds.play(run.plan, run.method.begin(run.setup), -1)}
    before, after, active = steps[3], steps[4], steps[3].mask.bits
    torch.testing.assert_close(after["alpha"], before["alpha"] + torch.where(active, 10.0, 2.5))
    torch.testing.assert_close(after["beta"], before["beta"] + torch.where(active, 0.0, 7.5))
    expected = Mask.top(posterior.draw(after["alpha"], after["beta"], run.plan.key(4, "topology")), before.mask.counts, before.mask.sizes)
    assert after.mask == expected
    assert torch.equal(steps[6]["alpha"], after["alpha"])


def test_costs_of_a_schedule_that_is_outer_until_the_end():
    """With ΔT = 1 the first inner round comes after T_end."""
    found = fedrts.cost(model="mlp", method="fedrts", rounds=3, topology={"interval": 1, "end": 2, "outer_at_end": True}, input_shape=(8,))
    assert {row.round for row in found.rows} == {"inner", "outer"}


# -- FedDST: adjust_after -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["serial", "batched"])
@pytest.mark.parametrize(("share", "epochs_before"), [(0.0, 0), (0.4, 1), (1.0, 3)])
def test_when_clients_rewire(toy, share, epochs_before, engine):
    """⌊share·3⌋ epochs, the gradient of a batch, the RigL step, the other epochs on the own mask."""
    run = toy("feddst", "cnn", method_options={"adjust_after": share}, train={"epochs": 3}, engine={"name": engine})
    plain, state, links, index = Plain(run), run.method.begin(run.setup), run.layout.links, 3
    (exchange,) = run.method.exchanges(run.plan.round(index, state.mask))
    quota = byhand.quota(index, 6, 0.4, state.mask.counts, run.layout.sizes)
    assert sum(quota)
    for reply in ask(run, exchange, state, index, [0, 3]):
        first, _ = plain.train(plain.model(state.weights), plain.masks(state.mask), reply.client, index, range(epochs_before))
        gradient = plain.over_links(plain.gradient(first, plain.batches(reply.client, index, 3)[:1]))
        stay, now = rigl(plain.over_links(first).abs(), gradient.abs(), state.mask.bits, quota, run.layout.sizes)
        for name, kept in run.layout.by_name(bits_of(stay, links)).items():
            first[name] = first[name] * kept
        own = run.layout.by_name(bits_of(now, links))
        last, _ = plain.train(first, own, reply.client, index, range(epochs_before, 3))
        upload = reply.message["weights"]
        assert set(upload.mask.active.tolist()) == now
        torch.testing.assert_close(upload.mask.expand(upload.values), plain.vector(last), rtol=1e-4, atol=1e-5)


# -- FedMef: bae_in, theta_low --------------------------------------------------------------------------------------------


def test_extrusion_in_all_rounds_until_the_end(toy):
    run = toy("fedmef", "mlp", method_options={"bae_in": "all"}, rounds=8)
    mask = run.method.begin(run.setup).mask
    trained = [run.method.training(run.plan.round(index, mask)) for index in range(8)]
    assert [step.influence is not None for step in trained] == [True] * 6 + [False] * 2, "T_end is 6"
    quotas = [step.marks.keywords["quota"] for step in trained[:6]]
    assert quotas == [tuple(byhand.quota(index, 6, 0.4, mask.counts, mask.sizes)) for index in range(6)], "f of the round itself"
    off = FedMef(bae=False, bae_in="all")
    assert all(off.training(run.plan.round(index, mask)) == Train() for index in range(8))


@pytest.mark.parametrize(("among", "index"), [("active", 1), ("all", 3), ("all", 1)])
def test_a_client_under_extrusion_in_any_round(toy, among, index):
    """θ ← θ − η·m·(g + 2λθ on θ_low), in NumPy; θ_low are the Q weakest of the active links, or of all entries of a layer."""
    penalty, rate = 0.4, 0.2
    options = {"penalty": penalty, "bae_in": "all", "theta_low": among}
    run = toy("fedmef", "mlp", method_options=options, train={"epochs": 2, "lr": rate}, density=0.8, topology={"adjust": 0.9})
    state, sizes = run.method.begin(run.setup), run.layout.sizes
    (exchange,) = run.method.exchanges(run.plan.round(index, state.mask))
    (reply,) = ask(run, exchange, state, index, [2])
    low = low_by_hand(state.weights.tolist(), state.mask, byhand.quota(index, 6, 0.9, state.mask.counts, sizes), among)
    flags = torch.zeros(run.layout.links)
    flags[sorted(low)] = 1.0
    marked = {name: part.numpy() for name, part in run.layout.by_name(flags).items()}
    masks = {name: bits.numpy() for name, bits in run.layout.by_name(state.mask.bits).items()}
    model = byhand.Perceptron(run.layout.views(state.weights))
    for x, y in byhand.batches(run, index, 2, range(2)):
        gradient = model.gradient(x, y)
        model.step({name: g + 2 * penalty * model.values[name] * marked.get(name, 0.0) for name, g in gradient.items()}, masks, rate)
    trained = state.mask.expand(reply.message["weights"]).double()
    torch.testing.assert_close(trained, torch.from_numpy(model.flat(run.layout.entries)), rtol=1e-4, atol=1e-6)


def low_by_hand(weights, mask, quotas, among):
    """The Q least magnitudes of each layer, of active links or of all entries; of equal ones the first stay."""
    low = set()
    for layer, q in zip(byhand.spans(mask.sizes), quotas, strict=True):
        mine = {i: abs(weights[i]) for i in layer if among == "all" or mask.bits[i]}
        low |= set(mine) - set(byhand.largest(mine, len(mine) - q))
    return low


@given(st.data())
def test_theta_low_over_all_entries_is_mostly_zeros(data):
    sizes = data.draw(st.lists(st.integers(2, 8), min_size=1, max_size=3))
    counts = [data.draw(st.integers(1, size)) for size in sizes]
    quota = tuple(data.draw(st.integers(0, min(k, n - k))) for k, n in zip(counts, sizes, strict=True))
    mask = Mask.top(random.uniform(data.draw(st.integers(0, 999)), sum(sizes)), counts, sizes)
    number = st.sampled_from([0.0, 0.5, -0.5]) | st.floats(-2, 2, width=32)
    weights = torch.tensor(data.draw(st.lists(number, min_size=sum(sizes), max_size=sum(sizes)))) * mask.bits
    for among in ("active", "all"):
        marks = weak_marks(weights, mask, quota, among)
        assert set(marks.nonzero().flatten().tolist()) == low_by_hand(weights.tolist(), mask, quota, among)
    nonzero = marks.bool() & (weights != 0)
    assert not bool(nonzero.any()), "Q ≤ n − K: the zeros of inactive entries suffice"


def test_remarks_are_of_active_links_alone(toy):
    run = toy("fedmef", "cnn", method_options={"theta_low": "all"})
    found = rounds.play_round(run.plan, run.method.begin(run.setup), 0)
    assert found.topology is not None
    assert found.topology["marked_dropped"] == 0.0, "none of the marked entries was active"


# -- fedrts_no_ts: score = "blend" ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_outer", [0, 2])
@pytest.mark.parametrize("old", [0.1, 0.6])
def test_a_model_blended_with_the_one_before(toy, old, first_outer):
    """W ← b·W_before + (1 − b)·W^agg from round 1 on, G alike from the second outer round on; a RigL step by |W| and |G|."""
    schedule = {"interval": 2, "end": 5, "adjust": 0.6, "first_outer": first_outer}
    options = {"score": "blend", "old": old}
    run = toy("fedrts_no_ts", "cnn", topology=schedule, clients=byhand.UNEQUAL, rounds=7, method_options=options)
    state, links, sizes = run.method.begin(run.setup), run.layout.links, run.layout.sizes
    gradient, moved = None, 0
    for index in range(7):
        _, samples, trained, gradients, _ = byhand.asked_for_everything(run, state, index)
        after = rounds.play_round(run.plan, state, index).state
        weights, before = byhand.mean(trained, samples), state.weights.tolist()
        if index > 0:
            weights = [old * w + (1 - old) * v for w, v in zip(before, weights, strict=True)]
        active = kept = new = set(state.mask.active.tolist())
        if gradients is not None:
            quotas = byhand.quota(index, 5, 0.6, byhand.counts(active, sizes), sizes)
            named = [byhand.uploads(g, active, sizes, quotas) for g in gradients]
            summed = byhand.mean_of_named(named, samples, links)
            gradient = summed if gradient is None else [old * g + (1 - old) * x for g, x in zip(gradient, summed, strict=True)]
            kept, new = byhand.rigl([abs(w) for w in weights[:links]], [abs(g) for g in gradient], active, sizes, quotas)
            torch.testing.assert_close(after["gradient"].double(), torch.tensor(gradient, dtype=torch.float64), rtol=1e-5, atol=1e-9)
            moved += new != active
        assert set(after.mask.active.tolist()) == new
        expected = [w if i in kept or i >= links else 0.0 for i, w in enumerate(weights)]
        torch.testing.assert_close(after.weights.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)
        state = after
    assert moved
    assert set(state.memory) == {"gradient"}


def test_a_blend_without_the_old_is_fedtiny_without_its_pool(toy):
    tiny = played(toy("fedtiny", "cnn", method_options={"abns": False}))
    blend = played(toy("fedrts_no_ts", "cnn", method_options={"score": "blend", "old": 0.0}))
    for a, b in zip(tiny, blend, strict=True):
        assert torch.equal(a.weights, b.weights)
        assert a.mask == b.mask
    assert played(toy("fedrts_no_ts", "cnn", method_options={"score": "blend"}))[-1].mask != blend[-1].mask
    with pytest.raises(ValueError, match="old"):
        FedRTSNoTS(score="blend", old=1.0)


# -- fedrts_early ---------------------------------------------------------------------------------------------------------


class Draws:
    """The package's Beta variates (tested on their own), and of which posteriors they were drawn.

    They are made by rejection: posteriors that differ in a last digit may give quite other ones, so that nobody can draw them again.
    """

    def __init__(self) -> None:
        self.draw, self.made = posterior.draw, list[tuple[list[float], list[float], list[float]]]()

    def __call__(self, alpha, beta, key):
        found = self.draw(alpha, beta, key)
        self.made.append((alpha.tolist(), beta.tolist(), found.double().tolist()))
        return found

    def by_hand(self, alpha, beta, seed, purpose):
        """The next ones, if they were drawn of these posteriors; ties apart."""
        *posteriors, draws = self.made.pop(0)
        assert posteriors == [pytest.approx(alpha, abs=1e-5), pytest.approx(beta, abs=1e-5)]
        chance = random.uniform(random.key(seed, f"{purpose}, ties"), len(alpha))
        return [x + 1e-9 * float(c) for x, c in zip(draws, chance.double(), strict=True)]


@st.composite
def histories(draw):
    sizes = draw(st.lists(st.integers(4, 9), min_size=1, max_size=3))
    counts = [draw(st.integers(2, size - 1)) for size in sizes]
    mask = Mask.top(random.uniform(draw(st.integers(0, 10**6)), sum(sizes)), counts, sizes)
    return (
        mask,
        draw(st.sampled_from([0.0, 0.5, 1.0])),
        draw(st.sampled_from([0.1, 4.0])),
        draw(st.integers(1, 3)),
        draw(st.integers(0, 10**6)),
    )


@settings(max_examples=40)
@given(histories())
def test_the_earlier_fedrts_link_by_link(history):
    """Outer, inner, outer, inner, outer: votes against active links add up over an interval; Q go, Q come, all is forgotten."""
    mask, gamma, scale, clients, seed = history
    method, samples = FedRTSEarly(density=0.5, gamma=gamma, scale=scale), [3, 7, 2][:clients]
    state = State(torch.zeros(mask.number), mask).remember(alpha=torch.zeros(len(mask.bits)), beta=torch.zeros(len(mask.bits)))
    alpha: dict[int, float] = {}
    beta: dict[int, float] = {}
    sizes, links = mask.sizes, len(mask.bits)
    generator = torch.Generator().manual_seed(seed)
    for index in range(5):
        current = round_of(index, Schedule(2, 10, adjust=0.9), state.mask)
        active, sums, named, models = set(state.mask.active.tolist()), Sums(), [], []
        quotas = byhand.quota(index, 10, 0.9, byhand.counts(active, sizes), sizes)
        for n in samples:
            models.append(torch.randn(len(active), generator=generator))
            message: Message = {"weights": models[-1]}
            if current.outer:
                named.append(byhand.uploads(torch.randn(links, generator=generator).tolist(), active, sizes, quotas))
                chosen = sorted(named[-1])
                values = torch.tensor([named[-1][i] for i in chosen])
                message["votes"] = Selection(torch.tensor(chosen, dtype=torch.int64), links, values)
            sums.add(method.contribution(message, state, current), n)
        drawn = Draws()
        with mock.patch.object(posterior, "draw", drawn):
            after = method.update(state, sums.mean(), current, lambda purpose, index=index: random.key(seed + index, purpose))

        full = [state.mask.expand(model).tolist() for model in models]
        weights = byhand.mean(full, samples)
        p = [n / sum(samples) for n in samples]
        for layer, q in zip(byhand.spans(sizes), quotas, strict=True):
            mine = [i for i in layer if i in active]
            weak = [set(byhand.largest({i: -abs(model[i]) for i in mine}, q)) for model in [*full, weights]]
            for i in mine:
                against = gamma * (i in weak[-1]) + (1 - gamma) * sum(share for share, low in zip(p, weak, strict=False) if i in low)
                alpha[i] = alpha.get(i, q / len(mine)) + scale * against
                beta[i] = beta.get(i, q / len(mine)) + scale * (1 - against)
        new = active
        if current.outer:
            order = sorted(active)
            draws = dict(zip(order, drawn.by_hand([alpha[i] for i in order], [beta[i] for i in order], seed + index, "drop"), strict=True))
            gone = set()
            for layer, q in zip(byhand.spans(sizes), quotas, strict=True):
                gone |= set(byhand.largest({i: draws[i] for i in layer if i in active}, q))
            kept, summed = active - gone, byhand.mean_of_named(named, samples, links)
            shapes = [(0.0, 0.0)] * links
            for layer, q in zip(byhand.spans(sizes), quotas, strict=True):
                agreed = byhand.largest({i: abs(summed[i]) for i in layer if i not in active}, q)
                few = q / sum(i not in kept for i in layer)
                for i in layer:
                    u = gamma * (i in agreed) + (1 - gamma) * sum(share for share, own in zip(p, named, strict=True) if i in own)
                    shapes[i] = (scale * u + few, few if u > 0 else few + scale * (1 - few))
            draws = drawn.by_hand([a for a, _ in shapes], [b for _, b in shapes], seed + index, "grow")
            new = set(kept)
            for layer, q in zip(byhand.spans(sizes), quotas, strict=True):
                new |= set(byhand.largest({i: draws[i] for i in layer if i not in kept}, q))
            alpha, beta = {}, {}
        assert set(after.mask.active.tolist()) == new
        assert after.mask.counts == mask.counts
        expected = [w if i in new else 0.0 for i, w in enumerate(weights)]
        assert after.weights.tolist() == pytest.approx(expected, abs=1e-6)
        assert after["alpha"].tolist() == pytest.approx([alpha.get(i, 0.0) for i in range(links)], abs=1e-5)
        assert after["beta"].tolist() == pytest.approx([beta.get(i, 0.0) for i in range(links)], abs=1e-5)
        state = after


def test_almost_only_named_links_grow(toy):
    """Where FedRTS's draw chooses links that nobody named, the earlier one hardly does; and it exchanges no more than Q."""
    run = toy("fedrts_early", "cnn", clients=byhand.UNEQUAL)
    state = run.method.begin(run.setup)
    current = run.plan.round(0, state.mask)
    (exchange,) = run.method.exchanges(current)
    replies = ask(run, exchange, state, 0, run.plan.sample(0))
    named = torch.cat([reply.message["votes"].indices for reply in replies]).unique()
    after = rounds.play_round(run.plan, state, 0).state
    grown = (after.mask.bits & ~state.mask.bits).nonzero().flatten()
    assert 0 < len(grown) <= sum(current.quota)
    assert torch.isin(grown, named).float().mean() > 0.8


def test_equal_draws_are_decided_by_chance_and_not_by_place():
    """With Q/n small most draws of named links round to 1: the first of them must not always win."""
    links, q = 400, 4
    mask = Mask(torch.arange(links) < 20, [links])
    state = State(torch.ones(20), mask).remember(alpha=torch.zeros(links), beta=torch.zeros(links))
    current, chosen = round_of(0, Schedule(1, 10, adjust=0.2), mask), torch.zeros(links)
    assert current.quota == (q,)
    method, tops = FedRTSEarly(density=0.5, gamma=0.0, scale=100.0), torch.arange(100, 100 + 25 * q)
    for key in range(60):
        sums = Sums()
        for client in range(25):
            votes = Selection(tops[client * q : client * q + q], links, torch.ones(q))
            sums.add(method.contribution({"weights": torch.ones(20), "votes": votes}, state, current), 1)
        chosen += method.update(state, sums.mean(), current, lambda purpose, key=key: random.key(key, purpose)).mask.bits
    grown = chosen[100:200]
    assert float(grown.sum()) > 0.95 * 60 * q
    assert float(grown[50:].sum()) > 0.3 * float(grown.sum()), "the second half is not left out"

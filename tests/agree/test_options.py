"""What goes with every method: the proximal term and the server's optimiser, in running federations."""

import math
from dataclasses import replace

import pytest
import torch

import fedrts
from fedrts import methods
from fedrts.observe import Silent
from fedrts.server import rounds
from fedrts.server.optimizer import Averaging
from fedrts.sparse import budget
from helping import ask, order_of
from plain import Plain, bits_of, rigl

SKEWED = {"partition": "dirichlet", "alpha": 1.0, "min_size": 3}
DENSE = {"fedavg", "fedpaq", "fedtopk"}


def ready(run):
    """The state with which round 0 starts."""
    state = run.method.begin(run.setup)
    if run.method.exchanges(run.plan.round(-1, state.mask)):
        state = rounds.play_round(run.plan, state, -1).state
    return state


def replies(run, state, index, clients):
    (exchange,) = run.method.exchanges(run.plan.round(index, state.mask))
    return ask(run, exchange, state, index, clients)


# -- the proximal term -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "model"), [("fedavg", "mlp"), ("random", "cnn"), ("random", "tiny_gpt")])
def test_clients_are_pulled_towards_what_they_received(toy, method, model):
    """gradient + μ(W − W_received), in a plain loop over named tensors."""
    clients = {} if model == "tiny_gpt" else SKEWED
    run = toy(method, model, clients=clients, train={"proximal": 0.7, "epochs": 2})
    plain, state = Plain(run), ready(run)
    model, masks = plain.model(state.weights), plain.masks(state.mask)
    for reply in replies(run, state, 1, [0, 1, 2]):
        trained, _ = plain.train(model, masks, reply.client, 1, range(2), mu=0.7)
        found = state.mask.expand(reply.message["weights"])
        torch.testing.assert_close(found, plain.vector(trained), rtol=1e-5, atol=1e-6)
        free, _ = plain.train(model, masks, reply.client, 1, range(2))
        assert float((plain.vector(free) - found).norm()) > 1e-3, "the pull is felt"


def test_the_second_half_of_feddst_is_pulled_towards_the_received_model_too(toy):
    run = toy("feddst", "cnn", clients=SKEWED, train={"proximal": 0.7, "epochs": 3})
    plain, state = Plain(run), ready(run)
    received, masks = plain.model(state.weights), plain.masks(state.mask)
    for reply in replies(run, state, 0, [0, 1, 2]):
        half, _ = plain.train(received, masks, reply.client, 0, range(1), mu=0.7)
        gradient = plain.over_links(plain.gradient(half, plain.batches(reply.client, 0, 3)[:1])).abs()
        quota = run.plan.round(0, state.mask).quota
        stay, now = rigl(plain.over_links(half).abs(), gradient, state.mask.bits, quota, run.layout.sizes)
        own = plain.run.layout.by_name(bits_of(now, run.layout.links))
        for name, kept in plain.run.layout.by_name(bits_of(stay, run.layout.links)).items():
            half[name] = half[name] * kept
        whole, _ = plain.train(half, own, reply.client, 0, range(1, 3), mu=0.7, received=received)
        assert set(reply.message["weights"].mask.active.tolist()) == now
        found = reply.message["weights"].mask.expand(reply.message["weights"].values)
        torch.testing.assert_close(found, plain.vector(whole), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", methods.names())
def test_without_weight_the_term_changes_no_bit(toy, method):
    runs = [toy(method, "cnn", train=train) for train in ({"proximal": 0.0}, {}, {"proximal": 0.5})]
    after = [rounds.play_round(run.plan, ready(run), 0).state for run in runs]
    assert torch.equal(after[0].weights, after[1].weights)
    assert not torch.equal(after[0].weights, after[2].weights)


# -- the server's optimiser ------------------------------------------------------------------------------------------


def averaged(run, state, index):
    """What the method alone makes of a round: the plan with plain averaging on the server."""
    return rounds.play_round(replace(run.plan, optimizer=Averaging()), state, index).state


def mean_of_replies(run, plain, state, index):
    uploads = {reply.client: state.mask.expand(reply.message["weights"]) for reply in replies(run, state, index, run.plan.sample(index))}
    return plain.mean(uploads)


class ByHand:
    """FedAvgM and FedAdam (Reddi et al.) over every parameter, in float64."""

    def __init__(self, kind, size, rate):
        self.kind, self.rate = kind, rate
        self.first = torch.zeros(size, dtype=torch.float64)
        self.second = torch.full((size,), 1e-6, dtype=torch.float64)  # τ²

    def step(self, before, mean, anew):
        """The parameters afterwards; those in `anew` start at 0 without a past."""
        change = mean - before
        change[anew] = 0
        if self.kind == "momentum":
            self.first = 0.9 * self.first + change
            direction = self.first.clone()
        else:
            self.first = 0.9 * self.first + 0.1 * change
            self.second = 0.99 * self.second + 0.01 * change**2
            direction = self.first / (self.second.sqrt() + 1e-3)
        self.first[anew], self.second[anew] = 0, 1e-6
        after = before + self.rate * direction
        after[anew] = 0
        return after


@pytest.mark.parametrize(("kind", "rate"), [("momentum", 1.0), ("momentum", 0.3), ("adam", 0.01), ("adam", 0.1)])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_momentum_and_adam_of_dense_averaging_over_three_rounds(toy, kind, rate, model):
    run = toy("fedavg", model, clients=SKEWED, train={"server_optimizer": kind, "server_lr": rate})
    plain, state, n = Plain(run), ready(run), run.layout.parameters
    hand = ByHand(kind, n, rate)
    nothing = torch.zeros(n, dtype=torch.bool)
    for index in range(3):
        mean = mean_of_replies(run, plain, state, index)
        expected = hand.step(state.weights[:n].double(), mean[:n], nothing)
        state = rounds.play_round(run.plan, state, index).state
        torch.testing.assert_close(state.weights[:n].double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state.weights[n:].double(), mean[n:], rtol=1e-6, atol=1e-7)  # statistics are averages


@pytest.mark.parametrize(("kind", "rate"), [("momentum", 0.5), ("adam", 0.02)])
@pytest.mark.parametrize("method", ["prunefl", "fedmef"])
def test_on_a_mask_links_that_are_dropped_or_grown_start_at_zero_without_a_past(toy, kind, rate, method):
    options = {"fedmef": {"bae": False}}.get(method, {})
    run = toy(method, "cnn", clients=SKEWED, method_options=options, train={"server_optimizer": kind, "server_lr": rate})
    plain, state, n, links = Plain(run), ready(run), run.layout.parameters, run.layout.links
    hand, regrown = ByHand(kind, n, rate), 0
    for index in range(5):  # outer rounds are 0 and 3
        current = run.plan.round(index, state.mask)
        mean = mean_of_replies(run, plain, state, index)
        after = rounds.play_round(run.plan, state, index).state
        anew = torch.zeros(n, dtype=torch.bool)
        anew[:links] = ~state.mask.bits
        if current.outer:
            stay, _ = rigl(mean[:links].abs(), torch.zeros(links), state.mask.bits, current.quota, run.layout.sizes)
            anew[:links] = ~bits_of(stay, links)  # whatever is active besides was just grown
            assert after.mask != state.mask
            regrown += int((after.mask.bits & state.mask.bits & anew[:links]).sum())
        assert torch.equal(after.mask.bits, averaged(run, state, index).mask.bits), "topologies are chosen from plain averages"
        expected = hand.step(state.weights[:n].double(), mean[:n], anew)
        torch.testing.assert_close(after.weights[:n].double(), expected, rtol=1e-4, atol=2e-6)
        torch.testing.assert_close(after.weights[n:].double(), mean[n:], rtol=1e-6, atol=1e-7)
        assert after.weights[:links][~after.mask.bits].count_nonzero() == 0
        assert after["server_first"][:links][anew[:links]].count_nonzero() == 0
        state = after


@pytest.mark.parametrize("method", ["fedavg", "prunefl", "feddst", "fedrts"])
def test_half_the_rate_is_half_the_step(toy, method):
    run = toy(method, "cnn", train={"server_lr": 0.5})
    assert run.plan.optimizer == Averaging(0.5)
    state, n, links = ready(run), run.layout.parameters, run.layout.links
    for index in range(4):
        whole, half = averaged(run, state, index), rounds.play_round(run.plan, state, index).state
        assert half.mask == whole.mask
        expected = (state.weights + whole.weights) / 2
        expected[:links][whole.weights[:links] == 0] = 0
        torch.testing.assert_close(half.weights[:n], expected[:n], rtol=1e-5, atol=1e-7)
        assert torch.equal(half.weights[n:], whole.weights[n:])
        state = half


@pytest.mark.parametrize("method", methods.names())
def test_sgd_at_rate_one_is_no_optimiser(toy, method):
    plain, explicit = toy(method, "cnn"), toy(method, "cnn", train={"server_optimizer": "sgd", "server_lr": 1.0, "server_momentum": 0.5})
    states = [ready(run) for run in (plain, explicit)]
    for index in (0, 1):
        states = [rounds.play_round(run.plan, state, index).state for run, state in zip((plain, explicit), states, strict=True)]
        assert torch.equal(states[0].weights, states[1].weights)
        assert states[0].mask == states[1].mask
        assert set(states[0].memory) == set(states[1].memory)


@pytest.mark.parametrize("train", [{"server_optimizer": "adam"}, {"server_optimizer": "momentum", "server_lr": 0.3, "proximal": 0.1}])
@pytest.mark.parametrize(
    "method", [name for name in methods.names() if name != "fedtopk"]
)  # which refuses them: tests/attack/test_recipes.py
def test_every_method_runs_with_every_optimiser(toy, method, train):
    run = toy(method, "cnn", train=train)
    state = ready(run)
    counts, kept = state.mask.counts, run.layout.links if method in DENSE else budget.links_to_keep(run.layout, 0.5)
    assert sum(counts) == kept
    for played in rounds.play(replace(run.plan, rounds=5), state, 0):
        after = played.state
        assert torch.isfinite(after.weights).all()
        assert played.record.loss is not None
        assert math.isfinite(played.record.loss)
        assert after.mask.counts == counts
        assert after.weights[: run.layout.links][~after.mask.bits].count_nonzero() == 0
        if not played.record.outer:
            assert after.mask == state.mask
        assert not torch.equal(after.weights, state.weights)
        variances = torch.cat([after.weights[run.layout.parameters :][span] for span in run.layout.variances()])
        assert float(variances.min()) > 0
        state = after
    assert "server_first" in state.memory


@pytest.mark.parametrize("method", ["snip", "grasp", "fedtiny"])
def test_the_set_up_is_no_step_of_the_optimiser(toy, method):
    run, plain = toy(method, "cnn", train={"server_optimizer": "adam", "server_lr": 0.5}), toy(method, "cnn")
    states = [ready(each) for each in (run, plain)]
    assert torch.equal(states[0].weights, states[1].weights)
    assert states[0].memory.keys() == states[1].memory.keys()


class StopAfter(Silent):
    def __init__(self, index):
        self.index = index

    def played(self, record):
        if record.round == self.index:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("method", "kind"), [("fedrts", "adam"), ("feddst", "momentum"), ("snip", "adam"), ("fedsgc", "momentum")])
def test_moments_survive_an_interruption(toy, method, kind, tmp_path):
    options = {"fedsgc": {"residual": True}}.get(method, {})
    run = toy(method, "cnn", method_options=options, train={"server_optimizer": kind}, checkpoint={"every": 1})
    keywords = run.experiment.model_dump(exclude_none=True)
    whole = fedrts.run(**{**keywords, "out": str(tmp_path / "whole")})
    with pytest.raises(KeyboardInterrupt):
        fedrts.run(**{**keywords, "out": str(tmp_path / "half")}, observer=StopAfter(3))
    resumed = fedrts.resume(tmp_path / "half")
    assert torch.equal(resumed.state.weights, whole.state.weights)
    assert resumed.state.mask == whole.state.mask
    assert resumed.state.memory.keys() == whole.state.memory.keys()
    assert "server_first" in whole.state.memory
    assert all(torch.equal(resumed.state[name], whole.state[name]) for name in whole.state.memory)
    assert [line["loss"] for line in resumed.history] == [line["loss"] for line in whole.history]


# -- a type for downloads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted(set(methods.names()) - {"fedpaq", "fedtopk"}))
def test_downloads_may_have_a_type_of_their_own(toy, method):
    """Round 0 and the set-up: downloads are those of int8 both ways, uploads as long as int4's."""
    both = {}
    for up, down in (("int8", None), ("int4", None), ("int8", "int8"), ("int4", "int8"), ("float32", "int8"), ("int8", "float32")):
        run = toy(method, "cnn", wire={"value_type": up, **({} if down is None else {"download_type": down})})
        both[up, down] = rounds.play_round(run.plan, ready(run), 0)
    record = {types: played.record for types, played in both.items()}
    assert torch.equal(both["int8", None].state.values, both["int8", "int8"].state.values)
    assert record["int4", "int8"].download_bytes == record["int8", None].download_bytes > record["int4", None].download_bytes
    assert record["int4", "int8"].upload_bytes < record["int8", "int8"].upload_bytes < record["float32", "int8"].upload_bytes
    assert record["int8", "float32"].download_bytes > record["int8", None].download_bytes
    assert not torch.equal(both["int8", "float32"].state.values, both["int8", None].state.values)


def test_a_client_receives_the_downloads_type_and_sends_changes_from_there(toy):
    run = toy("random", "mlp", wire={"value_type": "int2", "download_type": "int8"})
    state = run.method.begin(run.setup)
    (exchange,) = run.plan.exchanges(run.plan.round(0, state.mask))
    order = order_of(run, exchange, state, 0)
    scales = state.values.split(256)
    largest = torch.cat([part.abs().max().expand(len(part)) for part in scales])
    assert float(((order.reference - state.values).abs() / largest).max()) <= 1 / 127
    assert not torch.equal(order.reference, state.values)
    (reply,) = run.plan.engine.run(order, [0])
    assert set(reply.message["weights"].values.levels.unique().tolist()) <= {-1, 0, 1}
    opened = exchange.up["weights"].open(reply.message["weights"], order.opening_frame)
    assert torch.equal(opened, state.values + reply.message["weights"].values.values())


def test_top_k_may_have_one_too(toy):
    up, down, both = (
        rounds.play_round((run := toy("fedtopk", "mlp", method_options=options)).plan, run.method.begin(run.setup), 0).state
        for options in ({"values": "int4"}, {"values": "int4", "values_down": "int8"}, {"values": "int4", "values_down": "int4"})
    )
    assert torch.equal(up["public"], both["public"])
    assert torch.equal(up.values, down.values)
    assert float((down["public"] - down.values).norm()) < float((up["public"] - up.values).norm())

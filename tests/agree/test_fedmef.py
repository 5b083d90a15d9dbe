"""FedMef against its equations: extrusion step by step, what it shares with FedTiny, and whole runs with sap and ws."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import byhand
import fedrts
from fedrts.engines import batched
from fedrts.engines.training import Slots
from fedrts.methods import FedMef
from fedrts.methods.contract import Exchange, Train
from fedrts.methods.fedmef import Extrusion, weak_marks
from fedrts.server import rounds
from fedrts.sparse.frugal import BitReLU, SparseInputConv2d, SparseInputLinear, StandardisedConv2d
from fedrts.wire.fields import Values
from helping import ask


def weakest(weights, active, sizes, quotas):
    """θ_low: per layer the Q active links of least magnitude; of equal ones the first stay."""
    low = set()
    for layer, q in zip(byhand.spans(sizes), quotas, strict=True):
        mine = {i: abs(weights[i]) for i in layer if i in active}
        low |= set(mine) - set(byhand.largest(mine, len(mine) - q))
    return low


# -- budget-aware extrusion -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1, 3])
def test_clients_are_pulled_on_the_weakest_links_in_outer_rounds(toy, index):
    """θ ← θ − η·m·(g + 2λθ on θ_low), in NumPy; θ_low comes from the received model and stays for all steps."""
    penalty, rate = 0.4, 0.2
    run = toy("fedmef", "mlp", method_options={"penalty": penalty}, train={"epochs": 2, "lr": rate}, clients=byhand.UNEQUAL)
    state = run.method.begin(run.setup)
    current = run.plan.round(index, state.mask)
    (exchange,) = run.method.exchanges(current)
    (reply,) = ask(run, exchange, state, index, [2])

    sizes, active = run.layout.sizes, set(state.mask.active.tolist())
    low = weakest(state.weights.tolist(), active, sizes, byhand.quota(index, 6, 0.4, byhand.counts(active, sizes), sizes))
    assert low
    flags = torch.zeros(run.layout.links)
    flags[sorted(low)] = 1.0
    marked = {name: part.numpy() for name, part in run.layout.by_name(flags).items()}
    masks = {name: bits.numpy() for name, bits in run.layout.by_name(state.mask.bits).items()}
    ends = {}
    for extruded in (True, False):
        model = byhand.Perceptron(run.layout.views(state.weights))
        for x, y in byhand.batches(run, index, 2, range(2)):
            gradient = model.gradient(x, y)
            for name, part in marked.items():
                gradient[name] = gradient[name] + extruded * 2 * penalty * model.values[name] * part
            model.step(gradient, masks, rate)
        ends[extruded] = torch.from_numpy(model.flat(run.layout.entries))
    outer = index != 1
    trained = state.mask.expand(reply.message["weights"]).double()
    torch.testing.assert_close(trained, ends[outer], rtol=1e-4, atol=1e-6)
    assert (ends[True] - ends[False]).abs().max() > 1e-3, "the penalty shows"


numbers = st.floats(-3, 3, width=32)


@given(
    st.lists(numbers, min_size=4, max_size=9),
    st.integers(1, 40),
    st.data(),
    st.floats(1e-3, 1.0),
    st.floats(0.0, 1.0),
)
def test_the_rate_of_a_step_by_hand(weights, steps, data, initial, share):
    """max(η, p(b)·(2σ(‖θ_low‖) − 1)·η_0), p(b) = (2B − 2b)/(2B − b)."""
    step = data.draw(st.integers(0, steps))
    low = data.draw(st.lists(st.integers(0, len(weights) - 1), unique=True))
    rate = share * initial
    norm = math.sqrt(sum(weights[i] ** 2 for i in low))
    extruded = (2 * steps - 2 * step) / (2 * steps - step) * (2 / (1 + math.exp(-norm)) - 1) * initial
    marks, extrusion = torch.tensor([float(i in low) for i in range(len(weights))]), Extrusion(penalty=0.3)
    found = extrusion.rate(torch.tensor(weights), marks, step, steps, rate, initial)
    assert float(found) == pytest.approx(max(rate, extruded), rel=1e-5, abs=1e-7)
    expected = [2 * 0.3 * w if i in low else 0.0 for i, w in enumerate(weights)]
    assert extrusion.pull(torch.tensor(weights), marks).tolist() == pytest.approx(expected, rel=1e-6)


def test_the_rate_falls_from_the_whole_extrusion_to_none():
    extrusion, weights, marks = Extrusion(0.1), torch.tensor([100.0]), torch.ones(1)  # σ(100) = 1
    assert float(extrusion.rate(weights, marks, 0, 10, 0.0, 0.5)) == 0.5
    assert float(extrusion.rate(weights, marks, 10, 10, 0.0, 0.5)) == 0.0
    assert float(extrusion.rate(weights, marks, 10, 10, 0.01, 0.5)) == pytest.approx(0.01)
    rates = [float(extrusion.rate(weights, marks, step, 10, 0.0, 0.5)) for step in range(11)]
    assert rates == sorted(rates, reverse=True)
    assert float(extrusion.rate(torch.tensor([0.0]), marks, 0, 10, 0.0, 0.5)) == 0.0, "nothing is left to extrude"


def test_several_clients_at_once_are_one_after_the_other():
    extrusion, marks = Extrusion(0.2), torch.tensor([0.0, 1, 1, 0, 0])
    weights = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    together = extrusion.rate(weights, marks, 2, 7, 0.01, 0.3)
    assert isinstance(together, torch.Tensor)
    assert together.shape == (3,)
    for row, rate, pull in zip(weights, together, extrusion.pull(weights, marks), strict=True):
        alone = extrusion.rate(row, marks, 2, 7, 0.01, 0.3)
        assert isinstance(alone, torch.Tensor)
        assert torch.equal(rate, alone)
        assert torch.equal(pull, extrusion.pull(row, marks))


class Ramp:
    """An influence whose rates name their step."""

    def __init__(self, initial):
        self.initial, self.seen = initial, []

    def pull(self, weights, marks):
        return 0.1 * marks * weights

    def rate(self, weights, marks, step, steps, rate, initial):
        assert rate == initial == self.initial
        self.seen.append((float(step), float(steps)))
        return 0.02 * (step + 1)


def test_every_step_takes_the_rate_that_its_influence_says(toy):
    run = toy("random", "mlp", train={"epochs": 2, "lr": 0.3})
    state = run.method.begin(run.setup)
    ramp, received = Ramp(0.3), []

    def marks(weights, mask):
        received.append((weights.clone(), mask))
        return torch.ones_like(weights)

    exchange = Exchange({"weights": Values()}, (Train(influence=ramp, marks=marks),), {"weights": Values()})
    (reply,) = ask(run, exchange, state, 0, [1])
    assert torch.equal(received[0][0], state.weights[: run.layout.parameters])
    assert received[0][1] == state.mask
    model = byhand.Perceptron(run.layout.views(state.weights))
    masks = {name: bits.numpy() for name, bits in run.layout.by_name(state.mask.bits).items()}
    batches = byhand.batches(run, 0, 1, range(2))
    for step, (x, y) in enumerate(batches):
        gradient = model.gradient(x, y)
        model.step({name: g + 0.1 * model.values[name] for name, g in gradient.items()}, masks, 0.02 * (step + 1))
    trained = state.mask.expand(reply.message["weights"]).double()
    torch.testing.assert_close(trained, torch.from_numpy(model.flat(run.layout.entries)), rtol=1e-4, atol=1e-6)
    assert ramp.seen == [(step, len(batches)) for step in range(len(batches))]


def test_outer_rounds_share_one_program(toy, monkeypatch):
    """What is marked changes, slots (on a GPU: captured graphs) stay: one kind for inner rounds, one for outer ones."""
    made, marked = [], []

    def make(*args):
        made.append(Slots(*args))
        return made[-1]

    def mark(self, marks):
        marked.append(marks)
        self.marks.copy_(marks)

    monkeypatch.setattr(batched, "Slots", make)
    monkeypatch.setattr(Slots, "mark", mark)
    run = toy("fedmef", "mlp", engine={"name": "batched"}, rounds=6, clients={"partition": "iid"}, topology={"interval": 2, "end": 5})
    list(rounds.play(run.plan, run.method.begin(run.setup), -1))
    assert [slots.influence for slots in made] == [Extrusion(0.01), None]
    assert len(marked) == 3
    assert not torch.equal(marked[0], marked[1])
    assert torch.equal(made[0].marks, marked[2])


def test_marked_links_are_the_weakest_of_each_layer(toy):
    run = toy("fedmef", "cnn")
    state = run.method.begin(run.setup)
    current = run.plan.round(0, state.mask)
    marks = weak_marks(state.weights[: run.layout.parameters], state.mask, current.quota)
    expected = weakest(state.weights.tolist(), set(state.mask.active.tolist()), run.layout.sizes, current.quota)
    assert set(marks.nonzero().flatten().tolist()) == expected
    assert set(marks.tolist()) == {0.0, 1.0}
    assert len(expected) == sum(current.quota)


# -- what FedTiny and FedMef share ----------------------------------------------------------------------------------------


def played(run):
    return [step.state for step in rounds.play(run.plan, run.method.begin(run.setup), -1)]


@pytest.mark.parametrize("options", [{"bae": False}, {"penalty": 0.0}])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_without_extrusion_it_is_fedtiny_bit_for_bit(toy, model, options):
    """A constant rate leaves max(η, β_b) at η, so that a penalty of 0 changes nothing either."""
    common = {"clients": byhand.UNEQUAL, "train": {"epochs": 2, "lr": 0.1}}
    tiny = played(toy("fedtiny", model, method_options={"abns": False, "group": "entire"}, **common))
    mef = played(toy("fedmef", model, method_options=options, **common))
    assert len(tiny) == len(mef) == 7
    assert tiny[0].mask != tiny[3].mask
    for a, b in zip(tiny, mef, strict=True):
        assert torch.equal(a.weights, b.weights)
        assert a.mask == b.mask


def test_extrusion_acts_in_outer_rounds_alone(toy):
    """With the first outer round at 3, three rounds are FedTiny's and the fourth is not."""
    late = {"topology": {"first_outer": 3}}
    tiny = played(toy("fedtiny", "cnn", method_options={"abns": False}, **late))
    mef = played(toy("fedmef", "cnn", method_options={"penalty": 0.5}, **late))
    assert [torch.equal(a.weights, b.weights) for a, b in zip(tiny[:4], mef[:4], strict=True)] == [True] * 3 + [False]


@pytest.mark.parametrize("penalty", [0.01, 2.0])
def test_topology_says_how_many_marked_links_were_dropped(toy, penalty):
    run = toy("fedmef", "cnn", method_options={"penalty": penalty}, clients=byhand.UNEQUAL)
    state, sizes, shares = run.method.begin(run.setup), run.layout.sizes, []
    for index in range(4):
        _, samples, trained, gradients, _ = byhand.asked_for_everything(run, state, index)
        played = rounds.play_round(run.plan, state, index)
        if gradients is not None:
            active = set(state.mask.active.tolist())
            quotas = byhand.quota(index, 6, 0.4, byhand.counts(active, sizes), sizes)
            marked = weakest(state.weights.tolist(), active, sizes, quotas)
            dropped = weakest(byhand.mean(trained, samples), active, sizes, quotas)
            assert played.topology is not None
            shares.append(played.topology["marked_dropped"])
            assert shares[-1] == pytest.approx(len(marked & dropped) / len(marked))
        else:
            assert played.topology is None
        state = played.state
    assert len(shares) == 2
    assert 0 < shares[0] <= 1


# -- whole runs with sap and ws -------------------------------------------------------------------------------------------

RUN: dict[str, Any] = {
    "data": "toy_images",
    "model": "cnn",
    "model_options": {"width": 4},
    "method": "fedmef",
    "density": 0.5,
    "rounds": 4,
    "clients": {"total": 4, "per_round": 3, "partition": "iid", "min_size": 1},
    "train": {"epochs": 2, "batch_size": 8, "lr": 0.2},
    "topology": {"interval": 2, "end": 4},
}


@pytest.mark.parametrize("options", [{"sap": True, "ws": True}, {"ws": True}, {"sap": True, "sap_linear": True, "sap_rate": 0.5}])
def test_a_whole_run_trains_and_its_folder_loads(tmp_path, options):
    result = fedrts.run(**RUN, method_options=options, out=tmp_path / "run")
    kinds = [type(part) for part in result.model.modules()]
    assert any(issubclass(kind, nn.BatchNorm2d) for kind in kinds) != options.get("ws", False)
    assert any(issubclass(kind, StandardisedConv2d) for kind in kinds) == options.get("ws", False)
    assert any(issubclass(kind, SparseInputConv2d) for kind in kinds) == options.get("sap", False)
    assert (BitReLU in kinds) == options.get("sap", False)
    assert (SparseInputLinear in kinds) == options.get("sap_linear", False)
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    assert all(math.isfinite(line["loss"]) for line in result.history)
    parameters = dict(result.model.named_parameters())
    assert set(result.masks) == {"0.0.weight", "1.0.weight", "2.0.weight"}
    for name, mask in result.masks.items():
        assert parameters[name][~mask].count_nonzero() == 0
        assert parameters[name][mask].count_nonzero() > 0
    assert result.summary["density"] <= 0.5
    gains = [parameter for name, parameter in parameters.items() if name.endswith("gain")]
    assert len(gains) == (3 if options.get("ws") else 0)
    assert all(not torch.equal(gain, torch.ones_like(gain)) for gain in gains), "gains are trained"
    topology = [json.loads(line) for line in (tmp_path / "run" / "topology.jsonl").read_text("utf-8").splitlines()]
    assert [0 <= line["marked_dropped"] <= 1 for line in topology] == [True, True]

    loaded = fedrts.load(tmp_path / "run")
    x = torch.randn(5, 1, 6, 6)
    with torch.no_grad():
        assert torch.equal(loaded(x), result.model(x))


def own_model():
    act = nn.ReLU()
    convolutions = [nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), act, nn.Conv2d(3, 4, 3), act]
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


def test_a_model_given_in_python_is_loaded_as_it_was_trained(tmp_path):
    torch.manual_seed(0)
    clients = [TensorDataset(torch.randn(20, 1, 8, 8), torch.arange(20) % 2) for _ in range(3)]
    method = FedMef(density=0.6, ws=True, sap=True)
    settings = {"clients": clients, "test": clients[0], "method": method, "rounds": 2, "epochs": 1, "batch_size": 5}
    result = fedrts.train(model=own_model(), **settings, out=tmp_path / "run")
    for model in (own_model(), method.prepare(own_model())):
        loaded = fedrts.load(tmp_path / "run", model=model)
        x = torch.randn(5, 1, 8, 8)
        with torch.no_grad():
            assert torch.equal(loaded(x), result.model(x))
    (tmp_path / "run" / "model.safetensors").unlink()
    again = fedrts.load(tmp_path / "run", model=own_model())
    assert torch.equal(again.get_parameter("0.gain"), result.model.get_parameter("0.gain"))


def test_dropping_no_activation_changes_no_bit_of_the_result_beyond_rounding(toy):
    """sap_rate = 0 keeps everything: the same run as without, up to the order of additions."""
    plain = played(toy("fedmef", "cnn", rounds=4, topology={"end": 4}))
    kept = played(toy("fedmef", "cnn", rounds=4, topology={"end": 4}, method_options={"sap": True, "sap_rate": 0.0, "sap_linear": True}))
    torch.testing.assert_close(kept[-1].weights, plain[-1].weights, rtol=1e-3, atol=1e-5)
    assert kept[-1].mask == plain[-1].mask
    pruned = played(toy("fedmef", "cnn", rounds=4, topology={"end": 4}, method_options={"sap": True, "sap_rate": 0.9}))
    assert not np.allclose(pruned[-1].weights.numpy(), plain[-1].weights.numpy(), rtol=1e-2, atol=1e-3)

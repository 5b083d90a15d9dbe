"""The batched engine against the serial one: the same client program, so the same masks and, in float64, the same weights."""

import threading
import warnings
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fedrts
from fedrts import methods
from fedrts.engines.batched import BatchedEngine
from fedrts.engines.kernels import Objective, OneByOne, Vectorised
from fedrts.engines.recorded import Recorded
from fedrts.engines.serial import SerialEngine
from fedrts.engines.slots import busy, length, schedule
from fedrts.errors import Note
from fedrts.methods.contract import ProbeGradient
from fedrts.methods.fedrts import FedRTS
from fedrts.server import rounds
from fedrts.testing.agreement import FAMILIES, GRADIENTS_WITHIN, OFTEN, UNEQUAL, agree, both, gradient_difference, in_double, unequal

FEW = ("fedavg", "fedrts", "feddst", "fedmef", "prunefl")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("method", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in methods.names()])
def test_clients_side_by_side_are_clients_one_after_the_other(method, model):
    agree(*both(unequal(method, model)))


def test_layers_may_exchange_links():
    agree(*both(unequal("fedrts_trial", "cnn", method_options={"scope": "global"})))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("model", FAMILIES)
def test_gradients_agree_in_single_precision(model):
    assert gradient_difference(unequal("fedavg", model)) < GRADIENTS_WITHIN


@pytest.mark.parametrize(
    "train",
    [
        {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.01},
        {"momentum": 0.9, "weight_decay": 0.01},
        {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.5},
        {"proximal": 0.5, "schedule": "cosine"},
        {"clip": 0.1, "smoothing": 0.2},
    ],
)
@pytest.mark.parametrize("method", ["fedrts", "fedmef"])
def test_optimisers_have_the_same_past(toy, method, train):
    agree(*both(toy(method, "cnn", clients=UNEQUAL, topology=OFTEN, train={"epochs": 2, **train}, rounds=4)))


@pytest.mark.parametrize(
    ("method", "model", "kind"),
    [
        ("feddst", "mlp", Vectorised),
        pytest.param("fedrts", "cnn", Vectorised, marks=pytest.mark.slow),
        pytest.param("fedmef", "tiny_gpt", OneByOne, marks=pytest.mark.slow),
    ],
)
def test_recordings_on_threads_agree(toy, method, model, kind):
    kernels = []

    def recording(objective):
        kernels.append(Recorded(kind(objective)))
        return kernels[-1]

    run = toy(method, model, clients=UNEQUAL, topology=OFTEN, train={"epochs": 2}, rounds=4)
    agree(*both(run, slots=4, together=5, make_kernel=recording, workers=2))
    assert kernels[0]._programs, "something was recorded"


class Tempered(FedRTS):
    """Probes in ordinary rounds as only set-ups do."""

    def exchanges(self, round):
        def probing(step):
            return replace(step, temperature=7.0, batches="all") if isinstance(step, ProbeGradient) else step

        return tuple(replace(exchange, steps=tuple(map(probing, exchange.steps))) for exchange in super().exchanges(round))


def test_steps_that_do_not_run_side_by_side_are_still_carried_out_whole(toy):
    run = toy("fedrts", "cnn", clients=UNEQUAL, topology=OFTEN, rounds=3)
    tempered = Tempered(density=0.5)
    agree(*both(replace(run, method=tempered, plan=replace(run.plan, method=tempered))))


@pytest.mark.parametrize(("slots", "together"), [(1, 1), (2, 5), (5, 5), (8, 3)])
def test_any_number_of_slots_gives_the_same(toy, slots, together):
    agree(*both(toy("fedrts", "mlp", clients=UNEQUAL, topology=OFTEN, rounds=3), slots, together))


def test_a_client_with_one_sample(toy):
    """It takes no step under BatchNorm, and one without."""
    for model in ("cnn", "mlp"):
        run = toy("fedrts", model, rounds=2, topology={"interval": 1, "end": 2})
        run = replace(run, rows=[run.rows[0][:1], *run.rows[1:]])
        run.plan.samples[0] = 1
        agree(*both(run))


@pytest.mark.parametrize("workers", [1, 2])
def test_out_of_memory_halves_the_slots_and_goes_on(toy, workers):
    run = toy("fedrts", "mlp", clients=UNEQUAL, rounds=1, topology={"end": 1})
    bench, setup = in_double(run)

    class Narrow(Vectorised):
        def __call__(self, weights, x, y):
            with turn:
                if len(weights) > 3 - workers:
                    raise torch.OutOfMemoryError("no room")
                return super().__call__(weights, x, y)

    turn = threading.Lock()  # the model serves one thread at a time
    serial = SerialEngine(bench, run.rows, 64)
    engine = BatchedEngine(bench, run.rows, Narrow(Objective(bench.module, bench.data.task, bench.layout)), 5, 5, serial, workers)
    with pytest.warns(Note, match="2 clients side by side"):
        (played,) = rounds.play(replace(run.plan, engine=engine), run.method.begin(setup), 0)
    (reference,) = rounds.play(replace(run.plan, engine=serial), run.method.begin(setup), 0)
    assert engine.slots == 2
    agree([reference], [played])


@pytest.mark.slow
def test_many_clients_in_one_round():
    def site(seed):
        x = torch.randn(7, 4, generator=torch.Generator().manual_seed(seed))
        return TensorDataset(x, (x.sum(1) > 0).long())

    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    keywords: dict[str, Any] = {"rounds": 2, "lr": 0.5, "batch_size": 4, "density": 0.8, "per_round": 500}
    results = [
        fedrts.train(model=net(), clients=[site(seed) for seed in range(500)], test=site(999), engine=engine, **keywords)
        for engine in ("serial", "batched")
    ]
    assert len(results[1].history[0]["clients"]) == 500
    for name, tensor in results[0].model.state_dict().items():
        torch.testing.assert_close(tensor, results[1].model.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_adam_agrees_in_single_precision_too(toy):
    """Its bias corrections have few digits in float32, which BatchNorm would amplify."""
    run = toy("fedavg", "mlp", clients=UNEQUAL, train={"epochs": 3, "optimizer": "adam", "lr": 0.01})
    serial = SerialEngine(run.bench, run.rows, 64)
    kernel = Vectorised(Objective(run.bench.module, run.data.task, run.layout))
    engines = (serial, BatchedEngine(run.bench, run.rows, kernel, 3, 4, serial))
    first, second = (rounds.play_round(replace(run.plan, engine=engine), run.method.begin(run.setup), 0).state for engine in engines)
    torch.testing.assert_close(first.weights, second.weights, rtol=0, atol=2e-6)


def test_frozen_weights_have_no_gradient_in_either_engine(toy):
    run = toy("fedtiny", "mlp", clients=UNEQUAL, topology=OFTEN, rounds=3, method_options={"abns": False})
    next(run.module.parameters()).requires_grad_(False)
    first, second = both(run)
    agree(first, second)
    assert first[-1].state.mask != run.method.begin(run.setup).mask


def test_frozen_links_that_were_dropped_stay_away_in_either_engine(toy):
    run = toy("feddst", "mlp", clients=UNEQUAL, topology=OFTEN, rounds=3, train={"epochs": 2, "weight_decay": 0.1})
    next(run.module.parameters()).requires_grad_(False)
    agree(*both(run))


class Dropped(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.drop, self.first, self.last = nn.Dropout(drop), nn.Linear(36, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.drop(self.first(x.flatten(1))))


class Branching(nn.Module):
    """Looks at its numbers in Python, which no vectorised program can."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(36, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.first(x.flatten(1))
        return self.last(hidden if float(hidden.sum()) > 0 else -hidden)


def cumulative():
    """BatchNorm that averages over all batches it has seen."""
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3))


class Noisy(nn.Module):
    """Random numbers that no module of it announces."""

    def __init__(self, draw):
        super().__init__()
        self.draw, self.first, self.last = draw, nn.Linear(36, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.draw(self.first(x.flatten(1))))


class Recurrent(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.cell, self.last = nn.LSTM(6, 4, num_layers=2, dropout=dropout, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.cell(x.squeeze(1))[0][:, -1])


def attention(rate):
    def draw(hidden):
        query = hidden.view(-1, 1, 4, 2)
        return F.scaled_dot_product_attention(query, query, query, dropout_p=rate).flatten(1)

    return draw


RANDOM = [
    Noisy(F.dropout),
    Noisy(lambda hidden: hidden + torch.randn_like(hidden)),
    Noisy(F.rrelu),
    Noisy(attention(0.1)),
    Recurrent(0.5),
]


class Remembering(nn.Module):
    """A model that keeps something from one batch to the next: `remember(self, hidden)` gives what it goes on with."""

    def __init__(self, remember):
        super().__init__()
        self.first, self.last, self.remember, self.calls = nn.Linear(36, 8), nn.Linear(8, 3), remember, 0
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("seen", torch.tensor(False))

    def forward(self, x):
        return self.last(self.remember(self, self.first(x.flatten(1))))


class Uncopied(Dropped):
    """A model that cannot be copied may still run side by side."""

    def __init__(self):
        super().__init__(0.0)

    def __deepcopy__(self, memo):
        raise TypeError("cannot be copied")


def replaced(model, hidden):
    model.average = 0.9 * model.average + 0.1 * hidden.detach().mean(0)
    return hidden - model.average


def in_place(model, hidden):
    model.average.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
    return hidden - model.average


def flagged(model, hidden):
    if model.training:
        model.seen.fill_(True)
    return hidden


def counted(model, hidden):
    model.calls += 1
    return hidden * 0.5 ** (model.calls % 2)


CASES = [*((model, "random numbers.*dropout") for model in RANDOM), (Noisy(lambda hidden: F.dropout(hidden, 0.0)), None)]
CASES += [(Noisy(attention(0.0)), None), (Remembering(in_place), None)]
CASES += [(Remembering(replaced), "buffer 'average'.*change it in place"), (Remembering(flagged), "buffer 'seen'")]
CASES += [(Remembering(counted), "attribute 'calls'"), (Uncopied(), None)]
CASES += [(Dropped(0.5), "dropout"), (Branching(), "item"), (cumulative(), "counts in buffers"), (Dropped(0.0), None)]


@pytest.mark.parametrize(("model", "reason"), CASES)
def test_what_cannot_run_side_by_side_says_why(toy, model, reason):
    data = toy("fedavg").data
    clients = [TensorDataset(data.x[start : start + 40], data.y[start : start + 40]) for start in (0, 40, 80)]
    arguments = {"model": model, "clients": clients, "test": clients[0], "rounds": 1, "engine": "batched", "density": 0.9}
    if reason is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Note)
            assert fedrts.train(**arguments).history[0]["rejected"] == []
        return
    with pytest.warns(Note, match=f"one after the other.*{reason}"):
        fedrts.train(**arguments)


@pytest.mark.parametrize(("asked", "written"), [("auto", "batched"), ("serial", "serial")])
def test_the_engine_is_written_into_the_experiment(tmp_path, asked, written):
    result = fedrts.run(data="digits", rounds=1, engine=asked, device="cpu", out=tmp_path / "run")
    assert f'name = "{written}"' in (tmp_path / "run" / "experiment.toml").read_text()
    again = fedrts.resume(tmp_path / "run")
    assert again.summary["accuracy"] == result.summary["accuracy"]


def test_a_deadline_wants_replies_one_by_one(toy):
    with pytest.warns(Note, match=r"guard\.deadline"):
        run = toy("fedavg", "mlp", engine="batched", guard={"deadline": 100.0})
    assert isinstance(run.plan.engine, SerialEngine)


def test_precision_needs_a_gpu_on_the_cpu(tmp_path):
    with pytest.raises(fedrts.InputError, match=r"engine.precision = 'bf16' needs a GPU"):
        fedrts.run(data="digits", rounds=1, precision="bf16", device="cpu", out=tmp_path / "run")


def test_turns_fill_slots_without_overlap():
    steps = [7, 0, 3, 3, 1, 12, 2]
    for slots in (1, 2, 3, 7):
        turns = schedule(steps, slots)
        assert sorted(turn.client for turn in turns) == [0, 2, 3, 4, 5, 6]
        for turn in turns:
            assert turn.stop - turn.start == steps[turn.client]
            assert 0 <= turn.slot < slots
        for slot in range(slots):
            own = sorted((turn.start, turn.stop) for turn in turns if turn.slot == slot)
            assert all(before[1] <= after[0] for before, after in pairwise(own))
        assert length(turns) >= max(12, -(-sum(steps) // slots))
        assert length(turns) < sum(steps) / slots + 12, "the longest first: at most one client too long"


def test_busy_slots_are_the_first_ones():
    turns = schedule([9, 1, 4, 0, 3, 3], 3)
    now = busy(turns)
    assert len(now) == length(turns)
    for step, active in enumerate(now):
        working = {turn.slot for turn in turns if turn.start <= step < turn.stop}
        assert working == set(range(active))

"""What `fedrts.cost` measures is what a run really sends and computes; and it works for every method, model and way to ask."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

import fedrts
from fedrts import methods
from fedrts.client.training import LocalTraining
from fedrts.costs.on_this_machine import added_bytes
from fedrts.costs.table import ACCOUNTINGS, FRESH, HOLDER, PUBLISHED, STRICT
from fedrts.errors import InputError
from fedrts.methods.fedrts import FedRTS
from fedrts.server import rounds

ALONE = {"total": 1, "per_round": 1, "partition": "iid", "min_size": 1}
"""One client with all the data, so that a run's totals are this client's."""


@pytest.fixture
def alone(toy):
    """A toy run of one client, and the settings that make it."""

    def make(method: str, model: str = "cnn"):
        run = toy(method, model, clients=ALONE, train={"epochs": 2})
        return run, {name: value for name, value in run.experiment.model_dump().items() if name != "out"}

    return make


@pytest.mark.parametrize("model", ["mlp", "cnn", "tiny_gpt"])
@pytest.mark.parametrize("method", methods.names())
def test_measured_is_what_a_run_sends_and_computes(alone, method, model):
    run, settings = alone(method, model)
    played = rounds.play(run.plan, run.method.begin(run.setup), -1)
    records = {}
    for step in played:
        records[step.record.round] = step.record
        if step.record.round == 1:
            break
    cost = fedrts.cost(**settings, exact=True)
    names = {-1: "set-up", 0: "outer", 1: "inner"}
    assert {row.round for row in cost.rows} == {names[index] for index in records}
    for index, record in records.items():
        row = cost.row("measured", names[index], FRESH)
        assert row.upload_bytes == record.upload_bytes
        assert row.flops == pytest.approx(record.flops, rel=1e-12)
        if index == min(records):
            assert row.download_bytes == record.download_bytes, "nobody has a mask yet"


@pytest.mark.parametrize("method", methods.names())
def test_one_step_on_two_samples_stands_for_a_round(alone, method):
    _, settings = alone(method)
    exact, quick = (fedrts.cost(**settings, exact=exact) for exact in (True, False))
    same_layers = all(row.round != "set-up" for row in exact.rows)  # a set-up on other samples may choose another mask
    for row in exact.rows:
        twin = quick.row(row.accounting, row.round, row.case)
        assert twin.flops == pytest.approx(row.flops, rel=1e-12 if same_layers else 0.3)
        assert twin.upload_bytes == pytest.approx(row.upload_bytes, rel=0.02 if same_layers else 0.1)
        assert twin.download_bytes == pytest.approx(row.download_bytes, rel=0.02 if same_layers else 0.1)
        assert min(row.download_bytes, row.upload_bytes, row.memory_bytes) > 0


def test_measured_against_a_history_file(alone, tmp_path):
    _, settings = alone("fedrts")
    fedrts.run(**settings, out=str(tmp_path / "run"))
    history = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text("utf-8").splitlines()]
    cost = fedrts.cost(tmp_path / "run" / "experiment.toml", exact=True)
    outer, inner = cost.row("measured", "outer", FRESH), cost.row("measured", "inner", HOLDER)
    assert (outer.download_bytes, outer.upload_bytes) == (history[0]["download_bytes"], history[0]["upload_bytes"])
    assert (inner.download_bytes, inner.upload_bytes) == (history[2]["download_bytes"], history[2]["upload_bytes"])
    assert (outer.flops, inner.flops) == (history[0]["flops"], history[1]["flops"])


def test_the_summary_has_the_papers_outer_round(alone, tmp_path):
    _, settings = alone("prunefl")
    result = fedrts.run(**settings, out=str(tmp_path / "run"))
    cost = fedrts.cost(**settings)
    assert result.summary["paper_comm_mb"] == pytest.approx(cost.row("paper", "outer", PUBLISHED).megabytes)
    assert cost.row("paper", "outer", STRICT).megabytes > cost.row("paper", "outer", PUBLISHED).megabytes
    for accounting in ("paper", "rules"):
        inner = [cost.row(accounting, "inner", case) for case in (PUBLISHED, STRICT)]
        assert inner[0].megabytes == inner[1].megabytes
        outer = cost.row(accounting, "outer", PUBLISHED)
        assert inner[0].flops == outer.flops > inner[1].flops, "the paper counts dense gradients in every round"


# -- how one may ask ------------------------------------------------------------------------------------------------


def net(input_shape, classes, width=6):
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(input_shape).numel(), width), nn.ReLU(), nn.Linear(width, classes))


def sentences(input_shape, classes):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(classes, 8)
            self.out = nn.Linear(8, classes)

        def forward(self, tokens):
            return self.out(self.embedding(tokens))

    return Net()


def pictures(input_shape, classes):
    return nn.Sequential(nn.Conv2d(input_shape[0], 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))


def test_a_users_model_by_import_path():
    cost = fedrts.cost(model="test_cost_measured:net", method="fedrts", density=0.5, model_options={"width": 12})
    assert cost.input_shape == (3, 32, 32)
    assert (cost.links, cost.parameters) == (3072 * 12, 3072 * 12 + 12 + 130)
    assert (cost.samples, cost.epochs, cost.batch_size) == (500, 5, 64)
    assert cost.row("measured", "inner").flops < 3 * cost.macs * 2500
    assert {row.accounting for row in cost.rows} == set(ACCOUNTINGS)


def test_a_users_model_of_tokens_and_of_pictures():
    words = fedrts.cost(model="test_cost_measured:sentences", method="feddst", density=0.7, classes=30)
    assert (words.input_shape, words.classes, words.batch_size) == ((256,), 30, 16)
    assert fedrts.cost(model="test_cost_measured:pictures", method="random", density=0.7, input_shape=(1, 5, 5)).parameters == 50


def test_a_module_and_a_method_object_are_left_alone():
    module = net((4,), 3)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    cost = fedrts.cost(model=module, method=FedRTS(density=0.6, gamma=0.1), input_shape=[4])
    assert (cost.method, cost.density, cost.model) == ("fedrts", 0.6, "custom")
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_samples_come_from_the_data_unless_given():
    assert fedrts.cost(data="digits").samples == 1438 // 20
    given = fedrts.cost(data="digits", samples=160, epochs=2, batch_size=32)
    partly = fedrts.cost(data="digits", samples=170, epochs=2, batch_size=32)
    assert partly.row("measured", "inner").flops == given.row("measured", "inner").flops, "a last batch that is not full is left out"
    assert (given.samples, given.epochs, given.batch_size) == (160, 2, 32)


def test_shorter_values_show_in_measured_alone():
    costs = [fedrts.cost(data="digits", value_type=kind) for kind in ("float32", "int8", "int6", "int4", "int2")]
    for accounting in ("paper", "rules"):
        assert len({cost.row(accounting, "outer") for cost in costs}) == 1
    uploads, downloads = ([getattr(cost.row("measured", "inner"), way) for cost in costs] for way in ("upload_bytes", "download_bytes"))
    for most, found, down in zip((1.0, 0.3, 0.21, 0.15, 0.08), uploads, downloads, strict=True):
        assert found <= most * uploads[0]
        assert down <= most * downloads[0]


def test_a_schedule_that_is_never_or_always_outer():
    never = fedrts.cost(data="digits", rounds=5, topology={"interval": 5, "first_outer": 5, "end": 5})
    assert {row.round for row in never.rows} == {"inner"}
    always = fedrts.cost(data="digits", topology={"interval": 1})
    assert {row.round for row in always.rows} == {"inner", "outer"}


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"model": "resnet"}, "did you mean"),
        ({"model": "resnet18", "input_shape": (256,)}, "reads images"),
        ({"model": "tiny_gpt", "input_shape": (3, 8, 8)}, "reads sequences"),
        ({"model": "test_cost_measured:nothing"}, "cannot import"),
        ({"model": "mlp", "method": "fedrtz"}, "did you mean 'fedrts'"),
        ({"model": "cnn", "density": 0.001}, "smallest feasible density"),
        ({"model": "cnn", "samples": 0}, "samples must be at least 1"),
        ({"model": "cnn", "input_shape": (3, 0, 8)}, "at least 1"),
        ({"model": "cnn", "classes": 0}, "at least 1"),
        ({"model": nn.Linear(7, 2)}, "nor does it read tokens: say what it reads by --data"),
        ({"model": nn.LSTM(4, 2), "input_shape": (3, 4)}, "returns tuple"),
        ({"data": "digits", "classes": 4}, "counted from the data"),
        ({"data": "digits", "samples": 5000, "exact": True}, "more than the 1,438"),
    ],
)
def test_mistakes(keywords, words):
    with pytest.raises(InputError, match=words):
        fedrts.cost(**keywords)


# -- memory ---------------------------------------------------------------------------------------------------------


def test_memory_is_what_the_client_holds():
    cost = fedrts.cost(model="test_cost_measured:net", method="fedrts", density=0.5, input_shape=(10,), classes=5, batch_size=32)
    links, parameters, active = 60, 101, 50 + 0  # floor(0.5 · 101), of which 41 are dense
    inner, outer = cost.row("measured", "inner"), cost.row("measured", "outer")
    activations = 4 * 32 * (10 + 6 + 5) + 8 * 32  # the batch, ReLU's output, log-softmax, labels
    assert inner.memory_parts == {
        "weights": 4 * parameters,
        "received weights": 4 * parameters,
        "mask": links,
        "gradient": 4 * parameters,
        "activations": activations,
    }
    assert outer.memory_parts == {**inner.memory_parts, "method": 4 * links}, "the dense gradient that is probed"
    assert inner.memory_bytes == sum(inner.memory_parts.values())
    assert inner.memory_on_mask_bytes == 3 * 4 * active + -(-links // 8) + activations


def test_states_of_optimizers():
    kinds: list[dict[str, Any]] = [{"optimizer": "sgd"}, {"optimizer": "sgd", "momentum": 0.9}, {"optimizer": "adam"}]
    kinds += [{"optimizer": "adam", "amsgrad": True}, {"optimizer": "adamw"}]
    assert [len(LocalTraining(**kind).make_optimizer().remembers) for kind in kinds] == [0, 1, 2, 3, 2]


def test_activations_kept_sparsely_take_less():
    plain, sparse = (
        fedrts.cost(model="cnn", method="fedmef", density=0.5, input_shape=(1, 8, 8), method_options={"sap": sap}) for sap in (False, True)
    )
    kept = [(cost.row("measured", "inner").memory_parts or {})["activations"] for cost in (plain, sparse)]
    assert kept[1] < kept[0]


def test_a_step_is_timed_on_this_machine_where_that_is_asked_for(monkeypatch):
    settings: dict[str, Any] = {"model": "mlp", "data": "digits", "density": 0.1, "seed": 0}
    assert fedrts.cost(**settings).steps == ()
    (dense,) = fedrts.cost(**settings, step=True).steps
    assert dense.kernel == "dense"
    assert dense.milliseconds > 0
    monkeypatch.setenv("FEDRTS_KERNELS", "1")
    if find_spec("fedrts_kernels"):
        kernels = [timed.kernel.partition(",")[0] for timed in fedrts.cost(**settings, step=True).steps]
        assert kernels == ["dense", "sparse"]


def test_added_memory_is_that_of_the_call():
    size = 50 * 2**20
    found = added_bytes(lambda: bytearray(size).__len__() and None)
    assert found is None or 0.8 * size <= found <= 1.5 * size

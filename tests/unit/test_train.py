"""`fedrts.train`: the user's own model, data, loss and rule."""

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import fedrts
from fedrts.errors import InputError, Note
from fedrts.export.inspection import evaluate_run
from fedrts.methods.base import Sparse


class Points(Dataset[tuple[torch.Tensor, int]]):
    """Two noisy classes in the plane, as a map-style dataset that knows nothing of tensors of all rows."""

    def __init__(self, seed, count):
        generator = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 2, (count,), generator=generator)
        self.x = torch.randn(count, 2, generator=generator) + 3 * self.y[:, None]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], int(self.y[index])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))


class Stop(Exception):
    """A run is cut off."""


class Stopper(fedrts.observe.Silent):
    """Cuts a run off after a round."""

    def __init__(self, after):
        self.after = after

    def played(self, record):
        if record.round == self.after:
            raise Stop


def clients(count=4):
    return [Points(seed, 30 + 7 * seed) for seed in range(count)]


SMALL: dict[str, Any] = {"rounds": 6, "epochs": 2, "batch_size": 8, "lr": 0.1, "topology": {"interval": 2}}


def test_an_own_model_on_own_data_learns():
    result = fedrts.train(
        model=net(), clients=clients(), test=Points(99, 60), method=fedrts.methods.FedRTS(density=0.5, gamma=0.3), **SMALL
    )
    assert result.summary["accuracy"] > 0.9
    assert result.summary["method"] == "fedrts"
    assert result.summary["density"] <= 0.5
    assert len(result.history) == 6
    assert result.history[0]["clients"] == [0, 1, 2, 3]
    assert set(result.masks) == {"0.weight", "2.weight"}
    with torch.no_grad():
        x, y = Points(99, 60).x, Points(99, 60).y
        assert (result.model(x).argmax(1) == y).double().mean() == pytest.approx(result.summary["accuracy"])
    for name, mask in result.masks.items():
        assert dict(result.model.named_parameters())[name][~mask].count_nonzero() == 0


def test_own_loss_metric_and_rule():
    losses = []

    def loss(output, target):
        losses.append(len(target))
        return nn.functional.mse_loss(output.squeeze(-1), target)

    data = [TensorDataset(p.x, p.y.float()) for p in clients()]
    test = TensorDataset(Points(9, 40).x, Points(9, 40).y.float())
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    result = fedrts.train(
        model=model,
        clients=data,
        test=test,
        method="random",
        loss=loss,
        correct=lambda output, target: ((output.squeeze(-1) > 0.5) == (target > 0.5)).sum(),
        prunable=lambda name, parameter: name == "2.weight",
        density=0.9,
        **SMALL,
    )
    assert losses
    assert result.summary["accuracy"] > 0.85
    assert set(result.masks) == {"2.weight"}


def test_a_method_from_outside_needs_no_registration():
    class Mine(Sparse):
        """Its own."""

    fedrts.methods.register("mine")(Mine)
    try:
        result = fedrts.train(model=net(), clients=clients(), test=Points(9, 20), method=Mine(density=0.6), **SMALL)
    finally:
        fedrts.methods.methods._known.pop("mine")
    assert result.summary["method"] == "mine"
    assert result.summary["density"] <= 0.6


def test_a_run_folder_resumes_to_the_same_bits(tmp_path):
    common = {"clients": clients(), "test": Points(99, 60), "method": "fedrts", "density": 0.5, **SMALL}
    whole = fedrts.train(model=net(), **common)
    with pytest.raises(Stop):
        fedrts.train(model=net(), out=tmp_path / "run", observer=Stopper(after=3), **common)
    with pytest.raises(InputError, match="resume"):
        fedrts.train(model=net(), out=tmp_path / "run", **common)
    with pytest.raises(InputError, match="given in Python"):
        fedrts.resume(tmp_path / "run")
    resumed = fedrts.train(model=net(), out=tmp_path / "run", resume=True, **common)
    assert torch.equal(whole.state.weights, resumed.state.weights)
    assert whole.state.mask == resumed.state.mask
    assert [{**line, "seconds": 0} for line in whole.history] == [{**line, "seconds": 0} for line in resumed.history]
    loaded = fedrts.load(tmp_path / "run", model=net())
    assert torch.equal(loaded(Points(1, 5).x), resumed.model(Points(1, 5).x))
    with pytest.raises(InputError, match="pass it as"):
        fedrts.load(tmp_path / "run")


def test_another_model_or_other_clients_are_not_resumed(tmp_path):
    def rule(name, parameter):
        return name == "2.weight"

    common = {"test": Points(99, 60), "method": "fedrts", "density": 0.7, "out": tmp_path / "run", **SMALL}
    with pytest.raises(Stop):
        fedrts.train(model=net(), clients=clients(), prunable=rule, observer=Stopper(after=0), **common)
    with pytest.raises(InputError, match="rule of what may be pruned"):
        fedrts.train(model=net(), clients=clients(), resume=True, **common)
    with pytest.raises(InputError, match="clients' data"):
        fedrts.train(model=net(), clients=[*clients(3), Points(3, 7)], prunable=rule, resume=True, **common)
    with pytest.raises(InputError, match="give the same ones"):
        fedrts.load(tmp_path / "run", model=net())
    fedrts.load(tmp_path / "run", model=net(), prunable=rule)


def test_frozen_parameters_stay_and_masks_of_infinity_do_no_harm():
    class Gated(nn.Module):
        shut: torch.Tensor

        def __init__(self):
            super().__init__()
            self.body = net()
            self.body[0].requires_grad_(False)
            self.register_buffer("shut", torch.tensor([0.0, float("-inf")]))

        def forward(self, x):
            return self.body(x) + torch.where(torch.isinf(self.shut), torch.zeros(2), self.shut)

    result = fedrts.train(model=Gated(), clients=clients(), test=Points(9, 20), method="fedavg", train={"weight_decay": 0.1}, **SMALL)
    before, after = net(), result.model
    assert torch.equal(after.get_parameter("body.0.weight"), before.get_parameter("0.weight"))
    assert not torch.equal(after.get_parameter("body.2.weight"), before.get_parameter("2.weight"))
    assert torch.isinf(after.get_buffer("shut")[1])


@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clients": []}, "clients is empty"),
        ({"clients": [Points(0, 0)]}, r"clients\[0\] is empty"),
        ({"rounds": 0}, "rounds must be"),
        ({"density": 0.01}, "infeasible"),
        ({"method": "fedrt"}, "did you mean 'fedrts'"),
        ({"method": fedrts.methods.FedRTS}, "method is the class FedRTS: give an object"),
        ({"model": nn.Linear(5, 2)}, "cannot read the inputs"),
        ({"lr": 1e6, "rounds": 30}, "usable replies.*train.lr"),
        ({"model": nn.Sequential(nn.Linear(2, 9), nn.BatchNorm1d(9), nn.Linear(9, 2)), "batch_size": 1}, "train.batch_size = 1"),
        ({"learning_rate": 0.1}, "unknown key 'learning_rate'"),
        ({"clients": [TensorDataset(torch.randn(9, 2), torch.arange(9))] * 2}, "labels must be 0 to 1"),
        (
            {"clients": [{"a": torch.randn(9, 2), "label": torch.zeros(9).long()}] * 2, "test": 0.3},
            r"a dictionary of \['a'\] .* forward\(input\) whole",
        ),
        ({"loss": lambda output, target: nn.functional.cross_entropy(output.detach(), target)}, "no gradient by the model's parameters"),
        ({"loss": lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1])}, "one of .model, batch. has parameters of these names"),
    ],
)
def test_mistakes_are_one_clear_line(change, message):
    arguments = {"model": net(), "clients": clients(), "test": Points(9, 20), "method": "fedrts", "density": 0.5, **SMALL, **change}
    with pytest.raises(InputError, match=message) as caught:
        fedrts.train(**arguments)
    assert "\n" not in str(caught.value)


def test_a_model_trained_on_a_gpu_loads_without_one(tmp_path, monkeypatch):
    """Finished or not; only resuming needs the device."""
    result = fedrts.run(
        data="toy_images", model="mlp", density=0.5, rounds=2, clients={"total": 4, "partition": "iid"}, out=tmp_path / "run"
    )
    file = tmp_path / "run" / "experiment.toml"
    file.write_text(file.read_text("utf-8").replace('device = "cpu"', 'device = "cuda"'), "utf-8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    expected = result.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in fedrts.load(tmp_path / "run").state_dict().items())
    assert evaluate_run(tmp_path / "run")["accuracy"] == pytest.approx(result.summary["accuracy"])
    (tmp_path / "run" / "model.safetensors").unlink()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in fedrts.load(tmp_path / "run").state_dict().items())
    with pytest.raises(InputError, match="device 'cuda' is not there"):
        fedrts.resume(tmp_path / "run")


def test_a_norm_without_statistics_of_its_own(toy):
    data = toy("fedavg").data
    sites = [TensorDataset(data.x[start : start + 40], data.y[start : start + 40]) for start in (0, 40, 80)]
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.ReLU(), nn.Linear(8, 3))
    result = fedrts.train(model=model, clients=sites, test=sites[0], rounds=2, density=0.8, batch_size=8, lr=0.1)
    assert result.summary["accuracy"] > 0.34


def no_model(input_shape, classes):
    return "a string"


def test_what_is_no_module_is_one_line_and_leaves_no_folder(tmp_path):
    with pytest.raises(InputError, match=r"gives str, which is no torch\.nn\.Module"):
        fedrts.run(data="digits", model=f"{__name__}:no_model", rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_may_start_from_the_weights_of_a_model_that_a_method_prepared(tmp_path):
    keywords: dict[str, Any] = {
        "data": "digits",
        "model": "cnn",
        "model_options": {"width": 4},
        "method": "fedmef",
        "method_options": {"ws": True},
        "rounds": 1,
    }
    keywords |= {"epochs": 1, "density": 0.5, "clients": 4}
    fedrts.run(**keywords, out=tmp_path / "first")
    changes: dict[str, Any] = {"lr": 1e-12, "seed": 1, "topology": {"adjust": 0.0, "init_mask": "given"}, "out": tmp_path / "second"}
    second = fedrts.run(**keywords, **changes, init=tmp_path / "first" / "model.safetensors")
    first = fedrts.load(tmp_path / "first")
    bias = next(name for name in first.state_dict() if name.endswith("gain"))
    torch.testing.assert_close(second.model.state_dict()[bias], first.state_dict()[bias])


# -- what does not go together is said before any training ------------------------------------------------------------


def regression(y):
    """Clients and a test set with other targets."""

    def made(points):
        return TensorDataset(points.x, y(points.y))

    return {"clients": [made(points) for points in clients()], "test": made(Points(9, 20))}


def unreduced(output, target):
    return nn.functional.cross_entropy(output, target, reduction="none")


def ones(*shape):
    return TensorDataset(torch.ones(shape), torch.ones(shape[0]).long())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (regression(y=lambda y: y - 1), r"out of bounds|labels must be 0 to 1"),
        (regression(y=lambda y: y + 7 * (torch.arange(len(y)) == 15)), r"labels must be 0 to 1, .* these are 0 to 8"),
        (regression(y=lambda y: y[:, None]), r"these are \[n, 1\]: give y\.squeeze\(1\)"),
        ({"loss": unreduced}, r"must be a tensor with one number"),
        ({"model": nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))}, r"'0\.weight' has no shape yet"),
        ({"model": nn.ReLU()}, "no parameters"),
        ({"model": "mlp"}, r"model is 'mlp': give a torch\.nn\.Module"),
        ({"clients": [[{"x": 1.0}] * 3]}, r"\(input, target\)|one tensor as input"),
        ({"clients": [ones(4, 2), ones(4, 3)]}, "one shape"),
        ({"clients": [iter(())]}, r"clients\[0\] is empty"),
        ({"clients": [7]}, "map-style"),
        ({"clients": {"7": Points(0, 9), 7: Points(1, 9)}}, "two clients have the name '7'"),
        ({"target": 3}, "target = 3: give the name of a column"),
        ({"client": 3}, "client = 3: give the name of a column"),
        ({"collate_fn": lambda samples: None}, "a batch holds no tensors, it is a NoneType"),
    ],
)
def test_what_does_not_go_together_is_one_line_and_leaves_no_folder(tmp_path, given, words):
    common = {"model": net(), "clients": clients(), "test": Points(9, 20), "method": "random", "density": 0.5, **SMALL}
    with pytest.raises(InputError, match=words) as caught:
        fedrts.train(**{**common, **given}, out=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_task_without_an_accuracy():
    class Half(fedrts.tasks.Classification):
        def evaluate(self, module, x, y, batch_size):
            return {"loss": 0.0}

    with pytest.raises(InputError, match="gives no accuracy"):
        fedrts.train(model=net(), clients=clients(), test=Points(9, 20), task=Half(), density=0.5, **SMALL)


def test_labels_of_any_whole_number_type():
    expected = fedrts.train(model=net(), clients=clients(), test=Points(9, 20), density=0.5, **SMALL)
    for kind in (torch.uint8, torch.int16):
        found = fedrts.train(model=net(), density=0.5, **regression(y=lambda y, kind=kind: y.to(kind)), **SMALL)
        assert found.summary["loss"] == expected.summary["loss"]


def test_targets_that_are_no_classes_are_not_counted(tmp_path):
    own: dict[str, Any] = {
        "loss": lambda o, t: nn.functional.mse_loss(o[:, 0], t.float()),
        "correct": lambda o, t: ((o[:, 0] > 0) == (t > 0)).sum(),
    }
    for name, change in (("signs", lambda y: 2 * y - 1), ("large", lambda y: y * 1_000_000)):
        fedrts.train(model=net(), density=0.5, **own, **regression(y=change), **SMALL | {"lr": 1e-9}, out=tmp_path / name)
        assert [entry["labels"] for entry in json.loads((tmp_path / name / "clients.json").read_text("utf-8"))] == [None] * 4


def test_keywords_beside_a_method_object():
    common = {"model": net(), "clients": clients(), "test": Points(9, 20), **SMALL}
    assert 0.4 < fedrts.train(method=fedrts.methods.FedRTS(gamma=0.3), density=0.5, **common).summary["density"] <= 0.5
    with pytest.raises(InputError, match="density is given twice"):
        fedrts.train(method=fedrts.methods.FedRTS(density=0.4), density=0.5, **common)
    with pytest.raises(InputError, match="method_options is given twice"):
        fedrts.train(method=fedrts.methods.FedRTS(), method_options={"gamma": 0.1}, **common)
    assert fedrts.cost(method=fedrts.methods.FedRTS(gamma=0.3), density=0.5, model="mlp").density == 0.5


class Twice(nn.Module):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(2, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        self.again = self.inner

    def forward(self, x):
        return self.last(self.again(self.inner(self.first(x).relu()).relu()).relu())


def test_a_part_under_two_names_trains_one_by_one():
    model, common = Twice(), {"clients": clients(), "test": Points(9, 20), "density": 0.7, **SMALL}
    with pytest.warns(Note, match=r"one part under two names \(inner and again\)"):
        result = fedrts.train(model=model, engine="batched", **common)
    assert torch.isfinite(model.inner.weight).all(), "its tensors are its own"
    assert result.summary["accuracy"] > 0.8


@pytest.mark.parametrize("workers", [1, 2])
def test_side_by_side_resumes_to_the_same_bits_whatever_was_recorded_before(tmp_path, workers):
    digits: dict[str, Any] = {
        "rounds": 4,
        "model": "mlp",
        "epochs": 1,
        "checkpoint": {"every": 1},
        "engine": {"name": "batched", "workers": workers},
    }
    whole = fedrts.run(**digits, out=tmp_path / "whole")
    with pytest.raises(Stop):
        fedrts.run(**digits, out=tmp_path / "run", observer=Stopper(after=2))
    assert torch.equal(fedrts.resume(tmp_path / "run").state.weights, whole.state.weights)


def test_the_model_of_another_run_is_one_line(tmp_path):
    fedrts.train(model=net(), clients=clients(), test=Points(9, 20), density=0.5, **SMALL, out=tmp_path / "run")
    with pytest.raises(InputError, match="has another model: ") as caught:
        fedrts.load(tmp_path / "run", model=nn.Linear(2, 2))
    assert "\n" not in str(caught.value)


def test_a_run_says_what_was_given_that_has_no_name(tmp_path):
    """So that the report does not take two tasks for two runs of one."""

    def given(**task):
        fixed: dict[str, Any] = {"method": "random", "density": 0.9, "rounds": 1}
        return fedrts.train(model=net(), clients=clients(), test=Points(9, 20), **fixed, **task).summary["given"]

    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    losses: list[dict[str, Any]] = [
        {},
        {"loss": smooth},
        {"loss": nn.CrossEntropyLoss(label_smoothing=0.2)},
        {"loss": lambda o, y: 2 * smooth(o, y)},
    ]
    losses += [{"loss": lambda o, y: 3 * smooth(o, y)}, {"correct": lambda o, y: (o.argmax(-1) == y).sum()}]
    found = [given(**task) for task in losses]
    assert len({entry["task"] for entry in found}) == len(losses)
    assert len({(entry["model"], entry["data"]) for entry in found}) == 1
    assert found[0]["task"].startswith("cross_entropy #")
    assert given() == found[0]


def test_a_model_without_anything_to_prune_trains_densely():
    result = fedrts.train(model=nn.Linear(2, 2), clients=clients(), test=Points(9, 20), method="fedavg", **SMALL)
    assert result.masks == {}
    assert result.summary["accuracy"] > 0.8


@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
def test_inputs_that_are_not_finite_are_told():
    broken = clients()
    broken[2].x[5, 1] = float("nan")
    with pytest.warns(Note, match=r"clients\[2\] has inputs that are not finite"), pytest.raises(InputError, match="not finite"):
        fedrts.train(model=net(), clients=broken, test=Points(9, 20), method="fedavg", per_round=4, guard={"quorum": 1.0}, **SMALL)

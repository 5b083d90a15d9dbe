"""What `fedrts.train` is given and cannot use, or is given twice, is one line; so is what does not count, or is another than before."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fedrts
from fedrts.errors import InputError
from fedrts.runs.likeness import alike, likeness
from fedrts.tasks import Classification

SMALL = {"rounds": 2, "epochs": 1, "batch_size": 8, "density": 0.5}


def site(seed, count=20):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, :3].sum(1) > 0).long())


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2))


def trained(**given):
    return fedrts.train(**{"model": net(), "clients": [site(seed) for seed in range(4)], "test": site(9, 40), **SMALL, **given})


class DataFrame:
    """As far as it matters, the one of pandas: it has a length, and its items are columns."""

    def __len__(self):
        return 20

    def __getitem__(self, column):
        raise KeyError(column)


class Broken(TensorDataset):
    def __getitem__(self, index):
        raise KeyError("label")


def right(output, target):
    return output.argmax(-1) == target


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"data_options": {"nonsense": 3}}, "unknown key 'data_options.nonsense'; known: none"),
        ({"data_options": {"validation": 0.1}}, "unknown key 'data_options.validation'"),
        ({"model_options": {"hiden": 3}}, "unknown key 'model_options.hiden'; known: prune_output"),
        ({"data": "digits"}, "data = 'digits' is for fedrts.run"),
        ({"lr": 0.1, "train": {"lr": 0.2}}, r"train.lr is given twice, as lr=0.1 and in train="),
        ({"epochs": 1, "train": {"epochs": 2}}, "train.epochs is given twice"),
        ({"precision": "float32", "engine": {"precision": "tf32"}}, "engine.precision is given twice"),
        ({"task": Classification(), "loss": F.cross_entropy}, "give either a task, or loss and correct"),
        ({"correct": lambda o, t: right(o, t).sum() * 3}, r"number of right answers in a batch .*: it gives \d+ for 40 samples"),
        ({"correct": lambda o, t: -right(o, t).sum()}, "it gives -"),
        ({"correct": lambda o, t: right(o, t).sum() * float("nan")}, "it gives nan"),
        ({"correct": lambda o, t: right(o, t).float().mean()}, r"is it a mean\?\): it gives 0.* for 40 samples, and 0.* for their halves"),
        ({"clients": [DataFrame()]}, r"clients\[0\] is a table: name the column that is to be predicted"),
        ({"clients": [Broken(torch.ones(3, 6), torch.ones(3), torch.ones(3))]}, r"clients\[0\] must give .*KeyError: 'label'"),
    ],
)
def test_useless_double_and_wrong_things_are_one_line_and_leave_no_folder(tmp_path, given, words):
    with pytest.raises(InputError, match=words) as caught:
        trained(**given, out=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_run_takes_a_rate_once_too():
    with pytest.raises(InputError, match=r"train\.lr is given twice"):
        fedrts.run(lr=0.1, train={"lr": 0.1}, rounds=1)


def test_counts_and_summed_shares_pass():
    for correct in (lambda o, t: right(o, t).sum(), lambda o, t: o.softmax(-1).gather(1, t[:, None]).sum()):
        assert 0 < trained(correct=correct).summary["accuracy"] < 1


def test_clients_may_drop_out():
    history = trained(dropout=0.5, rounds=4, guard={"quorum": 0.1}).history
    assert any(entry["reason"] == "dropped out" for line in history for entry in line["rejected"])


def squared(scale, output, target):
    return scale * F.mse_loss(output, F.one_hot(target, 2).float())


def weighted(scale):
    return lambda output, target: scale * squared(1.0, output, target)


def test_another_loss_is_not_resumed(tmp_path):
    loss, correct = weighted(2.0), lambda o, t: right(o, t).sum()
    first = trained(loss=loss, correct=correct, out=tmp_path)
    again = trained(loss=weighted(2.0), correct=lambda o, t: right(o, t).sum(), out=tmp_path, resume=True)  # the same, made anew
    assert torch.equal(again.state.weights, first.state.weights)
    others = [{"loss": weighted(3.0)}, {"loss": F.cross_entropy}, {"correct": lambda o, t: (o.argmin(-1) == t).sum()}, {"correct": None}]
    for other in others:
        with pytest.raises(InputError, match="the loss, `correct` or task is not that of the checkpoint"):
            trained(**{"loss": loss, "correct": correct, **other}, out=tmp_path, resume=True)


def test_likeness_looks_at_code_and_values():
    class Own(Classification):
        def evaluate(self, module, x, y, batch_size):
            return {"loss": 0.0, "accuracy": 0.0}

    same = [lambda: functools.partial(squared, 2.0), lambda: nn.CrossEntropyLoss(torch.tensor([1.0, 2.0])), Own, lambda: Own().loss]
    kinds = [likeness(make()) for make in same]
    assert kinds == [likeness(make()) for make in same]
    kinds += map(likeness, [functools.partial(squared, 3.0), nn.CrossEntropyLoss(torch.tensor([1.0, 3.0])), Classification()])
    kinds += map(likeness, [F.mse_loss, F.l1_loss, torch.dot])
    assert len(set(kinds)) == len(kinds)
    circle = Own()
    circle.__dict__["self"] = circle
    assert likeness(circle) == likeness(circle)
    assert [alike(then, "3.11 b") for then in ("3.10 a", "", "3.11 b", "3.11 a")] == [True, True, True, False]

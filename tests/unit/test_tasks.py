"""Losses and metrics against their definitions; a large vocabulary in little memory."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fedrts import models, tasks
from fedrts.errors import InputError, reason
from fedrts.tasks import Classification, Language, OfBatches, cross_entropy, crossentropy, declared, named, of_batches
from fedrts.tasks.crossentropy import linear_cross_entropy

WORDS, TIME = 23, 6


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks, the last one shorter, and the fused loss for the small vocabulary of a test."""
    monkeypatch.setattr(crossentropy, "LOGITS_AT_ONCE", 5 * WORDS + 1)
    monkeypatch.setattr(tasks, "FUSED_FROM", 1)


def gpt(attention="sdpa"):
    torch.manual_seed(0)
    model = models.get("tiny_gpt")((TIME,), WORDS, width=8, layers=1, heads=2, attention=attention).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)  # far from uniform predictions
    return model


def stories(count=4, padding=-100):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(0, WORDS - 1, (2, count, TIME), generator=generator)
    y[0, 2:] = y[1, 5:] = padding
    return x, y


class Opaque(nn.Module):
    """A model of which nothing is known but its logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


def gradients(loss, module):
    found = torch.autograd.grad(loss, list(module.parameters()))
    return dict(zip([name for name, _ in module.named_parameters()], found, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("padding", [-100, WORDS - 1])
def test_loss_and_gradients_without_all_logits_are_the_plain_ones(padding, temperature):
    model, task = gpt(), Language(padding)
    x, y = stories(padding=padding)
    logits = model(x) / temperature
    counted = y != padding
    expected = -logits.log_softmax(-1).gather(-1, y.where(counted, 0).unsqueeze(-1)).squeeze(-1)[counted].mean()
    loss = task.loss(model, x, y, temperature=temperature)
    assert "LinearCrossEntropy" in type(loss.grad_fn).__name__
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    wanted = gradients(expected, model)
    for name, gradient in gradients(loss, model).items():  # that of the tied matrix comes from both its uses
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-12, msg=name)


def test_the_plain_path_is_taken_where_it_must_or_pays(monkeypatch):
    model, task = gpt("eager"), Language()
    x, y = stories()
    fused = task.loss(model, x, y, temperature=2.0)
    for plain in (task.loss(Opaque(model), x, y, temperature=2.0), task.loss(model, x, y, temperature=2.0, twice=True)):
        assert "LinearCrossEntropy" not in type(plain.grad_fn).__name__
        torch.testing.assert_close(plain, fused, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(tasks, "FUSED_FROM", y.numel() * WORDS)
    assert "LinearCrossEntropy" in type(task.loss(model, x, y).grad_fn).__name__
    assert "LinearCrossEntropy" not in type(task.loss(model, x[1:], y[1:]).grad_fn).__name__


def test_second_derivatives_need_the_plain_path_and_never_come_out_wrong():
    model, task = gpt("eager"), Language()
    x, y = stories()
    weight = model.transformer["h"][0].mlp.c_fc.weight

    def curvature(**options):
        (first,) = torch.autograd.grad(task.loss(model, x, y, **options), weight, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weight)[0]

    step = 1e-5 * torch.randn_like(weight)
    values = []
    for sign in (1, -1):
        weight.data += sign * step
        values.append(torch.autograd.grad(task.loss(model, x, y), weight)[0].square().sum())
        weight.data -= sign * step
    numeric = (values[0] - values[1]) / 2
    assert float((curvature(twice=True) * step).sum()) == pytest.approx(float(numeric), rel=1e-5)
    with pytest.raises(RuntimeError, match="twice=True"):
        curvature()


@pytest.mark.parametrize("shared", [(), ("weight",), ("hidden",), ("hidden", "weight")])
def test_many_clients_at_once(shared):
    torch.manual_seed(0)
    tensors = {"hidden": torch.randn(3, 12, 4).double(), "weight": torch.randn(3, WORDS, 4).double()}
    target = torch.randint(0, WORDS, (3, 12))
    target[:, 4] = -100
    hidden, weight = (tensors[name][0] if name in shared else tensors[name] for name in ("hidden", "weight"))
    dims = tuple(None if name in shared else 0 for name in ("hidden", "weight"))

    def plain(hidden, weight, target):
        return F.cross_entropy(hidden @ weight.t(), target)

    def lean(hidden, weight, target):
        return linear_cross_entropy(hidden, weight, target, -100)

    ours = vmap(grad(lean, (0, 1)), (*dims, 0))(hidden, weight, target)
    for found, wanted in zip(ours, vmap(grad(plain, (0, 1)), (*dims, 0))(hidden, weight, target), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_many_clients_of_a_model_with_tied_matrices():
    class Objective(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x, y):
            return Language().loss(self.module, x, y)

    objective = Objective(gpt())
    names = [name for name, _ in objective.named_parameters()]
    own = {name: torch.stack([p.detach() * scale for scale in (1.0, 0.9)]) for name, p in objective.named_parameters()}
    pairs = [stories(), stories(padding=WORDS - 1)]
    x, y = (torch.stack(part) for part in zip(*pairs, strict=True))
    batched = vmap(grad(lambda own, x, y: functional_call(objective, own, (x, y))))(own, x, y)
    for client in range(2):
        for name, parameter in objective.named_parameters():
            parameter.data.copy_(own[name][client])
        wanted = torch.autograd.grad(objective(x[client], y[client]), list(objective.parameters()))
        for name, gradient in zip(names, wanted, strict=True):
            torch.testing.assert_close(batched[name][client], gradient, rtol=1e-11, atol=1e-12, msg=name)


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_tensor_is_as_large_as_all_logits(monkeypatch):
    count, words, width = 50, 200, 8
    monkeypatch.setattr(crossentropy, "LOGITS_AT_ONCE", 10 * words)
    model = models.get("tiny_gpt")((TIME,), words, width=width, layers=1, heads=2)
    x, y = stories(count)
    widest = count * TIME * 4 * width  # inside the MLP
    with Largest() as largest:
        Language().loss(Opaque(model), x, y).backward()
    assert largest.elements == count * TIME * words > 6 * widest
    saved = []

    def noted(tensor):
        saved.append(tensor.numel())
        return tensor

    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(noted, lambda t: t):
        Language().loss(model, x, y).backward()
    assert largest.elements == max(saved) == widest
    with Largest() as largest:
        Language().evaluate(model, x, y, batch_size=count)
    assert largest.elements == widest


@pytest.mark.parametrize("wrap", [lambda model: model, Opaque])
@pytest.mark.parametrize("padding", [-100, WORDS - 1])
def test_metrics_of_language_are_what_they_are_called(wrap, padding):
    model = gpt()
    x, y = stories(5, padding)
    y[3] = padding  # a story without a word counts for nothing
    perplexities, accuracies, tokens = [], [], []
    for story, targets in zip(x, y, strict=True):
        probabilities = model(story[None])[0].softmax(-1).detach()
        nll = [-math.log(p[t]) for p, t in zip(probabilities, targets, strict=True) if t != padding]
        right = [int(p.argmax()) == int(t) for p, t in zip(probabilities, targets, strict=True) if t != padding]
        if nll:
            perplexities.append(math.exp(sum(nll) / len(nll)))
            accuracies.append(sum(right) / len(right))
            tokens += nll
    assert len(perplexities) == 4
    wanted = {
        "loss": sum(tokens) / len(tokens),
        "accuracy": sum(accuracies) / 4,
        "perplexity": sum(perplexities) / 4,
        "perplexity_corpus": math.exp(sum(tokens) / len(tokens)),
    }
    for batch_size in (1, 2, 5):
        assert Language(padding).evaluate(wrap(model), x, y, batch_size) == pytest.approx(wanted, rel=1e-12)


def test_hits_of_language_are_counted():
    """A model that always says the right word."""

    class Knowing(nn.Module):
        def forward(self, x):
            return 1000.0 * F.one_hot(x + 1, WORDS)

    x = torch.arange(12).view(2, 6)
    metrics = Language().evaluate(Knowing(), x, x + 1, 2)
    assert metrics == {"loss": 0.0, "accuracy": 1.0, "perplexity": 1.0, "perplexity_corpus": 1.0}
    assert Language().evaluate(Knowing(), x, x + 2, 2)["perplexity_corpus"] == math.inf


@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.uint16, torch.uint8])
def test_tokens_may_be_stored_small(kind):
    model = gpt()
    x, y = stories(padding=WORDS - 1)
    rows = torch.tensor([2, 0])
    small_x, small_y = x.to(kind), y.to(kind)
    assert torch.equal(Language(WORDS - 1).loss(model, small_x[rows], small_y[rows]), Language(WORDS - 1).loss(model, x[rows], y[rows]))
    assert Language(WORDS - 1).evaluate(model, small_x, small_y, 2) == Language(WORDS - 1).evaluate(model, x, y, 2)


@pytest.mark.parametrize("form", ["shares", "pixels"])
def test_cross_entropy_takes_what_torch_takes(form):
    torch.manual_seed(0)
    output = torch.randn(5, 4) if form == "shares" else torch.randn(5, 4, 3, 2)
    target = torch.rand(5, 4).softmax(1) if form == "shares" else torch.randint(4, (5, 3, 2))
    assert torch.equal(cross_entropy(output, target), F.cross_entropy(output, target))


def test_classification_is_cross_entropy_and_the_share_of_hits():
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 4), torch.randn(7, 3), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    torch.testing.assert_close(Classification().loss(model, x, y), F.cross_entropy(model(x), y))
    torch.testing.assert_close(Classification().loss(model, x, y, temperature=4.0), F.cross_entropy(model(x) / 4, y))
    metrics = Classification().evaluate(model, x, y, 3)
    assert metrics["loss"] == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-6)
    assert metrics["accuracy"] == pytest.approx(float((model(x).argmax(1) == y).double().mean()))


@pytest.mark.parametrize(("said", "told"), [("", "RuntimeError"), ("\n  \n", "RuntimeError"), ("\n  one\ntwo", "one"), ("one", "one")])
def test_the_reason_of_an_error_is_one_line(said, told):
    assert reason(RuntimeError(said)) == told


# -- tasks by name ---------------------------------------------------------------------------------------------------


def test_in_an_imbalanced_task_every_class_counts_alike():
    target = torch.tensor([0] * 9 + [1] * 2 + [2])
    output = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    task = named.made("imbalanced", target)
    weights = torch.tensor([12 / (3 * 9), 12 / (3 * 2), 12 / 3])
    expected = torch.stack([nn.functional.cross_entropy(output[target == label], target[target == label]) for label in range(3)]).mean()
    torch.testing.assert_close(task.loss(nn.Identity(), output, target), expected)
    torch.testing.assert_close(
        task.loss(nn.Identity(), output, target), (weights[target] * nn.functional.cross_entropy(output, target, reduction="none")).mean()
    )
    assert [metric.name for metric in declared(task)][:2] == ["loss", "f1"]


def test_a_regression_trains_on_standardised_targets_and_is_judged_in_their_units():
    target = torch.tensor([100.0, 300.0, 200.0, 400.0])
    task = named.made("regression", target)
    scaled = (target - 250) / target.std(correction=0)
    output = (scaled + torch.tensor([0.1, -0.1, 0.1, -0.1]))[:, None]
    torch.testing.assert_close(task.loss(nn.Identity(), output, target), torch.tensor(0.01))
    found = task.evaluate(nn.Identity(), output, target, 3)
    assert found["loss"] == pytest.approx(0.01)
    assert found["mae"] == pytest.approx(0.1 * float(target.std(correction=0)), rel=1e-5)
    assert found["r2"] == pytest.approx(0.99, abs=1e-6)
    constant = named.made("regression", torch.full((3, 2), 7.0))
    assert constant.loss(nn.Identity(), torch.zeros(3, 2), torch.full((3, 2), 7.0)) == 0, "a target that never changes"


def test_several_labels_are_judged_each_for_itself():
    target = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    output = torch.tensor([[2.0, -1.0], [1.0, -3.0], [0.5, 0.2]])
    task = named.made("multilabel", target)
    torch.testing.assert_close(task.loss(nn.Identity(), output, target), nn.functional.binary_cross_entropy_with_logits(output, target))
    assert task.evaluate(nn.Identity(), output, target, 2)["f1"] == pytest.approx((0.8 + 1) / 2)


@pytest.mark.parametrize(
    ("name", "target", "words"),
    [
        ("multilabel", torch.tensor([[0.0, 2.0]]), "zeros and ones"),
        ("imbalanced", torch.tensor([0.5]), "one label from 0"),
        ("classification", torch.tensor([-1]), "one label from 0"),
        ("regression", torch.tensor([1.0, 2.0, float("nan")]), r"target 3 of all clients' is not finite"),
        ("regression", torch.zeros(2, 3, 4), r"takes targets \[n\] or \[n, k\]"),
        ("ranking", torch.zeros(2), "ranking"),
        ("regression", {"a": torch.zeros(2)}, "one tensor of targets"),
    ],
)
def test_a_task_says_which_targets_it_takes(name, target, words):
    with pytest.raises(InputError, match=words):
        named.made(name, target)


def test_a_loss_of_model_and_batch_is_known_by_its_parameters():
    assert of_batches(lambda model, batch: torch.zeros(()))
    assert of_batches(lambda m, batch: torch.zeros(()))
    assert not of_batches(lambda output, target: torch.zeros(()))
    assert not of_batches(nn.functional.cross_entropy)
    assert not of_batches(torch.add)


def test_a_loss_of_batches_knows_no_temperature():
    task = OfBatches(lambda model, batch: batch[0].sum(), join=lambda x, y: (x, y))
    assert task.loss(nn.Identity(), torch.ones(2), torch.ones(2)) == 2
    with pytest.raises(InputError, match="temperature"):
        task.loss(nn.Identity(), torch.ones(2), torch.ones(2), temperature=2.0)

"""Recordings are the kernel itself, up to the order of sums; what cannot be recorded still runs."""

from types import MethodType
from typing import cast

import numpy as np
import pytest
import torch
from torch.fx import GraphModule

from fedrts.engines import recorded
from fedrts.engines.kernels import Kernel, Objective, OneByOne, Vectorised
from fedrts.engines.recorded import Recorded


def called(run, clients, size):
    """Arguments of a kernel: weights, inputs, targets."""
    weights = run.setup.weights.expand(clients, -1) + 0.01 * torch.arange(clients)[:, None]
    rows = torch.arange(clients * size).view(clients, size)
    return weights, *run.data.training_batches(rows, torch.zeros(clients, dtype=torch.int64))


@pytest.mark.parametrize(("model", "kind"), [("mlp", Vectorised), ("cnn", Vectorised), ("cnn", OneByOne), ("tiny_gpt", OneByOne)])
def test_a_recording_comes_to_the_same(toy, model, kind):
    """To the bit where it leaves operations out only; a transposed product may be added up in another order, as the processor likes it."""
    run = toy("fedavg", model)
    kernel = kind(Objective(run.module.train(), run.data.task, run.layout))
    program = recorded.recorded(kernel, *called(run, 3, 4))
    weights, x, y = called(run, 3, 4)
    weights, x = weights * 1.5, x.flip(0)
    for found, expected in zip(program(weights, x, y), kernel(weights, x, y), strict=True):
        torch.testing.assert_close(found, expected)
        assert kind is Vectorised or torch.equal(found, expected)


def test_no_gradient_of_a_linear_layer_is_copied(toy):
    run = toy("fedavg", "mlp")
    program = recorded.recorded(Vectorised(Objective(run.module.train(), run.data.task, run.layout)), *called(run, 3, 4))
    assert isinstance(program, MethodType)
    assert isinstance(program.__self__, GraphModule)
    assert [line for line in program.__self__.code.splitlines() if "contiguous_format" in line] == []


def test_transposed_products_come_to_the_same():
    a, b, c = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.randn(2, 5, 3)

    def kernel(a, b, c):
        product = a @ b
        return product.transpose(1, 2).contiguous() + c, product, (product @ c).transpose(1, 2).contiguous()

    program = recorded.recorded(cast(Kernel, kernel), a, b, c)
    for found, expected in zip(program(2 * a, b, c), kernel(2 * a, b, c), strict=True):
        torch.testing.assert_close(found, expected)
        assert found.is_contiguous()


def test_tensors_from_outside_are_constants_and_numbers_read_are_refused():
    fixed, x, y, z = torch.arange(3.0), torch.ones(3), torch.ones(3), torch.ones(3)
    program = recorded.recorded(cast(Kernel, lambda x, y, z: (x * fixed + y, y, z)), x, y, z)
    assert program(2 * x, y, z)[0].tolist() == [1.0, 3.0, 5.0]
    for read in (lambda y: float(y.sum()), lambda y: y.tolist()[0], lambda y: torch.from_numpy(y.numpy().copy()), np.asarray):
        with pytest.raises(ValueError, match="depends on the numbers"):
            recorded.recorded(cast(Kernel, lambda x, y, z, read=read: (x * read(y), y, z)), x, y, z)


def test_every_call_of_a_form_is_a_playback(toy):
    """The first one too: who has played more, or sooner, must not get other bits."""
    run = toy("fedavg", "mlp")
    plain = Vectorised(Objective(run.module.train(), run.data.task, run.layout))
    kernel = Recorded(plain)
    first = kernel(*called(run, 2, 4))
    assert len(kernel._programs) == 1
    for _ in range(3):
        again = kernel(*called(run, 2, 4))
        assert all(map(torch.equal, first, again))
    torch.testing.assert_close(first.gradient, plain(*called(run, 2, 4)).gradient)
    kernel(*called(run, 2, 5))
    assert len(kernel._programs) == 2


def test_what_cannot_be_recorded_runs_as_it_is(toy, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(recorded, "recorded", refuse)
    run = toy("fedavg", "mlp")
    plain = Vectorised(Objective(run.module.train(), run.data.task, run.layout))
    kernel = Recorded(plain)
    for _ in range(3):
        assert torch.equal(kernel(*called(run, 2, 4)).gradient, plain(*called(run, 2, 4)).gradient)
    assert list(kernel._programs.values()) == [kernel._plain], "and is not tried again"

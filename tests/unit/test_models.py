"""Every model works alone, and many clients of it at once: vmap over the flat vector."""

import pytest
import torch
from torch.func import functional_call, grad_and_value, vmap

from fedrts import models
from fedrts.sparse.layout import Layout
from fedrts.tasks import Classification, Language

CASES = {"mlp": ((1, 8, 8), 10, 85_002), "cnn": ((1, 8, 8), 10, 14_458), "tiny_gpt": ((12,), 40, 27_136)}


def batch(name, clients, size):
    shape, classes, _ = CASES[name]
    if name == "tiny_gpt":
        return torch.randint(0, classes, (clients, size, *shape)), torch.randint(0, classes, (clients, size, *shape)), Language()
    return torch.randn(clients, size, *shape), torch.randint(0, classes, (clients, size)), Classification()


@pytest.mark.parametrize("name", models.names())
def test_parameter_counts(name):
    shape, classes, count = CASES[name]
    assert Layout.of(models.get(name)(shape, classes)).parameters == count


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # attention on the CPU has no batching rule; it is right all the same
@pytest.mark.parametrize("name", models.names())
def test_many_clients_at_once_equal_one_after_the_other(name):
    """Gradients and BatchNorm statistics of four clients by vmap over `[clients, n]`, against autograd on each."""
    shape, classes, _ = CASES[name]
    torch.manual_seed(0)
    module = models.get(name)(shape, classes).double().train()
    layout = Layout.of(module)
    vectors = layout.flatten(module.state_dict()) + 0.01 * torch.randn(4, layout.length, dtype=torch.float64)
    x, y, task = batch(name, 4, 6)
    x = x.double() if x.is_floating_point() else x

    def loss(parameters, buffers, x, y):
        own = {name: view.clone() for name, view in layout.views(buffers, layout.buffers).items()}  # updates of a view would be lost
        views = layout.views(parameters, layout.layers + layout.dense) | own
        tensors = {other: views[entry.name] for entry in layout.entries for other in entry.names}
        constants = {key: value.clone() for key, value in layout.constants.items()}
        value = task.loss(functional_call(module, {**tensors, **constants}, (x,)), y)
        statistics = [views[entry.name].flatten() for entry in layout.buffers]
        return value, torch.cat(statistics) if statistics else buffers

    parameters, buffers = vectors.split([layout.parameters, layout.length - layout.parameters], dim=1)
    gradients, (values, statistics) = vmap(grad_and_value(loss, has_aux=True))(parameters, buffers, x, y)  # vmap updates them in place
    for client in range(4):
        vector, gradient = vectors[client].clone(), torch.zeros(layout.parameters, dtype=torch.float64)
        layout.bind(module, vector, gradient)
        value = task.loss(module(x[client]), y[client])
        value.backward()
        torch.testing.assert_close(values[client], value.detach())
        torch.testing.assert_close(gradients[client], gradient, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(statistics[client], vector[layout.parameters :], rtol=1e-9, atol=1e-11)

"""Every model works alone, and many clients of it at once: vmap over the flat vector."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from fedrts import models
from fedrts.sparse.layout import Layout, output_layer
from fedrts.tasks import Classification, Language

COUNTS = [
    ("mlp", (1, 8, 8), 10, {}, 85_002),
    ("cnn", (1, 8, 8), 10, {}, 14_458),
    ("resnet18", (3, 32, 32), 10, {}, 11_181_642),
    ("resnet18", (3, 32, 32), 10, {"stem": "cifar"}, 11_173_962),
    ("resnet18", (3, 32, 32), 10, {"norm": "group"}, 11_181_642),
    ("resnet18_small", (3, 32, 32), 10, {}, 175_258),
    ("resnet18_small", (3, 32, 32), 10, {"norm": "group"}, 175_258),
    ("resnet18_small", (3, 32, 32), 10, {"width": 5}, 17_595),
    ("shufflenet_v2", (3, 32, 32), 10, {}, 352_042),
    ("shufflenet_v2", (3, 32, 32), 10, {"width": 1.0}, 1_263_854),
    ("gpt2_32m", (256,), 50_257, {}, 19_708_672),
    ("tiny_gpt", (12,), 40, {}, 27_136),
    ("tabular", (7,), 3, {}, 17_923),
]

BUILT = {name for name in models.names() if not models.models.is_path(name)}
"""Those of folders are tested with transformers' own (test_pretrained.py)."""
VOCABULARY = 40
SMALL_GPT = {"width": 16, "layers": 2, "heads": 4, "positions": 16}
CASES = [
    ("mlp", (1, 8, 8), 10, {}),
    ("cnn", (1, 8, 8), 10, {}),
    ("resnet18", (3, 8, 8), 10, {}),
    ("resnet18_small", (3, 8, 8), 10, {}),
    ("resnet18_small", (3, 8, 8), 10, {"norm": "group"}),
    ("resnet18_small", (3, 8, 8), 10, {"norm": "group", "width": 5}),
    ("shufflenet_v2", (3, 16, 16), 10, {}),
    ("gpt2_32m", (12,), VOCABULARY, SMALL_GPT),
    ("tiny_gpt", (12,), VOCABULARY, {}),
    ("tabular", (7,), 3, {}),
]


class Objective(nn.Module):
    """A task's loss as a module, so that `functional_call` reaches whatever the loss takes of the model."""

    def __init__(self, module, task):
        super().__init__()
        self.module = module
        self.task = task

    def forward(self, x, y):
        return self.task.loss(self.module, x, y)


def batch(shape, classes, clients, size):
    if classes == VOCABULARY:
        return torch.randint(0, classes, (clients, size, *shape)), torch.randint(0, classes, (clients, size, *shape)), Language()
    return torch.randn(clients, size, *shape), torch.randint(0, classes, (clients, size)), Classification()


@pytest.mark.parametrize(("name", "shape", "classes", "options", "count"), COUNTS)
def test_parameter_counts(name, shape, classes, options, count):
    assert Layout.of(models.get(name)(shape, classes, **options)).parameters == count


def test_every_model_is_tested():
    assert {case[0] for case in COUNTS} == {case[0] for case in CASES} == BUILT


@pytest.mark.parametrize(
    ("name", "output"), [("resnet18", "fc"), ("resnet18_small", "fc"), ("shufflenet_v2", "fc"), ("cnn", "5"), ("mlp", "5")]
)
def test_the_output_layer_is_not_pruned(name, output):
    module = models.get(name)((3, 32, 32), 10)
    assert output_layer(module) is module.get_submodule(output)
    assert f"{output}.weight" in [entry.name for entry in Layout.of(module).dense]


def test_a_tied_output_matrix_is_pruned_once():
    module = models.get("gpt2_32m")((12,), 40, **SMALL_GPT)
    assert output_layer(module) is None
    assert ("transformer.wte.weight", "lm_head.weight") in [entry.names for entry in Layout.of(module).layers]
    assert all(entry.name.endswith("bias") or ".ln_" in entry.name for entry in Layout.of(module).dense)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # attention on the CPU has no batching rule; it is right all the same
@pytest.mark.parametrize(("name", "shape", "classes", "options"), CASES)
def test_many_clients_at_once_equal_one_after_the_other(name, shape, classes, options):
    """Gradients and BatchNorm statistics of two clients by vmap over `[clients, n]`, against autograd on each."""
    torch.manual_seed(0)
    module = models.get(name)(shape, classes, **options).double().train()
    layout = Layout.of(module)
    vectors = layout.flatten(module.state_dict()) + 0.01 * torch.randn(2, layout.length, dtype=torch.float64)
    x, y, task = batch(shape, classes, 2, 6)
    x = x.double() if x.is_floating_point() else x

    def loss(parameters, buffers, x, y):
        own = {name: view.clone() for name, view in layout.views(buffers, layout.buffers).items()}  # updates of a view would be lost
        views = layout.views(parameters, layout.layers + layout.dense) | own
        tensors = {f"module.{other}": views[entry.name] for entry in layout.entries for other in entry.names}
        constants = {f"module.{key}": value.clone() for key, value in layout.constants.items()}
        value = functional_call(Objective(module, task), {**tensors, **constants}, (x, y))
        statistics = [views[entry.name].flatten() for entry in layout.buffers]
        return value, torch.cat(statistics) if statistics else buffers

    parameters, buffers = vectors.split([layout.parameters, layout.length - layout.parameters], dim=1)
    gradients, (values, statistics) = vmap(grad_and_value(loss, has_aux=True))(parameters, buffers, x, y)  # vmap updates them in place
    for client in range(2):
        vector, gradient = vectors[client].clone(), torch.zeros(layout.parameters, dtype=torch.float64)
        layout.bind(module, vector, gradient)
        value = task.loss(module, x[client], y[client])
        value.backward()
        torch.testing.assert_close(values[client], value.detach())
        largest = float(gradient.abs().max())  # BatchNorm over few pixels amplifies rounding
        torch.testing.assert_close(gradients[client], gradient, rtol=1e-9, atol=1e-8 * largest)
        torch.testing.assert_close(statistics[client], vector[layout.parameters :], rtol=1e-9, atol=1e-11)

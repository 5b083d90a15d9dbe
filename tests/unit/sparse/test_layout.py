import itertools

import pytest
import torch
from torch import nn

from fedrts import models
from fedrts.errors import InputError
from fedrts.sparse.layout import Layout, output_layer


@pytest.fixture(params=["mlp", "cnn", "tiny_gpt"])
def module(request):
    shapes = {"mlp": ((1, 8, 8), 10), "cnn": ((1, 8, 8), 10), "tiny_gpt": ((12,), 40)}
    return models.get(request.param)(*shapes[request.param])


def test_vector_and_state_dict_are_the_same_model(module):
    layout = Layout.of(module)
    vector = layout.flatten(module.state_dict())
    assert len(vector) == layout.length
    again = layout.state_dict(vector)
    assert again.keys() == module.state_dict().keys()
    for name, tensor in module.state_dict().items():
        assert torch.equal(again[name], tensor), name
    module.load_state_dict(again, strict=True)


def test_prunable_first_then_dense_then_buffers(module):
    layout = Layout.of(module)
    distinct = {id(p): p.numel() for p in module.parameters()}
    assert layout.parameters == sum(distinct.values())
    assert layout.links == sum(layout.sizes) < layout.parameters
    for entry in layout.layers:
        assert len(entry.shape) >= 2
        assert not entry.name.endswith("bias")
    assert all("running" in entry.name for entry in layout.buffers)


def test_normalisation_bias_and_output_are_not_prunable():
    cnn = models.get("cnn")((1, 8, 8), 10)
    assert [e.name for e in Layout.of(cnn).layers] == ["0.0.weight", "1.0.weight", "2.0.weight"]
    assert [e.name for e in Layout.of(cnn, prune_output=True).layers][-1] == "5.weight"
    assert len(Layout.of(cnn).buffers) == 6
    assert set(Layout.of(cnn).constants) == {f"{i}.1.num_batches_tracked" for i in range(3)}


def test_frozen_parameters_are_not_prunable():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    assert [e.name for e in Layout.of(net).layers] == ["1.weight"]


def test_tied_tensors_occur_once():
    gpt = models.get("tiny_gpt")((12,), 40)
    layout = Layout.of(gpt)
    tied = [entry for entry in layout.layers if "transformer.wte.weight" in entry.names]
    assert len(tied) == 1
    assert tied[0].names == ("transformer.wte.weight", "lm_head.weight")
    assert output_layer(gpt) is None
    last_mlp = "transformer.h.1.mlp.c_proj.weight"
    assert last_mlp in [entry.name for entry in layout.layers]


def test_a_module_names_its_own_output_layer():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert output_layer(net) is net[1]
    net.output_layer = "0"  # type: ignore[assignment]  # of torch, whose modules hold tensors and modules
    assert [e.name for e in Layout.of(net).layers] == ["1.weight"]
    net.output_layer = None  # type: ignore[assignment]
    assert len(Layout.of(net).layers) == 2


def test_a_users_rule_replaces_ours():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert [e.name for e in Layout.of(net, prunable=lambda name, _: name == "1.bias").layers] == ["1.bias"]


def test_bound_module_lives_in_the_vector(module):
    layout = Layout.of(module)
    vector = layout.flatten(module.state_dict())
    gradient = torch.zeros(layout.parameters)
    layout.bind(module, vector, gradient)
    x = torch.randint(0, 40, (4, 12)) if hasattr(module, "transformer") else torch.rand(4, 1, 8, 8)
    before = vector.clone()
    module.train()
    module(x).square().mean().backward()
    expected = torch.cat([p.grad.flatten() for p in (dict(module.named_parameters())[e.name] for e in layout.layers + layout.dense)])
    assert gradient.count_nonzero() > 0
    assert torch.equal(gradient, expected)
    vector[: layout.parameters] -= gradient
    for entry in layout.layers:
        assert torch.equal(dict(module.named_parameters())[entry.name].detach(), layout.views(vector)[entry.name])
    changed = vector[layout.parameters :] != before[layout.parameters :]
    assert bool(changed.any()) == bool(layout.buffers), "BatchNorm statistics live in the vector too"


def test_constants_are_reset_for_every_client():
    cnn = models.get("cnn")((1, 8, 8), 10)
    layout = Layout.of(cnn)
    vector = layout.flatten(cnn.state_dict())
    cnn.train()(torch.rand(4, 1, 8, 8))
    assert int(cnn.get_buffer("0.1.num_batches_tracked")) == 1
    layout.bind(cnn, vector)
    assert int(cnn.get_buffer("0.1.num_batches_tracked")) == 0


def test_fingerprints_tell_layouts_apart():
    def of(*widths):
        return Layout.of(nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))).fingerprint

    assert of(3, 4, 5) == of(3, 4, 5) != of(4, 3, 5)


def test_foreign_tensors_are_named():
    layout = Layout.of(nn.Linear(2, 3))
    with pytest.raises(InputError, match="'weight' is missing"):
        layout.flatten({"bias": torch.zeros(3)})
    with pytest.raises(InputError, match=r"'weight' has shape \(2, 3\)"):
        layout.flatten({"weight": torch.zeros(2, 3), "bias": torch.zeros(3)})

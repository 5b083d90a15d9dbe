"""ONNX files: what onnxruntime computes, that weights keep their bits and zeros, and that a mismatch is never written."""

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from fedrts import models
from fedrts.errors import InputError
from fedrts.export import onnx as onnx_export

FAMILIES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "mlp": ((64,), {}),
    "cnn": ((1, 8, 8), {}),
    "resnet18_small": ((3, 32, 32), {}),
    "shufflenet_v2": ((3, 32, 32), {}),
    "tiny_gpt": ((16,), {}),
}


def sparse(name):
    """A model of the zoo with four fifths of its matrices zero and BatchNorm statistics of its own, and inputs."""
    shape, options = FAMILIES[name]
    torch.manual_seed(0)
    module = models.get(name)(shape, 50, **options)
    inputs = torch.randint(0, 50, (5, *shape)) if name == "tiny_gpt" else torch.randn(5, *shape)
    with torch.no_grad():
        module.train()(inputs)
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(torch.rand_like(parameter) < 0.2)
    return module.eval(), inputs


@pytest.mark.parametrize(
    "name", ["mlp", *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.timeout(600)]) for name in FAMILIES if name != "mlp")]
)
def test_onnxruntime_computes_what_the_module_computes(name):
    module, inputs = sparse(name)
    content = onnx_export.onnx_bytes(module, inputs)
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    for rows in (1, 2, 9):
        batch = inputs[torch.arange(rows) % len(inputs)]
        if name == "tiny_gpt":
            batch = batch[:, :7]
        with torch.no_grad():
            wanted = module(batch).numpy()
        np.testing.assert_allclose(session.run(["output"], {"input": batch.numpy()})[0], wanted, atol=1e-5, rtol=1e-4)

    written = {entry.name: onnx.numpy_helper.to_array(entry) for entry in onnx.load_from_string(content).graph.initializer}
    for key, parameter in module.named_parameters():
        value = written.get(key, written.get("lm_head.weight"))  # the embedding is tied to it
        assert value is not None, key
        assert np.array_equal(value, parameter.detach().numpy()), key
    assert b"site-packages" not in content  # no stack traces


def test_columns_of_categories_are_no_tokens_of_free_length():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(6 * 4, 3))
    content = onnx_export.onnx_bytes(module, torch.randint(0, 10, (4, 6)))
    batch, columns = onnx.load_from_string(content).graph.input[0].type.tensor_type.shape.dim
    assert batch.dim_param
    assert columns.dim_value == 6


def test_what_disagrees_is_refused(monkeypatch):
    module, inputs = sparse("mlp")
    converted = onnx_export._converted

    def broken(module, inputs, free_length):
        model = converted(module, inputs, free_length)
        (bias,) = (entry for entry in model.graph.initializer if list(entry.dims) == [50])
        bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + np.float32(0.01), bias.name))
        return model

    monkeypatch.setattr(onnx_export, "_converted", broken)
    with pytest.raises(InputError, match=r"changed the parameter \S*\.bias"):
        onnx_export.onnx_bytes(module, inputs)
    monkeypatch.setattr(onnx_export, "_check_weights", lambda module, model: None)
    with pytest.raises(InputError, match=r"disagrees with the model by 0\.01 on inputs of shape \[5, 64\]"):
        onnx_export.onnx_bytes(module, inputs)


def test_a_model_that_cannot_be_exported_is_one_line():
    class Peeks(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum().item() > 0 else x

    with pytest.raises(InputError, match="cannot be written as ONNX") as caught:
        onnx_export.onnx_bytes(Peeks(), torch.randn(4, 3))
    assert len(str(caught.value).splitlines()) == 1


def test_a_parameter_that_nothing_uses_is_left_out():
    class Spare(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(3, 4), nn.Linear(4, 2))
            self.unused = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return self[1](self[0](x))

    assert onnx_export.onnx_bytes(Spare().eval(), torch.randn(4, 3))


def test_what_onnxruntime_cannot_run_is_one_line(monkeypatch):
    class Session:
        def __init__(self, *_, **__):
            raise RuntimeError("\n\nGot: 16 Expected: 3\nand much more")

    monkeypatch.setattr("onnxruntime.InferenceSession", Session)
    with pytest.raises(InputError, match=r"onnxruntime cannot run this model: Got: 16 Expected: 3; use") as caught:
        onnx_export.onnx_bytes(nn.Linear(3, 4), torch.randn(4, 3))
    assert len(str(caught.value).splitlines()) == 1

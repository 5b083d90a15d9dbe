"""Starting from the weights of a file."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fedrts
from fedrts import models
from fedrts.errors import InputError
from fedrts.runs.initial_weights import load_weights


def gpt(seed):
    torch.manual_seed(seed)
    return models.get("tiny_gpt")((6,), 20, width=8, layers=1, heads=2)


def cnn(seed):
    torch.manual_seed(seed)
    return models.get("cnn")((1, 6, 6), 3, width=4)


def equal(one, other):
    return all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


def saved(path, tensors):
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    return path


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def test_every_tensor_arrives_buffers_included(tmp_path):
    source, target = cnn(0), cnn(1).double()
    source(torch.randn(5, 1, 6, 6))  # moves the statistics
    load_weights(target, saved(tmp_path / "w.safetensors", source.state_dict()))
    assert all(
        torch.equal(tensor.to(target.state_dict()[name].dtype), target.state_dict()[name]) for name, tensor in source.state_dict().items()
    )


@pytest.mark.parametrize(
    "written",
    [
        lambda own: own,
        lambda own: without(own, "lm_head.weight"),
        lambda own: without(own, "transformer.wte.weight"),
        lambda own: {name.removeprefix("transformer."): tensor for name, tensor in without(own, "lm_head.weight").items()},
        lambda own: {**own, "transformer.h.0.attn.bias": torch.ones(1, 1, 6, 6), "transformer.h.0.attn.masked_bias": torch.tensor(-1e4)},
    ],
    ids=["both names", "as transformers saves it", "the other name", "without the prefix", "with causal masks"],
)
def test_the_ways_in_which_gpt2_is_saved(tmp_path, written):
    source, target = gpt(0), gpt(1)
    load_weights(target, saved(tmp_path / "w.safetensors", written(source.state_dict())))
    assert equal(source, target)
    assert target.lm_head.weight is target.transformer["wte"].weight


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (lambda own: without(own, "5.bias"), "lacks '5.bias'; give"),
        (lambda own: without(own, "5.bias", "5.weight"), "lacks '5.weight' and 1 more; give"),
        (lambda own: {**own, "6.bias": torch.zeros(3)}, "has what the model has not: '6.bias'; give"),
        (lambda own: {**own, "5.bias": torch.zeros(4)}, r"'5.bias' in .* has shape \(4,\), the model's is \(3,\); give"),
        (lambda own: {**own, "5.bias": torch.full((3,), float("nan"))}, "'5.bias' in .* not finite"),
    ],
)
def test_a_file_of_another_model_is_one_clear_line_and_changes_nothing(tmp_path, written, message):
    target = cnn(1)
    path = saved(tmp_path / "w.safetensors", written(cnn(0).state_dict()))
    with pytest.raises(InputError, match=message) as caught:
        load_weights(target, path)
    assert "\n" not in str(caught.value)
    assert equal(target, cnn(1))


def test_a_pickled_file_is_refused_unread(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    torch.save({"0.0.weight": Trap()}, tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=r"no safetensors file.*pickled files are not loaded") as caught:
        load_weights(cnn(0), tmp_path / "w.safetensors")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "sprung").exists()
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(InputError, match="init: "):
            load_weights(cnn(0), path)


SMALL: dict[str, Any] = {
    "data": "toy_images",
    "model": "cnn",
    "model_options": {"width": 4},
    "density": 0.5,
    "rounds": 2,
    "clients": {"total": 4, "partition": "iid"},
}


def test_a_run_starts_from_the_weights_of_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fedrts.run(**SMALL, seed=1, out="first")
    still: dict[str, Any] = {**SMALL, "method": "fedavg", "density": 1.0, "train": {"lr": 1e-30}}
    result = fedrts.run(**still, seed=2, init="first/model.safetensors", out="second")
    written = load_file("first/model.safetensors")
    for name, parameter in result.model.named_parameters():  # which hardly move at such a rate
        torch.testing.assert_close(parameter, written[name])
    monkeypatch.chdir("second")  # the experiment file names the weights wherever one stands
    assert fedrts.resume(tmp_path / "second").summary == result.summary
    (tmp_path / "first" / "model.safetensors").unlink()
    assert equal(fedrts.load(tmp_path / "second"), result.model), "a result does not need what it began with"
    with pytest.raises(InputError, match=r"init: cannot read .*model\.safetensors"):
        fedrts.run(**SMALL, init=tmp_path / "first" / "model.safetensors", out=tmp_path / "third")
    assert not (tmp_path / "third").exists()

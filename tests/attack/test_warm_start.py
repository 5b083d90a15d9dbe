"""A sparse model to start from keeps its mask: in Python and by `--init`, as dense or as sparse as asked for."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedrts
from fedrts import config
from fedrts.errors import InputError, Note

SMALL = {"rounds": 1, "epochs": 1, "batch_size": 8, "lr": 0.01}
DIGITS: dict[str, Any] = {"data": "digits", "model_options": {"hidden": [16, 12]}, **SMALL, "clients": {"total": 4}}


def site(seed, count=20):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, :3].sum(1) > 0).long())


def net(density=1.0):
    """With so many links of the two inner layers, by lot."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2))
    for name in ("0.weight", "2.weight"):
        weight = model.get_parameter(name)
        weight.data[torch.rand_like(weight) > density] = 0.0
    return model


def trained(model, **given):
    return fedrts.train(model=model, clients=[site(seed) for seed in range(4)], test=site(9), **{**SMALL, "method": "random", **given})


def shown(model):
    return {f"{place}.weight": model[place].weight != 0 for place in (0, 2)}


def share(model):
    """The density at which all links that are not 0 stay."""
    total = sum(parameter.numel() for parameter in model.parameters())
    return (sum(int(parameter.count_nonzero()) for parameter in model.parameters()) + 0.5) / total


def test_the_mask_of_a_sparse_model_is_kept_and_the_folder_says_so(tmp_path):
    model = net(0.3)
    expected, density = shown(model), share(model)
    with pytest.warns(Note, match="the first mask is that of the given weights: .* 'random' draws another"):
        result = trained(model, density=density, out=tmp_path)
    assert all(torch.equal(mask, expected[name]) for name, mask in result.masks.items())
    assert config.from_file(tmp_path / "experiment.toml")["topology"]["init_mask"] == "given"
    again = trained(net(), density=density, out=tmp_path, resume=True)  # whatever the model is like by now
    assert torch.equal(again.state.weights, result.state.weights)


def test_a_word_on_the_first_mask_is_obeyed():
    model = net(0.3)
    expected, density = shown(model), share(model)
    drawn = trained(model, density=density, topology={"init_mask": "random"})  # a note is an error here
    assert any(not torch.equal(mask, expected[name]) for name, mask in drawn.masks.items())
    trained(net(0.3), method="fedavg")  # dense


def test_dense_models_and_layers_of_zeros_show_no_mask(tmp_path):
    nothing = net()
    nn.init.zeros_(nothing[2].weight)
    for model in (net(), nothing):
        trained(model, density=0.5, out=tmp_path / str(id(model)))
        assert config.from_file(tmp_path / str(id(model)) / "experiment.toml")["topology"]["init_mask"] == "random"


def test_of_a_denser_mask_the_largest_weights_stay_in_the_proportions_of_its_layers():
    model = net(0.6)
    before, expected = {name: model.get_parameter(name).detach().abs().clone() for name in shown(model)}, shown(model)
    result = trained(model, density=0.4, topology={"init_mask": "given"})
    assert 0.39 < result.summary["density"] <= 0.4
    ratios = []
    for name, mask in result.masks.items():
        assert not bool((mask & ~expected[name]).any())
        assert float(before[name][mask].min()) >= float(before[name][expected[name] & ~mask].max())
        ratios.append(int(mask.sum()) / int(expected[name].sum()))
    assert ratios[0] == pytest.approx(ratios[1], rel=0.1)


def test_a_sparser_mask_is_kept_and_filled_up_by_lot():
    model = net(0.2)
    expected = shown(model)
    result = trained(model, density=0.6, topology={"init_mask": "given"})
    assert 0.59 < result.summary["density"] <= 0.6
    for name, mask in result.masks.items():
        assert bool(mask[expected[name]].all())


def test_a_run_goes_on_from_another_by_init(tmp_path):
    first = fedrts.run(method="fedrts", density=0.3, **DIGITS, out=tmp_path / "a")
    start: dict[str, Any] = {"init": str(tmp_path / "a" / "model.safetensors"), "density": 0.3, "method": "random", **DIGITS}
    with pytest.warns(Note, match="the first mask is that of the given weights"):
        second = fedrts.run(**start, out=tmp_path / "b")
    assert all(bool(mask[first.model.get_parameter(name) != 0].all()) for name, mask in second.masks.items())
    assert config.from_file(tmp_path / "b" / "experiment.toml")["topology"]["init_mask"] == "given"
    grid = {**{key: value for key, value in start.items() if key != "method"}, "methods": ["random"], "seeds": [0], "out": tmp_path / "c"}
    fedrts.compare(**grid)
    (cell,) = (tmp_path / "c" / "runs").iterdir()
    assert config.from_file(cell / "experiment.toml")["topology"]["init_mask"] == "given"
    (cell / "summary.json").unlink()
    assert not fedrts.compare(**grid).failures, "an interrupted cell goes on"


def test_given_without_weights_is_one_line(tmp_path):
    with pytest.raises(InputError, match=r"topology\.init_mask = 'given' needs weights to start from: .*--init"):
        fedrts.run(**DIGITS, topology={"init_mask": "given"}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["snip", "fedtiny", "synflow"])
def test_methods_that_choose_their_first_mask_do_so(method):
    given = net(0.3)
    before = shown(given)
    found = trained(given, density=0.4, method=method).masks  # a note is an error here
    assert any(not bool((found[name] == before[name]).all()) for name in found), "its own mask, not the one that the zeros show"

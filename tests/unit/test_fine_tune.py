"""A run that goes on from a finished one, and one that starts from a pruned pretrained model."""

import json
from dataclasses import replace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedrts
from fedrts import cli, config
from fedrts.errors import InputError
from fedrts.observe import Silent
from fedrts.runs.build import assemble
from fedrts.runs.checkpoint import load as newest
from fedrts.sparse import random
from fedrts.sparse.mask import Mask

RUN: dict[str, Any] = {
    "data": "digits",
    "model_options": {"hidden": [16, 12]},
    "density": 0.5,
    "clients": 4,
    "engine": "serial",
    "rounds": 5,
    "topology": {"interval": 2},
    "train": {"epochs": 1, "batch_size": 32, "lr": 0.3},
    "eval": {"every": 1, "fairness": False},
}
SHORT: dict[str, Any] = {"rounds": 3, "engine": "serial"}


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("origin") / "run"
    return fedrts.run(**RUN, out=folder), folder


def begun(folder, out, **given):
    """The assembled run that goes on from `folder`, and its first state."""
    from fedrts.runs.folder import RunFolder
    from fedrts.runs.origin import settings_from

    run = assemble(config.resolve(settings_from(RunFolder(folder), config.from_keywords({**SHORT, **given}))))
    return run, *run.begun()


def test_it_begins_with_the_model_the_mask_and_the_posteriors(origin, tmp_path):
    result, folder = origin
    run, state, first = begun(folder, tmp_path)
    assert first == 0
    assert torch.equal(state.weights, result.state.weights), "and no weight is scaled"
    assert state.mask == result.state.mask
    saved = newest(folder / "checkpoint")
    assert saved is not None
    for name in ("alpha", "beta"):
        assert torch.equal(state[name], saved.state[name])
        assert not torch.equal(state[name], run.method.begin(run.setup)[name])
    assert "average" not in state.memory


def test_a_link_of_the_mask_that_happens_to_be_0_stays_on_it(origin, tmp_path):
    result, folder = origin
    run, state, _ = begun(folder, tmp_path)
    assert run.origin is not None
    place = int(state.mask.active[3])
    weights = run.setup.weights.clone()
    weights[place] = 0
    again = run.origin.begun(run.method, run.experiment.method, replace(run.setup, weights=weights))
    assert again.mask == result.state.mask


def test_at_a_lower_density_every_layer_keeps_its_largest_weights(origin, tmp_path):
    result, folder = origin
    _, state, _ = begun(folder, tmp_path, density=0.3)
    sizes = result.state.mask.sizes
    before, after = (mask.bits.split(list(sizes)) for mask in (result.state.mask, state.mask))
    weights = result.state.weights[: sum(sizes)].abs().split(list(sizes))
    shares = []
    for old, new, strength in zip(before, after, weights, strict=True):
        assert bool((old | ~new).all()), "none is new"
        assert strength[new].min() >= strength[old & ~new].max()
        shares.append(int(new.sum()) / int(old.sum()))
    assert max(shares) - min(shares) < 0.02 < 1 - max(shares)
    saved = newest(folder / "checkpoint")
    assert saved is not None
    assert torch.equal(state["alpha"], saved.state["alpha"])


def test_the_mask_may_be_kept(origin, tmp_path):
    result, folder = origin
    kept = fedrts.fine_tune(folder, mask="keep", **SHORT, out=tmp_path / "kept")
    assert [line["outer"] for line in kept.history] == [False] * 3
    assert all(torch.equal(mask, result.masks[name]) for name, mask in kept.masks.items())
    assert any(not torch.equal(tensor, result.model.state_dict()[name]) for name, tensor in kept.model.state_dict().items())
    searched = fedrts.fine_tune(folder, **SHORT, out=tmp_path / "searched")
    assert [line["outer"] for line in searched.history] == [True, False, False]
    assert any(not torch.equal(mask, result.masks[name]) for name, mask in searched.masks.items())


def test_it_has_the_settings_of_the_first_run_but_for_those_that_are_given(origin, tmp_path):
    _, folder = origin
    fedrts.fine_tune(folder, rounds=2, clients=3, lr=0.05, out=tmp_path / "run")
    found = config.from_file(tmp_path / "run" / "experiment.toml")
    assert (found["model_options"], found["density"], found["train"]["batch_size"]) == ({"hidden": [16, 12]}, 0.5, 32)
    assert (found["rounds"], found["train"]["lr"], found["topology"]["end"]) == (2, 0.05, 1)
    assert (found["clients"]["total"], found["clients"]["per_round"]) == (3, 3)
    assert found["origin"] == str(folder)
    fedrts.load(tmp_path / "run")


@pytest.mark.parametrize("name", ["snip", "prunefl", "fedavg", "fedtopk", "synflow"])
def test_every_kind_of_method_goes_on_from_it(origin, tmp_path, name):
    result, folder = origin
    found = fedrts.fine_tune(folder, method=name, **{**SHORT, "rounds": 1}, lr=1e-6, out=tmp_path / "run")
    assert [line["round"] for line in found.history] == [0], "no set-up: the mask is there"
    if name in ("snip", "synflow"):
        assert all(torch.equal(mask, result.masks[name]) for name, mask in found.masks.items())
        torch.testing.assert_close(found.state.weights, result.state.weights, atol=1e-4, rtol=0)


class Cut(Exception):
    pass


class Cuts(Silent):
    def __init__(self, after):
        self.after = after

    def played(self, record):
        if record.round == self.after:
            raise Cut


def test_cut_off_and_resumed_it_has_the_same_bits_on_every_engine(origin, tmp_path):
    _, folder = origin
    masks = []
    for engine in ("serial", "batched"):
        given = {**SHORT, "density": 0.4, "engine": engine, "checkpoint": {"every": 2}}
        whole = fedrts.fine_tune(folder, **given, out=tmp_path / engine)
        for after in (0, 2):
            path = tmp_path / f"{engine}-{after}"
            with pytest.raises(Cut):
                fedrts.fine_tune(folder, **given, out=path, observer=Cuts(after))
            found = fedrts.resume(path)
            assert torch.equal(found.state.weights, whole.state.weights)
            assert found.state.mask == whole.state.mask
            assert torch.equal(found.state["alpha"], whole.state["alpha"])
        masks.append(begun(folder, tmp_path, **given)[1].mask)
    assert masks[0] == masks[1]


def test_what_does_not_fit_is_one_line_and_leaves_no_folder(origin, tmp_path):
    _, folder = origin
    half = tmp_path / "half"
    with pytest.raises(Cut):
        fedrts.run(**RUN, out=half, observer=Cuts(1))
    for path, given, words in (
        (folder, {"model_options": {"hidden": [8, 12]}}, r"'\d\.weight' in '.*model.safetensors' has shape .*, the model's is"),
        (folder, {"mask": "kept"}, "mask must be 'search' or 'keep'"),
        (folder, {"model_options": {"prune_output": True}}, "prunes other parameters than this one"),
        (folder, {"clients": [[(torch.rand(1, 8, 8), 0)]]}, "clients are datasets: give test="),
        (half, {}, "is not finished: resume it first"),
        (tmp_path / "nothing", {}, "is no run folder"),
        (folder, {"init": folder / "model.safetensors"}, "give one of them"),
    ):
        with pytest.raises(InputError, match=words):
            fedrts.fine_tune(path, **{**SHORT, **given}, out=tmp_path / "run")
        assert not (tmp_path / "run").exists()


def command(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["fedrts", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_the_command_line_does_the_same(origin, tmp_path, monkeypatch, capsys):
    _, folder = origin
    flags = ["--rounds", 3, "--engine", "serial", "--density", 0.4, "--quiet"]
    assert command(monkeypatch, "run", "--from", folder, *flags, "--out", tmp_path / "a") == 0
    found = fedrts.fine_tune(folder, **SHORT, density=0.4, out=tmp_path / "b")
    assert all(torch.equal(tensor, found.model.state_dict()[name]) for name, tensor in fedrts.load(tmp_path / "a").state_dict().items())
    assert command(monkeypatch, "run", "--from", folder, *flags, "--keep-mask", "--out", tmp_path / "c") == 0
    assert not any(json.loads(line)["outer"] for line in (tmp_path / "c" / "history.jsonl").read_text().splitlines())
    assert command(monkeypatch, "run", "--keep-mask", *flags, "--out", tmp_path / "d") == 2
    assert "--keep-mask goes with --from RUN_DIR" in capsys.readouterr().err


def a_rule(name, parameter):
    return parameter.dim() > 1 and not name.startswith("5")


def test_code_that_the_first_run_names_must_be_trusted(tmp_path):
    path = f"{__name__}:a_rule"
    fedrts.run(**{**RUN, "rounds": 1, "topology": {"prunable": path}}, out=tmp_path / "first")
    with pytest.raises(InputError, match="may run any code"):
        fedrts.fine_tune(tmp_path / "first", rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    fedrts.fine_tune(tmp_path / "first", rounds=1, trust=[path], out=tmp_path / "run")


def site(seed, width=6):
    x = torch.randn(30, width, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, :3].sum(1) > 0).long())


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def test_own_models_go_on_with_their_own_clients(tmp_path):
    short: dict[str, Any] = {"rounds": 2, "epochs": 1, "out": tmp_path / "first", "density": 0.6}
    first = fedrts.train(model=net(), clients=[site(seed) for seed in range(3)], test=site(9), **short)
    others: dict[str, Any] = {"clients": [site(seed) for seed in range(20, 25)], "test": site(29), "lr": 1e-6, "rounds": 1}
    with pytest.raises(InputError, match="trains a model given in Python: give model"):
        fedrts.fine_tune(tmp_path / "first", rounds=1)
    found = fedrts.fine_tune(tmp_path / "first", model=net(5), mask="keep", **others, out=tmp_path / "second")
    assert all(torch.equal(mask, first.masks[name]) for name, mask in found.masks.items())
    torch.testing.assert_close(found.state.weights, first.state.weights, atol=1e-4, rtol=0)
    assert len(json.loads((tmp_path / "second" / "clients.json").read_text())) == 5
    again = fedrts.fine_tune(tmp_path / "first", model=net(6), mask="keep", **others, out=tmp_path / "second", resume=True)
    assert torch.equal(again.state.weights, found.state.weights)
    by_object = fedrts.fine_tune(tmp_path / "first", model=net(), **others, method=fedrts.methods.FedRTS(gamma=0.2))
    assert by_object.summary["density_target"] == 0.6


def test_named_models_go_on_with_clients_of_ones_own(origin):
    result, folder = origin
    images = TensorDataset(torch.rand(60, 1, 8, 8), torch.arange(60) % 10)
    found = fedrts.fine_tune(folder, mask="keep", clients=[images] * 3, test=images, rounds=1, lr=1e-6)
    assert all(torch.equal(mask, result.masks[name]) for name, mask in found.masks.items())
    torch.testing.assert_close(found.state.weights, result.state.weights, atol=1e-4, rtol=0)


# -- from a dense pretrained model ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense") / "run"
    return fedrts.run(**{**RUN, "method": "fedavg", "density": 1.0}, out=folder), folder / "model.safetensors"


def from_dense(file, name, **given):
    keys = {**RUN, "rounds": 2, "density": 0.3, **given, "init": str(file)}
    keys["topology"] = {"interval": 2, "first_outer": 2, **({"init_mask": name} if name else {})}
    return config.resolve(config.from_keywords(keys))


def test_trained_weights_are_not_scaled_for_their_density(dense):
    result, file = dense
    run = assemble(from_dense(file, "magnitude"))
    assert run.experiment.topology.init_scale == "sparse", "as a random model's would be"
    state, _ = run.begun()
    assert torch.equal(state.weights, torch.where(state.mask.expand(torch.ones_like(state.values)) > 0, result.state.weights, 0.0))


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_snip_as_a_first_mask_is_that_of_the_method(dense, tmp_path, engine):
    _, file = dense
    alone = fedrts.run(**config_of(from_dense(file, None, method="snip", rounds=1, engine=engine)), out=tmp_path / "alone")
    found = fedrts.run(**config_of(from_dense(file, "snip", rounds=1, engine=engine)), out=tmp_path / "first")
    assert [line["round"] for line in found.history] == [-1, 0]
    assert found.state.mask == alone.state.mask
    assert torch.equal(found.state.weights, alone.state.weights), "the round after it is the same too"
    assert found.history[0]["upload_bytes"] == alone.history[0]["upload_bytes"]
    assert found.state["alpha"].max() > 1, "and the method has learned of it"
    assert "budget" not in found.state.memory


def config_of(experiment):
    return {key: value for key, value in experiment.model_dump(exclude_none=True).items() if key != "out"}


def test_snip_by_hand(dense, tmp_path):
    """|w · Σ p_k g_k| of the clients of round 0, the largest over all layers."""
    _, file = dense
    exact: dict[str, Any] = {"rounds": 1, "value_type": "float32"}  # clients see the very weights
    run = assemble(from_dense(file, "snip", **exact))
    state, first = run.begun()
    assert (first, state.mask.is_full) == (-1, True)
    clients = run.plan.sample(-1)
    total = sum(len(run.rows[client]) for client in clients)
    gradient = torch.zeros(run.layout.links)
    module, held = run.module, run.data
    for client in clients:
        key = random.key(run.experiment.seed, "client", -1, client)
        order = random.permutation(random.key(key, "order", run.training.epochs), len(run.rows[client]))
        rows = run.rows[client][order][: len(order) // 32 * 32]  # full batches alone
        run.layout.bind(module, state.weights.clone())
        module.eval()
        loss = nn.functional.cross_entropy(module(held.inputs(held.x[rows])), held.y[rows])
        parts = torch.autograd.grad(loss, [module.get_parameter(entry.name) for entry in run.layout.layers])
        gradient += torch.cat([part.reshape(-1) for part in parts]) * len(order) / total
    scores = (state.weights[: run.layout.links] * gradient).abs()
    kept = sum(run.setup.counts(0.3))
    expected = torch.zeros_like(scores, dtype=torch.bool).index_fill(0, scores.topk(kept).indices, True)
    found = fedrts.run(**config_of(from_dense(file, "snip", **exact)), out=tmp_path)
    differing = int((found.state.mask.bits != expected).sum())
    assert differing <= 2, "but for ties in the last bits"
    assert isinstance(found.state.mask, Mask)


def test_a_method_that_chooses_its_mask_needs_no_other(dense, tmp_path):
    _, file = dense
    for name in ("snip", "synflow"):
        with pytest.raises(InputError, match=r"chooses its first mask itself: leave out topology\.init_mask"):
            fedrts.run(**config_of(from_dense(file, "snip", method=name)), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_posterior_of_another_shape_is_left_behind(origin, tmp_path):
    """A file of another model's run may hold anything."""
    _, folder = origin
    run, _, _ = begun(folder, tmp_path)
    assert run.origin is not None
    odd = replace(run.origin, memory={"alpha": torch.ones(3), "beta": run.origin.memory["beta"]})
    state = odd.begun(run.method, run.experiment.method, run.setup)
    assert (state["alpha"] == 1).all()
    assert torch.equal(state["beta"], run.origin.memory["beta"])
    other = odd.begun(run.method, "another", run.setup)
    assert (other["beta"] == 1).all()
    assert safetensors.torch.load_file(folder / "masks.safetensors").keys() == run.origin.masks.keys()

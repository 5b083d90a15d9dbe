"""A run goes on for more rounds than it was planned for: from where it is, with schedules that stay what they were."""

import json
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedrts
from fedrts import cli, config
from fedrts.errors import InputError, Note
from fedrts.observe import Silent

RUN: dict[str, Any] = {
    "data": "digits",
    "model_options": {"hidden": [16]},
    "density": 0.4,
    "clients": 4,
    "engine": "serial",
    "topology": {"interval": 1},
}
RUN |= {"train": {"epochs": 1, "batch_size": 32, "lr": 0.1, "schedule": "cosine", "lr_end": 0.1}, "eval": {"every": 1, "fairness": False}}
LONGER = "7 rounds instead of 4: the topology is fixed from round 2 on, as planned; the learning rate stays at 0.01"


class Stop(Exception):
    """A run is cut off."""


class Stopper(Silent):
    def __init__(self, after):
        self.after = after

    def played(self, record):
        if record.round == self.after:
            raise Stop


def longer(path, **given):
    with pytest.warns(Note) as told:
        found = fedrts.resume(path, rounds=7, **given)
    assert [str(one.message) for one in told] == [LONGER]
    return found


def same(one, other):
    assert torch.equal(one.state.weights, other.state.weights)
    assert one.state.mask == other.state.mask
    trail = [[{key: line[key] for key in line if key != "seconds"} for line in result.history] for result in (one, other)]
    for line in [*trail[0][:-1], *trail[1][:-1]]:  # the average was judged where a run ended, or was to end
        for key in [key for key in line if key.startswith("average_")]:
            del line[key]
    assert trail[0] == trail[1]


@pytest.fixture(scope="module")
def planned():
    """What seven rounds come to whose schedules are those of four."""
    out: dict[str, Any] = {"topology": {"interval": 1, "end": 2}, "train": {**RUN["train"], "schedule_rounds": 4}}

    def run(folder):
        return fedrts.run(**{**RUN, **out}, rounds=7, out=folder)

    return run


def test_a_finished_run_goes_on(tmp_path, planned):
    expected = planned(tmp_path / "planned")
    fedrts.run(**RUN, rounds=4, out=tmp_path / "run")
    found = longer(tmp_path / "run")
    same(found, expected)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == found.summary["rounds"] == 7
    settings = config.from_file(tmp_path / "run" / "experiment.toml")
    assert (settings["rounds"], settings["train"]["schedule_rounds"], settings["topology"]["end"]) == (7, 4, 2)
    loaded = fedrts.load(tmp_path / "run").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in found.model.state_dict().items())


def test_what_is_cut_off_on_the_way_goes_on_too(tmp_path, planned):
    expected = planned(tmp_path / "planned")
    with pytest.raises(Stop):
        fedrts.run(**RUN, rounds=4, out=tmp_path / "run", observer=Stopper(1))
    with pytest.raises(Stop):
        longer(tmp_path / "run", observer=Stopper(4))
    assert not (tmp_path / "run" / "summary.json").exists(), "what it came to no longer holds"
    same(fedrts.resume(tmp_path / "run"), expected)
    same(fedrts.resume(tmp_path / "run", rounds=7), expected)  # as many as there are: no note


def test_fewer_rounds_and_lost_checkpoints_are_one_line(tmp_path):
    fedrts.run(**RUN, rounds=4, out=tmp_path)
    before = (tmp_path / "experiment.toml").read_bytes()
    for rounds, words in ((3, "rounds = 3: the run in .* has 4; more can be played, not fewer"), (0, "rounds must be")):
        with pytest.raises(InputError, match=words):
            fedrts.resume(tmp_path, rounds=rounds)
    for file in (tmp_path / "checkpoint").iterdir():
        file.unlink()
    with pytest.warns(Note), pytest.raises(InputError, match="no checkpoint to go on from"):
        fedrts.resume(tmp_path, rounds=7)
    assert (tmp_path / "experiment.toml").read_bytes() == before
    assert (tmp_path / "summary.json").exists()


def test_more_rounds_written_into_the_file_by_hand_are_another_experiment(tmp_path):
    fedrts.run(**RUN, rounds=4, out=tmp_path)
    file = tmp_path / "experiment.toml"
    file.write_text(file.read_text().replace("rounds = 4", "rounds = 7"))
    with pytest.raises(InputError, match="was changed after its checkpoint"):
        fedrts.resume(tmp_path)


def test_an_own_model_goes_on_by_the_same_call(tmp_path):
    def site(seed):
        x = torch.randn(20, 6, generator=torch.Generator().manual_seed(seed))
        return TensorDataset(x, (x[:, :3].sum(1) > 0).long())

    def trained(rounds, **given):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2))
        shared = {"clients": [site(seed) for seed in range(3)], "test": site(9), "density": 0.5, "out": tmp_path}
        return fedrts.train(model=model, **shared, train=RUN["train"], rounds=rounds, **given)

    trained(4)
    with pytest.warns(Note, match=LONGER):
        assert trained(7, resume=True).summary["rounds"] == 7
    assert len(trained(7, resume=True).history) == 7
    with pytest.raises(InputError, match="more can be played, not fewer"):
        trained(4, resume=True)


@pytest.mark.filterwarnings("always::fedrts.errors.Note")
def test_the_command(tmp_path, monkeypatch, capsys):
    fedrts.run(**RUN, rounds=4, out=tmp_path)
    monkeypatch.setattr("sys.argv", ["fedrts", "resume", str(tmp_path), "--rounds", "7"])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # the command has its own way
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert capsys.readouterr().err == f"note: {LONGER}\n"
    assert json.loads((tmp_path / "summary.json").read_text())["rounds"] == 7

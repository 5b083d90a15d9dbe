"""Callbacks see a run and may stop it; nothing that they do to what they are shown changes it."""

import csv
import json
import math
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedrts
from fedrts import cli, config
from fedrts.callbacks import CSV, BestModel, Callback, EarlyStopping, ProgressBar
from fedrts.callbacks.hooks import CallbackError
from fedrts.errors import InputError, Note
from fedrts.observe import Silent

RUN: dict[str, Any] = {
    "data": "digits",
    "model_options": {"hidden": [16]},
    "density": 0.4,
    "clients": 4,
    "engine": "serial",
    "rounds": 10,
    "topology": {"interval": 2},
    "train": {"epochs": 1, "batch_size": 32, "lr": 0.3, "schedule": "constant"},
    "eval": {"every": 1, "fairness": False},
}
PATIENCE, MIN_DELTA = 2, 0.05


class Sees(Callback):
    """Remembers what it is told."""

    def __init__(self):
        self.told = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_start(self, run):
        self.told.append(("start", run.first_round, len(run.history)))

    def on_outer(self, outer):
        self.told.append(("outer", outer.index))
        self.outer = outer

    def on_round(self, round):
        self.told.append(("round", round.index))
        self.weights.append(round.weights)
        self.round = round

    def on_end(self, end):
        self.told.append(("end", end.summary["rounds"]))

    def on_close(self):
        self.told.append(("close",))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The run that nobody stops, and who saw its model after every round."""
    sees = Sees()
    return fedrts.run(**RUN, callbacks=[sees], out=tmp_path_factory.mktemp("plain") / "run"), sees


def by_hand(values, patience=PATIENCE, min_delta=MIN_DELTA, higher=True):
    """(last round, best round) of a run that stops early, written out."""
    best = 0
    for index, value in enumerate(values):
        gain = value - values[best] if higher else values[best] - value
        if index and gain > min_delta:
            best = index
        if index - best >= patience:
            return index, best
    return len(values) - 1, best


def trail(history):
    return [{key: value for key, value in line.items() if key != "seconds" and not key.startswith("average_")} for line in history]


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


# -- what callbacks are told ------------------------------------------------------------------------------------------


def test_every_hook_in_its_order(plain):
    result, sees = plain
    expected: list[tuple[Any, ...]] = [("start", 0, 0)]
    for line in result.history:
        expected += [("outer", line["round"])] * line["outer"] + [("round", line["round"])]
    assert sees.told == [*expected, ("end", 10), ("close",)]
    assert [line["round"] for line in result.history if line["outer"]] == [0, 2, 4]


def test_they_are_shown_the_state_and_both_masks(plain):
    result, sees = plain
    assert sees.round.line == result.history[-1]
    assert sees.round.metrics["accuracy"] == result.summary["accuracy"]
    assert equal(sees.weights[-1], result.model.state_dict())
    assert equal(sees.round.masks, result.masks)
    assert torch.equal(sees.round.state["alpha"], result.state["alpha"])
    gained = sum(int((sees.outer.after[name] & ~mask).sum()) for name, mask in sees.outer.before.items())
    assert gained / sum(int(mask.sum()) for mask in sees.outer.after.values()) == result.history[4]["links_changed"] > 0
    assert sees.outer.layer_density == {name: pytest.approx(float(mask.float().mean())) for name, mask in sees.outer.after.items()}


class Vandal(Callback):
    """Changes whatever it can reach."""

    def on_start(self, run):
        run.history.clear()
        run.facts["density"] = 0.0
        run.settings.clear()
        run.mask.bits.zero_()
        with pytest.raises(AttributeError):
            run.layout = None

    def on_outer(self, outer):
        for masks in (outer.before, outer.after):
            for mask in masks.values():
                mask.logical_not_()
        outer.line.clear()

    def on_round(self, round):
        round.state.values.zero_()
        round.state.mask.bits.zero_()
        for tensors in (round.state.memory, round.weights, round.masks):
            for tensor in tensors.values():
                tensor.zero_()
        round.line["clients"].clear()
        round.record.clients.clear()
        round.line.clear()

    def on_end(self, end):
        end.summary.clear()


def test_what_they_are_shown_are_copies(plain, tmp_path):
    found = fedrts.run(**RUN, callbacks=[Vandal(), Vandal()], out=tmp_path)
    assert torch.equal(found.state.weights, plain[0].state.weights)
    assert found.state.mask == plain[0].state.mask
    assert torch.equal(found.state["alpha"], plain[0].state["alpha"])
    assert trail(found.history) == trail(plain[0].history)
    assert found.summary["accuracy"] == plain[0].summary["accuracy"]


class Fails(Callback):
    def __init__(self, place="on_round"):
        self.place = place

    def fail(self, *told):
        raise KeyError("no such thing")

    def on_round(self, round):
        if self.place == "on_round" and round.index == 3:
            self.fail()

    def on_end(self, end):
        if self.place == "on_end":
            self.fail()


def test_one_that_raises_is_named_and_the_run_can_be_resumed(plain, tmp_path):
    words = r"the callback Fails failed in on_round of round 3: KeyError: 'no such thing'; mend it, then continue with: fedrts resume"
    with pytest.raises(CallbackError, match=words) as told:
        fedrts.run(**RUN, callbacks=[Fails()], checkpoint={"every": 1}, out=tmp_path)
    assert isinstance(told.value.__cause__, KeyError)
    sees = Sees()
    found = fedrts.resume(tmp_path, callbacks=[sees])
    assert sees.told[0] == ("start", 3, 3), "the round that it failed in is played again, and told again"
    assert torch.equal(found.state.weights, plain[0].state.weights)
    assert trail(found.history) == trail(plain[0].history)


def test_one_that_fails_at_the_end_loses_no_result(plain, tmp_path):
    with pytest.raises(CallbackError, match="failed in on_end"):
        fedrts.run(**RUN, callbacks=[Fails("on_end")], out=tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["accuracy"] == plain[0].summary["accuracy"]


class Unclosed(Callback):
    def on_close(self):
        raise OSError("is gone")


def test_one_that_cannot_be_closed_is_a_note(tmp_path):
    with pytest.warns(Note, match="the callback Unclosed failed in on_close: OSError: is gone"):
        fedrts.run(**{**RUN, "rounds": 1}, callbacks=[Unclosed()], out=tmp_path)


def test_what_is_no_callback_is_one_line_and_leaves_no_folder(tmp_path):
    for given, words in (
        ([Sees], r"'Sees' is no callback: give an object, Sees\(\)"),
        ([3], "'int' is no callback: derive it from"),
        (["cvs"], "callbacks"),
        ("csv", "give a list"),
        ([BestModel(), EarlyStopping(2)], "two callbacks keep a model named 'best'"),
        ([f"{__name__}:broken"], r"the callback '.*:broken' cannot be made: TypeError"),
    ):
        with pytest.raises(InputError, match=words):
            fedrts.run(**RUN, callbacks=given, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def broken(argument):
    return argument


def test_observers_are_callbacks_too_and_a_progress_bar_is_one(tmp_path, capsys):
    class Watches(Silent):
        rounds = 0

        def played(self, record):
            self.rounds += 1

    watches = Watches()
    fedrts.run(**{**RUN, "rounds": 2}, callbacks=[watches, ProgressBar()], out=tmp_path)
    assert watches.rounds == 2
    assert "after 2 rounds" in capsys.readouterr().out


# -- early stopping ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restore", [True, False])
def test_early_stopping_is_what_a_hand_would_do(plain, tmp_path, restore):
    result, sees = plain
    last, best = by_hand([line["accuracy"] for line in result.history])
    assert best < last < 9, "the case shows something"
    found = fedrts.run(**RUN, callbacks=[EarlyStopping(PATIENCE, min_delta=MIN_DELTA, restore=restore)], out=tmp_path)
    assert trail(found.history) == trail(result.history)[: last + 1]
    assert found.summary["rounds"] == last + 1
    stopped = found.summary["stopped"]
    assert (stopped["round"], stopped["planned"], stopped["by"]) == (last, 10, "EarlyStopping")
    assert f"of round {best} in {PATIENCE} rounds" in stopped["reason"]
    assert equal(found.model.state_dict(), sees.weights[best if restore else last])
    assert equal(fedrts.load(tmp_path).state_dict(), sees.weights[best if restore else last])
    for name, mask in found.masks.items():
        assert (found.model.get_parameter(name)[~mask] == 0).all()
    value = result.history[best]["accuracy"]
    if restore:
        assert found.summary["restored"] == {"round": best, "metric": "accuracy", "value": value}
        assert found.summary["accuracy"] == value
        assert equal(safetensors.torch.load_file(tmp_path / "best.safetensors"), found.model.state_dict())
    else:
        assert "restored" not in found.summary
        assert not (tmp_path / "best.safetensors").exists()


def test_a_run_that_goes_to_its_end_has_its_best_model_too(plain, tmp_path):
    result, sees = plain
    _, best = by_hand([line["loss"] for line in result.history], patience=99, min_delta=0.0, higher=False)
    found = fedrts.run(**RUN, stop={"patience": 99, "metric": "loss"}, out=tmp_path)
    assert found.summary["rounds"] == 10
    assert "stopped" not in found.summary
    assert found.summary["restored"]["round"] == best
    assert equal(found.model.state_dict(), sees.weights[best])


def test_where_there_is_a_validation_split_it_decides(tmp_path):
    found = fedrts.run(
        **RUN, data_options={"validation": 0.2}, callbacks=[BestModel()], stop={"patience": 3, "restore": False}, out=tmp_path
    )
    last, best = by_hand([line["valid_accuracy"] for line in found.history], 3, 0.0)
    assert len(found.history) == last + 1
    with safetensors.safe_open(tmp_path / "best.safetensors", "pt") as file:
        assert json.loads(file.metadata()["fedrts"])["round"] == by_hand([line["valid_accuracy"] for line in found.history], 99, 0.0)[1]
    if "stopped" in found.summary:
        assert f"no better valid_accuracy than {found.history[best]['valid_accuracy']:.4f}" in found.summary["stopped"]["reason"]


def test_unknown_metrics_and_wrong_numbers_are_one_line(tmp_path):
    with pytest.raises(InputError, match="there is no metric 'acuracy' in this run; did you mean 'accuracy'"):
        fedrts.run(**RUN, stop={"patience": 3, "metric": "acuracy"}, out=tmp_path)
    for make, words in (
        (lambda: EarlyStopping(0), "patience must be a number of rounds ≥ 1"),
        (lambda: EarlyStopping(True), "patience must be"),
        (lambda: BestModel(min_delta=math.nan), "min_delta must be"),
        (lambda: BestModel(name="../x"), "name must be a word"),
        (lambda: fedrts.run(**RUN, stop={"patience": 0}), r"stop\.patience must be"),
    ):
        with pytest.raises(InputError, match=words):
            make()


STOPPED: dict[str, Any] = {**RUN, "stop": {"patience": PATIENCE, "min_delta": MIN_DELTA}}


class Cut(Exception):
    pass


class Cuts(Silent):
    def __init__(self, after):
        self.after = after

    def played(self, record):
        if record.round == self.after:
            raise Cut


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped") / "run"
    return fedrts.run(**STOPPED, out=folder), folder


@pytest.mark.parametrize(("every", "rounds"), [(1, (0, -2, -1)), (3, (-3, -2, -1))])
def test_cut_off_in_any_round_and_resumed_it_ends_the_same(stopped, tmp_path, every, rounds):
    result, folder = stopped
    files = ("model.safetensors", "masks.safetensors", "best.safetensors", "best_masks.safetensors")
    for after in (range(len(result.history))[place] for place in rounds):
        path = tmp_path / str(after)
        with pytest.raises(Cut):
            fedrts.run(**STOPPED, checkpoint={"every": every}, observer=Cuts(after), out=path)
        found = fedrts.resume(path)
        assert [name for name in files if (path / name).read_bytes() != (folder / name).read_bytes()] == []
        assert trail(found.history) == trail(result.history)
        assert {key: found.summary[key] for key in ("rounds", "accuracy", "stopped", "restored")} == {
            key: result.summary[key] for key in ("rounds", "accuracy", "stopped", "restored")
        }


def test_a_stopped_run_goes_on_only_if_it_is_told_so(stopped, plain, tmp_path, capsys, monkeypatch):
    result, folder = stopped
    last = len(result.history)
    found = fedrts.run(**STOPPED, out=tmp_path / "run")
    again = fedrts.resume(tmp_path / "run")
    assert trail(again.history) == trail(found.history)
    assert again.summary["stopped"] == result.summary["stopped"]
    monkeypatch.setattr("sys.argv", ["fedrts", "resume", str(folder)])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert f"is finished early, after round {last - 1}; `--rounds 10` goes on" in capsys.readouterr().out
    further = fedrts.resume(tmp_path / "run", rounds=10)
    assert config.from_file(tmp_path / "run" / "experiment.toml")["stop"]["start"] == last
    assert len(further.history) > last
    assert trail(further.history) == trail(plain[0].history)[: len(further.history)]
    assert "stopped" not in further.summary or further.summary["stopped"]["round"] >= last + PATIENCE - 1


def site(seed):
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, :3].sum(1) > 0).long())


def own(**given):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    short = {"density": 0.5, "epochs": 1, "lr": 0.05, "eval": {"every": 1}, "topology": {"interval": 2, "end": 2}}
    return fedrts.train(model=model, clients=[site(seed) for seed in range(4)], test=site(9), **{"rounds": 8, **short, **given})


class StopsAt(Callback):
    def __init__(self, index):
        self.index = index

    def on_round(self, round):
        if round.index == self.index:
            round.stop("enough")


def test_own_models_stop_with_and_without_a_folder(tmp_path):
    free, kept = own(callbacks=[StopsAt(2)]), own(callbacks=[StopsAt(2)], out=tmp_path)
    for found in (free, kept):
        assert found.summary["stopped"] == {"round": 2, "planned": 8, "by": "StopsAt", "reason": "enough"}
        assert len(found.history) == 3
    assert torch.equal(free.state.weights, kept.state.weights)
    again = own(out=tmp_path, resume=True)
    assert len(again.history) == 3, "the call says as many rounds as were planned: it does not go on by mistake"
    with pytest.warns(Note, match="9 rounds instead of 8"):
        further = own(out=tmp_path, resume=True, rounds=9)
    assert len(further.history) == 9
    assert own(callbacks=[EarlyStopping(1, min_delta=0.9)]).summary["restored"]["round"] == 0


@pytest.mark.parametrize("name", ["best.safetensors", "best_masks.safetensors"])
def test_a_best_model_that_is_gone_or_another_rounds_is_one_line(stopped, tmp_path, name):
    with pytest.raises(Cut):
        fedrts.run(**STOPPED, observer=Cuts(len(stopped[0].history) - 1), out=tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / name)
    safetensors.torch.save_file(tensors, tmp_path / name, metadata={"fedrts": json.dumps({"round": 77})})
    with pytest.raises(InputError, match=f"{name} is of round 77, and the best one is"):
        fedrts.resume(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(InputError, match=f"cannot read .*{name}"):
        fedrts.resume(tmp_path)


# -- tables, names and trust ------------------------------------------------------------------------------------------


def rows(file):
    with open(file, newline="") as content:
        return list(csv.DictReader(content))


def test_csv_has_every_round_once_also_of_a_resumed_run(tmp_path):
    with pytest.raises(Cut):
        fedrts.run(**RUN, callbacks=["csv"], checkpoint={"every": 3}, observer=Cuts(4), out=tmp_path)
    assert [row["round"] for row in rows(tmp_path / "history.csv")] == ["0", "1", "2", "3", "4"]
    result = fedrts.resume(tmp_path)  # its file names the callback
    found = rows(tmp_path / "history.csv")
    assert [int(row["round"]) for row in found] == list(range(10))
    for row, line in zip(found, result.history, strict=True):
        assert float(row["accuracy"]) == line["accuracy"]
        assert int(row["clients"]) == len(line["clients"])
        assert row["perplexity"] == ""
    assert float(found[-1]["average_accuracy"]) == result.history[-1]["average_accuracy"], "a column that only the last row has"


def test_csv_without_a_folder_needs_a_path(tmp_path):
    with pytest.raises(InputError, match="CSV"):
        own(callbacks=[CSV()])
    own(callbacks=[CSV(tmp_path / "rounds.csv")], rounds=2)
    assert len(rows(tmp_path / "rounds.csv")) == 2


class Marks(Callback):
    """By import path."""

    def on_end(self, end):
        (end.run.folder / "marked").touch()


def test_ones_own_by_import_path_are_trusted_as_other_code_is(tmp_path):
    path = f"{__name__}:Marks"
    fedrts.run(**{**RUN, "rounds": 2}, callbacks=[path], out=tmp_path)
    assert (tmp_path / "marked").exists()
    (tmp_path / "summary.json").unlink()
    with pytest.raises(InputError, match=f"the callback '{path}' is not part of fedrts and may run any code"):
        fedrts.resume(tmp_path)
    fedrts.load(tmp_path)  # nobody needs to be trusted for looking at it
    fedrts.resume(tmp_path, trust=[path])


def test_the_command_line_stops_early_and_logs(tmp_path, monkeypatch, capsys):
    flags = [
        "--rounds",
        "10",
        "--clients",
        "4",
        "--epochs",
        "1",
        "--engine",
        "serial",
        "--quiet",
        "--log",
        "csv",
        "--out",
        str(tmp_path / "a"),
    ]
    keys = ["model_options.hidden=[16]", "eval.every=1", "eval.fairness=false", "stop.patience=1", "stop.min_delta=0.5"]
    monkeypatch.setattr("sys.argv", ["fedrts", "run", *flags, *(word for key in keys for word in ("--set", key))])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["stopped"]["reason"].endswith("in 1 rounds")
    assert rows(tmp_path / "a" / "history.csv")

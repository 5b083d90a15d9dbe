"""Kill a run that stops early at any moment: `fedrts resume` ends it in the same round, with the same best model."""

import json
import signal

import pytest

FLAGS = ["--rounds", 9, "--seed", 5, "--epochs", 1, "--clients", 4, "--set", "topology.interval=2", "--quiet"]
FLAGS += ["--set", "model_options.hidden=[16]", "--set", "eval.every=1", "--set", "eval.fairness=false", "--set", "checkpoint.every=1"]
FLAGS += ["--set", "stop.patience=1", "--set", "stop.min_delta=0.05", "--log", "csv"]
EXACT = ("model.safetensors", "masks.safetensors", "best.safetensors", "best_masks.safetensors", "average.safetensors")


def results(folder):
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text("utf-8").splitlines()]
    return {
        **{name: (folder / name).read_bytes() for name in EXACT if (folder / name).exists()},
        "summary": {key: summary[key] for key in ("rounds", "accuracy", "best_accuracy", "stopped", "restored", "upload_bytes")},
        "history": [{key: value for key, value in line.items() if key != "seconds"} for line in history],
        "table": [line.rpartition(",")[0].split(",")[:6] for line in (folder / "history.csv").read_text("utf-8").splitlines()],
    }


@pytest.fixture(scope="module")
def reference(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference") / "run"
    assert start("run", *FLAGS, "--out", folder).ended() == 0
    found = results(folder)
    assert 1 <= found["summary"]["restored"]["round"] < found["summary"]["stopped"]["round"] < 8
    return found


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param([("before", "best.safetensors", 2)], id="between the masks and the weights of a better model"),
        pytest.param([("after", "best.safetensors", 2)], id="before the checkpoint of the best round"),
        pytest.param([("before", "STOP")], id="before it is written down that the run stops"),
        pytest.param([("after", "STOP"), ("before", "summary.json")], id="after it is, and before the summary"),
    ],
)
def test_killed_at(start, moment, reference, tmp_path, moments):
    folder = tmp_path / "run"
    last = f"{reference['summary']['stopped']['round'] + 1:08d}-*"
    for number, (what, name, *nth) in enumerate(moments):
        arguments = ["resume", folder, "--quiet"] if number else ["run", *FLAGS, "--out", folder]
        assert start(*arguments, moment=moment(what, last if name == "STOP" else name, *nth)).ended() == -signal.SIGKILL
        assert not (folder / "summary.json").exists()
    assert start("resume", folder, "--quiet").ended() == 0
    found = results(folder)
    assert found.keys() == reference.keys()
    assert [name for name in reference if found[name] != reference[name]] == []

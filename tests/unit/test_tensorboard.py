"""TensorBoard's own reader finds what the run folder says."""

import json
import sys
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

import fedrts
from fedrts import config
from fedrts.errors import InputError
from fedrts.observe import Several, Silent
from fedrts.observe.tensorboard import TensorBoardObserver

SMALL: dict[str, Any] = {
    "rounds": 6,
    "clients": 6,
    "per_round": 3,
    "epochs": 1,
    "topology": {"interval": 2, "end": 6},
    "engine": "serial",
    "eval": {"every": 1},
}


class Falls(Silent):
    """Interrupts the run after a round."""

    def __init__(self, after):
        self.after = after

    def played(self, record):
        if record.round == self.after:
            raise KeyboardInterrupt


def lines(file):
    return [json.loads(text) for text in file.read_text("utf-8").splitlines()]


def events(folder):
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    return found.Reload()


def test_scalars_histograms_and_settings(tmp_path):
    fedrts.run(**SMALL, observer=TensorBoardObserver(), out=tmp_path / "run")
    found, history = events(tmp_path / "run"), lines(tmp_path / "run" / "history.jsonl")
    for tag, key in (("test/accuracy", "accuracy"), ("cost/upload_bytes", "upload_bytes"), ("topology/links_changed", "links_changed")):
        assert [(event.step, event.value) for event in found.Scalars(tag)] == [
            (line["round"], pytest.approx(line[key], rel=1e-6)) for line in history
        ]
    topology = lines(tmp_path / "run" / "topology.jsonl")
    for which in ("active", "inactive"):
        shown = found.Histograms(f"posterior mean/{which} links")
        assert [event.step for event in shown] == [line["round"] for line in topology] == [0, 2, 4]
        for event, line in zip(shown, topology, strict=True):
            assert event.histogram_value.num == sum(line[f"belief_{which}"])
    assert {"experiment/text_summary", "_hparams_/session_start_info"} <= set(found.Tags()["tensors"]) | set(found.summary_metadata)


def test_a_resumed_run_says_every_round_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fedrts.run(**SMALL, observer=Several(TensorBoardObserver(), Falls(after=2)), checkpoint={"every": 2}, out=tmp_path / "run")
    fedrts.resume(tmp_path / "run", observer=TensorBoardObserver())
    history = lines(tmp_path / "run" / "history.jsonl")
    found = events(tmp_path / "run").Scalars("test/accuracy")
    assert [event.step for event in found] == [0, 1, 2, 3, 4, 5]
    assert [event.value for event in found] == pytest.approx([line["accuracy"] for line in history])


def test_without_tensorboard_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(InputError, match=r"pip install 'fedrts\[tensorboard\]'"):
        TensorBoardObserver()


def test_without_a_folder_there_is_nowhere_to_write():
    with pytest.raises(InputError, match="run folder"):
        TensorBoardObserver().started(config.resolve({}), {}, 0)
    TensorBoardObserver().stopped()  # as a run that cannot begin does


def test_a_run_that_begins_again_replaces_what_it_said(tmp_path, monkeypatch):
    """It fell before its first checkpoint."""
    # files of one second are read in the order of a counter of this process, as text: 10 would come before 9
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    with pytest.raises(KeyboardInterrupt):
        fedrts.run(**SMALL, observer=Several(TensorBoardObserver(), Falls(after=2)), checkpoint={"every": 100}, out=tmp_path / "run")
    fedrts.resume(tmp_path / "run", observer=TensorBoardObserver())
    assert [event.step for event in events(tmp_path / "run").Scalars("test/accuracy")] == [0, 1, 2, 3, 4, 5]


def test_a_set_up_has_scalars_of_its_own(tmp_path):
    fedrts.run(**SMALL, method="snip", observer=TensorBoardObserver(), out=tmp_path / "run")
    found, history = events(tmp_path / "run"), lines(tmp_path / "run" / "history.jsonl")
    assert [line["round"] for line in history][:2] == [-1, 0]
    assert [event.value for event in found.Scalars("set-up/upload_bytes")] == pytest.approx([history[0]["upload_bytes"]])
    assert [event.value for event in found.Scalars("cost/upload_bytes")] == pytest.approx([line["upload_bytes"] for line in history[1:]])

"""A process that is asked to stop ends its task first, or breaks it off when it is asked again."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import fedrts
from fedrts import api, config
from fedrts.cli.interrupt import as_interruption
from fedrts.drain import Drain, Drained
from fedrts.observe import Silent

TINY: dict[str, Any] = {
    "data": "digits",
    "method": "fedrts",
    "rounds": 6,
    "clients": {"total": 4, "per_round": 2},
    "train": {"epochs": 1},
    "model_options": {"hidden": [8]},
    "device": "cpu",
    "checkpoint": {"every": 100},
}


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def worked(drain: Drain, *steps: str) -> list[str]:
    """What was done of these steps, while the process listened, and how it ended."""
    done: list[str] = []
    try:
        with drain.listening():
            for step in steps:
                {"begin": drain.begin, "end": drain.end, "SIGTERM": terminate, "work": lambda: time.sleep(0.5)}[step]()
                done.append(step)
    except (Drained, KeyboardInterrupt) as error:
        done.append(type(error).__name__)
    return done


def test_a_task_at_hand_is_ended_first():
    said: list[str] = []
    assert worked(Drain(60, said.append), "begin", "SIGTERM", "work", "end", "begin") == ["begin", "SIGTERM", "work", "Drained"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "as it was before"
    assert "for up to 60 s" in said[0]


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_interrupted_leaves_signals_as_they_were(asked):
    def interrupted() -> None:
        with as_interruption("interrupted"):
            os.kill(os.getpid(), asked)
            time.sleep(1)

    with pytest.raises(SystemExit, match="130"):
        interrupted()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_without_a_task_it_ends_at_once():
    assert worked(Drain(60), "begin", "end", "SIGTERM", "work") == ["begin", "end", "Drained"]


def test_a_task_is_broken_off_when_asked_again():
    assert worked(Drain(60), "begin", "SIGTERM", "SIGTERM", "work") == ["begin", "SIGTERM", "KeyboardInterrupt"]


def test_a_task_is_broken_off_without_patience():
    assert worked(Drain(0), "begin", "SIGTERM", "work") == ["begin", "KeyboardInterrupt"]


def test_a_task_that_takes_too_long_is_broken_off():
    assert worked(Drain(0.1), "begin", "SIGTERM", "work", "end") == ["begin", "SIGTERM", "KeyboardInterrupt"]


class Asking(Silent):
    """Asks to stop when so many rounds are over: the next one is at hand."""

    def __init__(self, drain: Drain, after: int) -> None:
        self.drain, self.left = drain, after

    def played(self, record: object) -> None:
        self.left -= 1
        if not self.left:
            self.drain.asked = True


def test_a_drained_run_has_a_checkpoint_and_goes_on_to_the_same_bits(tmp_path: Path):
    whole = fedrts.run(out=tmp_path / "whole", **TINY)
    drain = Drain()
    with pytest.raises(Drained):
        api.start(config.resolve({**TINY, "out": str(tmp_path / "run")}), Asking(drain, 2), drain=drain)
    (saved,) = (tmp_path / "run" / "checkpoint").glob("*.safetensors")
    assert saved.name.startswith("00000003-"), "the round at hand was ended and saved, whatever checkpoint.every says"
    assert not (tmp_path / "run" / "summary.json").exists()
    again = fedrts.resume(tmp_path / "run")
    assert again.summary["accuracy"] == whole.summary["accuracy"]
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_a_run_in_its_last_round_ends(tmp_path: Path):
    drain = Drain()
    result = api.start(config.resolve({**TINY, "out": str(tmp_path / "run")}), Asking(drain, 5), drain=drain)
    assert result.summary["rounds"] == 6

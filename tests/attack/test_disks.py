"""Disks that fail and checkpoints that somebody made: one line that names the file, exit code 2, and nothing that worked is lost."""

from __future__ import annotations

import builtins
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import fedrts
from fedrts.errors import InputError, Note
from fedrts.export.inspection import inspect_run
from fedrts.runs import checkpoint

Facts = dict[str, Any]
Change = Callable[[Facts, dict[str, torch.Tensor]], object]


def failing(code: int, wanted: Callable[[str], bool], real: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the operating system that fails on some files."""

    def call(first: Any, *rest: Any, **more: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else os.fspath(first)
        if wanted(path):
            raise OSError(code, os.strerror(code))
        return real(first, *rest, **more)

    return call


def restarted(stopped: Path) -> None:
    """With a round left to play."""
    for file in sorted((stopped / "checkpoint").iterdir())[1:]:
        file.unlink()


# -- disks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["history.jsonl", "topology.jsonl"])
def test_a_log_that_cannot_be_brought_to_the_disk_is_one_line(stopped, command, monkeypatch, name):
    restarted(stopped)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.EIO, lambda path: path.endswith(name), os.fsync))
        ended = command("resume", stopped, "--quiet")
    assert ended.code == 2
    assert ended.err.splitlines()[-1].startswith(f"error: cannot write {stopped / name}: Input/output error")
    assert "Traceback" not in ended.err
    assert command("resume", stopped, "--quiet").code == 0


def test_an_old_checkpoint_that_cannot_be_removed_ends_nothing(stopped, monkeypatch):
    for file in (stopped / "checkpoint").iterdir():  # all four rounds are played again
        file.unlink()
    monkeypatch.setattr(Path, "unlink", failing(errno.EPERM, lambda path: "checkpoint" in path, Path.unlink))
    with pytest.warns(Note, match=r"cannot remove old checkpoints from .*: Operation not permitted") as notes:
        assert fedrts.resume(stopped).summary["rounds"] == 4
    assert len({str(entry.message) for entry in notes}) == 1  # shown once, however many stay


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_resuming_in_a_folder_that_cannot_be_written_is_one_line(stopped, command, monkeypatch, code):
    real = builtins.open

    def guarded(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if str(file).startswith(str(stopped)) and set(mode) & set("wa+"):
            raise OSError(code, os.strerror(code))
        return real(file, mode, *rest, **more)

    monkeypatch.setattr(builtins, "open", guarded)
    ended = command("resume", stopped, "--quiet")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert f"cannot write {stopped / 'history.jsonl'}: {os.strerror(code)}" in ended.err


def test_a_disk_that_cannot_lock_is_not_another_process(stopped, command, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    ended = command("resume", stopped, "--quiet")
    assert (ended.code, "No locks available" in ended.err, "another process" in ended.err) == (2, True, False)


def test_a_damaged_checkpoint_that_cannot_be_put_away_is_one_line(stopped, command, monkeypatch):
    newest = sorted((stopped / "checkpoint").iterdir())[-1]
    os.truncate(newest, 100)
    monkeypatch.setattr(Path, "rename", failing(errno.EROFS, lambda path: True, Path.rename))
    ended = command("resume", stopped, "--quiet")
    assert ended.code == 2
    assert f"cannot write {newest}: Read-only file system" in ended.err


def test_logs_that_cannot_be_cut_back_are_one_line(stopped, monkeypatch):
    """The file of a log, which is opened in binary mode."""
    restarted(stopped)

    class Stubborn:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __getattr__(self, name: str) -> Any:
            if name == "truncate":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return getattr(self.file, name)

    from fedrts.runs import folder

    real = folder.RunFolder.rewind

    def rewind(self: Any, saved: Any) -> None:
        self._logs = {name: Stubborn(log) for name, log in self._logs.items()}
        real(self, saved)

    monkeypatch.setattr(folder.RunFolder, "rewind", rewind)
    with pytest.raises(InputError, match=r"cannot write .*history\.jsonl: Input/output error"):
        fedrts.resume(stopped)


# -- checkpoints that have a right checksum and are wrong -----------------------------------------------------------------


def replaced(folder: Path, change: Change) -> str:
    """Change the newest checkpoint, with the checksum that it then has; its name."""
    newest = sorted((folder / "checkpoint").glob("*.safetensors"))[-1]
    content = newest.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    facts, tensors = json.loads(header["__metadata__"]["fedrts"]), safetensors.torch.load(content)
    change(facts, tensors)
    content = safetensors.torch.save(tensors, metadata={"fedrts": json.dumps(facts)})
    newest.unlink()
    made = newest.with_name(f"{newest.name[:8]}-{checkpoint._digest(content)}.safetensors")
    made.write_bytes(content)
    return made.name


def put(name: str, value: Any) -> Change:
    return lambda facts, tensors: tensors.update({name: value})


def without(name: str) -> Change:
    return lambda facts, tensors: tensors.pop(name)


def fact(path: str, value: Any) -> Change:
    def change(facts: Facts, tensors: dict[str, torch.Tensor]) -> None:
        *tables, key = path.split(".")
        for table in tables:
            facts = facts[table]
        if value is None:
            del facts[key]
        else:
            facts[key] = value

    return change


def longer(facts: Facts, tensors: dict[str, torch.Tensor]) -> None:
    tensors["values"] = torch.cat([tensors["values"], torch.zeros(3)])


def halved(name: str) -> Change:
    return lambda facts, tensors: tensors.update({name: tensors[name][: len(tensors[name]) // 2].clone()})


MALFORMED: dict[str, Change] = {
    "no values": without("values"),
    "no mask": without("mask"),
    "values of whole numbers": put("values", torch.ones(500, dtype=torch.int64)),
    "values in two dimensions": put("values", torch.ones(50, 10)),
    "too few values": halved("values"),
    "too many values": longer,
    "values of another type": lambda facts, tensors: tensors.update(values=tensors["values"].double()),
    "a mask of numbers": lambda facts, tensors: tensors.update(mask=tensors["mask"].float()),
    "half a mask": halved("mask"),
    "no posterior": without("memory.alpha"),
    "half a posterior": halved("memory.beta"),
    "a posterior of whole numbers": lambda facts, tensors: tensors.update({"memory.alpha": tensors["memory.alpha"].long()}),
    "no ledger": without("ledger.masks"),
    "a ledger of another shape": put("ledger.holds", torch.zeros(3, dtype=torch.int64)),
    "masks that nobody sent": put("ledger.holds", torch.tensor([[0, 99]])),
    "no sizes": fact("sizes", None),
    "sizes that are no numbers": fact("sizes", ["many"]),
    "negative sizes": fact("sizes", [-5, 517]),
    "no round": fact("next_round", None),
    "a round that is no number": fact("next_round", "soon"),
    "no lengths of logs": fact("logs", None),
    "a log that is missing": fact("logs", {}),
    "a length that is no number": fact("logs", {"history.jsonl": "x", "topology.jsonl": 0}),
    "no experiment": fact("experiment", None),
    "an experiment that is a list": fact("experiment", []),
    "no identity": fact("identity", None),
    "an identity without a model": fact("identity.model", None),
    "layers that are no names": fact("identity.layers", 3),
    "other layers": fact("identity.layers", ["one", "two", "three"]),
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_checkpoint_counts_as_damaged(stopped, change):
    """The one before it is used, and the run ends as it would have."""
    name = replaced(stopped, change)
    with pytest.warns(Note, match=rf"checkpoint {name} is damaged \(.+\): it does not count"):
        assert fedrts.resume(stopped).summary["rounds"] == 4


@pytest.mark.parametrize("word", ["resume", "inspect", "evaluate"])
@pytest.mark.parametrize("change", ["no values", "half a mask", "no ledger", "no sizes", "no identity"])
def test_malformed_checkpoints_alone_are_one_line(stopped, command, word, change):
    for file in sorted((stopped / "checkpoint").iterdir())[:-1]:
        file.unlink()
    replaced(stopped, MALFORMED[change])
    ended = command(word, stopped)
    assert ended.code == 2
    assert "Traceback" not in ended.err
    assert "all checkpoints in" in ended.err.splitlines()[-1]


def test_a_checkpoint_of_another_model_is_not_called_damaged(stopped):
    """Nor put away: the mistake is in what was asked for."""
    names = sorted(file.name for file in (stopped / "checkpoint").iterdir())
    file = stopped / "experiment.toml"
    file.write_text(file.read_text().replace("hidden = [\n    8,\n]", "hidden = [\n    9,\n]"))
    assert "9" in file.read_text()
    with pytest.raises(InputError, match="was changed after its checkpoint"):
        fedrts.resume(stopped)
    assert sorted(file.name for file in (stopped / "checkpoint").iterdir()) == names


def test_an_unfinished_run_with_a_bent_model_does_not_load(stopped):
    for file in sorted((stopped / "checkpoint").iterdir())[:-1]:
        file.unlink()
    replaced(stopped, longer)
    with pytest.raises(InputError, match="damaged"):
        fedrts.load(stopped)
    assert inspect_run(stopped)["state"].startswith("unfinished")


# -- introductions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experiment", [5, 0.5, b"bytes", ["text"], True])
def test_an_introduction_whose_experiment_is_no_text_is_one_line(experiment):
    pytest.importorskip("flwr")
    from fedrts.flower.host import Host
    from fedrts.flower.site import accepted

    with pytest.raises(InputError, match="experiment is no text"):
        accepted(experiment, Host())

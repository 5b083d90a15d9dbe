"""Lines of a log: their levels, and the same as JSON."""

import ast
import json
import logging
import subprocess
import sys
import threading
import warnings
from datetime import UTC, datetime
from pathlib import Path

import pytest

import fedrts
from fedrts import cli, logs
from fedrts.audit.witness import Details
from fedrts.errors import note
from fedrts.logs import LogFormat, LogLevel
from fedrts.observe.lines import LineObserver
from fedrts.server.rounds import Record

SOURCE = Path(fedrts.__file__).parent
LINES = [logs.debug("a", "details"), logs.info("b", "all is well"), logs.warning("c", "look here"), logs.error("d", "it failed")]


@pytest.fixture(autouse=True)
def _as_before():
    """What a command sets up ends with it."""
    ours = logging.getLogger("fedrts")
    before = ours.handlers, ours.level, ours.propagate
    yield
    logs.set_up(LogFormat.text, LogLevel.info)
    ours.handlers, ours.propagate = before[0], before[2]
    ours.setLevel(before[1])


def objects(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("format", LogFormat)
@pytest.mark.parametrize(("level", "shown"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_lines_of_a_lower_level_are_not_told(format, level, shown, capsys):
    logs.set_up(format, LogLevel(level))
    for line in LINES:
        logs.tell(line)
    said = capsys.readouterr().err
    told = [entry["message"] for entry in objects(said)] if format is LogFormat.json else said.splitlines()
    assert told == [str(line) for line in LINES[-shown:]]


def test_text_is_the_line_and_nothing_else(capsys):
    logs.set_up(LogFormat.text, LogLevel.info)
    logs.tell("plain")
    logs.tell(logs.warning("lost", "LOST: [red]client[/] 2", client=2))
    logs.tell(logs.info("round", "round 1"), "stdout")
    assert capsys.readouterr() == ("round 1\n", "plain\nLOST: [red]client[/] 2\n")


def test_an_object_says_when_how_bad_what_and_in_which_words(capsys):
    logs.set_up(LogFormat.json, LogLevel.info)
    before = datetime.now(UTC)
    logs.tell(logs.warning("late", "client 2 was late", round=3, client=2, seconds=1.5), "stdout")
    out, err = capsys.readouterr()
    (found,) = objects(out)
    assert err == ""
    assert list(found) == ["time", "level", "event", "message", "round", "client", "seconds"]
    at = datetime.fromisoformat(found.pop("time"))
    assert at.tzinfo is UTC
    assert abs((at - before).total_seconds()) < 60
    assert found == {"level": "warning", "event": "late", "message": "client 2 was late", "round": 3, "client": 2, "seconds": 1.5}


@pytest.mark.parametrize("words", ["two\nlines", 'quo"tes\\', "\u2028\x85\x0b", "π \U0001f600 \ud800", "\x1b[31mred"])
def test_whatever_is_said_is_one_line(words, capsys):
    logs.set_up(LogFormat.json, LogLevel.info)
    logs.tell(logs.info("told", words, name=words))
    (found,) = objects(capsys.readouterr().err)
    assert found["message"] == found["name"] == words


def test_fields_are_what_json_knows_and_hide_nothing(capsys):
    logs.set_up(LogFormat.json, LogLevel.info)
    logs.tell(
        logs.info("told", "words", loss=float("nan"), each={1: [float("inf"), 0.5]}, file=Path("/x"), level=9, message="other", time=0)
    )
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert (found["loss"], found["each"], found["file"]) == (None, {"1": [None, 0.5]}, "/x")
    assert (found["level"], found["message"]) == ("info", "words")


def test_results_are_told_whatever_the_level(capsys):
    logs.set_up(LogFormat.json, LogLevel.error)
    logs.tell(logs.info("finished", "done"), "stdout", always=True)
    assert objects(capsys.readouterr().out)[0]["event"] == "finished"


def test_notes_and_errors_of_a_command_are_lines_too(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(sys, "argv", ["fedrts", "resume", str(tmp_path), "--log-format", "json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", cli._show_warning)
        note("client 2 was late", "late", client=2)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    failed, late, old = objects(capsys.readouterr().err)
    assert (failed["level"], failed["event"]) == ("error", "error")
    assert failed["message"] == f"error: {tmp_path} is no run folder: it has no experiment.toml"
    assert (late["level"], late["event"], late["message"], late["client"]) == ("warning", "late", "note: client 2 was late", 2)
    assert (old["level"], old["event"]) == ("warning", "warning")


def test_other_packages_follow(capsys):
    other = logging.getLogger("flwr_of_this_test")
    other.addHandler(logging.StreamHandler(sys.stdout))
    other.setLevel(logging.DEBUG)
    logs.set_up(LogFormat.json, LogLevel.info)
    logs.follow(other.name)
    other.info("too much")
    try:
        raise ValueError("in words")
    except ValueError:
        other.exception("it broke")
    logging.getLogger("some.other.one").critical("help")
    out, err = capsys.readouterr()
    broke, other_one = objects(err)
    assert out == ""
    assert (broke["level"], broke["event"], broke["message"]) == ("error", other.name, "it broke")
    assert "ValueError: in words" in broke["traceback"]
    assert (other_one["level"], other_one["event"]) == ("error", "some")
    logs.set_up(level=LogLevel.debug)
    logs.follow(other.name)
    other.debug("wanted now")
    assert objects(capsys.readouterr().err)[0]["level"] == "debug"


def test_errors_that_nobody_catches_are_lines_as_long_as_lines_are_json(capsys):
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    logs.set_up(LogFormat.json, LogLevel.info)
    sys.excepthook(ValueError, ValueError("in words"), None)
    logs.set_up(LogFormat.text)
    assert (sys.excepthook, threading.excepthook, sys.unraisablehook) == hooks
    assert not [handler for handler in logging.getLogger().handlers if isinstance(handler, logs._Shown)]
    (found,) = objects(capsys.readouterr().err)
    assert (found["level"], found["event"], found["message"]) == ("error", "error", "ValueError: in words")
    assert "Traceback" not in found["message"]
    assert found["traceback"].endswith("ValueError: in words\n")


def test_details_are_what_witnesses_hear(capsys):
    logs.set_up(LogFormat.json, LogLevel.info)
    Details()("sent", level=3, clients={"1": [5, "ab"]})
    assert capsys.readouterr().err == ""
    logs.set_up(level=LogLevel.debug)
    Details()("sent", clients={"1": [5, "ab"]})
    (found,) = objects(capsys.readouterr().err)
    assert (found["level"], found["event"], found["entry"], found["clients"]) == ("debug", "audit", "sent", {"1": [5, "ab"]})


def test_a_rejected_reply_is_a_warning_and_a_late_one_told_elsewhere(toy, capsys):
    logs.set_up(LogFormat.json, LogLevel.warning)
    observer = LineObserver()
    observer.started(toy().experiment, {"parameters": 10, "active": 5, "density": 0.5, "engine": "e", "bytes": 0, "missing": 0}, 0)
    rejected = [{"client": 1, "reason": "late"}, {"client": 2, "reason": "values are not finite"}]
    observer.played(Record(4, True, [0], rejected, accuracy=0.5))
    (found,) = objects(capsys.readouterr().out)
    assert (found["event"], found["round"], found["client"], found["reason"]) == ("rejected", 4, 2, "values are not finite")
    logs.set_up(level=LogLevel.info)
    observer.played(Record(5, True, [0, 3], accuracy=0.5, upload_bytes=2, download_bytes=3, seconds=0.25))
    (found,) = objects(capsys.readouterr().out)
    expected = {"event": "round", "round": 5, "clients": [0, 3], "bytes": 5, "seconds": 0.25, "accuracy": 0.5}
    assert {key: found[key] for key in expected} == expected


def test_a_run_in_json_ends_well_though_nobody_reads(tmp_path):
    command = f"{sys.executable} -m fedrts run --rounds 3 --out run --log-format json | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert objects(done.stdout)[0]["event"] == "started"
    assert (tmp_path / "run" / "summary.json").exists()


def test_every_line_of_a_federation_says_what_it_is():
    """None is bare text, which programs could not tell from another."""
    bare, found = [], 0
    for file in [*(SOURCE / "flower").glob("*.py"), *(SOURCE / "audit").glob("*.py"), SOURCE / "drain.py"]:
        if file.name == "limits.py":  # the SuperLink's own process: the server's tells on what it says
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("say", "tell"):
                found += 1
                bare += [f"{file.name}:{node.lineno}" for words in node.args[:1] if isinstance(words, ast.Constant | ast.JoinedStr)]
    assert found > 40
    assert bare == []

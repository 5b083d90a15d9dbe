"""What a person is shown of a run, whatever clients and files say."""

import subprocess
import sys
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

import fedrts
from fedrts.api import playing
from fedrts.cli import tables
from fedrts.comparison import Unwatched
from fedrts.comparison.notebook import NotebookWatcher
from fedrts.comparison.play import CellTask, News
from fedrts.comparison.watch import LiveWatcher
from fedrts.config import Experiment
from fedrts.observe import Several, Silent
from fedrts.observe.console import ConsoleObserver, ProgressLine
from fedrts.runs.folder import RunFolder
from fedrts.server.rounds import Record
from handmade import write

FACTS = {"parameters": 10, "active": 5, "density": 0.5, "engine": "serial engine", "bytes": 0, "missing": 0}


@pytest.mark.parametrize("words", ["[/]", "[/bold] all is well", "[red]", "[link=x]"])
def test_words_of_strangers_are_shown_as_they_are(toy, words, capsys):
    shown = StringIO()
    watching = ConsoleObserver(Console(file=shown, width=300))
    experiment = toy().experiment.model_copy(update={"data": f"folder:/x/{words}", "out": f"runs/{words}"})
    watching.started(experiment, FACTS, 0)
    watching.played(Record(0, True, [1], [{"client": 2, "reason": words}], accuracy=0.5))
    summary = dict.fromkeys(("upload_bytes", "download_bytes", "comm_ratio", "density", "accuracy", "accuracy_last10", "seconds"), 1.0)
    watching.finished({**summary, "method": "m", "data": words, "rounds": 1, "samples_per_second": 1.0, "perplexity": None})
    text = shown.getvalue()
    assert f"folder:/x/{words}" in text
    assert f"writing to runs/{words}" in text
    assert f"rejected client 2: {words}" in text
    assert f"m on {words} after 1 rounds" in text
    tables.print_table([{"key": "data", "value": words}], as_json=False)
    assert words in capsys.readouterr().out


def test_a_cell_whose_name_has_brackets_is_shown():
    shown = StringIO()
    watching = LiveWatcher(Console(file=shown, width=100, force_terminal=True))
    watching.tell(News("fedrts [/b]", "started", rounds=3))
    watching.console.print(watching.progress)
    assert "fedrts [/b]" in shown.getvalue()


class Clock:
    """Time that a test sets."""

    now = 100.0

    def __call__(self):
        return self.now


def watched(toy, console, clock, rounds=50, rejected=0):
    """A run of 50 rounds of 45 seconds each, after its 12th."""
    watching = ConsoleObserver(console, clock)
    watching.started(toy().experiment.model_copy(update={"rounds": rounds}), FACTS, 0)
    for number in range(12):
        clock.now += 45
        late = [{"client": 1, "reason": "late"}] * rejected
        watching.played(Record(number, False, [1], late, accuracy=0.942, upload_bytes=5_000_000, density=0.2))
    return watching


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("rejected", [0, 3])
def test_the_live_line_fits(toy, width, rejected):
    """In one line: a bar, the round and, where there is room, the rest, by what matters most."""
    watching = watched(toy, Console(file=StringIO(), width=width, force_terminal=True), Clock(), rejected=rejected)
    watching.stopped()
    (line,) = watching.console.render_lines(ProgressLine(watching.progress), pad=False)
    text = "".join(part.text for part in line)
    assert len(text) <= width
    assert text.startswith("━" * 2)
    assert "12/50" in text
    assert "accuracy 0.942" in text
    assert "0:28:30 left" in text
    assert ("60.00 MB sent" in text) == (width >= 80)
    assert ("links changed" in text) == (width >= (200 if rejected else 120))
    assert ("36 replies missing" in text) == (rejected > 0 and width >= 120)


def test_slow_rounds_are_told_one_by_one_where_there_is_no_terminal(toy):
    shown = StringIO()
    watched(toy, Console(file=shown, width=100), Clock(), rounds=500)
    assert [f"round {number:>4} of 500" in shown.getvalue() for number in range(1, 13)] == [True] * 12


def test_fast_rounds_are_told_by_tenths_where_there_is_no_terminal(toy):
    shown = StringIO()
    watching = ConsoleObserver(Console(file=shown, width=100), Clock())
    watching.started(toy().experiment.model_copy(update={"rounds": 50}), FACTS, 0)
    for number in range(50):
        watching.played(Record(number, False, [1], accuracy=0.9))
    assert shown.getvalue().count("\nround ") == 10


def test_a_long_judgement_is_told(toy):
    shown, clock = StringIO(), Clock()
    watching = watched(toy, Console(file=shown, width=100), clock)
    for done in range(0, 60_001, 6_000):
        watching.judging(done, 60_000)
        clock.now += 8
    lines = [line for line in shown.getvalue().splitlines() if line.startswith("judging")]
    assert lines[0] == "judging the model by class and client · 40% of 60,000 samples · 0:00:48 left"
    assert len(lines) == 2
    watching.judging(15_000, 60_000)
    line = "".join(part.text for part in Console(width=80, file=StringIO()).render_lines(ProgressLine(watching.progress))[0])
    assert "judging 25%" in line


def test_every_observer_that_wants_to_hears_of_the_judgement(toy, tmp_path):
    class Hearing(Silent):
        def __init__(self):
            self.heard = []

        def judging(self, done, total):
            self.heard.append((done, total))

    hearing, store = Hearing(), RunFolder(tmp_path / "run")
    run = toy()
    store.create(run.experiment)
    playing.play(run, store, Several(Silent(), hearing))
    assert hearing.heard[0] == (0, 1)
    assert hearing.heard[-1] == (160, 160)  # 40 test samples, 120 of clients


class Notebook:
    """As IPython looks inside a kernel."""

    def __init__(self, kernel):
        self.kernel = kernel

    def get_ipython(self):
        return self


@pytest.mark.parametrize(("kernel", "shows"), [(object(), True), (None, False)])
def test_a_notebook_shows_a_bar_unless_it_names_an_observer(toy, monkeypatch, capsys, tmp_path, kernel, shows):
    monkeypatch.setitem(sys.modules, "IPython", Notebook(kernel))
    given: dict[str, Any] = {"data": "digits", "rounds": 3, "clients": 4, "per_round": 2, "epochs": 1, "engine": "serial"}
    fedrts.run(**given, out=tmp_path / "quiet", observer=Silent())
    assert capsys.readouterr().out == ""
    fedrts.run(**given, out=tmp_path / "shown")
    out = capsys.readouterr().out
    assert bool(out) == shows
    if shows:
        assert out.count("\n") == 1
        assert "████████████████████ 3/3 · accuracy 0." in out.split("\r")[-1]


@pytest.mark.parametrize(("kernel", "shows"), [(object(), True), (None, False)])
def test_a_comparison_in_a_notebook_shows_a_bar(monkeypatch, capsys, tmp_path, kernel, shows):
    monkeypatch.setitem(sys.modules, "IPython", Notebook(kernel))
    given: dict[str, Any] = {"methods": ["random"], "rounds": 1, "clients": 4, "per_round": 2, "epochs": 1, "engine": "serial"}
    fedrts.compare(**given, seeds=[0], out=tmp_path / "compared")
    out = capsys.readouterr().out
    assert bool(out) == shows
    if shows:
        assert out.count("\n") == 1
        assert "\r░░░░░░░░░░░░░░░░░░░░ 0/1 cells · -:--:-- left" in out
        assert "████████████████████ 1/1 cells · 0:00:0" in out.split("\r")[-1]
    fedrts.compare(**given, seeds=[0], out=tmp_path / "compared", watcher=Unwatched())
    assert capsys.readouterr().out == ""


def test_the_line_of_a_comparison(tmp_path):
    shown, clock = StringIO(), Clock()
    watching = NotebookWatcher(shown, clock)
    done = tmp_path / "done"
    write(done, [0.1])
    names = ["done", "a", "b", "c" * 90, "d"]
    watching.expect([CellTask(name, tmp_path / name, Experiment()) for name in names], "cells")
    assert watching.words == "1/5 cells · -:--:-- left"
    watching.tell(News("a", "started", rounds=10))
    watching.tell(News("b", "started", 5, 10))  # resumed: these rounds say nothing of the pace
    clock.now += 30
    watching.tell(News("a", "played", 5, 10))
    assert watching.words == "1/5 cells · a 5/10 and 1 more · 0:03:00 left"
    watching.tell(News("b", "failed", text="why"))
    assert watching.words == "2/5 cells · 1 failed · a 5/10 · 0:01:15 left"
    watching.tell(News("a", "finished", 10, 10))
    watching.tell(News("c" * 90, "started", rounds=10))
    assert shown.getvalue().split("\r")[-1].startswith("████████████░░░░░░░░ 3/5 cells · 1 failed · ccc")
    assert "c… 0/10 · 0:00:40 left" in watching.words
    assert len(watching.words) == watching.bar.room
    before = shown.getvalue()
    watching.tell(News("c" * 90, "played", 1, 10))
    assert shown.getvalue() == before, "every change is a message to the browser: not too many"
    watching.stopped()
    assert shown.getvalue().count("\n") == 1


@pytest.mark.parametrize("command", [("run",), ("compare", "--methods", "random", "--out", "compared")])
def test_a_run_outlives_who_reads_its_output(tmp_path, command):
    """`fedrts run | head -1`: it goes on, and says so once."""
    small = [
        "--rounds",
        "20",
        "--clients",
        "4",
        "--per-round",
        "2",
        "--epochs",
        "1",
        "--engine",
        "serial",
        "--set",
        "model_options.hidden=[8]",
    ]
    place = ["--out", "done"] if command == ("run",) else ["--jobs", "1", "--seeds", "0,1,2"]
    arguments = [sys.executable, "-m", "fedrts", *command, *small, *place]
    process = subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait() == 0, said
    assert said.count("nobody reads the output any more") == 1
    assert len(list(tmp_path.rglob("summary.json"))) == (1 if command == ("run",) else 3)

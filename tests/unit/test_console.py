"""What a person is shown of a run, whatever clients and files say."""

import subprocess
import sys
from io import StringIO

import pytest
from rich.console import Console

from fedrts.cli import tables
from fedrts.comparison.play import News
from fedrts.comparison.watch import LiveWatcher
from fedrts.observe.console import ConsoleObserver
from fedrts.rounds import Record

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
    process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait() == 0, said
    assert said.count("nobody reads the output any more") == 1
    assert len(list(tmp_path.rglob("summary.json"))) == (1 if command == ("run",) else 3)

"""The method that CONTRIBUTING.md writes out works as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedrts import methods
from fedrts.server import rounds

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def example():
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.S)
    return code


def test_the_example_method_passes_the_linter_as_it_stands():
    for check in (["check"], ["format", "--diff"]):
        command = [sys.executable, "-m", "ruff", *check, "--no-cache", "--stdin-filename", "src/fedrts/methods/mine.py", "-"]
        ended = subprocess.run(command, input=example(), capture_output=True, text=True, cwd=GUIDE.parent)
        assert ended.returncode == 0, ended.stdout


@pytest.mark.slow  # mypy reads half of torch, where its cache is cold
def test_the_example_method_passes_the_type_checker_as_it_stands(tmp_path):
    (tmp_path / "mine.py").write_text(example(), "utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(tmp_path / "mine.py")]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=GUIDE.parent)
    assert ended.returncode == 0, ended.stdout


def test_the_example_method_runs(toy):
    code = example()
    exec(compile(code, str(GUIDE), "exec"), {"__name__": "example"})
    try:
        run = toy("set", "cnn")
        state = run.method.begin(run.setup)
        counts = state.mask.counts
        changed = []
        for step in rounds.play(run.plan, state, -1):
            assert step.state.mask.counts == counts
            changed.append(step.record.links_changed)
        assert changed[0] > 0
        assert changed[1] == 0
    finally:
        methods.methods._known.pop("set")

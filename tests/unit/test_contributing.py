"""The method that CONTRIBUTING.md writes out works as it stands there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedrts import methods
from fedrts.server import rounds

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"
NAME = "sparse_evolution"
TREE = (
    "src",
    "kernels",
    "tests",
    "docs",
    "benchmarks",
    "examples",
    "deploy",
    ".github",
    ".pre-commit-config.yaml",
    "Makefile",
    "pyproject.toml",
)
"""What the tests look at, besides the pages in the root folder."""


def example():
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.S)
    return code


@pytest.fixture
def pasted(tmp_path):
    """Runs a command in a copy of the working tree, the example pasted into it."""
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "raw")
    for path in [GUIDE.parent / name for name in TREE] + list(GUIDE.parent.glob("*.md")) + list(GUIDE.parent.glob("*.cff")):
        copy = tmp_path / path.name
        shutil.copytree(path, copy, ignore=left_out) if path.is_dir() else shutil.copy(path, copy)
    (tmp_path / "src/fedrts/methods/mine.py").write_text(example(), "utf-8")

    def run(*command):
        here = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
        ended = subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, env=here, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    return run


def test_the_example_method_passes_the_linter_as_it_stands():
    for check in (["check"], ["format", "--diff"]):
        command = [sys.executable, "-m", "ruff", *check, "--no-cache", "--stdin-filename", "src/fedrts/methods/mine.py", "-"]
        ended = subprocess.run(command, input=example(), capture_output=True, text=True, cwd=GUIDE.parent)
        assert ended.returncode == 0, ended.stdout


@pytest.mark.slow  # mypy reads half of torch, where its cache is cold
@pytest.mark.timeout(600)
def test_the_example_method_passes_the_type_checker_as_it_stands(pasted):
    pasted("mypy", "src/fedrts/methods/mine.py")


@pytest.mark.slow  # other processes import torch, and run the tests that every method has
@pytest.mark.timeout(900)
def test_the_example_method_passes_every_check_of_the_house_as_it_stands(pasted):
    pasted("ruff", "check", ".")
    pasted("ruff", "format", "--check", ".")
    pasted(
        "pytest", "-n", "0", "-m", "not slow", "tests/unit/test_architecture.py", "tests/unit/test_docs.py", "tests/unit/test_project.py"
    )
    told = pasted("pytest", "-n", "0", "-m", "not slow", "-vv", "-k", NAME, "tests/agree", "tests/unit", "tests/cli")
    assert f"test_every_method.py::test_the_same_seed_gives_the_same_bits_and_another_does_not[{NAME}]" in told


def test_the_example_method_runs(toy):
    code = example()
    exec(compile(code, str(GUIDE), "exec"), {"__name__": "example"})
    try:
        run = toy(NAME, "cnn")
        state = run.method.begin(run.setup)
        counts = state.mask.counts
        changed = []
        for step in rounds.play(run.plan, state, -1):
            assert step.state.mask.counts == counts
            changed.append(step.record.links_changed)
        assert changed[0] > 0
        assert changed[1] == 0
    finally:
        methods.methods._known.pop(NAME)

"""What the documentation tells people to type: every command parses, every experiment file resolves, the Python page runs."""

import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import typer

from fedrts import config
from fedrts.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks/results").glob("*.md")),
]
NOT_TYPED = {"docs/commands.md"}  # headings of the reference


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


def commands(path):
    """The commands of a page: lines of plain code blocks, and inline code with at least one option."""
    text = path.read_text("utf-8")
    typed = [block for block in blocks(text, "(?:sh|bash|console)?") if "┏" not in block]  # which is what a program printed
    lines = [line for block in typed for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    lines += [code for code in re.findall(r"`(fedrts [^`]+)`", prose) if " --" in code and "…" not in code]
    for line in lines:
        for part in re.split(r";|&&|\s#\s", line.strip().removeprefix("$ ")):
            if part.strip().startswith("fedrts ") and "…" not in part and "[" not in part:
                yield part.strip()


DOCUMENTED = [
    pytest.param(command, id=f"{path.relative_to(ROOT)}: {command}"[:120])
    for path in PAGES
    if str(path.relative_to(ROOT)) not in NOT_TYPED
    for command in dict.fromkeys(commands(path))
]


def parsed(line):
    """Parse as the command line would, without running anything."""
    root: Any = typer.main.get_command(app)
    command, words = root, shlex.split(line.partition(" > ")[0])[1:]
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    assert command is not root, f"no command in: {line}"
    return command.make_context("fedrts", words).params


def fields_of(table: Any) -> dict[str, Any]:
    found: dict[str, Any] = table.model_fields
    return found


@pytest.mark.parametrize("line", DOCUMENTED)
def test_a_documented_command_parses(line):
    for assignment in parsed(line).get("assignments") or []:
        key = assignment.partition("=")[0]
        table, _, name = key.partition(".")
        if table.endswith("_options"):
            continue  # checked against method, model and data when they are known
        tables = config.Experiment.model_fields
        assert table in tables, key
        assert not name or name in fields_of(tables[table].annotation), key


def test_there_are_commands_and_mistakes_are_found():
    assert len(DOCUMENTED) > 40
    for wrong in ("fedrts run --densty 0.1", "fedrts exports X", "fedrts run --rounds many", "fedrts inspect"):
        with pytest.raises(Exception, match=r"(?i)no such|no command|valid|missing|extra"):
            parsed(wrong)


@pytest.mark.parametrize("page", ["docs/quickstart.md"])
def test_documented_experiments_resolve(page, tmp_path):
    for number, text in enumerate(blocks((ROOT / page).read_text("utf-8"), "toml")):
        file = tmp_path / f"{number}.toml"
        file.write_text(text, "utf-8")
        assert config.resolve(config.from_file(file)).data == "digits"


@pytest.mark.parametrize("page", ["docs/python.md", "docs/quickstart.md", "docs/callbacks.md"])
def test_documented_python_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "example"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for block in blocks((ROOT / page).read_text("utf-8"), "python"):
            exec(compile(block, page, "exec"), names)
    assert list(tmp_path.glob("runs/*/summary.json"))


@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
def test_documented_models_of_transformers_train(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="fedrts[text] is not installed")
    monkeypatch.chdir(tmp_path)
    (block,) = blocks((ROOT / "docs/models.md").read_text("utf-8"), "python")
    exec(compile(block, "docs/models.md", "exec"), {"__name__": "example"})

"""What a public project keeps in order: one version everywhere, a changelog in its form, names that complete, links that lead somewhere."""

import datetime
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import fedrts
from fedrts import cli, methods

ROOT = Path(__file__).parents[2]
HOME = "https://github.com/fedrts/fedrts"
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
"""Headings of Keep a Changelog, in its order."""


def releases():
    """The sections of the changelog: (heading, text)."""
    parts = re.split(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.M)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def latest():
    """Version and date of the latest release of the changelog."""
    first = next(heading for heading, _ in releases() if heading != "Unreleased")
    return first.split(" - ")


def test_the_version_is_said_in_one_place_and_repeated_rightly(monkeypatch, capsys):
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert "version" not in pyproject["project"]
    assert pyproject["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "fedrts.__version__"}
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    monkeypatch.setattr(sys, "argv", ["fedrts", "--version"])
    with pytest.raises(SystemExit):
        cli.main()
    version, date = latest()
    assert fedrts.__version__ == citation["version"] == version == capsys.readouterr().out.strip()
    assert citation["date-released"] == date


def test_the_changelog_is_grouped_by_release_and_by_kind():
    assert releases()[0][0] == "Unreleased"
    dates = []
    for heading, _ in releases()[1:]:
        version, date = heading.split(" - ")
        assert re.fullmatch(r"\d+\.\d+\.\d+", version), heading
        dates.append(datetime.date.fromisoformat(date))
    assert dates == sorted(dates, reverse=True)
    for heading, text in releases():
        kinds = re.findall(r"^### (.+)$", text, re.M)
        assert kinds == [kind for kind in KINDS if kind in kinds], heading


def test_the_paper_is_cited_as_the_readme_cites_it():
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))["preferred-citation"]
    readme = (ROOT / "README.md").read_text("utf-8")
    assert f"title  = {{{paper['title']}}}" in readme
    assert " and ".join(f"{author['given-names']} {author['family-names']}" for author in paper["authors"]) in readme


def test_the_project_has_one_address():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]
    assert urls["Homepage"] == HOME == yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))["repository-code"]
    texts = [*urls.values(), *((ROOT / name).read_text("utf-8") for name in ("SECURITY.md", ".github/ISSUE_TEMPLATE/config.yml"))]
    assert {found for text in texts for found in re.findall(r"https://github\.com/[\w-]+/[\w-]+", text)} == {HOME}


def test_the_workflow_tests_every_python_that_is_supported():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["requires-python"]
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert requires == ">=3.11"


def test_make_help_tells_of_every_target():
    text = (ROOT / "Makefile").read_text("utf-8")
    told = subprocess.run(["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (phony,) = re.findall(r"^\.PHONY: (.+)$", text, re.M)
    assert [line.split()[1] for line in told.splitlines()] == phony.split()
    assert all(len(line.split()) > 3 for line in told.splitlines())


def test_hooks_use_the_tools_of_the_environment():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    assert local["repo"] == "local"
    tools = {(hook["language"], hook["entry"].split()[0]) for hook in local["hooks"]}
    assert tools == {("system", ".venv/bin/ruff"), ("system", ".venv/bin/python"), ("system", "git")}


def test_names_complete_without_an_import():
    code = "import sys, fedrts; print(*dir(fedrts)); print(*dir(fedrts.methods)); print('torch' in sys.modules)"
    top, offered, heavy = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert set(top.split()) == {*fedrts.__all__, "__version__"}
    ours = {methods.get(name).__name__ for name in methods.names() if methods.get(name).__module__.startswith("fedrts.")}
    assert set(offered.split()) == {*methods.__all__, *ours}
    assert heavy == "False"


@pytest.mark.parametrize("module", [fedrts, methods, fedrts.data, fedrts.models], ids=lambda module: module.__name__)
def test_every_name_that_completes_is_there(module):
    assert all(hasattr(module, name) for name in dir(module))


@pytest.mark.parametrize("kind", [fedrts.data, fedrts.models], ids=lambda module: module.__name__)
def test_registries_complete(kind):
    assert {"get", "names", "register"} <= set(dir(kind))

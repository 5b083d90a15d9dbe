"""The documentation is complete, its tables are those of the code, and its links lead somewhere."""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

from fedrts import methods
from fedrts.methods import describe

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "methods"
SECTIONS = ["Equations", "What travels", "Options", "Design decisions", "Cost", "Try it"]

spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
assert spec is not None
assert spec.loader is not None
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)
DESCRIBED = [name for name in methods.names() if name not in generate.undocumented()]


def page(name):
    return (PAGES / f"{name}.md").read_text("utf-8")


def section(name, title):
    return page(name).split(f"\n## {title}\n")[1].split("\n## ")[0]


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_has_a_method():
    assert {path.stem for path in PAGES.glob("*.md")} == {*DESCRIBED, "README"}


@pytest.mark.slow  # not for its time: a method that is being written has no page yet, and `make test` passes with it
def test_every_method_has_a_page():
    assert generate.undocumented() == []


def test_generated_parts_are_those_of_the_code():
    assert generate.main(["--check"]) == 0


def test_stale_parts_are_found_and_rewritten(tmp_path, capsys):
    copy = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    stale = copy / "methods" / "fedrts.md"
    stale.write_text(stale.read_text("utf-8").replace("| `gamma` | `0.5` |", "| `gamma` | `0.4` |"), "utf-8")
    assert generate.main(["--check"], copy) == 1
    assert capsys.readouterr().out == "methods/fedrts.md is stale\n"
    assert generate.main([], copy) == 0
    assert stale.read_text("utf-8") == page("fedrts")
    stale.write_text("no marks", "utf-8")
    with pytest.raises(SystemExit):
        generate.main(["--check"], copy)


def test_the_index_links_every_page():
    text = (PAGES / "README.md").read_text("utf-8")
    in_words, from_code = text.split("<!-- generated: table -->")
    for name in DESCRIBED:
        assert f"[`{name}`]({name}.md)" in in_words
        assert f"[`{name}`]({name}.md)" in from_code


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_page_has_its_sections_in_order(name):
    assert re.findall(r"^## (.+)$", page(name), re.M) == SECTIONS
    assert re.search(r"^\*Original:\* .*\b(19|20)\d\d\b", page(name), re.M)
    assert len(page(name).split()) <= 1000


@pytest.mark.parametrize("name", DESCRIBED)
def test_the_idea_has_three_to_five_sentences(name):
    _, idea, original = page(name).split("\n\n")[:3]
    assert original.startswith("*Original:*")
    assert len(re.findall(r"[.!?](?=\s|$)", idea)) in (3, 4, 5)


@pytest.mark.parametrize("name", DESCRIBED)
def test_the_source_of_every_default_is_told(name):
    prose = section(name, "Options").split("<!-- end -->")[1]
    assert len(prose.split()) > 5
    for option in describe.described(name).options:
        assert f"`{option}`" in prose


@pytest.mark.parametrize("name", DESCRIBED)
def test_cost_and_command_are_told(name):
    assert len(section(name, "Cost").split()) <= 50
    density = "" if methods.get(name).dense else " --density 0.15"
    assert section(name, "Try it").strip().startswith(f"`fedrts run --method {name}{density}`")


DOCUMENTS = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")] + sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there.read_text("utf-8")), target


def test_the_first_page_leads_to_every_other():
    docs = ROOT / "docs"
    first = (docs / "index.md").read_text("utf-8")
    assert [page.name for page in sorted(docs.glob("*.md")) if page.name != "index.md" and f"]({page.name})" not in first] == []

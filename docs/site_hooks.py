"""What the site adds to the pages under docs/: the tutorial's notebooks, files of the repository that pages link to, a list of pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[1]
BROUGHT_IN = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
MEASURED = ("diagnosis/cifar10", "diagnosis/digits", "diagnosis/norms", "transplant/norms")
LOADS = re.compile(r"""<(?!a\b)\w+[^>]*\s(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")
"""A tag, but for a link to click on, with an address elsewhere."""
FOLDERS = (
    "benchmarks/results",
    *(f"benchmarks/results/{folder}" for folder in MEASURED),
    "deploy",
    "deploy/kubernetes",
    "deploy/systemd",
    "examples",
)


def on_files(files: Files, config: Any) -> Files:
    """Bring in the measurements, the examples, the changelog; then list what is there."""
    outside = {page: ROOT / path for page, path in BROUGHT_IN.items()}
    for folder in FOLDERS:
        outside |= {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / folder).glob("*.*"))}
    for name, path in outside.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    for file in _tutorial(config):
        files.append(file)
    there = sorted(file.src_uri for file in files.documentation_pages())
    config.nav = _listed(config.nav, there)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave docs/ lead to what was brought in; links of what was brought in lead back."""
    if page.file.src_uri.startswith("benchmarks/"):
        page.meta["search"] = {"boost": 0.3}  # tables of measurements come after the pages that explain them
    depth = page.file.src_uri.count("/")
    leaving, inside = "../" * (depth + 1), "../" * depth
    if page.file.src_uri in BROUGHT_IN:
        markdown = markdown.replace("](docs/", "](")
    if page.file.src_uri.startswith(FOLDERS):
        markdown = markdown.replace(f"]({inside}docs/", f"]({inside}")
    markdown = re.sub(r"(\]\((?:\.\./)*tutorial/\w+)\.ipynb", r"\1.md", markdown)
    markdown = re.sub(rf"\]\({re.escape(leaving)}(CHANGELOG|CONTRIBUTING)\.md", lambda found: f"]({inside}{found[1].lower()}.md", markdown)
    return re.sub(rf"\]\({re.escape(leaving)}({'|'.join(FOLDERS)})/", rf"]({inside}\1/", markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that would load anything from the network."""
    if found := LOADS.search(output):
        raise PluginError(f"{page.file.src_uri} would load {found[1]}: bring it into docs/")
    return output


def _listed(entries: list[Any], there: list[str]) -> list[Any]:
    """The navigation of mkdocs.yml without pages that are not there; `folder/*.md` stands for the pages of a folder, its index aside."""
    result: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            ((title, inner),) = entry.items()
            if isinstance(inner, str):
                result += [entry] if inner in there else []
            elif kept := _listed(inner, there):
                result.append({title: kept})
        elif entry.endswith("/*.md"):
            folder = entry.removesuffix("*.md")
            result += [page for page in there if page.startswith(folder) and not page.endswith("README.md")]
        elif entry in there:
            result.append(entry)
    return result


def _tutorial(config: Any) -> Iterator[File]:
    """The notebooks as pages with their outputs, and as they are, to be taken home."""
    for path in sorted((ROOT / "docs" / "tutorial").glob("*.ipynb")):
        page, place = nbformat.read(path, as_version=4), f"tutorial/{path.stem}"
        markdown, rest = MarkdownExporter().from_notebook_node(page, {"unique_key": path.stem})
        markdown = re.sub(r"<style scoped>.*?</style>\n?", "", markdown, flags=re.S).replace(
            '<table border="1" class="dataframe">', "<table>"
        )
        markdown = markdown.replace("```python\n%%bash\n", "```bash\n").replace(".ipynb)", ".md)")
        markdown = re.sub(r"(?:[ \t]*\n){5,}", "\n\n", markdown)  # between two outputs of a cell
        yield File.generated(config, f"{place}.md", content=f"{markdown}\n[Take this notebook with you]({path.name}).\n")
        for name, picture in rest["outputs"].items():
            yield File.generated(config, f"tutorial/{name}", content=picture)

"""What the documentation site adds to the pages under docs/: files of the repository that they link to, and a list of pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
BROUGHT_IN = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
MEASURED = ("diagnosis/cifar10", "diagnosis/digits", "diagnosis/norms", "transplant/norms")
FOLDERS = ("benchmarks/results", *(f"benchmarks/results/{folder}" for folder in MEASURED), "deploy", "examples")


def on_files(files: Files, config: Any) -> Files:
    """Bring in the measurements, the examples, the changelog; then list what is there."""
    outside = {page: ROOT / path for page, path in BROUGHT_IN.items()}
    for folder in FOLDERS:
        outside |= {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / folder).glob("*.*"))}
    for name, path in outside.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    there = sorted(file.src_uri for file in files.documentation_pages())
    config.nav = _listed(config.nav, there)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave docs/ lead to what was brought in; links of what was brought in lead back."""
    depth = page.file.src_uri.count("/")
    leaving, inside = "../" * (depth + 1), "../" * depth
    if page.file.src_uri in BROUGHT_IN:
        markdown = markdown.replace("](docs/", "](")
    if page.file.src_uri.startswith(FOLDERS):
        markdown = markdown.replace(f"]({inside}docs/", f"]({inside}")
    markdown = re.sub(rf"\]\({re.escape(leaving)}(CHANGELOG|CONTRIBUTING)\.md", lambda found: f"]({inside}{found[1].lower()}.md", markdown)
    return re.sub(rf"\]\({re.escape(leaving)}({'|'.join(FOLDERS)})/", rf"]({inside}\1/", markdown)


def _listed(entries: list[Any], there: list[str]) -> list[Any]:
    """The navigation of mkdocs.yml without pages that are not there; `folder/*.md` stands for the pages of a folder, its index aside."""
    result: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            ((title, inner),) = entry.items()
            result += [{title: kept}] if (kept := _listed(inner, there)) else []
        elif entry.endswith("/*.md"):
            folder = entry.removesuffix("*.md")
            result += [page for page in there if page.startswith(folder) and not page.endswith("README.md")]
        elif entry in there:
            result.append(entry)
    return result

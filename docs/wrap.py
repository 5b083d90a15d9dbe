"""Wraps the Markdown of the repository at 100 characters.

    python docs/wrap.py            # rewrites what is wider
    python docs/wrap.py --check    # names what is wider, and exits with 1

Paragraphs and list items are wrapped; tables, code blocks and headings stay as they are. Code in a line is never broken.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDTH = 100
FENCE = re.compile(r"\s*```")
ITEM = re.compile(r"(\s*(?:[-*+]|\d+[.)]|>)\s+)")
FIXED = re.compile(r"\s*(?:$|[|#]|<|!?\[[^]]*\]\([^)]*\)\s*$|\[[^]]+\]:)")
"""Lines that are no paragraph: blank, of a table, headings, HTML, a link or figure alone, where a link leads."""
STARTS = re.compile(r"(?:[-*+>#|]|\d+[.)]|={2,}|-{2,})(?:\s|$)")
"""What would be another thing at the start of a line than within one."""
GLUE = "\0"


def pages() -> list[Path]:
    """Every page that people write."""
    folders = ("docs", "kernels", ".github")
    return [*sorted(ROOT.glob("*.md")), *(page for name in folders for page in sorted((ROOT / name).rglob("*.md")))]


def wrapped(text: str) -> str:
    """A page with its wide paragraphs wrapped."""
    lines: list[str] = []
    for is_prose, block in _blocks(text.split("\n")):
        lines += _filled(block) if is_prose and max(map(len, block)) > WIDTH else block
    return "\n".join(lines)


def _blocks(lines: Sequence[str]) -> Iterator[tuple[bool, list[str]]]:
    """Paragraphs and list items, each as one block, and all that is between them."""
    number, in_code = 0, False
    blocks: list[tuple[tuple[bool, int], str]] = []
    for line in lines:
        is_fence = bool(FENCE.match(line))
        is_prose = not (in_code or is_fence or FIXED.match(line))
        in_code ^= is_fence
        if not is_prose or ITEM.match(line) or (blocks and not blocks[-1][0][0]):
            number += 1
        blocks.append(((is_prose, number), line))
    for (is_prose, _), group in groupby(blocks, key=lambda block: block[0]):
        yield is_prose, [line for _, line in group]


def _filled(block: Sequence[str]) -> list[str]:
    """The lines of a paragraph, no wider than they may be."""
    item = ITEM.match(block[0])
    first = item[1] if item else block[0][: len(block[0]) - len(block[0].lstrip())]
    later = re.sub(r"[^\s>]", " ", first)
    words = " ".join([block[0].removeprefix(first), *block[1:]])
    words = re.sub(r"`[^`]+`", lambda code: re.sub(r"\s+", GLUE, code[0]), words)
    words = " ".join(_glued(words.split()))
    filled = textwrap.wrap(words, WIDTH, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False)
    return [line.replace(GLUE, " ") for line in filled]


def _glued(words: Sequence[str]) -> list[str]:
    """Words that may each begin a line."""
    found: list[str] = []
    for word in words:
        if found and STARTS.match(word):
            found[-1] += GLUE + word
        else:
            found.append(word)
    return found


def main() -> int:
    """The exit status: 1 if `--check` finds something wide."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say what is wider")
    check = parser.parse_args().check
    wide = [(page, text, new) for page in pages() if (new := wrapped(text := page.read_text("utf-8"))) != text]
    for page, _, new in wide:
        if not check:
            page.write_text(new, "utf-8")
        print(f"{page.relative_to(ROOT)} {'is wider than' if check else 'wrapped at'} {WIDTH} characters")
    if check and wide:
        print("Remedy: python docs/wrap.py", file=sys.stderr)
    return int(check and bool(wide))


if __name__ == "__main__":
    sys.exit(main())

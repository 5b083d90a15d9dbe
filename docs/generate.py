"""Fill the generated parts of docs/methods from the methods' own declarations.

    python docs/generate.py            # rewrite what is stale
    python docs/generate.py --check    # name what is stale and exit 1

A generated part stands between `<!-- generated: WHAT -->` and `<!-- end -->`; WHAT is `travels` or `options` on a method's page and
`table` in the index.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from fedrts import catalogue, methods

FOLDER = Path(__file__).parent / "methods"
PART = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->)", re.S)

Makers = dict[str, Callable[[], str]]


def makers(page: str) -> Makers:
    """What can be generated on a page, by the name in its marker."""
    if page == "README":
        return {"table": catalogue.table}
    return {"travels": lambda: catalogue.travels(page), "options": lambda: catalogue.options(page)}


def filled(text: str, made: Makers) -> str:
    """`text` with each generated part as it is now; every one of `made` must have exactly one place."""
    found = [name for _, name, _, _ in PART.findall(text)]
    if sorted(found) != sorted(made):
        raise SystemExit(f"generated parts {found} where {list(made)} belong")
    return PART.sub(lambda part: f"{part[1]}{made[part[2]]()}\n{part[4]}", text)


def main(arguments: Sequence[str] | None = None, folder: Path = FOLDER) -> int:
    """The exit status: 1 if `--check` finds something stale."""
    parser = argparse.ArgumentParser(description="Fill the generated parts of docs/methods.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something is stale")
    check = parser.parse_args(arguments).check
    stale = False
    for page in ["README", *methods.names()]:
        path = folder / f"{page}.md"
        text = path.read_text("utf-8")
        now = filled(text, makers(page))
        if now == text:
            continue
        stale = True
        print(f"{path.name} is stale" if check else f"{path.name} rewritten")
        if not check:
            path.write_text(now, "utf-8")
    return int(check and stale)


if __name__ == "__main__":
    raise SystemExit(main())

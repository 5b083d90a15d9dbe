"""Plays the notebooks of the tutorial and writes them back with their outputs, which the site shows.

python docs/notebooks.py                                    # all of them
python docs/notebooks.py docs/tutorial/03_budget.ipynb      # one
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent / "tutorial"
PARAMETERS = "parameters"
"""The tag of the cell that says how long a notebook takes."""
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
_OVERWRITTEN = re.compile(r"[^\n]*\r")


def notebooks() -> list[Path]:
    """The tutorial, in order."""
    return sorted(FOLDER.glob("*.ipynb"))


def play(path: Path, instead: str | None = None, where: Path | None = None, seconds: int = 900) -> NotebookNode:
    """The notebook with its outputs; `instead` is run after its parameters, to set others. An error in a cell is raised."""
    notebook = nbformat.read(path, as_version=4)
    if instead is not None:
        (place,) = (number for number, cell in enumerate(notebook.cells) if PARAMETERS in cell.metadata.get("tags", []))
        notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(instead))
    path_of_commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # cells call `fedrts`
    resources = {"metadata": {"path": str(where or path.parent)}}
    NotebookClient(notebook, timeout=seconds, record_timing=False, resources=resources).execute(env=os.environ | {"PATH": path_of_commands})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = tidied(cell.outputs)
    return notebook


def tidied(outputs: list[Any]) -> list[Any]:
    """Outputs as a terminal would show them in the end: what was printed in one piece, without colours or overwritten lines."""
    merged: list[Any] = []
    for output in outputs:
        if merged and output.output_type == merged[-1].output_type == "stream" and output.name == merged[-1].name:
            merged[-1].text += output.text
        else:
            merged.append(output)
    for output in merged:
        if output.output_type == "stream":
            output.text = _OVERWRITTEN.sub("", _COLOURS.sub("", output.text).replace("\r\n", "\n"))
    return merged


def main() -> None:
    """Play what is named, or everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", nargs="*", type=Path, help="default: all of the tutorial")
    for path in parser.parse_args().notebook or notebooks():
        print(path, flush=True)
        nbformat.write(play(path), path)


if __name__ == "__main__":
    main()

"""The notebooks of the tutorial run, in a short form; they are kept with the outputs of the long one."""

import importlib.util
import re
from pathlib import Path

import pytest

for needed in ("ipykernel", "pandas", "matplotlib", "flwr"):
    pytest.importorskip(needed, reason=f"{needed} is not installed")
nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs" / "notebooks.py")
assert spec is not None
assert spec.loader is not None
notebooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(notebooks)

SHORT = {
    "01_first_federation": "ROUNDS = 4",
    "02_own_model_and_data": "ROUNDS = 4",
    "03_budget": "BUDGET, SEEDS = '1MB', [0]",
    "04_three_sites": "ROUNDS = 2",
}
"""What takes the place of each notebook's parameters."""
KEPT = {path.stem: nbformat.read(path, as_version=4) for path in notebooks.notebooks()}


def cells(name, kind="code"):
    return [cell for cell in KEPT[name].cells if cell.cell_type == kind]


def printed(notebook):
    return "".join(output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)


def test_all_of_them_are_played():
    assert list(KEPT) == list(SHORT)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SHORT)
def test_a_notebook_runs(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"), prepend=":")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for each other make a busy machine crawl
    played = notebooks.play(notebooks.FOLDER / f"{name}.ipynb", SHORT[name], tmp_path)
    assert len(printed(played)) > 50
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


@pytest.mark.parametrize("name", SHORT)
def test_it_is_kept_as_it_was_played_last(name):
    """Every cell has run in order, without an error or a warning, and shows no colours and no place on somebody's machine."""
    assert [cell.execution_count for cell in cells(name)] == list(range(1, len(cells(name)) + 1))
    outputs = [output for cell in cells(name) for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert not [output.text for output in outputs if output.get("name") == "stderr"]
    assert not re.search(r"\x1b|\r|/(home|root|Users|opt|mnt)/", printed(KEPT[name]))
    assert str(ROOT) not in printed(KEPT[name])


@pytest.mark.parametrize("name", SHORT)
def test_its_links_lead_somewhere(name):
    for cell in cells(name, "markdown"):
        for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", cell.source):
            assert (notebooks.FOLDER / target).exists(), target


def test_outputs_are_kept_as_a_terminal_shows_them():
    texts = [("stdout", "\r10 %"), ("stdout", "\r\x1b[1m100 %\x1b[0m\r\nthere"), ("stderr", "x")]
    outputs = [nbformat.v4.new_output("stream", name=name, text=text) for name, text in texts]
    assert [(output.name, output.text) for output in notebooks.tidied(outputs)] == [("stdout", "100 %\nthere"), ("stderr", "x")]

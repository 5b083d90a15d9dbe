"""The README is short, and its Python runs as it stands there."""

import re
import warnings
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_it_is_short():
    assert len(README.read_text("utf-8").split()) <= 800


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.S)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(code, str(README), "exec"), {"__name__": "example"})
    accuracy, comm_ratio = map(float, capsys.readouterr().out.split())
    assert accuracy > 0.8
    assert comm_ratio < 0.1


def test_no_example_needs_a_folder_that_its_first_run_has_taken():
    pages = [README, *README.parent.glob("docs/**/*.md")]
    taken = [page.name for page in pages if re.search(r"fedrts\.(?:run|train)\([^`]*?\bout=[\"']", page.read_text("utf-8"))]
    assert taken == []


def test_the_experiment_file_of_the_keys_page_resolves(tmp_path):
    from fedrts import config

    (text,) = re.findall(r"```toml\n(.*?)```", (README.parent / "docs/configuration.md").read_text("utf-8"), re.S)
    (tmp_path / "my.toml").write_text(text, "utf-8")
    experiment = config.resolve(config.from_file(tmp_path / "my.toml"))
    assert experiment.density == 0.1
    assert experiment.train.lr == 0.2

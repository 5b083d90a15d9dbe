"""The package of the kernels as others get it: a wheel, built with a C compiler or without one."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", reason="builds the wheel")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # it compiles
KERNELS = Path(__file__).parents[2] / "kernels"
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
BUILD = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"


def built(folder: Path, **environment: str) -> tuple[Path, str]:
    """The wheel, unpacked, as an installer leaves it; and what the build said."""
    source = shutil.copytree(KERNELS, folder / "source", ignore=shutil.ignore_patterns("*.so", "build", "*.egg-info", "__pycache__"))
    here = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=source, env=here, capture_output=True, text=True, check=True)
    (wheel,) = (source / "dist").iterdir()
    assert "-py3-none-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed", done.stderr


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
def test_a_wheel_loads_where_there_is_no_compiler(tmp_path):
    installed, _ = built(tmp_path)
    script = "import fedrts_kernels, sys; print(fedrts_kernels.FILE, *fedrts_kernels.load().isas); assert 'torch' not in sys.modules"
    alone = {"PATH": str(tmp_path), "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", script], env=alone, cwd=tmp_path, capture_output=True, text=True, check=True)
    file, *isas = done.stdout.split()
    assert Path(file).parent == installed / "fedrts_kernels"
    assert isas[0] == "portable"


def test_without_a_compiler_it_installs_and_a_run_says_in_one_line_that_it_computes_densely(tmp_path):
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    installed, said = built(tmp_path, PATH=str(nothing), CC="")
    assert "there is no C compiler (cc, gcc or clang): installed without the library, models compute densely" in said
    assert not list(installed.rglob("*.so"))
    here = {**os.environ, "PYTHONPATH": str(installed), "FEDRTS_KERNELS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "fedrts", "run", "--density", "0.1", "--rounds", "1", "--epochs", "1", "--device", "cpu"]
    done = subprocess.run([*command, "--out", tmp_path / "run"], env=here, capture_output=True, text=True, check=True)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "densely" in line]
    assert len(lines) == 1, lines
    assert "clients compute densely: fedrts-kernels was installed without a C compiler: install one, and fedrts-kernels again" in lines[0]

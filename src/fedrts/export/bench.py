"""A trained model run in several ways on one core, by our kernels, torch and onnxruntime: time, memory, size, and whether they agree.

Every way is a process of its own, with what it needs and nothing else. They take turns, one running while the others wait; medians count.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors.torch
from numpy.typing import NDArray

from fedrts import config, data, trees
from fedrts.api import loading
from fedrts.errors import InputError, reason
from fedrts.export.onnx import TOLERANCE, onnx_bytes
from fedrts.export.sparse import archived
from fedrts.programs import library
from fedrts.programs.library import NoKernelsError
from fedrts.runs.folder import RunFolder, Trust

KERNELS, PROGRAM, TORCH, ONNX = "kernels, from Python", "kernels, C program", "torch, dense", "onnxruntime"
_SLICE = 0.02
"""Seconds that a way has at a time."""
_LEAST_TURNS = 5


@dataclass
class WayFigures:
    """The figures of one backend; without figures it is not available."""

    bytes: int | None = None
    memory_mb: float | None = None
    """The most that the process took, at the largest batch."""
    latency_ms: dict[int, float] = field(default_factory=dict)
    """By batch size, of a batch."""
    difference: float = 0.0
    """The largest of an output from torch's, as a share of max(1, largest output)."""
    absent: str | None = None


@dataclass(frozen=True)
class Benched:
    """All backends of one model."""

    model: str
    density: float
    ways: dict[str, WayFigures]

    @property
    def disagreeing(self) -> list[str]:
        """Backends whose outputs differ from torch's."""
        return [name for name, found in self.ways.items() if found.absent is None and not found.difference <= TOLERANCE]

    def as_dict(self) -> dict[str, Any]:
        ways = {name: {key: value for key, value in asdict(found).items() if value is not None} for name, found in self.ways.items()}
        return {"model": self.model, "density": self.density, "agree": not self.disagreeing, "ways": ways}


def bench_run(
    path: Path, batches: Sequence[int], data_dir: Path | None = None, trust: Trust = False, average: bool = False, seconds: float = 1.0
) -> Benched:
    """Time the model of a run folder on batches of these sizes of its test data, `seconds` per backend and size."""
    folder = RunFolder(path)
    with folder.trusted(trust):
        experiment = config.resolve(config.from_file(folder.experiment_file()), loading.ANYWHERE)
        if config.CUSTOM in (experiment.model, experiment.data):
            raise InputError(f"the run in {path} has a model or data given in Python: there is nothing to build or to try it with")
        module = loading.load(path, data_dir=data_dir, average=average, trust=trust)
        held = data.load(experiment.data, experiment.data_options, data_dir)
        archive = archived(module, experiment, held, "float32")
        rows = held.test_x if trees.count(held.test_y) else held.x
    tensors = module.state_dict()
    with tempfile.TemporaryDirectory() as home:
        files = {name: Path(home, name) for name in ("model.frts", "model.safetensors", "model.onnx")}
        files["model.frts"].write_bytes(archive)
        files["model.safetensors"].write_bytes(safetensors.torch.save(tensors))
        some = np.arange(max(batches)) % trees.count(rows)
        inputs = held.inputs(trees.at(rows, some))
        if not hasattr(inputs, "numpy"):
            raise InputError(f"the model of {path} reads several tensors, and only one can be tried")
        ways = {KERNELS: _kernels(archive), PROGRAM: _kernels(archive), TORCH: WayFigures(), ONNX: WayFigures()}
        try:
            files["model.onnx"].write_bytes(onnx_bytes(module, inputs))
        except InputError as error:
            ways[ONNX].absent = reason(error)
        sizes = {KERNELS: "model.frts", PROGRAM: "model.frts", TORCH: "model.safetensors", ONNX: "model.onnx"}
        for name, found in ways.items():
            found.bytes = files[sizes[name]].stat().st_size if found.absent is None else None
        allowed = [word for named in config.foreign(experiment.model_dump(mode="json")) for word in ("--allow", named)]  # which ran here
        for batch in sorted(batches):
            _measure(ways, Path(home), inputs[:batch].numpy(), files, allowed, seconds)
    active = sum(int(tensors[name].count_nonzero()) for name, _ in module.named_parameters())
    return Benched(experiment.model, active / sum(p.numel() for p in module.parameters()), ways)


def _kernels(archive: bytes) -> WayFigures:
    """Whether the kernels can run it here."""
    try:
        library.kernels()
        import fedrts_kernels

        fedrts_kernels.Model(archive)
        return WayFigures()
    except (NoKernelsError, ValueError) as error:
        return WayFigures(absent=reason(error))


def _measure(
    ways: Mapping[str, WayFigures], home: Path, x: NDArray[Any], files: Mapping[str, Path], allowed: Sequence[str], seconds: float
) -> None:
    """Measure the figures of one batch."""
    np.save(home / "inputs.npy", x)
    python = [sys.executable, "-m", "fedrts.export.way"]
    commands = {
        KERNELS: [*python, "kernels", files["model.frts"], home / "inputs.npy", home / "kernels.npy"],
        TORCH: [*python, "torch", files["model.frts"], home / "inputs.npy", home / "torch.npy", *allowed],
        ONNX: [*python, "onnxruntime", files["model.onnx"], home / "inputs.npy", home / "onnx.npy"],
    }
    outputs = {KERNELS: "kernels.npy", PROGRAM: "program.npy", TORCH: "torch.npy", ONNX: "onnx.npy"}
    here = [name for name, found in ways.items() if found.absent is None]
    if PROGRAM in here:
        import fedrts_kernels

        program = [fedrts_kernels.PROGRAM, files["model.frts"], home / "inputs.npy", "--batch", len(x)]
        _once([*program, "--out", home / "program.npy"])
        commands[PROGRAM] = [*program, "--bench"]
    with contextlib.ExitStack() as stack:
        asked = {name: stack.enter_context(_asking(commands[name], waits=name != PROGRAM)) for name in here}
        for name, found in _interleaved(asked, seconds).items():
            ways[name].latency_ms[len(x)] = 1e3 * found
        for name in here:
            ways[name].memory_mb = asked[name](0) / 1024
    wanted = np.load(home / outputs[TORCH])
    scale = max(1.0, float(np.abs(wanted).max()))
    for name in here:
        given = np.load(home / outputs[name])
        found = float(np.abs(given - wanted).max()) / scale if given.shape == wanted.shape else float("inf")
        ways[name].difference = max(ways[name].difference, found)


def _interleaved(asked: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """Return median seconds per run, with the backends in turn and about equal time for each."""
    runs = {name: max(1, min(10_000, int(_SLICE / max(ask(1), 1e-7)))) for name, ask in asked.items()}
    took: dict[str, list[float]] = {name: [] for name in asked}
    until = time.monotonic() + seconds * len(asked)
    while min(map(len, took.values())) < _LEAST_TURNS or time.monotonic() < until:
        for name, ask in asked.items():
            took[name].append(ask(runs[name]))
    return {name: statistics.median(found) for name, found in took.items()}


@contextlib.contextmanager
def _asking(command: Sequence[object], waits: bool) -> Iterator[Any]:
    """Yield a process that answers numbers with numbers (`fedrts.export.way`); it ends with the block."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, env=_environment()
        )
        assert process.stdin is not None
        assert process.stdout is not None
        ends: tuple[IO[str], IO[str]] = process.stdin, process.stdout

        def ask(runs: int) -> float:
            with contextlib.suppress(BrokenPipeError):
                print(runs, file=ends[0], flush=True)
            return float(answer())

        def answer() -> str:
            line = ends[1].readline()
            if not line:
                process.wait()
                said.seek(0)
                raise InputError(f"{Path(str(command[0])).name} failed: {(said.read().strip().splitlines() or ['nothing was said'])[-1]}")
            return line

        try:
            if waits:
                answer()
            yield ask
        finally:
            process.kill()
            process.communicate()


def _once(command: Sequence[object]) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"the program fails on this model: {done.stderr.strip()}")


def _environment() -> dict[str, str]:
    """Return the environment of a one-core process that finds the same modules as this one."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

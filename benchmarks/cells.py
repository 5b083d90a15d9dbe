"""Playing the cells of studies for a given time, several at once, and carrying what came of them in one file.

Each cell is an ordinary run in a folder of its own, played by `fedrts run` and, where it was cut off, `fedrts resume`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from fedrts.comparison.pool import cores
from fedrts.errors import InputError
from studies import Scores

RESULT_FILES = ("experiment.toml", "summary.json", "history.jsonl", "topology.jsonl", "played.json", "diverged.json")
"""What is kept of a finished run."""
DIVERGED = "usable replies"
"""Part of the line with which a run ends whose updates are no numbers any more."""
JOBS_ON_GPU = 6
"""Cells that share a GPU under its Multi-Process Service: six get most out of one."""
WORTH = 45.0
"""Seconds that a cell must have before it is cut off, to be worth its start."""
RESERVE = 20.0
"""Seconds, or a tenth of the time where that is less, in which cells stop and the file is written."""
TOO_MANY = 3
"""Failures in a row that no cell is to blame for."""
MOST_BYTES = 15 << 20
"""Most bytes of the file; checkpoints that do not fit are left out."""
GPU_SECONDS = {"resnet18_small": 32 / 200}
"""What a round costs until results tell: seconds between the ends of two cells, over their rounds."""
UNKNOWN_SECONDS = 0.5


class Cell(Protocol):
    """One run of a study."""

    @property
    def study(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def settings(self) -> Mapping[str, Any]: ...
    @property
    def recipe(self) -> str: ...


class Study(Protocol):
    """Knows which cells are needed, given the scores of those that are finished."""

    def cells(self, name: str, scores: Scores) -> Iterator[Cell]: ...


class Process(Protocol):
    """A cell that runs."""

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


Launch = Callable[[Sequence[str], Path], Process]
"""Starts a `fedrts` command whose errors go to a file."""


@dataclass
class Known:
    """Finished cells of a study: trials with their scores, runs, and runs that diverged, by name."""

    trials: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    diverged: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        return cls(*({entry["cell"]: entry for entry in raw.get(kind, [])} for kind in ("trials", "runs", "diverged")))

    @property
    def scores(self) -> Scores:
        return {name: entry["valid_accuracy"] for name, entry in self.trials.items()}

    def result(self, cell: str) -> str:
        """What a finished cell came to, in words."""
        if cell in self.runs:
            return f"test accuracy {self.runs[cell]['summary']['accuracy_last10']:.4f}"
        score = self.scores.get(cell)
        return "diverged" if score is None else f"validation accuracy {score:.4f}"

    def __contains__(self, cell: str) -> bool:
        return cell in self.trials or cell in self.runs or cell in self.diverged

    def entries(self) -> Iterator[Mapping[str, Any]]:
        for kind in (self.trials, self.runs, self.diverged):
            yield from kind.values()


class Costs:
    """Seconds of a GPU that a cell needs, learned from those that are finished."""

    def __init__(self, known: Sequence[Known]) -> None:
        self.rates: dict[tuple[str, ...], list[float]] = {}
        for entry in (entry for study in known for entry in study.entries()):
            self.learn(entry.get("played"))

    def learn(self, played: Mapping[str, Any] | None) -> None:
        if played:
            rate = played["gpu_seconds"] / played["rounds"]
            for key in ((played["model"], played["method"]), (played["model"],)):
                self.rates.setdefault(key, []).append(rate)

    def of(self, cell: Cell, done: int = 0) -> float:
        """Return the seconds of the rounds that are not `done`."""
        settings = cell.settings
        model = settings["model"]
        known = self.rates.get((model, settings["method"])) or self.rates.get((model,))
        rate = statistics.median(known) if known else GPU_SECONDS.get(model, UNKNOWN_SECONDS)
        return float(rate * max(settings["rounds"] - done, 1))


def missing(studies: Mapping[str, Study], known: Mapping[str, Known]) -> Iterator[Cell]:
    """Cells that can be played now, in declared order."""
    for name, study in studies.items():
        yield from (cell for cell in study.cells(name, known[name].scores) if cell.name not in known[name])


@dataclass
class _Running:
    cell: Cell
    process: Process
    log: Path
    started: float


@dataclass
class Sitting:
    """Plays missing cells, `jobs` at a time, and tells how it goes; `read` adds what a run came to to what is known."""

    studies: Mapping[str, Study]
    known: dict[str, Known]
    folder: Path
    jobs: int
    read: Callable[[Path, Known], None]
    data_dir: Path | None = None
    launch: Launch | None = None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    tell: Callable[[str], None] = print
    failed: dict[str, str] = field(default_factory=dict)
    """Why cells that did not diverge ended without a result; they are tried again next time."""
    failures_in_a_row: int = 0

    def play(self, seconds: float) -> int:
        """Play for so long, and no longer; the number of cells that were finished."""
        started = self.clock()
        stop = started + seconds - min(RESERVE, seconds / 10)
        for name, study in self.known.items():
            for folder in sorted((self.folder / name / "runs").glob("*")):
                if is_over(folder) and folder.name not in study:
                    self.read(folder, study)
        self.costs = Costs(list(self.known.values()))
        running: list[_Running] = []
        finished = 0
        try:
            while self.clock() < stop:
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    finished += self._ended(one)
                if self.failures_in_a_row >= TOO_MANY:
                    self.tell(f"{TOO_MANY} cells in a row failed: mend the cause first")
                    break
                while len(running) < self.jobs and (cell := self._next(running, stop - self.clock())) is not None:
                    running.append(self._start(cell))
                if not running:
                    break
                self.sleep(0.2)
        finally:
            self._cut_off(running, started + seconds)
        return finished

    def _next(self, running: Sequence[_Running], left: float) -> Cell | None:
        """The first cell that fits; one that is long may be cut off, if it gets far enough to be worth it."""
        busy = {(one.cell.study, one.cell.name) for one in running}
        for cell in missing(self.studies, self.known):
            if (cell.study, cell.name) in busy or cell.name in self.failed:
                continue
            if min(self.costs.of(cell, rounds_done(self._home(cell))) * self.jobs, WORTH) <= left:
                return cell
        return None

    def _home(self, cell: Cell) -> Path:
        return self.folder / cell.study / "runs" / cell.name

    def _start(self, cell: Cell) -> _Running:
        home = self._home(cell)
        home.parent.mkdir(parents=True, exist_ok=True)
        done = rounds_done(home)
        arguments = ["resume", str(home)] if (home / "experiment.toml").exists() else command(cell, home)
        arguments += ["--quiet"] + ([] if self.data_dir is None else ["--data-dir", str(self.data_dir)])
        log = self.folder / cell.study / f"{cell.name}.log"
        rest = f" from round {done}" if done else ""
        self.tell(f"{cell.study} {cell.name}: started{rest}")
        return _Running(cell, (self.launch or launched)(arguments, log), log, self.clock())

    def _ended(self, one: _Running) -> int:
        """Take note of a process that is over; 1 if its cell is finished."""
        home = self._home(one.cell)
        self._account(one)
        log = one.log.read_text("utf-8", "replace").strip() if one.log.exists() else ""
        reason = log.rpartition("\n")[2] or f"ended with code {one.process.poll()}"
        if DIVERGED in log and home.exists():
            (home / "diverged.json").write_text(json.dumps({"reason": reason}), "utf-8")
        if not is_over(home):
            self.failed[one.cell.name] = reason
            self.failures_in_a_row += 1
            self.tell(f"{one.cell.study} {one.cell.name}: failed: {reason}")
            return 0
        self.failures_in_a_row = 0
        self.read(home, self.known[one.cell.study])
        self.costs.learn(played_of(home))
        result = self.known[one.cell.study].result(one.cell.name)
        self.tell(f"{one.cell.study} {one.cell.name}: finished after {self.clock() - one.started:.0f} s, {result}")
        return 1

    def _account(self, one: _Running) -> None:
        """Add what a cell had of the GPU to what it had before, where there is anything to go on from."""
        home, settings = self._home(one.cell), one.cell.settings
        file = home / "played.json"
        if not (home / "experiment.toml").exists():
            return
        before = json.loads(file.read_text("utf-8"))["gpu_seconds"] if file.exists() else 0.0
        seconds = before + (self.clock() - one.started) / self.jobs
        facts = {"model": settings["model"], "method": settings["method"], "rounds": settings["rounds"]}
        file.write_text(json.dumps({**facts, "gpu_seconds": round(seconds, 2)}), "utf-8")

    def _cut_off(self, running: Sequence[_Running], end: float) -> None:
        """Stop what runs; each goes on from its checkpoint next time."""
        for one in running:
            one.process.terminate()
        for one in running:
            try:
                one.process.wait(max(1.0, end - self.clock() - 5))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
            if is_over(self._home(one.cell)):
                self._ended(one)
            else:
                self._account(one)
                done, rounds = rounds_done(self._home(one.cell)), one.cell.settings["rounds"]
                self.tell(f"{one.cell.study} {one.cell.name}: cut off after {done} of {rounds} rounds")


def command(cell: Cell, out: Path | str) -> list[str]:
    """The arguments of `fedrts` that play a cell."""
    pairs = [("--set", f"{key}={json.dumps(value)}") for key, value in cell.settings.items()]
    return ["run", "--recipe", cell.recipe, *(word for pair in pairs for word in pair), "--out", str(out)]


def launched(arguments: Sequence[str], log: Path) -> Process:
    with open(log, "wb") as file:
        return subprocess.Popen([sys.executable, "-m", "fedrts", *arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def is_over(home: Path) -> bool:
    """Did a cell come to its end, or diverge?"""
    return (home / "summary.json").exists() or (home / "diverged.json").exists()


def played_of(home: Path) -> dict[str, Any] | None:
    """What a cell cost; of one that diverged, and stopped early, nothing."""
    file = home / "played.json"
    return json.loads(file.read_text("utf-8")) if file.exists() and (home / "summary.json").exists() else None


def rounds_done(home: Path) -> int:
    """Rounds after which a cell goes on."""
    newest = _newest_checkpoint(home)
    return int(newest.name[:8]) if newest is not None else 0


def _newest_checkpoint(home: Path) -> Path | None:
    return max((home / "checkpoint").glob("*.safetensors"), default=None)


@contextlib.contextmanager
def shared_machine(jobs: int, on_gpu: bool) -> Iterator[None]:
    """Processes that are started inside share the cores, and the GPU under its Multi-Process Service where there is one."""
    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores() // jobs))
    control = shutil.which("nvidia-cuda-mps-control") if on_gpu else None
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as private:
        if control is not None:
            os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": private, "CUDA_MPS_LOG_DIRECTORY": private}
            if subprocess.run([control, "-d"], check=False).returncode:
                print("the Multi-Process Service does not start: cells share the GPU without it")
                os.environ.pop("CUDA_MPS_PIPE_DIRECTORY")
                control = None
        try:
            yield
        finally:
            if control is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    subprocess.run([control], input=b"quit\n", check=False, timeout=10)
            os.environ.clear()
            os.environ.update(before)


def pack(folder: Path, file: Path, known: Mapping[str, Known]) -> int:
    """Write the results of a folder, less those that are `known`, and what cells that were cut off go on from; how many cells it has."""
    homes = [home for name in known for home in sorted((folder / name / "runs").glob("*")) if home.name not in known[name]]
    count, partial = 0, file.with_name(file.name + ".tmp")
    partial.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(partial, "w:gz") as tar:
        for home in sorted(homes, key=lambda home: not is_over(home)):
            files = [home / name for name in RESULT_FILES if (home / name).exists()]
            if not is_over(home):
                files += filter(None, [_newest_checkpoint(home)])
                if not rounds_done(home) or partial.stat().st_size + sum(path.stat().st_size for path in files) > MOST_BYTES:
                    continue  # it starts anew
            for path in files:
                tar.add(path, str(path.relative_to(folder)))
            count += 1
    partial.replace(file)
    return count


@contextlib.contextmanager
def unpacked(file: Path, beside: Path | None = None) -> Iterator[Path]:
    """The folder that a file was packed from, for a while."""
    with tempfile.TemporaryDirectory(dir=beside) as place:
        try:
            with tarfile.open(file, "r:gz") as tar:
                tar.extractall(place, filter="data")
        except (OSError, tarfile.TarError, EOFError) as error:
            raise InputError(f"{file} is no file that `play` wrote: {error}") from error
        yield Path(place)


def restore(file: Path, folder: Path, studies: Iterable[str]) -> None:
    """Put what a file carries where it is missing, so that cells that were cut off go on."""
    folder.mkdir(parents=True, exist_ok=True)
    with unpacked(file, folder) as place:
        for home in (home for name in studies for home in (place / name / "runs").glob("*")):
            target = folder / home.relative_to(place)
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                home.rename(target)

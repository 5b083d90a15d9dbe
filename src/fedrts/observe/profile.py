"""Profiling: a trace of some rounds, and two tables."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from fedrts.errors import note
from fedrts.server.phases import PHASES, span

if TYPE_CHECKING:
    from fedrts.config import Experiment
    from fedrts.server.rounds import Record

WARM_UP = 2
"""Rounds before the first that is profiled: programs are recorded and graphs captured in them."""
PROFILED = {"cpu": 3, "cuda": 1}
"""Rounds that are profiled: on a GPU one has a hundred thousand kernels."""
_ROWS = 25


class ProfileObserver:
    """Profile some rounds after the first ones, into the folder `profile` of the run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._profile: profile | None = None
        self._seconds = 0.0
        self._rounds = 0

    def started(self, experiment: Experiment, facts: dict[str, Any], first_round: int) -> None:
        left = experiment.rounds - first_round
        self._wait = min(WARM_UP, left - 1)
        self._count = min(PROFILED[experiment.device.partition(":")[0]], left - self._wait)
        if self._wait == 0:
            self._start(experiment.device)
        self._device = experiment.device

    def played(self, record: Record) -> None:
        if record.round < 0:
            return  # a set-up, which happens once
        if self._profile is not None:
            self._rounds, self._seconds = self._rounds + 1, self._seconds + record.seconds
            if self._rounds == self._count:
                self.stopped()
            return
        self._wait -= 1
        if self._wait == 0:
            self._start(self._device)

    def finished(self, summary: dict[str, Any]) -> None: ...

    def stopped(self) -> None:
        """Write what was profiled, once."""
        running, self._profile = self._profile, None
        if running is None:
            return
        running.stop()
        if self._rounds:
            self.folder.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(self.folder / "trace.json.gz"))
            (self.folder / "profile.txt").write_text(self._tables(running), "utf-8")
            note(f"where the time went is in {self.folder}: profile.txt, and trace.json.gz to look at in ui.perfetto.dev")

    def _start(self, device: str) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would print when it starts and stops
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.startswith("cuda") else [])]
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # those that share the clients too
        self._profile = profile(activities=activities, experimental_config=every_thread, acc_events=True)
        self._profile.start()

    def _tables(self, running: profile) -> str:
        found = running.key_averages()
        spans: Counter[str] = Counter()
        for event in found:  # a span has a second entry for what it did on the GPU
            spans[event.key] += event.cpu_time_total / 1e6
        times = {name: spans[span(name)] for name in PHASES}
        whole = self._seconds + times["writing"]
        lines = [f"{self._rounds} rounds, {whole / self._rounds:.4f} s each", "", f"{'phase':<12}{'s a round':>12}{'share':>9}"]
        rest = {"other": max(whole - sum(times.values()), 0.0)}
        lines += [f"{name:<12}{time / self._rounds:>12.6f}{time / whole:>9.1%}" for name, time in (times | rest).items()]
        cuda = running.activities is not None and ProfilerActivity.CUDA in running.activities
        order = "self_device_time_total" if cuda else "self_cpu_time_total"
        return "\n".join([*lines, "", str(found.table(sort_by=order, row_limit=_ROWS, max_name_column_width=48))]) + "\n"

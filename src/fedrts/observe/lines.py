"""Progress as lines of a log: every round is one, with its figures as fields."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fedrts.logs import info, tell, warning
from fedrts.observe.progress import Progress, megabytes
from fedrts.server.collect import EXCUSED
from fedrts.tasks.metrics import of_run

if TYPE_CHECKING:
    from fedrts.config import Experiment
    from fedrts.server.rounds import Record

_JUDGING_SECONDS = 30
"""Seconds between two lines about the final evaluation."""


class LineObserver:
    """Logs what happens in a run, line by line, without bars and tables."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.progress, self.clock = Progress(clock), clock
        self.said = clock()
        """When the last line about the final evaluation was told."""

    def started(self, experiment: Experiment, facts: dict[str, Any], first_round: int) -> None:
        self.progress.start(experiment, facts, first_round)
        e, names = experiment, ("parameters", "active", "density", "engine")
        words = f"{e.method} · {e.data} · {e.model} · {e.clients.per_round} of {e.clients.total} clients a round · seed {e.seed}"
        settings = {"method": e.method, "data": e.data, "model": e.model, "rounds": e.rounds, "seed": e.seed, "out": e.out}
        _show(info("started", words, round=first_round, **settings, **{name: facts[name] for name in names}))

    def played(self, record: Record) -> None:
        self.progress.play(record)
        for entry in record.rejected:
            if entry["reason"] not in EXCUSED:
                words = f"round {record.round}: rejected client {entry['client']}: {entry['reason']}"
                _show(warning("rejected", words, round=record.round, client=entry["client"], reason=entry["reason"]))
        line = record.as_dict()
        metrics = {name: line[name] for name in record.metric_keys if line.get(name) is not None}
        sizes = {"bytes": record.upload_bytes + record.download_bytes, "seconds": record.seconds}
        words = f"round {self.progress.done} of {self.progress.rounds} · {' · '.join(self.progress.status.values())}"
        _show(info("round", words, round=record.round, clients=record.clients, **sizes, density=record.density, **metrics))

    def judging(self, done: int, total: int) -> None:
        self.progress.judge(done, total)
        if self.clock() - self.said >= _JUDGING_SECONDS:
            self.said = self.clock()
            words = f"judging the model by class and client · {self.progress.share:.0%} of {total:,} samples"
            _show(info("judging", words, done=done, samples=total))

    def finished(self, summary: dict[str, Any]) -> None:
        self.progress.finish()
        sent, first = summary["upload_bytes"] + summary["download_bytes"], of_run(summary)[0]
        value = summary.get(first.name)
        judged = "" if value is None else f" · {first.name} {first.text(value)}"
        words = f"{summary['method']} on {summary['data']} after {summary['rounds']} rounds{judged} · {megabytes(sent)} sent"
        fields = {"rounds": summary["rounds"], "bytes": sent, "seconds": summary["seconds"], "density": summary["density"]}
        _show(info("finished", words, **fields, **({} if value is None else {first.name: value})))

    def stopped(self) -> None: ...


def _show(text: str) -> None:
    tell(text, "stdout")

"""Observers: they follow a run and change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from fedrts.config import Experiment
    from fedrts.server.rounds import Record


class Observer(Protocol):
    """Base class of observers: one method per step of a run."""

    def started(self, experiment: Experiment, facts: dict[str, Any], first_round: int) -> None:
        """The run is about to play `first_round`; `facts` describe model and federation."""
        ...

    def played(self, record: Record) -> None:
        """A round is over."""
        ...

    def finished(self, summary: dict[str, Any]) -> None:
        """The run is complete."""
        ...

    def stopped(self) -> None:
        """The run ends here, complete or not."""
        ...


@runtime_checkable
class Judging(Protocol):
    """An observer that is also told the progress of the final evaluation."""

    def judging(self, done: int, total: int) -> None:
        """Progress of the final evaluation by class and by client, in samples."""
        ...


def judging(observer: Observer, done: int, total: int) -> None:
    """Notify an observer of the progress, if it has this method."""
    if isinstance(observer, Judging):
        observer.judging(done, total)


class Silent:
    """An observer that shows nothing."""

    def started(self, experiment: Experiment, facts: dict[str, Any], first_round: int) -> None: ...

    def played(self, record: Record) -> None: ...

    def finished(self, summary: dict[str, Any]) -> None: ...

    def stopped(self) -> None: ...


class Several:
    """Forward events to several observers in turn."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    def started(self, experiment: Experiment, facts: dict[str, Any], first_round: int) -> None:
        for observer in self.observers:
            observer.started(experiment, facts, first_round)

    def played(self, record: Record) -> None:
        for observer in self.observers:
            observer.played(record)

    def finished(self, summary: dict[str, Any]) -> None:
        for observer in self.observers:
            observer.finished(summary)

    def judging(self, done: int, total: int) -> None:
        for observer in self.observers:
            judging(observer, done, total)

    def stopped(self) -> None:
        for observer in self.observers:
            observer.stopped()

"""The interface of an engine, which runs the clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fedrts.client.figures import FigureForm
from fedrts.client.order import Failure, Order, Reply
from fedrts.methods.contract import State
from fedrts.server.collect import Arrival, Question, Tally
from fedrts.tasks import Metrics


class Engine(Protocol):
    """Run exchanges with clients, and evaluate the server's model."""

    @property
    def label(self) -> str:
        """A short name of this engine and its mode."""
        ...

    def run(self, order: Order, clients: Sequence[int]) -> Iterator[Reply | Failure]:
        """Yield the untrusted replies of `clients` to an order, as they come."""
        ...

    def evaluate(self, state: State) -> Metrics:
        """Return metrics of the server's model on the test set, and `valid_…` of the followed ones if there is a validation set."""
        ...


@runtime_checkable
class Gathering(Protocol):
    """An engine whose clients work side by side, so that replies of many are one."""

    def run_together(self, order: Order, clients: Sequence[int]) -> Iterator[Arrival]:
        """Yield what `run` does, as few replies as there can be."""
        ...


def arrivals(engine: Engine, order: Order, clients: Sequence[int]) -> Iterator[Arrival]:
    """Yield the replies of an engine's clients, those that can be as one."""
    return engine.run_together(order, clients) if isinstance(engine, Gathering) else engine.run(order, clients)


@runtime_checkable
class Adding(Protocol):
    """An engine whose workers judge and add up their clients' replies themselves, so that only sums come back."""

    def answer(self, question: Question) -> Tally: ...


@dataclass(frozen=True)
class Figures:
    """Sums of the clients' metrics of a model."""

    means: dict[str, float]
    """Over samples, by name; empty where there was no sum."""
    clients: tuple[int, ...]
    """Who is in it."""
    missing: dict[int, str]
    """Who is not, and why."""
    bytes: int
    samples: int = 0
    """Samples of all clients in the sum."""


@runtime_checkable
class Secretive(Protocol):
    """An engine that learns only sums over clients."""

    def figures(self, order: Order, samples: Mapping[int, int], form: Callable[[int], FigureForm]) -> Figures: ...


@runtime_checkable
class Remote(Protocol):
    """An engine whose clients are other people's machines, which may leave for good or be late repeatedly."""

    @property
    def departed(self) -> Mapping[int, str]:
        """Clients that no longer take part, each with the reason."""
        ...

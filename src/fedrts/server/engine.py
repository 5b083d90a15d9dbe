"""What the rounds ask of an engine, which runs the clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fedrts.client.figures import FigureForm
from fedrts.client.order import Failure, Order, Reply
from fedrts.methods.contract import State
from fedrts.server.collect import Question, Tally
from fedrts.tasks import Metrics


class Engine(Protocol):
    """Runs exchanges with clients, and evaluates the server's model."""

    @property
    def label(self) -> str:
        """Which engine this is and how it works, in a few words."""
        ...

    def run(self, order: Order, clients: Sequence[int]) -> Iterator[Reply | Failure]:
        """The replies of `clients` to an order, as they come; none of them is to be trusted."""
        ...

    def evaluate(self, state: State) -> Metrics:
        """Metrics of the server's model on the test set, and `valid_…` of the followed ones where there is a validation set."""
        ...


@runtime_checkable
class Adding(Protocol):
    """An engine whose workers judge and add up the replies of their clients themselves, so that only sums come back."""

    def answer(self, question: Question) -> Tally: ...


@dataclass(frozen=True)
class Figures:
    """What clients say of a model, in sum."""

    means: dict[str, float]
    """Over samples, by name; empty where there was no sum."""
    clients: tuple[int, ...]
    """Who is in it."""
    missing: dict[int, str]
    """Who is not, and why."""
    bytes: int
    samples: int = 0
    """Of all who are in it."""


@runtime_checkable
class Secretive(Protocol):
    """An engine that learns sums alone of what clients say of a model."""

    def figures(self, order: Order, samples: Mapping[int, int], form: Callable[[int], FigureForm]) -> Figures: ...


@runtime_checkable
class Remote(Protocol):
    """An engine whose clients are other people's machines: they leave for good, and some are late again and again."""

    @property
    def departed(self) -> Mapping[int, str]:
        """Clients that take part no more, each with the reason."""
        ...

"""Engines run the clients of an exchange. They know no methods, and methods know no engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from fedrts.client import Reply
from fedrts.methods.contract import Exchange, State
from fedrts.tasks import Metrics


class Engine(Protocol):
    """Runs exchanges with clients, and evaluates the server's model."""

    def run(self, exchange: Exchange, state: State, round_index: int, clients: Sequence[int]) -> Iterator[Reply]:
        """The replies of `clients`, as they come."""
        ...

    def evaluate(self, state: State) -> Metrics:
        """Metrics of the server's model on the test set."""
        ...

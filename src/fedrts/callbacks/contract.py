"""The interface of callbacks. They see copies, so nothing that they do changes the run."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedrts.errors import InputError, nearest
from fedrts.methods.contract import State
from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.tasks.metrics import LOSS, Metric, leading

if TYPE_CHECKING:
    from fedrts.config import Experiment
    from fedrts.server.rounds import Played, Record


@dataclass(frozen=True)
class RunView:
    """A run that starts or continues."""

    experiment: Experiment
    settings: Mapping[str, Any]
    """All its keys and their values, as `table.key`."""
    facts: Mapping[str, Any]
    """Facts about model and federation, as observers get them."""
    layout: Layout
    """The order of the model's tensors, and which may be pruned."""
    mask: Mask
    """A copy of the mask from which it continues; a method that chooses its mask in a set-up begins with all links."""
    first_round: int
    """The first round that is played now."""
    history: Sequence[Mapping[str, Any]]
    """Lines of the rounds before, as in history.jsonl."""
    declared: Sequence[Metric]
    """What evaluations give."""
    validated: bool = False
    """Is there a validation split?"""
    folder: Path | None = None
    """The run folder, where there is one."""

    @property
    def layers(self) -> dict[str, int]:
        """The number of links of each prunable layer, by name."""
        return {entry.name: entry.size for entry in self.layout.layers}

    def metric(self, name: str | None) -> tuple[str, Metric]:
        """Return the key in a line of history that a model is judged by, and its metric: the named one, or the leading one.

        On the validation split where there is one and the metric is followed there.
        """
        by_name = {LOSS.name: LOSS, **{metric.name: metric for metric in self.declared}}
        plain = leading(self.declared).name if name is None else name.removeprefix("valid_")
        if plain not in by_name:
            raise InputError(f"there is no metric '{plain}' in this run{nearest(plain, by_name)}")
        metric = by_name[plain]
        followed = self.validated and (metric.followed or metric is leading(self.declared))
        return f"valid_{plain}" if followed or plain != (name or plain) else plain, metric


@dataclass
class RoundView:
    """A finished round."""

    run: RunView
    played: Played = field(repr=False)
    asked: list[str] = field(default_factory=list, repr=False)
    """Why the run is to stop here."""

    @property
    def index(self) -> int:
        """The round's index, counted from 0; -1 is the set-up that some methods hold before."""
        return self.played.record.round

    @property
    def outer(self) -> bool:
        """Whether the topology could change."""
        return self.played.record.outer

    @property
    def record(self) -> Record:
        """A copy of the round's record."""
        return copy.deepcopy(self.played.record)

    @cached_property
    def line(self) -> dict[str, Any]:
        """The round's line of history.jsonl."""
        return self.record.as_dict()

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics evaluated in this round, by name; empty in rounds without evaluation (`eval.every`)."""
        return {name: self.line[name] for name in self.record.metric_keys if self.line.get(name) is not None}

    @cached_property
    def state(self) -> State:
        """A copy of the server's state after the round: flat weights, mask, and the method's memory."""
        return copied(self.played.state)

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The model's tensors by name, exactly 0 outside the mask."""
        return self.run.layout.state_dict(self.played.state.weights)

    @cached_property
    def masks(self) -> dict[str, Tensor]:
        """The bool masks by parameter name, prunable parameters only."""
        return self.run.layout.by_name(self.played.state.mask.bits)

    def stop(self, reason: str) -> None:
        """End the run with this round; its summary gives the reason. Stopping in the set-up stops after round 0."""
        self.asked.append(str(reason))


@dataclass
class OuterView:
    """An outer round: the mask before and after it."""

    run: RunView
    index: int
    before: dict[str, Tensor]
    """bool tensors by parameter name."""
    after: dict[str, Tensor]
    line: dict[str, Any]
    """Its line of topology.jsonl: links by layer, and what the method thinks of them."""

    @property
    def layer_density(self) -> dict[str, float]:
        """Share of links of each layer that are active now."""
        return density_by_layer(self.after)


@dataclass
class EndView:
    """A complete run: all its files are written."""

    run: RunView
    summary: dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """A model that may replace the last one at the end of a run."""

    round: int
    state: State
    metric: str
    value: float

    @property
    def told(self) -> dict[str, Any]:
        """The entry `restored` of the summary."""
        return {"round": self.round, "metric": self.metric, "value": self.value}


class Callback:
    """Watches a run; override the hooks that you need. An exception stops the run, which can then be resumed.

    A resumed run reports the rounds after its newest checkpoint again; `run.history` has the rounds before.
    """

    def on_start(self, run: RunView) -> None:
        """The run is about to play round `run.first_round`."""

    def on_round(self, round: RoundView) -> None:
        """A round is over; `round.stop("why")` ends the run with it."""

    def on_outer(self, outer: OuterView) -> None:
        """An outer round is over; called before `on_round`."""

    def on_judging(self, done: int, total: int) -> None:
        """Progress of the final evaluation by class and client, in samples."""

    def on_end(self, end: EndView) -> None:
        """The run is complete, whether or not it stopped early."""

    def on_close(self) -> None:
        """The run ends here, complete or not: close whatever is open."""

    def final_model(self) -> Candidate | None:
        """The model to end the run with; None: the last one."""
        return None


def copied(state: State) -> State:
    """Copy the state with its own tensors."""
    memory = {name: tensor.clone() for name, tensor in state.memory.items()}
    return State(state.values.clone(), Mask(state.mask.bits.clone(), state.mask.sizes), memory)


def density_by_layer(masks: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the share of active links by parameter name."""
    return {name: float(mask.float().mean()) for name, mask in masks.items()}

"""What a callback is, and what it is shown: copies, so that nothing that it does to them changes the run."""

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


@dataclass
class RunView:
    """A run that begins, or goes on."""

    experiment: Experiment
    settings: Mapping[str, Any]
    """All its keys and their values, as `table.key`."""
    facts: Mapping[str, Any]
    """Of model and federation, as observers are told them."""
    layout: Layout
    """The order of the model's tensors, and which may be pruned."""
    mask: Mask
    """Of the state from which it goes on; a method that chooses its mask in a set-up begins with all links."""
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
        """Links of each prunable layer by name."""
        return {entry.name: entry.size for entry in self.layout.layers}

    def metric(self, name: str | None) -> tuple[str, Metric]:
        """The key in a line of history by which a model is judged, and its metric: that of a name, or the leading one.

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
    """A round that is over."""

    run: RunView
    played: Played = field(repr=False)
    asked: list[str] = field(default_factory=list, repr=False)
    """Why the run is to stop here."""

    @property
    def index(self) -> int:
        """Counted from 0; -1 is the set-up that some methods hold before."""
        return self.played.record.round

    @property
    def outer(self) -> bool:
        """Could the topology change?"""
        return self.played.record.outer

    @property
    def record(self) -> Record:
        """A copy of its record."""
        return copy.deepcopy(self.played.record)

    @cached_property
    def line(self) -> dict[str, Any]:
        """Its line of history.jsonl."""
        return self.record.as_dict()

    @property
    def metrics(self) -> dict[str, float]:
        """What was evaluated in this round, by name; nothing in most rounds (`eval.every`)."""
        return {name: self.line[name] for name in self.record.metric_keys if self.line.get(name) is not None}

    @cached_property
    def state(self) -> State:
        """A copy of the server's state after the round: flat weights, mask, the method's memory."""
        return copied(self.played.state)

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The model's tensors by name, exactly 0 outside the mask."""
        return self.run.layout.state_dict(self.played.state.weights)

    @cached_property
    def masks(self) -> dict[str, Tensor]:
        """bool tensors by parameter name, prunable parameters only."""
        return self.run.layout.by_name(self.played.state.mask.bits)

    def stop(self, reason: str) -> None:
        """Let the run end with this round. Its summary says why; to stop in the set-up is to stop after round 0."""
        self.asked.append(reason)


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
        """Share of the links of each layer that are active now."""
        return density_by_layer(self.after)


@dataclass
class EndView:
    """A run that is complete: all its files are written."""

    run: RunView
    summary: dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """A model with which a run may end in the place of its last one."""

    round: int
    state: State
    metric: str
    value: float

    @property
    def told(self) -> dict[str, Any]:
        """`restored` of the summary."""
        return {"round": self.round, "metric": self.metric, "value": self.value}


class Callback:
    """Told of a run as it goes; override what you need. What it raises stops the run, which can be resumed.

    A resumed run tells of rounds that come after its newest checkpoint once more: `run.history` has those before.
    """

    def on_start(self, run: RunView) -> None:
        """The run is about to play `run.first_round`."""

    def on_round(self, round: RoundView) -> None:
        """A round is over; `round.stop("why")` lets the run end with it."""

    def on_outer(self, outer: OuterView) -> None:
        """An outer round is over; told before `on_round`."""

    def on_judging(self, done: int, total: int) -> None:
        """So many of the samples that the final model is judged on, by class and by client, are done."""

    def on_end(self, end: EndView) -> None:
        """The run is complete, stopped early or not."""

    def on_close(self) -> None:
        """The run ends here, complete or not: close what is open."""

    def final_model(self) -> Candidate | None:
        """The model that the run is to end with; None: the last one."""
        return None


def copied(state: State) -> State:
    """The same state in tensors of its own."""
    memory = {name: tensor.clone() for name, tensor in state.memory.items()}
    return State(state.values.clone(), Mask(state.mask.bits.clone(), state.mask.sizes), memory)


def density_by_layer(masks: Mapping[str, Tensor]) -> dict[str, float]:
    """Share of active links by parameter name."""
    return {name: float(mask.float().mean()) for name, mask in masks.items()}

"""The callbacks of one run, called one after the other."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedrts.callbacks import callbacks as registry
from fedrts.callbacks.contract import Callback, Candidate, EndView, OuterView, RoundView, RunView
from fedrts.callbacks.stopping import EarlyStopping
from fedrts.callbacks.watching import Observing
from fedrts.errors import InputError, note, reason
from fedrts.methods.contract import State

if TYPE_CHECKING:
    from fedrts.config import Experiment
    from fedrts.server.rounds import Played


class CallbackError(InputError):
    """A callback failed; its run can be resumed."""


class Hooks:
    """Call callbacks, name the one that fails, and track whether one of them has stopped the run."""

    def __init__(self, callbacks: Sequence[Callback] = (), again: str = "") -> None:
        self.callbacks = callbacks
        self.again = again
        """How to go on with the run."""
        self.stopped: dict[str, Any] | None = None
        """`stopped` of the summary."""
        self._pending: dict[str, Any] | None = None

    @staticmethod
    def of(experiment: Experiment, given: Sequence[object] = (), again: str = "") -> Hooks:
        """Build hooks from the experiment's names and the `given` objects: callbacks, and observers, which are notified too."""
        named = [_made(name) for name in experiment.callbacks]
        stop = experiment.stop
        own = [] if stop.patience is None else [EarlyStopping(stop.patience, stop.metric, stop.min_delta, stop.restore)]
        found = [*named, *map(_callback, given), *own]
        keys = [key for callback in found if (key := getattr(callback, "keeps", None)) is not None]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise InputError(f"two callbacks keep a model named '{twice}': early stopping keeps the best one too; give another name=…")
        return Hooks(found, again)

    def start(self, run: RunView, stopped: Mapping[str, Any] | None) -> None:
        """Announce that the run starts or continues; `stopped`: a stopped run is only summarised again."""
        self.run = run
        self.stopped = dict(stopped) if stopped else None
        for callback in self.callbacks:
            with self._blamed(callback, "on_start"):
                callback.on_start(run)

    def follow(self, before: State, played: Played) -> bool:
        """Announce a round; return whether the run stops after it, before the last planned one."""
        index = played.record.round
        for callback in self.callbacks:
            if played.topology is not None and _told(callback, "on_outer"):
                old, new = self._masks(before), self._masks(played.state)
                with self._blamed(callback, f"on_outer of round {index}"):
                    callback.on_outer(OuterView(self.run, index, old, new, copy.deepcopy(played.topology)))
            if not _told(callback, "on_round"):
                continue
            view = RoundView(self.run, played)
            with self._blamed(callback, f"on_round of round {index}"):
                callback.on_round(view)
            if view.asked and self._pending is None:
                self._pending = {"by": type(callback).__name__, "reason": view.asked[0]}
        if self._pending is None or not 0 <= index < self.run.experiment.rounds - 1:
            return False
        self.stopped = {"round": index, "planned": self.run.experiment.rounds, **self._pending}
        return True

    def _masks(self, state: State) -> dict[str, Tensor]:
        return self.run.layout.by_name(state.mask.bits.clone())

    def final_model(self) -> Candidate | None:
        """Return the model to end with, from the first callback that has one."""
        for callback in self.callbacks:
            with self._blamed(callback, "final_model"):
                if (found := callback.final_model()) is not None:
                    return found
        return None

    def judging(self, done: int, total: int) -> None:
        for callback in self.callbacks:
            with self._blamed(callback, "on_judging"):
                callback.on_judging(done, total)

    def end(self, summary: Mapping[str, Any]) -> None:
        for callback in self.callbacks:
            with self._blamed(callback, "on_end"):
                callback.on_end(EndView(self.run, dict(summary)))

    def close(self) -> None:
        """Close all callbacks, whatever happened; failures here change no result."""
        for callback in self.callbacks:
            try:
                callback.on_close()
            except Exception as error:  # whatever a user's own code raises
                note(f"the callback {type(callback).__name__} failed in on_close: {type(error).__name__}: {reason(error)}")

    @contextlib.contextmanager
    def _blamed(self, callback: Callback, place: str) -> Iterator[None]:
        """Add the callback's name and how to continue to its exceptions."""
        try:
            yield
        except Exception as error:
            said = reason(error) if isinstance(error, InputError) else f"{type(error).__name__}: {reason(error)}"
            raise CallbackError(f"the callback {type(callback).__name__} failed in {place}: {said}{self.again}") from error


def _told(callback: Callback, hook: str) -> bool:
    """Whether the callback overrides this hook; other hooks cost nothing."""
    return getattr(type(callback), hook) is not getattr(Callback, hook)


def _made(name: str) -> Callback:
    """Make the callback of a name or an import path, which is a class or a function without arguments."""
    maker = registry.get(name)
    try:
        return _callback(maker())
    except InputError:
        raise
    except Exception as error:  # whatever a user's own class raises
        raise InputError(f"the callback '{name}' cannot be made: {type(error).__name__}: {reason(error)}") from error


def _callback(given: object) -> Callback:
    if isinstance(given, Callback):
        return given
    if not isinstance(given, type) and all(hasattr(given, name) for name in ("started", "played", "finished", "stopped")):
        return Observing(given)
    kind = given.__name__ if isinstance(given, type) else type(given).__name__
    made = f": give an object, {kind}()" if isinstance(given, type) else ""
    raise InputError(f"'{kind}' is no callback{made or ': derive it from fedrts.callbacks.Callback'}")

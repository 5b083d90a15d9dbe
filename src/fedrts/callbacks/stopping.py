"""Early stopping."""

from __future__ import annotations

from fedrts.callbacks.best import BestModel
from fedrts.callbacks.contract import Candidate, RoundView, RunView
from fedrts.errors import InputError


class EarlyStopping(BestModel):
    """Stop a run when its metric has not improved for `patience` rounds, and end it with the best model.

    `EarlyStopping(patience=20, metric="loss", min_delta=0.001)`

    Rounds that are not evaluated (`eval.every`) stop nothing. `restore=False` ends the run with the last model, and keeps no other.
    """

    def __init__(self, patience: int, metric: str | None = None, min_delta: float = 0.0, restore: bool = True, name: str = "best") -> None:
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise InputError(f"patience must be a number of rounds ≥ 1 (got {patience!r})")
        super().__init__(metric, min_delta, name)
        self.patience, self.restore = patience, restore
        if not restore:
            self.keeps = None

    def on_start(self, run: RunView) -> None:
        super().on_start(run)
        self.since = run.experiment.stop.start

    def on_round(self, round: RoundView) -> None:
        if self.restore:
            super().on_round(round)
        else:
            self._better(round.line)
        waited = round.index - max(self.round, self.since - 1)
        if self.round >= 0 and round.line.get(self.key) is not None and waited >= self.patience:
            best = self.metric.text(self.value)
            round.stop(f"no better {self.key} than {best} of round {self.round} in {waited} rounds")

    def final_model(self) -> Candidate | None:
        return self.best() if self.restore else None

"""Local training: the keys of `[train]` that a client follows."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedrts.client.optimizers import LocalOptimizer, optimizers
from fedrts.client.schedules import schedules, share
from fedrts.methods.contract import Train
from fedrts.tables import Named, Number, Table


class LocalTraining(Table):
    """How a client trains on its data in a round."""

    epochs: int = Field(5, ge=1, description="passes over the local data in a round")
    batch_size: int = Field(64, ge=1, description="samples per step")
    lr: Number = Field(0.01, gt=0, description="learning rate in the first round")
    schedule: Annotated[str, Named(schedules)] = Field("constant", description="how the learning rate falls over the rounds")
    lr_end: Number = Field(0.01, gt=0, le=1, description="share of lr that is left in the last round of a falling schedule")
    schedule_rounds: int | None = Field(
        None, ge=1, description="rounds over which the learning rate falls, constant afterwards; default: all"
    )
    optimizer: Annotated[str, Named(optimizers)] = Field("sgd", description="local optimiser, new for every client and round")
    momentum: Number = Field(0.0, ge=0, lt=1, description="momentum of sgd")
    amsgrad: bool = Field(False, description="adam, adamw: divide by the largest second moment so far")
    weight_decay: Number = Field(0.0, ge=0, description="L2 penalty of the optimiser; adamw decays the weights themselves")
    proximal: Number = Field(0.0, ge=0, description="μ: pull towards the received model, μ/2·‖W − W_received‖² (FedProx)")
    clip: Number = Field(0.0, ge=0, description="clip each step's gradient to this norm; 0: off")
    smoothing: Number = Field(0.0, ge=0, lt=1, description="label smoothing: share of the target spread evenly over all classes")

    def rate(self, round_index: int) -> float:
        """Return the learning rate of a round."""
        return self.lr * share(self.schedule, round_index, self.schedule_rounds or 1, self.lr_end)

    def samples(self, rows: int) -> int:
        """Return the number of samples that a client with this many rows sees in a round."""
        return self.epochs * (rows // self.batch_size * self.batch_size or rows)

    def epochs_of(self, step: Train) -> range:
        """Return the epochs of a training step."""
        first, last = (int(share * self.epochs) for share in (step.start, step.stop))
        return range(first, last)

    def make_optimizer(self) -> LocalOptimizer:
        """Make the local optimiser with its options."""
        return optimizers.get(self.optimizer)(self.momentum, self.weight_decay, self.amsgrad)

"""How a client trains: epochs, batches, rates and the optimiser."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedrts.client import schedules
from fedrts.methods.contract import Train


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains; a new optimiser for every client and round."""

    epochs: int
    batch_size: int
    lr: float
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0
    """μ of the proximal term μ/2·‖W − W_received‖² (FedProx)."""
    schedule: str = "constant"
    lr_end: float = 1.0
    rounds: int = 1
    amsgrad: bool = False
    """Adam divides by the largest second moment so far."""

    def rate(self, round_index: int) -> float:
        """The learning rate of a round."""
        return self.lr * schedules.share(self.schedule, round_index, self.rounds, self.lr_end)

    def samples(self, rows: int) -> int:
        """Samples that a client with so many rows sees in a round."""
        return self.epochs * (rows // self.batch_size * self.batch_size or rows)

    def epochs_of(self, step: Train) -> range:
        """The epochs of a step of training."""
        first, last = (int(share * self.epochs) for share in (step.start, step.stop))
        return range(first, last)

    def make_optimizer(self, parameter: Tensor, round_index: int) -> torch.optim.Optimizer:
        lr = self.rate(round_index)
        if self.optimizer == "adam":
            return torch.optim.Adam([parameter], lr=lr, weight_decay=self.weight_decay, amsgrad=self.amsgrad)
        return torch.optim.SGD([parameter], lr=lr, momentum=self.momentum, weight_decay=self.weight_decay)

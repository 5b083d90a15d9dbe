"""How many clients fit: the free memory of a device, and the memory that a client needs."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from fedrts import trees
from fedrts.client.training import LocalTraining
from fedrts.engines.kernels import Objective
from fedrts.trees import Tensors

USABLE = 0.5
"""Share of the free memory that clients may take; the rest is for evaluation, the server's own work and what others need."""
_SLOT_VECTORS = 5
"""A slot's vectors apart from the optimiser's: weights, mask, gradient, the copy that becomes it, and one of the kernel's own."""
_HELD_VECTORS = 4
"""A waiting client's vectors: weights, gradient, mask, reply."""


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device; on a CPU, the available memory that the system reports."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as lines:
            found = dict(line.split(":") for line in lines)
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # other systems
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 4 * 2**30


@dataclass(frozen=True)
class Need:
    """Bytes that a client needs."""

    slot: int
    """While it trains, besides being held."""
    held: int
    """While others train."""

    @staticmethod
    def of(objective: Objective, training: LocalTraining, weights: Tensor, x: Tensors, y: Tensors) -> Need:
        """Measure the need of a model at `weights [n]` with batches like `x, y` (of any number of samples)."""
        vector = weights.numel() * weights.element_size()
        activations = saved_bytes(objective, weights, x, y) * training.batch_size // max(trees.count(x), 1)
        return Need((_SLOT_VECTORS + len(training.make_optimizer().remembers)) * vector + 2 * activations, _HELD_VECTORS * vector)

    def slots(self, free: int) -> int:
        """Return the number of clients that may train side by side."""
        return max(1, int(USABLE * free) // (self.slot + self.held))

    def together(self, free: int, slots: int) -> int:
        """Return the number of clients that may be held at once while `slots` of them train."""
        return max(slots, (int(USABLE * free) - slots * self.slot) // self.held)


def saved_bytes(objective: Objective, weights: Tensor, x: Tensors, y: Tensors) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, without parameters and inputs."""
    parameters = weights[: objective.layout.parameters].clone().requires_grad_()
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = objective.loss(parameters, weights[objective.layout.parameters :].clone(), x, y)
    apart = {tensor.untyped_storage().data_ptr() for tensor in (parameters, *trees.leaves(x), *trees.leaves(y))}
    del result
    return sum(size for place, size in kept.items() if place not in apart)

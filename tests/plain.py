"""Clients in plain PyTorch, tensor by tensor and link by link: what engines and methods are compared with."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedrts.runs.build import Assembled
from fedrts.sparse import random
from fedrts.sparse.mask import Mask

Named = dict[str, Tensor]


class Plain:
    """The clients of a run. Models are state dicts, masks are boolean tensors by name; there are no flat vectors."""

    def __init__(self, run: Assembled) -> None:
        self.run = run
        self.module = copy.deepcopy(run.module)
        self.links = [entry.name for entry in run.layout.layers]

    # -- the run's vectors by name, and back -------------------------------------------------------------------------

    def model(self, weights: Tensor) -> Named:
        return self.run.layout.state_dict(weights)

    def masks(self, mask: Mask) -> Named:
        return self.run.layout.by_name(mask.bits)

    def vector(self, model: Mapping[str, Tensor]) -> Tensor:
        """Everything, `[n]`."""
        return self.run.layout.flatten(model)

    def over_links(self, named: Mapping[str, Tensor]) -> Tensor:
        """Return the part over the prunable tensors, `[P]`."""
        return torch.cat([named[name].reshape(-1) for name in self.links])

    # -- one client --------------------------------------------------------------------------------------------------

    def samples(self, client: int) -> int:
        return len(self.run.rows[client])

    def batches(self, client: int, index: int, epoch: int) -> list[Tensor]:
        """All full batches of an epoch; one short batch where the client has less."""
        rows, size = self.run.rows[client], self.run.training.batch_size
        own = random.key(self.run.experiment.seed, "client", index, client)
        order = rows[random.permutation(random.key(own, "order", epoch), len(rows))]
        return [order[i : i + size] for i in range(0, len(order) - size + 1, size)] or [order]

    def loss(self, rows: Tensor, temperature: float = 1.0) -> Tensor:
        data = self.run.data
        logits, target = self.module(data.x[rows]) / temperature, data.y[rows]
        return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))  # −100 is padding

    def gradient(self, model: Mapping[str, Tensor], batches: Iterable[Tensor], temperature: float = 1.0) -> Named:
        """The mean over batches (of equal size) of every parameter's gradient, in training mode."""
        batches = list(batches)
        self.module.load_state_dict(dict(model))
        self.module.train()
        total = {name: torch.zeros_like(parameter) for name, parameter in self.module.named_parameters()}
        for rows in batches:
            self.module.zero_grad()
            self.loss(rows, temperature).backward()
            for name, parameter in self.module.named_parameters():
                assert parameter.grad is not None
                total[name] += parameter.grad / len(batches)
        return total

    def train(self, model, masks, client, index, epochs: Sequence[int], mu: float = 0.0, received=None) -> tuple[Named, Named]:
        """SGD on `masks`; the model afterwards, and the mean over steps of the squared gradients, unmasked."""
        self.module.load_state_dict(dict(model))
        self.module.train()
        received = {name: tensor.clone() for name, tensor in (received or model).items()}
        squares = {name: torch.zeros_like(parameter) for name, parameter in self.module.named_parameters()}
        batches = [rows for epoch in epochs for rows in self.batches(client, index, epoch)]
        for rows in batches:
            self.module.zero_grad()
            self.loss(rows).backward()
            with torch.no_grad():
                for name, parameter in self.module.named_parameters():
                    assert parameter.grad is not None
                    step = parameter.grad.clone()
                    squares[name] += step * step / len(batches)
                    if mu:
                        step += mu * (parameter - received[name])
                    if name in masks:
                        step *= masks[name]
                    parameter.sub_(self.run.training.lr * step)
        return {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}, squares

    def mean(self, models: Mapping[int, Tensor]) -> Tensor:
        """Σ p_k x_k over clients, p_k = n_k / Σ n_j."""
        total = sum(self.samples(client) for client in models)
        zero = torch.zeros((), dtype=torch.float64)
        return sum((self.samples(client) / total * x.double() for client, x in models.items()), zero)


def spans(sizes: Sequence[int]) -> list[range]:
    """The indices of every layer."""
    ends = [sum(sizes[: layer + 1]) for layer in range(len(sizes))]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def largest(values: Mapping[int, float], k: int) -> set[int]:
    """The k keys of largest value, the lowest among equals."""
    return set(sorted(values, key=lambda i: (-values[i], i))[:k])


def rigl(strength: Tensor, promise: Tensor, bits: Tensor, quota: Sequence[int], sizes: Sequence[int]) -> tuple[set[int], set[int]]:
    """(links that stay, links afterwards): drop the weakest active ones, grow the most promising of all others."""
    stay, now = set(), set()
    for layer, q in zip(spans(sizes), quota, strict=True):
        active = {i: float(strength[i]) for i in layer if bits[i]}
        kept = largest(active, len(active) - q)
        stay |= kept
        now |= kept | largest({i: float(promise[i]) for i in layer if i not in kept}, q)
    return stay, now


def bits_of(links: Iterable[int], size: int) -> Tensor:
    bits = torch.zeros(size, dtype=torch.bool)
    bits[sorted(links)] = True
    return bits

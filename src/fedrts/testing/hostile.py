"""Hostile clients: attacks as functions of what honest clients would have sent, and an engine that has some of them among its clients.

    engine = Infiltrated(run.plan.engine, frozenset({2}), ATTACKS["sign flip"])
    plan = replace(run.plan, engine=engine)

Hostile clients know everything: the model as it was sent, what the honest ones answer, and each other.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedrts.client.order import Failure, Order, Reply
from fedrts.engines.serial import SerialEngine
from fedrts.methods.contract import State
from fedrts.sparse import random
from fedrts.tasks import Metrics
from fedrts.wire.fields import Indices, Message, Values, carried

_FURTHEST = 99.9
"""Norms of the model that the largest attack sends."""
_STATISTIC = 9e8
_BACK, _LONG, _LONGEST = 0.45, 2.8, 11.0
"""How far an attack on the posterior goes: below the default guard.undo_bound, and below guard.large_bound times the honest median.
The last is the same for guard.median_bound."""


@dataclass(frozen=True)
class Scene:
    """What hostile clients see before they reply."""

    order: Order
    reference: Tensor
    """The weights on the mask as they were sent: `[n]`, the last ones statistics."""
    honest: Tensor
    """What the honest clients answer: `[h, n]`."""
    hostile: int
    """How many they are themselves."""

    @property
    def parameters(self) -> int:
        return len(self.reference) - self.order.frame.statistics


Attack = Callable[[Message, Scene], Message]
"""What a hostile client sends in place of the honest answer that it would have given; both as they mean, not as they travel."""


def _moved(change: Callable[[Tensor, Scene], Tensor]) -> Attack:
    """Change parameters: `change` gives the update `[N]` in place of the honest one; statistics stay."""

    def attack(message: Message, scene: Scene) -> Message:
        weights, n = carried(message["weights"], Tensor).clone(), scene.parameters
        weights[:n] = scene.reference[:n] + change(weights[:n] - scene.reference[:n], scene)
        return {**message, "weights": weights}

    return attack


def _huge(update: Tensor, scene: Scene) -> Tensor:
    """A random direction, as long as the original guard allowed."""
    direction = random.uniform(random.key(scene.order.round.index, "huge"), len(update)).to(update) - 0.5
    length = _FURTHEST * max(scene.order.reference_norm, 1.0)
    return direction * (length / float(torch.linalg.vector_norm(direction)))


def _honest_updates(scene: Scene) -> Tensor:
    return scene.honest[:, : scene.parameters] - scene.reference[: scene.parameters]


def _little_is_enough(update: Tensor, scene: Scene) -> Tensor:
    """As far from the honest mean, coordinate by coordinate, as still looks like one of them (ALIE: Baruch et al., 2019)."""
    updates = _honest_updates(scene)
    clients = len(updates) + scene.hostile
    supporters = clients // 2 + 1 - scene.hostile
    reach = statistics.NormalDist().inv_cdf(max(0.5, (clients - scene.hostile - supporters) / max(clients - scene.hostile, 1)))
    return updates.mean(0) - max(reach, 0.3) * updates.std(0)


def _mean_shift(update: Tensor, scene: Scene) -> Tensor:
    """Against the honest mean, as long as the honest updates are (inner-product manipulation: Xie et al., 2020)."""
    updates = _honest_updates(scene)
    mean = updates.mean(0)
    length = float(torch.linalg.vector_norm(updates, dim=1).median())
    return -mean * (length / max(float(torch.linalg.vector_norm(mean)), 1e-12))


def _shifted(medians: float, *, when: Callable[[int], bool] = lambda _: True) -> Attack:
    """Against the honest mean in some rounds, this many honest medians long, and without what would undo the model; honest in others."""

    def change(update: Tensor, scene: Scene) -> Tensor:
        if not when(scene.order.round.index):
            return update
        shift, model = _mean_shift(update, scene), scene.reference[: len(update)]
        length = medians * torch.linalg.vector_norm(shift)
        if medians > _LONG:
            shift = shift - model * (torch.dot(shift, model) / model.square().sum())
        return torch.nn.functional.normalize(shift, dim=0).mul_(length)

    return _moved(change)


def _statistics(message: Message, scene: Scene) -> Message:
    """Honest parameters with impossible statistics."""
    weights = carried(message["weights"], Tensor).clone()
    weights[scene.parameters :] = _STATISTIC
    return {**message, "weights": weights}


def _posterior(message: Message, scene: Scene) -> Message:
    """Cut units of the first layer off, as many as default settings let pass: cancel their inputs in the mean, and name other links."""
    layout, mask = scene.order.frame.layout, scene.order.frame.mask
    first, factor = layout.layers[0], len(scene.honest) / scene.hostile
    active = mask.bits[: first.size].view(first.shape[0], -1).any(1)
    own = mask.expand(scene.reference)[: first.size].view(first.shape[0], -1).square().sum(1)
    norm, usual = scene.order.reference_norm, float(torch.linalg.vector_norm(_honest_updates(scene), dim=1).median())
    affordable = min(_BACK * norm * max(norm, 1.0) / (factor + 1), (_LONG * usual / (factor + 1)) ** 2)
    chosen = (torch.where(active, own, 0.0).cumsum(0) <= affordable).view(-1, 1).expand(-1, first.size // first.shape[0])
    victims = torch.zeros(len(mask.bits), dtype=torch.bool)
    victims[: first.size] = chosen.reshape(-1)
    weights = carried(message["weights"], Tensor).clone()
    at = victims[mask.active].nonzero().squeeze(-1)
    weights[at] = -(scene.honest[:, at].mean(0)) * factor
    return {**_votes(message, scene, (~victims).float()), "weights": weights}


def _votes(message: Message, scene: Scene, wish: Tensor | float = 0.0) -> Message:
    """Votes for links drawn at random in place of the honest ones, the same of all hostile clients; those with a larger `wish` first."""
    votes = scene.order.exchange.up.get("votes")
    if not isinstance(votes, Indices):
        return message
    drawn = random.uniform(random.key(scene.order.round.index, "wish"), len(scene.order.frame.mask.bits)) + wish
    return {**message, "votes": votes.take({votes.of: drawn}, scene.order.frame)}


ATTACKS: dict[str, Attack] = {
    "99.9 ‖W‖": _moved(_huge),
    "sign flip": _moved(lambda update, _: -update),
    "× −5": _moved(lambda update, _: -5 * update),
    "−W": _moved(lambda update, scene: -2 * scene.reference[: len(update)]),
    "zeros": _moved(lambda update, scene: -scene.reference[: len(update)]),
    "label flip": lambda message, _: message,  # they are honest about wrong labels: see `infiltrated`
    "ALIE": _moved(_little_is_enough),
    "mean shift": _moved(_mean_shift),
    "statistics": _statistics,
    "posterior": _posterior,
    "votes": _votes,
}
"""By the name that tables have."""
ADAPTIVE: dict[str, Attack] = {
    "at the bound": _shifted(_LONG),
    "by turns": _shifted(_LONGEST, when=lambda index: index % 3 != 2),
    "late": _shifted(_LONGEST, when=lambda index: index >= 15),
    "− ½ mean": _moved(lambda update, scene: -0.5 * _honest_updates(scene).mean(0)),
}
"""Attacks by those who know the guard's bounds, in runs of 25 rounds."""


@dataclass
class Infiltrated:
    """An engine with hostile clients, which wait for the honest replies before they send their own."""

    engine: Any
    hostile: frozenset[int]
    attack: Attack

    @property
    def label(self) -> str:
        return str(self.engine.label)

    def run(self, order: Order, clients: Sequence[int]) -> Iterator[Reply | Failure]:
        replies: list[Reply] = list(self.engine.run(order, clients))
        up = order.exchange.up.get("weights")
        if not isinstance(up, Values) or order.reference is None:
            yield from replies
            return
        frame = order.upload_frame()
        opened = {reply.client: up.open(reply.message["weights"], frame) for reply in replies}
        honest = [weights for client, weights in opened.items() if client not in self.hostile]
        if not honest:
            yield from replies
            return
        scene = Scene(order, order.reference, torch.stack(honest), len(replies) - len(honest))
        for reply in replies:
            if reply.client not in self.hostile:
                yield reply
                continue
            sent = self.attack({**reply.message, "weights": opened[reply.client]}, scene)
            coded = up.take({"weights": carried(sent["weights"], Tensor)}, order.upload_frame(reply.client + 1))
            yield replace(reply, message={**sent, "weights": coded}, left=None)

    def evaluate(self, state: State) -> Metrics:
        metrics: Metrics = self.engine.evaluate(state)
        return metrics


def infiltrated(engine: SerialEngine, hostile: frozenset[int], attack: str) -> Infiltrated:
    """Return `engine` with hostile clients of this attack; if they lie about labels, its data is changed."""
    if attack == "label flip":
        data = engine.bench.data
        for client in hostile:
            rows = engine.rows[client]
            data.y[rows] = data.classes - 1 - data.y[rows]
    return Infiltrated(engine, hostile, (ATTACKS | ADAPTIVE)[attack])

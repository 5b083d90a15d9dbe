"""The first mask of a sparse method (`topology.init_mask`), also one for which a pruner looks at the dense weights in a set-up.

`random`, `magnitude` and `given` need no clients: `Sparse.initial_mask` makes them. With another name a method that prunes at
initialisation holds its set-up before round 0, and the experiment's method goes on from its mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedrts.errors import InputError
from fedrts.methods.base import Method, Sparse
from fedrts.methods.contract import Exchange, Means, Rng, Round, Setup, State
from fedrts.methods.snip import SNIP
from fedrts.registry import Registry
from fedrts.sparse.mask import Mask
from fedrts.sparse.schedule import Schedule
from fedrts.wire.fields import Message


@dataclass(frozen=True)
class FirstMask:
    """How the first mask is chosen: by the method itself, or by a pruner's set-up."""

    pruner: type[Sparse] | None = None


masks: Registry[FirstMask] = Registry("first mask", type=FirstMask)
for _name, _pruner in (("random", None), ("magnitude", None), ("given", None), ("snip", SNIP)):
    masks.register(_name)(FirstMask(_pruner))


def beginning_with(name: str, method: Method) -> Method:
    """Return the method, preceded by a pruner's set-up if that chooses its first mask."""
    pruner = masks.get(name).pruner
    if pruner is None or method.dense:
        return method
    fields = {"__module__": __name__, "__annotations__": {"pruner": ClassVar[Sparse]}, "pruner": pruner(density=method.density)}
    kind = type(type(method).__name__, (_Pruned, type(method)), fields)
    made: Method = kind(**{field: getattr(method, field) for field in type(method).model_fields})
    return made


class _Pruned(Sparse):
    """A method that starts from the mask of a pruner's set-up."""

    pruner: ClassVar[Sparse]

    def begin(self, setup: Setup) -> State:
        before = Round.of(-1, Schedule(), Mask.full(setup.layout.sizes), setup.layout)
        if super().exchanges(before) or type(self).initial_mask is not Sparse.initial_mask:
            raise InputError(f"{type(self).__name__} chooses its first mask itself: leave out topology.init_mask")
        first = self.pruner.begin(setup)
        return replace(first, memory={**super().begin(setup).memory, **first.memory})

    def exchanges(self, round: Round) -> tuple[Exchange, ...]:
        return super().exchanges(round) if round.index >= 0 else self.pruner.exchanges(round)

    def contribution(self, message: Message, state: State, round: Round) -> Message:
        return super().contribution(message, state, round) if round.index >= 0 else self.pruner.contribution(message, state, round)

    def update(self, state: State, mean: Means, round: Round, rng: Rng) -> State:
        return super().update(state, mean, round, rng) if round.index >= 0 else self.pruner.update(state, mean, round, rng)

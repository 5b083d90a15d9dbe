"""Drop and grow: in outer rounds the weakest links of each layer go, and the most promising ones come (RigL, Evci et al., 2020).

A method of this family is its `grow_score`, and what clients do and send for it (`scoring`). Who rewires is the difference that is left:
the server, by the means over clients, or every client, by its own tensors (`Rewire`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from fedrts.methods.base import Redrawn
from fedrts.methods.contract import Exchange, Means, Rng, Round, State
from fedrts.sparse import rigl
from fedrts.sparse.mask import Mask


class DropAndGrow(Redrawn):
    """Drop the Q^l links of least magnitude in each layer, grow the Q^l of largest `grow_score`.

    Where the density falls, those go too that the next mask has no place for.
    """

    @abstractmethod
    def grow_score(self, seen: Mapping[str, Tensor]) -> Tensor:
        """Return a score for each link `[P]` from what is `seen` where links are rewired.

        `seen` holds the weights `[n]` and, by name, the server's means and memory, or the client's own tensors.
        """

    @abstractmethod
    def scoring(self, exchange: Exchange, round: Round) -> Exchange:
        """Return the exchange of an outer round: averaging's, plus what the score needs."""

    def quota(self, round: Round) -> tuple[int, ...]:
        """Links of each layer to exchange in this outer round."""
        return round.quota

    def outgoing(self, round: Round) -> tuple[int, ...]:
        """Return the links of each layer to drop in this outer round."""
        return replace(round, quota=self.quota(round)).outgoing

    def rewired(self, seen: Mapping[str, Tensor], mask: Mask, round: Round) -> tuple[Mask, Mask]:
        """Return (kept, new): the mask after dropping, and then after growing; weights off `kept` start at 0."""
        strength = seen["weights"][: len(mask.bits)].abs()
        return rigl.step(strength, self.grow_score(seen), mask, self.quota(round), self.outgoing(round))

    def exchanges(self, round: Round) -> tuple[Exchange, ...]:
        exchanges = super().exchanges(round)
        return (self.scoring(exchanges[0], round),) if round.outer else exchanges

    def update(self, state: State, mean: Means, round: Round, rng: Rng) -> State:
        updated = super().update(state, mean, round, rng)
        if not round.outer:
            return updated
        kept, new = self.rewired({**state.memory, **mean, "weights": updated.weights}, state.mask, round)
        return updated.with_mask(kept).with_mask(new)

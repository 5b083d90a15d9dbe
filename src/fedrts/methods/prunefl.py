"""PruneFL (Jiang et al., 2022), adaptive pruning by squared gradients.

Outer rounds: clients upload, besides their weights, the squared gradient g² of every link, averaged over their local steps; the
server drops the Q^l weakest links of each layer and grows those of largest mean g² (sizes fixed, as the FedRTS authors' library
has it; random initial mask, every link takes the same time).

`adaptive=true` is the original's rule, over all layers at once: links outside the weakest Q^l are kept for sure; dropped and inactive ones
are added in the order of g² as long as g² exceeds Γ = Σ g² / (c + number of links), at most up to the size that the density
allows. The model may then shrink. Inferred: c is the number of unpruned parameters, which cost time too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedrts.methods import register
from fedrts.methods.contract import Exchange, Round, Setup, State, Train
from fedrts.methods.rewiring import DropAndGrow
from fedrts.sparse.mask import Mask
from fedrts.wire.fields import Values


@register("prunefl")
class PruneFL(DropAndGrow):
    """Drop by magnitude, grow by the clients' mean squared gradients, which travel whole."""

    topology: ClassVar[str] = "drop the Q weakest, grow by the mean squared gradient"

    adaptive: Annotated[bool, Field(description="choose the size too: the original's greedy rule over all layers")] = False

    def steady(self) -> str | None:
        return "with adaptive = true it chooses its size itself" if self.adaptive else None

    def begin(self, setup: Setup) -> State:
        state = super().begin(setup)
        return state.remember(most=torch.tensor([state.mask.number])) if self.adaptive else state

    def grow_score(self, seen: Mapping[str, Tensor]) -> Tensor:
        return seen["squares"]

    def scoring(self, exchange: Exchange, round: Round) -> Exchange:
        return exchange.then(squares=Values(of="squares", on="links"))

    def published(self, exchange: Exchange) -> Exchange:
        """O_d + O_s and (2·F_d + F_s)·E: the paper counts squares without the weights sent with them, and in every round."""
        up = {"squares": exchange.up["squares"]} if "squares" in exchange.up else exchange.up
        return replace(exchange, steps=(Train(record="squares"),), up=up)

    def training(self, round: Round) -> Train:
        return Train(record="squares") if round.outer else super().training(round)

    def rewired(self, seen: Mapping[str, Tensor], mask: Mask, round: Round) -> tuple[Mask, Mask]:
        kept, new = super().rewired(seen, mask, round)
        dense = round.layout.parameters - round.layout.links
        return kept, greedy(self.grow_score(seen), kept, dense, int(seen["most"])) if self.adaptive else new


def greedy(squares: Tensor, kept: Mask, cost: float, most: int) -> Mask:
    """`kept` and every further link whose g² exceeds Γ of those taken before it, the largest first; at most `most` links.

    Where links are grouped, the same arm by arm: g² is the mean over an arm.
    """
    candidates = (~kept.arms.bits).nonzero().squeeze(-1)
    means = kept.sizes.mean(squares)
    order = candidates[torch.argsort(means[candidates], descending=True, stable=True)]
    gains, links = means[order].double(), kept.sizes.links_of_arms.to(order.device)[order]
    before = links.cumsum(0) - links
    taken = float(squares[kept.active].double().sum()) + torch.cat([gains.new_zeros(1), (gains * links).cumsum(0)[:-1]])
    gamma = taken / (cost + kept.number + before)
    refused = ((gains <= gamma) | (before + links > most - kept.number)).nonzero()
    bits = kept.arms.bits.clone()
    bits[order[: int(refused[0]) if len(refused) else len(order)]] = True
    return Mask.of_arms(bits, kept.sizes)

"""How far real outcomes are from the theory's assumptions, on digits.

    python benchmarks/assumptions.py

The theory takes the outcomes of links as independent of each other and from step to step, with means that stay (Assumption 2), and replaces
"is among the κ largest" by "is above a threshold that no single link moves" (Assumption 3). Here a static mask is trained in MLPs of three
widths by 60 clients, 40 of them in a round, and the magnitudes of all that take part are recorded.
"""

from __future__ import annotations

import argparse
import tempfile

import numpy as np
import torch
from torch import Tensor

import fedrts
from fedrts.methods import get, register
from fedrts.methods.contract import Round, State
from fedrts.sparse.topk import top
from fedrts.wire.fields import Message, carried

CORE = 0.7
CLIENTS, PER_ROUND, ROUNDS, LINKS = 60, 40, 30, 400
magnitudes: dict[int, list[Tensor]] = {}
counts: list[int] = []


@register("recorded")
class Recorded(get("random")):  # type: ignore[misc]
    """A static mask; what every client sends is kept."""

    def contribution(self, message: Message, state: State, round: Round) -> Message:
        counts[:] = round.counts
        magnitudes.setdefault(round.index, []).append(carried(message["weights"], Tensor)[..., : sum(round.counts)].abs().clone())
        added: Message = super().contribution(message, state, round)
        return added


def outcomes(values: Tensor) -> Tensor:
    """h(i, |W|, κ) with κ = 0.7 K in every layer, `[..., A]`."""
    return top(values, [int(CORE * k) for k in counts], counts).float()


def correlation_of_links(indicators: Tensor, rng: np.random.Generator) -> tuple[float, float]:
    """Mean |r| between two links over clients `[clients, A]`, and the same after every link's clients are shuffled."""
    seen = indicators.numpy()
    undecided = np.flatnonzero((seen.mean(0) > 0.1) & (seen.mean(0) < 0.9))
    chosen = seen[:, rng.permutation(undecided)[:LINKS]]
    shuffled = np.stack([rng.permutation(column) for column in chosen.T], axis=1)

    def mean_r(table: np.ndarray) -> float:
        r = np.corrcoef(table.T)
        return float(np.abs(r[np.triu_indices_from(r, 1)]).mean())

    return mean_r(chosen), mean_r(shuffled)


def autocorrelation(series: Tensor) -> float:
    """Mean over links of the correlation of X_t with X_{t+1}, `[rounds, A]`; links that never change are left out."""
    x = series[:, series.std(0) > 0]
    before, after = x[:-1] - x[:-1].mean(0), x[1:] - x[1:].mean(0)
    spread = before.norm(dim=0) * after.norm(dim=0)
    return float(((before * after).sum(0) / spread)[spread > 0].mean())


def mean_field_error(values: Tensor) -> float:
    """Share of active links on which "among the κ largest" and "above the common threshold" differ, mean over clients `[clients, A]`."""
    wrong = 0
    for part in values.split(counts, dim=-1):
        kept = int(CORE * part.shape[-1])
        threshold = part.flatten().sort(descending=True).values[kept * len(part) - 1]
        wrong += int(((part >= threshold).sum(-1) - kept).abs().sum())
    return wrong / values.numel()


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| hidden units | active links | mean abs. r of two links | shuffled | lag-1 autocorrelation | mean-field error |")
    print("| --- | --- | --- | --- | --- | --- |")
    for width in (16, 64, 256):
        magnitudes.clear()
        clients = {"total": CLIENTS, "per_round": PER_ROUND, "alpha": 0.5}
        with tempfile.TemporaryDirectory() as folder:
            fedrts.run(
                recipe="paper", method="recorded", density=0.3, rounds=ROUNDS, engine="serial", clients=clients, out=f"{folder}/run",
                model_options={"hidden": [width, width]},
            )  # fmt: skip
        rounds = [torch.cat([entry.reshape(-1, entry.shape[-1]) for entry in magnitudes[index]]) for index in sorted(magnitudes)]
        series = torch.stack([outcomes(values).mean(0) for values in rounds[ROUNDS // 2 :]])
        between, shuffled = correlation_of_links(outcomes(rounds[-1]), np.random.default_rng(0))
        lag, error = autocorrelation(series), mean_field_error(rounds[-1])
        print(f"| {width} | {sum(counts):,} | {between:.3f} | {shuffled:.3f} | {lag:.2f} | {error:.1%} |", flush=True)


if __name__ == "__main__":
    main()

"""Tables of a study: how learning rates were chosen, and paired differences with their intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedrts.comparison.statistics import Difference, holm
from fedrts.comparison.table import ABSENT, SURE, Results, markdown, with_error
from studies import Choice, Score, Scores, Study

SPREAD = 0.01
"""Standard deviation of paired differences in earlier runs, which holds until there are some of its own."""
POWER = 0.8
"""Chance to find a difference that is there."""
SEEDS_ASKED = (3, 5, 10, 15, 20)


def runs_of(name: str, study: Study, raw: Mapping[str, Any], scores: Scores) -> list[dict[str, Any]]:
    """The runs at chosen rates in declared order, under the names of their entrants."""
    found = {run["cell"]: run for run in raw["runs"]}
    wanted = [cell for cell in study.cells(name, scores) if cell.name in found]
    wanted.sort(key=lambda cell: (study.entrants.index(cell.entrant), -cell.density, cell.seed))
    return [{**(run := found[cell.name]), "summary": {**run["summary"], "method": cell.entrant.name}} for cell in wanted]


def choosing(name: str, study: Study, scores: Scores) -> list[str]:
    """Validation accuracies by rate, the chosen one marked, and a warning where a best one lies at the edge."""
    seeds = ", ".join(map(str, study.choosing_seeds))
    words = (
        f"Learning rates: mean accuracy over the last ten rounds on {study.validation:.0%} of the training data that the run did not train "
        f"on (seed {seeds}); **chosen**. All methods of a density have the same rates, which widen until no best one lies at the edge."
    )
    choices = [(density, study.choice(name, part, density, scores)) for density in study.densities for part in study.parts]
    rates = sorted({rate for _, choice in choices for rate in choice.rates})
    body, warnings = [], []
    for density, choice in choices:
        tried = {entrant: scores for entrant, scores in choice.scores.items() if scores}
        body += [[entrant, f"{density:g}", *_rates(choice, entrant, rates)] for entrant in tried]
        if tried and not choice.is_over:
            warnings.append(f"**Not chosen yet** at density {density:g}, {', '.join(choice.scores)}: {_open(choice)}.")
    if not any(part.choosing for part in study.parts):
        return ["Learning rates are given, or those that another study chose."]
    return [words, markdown(["method", "density", *(f"{rate:g}" for rate in rates)], body), *warnings]


def _rates(choice: Choice, entrant: str, rates: Sequence[float]) -> Iterator[str]:
    scores = choice.scores[entrant]
    for rate in rates:
        text = _score(scores[rate]) if rate in scores else ABSENT
        yield f"**{text}**" if choice.is_over and rate == choice.best(entrant) else text


def _score(score: Score) -> str:
    return "diverged" if score is None else f"{score:.4f}"


def _open(choice: Choice) -> str:
    """Why rates are not chosen yet."""
    number = len(choice.rates) * len(choice.scores)
    edge = [entrant for entrant in choice.scores if choice.is_at_edge(entrant)]
    words = f"{sum(map(len, choice.scores.values()))} of {number} rates are tried"
    return words + (f"; the best so far lies at the edge for {', '.join(edge)}" if edge else "")


def differences(results: Results, reference: str) -> list[str]:
    """Every entrant less the reference: mean, 95 % interval, p, and p after Holm's correction in its column."""
    if reference not in results.methods or len(results.methods) < 2:
        return []
    words = (
        f"Less {reference}, paired over equal seeds: mean ± standard error, 95 % interval, p of a two-sided t-test, and p after Holm's "
        f"correction for the comparisons at one density. A claim is a corrected p < {SURE:g} (‡)."
    )
    body = []
    for column in results.columns:
        found = {method: results.against(method, reference, column) for method in results.methods if method != reference}
        tested = {method: one.p for method, one in found.items() if one is not None and one.p is not None}
        corrected = dict(zip(tested, holm(list(tested.values())), strict=True))
        present = {method: one for method, one in found.items() if one is not None}
        body += [[method, f"{column[-1]:g}", *_difference(results, one, corrected.get(method))] for method, one in present.items()]
    return [words, markdown([f"less {reference}", "density", "difference", "95 % interval", "p", "corrected", "seeds"], body)]


def _difference(results: Results, found: Difference, corrected: float | None) -> list[str]:
    mean = found.mean
    text, count = with_error(results, mean, signed=True), str(mean.count)
    if mean.error is None or found.p is None or corrected is None:
        return [text, ABSENT, ABSENT, ABSENT, count]
    half = quantile(0.975, mean.count - 1) * mean.error
    interval = f"{results.text(mean.value - half, True)} to {results.text(mean.value + half, True)}"
    return [text, interval, _p(found.p), _p(corrected) + (" ‡" if corrected < SURE else ""), count]


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.0005 else "< 0.001"


def what_seeds_tell(results: Results, reference: str, others: int) -> str:
    """Differences that a number of seeds can find, by the spread of the paired ones."""
    found = [results.against(method, reference, column) for method in results.methods if method != reference for column in results.columns]
    known = [one.mean for one in found if one is not None and one.mean.error is not None]
    freedom = sum(mean.count - 1 for mean in known)
    squares = sum((mean.error or 0) ** 2 * mean.count * (mean.count - 1) for mean in known)
    spread, source = (math.sqrt(squares / freedom), "here") if freedom else (SPREAD, "in earlier runs")
    sizes = ", ".join(f"{seeds} seeds {detectable(spread, seeds, others):.4f}" for seeds in SEEDS_ASKED)
    return (
        f"Paired differences have a standard deviation of {spread:.4f} {source}. A difference is found with a chance of {POWER:.0%}, at "
        f"the strictest step of Holm's correction for {others} comparisons, if it is as large as: {sizes}."
    )


def detectable(spread: float, seeds: int, others: int) -> float:
    """The difference that so many seeds find with that chance."""
    freedom = seeds - 1
    return (quantile(1 - SURE / (2 * others), freedom) + quantile(POWER, freedom)) * spread / math.sqrt(seeds)


def quantile(share: float, freedom: int) -> float:
    """Return a quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, share))

"""Studies: each method at its best learning rate. Rates are chosen on a validation split, then results are taken at them.

A study is declared in `comparisons.py`. Which cells come next follows from the results that are there: the trials of the declared rates,
those of wider ones while the best of some entrant lies at the edge, and then the runs at the chosen rates, seed by seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from fedrts.errors import InputError

Score = float | None
"""A trial's accuracy on the validation split; None: it diverged, which is worse than any accuracy."""
Scores = Mapping[str, Score]
"""Scores of finished trials by the names of their cells."""

RESULT_SEEDS = range(20)
FIRST_CHOOSING_SEED = 200
"""Rates are chosen with seeds from here on; those between are never used."""
UP, DOWN = 1.5, 0.5
"""Factors to the next rate where the best lies at an edge."""


@dataclass(frozen=True)
class Entrant:
    """A method with options of its own, under a name."""

    name: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keys with dots."""
    rate: float | None = None
    """A learning rate that is given, or that another study chose; None: this study chooses it."""

    def at(self, rate: float) -> Entrant:
        """Return the entrant with a given rate."""
        return replace(self, rate=rate)

    def varied(self, key: str, *values: float) -> tuple[Entrant, ...]:
        """Return one entrant for each value of a key, named after both."""
        short = key.rpartition(".")[2]
        return tuple(replace(self, name=f"{self.name}_{short}{value:g}", options={**self.options, key: value}) for value in values)


def entrants(*methods: str) -> tuple[Entrant, ...]:
    """Methods as they are."""
    return tuple(Entrant(method, method) for method in methods)


@dataclass(frozen=True)
class Part:
    """Entrants that have the same rates to choose from, and the seeds of their runs."""

    entrants: tuple[Entrant, ...]
    seeds: Sequence[int]

    @property
    def choosing(self) -> tuple[Entrant, ...]:
        """The entrants whose rates are chosen here."""
        return tuple(entrant for entrant in self.entrants if entrant.rate is None)


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    study: str
    entrant: Entrant
    density: float
    rate: float
    seed: int
    shared: Mapping[str, Any]
    """Settings of all cells."""
    recipe: ClassVar[str] = "paper"

    @property
    def name(self) -> str:
        return f"{self.entrant.name}-d{self.density:g}-lr{self.rate:g}-s{self.seed}"

    @property
    def is_trial(self) -> bool:
        return self.seed >= FIRST_CHOOSING_SEED

    @property
    def settings(self) -> dict[str, Any]:
        """All that is set, as keys with dots."""
        own = {"method": self.entrant.method, "density": self.density, "seed": self.seed, "train.lr": self.rate}
        return {**self.shared, **self.entrant.options, **own}


@dataclass(frozen=True)
class Choice:
    """The rates of a part's entrants at one density, as far as the trials that are there say."""

    rates: tuple[float, ...]
    scores: Mapping[str, Mapping[float, Score]]
    """Scores of finished rates, by entrant."""
    is_over: bool
    """All trials are there, and no entrant's best rate lies at the edge."""

    def best(self, entrant: str) -> float | None:
        """The best rate so far; None before any is finished. Of equal ones it is the lowest."""
        known = self.scores[entrant]
        return max(sorted(known), key=lambda rate: worth(known[rate])) if known else None

    def is_at_edge(self, entrant: str) -> bool:
        """Is the best rate the lowest or the highest of those that are finished?"""
        known = self.scores[entrant]
        return bool(known) and self.best(entrant) in (min(known), max(known))


@dataclass(frozen=True)
class Study:
    """Entrants at densities, each with its best learning rate."""

    title: str
    shared: Mapping[str, Any]
    densities: tuple[float, ...]
    parts: tuple[Part, ...]
    rates: tuple[float, ...]
    """Those that are tried first."""
    validation: float = 0.1
    """Share of the training data that trials leave out, and are judged by."""
    choosing_seeds: tuple[int, ...] = (FIRST_CHOOSING_SEED,)
    reference: str = "fedrts"
    """The entrant that the others are tested against."""

    def __post_init__(self) -> None:
        for seed in (seed for part in self.parts for seed in part.seeds if seed not in RESULT_SEEDS):
            raise InputError(f"{self.title}: seed {seed} is none of a result, which are 0 to {RESULT_SEEDS[-1]}")
        for seed in (seed for seed in self.choosing_seeds if seed < FIRST_CHOOSING_SEED):
            raise InputError(f"{self.title}: rates are chosen with seeds from {FIRST_CHOOSING_SEED} on (got {seed})")
        if len(self.rates) < 3:
            raise InputError(f"{self.title}: fewer than three rates have no best one inside")

    @property
    def entrants(self) -> tuple[Entrant, ...]:
        return tuple(entrant for part in self.parts for entrant in part.entrants)

    def cells(self, name: str, scores: Scores) -> Iterator[Cell]:
        """All cells that are known to be needed, in the order in which they are to be played; those of `scores` are among them."""
        for part in self.parts:
            for density in self.densities:
                choice = self.choice(name, part, density, scores)
                yield from self.trials(name, part, density, choice)
                if choice.is_over:
                    yield from self.runs(name, part, density, choice)

    def trials(self, name: str, part: Part, density: float, choice: Choice) -> Iterator[Cell]:
        for seed in self.choosing_seeds:
            for rate in choice.rates:
                for entrant in part.choosing:
                    yield self._trial(name, entrant, density, rate, seed)

    def runs(self, name: str, part: Part, density: float, choice: Choice) -> Iterator[Cell]:
        """At the given or best rates, or the lowest where none is known yet."""
        for seed in part.seeds:
            for entrant in part.entrants:
                yield Cell(name, entrant, density, rate_of(entrant, choice) or choice.rates[0], seed, self.shared)

    def choice(self, name: str, part: Part, density: float, scores: Scores) -> Choice:
        """Rates widen for all entrants of a part together, so that all have as many; a later part begins with those of the earlier ones."""
        rates, is_over = set(self.rates), True
        for earlier in self.parts[: self.parts.index(part) + 1]:
            while True:
                choice = self._tried(name, earlier, density, tuple(sorted(rates)), scores)
                wider = _wider(choice) if choice.is_over else set()
                if not wider:
                    break
                rates |= wider
            is_over = is_over and choice.is_over
        return Choice(choice.rates, choice.scores, is_over)

    def _tried(self, name: str, part: Part, density: float, rates: tuple[float, ...], scores: Scores) -> Choice:
        """What the trials of these rates came to; over means: all are there."""
        found: dict[str, dict[float, Score]] = {}
        for entrant in part.choosing:
            names = {rate: [self._trial(name, entrant, density, rate, seed).name for seed in self.choosing_seeds] for rate in rates}
            there = {rate: cells for rate, cells in names.items() if all(cell in scores for cell in cells)}
            found[entrant.name] = {rate: mean([scores[cell] for cell in cells]) for rate, cells in there.items()}
        return Choice(rates, found, all(len(own) == len(rates) for own in found.values()))

    def _trial(self, name: str, entrant: Entrant, density: float, rate: float, seed: int) -> Cell:
        return Cell(name, entrant, density, rate, seed, {**self.shared, "data_options.validation": self.validation})


def rate_of(entrant: Entrant, choice: Choice) -> float | None:
    """Return the rate that was given, or is the best so far; None before any is finished."""
    return entrant.rate or choice.best(entrant.name)


def _wider(choice: Choice) -> set[float]:
    """The next rates beyond the edges at which some entrant's best lies."""
    best = {choice.best(entrant) for entrant in choice.scores if choice.is_at_edge(entrant)}
    lowest, highest = choice.rates[0], choice.rates[-1]
    return ({lowest * DOWN} if lowest in best else set()) | ({highest * UP} if highest in best else set())


def mean(values: Sequence[Score]) -> Score:
    """None where one of them is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def worth(score: Score) -> float:
    """A score as a number that orders."""
    return float("-inf") if score is None else score

"""Frontiers: the best model that each contestant makes of so many bytes.

A contestant is a method with a few shapes of its own (density, share or width, and bits). At one budget its shapes are tried at a first
learning rate, then other rates at the best shape, all on a validation split. What is chosen gets results at every budget. Every contestant
has as many configurations: where the best rate of one lies at the edge of its rates, all try one rate more.

Rounds follow from bytes. A short run of each shape tells what its first rounds cost, when clients get the model or the mask for the first
time, and what later ones do. A trial has as many rounds as its budget pays for at the latter price; the results keep to the budget, by
the bytes of those first rounds and of the later ones of the chosen trial.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import Any, ClassVar

from fedrts.errors import InputError
from studies import DOWN, FIRST_CHOOSING_SEED, RESULT_SEEDS, UP, Score, Scores, mean, worth

PRICED_ROUNDS = 30
"""Rounds of the short run; its last ten, one of them an outer one, tell the price."""
MB = 1e6


@dataclass(frozen=True)
class Shape:
    """What a contestant may choose beside its learning rate: keys with dots, under a name."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Contestant:
    """A method with its shapes; those without shapes to choose from try more rates instead."""

    name: str
    method: str
    shapes: tuple[Shape, ...]
    rates: tuple[float, ...] = ()
    """Where they are others than the frontier's; the first is tried with all shapes."""
    rounds: int | None = None
    """Rounds of all its runs, if no budget bounds them."""


@dataclass(frozen=True)
class Configuration:
    """A shape at a learning rate."""

    shape: Shape
    rate: float

    @property
    def name(self) -> str:
        return f"{self.shape.name}-lr{self.rate:g}"


@dataclass(frozen=True)
class Play:
    """One run of a frontier."""

    study: str
    name: str
    settings: Mapping[str, Any]
    """All that is set, as keys with dots."""
    recipe: ClassVar[str] = "tuned"


@dataclass
class Choice:
    """The configurations of a contestant that are to be tried, and what those that are finished came to."""

    contestant: Contestant
    tried: list[Configuration] = field(default_factory=list)
    scores: dict[str, Score] = field(default_factory=dict)
    """By configurations' names."""

    @property
    def is_complete(self) -> bool:
        return len(self.scores) == len(self.tried)

    @property
    def best(self) -> Configuration | None:
        """The best so far; None before any is finished."""
        known = [one for one in self.tried if one.name in self.scores]
        return max(known, key=lambda one: worth(self.scores[one.name])) if known else None

    @property
    def rates(self) -> list[float]:
        """Those that are tried at the best shape."""
        best = self.best
        return sorted(one.rate for one in self.tried if best is not None and one.shape == best.shape)

    @property
    def is_at_edge(self) -> bool:
        return self.best is not None and self.best.rate in (self.rates[0], self.rates[-1])


@dataclass(frozen=True)
class Frontier:
    """Contestants, budgets, and how they are compared."""

    title: str
    shared: Mapping[str, Any]
    budgets: tuple[float, ...]
    """Megabytes of all clients and rounds, both ways."""
    chosen_at: float
    most_rounds: int
    contestants: tuple[Contestant, ...]
    rates: tuple[float, ...]
    """The first is tried with all shapes, the others with the best one."""
    seeds: Sequence[int]
    metric: str = "accuracy"
    """Metric of the average of the late models."""
    lower_is_better: bool = False
    drawn: tuple[float | None, float | None] = (None, None)
    """The range of the metric that the figure shows, None where the data decide."""
    validation: float = 0.1
    choosing_seeds: tuple[int, ...] = (FIRST_CHOOSING_SEED,)

    def __post_init__(self) -> None:
        for seed in (seed for seed in self.seeds if seed not in RESULT_SEEDS):
            raise InputError(f"{self.title}: seed {seed} is none of a result, which are 0 to {RESULT_SEEDS[-1]}")
        for seed in (seed for seed in self.choosing_seeds if seed < FIRST_CHOOSING_SEED):
            raise InputError(f"{self.title}: configurations are chosen with seeds from {FIRST_CHOOSING_SEED} on (got {seed})")
        if self.chosen_at not in self.budgets:
            raise InputError(f"{self.title}: configurations are chosen at {self.chosen_at:g} MB, which is none of the budgets")
        sizes = {one.name: self.configurations(one) for one in self.contestants}
        if len(set(sizes.values())) > 1:
            raise InputError(f"{self.title}: not all have as many configurations: {sizes}")

    def configurations(self, contestant: Contestant) -> int:
        """How many it tries, unless rates widen."""
        return len(contestant.shapes) + len(self.rates_of(contestant)) - 1

    def rates_of(self, contestant: Contestant) -> tuple[float, ...]:
        return contestant.rates or self.rates

    def cells(self, name: str, scores: Scores) -> Iterator[Play]:
        """All plays that are known to be needed, in the order in which they are to be played; those of `scores` are among them."""
        for contestant in self.contestants:
            yield from self.prices(name, contestant)
        choices = self.choices(scores)
        for choice in choices:
            for one in (one for one in choice.tried if self._is_priced(choice, one, scores)):
                yield from (self.trial(name, choice.contestant, one, seed, scores) for seed in self.choosing_seeds)
        if self.is_over(choices):
            yield from self.runs(name, choices, scores)

    def prices(self, name: str, contestant: Contestant) -> Iterator[Play]:
        """Short runs of all shapes."""
        for shape in contestant.shapes if contestant.rounds is None else ():
            configuration = Configuration(shape, self.rates_of(contestant)[0])
            yield self._play(name, contestant, configuration, "price", PRICED_ROUNDS, self.choosing_seeds[0])

    def choices(self, scores: Scores) -> list[Choice]:
        """What each contestant tries; one rate more for all while the best of one lies at the edge of its rates."""
        for more in count():
            choices = [self._choice(contestant, scores, more) for contestant in self.contestants]
            if self.is_over(choices) or not all(choice.is_complete for choice in choices):
                return choices
        raise AssertionError

    def is_over(self, choices: Sequence[Choice]) -> bool:
        """All trials are there, and no best rate lies at an edge."""
        return all(choice.is_complete and not choice.is_at_edge for choice in choices)

    def _choice(self, contestant: Contestant, scores: Scores, more: int) -> Choice:
        first, *others = self.rates_of(contestant)
        choice = Choice(contestant)

        def attempt(configurations: Sequence[Configuration]) -> bool:
            choice.tried += configurations
            for one in configurations:
                cells = [_trial_name(contestant, one, seed) for seed in self.choosing_seeds]
                if scores.get(price := _price_name(contestant, one.shape), 0.0) is None:
                    choice.scores[one.name] = scores[price]  # its rounds have no price, for it diverged
                elif all(cell in scores for cell in cells):
                    choice.scores[one.name] = mean([scores[cell] for cell in cells])
            return choice.is_complete

        if not attempt([Configuration(shape, first) for shape in contestant.shapes]) or choice.best is None:
            return choice
        shape = choice.best.shape
        complete = attempt([Configuration(shape, rate) for rate in others])
        for _ in range(more if complete else 0):
            if not attempt([Configuration(choice.best.shape, _beyond(choice))]):
                break
        return choice

    def _is_priced(self, choice: Choice, one: Configuration, scores: Scores) -> bool:
        return choice.contestant.rounds is not None or scores.get(_price_name(choice.contestant, one.shape)) is not None

    def trial(self, name: str, contestant: Contestant, one: Configuration, seed: int, scores: Scores) -> Play:
        rounds = contestant.rounds
        if rounds is None:
            price = scores[_price_name(contestant, one.shape)]
            assert price is not None
            rounds = self._rounds(self.chosen_at * MB / price)
        return self._play(name, contestant, one, f"s{seed}", rounds, seed)

    def runs(self, name: str, choices: Sequence[Choice], scores: Scores) -> Iterator[Play]:
        """Return the runs of the chosen configurations, seed by seed."""
        for seed in self.seeds:
            for choice in choices:
                yield from (self.run(name, choice, budget, seed, scores) for budget in self.budgets_of(choice.contestant))

    def budgets_of(self, contestant: Contestant) -> tuple[float, ...]:
        return self.budgets if contestant.rounds is None else (self.chosen_at,)

    def run(self, name: str, choice: Choice, budget: float, seed: int, scores: Scores) -> Play:
        contestant, best = choice.contestant, choice.best
        assert best is not None
        if contestant.rounds is not None:
            return self._play(name, contestant, best, f"s{seed}", contestant.rounds, seed)
        later = mean([scores[_trial_name(contestant, best, trial) + LATER] for trial in self.choosing_seeds])
        first = [scores[_price_name(contestant, best.shape) + round_of(index)] for index in range(PRICED_ROUNDS)]
        rounds = self._rounds(affordable(budget * MB, first, later))
        return self._play(name, contestant, best, f"{budget:g}MB-{rounds}-s{seed}", rounds, seed)

    def _rounds(self, affordable: float) -> int:
        return max(1, min(int(affordable), self.most_rounds))

    def _play(self, name: str, contestant: Contestant, one: Configuration, last: str, rounds: int, seed: int) -> Play:
        chosen = {"method": contestant.method, "rounds": rounds, "seed": seed, "train.lr": one.rate, **one.shape.options}
        held_out = {"data_options.validation": self.validation} if seed >= FIRST_CHOOSING_SEED else {}
        middle = one.shape.name if last == "price" else one.name
        return Play(name, f"{contestant.name}-{middle}-{last}", {**self.shared, **chosen, **held_out})


LATER = ":later"
"""Ends the names under which `Scores` have the mean bytes of a trial's later rounds."""


def round_of(index: int) -> str:
    """Ends the names under which `Scores` have the bytes of a short run's rounds."""
    return f":{index}"


def affordable(budget: float, first: Sequence[Score], later: Score) -> float:
    """Rounds whose bytes a budget pays for, where the first ones cost `first` each and all others `later`."""
    assert later is not None
    paid = [total for total in accumulate(cost or 0.0 for cost in first) if total <= budget]
    return len(paid) if len(paid) < len(first) else len(paid) + (budget - paid[-1]) / later


def _price_name(contestant: Contestant, shape: Shape) -> str:
    return f"{contestant.name}-{shape.name}-price"


def _trial_name(contestant: Contestant, one: Configuration, seed: int) -> str:
    return f"{contestant.name}-{one.name}-s{seed}"


def _beyond(choice: Choice) -> float:
    """The next rate, beyond the edge that is nearer to the best one."""
    assert choice.best is not None
    rates = choice.rates
    place = rates.index(choice.best.rate)
    return rates[-1] * UP if 2 * place >= len(rates) - 1 else rates[0] * DOWN


def _shapes(**named: Mapping[str, Any]) -> tuple[Shape, ...]:
    return tuple(Shape(name, options) for name, options in named.items())


def _sparse(*pairs: tuple[float, str]) -> tuple[Shape, ...]:
    return tuple(Shape(f"d{density:g}-{bits}", {"density": density, "wire.value_type": bits}) for density, bits in pairs)


def _narrow(key: str, *pairs: tuple[Any, str]) -> tuple[Shape, ...]:
    return tuple(
        Shape(f"w{width[0] if isinstance(width, list) else width}-{bits}", {f"model_options.{key}": width, "wire.value_type": bits})
        for width, bits in pairs
    )


def _largest(*entries: tuple[float, float, str]) -> tuple[Shape, ...]:
    return tuple(
        Shape(
            f"up{up:g}-down{down:g}-{bits}",
            {"method_options.share": up, "method_options.share_down": down, "method_options.values": bits},
        )
        for up, down, bits in entries
    )


def _rounded(bits: str) -> tuple[Shape, ...]:
    return _shapes(**{bits: {"method_options.uplink": bits, "method_options.downlink": bits}})


def _contestants(
    sparse: tuple[Shape, ...], largest: tuple[Shape, ...], narrow: tuple[Shape, ...], rates: tuple[float, ...], dense_rounds: int
) -> tuple[Contestant, ...]:
    return (
        Contestant("fedrts", "fedrts", sparse),
        Contestant("fedpaq8", "fedpaq", _rounded("int8"), rates),
        Contestant("fedpaq4", "fedpaq", _rounded("int4"), rates),
        Contestant("fedtopk", "fedtopk", largest),
        Contestant("small", "fedavg", narrow),
        Contestant("feddst", "feddst", sparse),
        Contestant("random", "random", sparse),
        Contestant("dense", "fedavg", _shapes(float32={"wire.value_type": "float32"}), rates, dense_rounds),
    )


FRONTIERS = {
    "cifar10": Frontier(
        "CIFAR-10, resnet18_small",
        {
            "data": "cifar10",
            "model": "resnet18_small",
            "clients.total": 100,
            "engine.precision": "bf16",
            "device": "cuda",
            "checkpoint.every": "10s",
            "eval.fairness": False,
        },
        budgets=(80, 160, 320),
        chosen_at=160,
        most_rounds=400,
        contestants=_contestants(
            _sparse((0.2, "int8"), (0.2, "int4"), (0.4, "int4")),
            _largest((0.05, 0.01, "int8"), (0.05, 0.01, "int4"), (0.1, 0.02, "int4")),
            _narrow("width", (8, "int8"), (8, "int4"), (12, "int4")),
            rates=(0.6, 0.15, 0.3, 1.0, 1.5),
            dense_rounds=200,
        ),
        rates=(0.6, 0.3, 1.0),
        seeds=range(3),
        drawn=(0.4, 0.82),
    ),
    "digits": Frontier(
        "Handwritten digits, MLP",
        {"data": "digits", "model": "mlp", "device": "cpu", "eval.fairness": False},
        budgets=(5, 10, 20),
        chosen_at=10,
        most_rounds=100,
        contestants=_contestants(
            _sparse((0.1, "int8"), (0.1, "int4"), (0.2, "int4")),
            _largest((0.02, 0.01, "int8"), (0.02, 0.01, "int4"), (0.05, 0.02, "int4")),
            _narrow("hidden", ([37, 37], "int8"), ([64, 64], "int8"), ([64, 64], "int4")),
            rates=(0.8, 0.2, 0.4, 1.2, 1.8),
            dense_rounds=50,
        ),
        rates=(0.8, 0.4, 1.2),
        seeds=range(5),
        drawn=(0.8, 0.985),
        choosing_seeds=(200, 201, 202),
    ),
    "stories": Frontier(
        "TinyStories with 1,000 words, a GPT-2 of 168,128 parameters",
        {
            "data": "tinystories",
            "data_options.words": 1000,
            "data_options.length": 64,
            "model": "tiny_gpt",
            "model_options.width": 64,
            "clients.total": 20,
            "clients.per_round": 5,
            "train.epochs": 1,
            "topology.interval": 5,
            "device": "cpu",
            "eval.fairness": False,
        },
        budgets=(10, 20, 40),
        chosen_at=20,
        most_rounds=100,
        contestants=_contestants(
            _sparse((0.3, "int8"), (0.3, "int4"), (0.1, "int4")),
            _largest((0.05, 0.02, "int8"), (0.05, 0.02, "int4"), (0.1, 0.05, "int4")),
            _narrow("width", (32, "int8"), (32, "int4"), (48, "int4")),
            rates=(0.6, 0.15, 0.3, 1.0, 1.5),
            dense_rounds=100,
        ),
        rates=(0.6, 0.3, 1.0),
        seeds=range(5),
        metric="perplexity",
        lower_is_better=True,
    ),
}
"""By name, in the order in which they are played."""

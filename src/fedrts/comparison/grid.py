"""The grid of a comparison: methods × densities × seeds × any other keys, as cells with resolved experiments."""

from __future__ import annotations

import inspect
import itertools
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedrts import config, data, planning
from fedrts.comparison import ladder
from fedrts.config import Experiment
from fedrts.errors import InputError, nearest

OWN_KEYS = {"method": "--methods", "density": "--densities", "seed": "--seeds", "out": "--out"}
"""Keys that are varied, or set, by flags of their own."""
VALIDATION = 0.1
"""Share of the training data by which learning rates are chosen."""
TUNE_SEED = 1000

Group = tuple[Any, ...]
"""What cells have in common that differ in their seed alone."""


@dataclass(frozen=True)
class Tuning:
    """How learning rates are chosen: each of `rates` is tried once, with a seed that no result uses."""

    rates: Sequence[float] | str
    """Or "auto": around the rate of the cell itself, and on until the best lies between two others."""
    seed: int = TUNE_SEED
    rounds: int | None = None
    """Rounds of a trial; default: those of a run."""

    @staticmethod
    def of(rates: Sequence[float] | str | None, seed: int | None, rounds: int | None) -> Tuning | None:
        """Return the tuning that was requested, if any; the other settings need rates."""
        if rates is not None:
            return Tuning(rates if isinstance(rates, str) else tuple(rates), TUNE_SEED if seed is None else seed, rounds)
        for flag, given in (("--tune-seed", seed), ("--tune-rounds", rounds)):
            if given is not None:
                raise InputError(f"{flag} is of the trials of learning rates: name these with --tune-lr, or leave it out")
        return None

    @property
    def auto(self) -> bool:
        return self.rates == ladder.AUTO

    def first_rates(self, own: float) -> Sequence[float]:
        """Return the rates to start with, for a cell whose `own` rate would be used without tuning."""
        return self.rates if not isinstance(self.rates, str) else ladder.around(own)


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    name: str
    place: Mapping[str, Any]
    """The values of the grid's other keys."""
    experiment: Experiment

    @property
    def group(self) -> Group:
        return (self.experiment.method, self.experiment.density, *map(repr, self.place.values()))

    def settings(self) -> dict[str, Any]:
        """The experiment as flat keys, without its folder; None means no value."""
        flat = config.flat(self.experiment.model_dump(mode="json"))
        return {key: value for key, value in flat.items() if key != "out" and value is not None}


@dataclass(frozen=True)
class Grid:
    """The declaration of a comparison. `base` are the settings that all cells share, as given."""

    base: Mapping[str, Any]
    methods: Sequence[str]
    densities: Sequence[float] = ()
    seeds: Sequence[int] = (0,)
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Other keys and their values: `{"topology.interval": (5, 10)}`."""
    tuning: Tuning | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """`method_options` of single methods, by name."""
    budget: float | None = None
    """Bytes in all that every cell may send; each has as many rounds as they pay for, at most those of `base` where it names some."""
    data_dir: Path | None = None
    """The folder of data sets, by whose shapes a budget is planned."""
    _paid: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, values in (("--methods", self.methods), ("--seeds", self.seeds), *((f"--grid {k}", v) for k, v in self.axes.items())):
            if not values:
                raise InputError(f"{name} names no value: give at least one")
        for name, values in (("--methods", self.methods), ("--densities", self.densities), ("--seeds", self.seeds), *self.axes.items()):
            for twice in (value for number, value in enumerate(values) if value in values[:number]):
                raise InputError(f"{name} lists {twice} twice: once is enough")
        for key in self.axes.keys() & OWN_KEYS.keys():
            raise InputError(f"--grid {key} is not possible: use {OWN_KEYS[key]}")
        if self.budget is not None and "rounds" in self.axes:
            raise InputError("--budget decides the rounds that --grid rounds varies: give one of the two (--rounds is the most of them)")
        if self.tuning is not None:
            self._check_tuning(self.tuning)

    def _check_tuning(self, tuning: Tuning) -> None:
        if isinstance(tuning.rates, str) and not tuning.auto:
            raise InputError(f"--tune-lr takes learning rates, or auto (got '{tuning.rates}')")
        if not tuning.rates:
            raise InputError("--tune-lr names no rate: give some, such as 0.01,0.03,0.1")
        if tuning.seed in self.seeds:
            raise InputError(f"--tune-seed {tuning.seed} is one of --seeds: rates must be chosen with a seed that no result uses")
        if "train.lr" in self.axes:
            raise InputError("--tune-lr chooses the learning rate that --grid train.lr varies: give one of the two")

    def cells(self) -> list[Cell]:
        """The cells seed by seed, so that an unfinished table is one of fewer seeds; dense methods once, whatever the densities."""
        found = [self._cell(seed, *point, {}, f"s{seed}") for seed in self.seeds for point in self._points()]
        return _named_apart(found)

    def trials(self, added: Mapping[Group, Sequence[float]] | None = None) -> list[tuple[Cell, float]]:
        """Return the trials of learning rates and the rate of each; `added` are extra rates of single groups."""
        if self.tuning is None:
            return []
        tuning = self.tuning
        shorter = {} if tuning.rounds is None else {"rounds": tuning.rounds, "topology": {"end": None}}

        def rates(untuned: Cell) -> list[float]:
            return [*tuning.first_rates(untuned.experiment.train.lr), *(added or {}).get(untuned.group, ())]

        found = [
            (self._cell(tuning.seed, *point, config.merged({"train": {"lr": rate}}, shorter), f"lr{shown(rate)}"), rate)
            for point in self._points()
            for rate in rates(self._cell(tuning.seed, *point, shorter, "lr"))
        ]
        _named_apart([cell for cell, _ in found])
        return found

    def _points(self) -> Iterable[tuple[str, float | None, dict[str, Any]]]:
        """Return methods, densities (None: dense) and places."""
        densities = self.densities or (self.base.get("density", config.Experiment.model_fields["density"].default),)
        for values in itertools.product(*self.axes.values()):
            place = dict(zip(self.axes, values, strict=True))
            for method in self.methods:
                for density in (None,) if config.method_class(method).dense else densities:
                    yield method, density, place

    def _cell(self, seed: int, method: str, density: float | None, place: dict[str, Any], more: dict[str, Any], last: str) -> Cell:
        base = {key: value for key, value in self.base.items() if key not in OWN_KEYS}
        own = {"method": method, "seed": seed} | ({} if density is None else {"density": density})
        names = [f"{_short(key, self.axes)}{shown(value)}" for key, value in place.items()]
        name = "-".join([shown(method), *([] if density is None else [f"d{density:g}"]), *names, last])
        shared = [base, {"method_options": self.options.get(method, {})}, *(_nested(key, value) for key, value in place.items())]
        try:
            layers = [*shared, self._affordable([*shared, own]), more, own]
            experiment = config.resolve(*layers)
            if self.tuning is not None:
                experiment = config.resolve(*layers, _validation(experiment))
        except InputError as error:
            raise InputError(f"cell {name}: {error}") from error
        return Cell(name, place, experiment.model_copy(update={"out": None}))

    def _affordable(self, layers: Sequence[config.Tree]) -> dict[str, int]:
        """Return the rounds of a cell that fit the budget, the same for every seed, because seeds must share one setting."""
        if self.budget is None:
            return {}
        settings = config.combined(*layers, {"seed": 0})
        if (key := repr(settings)) not in self._paid:
            self._paid[key] = planning.rounds_within(settings, self.budget, self.base.get("rounds"), self.data_dir)
        return {"rounds": self._paid[key]}


def parsed_values(text: str) -> list[Any]:
    """Parse `3,5,10` as TOML values, bare words as strings."""
    try:
        values: list[Any] = tomllib.loads(f"values = [{text}]")["values"]
    except tomllib.TOMLDecodeError:
        values = [_value(part.strip()) for part in text.split(",") if part.strip()]
    return values


def parsed_axis(text: str) -> tuple[str, list[Any]]:
    """Parse `table.key=a,b` into a key and its values."""
    key, equals, values = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--grid takes table.key=a,b (got '{text}')")
    return key.strip(), parsed_values(values)


def shown(value: Any) -> str:
    """Return a value as part of a file's name."""
    text = f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
    return re.sub(r"[^\w.+-]+", "_", text).strip("_")


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _short(key: str, axes: Iterable[str]) -> str:
    """Return the last part of a key if no other key has the same."""
    last = key.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in axes) == 1 else key.replace(".", "_")


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def _validation(experiment: Experiment) -> dict[str, Any]:
    """Return the setting that gives a data set a validation split, if it has none of its own."""
    given = experiment.data_options.get("validation")
    if given is not None and not given:
        raise InputError("--tune-lr chooses by a validation split: data_options.validation must not be 0")
    own = "validation" in inspect.signature(data.get(experiment.data)).parameters
    if own and experiment.data_options.get("train") == "train+valid":
        raise InputError("--tune-lr chooses by a validation split: data_options.train must not be 'train+valid', which trains on it")
    return {} if own or given else {"data_options": {"validation": VALIDATION}}


def _named_apart(cells: list[Cell]) -> list[Cell]:
    names = [cell.name for cell in cells]
    for name in {name for name in names if names.count(name) > 1}:
        raise InputError(f"two cells would have the name '{name}': their values differ too little to tell them apart")
    return cells


def check_method(name: str, methods: Sequence[str], flag: str) -> None:
    """Check that `name` is one of the compared methods."""
    if name not in methods:
        raise InputError(f"{flag} {name} is not among the methods{nearest(name, methods)}")

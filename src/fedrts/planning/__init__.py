"""Plans: the density, value type and rounds that fit a budget of bytes, and which plan is recommended."""

from __future__ import annotations

import copy
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedrts import config, costs
from fedrts.client.privacy import Repeatable
from fedrts.config import Experiment
from fedrts.costs.whole_run import RunCost, between, rehearsed
from fedrts.data.contract import Data
from fedrts.errors import InputError, note
from fedrts.methods.base import Method
from fedrts.planning import units
from fedrts.planning.allowance import Allowance
from fedrts.planning.rule import Fitting, reason, recommended
from fedrts.runs.build import Assembled, put_together
from fedrts.wire.value_types import FORMATS, ValueType

DENSITIES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
"""Those that are tried where none is asked for; dense methods have 1 alone."""
REHEARSED = (0.02, 0.1, 0.3, 1.0)
"""Those of them at which a large model is rehearsed; what others cost lies between."""
LARGE = 2_000_000
"""Parameters of such a model: a rehearsal takes seconds."""
MOST_HORIZONS = 4
"""A plan foresees at most this many times the rounds of the experiment, whatever the budget would pay for."""
Posed = tuple[Experiment, nn.Module, Data, int]
"""What `costs.posed` gives: experiment, model, data, samples of a client."""


@dataclass(frozen=True)
class BudgetPlan:
    """The settings that fit a budget."""

    words: str
    """The budget, for people."""
    experiment: Experiment
    """With the rounds that it would have without a budget."""
    fitting: Sequence[Fitting]
    """From dense to sparse; the most bits first."""
    chosen: Fitting
    said: Mapping[str, Any]
    """Flat keys that were asked for."""

    @property
    def settings(self) -> dict[str, Any]:
        """The recommended values of the keys that are left open, flat."""
        values = {"density": self.chosen.density, "wire.value_type": self.chosen.value_type, "rounds": self.chosen.rounds}
        dense = config.method_class(self.experiment.method).dense
        return {key: value for key, value in values.items() if key not in self.said and not (dense and key == "density")}

    @property
    def why(self) -> str:
        return reason(self.chosen, self.fitting, self.experiment.rounds, "wire.value_type" in self.said)

    def command(self, file: Path | None = None, said: Mapping[str, Any] | None = None) -> str:
        """Return the command that runs the recommendation; `said` are flat keys in addition to those of the experiment `file`."""
        wanted = dict(self.said if said is None else said) | self.settings
        if file is None:
            wanted = {"data": self.experiment.data} | wanted
        wanted = {key: "NAME" if value == config.CUSTOM else value for key, value in wanted.items()}  # what has none of its own
        words = ["fedrts", "run", *([str(file)] if file else [])]
        for key, value in wanted.items():
            words += [_FLAGS[key], _text(value)] if key in _FLAGS else ["--set", f"{key}={_text(value)}"]
        return shlex.join(words)

    def as_dict(self) -> dict[str, Any]:
        return {
            "budget": self.words,
            "method": self.experiment.method,
            "model": self.experiment.model,
            "data": self.experiment.data,
            "rounds": self.experiment.rounds,
            "fitting": [asdict(one) | {"recommended": one is self.chosen} for one in self.fitting],
            "recommended": asdict(self.chosen),
            "why": self.why,
            "command": self.command(),
        }


_FLAGS = {"method": "--method", "data": "--data", "model": "--model", "density": "--density", "rounds": "--rounds"}
_FLAGS |= {"wire.value_type": "--value-type"}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def plan(
    experiment: str | Path | None = None,
    *,
    budget: str | float | None = None,
    per_round: str | float | None = None,
    link: str | None = None,
    deadline: str | None = None,
    model: str | nn.Module | None = None,
    method: Method | str | None = None,
    input_shape: Sequence[int] | None = None,
    classes: int | None = None,
    data_dir: str | Path | None = None,
    **keywords: Any,
) -> BudgetPlan:
    """Return the settings that fit a budget: `fedrts.plan(data="digits", budget="20MB").settings`.

    `budget` is bytes in all, `per_round` bytes a client and round, `link` with `deadline` a speed and a time for each round. Other
    keywords are those of `run`; what they say of density, value type and rounds is kept. Clients per round are
    `clients={"per_round": 10}`.
    """
    layers = [] if experiment is None else [config.from_file(experiment)]
    named, options = config.from_method(method, keywords)
    module = model if isinstance(model, nn.Module) else None
    layers += [config.from_keywords({**keywords, **named, "model": model if module is None else config.CUSTOM}), options]
    return of_settings(layers, Allowance.of(budget, per_round, link, deadline), module, input_shape, classes, data_dir)


def of_settings(
    layers: Sequence[config.Tree],
    allowance: Allowance,
    module: nn.Module | None = None,
    input_shape: Sequence[int] | None = None,
    classes: int | None = None,
    data_dir: str | Path | None = None,
) -> BudgetPlan:
    """Return the `plan` of settings; later layers override earlier ones."""
    given = config.combined(*layers)
    problem = costs.posed(_anywhere(given), module, input_shape, classes, data_dir=data_dir)
    experiment, said = problem[0], config.flat(given)
    end = said.get("topology.end")
    least = experiment.rounds if "rounds" in said else end or 1  # no run ends before its topology is fixed
    most = experiment.rounds if "rounds" in said or allowance.total == math.inf else MOST_HORIZONS * experiment.rounds
    prices = Prices(problem, _types(said), end)
    tried = [entry for density in _densities(experiment, said) for entry in prices.at(density, strict="density" in said).items()]
    fitting = [_row(cost, name, paid, allowance.link) for name, cost in tried if (paid := allowance.rounds(cost, most)) >= least]
    if not fitting:
        raise InputError(_nothing_fits(allowance, experiment, tried))
    chosen = recommended(fitting)
    if "density" not in said and chosen.rounds == experiment.rounds:
        fitting += _finer(prices, [cost.experiment.density for _, cost in tried], chosen, allowance, most)
    fitting.sort(key=lambda one: (-one.density, -one.bits))
    return BudgetPlan(allowance.words, experiment, fitting, recommended(fitting), said)


def _finer(prices: Prices, known: Sequence[float], chosen: Fitting, allowance: Allowance, most: int) -> list[Fitting]:
    """The largest density between two of the table, to two digits, that pays for as many rounds as the one chosen.

    Bytes are nearly proportional to the density, so the first guess lies where a straight line has the budget, and the next ones beside it.
    """
    above = min((density for density in known if density > chosen.density), default=chosen.density)
    digits = 2 if chosen.density >= 0.1 else 3
    low, high = round(chosen.density * 10**digits), round(above * 10**digits)
    budget, value_type = min(allowance.total, allowance.per_round), chosen.value_type
    least, much = (allowance.needed(prices.at(density)[value_type], chosen.rounds) for density in (chosen.density, above))
    found: list[Fitting] = []
    while high - low > 1:
        guess = low + int((budget - least) / (much - least) * (high - low)) if much > least else low
        middle = min(max(guess, low + 1), high - 1)
        cost = prices.at(middle / 10**digits)[value_type]
        needed, paid = allowance.needed(cost, chosen.rounds), allowance.rounds(cost, most)
        if paid >= chosen.rounds:
            found, low, least = [_row(cost, value_type, paid, allowance.link)], middle, needed
        else:
            high, much = middle, needed
    return found


def _anywhere(given: config.Tree) -> dict[str, Any]:
    """Return settings without those that say where a run is computed and written; bytes do not depend on them."""
    return {key: value for key, value in given.items() if key not in ("engine", "device", "out")}


def within(layers: Sequence[config.Tree], budget: str | float, data_dir: str | Path | None = None) -> list[config.Tree]:
    """Return the layers of a run within a total budget: open values are planned, and a note names them."""
    found = of_settings(layers, Allowance.of(budget), data_dir=data_dir)
    one = found.chosen
    chosen = ", ".join(f"{key.rpartition('.')[2]} {_text(value)}" for key, value in found.settings.items()) or "everything as you set it"
    note(f"planned for {found.words}: {chosen} ({found.why}); at most {units.shown_size(one.bytes)}")
    return [*layers, config.nested(found.settings)]


def rounds_within(settings: config.Tree, budget: float, most: int | None = None, data_dir: str | Path | None = None) -> int:
    """Return how many rounds of this setting fit a total budget, at most `most` (default: a multiple of the experiment's)."""
    problem = costs.posed(_anywhere(settings), data_dir=data_dir)
    experiment = problem[0]
    value_type = experiment.wire.value_type
    prices = Prices(problem, [value_type], config.flat(settings).get("topology.end"))
    cost = prices.at(experiment.density, strict=True)[value_type]
    allowance = Allowance(units.shown_size(budget), total=budget)
    affordable = allowance.rounds(cost, most or MOST_HORIZONS * experiment.rounds)
    if not affordable:
        raise InputError(f"{allowance.words} do not pay for one round, which takes {units.shown_size(allowance.needed(cost, 1))}")
    if affordable < (end := config.flat(settings).get("topology.end", 1)):
        raise InputError(f"{allowance.words} pay for {affordable} rounds, and topology.end is {end}: lower it, or leave it out")
    return affordable


def _densities(experiment: Experiment, said: Mapping[str, Any]) -> tuple[float, ...]:
    """Return densities from dense to sparse."""
    if config.method_class(experiment.method).dense:
        return (1.0,)
    start = experiment.topology.density_start  # from which densities only fall
    tried = [density for density in DENSITIES if start is None or density <= start]
    return (experiment.density,) if "density" in said else tuple(sorted(tried or [experiment.density], reverse=True))


def _types(said: Mapping[str, Any]) -> list[ValueType]:
    """Return value types from many bits to few."""
    names = [name for name in FORMATS if said.get("wire.value_type", name) == name]
    return sorted(names, key=lambda name: -FORMATS[name].bits)


@dataclass
class Prices:
    """The cost of runs at a density in each of these types. Every density is rehearsed once; for large models, only some are."""

    problem: Posed
    types: Sequence[ValueType]
    end: int | None
    _known: dict[float, dict[ValueType, RunCost]] = field(default_factory=dict)
    _last: Assembled | None = None
    """The run that was rehearsed last."""

    def at(self, density: float, strict: bool = False) -> dict[ValueType, RunCost]:
        """Return the costs; empty if the model cannot be that sparse, unless `strict`."""
        if density not in self._known:
            self._known[density] = {} if strict else self._between(density)
        if not self._known[density]:
            self._known[density] = self._rehearsed(density, strict)
        return self._known[density]

    def _between(self, density: float) -> dict[ValueType, RunCost]:
        """Interpolate between neighbouring rehearsals for a density that needs none of its own."""
        experiment, module, _, _ = self.problem
        start = experiment.topology.density_start
        ends = [known for known in REHEARSED if start is None or known <= start]
        low, high = max((d for d in ends if d < density), default=None), min((d for d in ends if d > density), default=None)
        if density in ends or low is None or high is None or sum(part.numel() for part in module.parameters()) < LARGE:
            return {}
        few, many = self.at(low), self.at(high)
        if self._last is None or not few or not many:
            return {}
        wanted = config.complete(experiment.model_copy(update={"density": density}))
        counts = tuple(replace(self._last.setup, density_start=None).counts(density))
        macs = self._last.bench.macs
        return {name: between(few[name], many[name], wanted, counts, macs) for name in self.types}

    def _rehearsed(self, density: float, strict: bool) -> dict[ValueType, RunCost]:
        experiment, module, held, samples = self.problem
        try:
            sparse = config.complete(experiment.model_copy(update={"density": density}))
            run = put_together(sparse, copy.deepcopy(module), held, [torch.arange(samples)], noise=Repeatable)
            self._last = run
            return rehearsed(run, samples, self.types, self.end)
        except InputError:
            if strict or density == 1:
                raise
            return {}


def _row(cost: RunCost, value_type: ValueType, affordable: int, link: float | None) -> Fitting:
    rounds = min(affordable, cost.experiment.rounds)
    return Fitting(
        density=cost.experiment.density,
        value_type=value_type,
        bits=FORMATS[value_type].bits,
        rounds=rounds,
        affordable=affordable,
        bytes=cost.bytes(rounds),
        client_bytes=cost.heaviest,
        memory_bytes=cost.memory,
        flops=cost.flops(rounds),
        seconds=None if link is None else cost.heaviest / link,
    )


def _nothing_fits(allowance: Allowance, experiment: Experiment, tried: Sequence[tuple[ValueType, RunCost]]) -> str:
    """Say what would fit: the setting that needs least."""
    value_type, cost = min(tried, key=lambda entry: allowance.needed(entry[1], experiment.rounds))
    needed = allowance.needed(cost, experiment.rounds)
    what = f"density {cost.experiment.density:g} as {value_type}"
    fewer = allowance.rounds(cost, experiment.rounds)
    instead = f", or {fewer} rounds" if fewer else ""
    return (
        f"nothing fits {allowance.words}: the least that {experiment.rounds} rounds can do with, {what}, needs "
        f"{units.shown_size(needed)}{instead}"
    )

"""Resolving layers of settings into one complete experiment."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedrts import data, methods, models
from fedrts.client import optimizers, schedules
from fedrts.client.training import LocalTraining
from fedrts.config.foreign import foreign
from fedrts.config.general import GENERAL
from fedrts.config.sources import expanded
from fedrts.config.tables import Clients, Experiment
from fedrts.config.tree import Tree, flat, merged, nested
from fedrts.config.validation import check_options, validated
from fedrts.data.contract import Recipe
from fedrts.errors import InputError, note
from fedrts.methods.base import Method
from fedrts.methods.first_mask import beginning_with
from fedrts.registry import only_allowing
from fedrts.secure.ring import Ring
from fedrts.server import optimizer, reducers
from fedrts.sparse import falling
from fedrts.tasks import metrics

CUSTOM = "custom"
"""The model or data set of a run whose objects were given in Python."""


def resolve(*layers: Tree) -> Experiment:
    """Return the complete experiment: later layers override earlier ones, recipes fill gaps, `auto` is decided, names are checked."""
    given = combined(*layers)
    name = given.get("data", data.DEFAULT)
    options = given.get("data_options")
    recipe = data.recipe(name, options if isinstance(options, Mapping) else {}) if isinstance(name, str) and name != CUSTOM else Recipe()
    settings = merged(recipe_settings(given, recipe), given)
    _fit_per_round(settings, given)
    experiment = validated(Experiment, settings)
    if experiment.model == "auto":
        experiment = experiment.model_copy(update={"model": recipe.model})
    experiment = complete(experiment)
    if method_class(experiment.method).dense and given.get("density", 1.0) != 1.0:
        note(f"{experiment.method} is a dense method: density {given['density']} is ignored")
    return experiment


def recipe_settings(given: Tree, recipe: Recipe | None = None) -> Tree:
    """Return the settings with which a model learns data under this recipe, tuned or the paper's as `given`."""
    recipe = recipe or Recipe()
    if given.get("recipe", Experiment.model_fields["recipe"].default) == "paper":
        return recipe.settings
    model = given.get("model", "auto")
    own = recipe.tuned.get(recipe.model if model == "auto" else str(model), {})
    return merged(merged(merged(GENERAL, recipe.settings), own), _usual_rate(given))


def _usual_rate(given: Tree) -> Tree:
    """Return the usual learning rate of the optimiser that the user chose; recipes have one for plain descent."""
    train = given.get("train", {})
    named = train.get("optimizer") if isinstance(train, Mapping) else None
    known = isinstance(named, str) and (named in optimizers.names() or ":" in named)  # others are refused by name
    rate = optimizers.get(str(named)).usual_rate if known else None
    return {} if rate is None else {"train": {"lr": rate}}


def combined(*layers: Tree) -> dict[str, Any]:
    """Merge the settings of all layers key by key; later layers override earlier ones."""
    return functools.reduce(merged, map(expanded, layers), {})


def with_newer_keys(old: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Flat settings that an earlier version wrote, with the defaults of those keys of `now` that it did not know yet.

    They come from a folder: they may name no code but what `now` names too.
    """
    missing = now.keys() - old.keys()
    if not missing:
        return dict(old)
    try:
        with only_allowing(foreign(now)):
            full = flat(complete(validated(Experiment, nested(old))).model_dump(mode="json"))
    except InputError:  # they have keys that are known no more, or name other code
        return dict(old)
    return {key: full[key] for key in missing if full.get(key) is not None} | dict(old)


def complete(experiment: Experiment) -> Experiment:
    """Return `experiment` with `auto` decided, and names and options checked; depends only on it and on this machine's devices."""
    method = make_method(experiment)
    model = _given_in_python if experiment.model == CUSTOM else models.get(experiment.model)
    check_options("model_options", experiment.model_options, model, ("input_shape", "classes"), {"prune_output"})
    of_name = experiment.data != CUSTOM
    loader = data.get(experiment.data) if of_name else _given_in_python
    check_options("data_options", experiment.data_options, loader, ("folder",), {"validation"} if of_name else set())
    options = {key: value for key, value in method.model_dump().items() if key != "density"}
    train = experiment.train
    usual_rate = optimizer.get(train.server_optimizer).default_rate
    reducers.get(experiment.guard.reducer)
    _check_training(train)
    for name in experiment.eval.metrics:
        metrics.get(name)
    _check_falling(experiment, method)
    _check_secure(experiment)
    return experiment.model_copy(
        update={
            "data": data.absolute(experiment.data),
            "model": models.absolute(experiment.model),
            "method_options": {key: value for key, value in options.items() if value is not None},
            "density": 1.0 if method.dense else experiment.density,
            "device": _device(experiment.device),
            "init": None if experiment.init is None else str(Path(experiment.init).absolute()),  # resuming may happen elsewhere
            "origin": None if experiment.origin is None else str(Path(experiment.origin).absolute()),
            "topology": experiment.topology.model_copy(update={"end": experiment.end}),
            "clients": experiment.clients.model_copy(update={"min_size": experiment.min_size}),
            "guard": experiment.guard.model_copy(update={"quorum": experiment.quorum, "max_claim": experiment.max_claim}),
            "secure": experiment.secured,
            "train": train.model_copy(update={"server_lr": usual_rate if train.server_lr is None else train.server_lr}),
        }
    )


def _check_training(train: LocalTraining) -> None:
    """Check that the schedule gives rates, and that the optimiser takes the options that are set."""
    for index in (0, 1):  # of two rounds
        schedules.share(train.schedule, index, 2, train.lr_end)
    takes = optimizers.get(train.optimizer).takes
    for option in ("momentum", "amsgrad"):
        if getattr(train, option) and option not in takes:
            fitting = " or ".join(repr(name) for name in optimizers.names() if option in optimizers.get(name).takes)
            raise InputError(f"train.{option} belongs to train.optimizer = {fitting} (got '{train.optimizer}')")


def _check_falling(experiment: Experiment, method: Method) -> None:
    """Check that the density can fall: the method draws new masks, there are outer rounds for it, and the curve ends there."""
    topology = experiment.topology
    if topology.density_start is None:
        return
    if (why := method.steady()) is not None:
        raise InputError(
            f"topology.density_start is not for {experiment.method}: {why}; leave it out, or choose a method that re-draws masks"
        )
    outers = experiment.schedule.outers_before(experiment.end)
    if outers < 2:
        there = "there is one" if outers else "there is none"
        raise InputError(
            f"topology.density_start needs two outer rounds before topology.end = {experiment.end} to fall between, and {there}: "
            f"lower topology.interval = {topology.interval}, or raise topology.end or rounds"
        )
    for progress in (0.0, 0.5, 1.0):
        falling.left(topology.density_schedule, progress)


def _check_secure(experiment: Experiment) -> None:
    """Check that the server can work with sums alone."""
    if not experiment.secure.aggregation:
        return
    guard, per_round = experiment.guard, experiment.clients.per_round
    if (why := experiment.secure.refusal(per_round)) is not None:
        raise InputError(why)
    Ring(per_round, experiment.secure.bits, 1)
    if not reducers.get(guard.reducer).is_sum:
        raise InputError(
            f"guard.reducer = '{guard.reducer}' needs every client's weights, and secure.aggregation shows sums alone: "
            f"use {reducers.those('is_sum')}; clients clip what they send at secure.clip"
        )
    if guard.over_select:
        raise InputError("guard.over_select counts the first replies alone, and a secure sum has all of them: set it to 0")
    if experiment.wire.feedback:
        raise InputError("wire.feedback goes by what wire.value_type leaves, and secure.aggregation rounds otherwise: use one of them")


def _given_in_python() -> None:
    """Refuse options for objects given in Python."""


def method_class(name: str) -> type[Method]:
    """Return the class of a method's name or import path."""
    kind = methods.get(name)
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise InputError(f"'{name}' is no method: it must be a subclass of fedrts.methods.base.Method")
    return kind


def make_method(experiment: Experiment) -> Method:
    """Make the method object of an experiment."""
    kind = method_class(experiment.method)
    if "density" in experiment.method_options:
        raise InputError("method_options.density is not a key: density stands at the top level")
    method = validated(kind, {**experiment.method_options, "density": experiment.density}, prefix="method_options.")
    return beginning_with(experiment.topology.init_mask, method)


def _fit_per_round(settings: dict[str, Any], given: Tree) -> None:
    """Reduce a default number of clients per round to the total number of clients that the user set."""
    clients = settings.get("clients")
    asked = given.get("clients")
    if isinstance(clients, dict) and isinstance(clients.get("total"), int) and isinstance(asked, Mapping) and "per_round" not in asked:
        default = clients.get("per_round", Clients.model_fields["per_round"].default)
        clients["per_round"] = max(1, min(default, clients["total"]))


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and int(name.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise InputError(f"device '{name}' is not there: this machine has {torch.cuda.device_count()} CUDA devices; use --device cpu")
    return name

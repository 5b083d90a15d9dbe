"""The Python interface: `run`, `resume`, `train`, `fine_tune`, `load`, `inputs`."""

from __future__ import annotations

import pkgutil
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from fedrts import config, planning, trees
from fedrts.api.loading import inputs as inputs
from fedrts.api.loading import load as load
from fedrts.api.loading import loaded
from fedrts.api.playing import Result as Result
from fedrts.api.playing import check_uploads, play
from fedrts.callbacks.hooks import Hooks
from fedrts.callbacks.watching import ProgressBar
from fedrts.client import schedules
from fedrts.client.privacy import Repeatable
from fedrts.config import Experiment
from fedrts.data.contract import is_label
from fedrts.data.own import Reading, federate, in_precision_of, listed
from fedrts.data.partition import SITES
from fedrts.data.ragged import Collate
from fedrts.drain import Drain
from fedrts.engines.kinds import kind
from fedrts.errors import InputError, note
from fedrts.methods.base import Method
from fedrts.models import pretrained
from fedrts.observe import Observer, Silent
from fedrts.observe.notebook import default_observer
from fedrts.runs.build import Assembled, assemble, initialising, put_together
from fedrts.runs.folder import RunFolder, Trust, check_versions, resume_command
from fedrts.runs.origin import settings_from
from fedrts.sparse.layout import Prunable
from fedrts.tasks import Classification, CountRight, Loss, Task, judged_by, named, of_batches, predicting
from fedrts.tasks.metrics import LOSS, Metric, leading

if TYPE_CHECKING:
    from fedrts.flower.deployment import Door

_TUNER = "fedrts.comparison.tuned_run:with_best_rate"
"""Looked up when it is asked for: it plays runs, and so lies in a room above this one."""
_SETTINGS = {*Experiment.model_fields, *config.SHORT} - {"callbacks"}
"""Keywords that are keys of an experiment."""


def run(
    experiment: str | Path | None = None,
    *,
    budget: str | float | None = None,
    tune_lr: Iterable[float] | str | None = None,
    data_dir: str | Path | None = None,
    observer: Observer | None = None,
    callbacks: Sequence[object] = (),
    **keywords: Any,
) -> Result:
    """Run an experiment given as a TOML file, as keywords, or both (keywords override the file). The reference lists every key.

    `fedrts.run(data="digits", method="fedrts", density=0.1, rounds=50, lr=0.2, topology={"interval": 5}, out="runs/a")`
    A `budget` such as "200MB" limits the bytes of the run: density, value type and rounds that you do not give are planned.
    `tune_lr` is a list of learning rates, of which the best on a validation split is used, or "auto": rates around the experiment's own.
    `data_dir` is the folder of data sets (default: `FEDRTS_DATA`, or ~/.cache/fedrts); it is not part of the experiment.
    `callbacks` watch the run and may stop it: objects (`fedrts.callbacks.EarlyStopping(patience=20)`), or names, which its file keeps.
    """
    for name in ("model", "method"):
        if isinstance(keywords.get(name), nn.Module | Method):
            kind_of = type(keywords[name]).__name__
            raise InputError(f"{name} is a {kind_of}: fedrts.run takes names (and {name}_options), objects are for fedrts.train")
    named, objects = _sorted_out(callbacks)
    given = ([config.from_file(experiment)] if experiment is not None else []) + [config.from_keywords(keywords), named]
    layers = given if budget is None else planning.within(given, budget, data_dir)
    resolved = config.resolve(*layers)
    if tune_lr is not None:
        resolved = _tuned(layers, tune_lr, Path(str(with_folder(resolved).out)), data_dir)
    return start(resolved, _watcher(observer, objects), data_dir, tuned=tune_lr is not None, callbacks=objects)


def _sorted_out(callbacks: Sequence[object]) -> tuple[config.Tree, list[object]]:
    """Split callbacks into names, which become a setting, and objects."""
    if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
        raise InputError(f"callbacks is {callbacks!r}: give a list, such as [fedrts.callbacks.EarlyStopping(patience=20), 'csv']")
    named = [entry for entry in callbacks if isinstance(entry, str)]
    return {"callbacks": named} if named else {}, [entry for entry in callbacks if not isinstance(entry, str)]


def _watcher(observer: Observer | None, callbacks: Sequence[object]) -> Observer:
    """Return the observer or, if none is given, a notebook's progress bar, unless a callback shows one."""
    return observer or (Silent() if any(isinstance(entry, ProgressBar) for entry in callbacks) else default_observer())


def _tuned(layers: Sequence[config.Tree], rates: Iterable[float] | str, out: Path, data_dir: str | Path | None) -> Experiment:
    """Return the experiment with the best of these learning rates; its folder keeps the trials."""
    if not isinstance(rates, str | Iterable):
        raise InputError(f"tune_lr must be a list, or 'auto' (got {rates!r})")
    named = rates if isinstance(rates, str) else config.plain(list(rates))
    chosen: Experiment = pkgutil.resolve_name(_TUNER)(layers, named, out, data_dir=None if data_dir is None else Path(data_dir))[0]
    return chosen


def start(
    resolved: Experiment,
    observer: Observer,
    data_dir: str | Path | None = None,
    door: Door | None = None,
    *,
    tuned: bool = False,
    callbacks: Sequence[object] = (),
    drain: Drain | None = None,
) -> Result:
    """Start a resolved experiment in a new folder, or over Flower with nodes that connect to `door` (None: on this machine).

    `tuned`: the folder holds the trials by which its learning rate was chosen. `drain`: when asked to stop, the running round ends first.
    """
    if resolved.topology.init_mask == "given" and resolved.init is None and resolved.origin is None:
        raise InputError("topology.init_mask = 'given' needs weights to start from: name their file with --init")
    resolved = with_folder(resolved)
    folder = RunFolder(str(resolved.out))
    hooks = _hooks(resolved, callbacks)
    folder.create(resolved, tuned)
    try:
        assembled = prepared(resolved, data_dir)
    except Exception:  # what shows only now leaves no folder behind that would be in the way of the next try
        folder.discard()
        raise
    folder.write_experiment(assembled.experiment)  # with what was left to `auto`
    return play(assembled, folder, observer, data_dir, door, hooks=hooks, drain=drain)


def _hooks(experiment: Experiment, callbacks: Sequence[object]) -> Hooks:
    """Build the callbacks of a run, with the message that says how to continue if one of them fails."""
    again = f"; mend it, then continue with: {resume_command(experiment.out, experiment.model_dump())}" if experiment.out else ""
    return Hooks.of(experiment, callbacks, again)


def prepared(resolved: Experiment, data_dir: str | Path | None = None) -> Assembled:
    """Prepare a run. Missing files and impossible settings raise here, before anything can be lost."""
    assembled = assemble(resolved, data_dir)
    check_uploads(assembled, assembled.method.begin(assembled.setup))
    kind(assembled.experiment.engine.name).require()
    return assembled


def resume(
    path: str | Path,
    *,
    rounds: int | None = None,
    data_dir: str | Path | None = None,
    observer: Observer | None = None,
    door: Door | None = None,
    changes: Mapping[str, Any] | None = None,
    trust: Trust = False,
    callbacks: Sequence[object] = (),
    drain: Drain | None = None,
) -> Result:
    """Continue an interrupted run to exactly the result it would have had, or extend a run to more `rounds`.

    A finished run without `rounds` is only loaded. In additional rounds the topology stays as it is from `topology.end` on, and a falling
    learning rate keeps its last value. A run that stopped early continues only if you give `rounds`, as many as planned or more.
    Give `callbacks` that are objects again. `changes` are settings that differ from the run's file, such as `{"engine": {"wait": 60}}`.
    Code that the folder names by import path runs only if you `trust` it: True, or a list of paths; code in `changes` is always trusted.
    """
    folder = RunFolder(path)
    named, objects = _sorted_out(callbacks)
    changes = config.merged(changes or {}, named)
    with folder.trusted(trust, changes):
        more = {} if rounds is None else _prolonged(folder, _planned(folder), rounds, lifted=True)
        return _resume(folder, data_dir, _watcher(observer, objects), door, config.merged(changes, more), bool(more), objects, drain)


def _planned(folder: RunFolder) -> Experiment:
    return config.validated(Experiment, config.from_file(folder.experiment_file()))


def _prolonged(folder: RunFolder, planned: Experiment, rounds: int, lifted: bool = False) -> dict[str, Any]:
    """Return the settings with which a run continues for more rounds than planned; empty if the number is as planned.

    After an early stop the stopping rule starts afresh; with as many rounds as planned, only if the stop is to be `lifted`.
    """
    config.validated(Experiment, {"rounds": rounds})
    if rounds < planned.rounds:
        raise InputError(f"rounds = {rounds}: the run in {folder.path} has {planned.rounds}; more can be played, not fewer")
    stopped = folder.stopped()
    resumed = {"stop": {"start": stopped["round"] + 1}} if stopped and stopped["round"] >= planned.stop.start else {}
    if rounds == planned.rounds:
        return resumed if lifted else {}
    train, horizon = planned.train, planned.train.schedule_rounds or planned.rounds
    last = train.lr * schedules.share(train.schedule, horizon, horizon, train.lr_end)
    rate = f"the learning rate {'is' if last == train.lr else 'stays at'} {last:g}"
    note(f"{rounds} rounds instead of {planned.rounds}: the topology is fixed from round {planned.end} on, as planned; {rate}")
    return {"rounds": rounds, "train": {"schedule_rounds": horizon}, "topology": {"end": planned.end}, **resumed}


def _resume(
    folder: RunFolder,
    data_dir: str | Path | None,
    observer: Observer,
    door: Door | None,
    changes: Mapping[str, Any],
    prolonged: bool,
    callbacks: Sequence[object],
    drain: Drain | None,
) -> Result:
    file = folder.experiment_file()
    folder.verify()
    resolved = config.resolve(config.from_file(file), changes, {"out": str(folder.path)})
    check_versions(tomllib.loads(file.read_text("utf-8-sig")).get("versions", {}))
    if resolved.model == config.CUSTOM:
        raise InputError(f"the run in {folder.path} trains a model given in Python: call fedrts.train(…, out=…, resume=True) again")
    if resolved.clients.partition == SITES and door is None:
        again = resume_command(folder.path, resolved.model_dump())
        raise InputError(f"the run in {folder.path} trains at sites: continue it with `{again}` (or --insecure, as it began)")
    hooks = _hooks(resolved, callbacks)
    assembled = assemble(resolved, data_dir)
    if not folder.begun:  # its file may be another than that of the start
        check_uploads(assembled, assembled.method.begin(assembled.setup))
    return play(assembled, folder, observer, data_dir, door, prolonged, hooks, drain)


def train(
    *,
    model: nn.Module | object,
    clients: Any,
    test: Any,
    method: Method | str | None = None,
    rounds: int,
    loss: Loss | None = None,
    correct: CountRight | None = None,
    metrics: Sequence[str | Metric] = (),
    task: Task | str | None = None,
    client: str | None = None,
    target: str | Sequence[str] | None = None,
    collate_fn: Collate | None = None,
    prunable: Prunable | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    observer: Observer | None = None,
    callbacks: Sequence[object] = (),
    **keywords: Any,
) -> Result:
    """Train your own model on your own clients' data.

    `clients` is a list of datasets, a dictionary of them by the clients' names, or one table with a column `client`; `test` is a dataset
    like theirs, or the share of their rows that is held out. A dataset is map-style or iterable, a DataLoader, arrays, or a table
    (docs/python.md lists them all). Inputs and targets are tensors, tuples or dictionaries of them; `target` names the target of a
    dictionary or table, and `collate_fn` makes batches of samples.

    `model` is a module, `"hf:FOLDER"` or a configuration of transformers.
    `loss(output, target)`, or `loss(model, batch)`, is a batch's mean loss (default cross-entropy) and `correct(output, target)` the
    number of right answers in it. `metrics` are names (`["mae", "r2"]`), your own `fedrts.tasks.metrics.Metric`s or objects with update
    and compute: without accuracy the first of them leads, without any the loss. `task` is a name ("regression", "multilabel",
    "imbalanced"), which brings loss and metrics, or an object that replaces all three.
    `prunable(name, parameter)` replaces the rule of what may be pruned. Other keywords are those of `run` (`lr`, `epochs`,
    `dropout`, `topology={…}`).
    With `out` a run folder is written; `resume=True` continues it after an interruption, or for more `rounds`. The model is trained in
    place: to compare, give every call one of its own. `callbacks` are those of `run`.
    """
    sets, names = listed(clients, client)
    watching, objects = _sorted_out(callbacks)
    if keywords.get("data", config.CUSTOM) != config.CUSTOM:
        raise InputError(f"data = {keywords['data']!r} is for fedrts.run: fedrts.train trains on the datasets in `clients`; leave it out")
    if task is not None and ((loss or correct) is not None or (metrics and not isinstance(task, str))):
        raise InputError("task brings its own loss and metrics: give either a task, or loss and correct and metrics")
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        raise InputError(f"metrics is {metrics!r}: give a list of names, or of fedrts.tasks.metrics.Metric")
    for name, function in (("loss", loss), ("correct", correct), ("prunable", prunable), ("collate_fn", collate_fn)):
        if function is not None and not callable(function):
            raise InputError(f"{name} must be a function (got {function!r})")
    chosen, options = config.from_method(method, keywords)
    given = {**config.from_keywords({**keywords, "rounds": rounds, **chosen}), **watching}
    federation = {"total": len(sets), "per_round": min(10, len(sets)), "min_size": 1}
    base: dict[str, Any] = {"data": config.CUSTOM, "model": config.CUSTOM, "clients": federation, "out": str(out) if out else None}
    folder = RunFolder(out) if out else None
    begun = folder is not None and resume and (folder.path / "experiment.toml").exists()
    more: dict[str, Any] = {}
    if folder is not None and begun:  # what was decided stays: the model may show another mask by now, and more rounds may be asked for
        planned = _planned(folder)
        base["recipe"] = planned.recipe
        base["topology"] = {"init_mask": planned.topology.init_mask, "end": planned.end}
        base["train"] = {"schedule_rounds": planned.train.schedule_rounds}
        base["stop"] = {"start": planned.stop.start}
        more = _prolonged(folder, planned, rounds)
        base = config.merged(base, more)
    settings = config.merged(base, given)
    settings = config.merged(config.recipe_settings(settings), config.merged(settings, options))
    resolved = config.complete(config.validated(Experiment, settings))
    hooks = _hooks(resolved, objects)
    if not isinstance(model, nn.Module):
        with initialising(resolved):
            model = pretrained.from_python(model)
    guessed = task is None
    of_whole = loss is not None and of_batches(loss)
    task_name, own_task = (task, False) if isinstance(task, str) else (None, task is not None)
    reading = Reading(client, target, collate_fn, of_whole or own_task, task_name, as_given=loss is not None or own_task)
    own = federate(sets, test, Classification(), reading, names)
    held = pretrained.with_decoder_inputs(model, in_precision_of(model, own.data))
    if task is None and loss is None and correct is None:
        task = pretrained.task_name(model, held.y)
    if isinstance(task, str):
        task = judged_by(named.made(task, held.y), metrics)
    elif task is None:
        labels = is_label(held.targets(trees.at(held.y, slice(0, 2))))
        task = predicting(loss, correct, metrics, labels, own.form if of_whole else None)
    held = replace(held, task=task)
    assembled = put_together(resolved, model, held, own.rows, prunable, try_task=True, noise=Repeatable)
    check_uploads(assembled, assembled.method.begin(assembled.setup))  # an infeasible density shows here, before there is a folder
    kind(assembled.experiment.engine.name).require()
    if guessed and leading(assembled.plan.metrics) is LOSS:
        note("targets are no labels, and neither `correct` nor `metrics` says how to judge the model: it is judged by its loss")
    if folder is not None and not begun:
        folder.create(assembled.experiment)
    return play(assembled, folder, _watcher(observer, objects), prolonged=bool(more), hooks=hooks)


def fine_tune(
    path: str | Path,
    *,
    mask: Literal["search", "keep"] = "search",
    model: nn.Module | None = None,
    data_dir: str | Path | None = None,
    trust: Trust = False,
    **keywords: Any,
) -> Result:
    """Start a new run from a finished one: with other data or clients, at another density, for the given `rounds`.

    `fedrts.fine_tune("runs/a", data="fashion_mnist", density=0.1, rounds=20, out="runs/b")`, or with `clients=[…], test=…` as for `train`

    The new run starts with the model and mask of the old one, and has its settings except those given here. At a lower density every layer
    keeps its largest weights, reduced by one factor. With `mask="search"` the topology keeps changing, and a method with knowledge about
    links (posteriors) keeps it; with "keep" the mask stays fixed. If the model was given in Python, give it again.
    """
    folder = RunFolder(path)
    if mask not in ("search", "keep"):
        raise InputError(f"mask must be 'search' or 'keep' (got {mask!r})")
    own = "test" in keywords
    if not own and not isinstance(keywords.get("clients", 0), int | Mapping):
        raise InputError("clients are datasets: give test=… beside them, as to fedrts.train (or a number of clients)")
    keys = _SETTINGS - ({"clients"} if own else set())
    settings = {key: value for key, value in keywords.items() if key in keys and not isinstance(value, Method)}
    given = config.from_keywords(settings)
    rest = {key: value for key, value in keywords.items() if key not in settings}
    with folder.trusted(trust, {**given, **_sorted_out(keywords.get("callbacks", ()))[0]}):
        found = settings_from(folder, given, mask == "keep")
        if not own:
            if model is not None or found.get("model") == config.CUSTOM:
                raise InputError(
                    f"the run in {path} trains a model given in Python: give model=…, clients=[…] and test=…, as to fedrts.train"
                )
            return run(data_dir=data_dir, **found, **rest)
        module = model if model is not None else loaded(folder, None, None, data_dir, average=False)
        found["model_options"] = {key: value for key, value in found.get("model_options", {}).items() if key == "prune_output"}
        method = rest.get("method")
        said = {"method", "method_options", *method.model_fields_set} if isinstance(method, Method) else set()
        for key in {"data", "data_options", "model", "clients", *said}:
            found.pop(key, None)
        return train(model=module, **found, **rest)


def with_folder(experiment: Experiment) -> Experiment:
    """Return the experiment with `out` set: runs/<time>-<data>-<method>-<seed>, with a number appended if that exists."""
    if experiment.out:
        return experiment
    names = (Path(name.rpartition(":")[2]).stem or "data" for name in (experiment.data, experiment.method))
    stem = "-".join([time.strftime("%Y%m%d-%H%M%S"), *names, str(experiment.seed)])
    taken = (Path("runs", stem if n == 1 else f"{stem}-{n}") for n in range(1, 1000))
    return experiment.model_copy(update={"out": str(next(path for path in taken if not path.exists()))})

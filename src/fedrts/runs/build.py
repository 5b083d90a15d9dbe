"""Building everything that an experiment names: data, clients, model, method, engine."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedrts import config, data, models, trees
from fedrts.client.privacy import Noise, Repeatable
from fedrts.client.summing import Summing
from fedrts.client.training import LocalTraining
from fedrts.client.workbench import Workbench
from fedrts.config import Experiment
from fedrts.data.contract import Data
from fedrts.data.digests import digest_of
from fedrts.data.holdings import Holdings
from fedrts.data.partition import BY_COLUMN, SITES, by_owner, divide
from fedrts.engines import choice
from fedrts.engines.kinds import kind
from fedrts.errors import InputError, note, reason
from fedrts.methods.base import Method, Sparse
from fedrts.methods.contract import Round, Setup, State
from fedrts.models import pretrained
from fedrts.registry import import_path
from fedrts.runs.feedback import check_feedback
from fedrts.runs.initial_weights import load_weights
from fedrts.runs.likeness import likeness
from fedrts.runs.origin import Origin
from fedrts.runs.secrecy import check_sums
from fedrts.server import optimizer
from fedrts.server.averaging import LateAverage
from fedrts.server.optimizer import ServerOptimizer
from fedrts.server.rounds import Plan
from fedrts.sparse import random
from fedrts.sparse.arms import LINK, smaller
from fedrts.sparse.cost import Macs
from fedrts.sparse.falling import Fall
from fedrts.sparse.layout import Layout, Prunable
from fedrts.sparse.mask import Mask
from fedrts.sparse.mode import training
from fedrts.sparse.schedule import Schedule
from fedrts.tasks import Classification, check, cross_entropy, declared, judged_by, logits, smoothed

_SOME = slice(0, 2)
"""A norm without statistics of its own needs two."""
_TRIED = slice(0, 64)
"""Test samples on which one's own count of right answers is tried."""


@dataclass(frozen=True)
class Assembled:
    """An experiment with everything that it names, built."""

    experiment: Experiment
    method: Method
    module: nn.Module
    layout: Layout
    setup: Setup
    plan: Plan
    data: Data
    rows: Holdings
    training: LocalTraining
    bench: Workbench
    origin: Origin | None = None
    """The run that it goes on from."""

    def begun(self) -> tuple[State, int]:
        """Its first state and next round: -1 is the set-up, which a run that starts from another skips."""
        if self.origin is None:
            return self.method.begin(self.setup), -1
        return self.origin.begun(self.method, self.experiment.method, self.setup), 0

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint belongs to besides the experiment: the model's layout and layers, the clients' sample counts, data, own
        task.
        """
        held = repr((list(self.plan.samples), self.data.sampled_fingerprint))  # all that earlier versions noted of the data
        samples = hashlib.blake2b(held.encode(), digest_size=8).hexdigest()
        layers = [entry.name for entry in self.layout.layers]
        known = {"model": self.layout.fingerprint, "clients": samples, "layers": layers, "data": self.data.fingerprint}
        if self.layout.frozen:
            known["frozen"] = hashlib.blake2b(
                repr([digest_of(tensor.detach()) for tensor in self.layout.frozen.values()]).encode(), digest_size=8
            ).hexdigest()
        return known | {"task": likeness(self.data.task)} if self.experiment.data == config.CUSTOM else known


def federation(experiment: Experiment, data_dir: str | Path | None = None) -> tuple[Data, Holdings]:
    """Return the data of a resolved experiment, and the row numbers of every client."""
    held = data.load(experiment.data, experiment.data_options, data_dir)
    c, key = experiment.clients, random.key(experiment.seed, "partition")
    if c.partition == SITES and not kind(experiment.engine.name).has_sites:
        raise InputError("clients.partition = 'sites' means data on other machines: run it with `fedrts server`")
    if c.partition == BY_COLUMN and held.owners is not None:
        return held, by_owner(held.owners, c.total, held.owner_names)
    return held, divide(
        c.partition,
        held.y if held.labels is not None else torch.empty(held.samples, 0),
        c.total,
        c.alpha,
        experiment.min_size,
        key,
        c.classes_per_client,
    )


def assemble(experiment: Experiment, data_dir: str | Path | None = None) -> Assembled:
    """Load the data, divide it, and build the model of a resolved experiment; `data_dir` is the folder of data sets."""
    held, rows = federation(experiment, data_dir)
    if not len(held.test_y) and experiment.clients.partition != SITES:
        raise InputError(f"'{experiment.data}' has no test data, which only runs with sites can do without: raise data_options.test")
    return put_together(experiment, build_model(experiment, held.input_shape, held.classes), held, rows, noise=Repeatable)


def build_model(experiment: Experiment, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The model of an experiment with its initial weights, for inputs of this shape."""
    options = {key: value for key, value in experiment.model_options.items() if key != "prune_output"}
    with initialising(experiment):
        try:
            module = models.get(experiment.model)(input_shape, classes, **options)
        except InputError:
            raise
        except Exception as error:  # whatever a user's builder raises
            raise InputError(f"cannot build the model '{experiment.model}' with model_options {options}: {reason(error)}") from error
    if not isinstance(module, nn.Module):
        raise InputError(f"the model '{experiment.model}' gives {type(module).__name__}, which is no torch.nn.Module")
    return module


@contextmanager
def initialising(experiment: Experiment) -> Iterator[None]:
    """Draw weights by the experiment's seed during the block."""
    with torch.random.fork_rng([]):
        torch.manual_seed(random.seed(random.key(experiment.seed, "model")))
        yield


def put_together(
    experiment: Experiment,
    module: nn.Module,
    held: Data,
    parts: Sequence[Tensor],
    prunable: Prunable | None = None,
    try_task: bool = False,
    *,
    noise: Noise,
) -> Assembled:
    """Build the run of `module` on clients that hold the rows `parts` of `held`; `try_task` checks your own loss and targets.

    `noise`: a site's is `Unpredictable`, a simulation's `Repeatable`; nothing is assumed.
    """
    rows = Holdings.of(parts)
    _check_parameters(module)
    device = torch.device(experiment.device)
    method = config.make_method(experiment)
    origin = None if experiment.origin is None else Origin.read(experiment.origin)
    module = _started(experiment, method, module, origin).to(device)
    held = with_metrics(held, experiment).to(device)
    if experiment.train.smoothing:
        held = replace(held, task=smoothed(held.task, experiment.train.smoothing))
    layout = layout_of(experiment, module, prunable)
    if not method.dense and (said := smaller(experiment.topology.unit, {entry.name: entry.shape for entry in layout.layers})):
        note(f"topology.unit = {experiment.topology.unit}: {said}")
    weights = layout.flatten(module.state_dict())
    t, e = experiment.train, experiment
    trained = e.init is not None or origin is not None or _is_trained(module)  # and so as strong as it should be
    setup = Setup(
        layout,
        weights,
        held.input_shape,
        rng=lambda purpose: random.key(e.seed, "server", -1, purpose),
        module=module,
        samples=sum(rows.sizes),
        budget=e.topology.budget,
        layer_density=e.topology.layer_density,
        init_mask=e.topology.init_mask,
        init_scale="dense" if trained else e.topology.init_scale,
        density_start=e.topology.density_start,
    )
    if origin is not None and not method.dense:
        setup = replace(setup, given=origin.given(layout).to(device), init_mask="given")
    experiment, setup = _with_given_mask(experiment, setup, method)
    training = t.but(schedule_rounds=t.schedule_rounds or e.rounds)
    if t.batch_size == 1 and any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()):
        raise InputError("train.batch_size = 1 gives BatchNorm no statistics: use at least 2")
    try:
        macs = Macs.of(module, layout, held.inputs(trees.at(held.x, _SOME)))
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError) as error:
        named = e.model != config.CUSTOM and e.data != config.CUSTOM
        whose = f"the model '{e.model}' cannot read the inputs of '{e.data}'" if named else "the model cannot read the inputs"
        raise InputError(f"{whose}, {_described(module, trees.opened(trees.at(held.x, slice(0, 1))))}: {reason(error)}") from error
    if try_task:
        _check_task(module, held)
    summing = Summing(e.secure, e.seed) if e.secure.aggregation else None
    bench = Workbench(module, layout, held, training, e.seed, macs, e.privacy, e.eval.batch_size, summing=summing, noise=noise)
    settings = choice.chosen(e, bench)
    experiment = experiment.model_copy(update={"engine": settings})
    engine = choice.make(settings, bench, rows, e.eval.batch_size)
    plan = Plan(
        method,
        engine,
        layout,
        replace(e.schedule, fall=_fall(e, layout)),
        e.rounds,
        samples=rows.sizes,
        per_round=e.clients.per_round,
        seed=e.seed,
        eval_every=e.eval.every,
        guard=e.guard,
        value_type=e.wire.value_type,
        download_type=e.wire.download_type,
        feedback=e.wire.feedback,
        dropout=e.clients.dropout,
        optimizer=_server_optimizer(e),
        average=LateAverage(t.average, e.rounds, t.average_share, t.average_decay),
        metrics=declared(held.task),
        summing=summing,
    )
    check_sums(experiment, plan)
    check_feedback(experiment, plan)
    return Assembled(experiment, method, module, layout, setup, plan, held, rows, training, bench, origin)


def with_metrics(held: Data, experiment: Experiment) -> Data:
    """Return data whose task also gives the experiment's additional metrics."""
    return replace(held, task=judged_by(held.task, experiment.eval.metrics)) if experiment.eval.metrics else held


def _fall(experiment: Experiment, layout: Layout) -> Fall | None:
    """Return how the density falls over the rounds, if it does."""
    t = experiment.topology
    if t.density_start is None:
        return None
    return Fall(t.density_start, experiment.density, t.density_schedule, layout, t.budget, t.layer_density)


def _server_optimizer(experiment: Experiment) -> ServerOptimizer:
    train = experiment.train
    kind = optimizer.get(train.server_optimizer)
    rate = kind.default_rate if train.server_lr is None else train.server_lr
    return kind(rate, train.server_momentum, train.server_beta2, train.server_tau)


def with_samples(run: Assembled, samples: Sequence[int], held_out: Mapping[int, int] | None = None) -> Assembled:
    """Return a run whose sites have stated their numbers of training and held-out samples."""
    rows = Holdings.cut(torch.zeros((), dtype=torch.int64).expand(sum(samples)), samples)  # no memory: the rows are elsewhere
    plan = replace(run.plan, samples=list(samples), held_out=dict(held_out or {}))
    return replace(run, rows=rows, setup=replace(run.setup, samples=sum(samples)), plan=plan)


def _with_given_mask(experiment: Experiment, setup: Setup, method: Method) -> tuple[Experiment, Setup]:
    """Where nothing is said of the first mask and the weights to start from show one, it is theirs; of a pretrained model the largest."""
    layout, links = setup.layout, setup.weights[: setup.layout.links]
    said = "init_mask" in experiment.topology.model_fields_set or experiment.origin is not None
    trained = setup.module is not None and _is_trained(setup.module)
    started = experiment.init is not None or experiment.model == config.CUSTOM or trained
    if said or method.dense or not started or not (setup.shows_mask or trained):
        return experiment, setup
    own = type(method).initial_mask is not Sparse.initial_mask
    if own or method.exchanges(Round.of(-1, Schedule(), Mask.full(layout.sizes), layout)):  # the method, or a set-up, chooses the mask
        return experiment, setup
    if not setup.shows_mask:
        note("pretrained weights: the first mask keeps the largest of each layer (topology.init_mask = 'magnitude'; 'snip' asks data)")
        topology = experiment.topology.model_copy(update={"init_mask": "magnitude"})
        return experiment.model_copy(update={"topology": topology}), replace(setup, init_mask="magnitude")
    note(
        f"the first mask is that of the given weights: {links.count_nonzero():,} of {layout.links:,} prunable ones are not 0, "
        f"{sum(setup.shown_counts(method.density)):,} are to be active (topology.init_mask = 'given'; 'random' draws another)"
    )
    topology = experiment.topology.model_copy(update={"init_mask": "given"})
    return experiment.model_copy(update={"topology": topology}), replace(setup, init_mask="given", init_scale="dense")


def _is_trained(module: nn.Module) -> bool:
    """Whether a builder marks its module's weights as trained."""
    return getattr(module, "pretrained", False) is True


def _started(experiment: Experiment, method: Method, module: nn.Module, origin: Origin | None) -> nn.Module:
    """Return the module as prepared by the method, with its initial weights: of the model itself, or of one that a method had prepared."""
    if origin is not None and experiment.init is not None:
        raise InputError("init and origin both name weights to start from: give one of them")
    if origin is None and experiment.init is None:
        return method.prepare(module)
    load = partial(load_weights, path=str(experiment.init)) if origin is None else origin.load
    try:
        load(module)
        return method.prepare(module)
    except InputError:
        prepared = method.prepare(module)
        load(prepared)
        return prepared


def layout_of(experiment: Experiment, module: nn.Module, prunable: Prunable | None = None) -> Layout:
    """The layout of an experiment's module, by its rule of what may be pruned."""
    if prunable is None and experiment.topology.prunable is not None:
        prunable = import_path(experiment.topology.prunable, "rule topology.prunable")  # type: ignore[assignment]
    unit = LINK if config.method_class(experiment.method).dense else experiment.topology.unit
    prune_output = bool(experiment.model_options.get("prune_output", False))
    return Layout.of(module, prunable or pretrained.blocks_rule(module, prune_output), prune_output=prune_output, unit=unit)


def _described(module: nn.Module, x: trees.Tensors) -> str:
    """Inputs in words, and what a module takes, for an error."""
    forms = [
        f"{name[1:]} {list(leaf.shape[1:])} of {str(leaf.dtype).removeprefix('torch.')}".strip()
        for name, leaf in trees.named("x", x).items()
        if isinstance(leaf, Tensor)
    ]
    if not isinstance(x, dict):
        return f"of shape {', '.join(forms)}"
    takes = ", ".join(inspect.signature(module.forward).parameters)
    how = "by name" if trees.by_name(module, x) else "whole, as its names are not the dictionary's"
    return f"a dictionary of {', '.join(forms)}, which goes to forward({takes}) {how}"


def _check_parameters(module: nn.Module) -> None:
    lazy = next((name for name, parameter in module.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise InputError(f"the model's parameter '{lazy}' has no shape yet: call the model once on an input before")
    if next(module.parameters(), None) is None:
        raise InputError("the model has no parameters: there is nothing to train")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise InputError("all parameters of the model are frozen (requires_grad=False): there is nothing to train")


def _check_task(module: nn.Module, held: Data) -> None:
    """Check that the model, its loss and the targets fit together."""
    some, targets = held.inputs(trees.at(held.x, _SOME)), held.targets(trees.at(held.y, _SOME))
    if isinstance(held.task, Classification) and held.task.criterion is cross_entropy and held.labels is not None:
        with training(module, False), torch.no_grad():
            outputs = logits(trees.called(module, some)).shape[-1]
        least, most = (int(of(torch.cat([held.y, held.test_y]))) for of in (torch.min, torch.max))
        if least < 0 or most >= outputs:
            raise InputError(f"labels must be 0 to {outputs - 1}, one for each output of the model: these are {least} to {most}")
    check(held.task, module, some, targets, *(trees.at(part, _SOME) for part in (held.test_x, held.test_y)))
    if isinstance(held.task, Classification):
        held.task.check_count(module, held.inputs(trees.at(held.test_x, _TRIED)), held.targets(trees.at(held.test_y, _TRIED)))

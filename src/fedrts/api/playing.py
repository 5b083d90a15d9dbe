"""A prepared run, played from its first round to its last."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedrts import config
from fedrts.callbacks.contract import RunView
from fedrts.callbacks.hooks import Hooks
from fedrts.costs.on_this_machine import felt
from fedrts.data.partition import SITES
from fedrts.drain import Drain
from fedrts.engines.kinds import kind
from fedrts.errors import InputError, note, optional
from fedrts.methods.contract import State
from fedrts.models import pretrained
from fedrts.observe import Observer, Silent, judging
from fedrts.observe.progress import megabytes
from fedrts.runs.build import Assembled
from fedrts.runs.checkpoint import Pace, Saved
from fedrts.runs.fairness import judged
from fedrts.runs.folder import RunFolder
from fedrts.runs.summary import describe_clients, describe_privacy, most_spent, summarise
from fedrts.server import rounds as loop
from fedrts.server.averaging import average_of
from fedrts.server.client_records import ClientRecords
from fedrts.server.phases import phase
from fedrts.server.reducers import check_reducer
from fedrts.server.rounds import Played
from fedrts.sparse.mask import Mask
from fedrts.tasks.metrics import leading, of_run
from fedrts.wire.fields import Frame

if TYPE_CHECKING:
    from fedrts.flower.deployment import Door


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    model: nn.Module
    masks: dict[str, Tensor]
    """bool tensors by parameter name, prunable parameters only."""
    history: list[dict[str, Any]]
    summary: dict[str, Any]
    state: State
    """The server's state: flat weights, mask, and the method's own memory."""
    average: nn.Module | None = None
    """The average of late models (`train.average`), where there is one and the model can be copied."""

    def __repr__(self) -> str:
        """Return one line for a notebook; the fields hold the rest."""
        s = self.summary
        sent = f"{megabytes(s['upload_bytes'] + s['download_bytes'])} sent ({s['comm_ratio']:.3f} of dense averaging)"
        what = f"{s['method']} on {s['data']}, {s['model']}, seed {s['seed']}"
        metric = of_run(s)[0]
        value = "–" if s[metric.name] is None else metric.text(s[metric.name])
        return f"<fedrts.Result: {what}: {metric.name} {value} after {s['rounds']} rounds, density {s['density']:.3f}, {sent}>"

    def frame(self) -> Any:
        """Return the history as a pandas DataFrame, one row per round: `result.frame().plot(x="round", y="accuracy")`."""
        return optional("pandas", "pandas").DataFrame(self.history)


def check_uploads(run: Assembled, state: State) -> None:
    """Check that the method's uploads in every kind of round can be protected and reduced as the experiment asks."""
    plan = run.plan
    outer = next(filter(plan.schedule.is_outer, range(plan.rounds)), 0)
    for index in sorted({*range(-1, min(plan.rounds, 2)), outer, plan.rounds - 1}):
        for exchange in plan.exchanges(plan.round(index, state.mask)):
            run.bench.protection.check(exchange.up, Frame(run.layout, state.mask))
            check_reducer(plan.guard, exchange.up)


def play(
    run: Assembled,
    folder: RunFolder | None,
    observer: Observer,
    data_dir: str | Path | None = None,
    door: Door | None = None,
    prolonged: bool = False,
    hooks: Hooks | None = None,
    drain: Drain | None = None,
) -> Result:
    """Play a run from its newest checkpoint, or from the start; without a folder nothing is written."""
    engine, hooks, drain = kind(run.experiment.engine.name), hooks or Hooks(), drain or Drain()
    if folder is None:
        with engine.open(run, None, data_dir, door) as run:
            return _play_rounds(run, None, None, observer, hooks, drain)
    with folder.writing(), engine.open(run, folder.path, data_dir, door) as run:
        saved = folder.load(run.experiment, run.identity, run.experiment.device, lambda: _begun(run))
        if prolonged:
            if saved is None and folder.begun:
                raise InputError(f"{folder.path} has no checkpoint to go on from: start a new run from its model.safetensors, with --init")
            folder.prolong(run.experiment)
        folder.rewind(saved)
        return _play_rounds(run, folder, saved, observer, hooks, drain)


def _begun(run: Assembled) -> State:
    """Return a run's state before its first round, with the memory that its method keeps; a set-up may drop what it began with."""
    state, first = run.begun()
    return replace(state, memory={}) if first < 0 and run.method.exchanges(run.plan.round(-1, state.mask)) else state


def _note_idle_clients(run: Assembled) -> None:
    """Note clients that cannot train: BatchNorm has no statistics of one sample."""
    alone = sum(size == 1 for size in run.rows.sizes) if run.bench.has_batchnorm else 0
    if alone:
        whose = f"{alone} of {len(run.rows.sizes)} clients"
        note(f"{whose} have one sample, of which BatchNorm has no statistics: they train nothing; leave them out, or use another norm")


def _play_rounds(run: Assembled, folder: RunFolder | None, saved: Saved | None, observer: Observer, hooks: Hooks, drain: Drain) -> Result:
    plan, experiment = run.plan, run.experiment
    _note_idle_clients(run)
    state, first = (saved.state.in_layers(run.layout.sizes), saved.next_round) if saved else run.begun()
    history = [] if folder is None else folder.history()
    ledger = ClientRecords.of(plan.guard)
    if saved:
        ledger = ClientRecords.restored(saved.ledger, state.mask.sizes, plan.guard, experiment.device)
        if "uploads" not in saved.ledger:  # an earlier version did not count them
            for line in history:
                asked = [*line["clients"], *(entry["client"] for entry in line["rejected"])]
                for exchange in plan.exchanges(plan.round(line["round"], state.mask)):
                    ledger.count(asked, exchange.up)
    pace = Pace(experiment.checkpoint.every)
    if folder is not None:
        folder.write_json("clients.json", describe_clients(run.data, run.rows, experiment.clients.partition != SITES))
        if (described := pretrained.written(run.module)) is not None:
            folder.write_json(pretrained.CONFIG, described)
    chosen = first >= 0 or not plan.method.exchanges(plan.round(first, state.mask))  # a set-up chooses the mask
    density = loop.density(run.layout, state.mask) if chosen else experiment.first_density
    facts = {
        "parameters": run.layout.parameters,
        "active": round(density * run.layout.parameters),
        "density": density,
        "engine": plan.engine.label,
        "bytes": sum(line["upload_bytes"] + line["download_bytes"] for line in history),
        "missing": sum(len(line["rejected"]) for line in history),
        "metric": leading(plan.metrics),
        "epsilon": partial(most_spent, run, ledger) if run.bench.protection.on else None,
    }
    settings = config.flat(experiment.model_dump(mode="json"))
    shown = Mask(state.mask.bits.clone(), state.mask.sizes)
    place = None if folder is None else folder.path
    earlier, validated = copy.deepcopy(history), run.data.valid_x is not None
    view = RunView(experiment, settings, dict(facts), run.layout, shown, max(first, 0), earlier, plan.metrics, validated, place)
    stopped = saved.facts.get("stopped") if saved else None
    over = stopped is not None and stopped["round"] >= experiment.stop.start  # otherwise it was asked to go on
    observer.started(experiment, facts, max(first, 0))
    try:
        hooks.start(view, stopped if over else None)
        drain.begin()
        for played in () if over else loop.play(plan, state, first, ledger):
            before, state = state, played.state
            history.append(played.record.as_dict())
            if folder is not None:
                _log_round(folder, played)
            over = hooks.follow(before, played)
            leaving = drain.asked and not over and played.record.round + 1 < plan.rounds  # after the last round there is little to do
            if folder is not None:
                _save_round(folder, played, run, ledger, pace, hooks.stopped, leaving)
            observer.played(played.record)
            if over:
                break
            if leaving:
                drain.end()
        _tell_judging(observer, hooks, 0, 1)
        late, best = average_of(state), hooks.final_model()
        state = state if best is None else best.state
        summary = summarise(run, state, ledger, history, hooks.stopped, None if best is None else best.told)
        step = {} if isinstance(observer, Silent) else felt(run, state)  # before the model has its last weights
        masks = run.layout.by_name(state.mask.bits)
        run.layout.bind(run.module, state.weights.clone())
        if folder is not None:
            named = None if late is None else run.layout.state_dict(late.weights)
            summary["digests"] = folder.write_model(run.layout.state_dict(state.weights), masks, named)
            if run.bench.protection.on:
                folder.write_json("privacy.json", describe_privacy(run, ledger))
            if experiment.eval.fairness and experiment.clients.partition != SITES:
                folder.write_json("fairness.json", judged(run, partial(_tell_judging, observer, hooks)))
            folder.write_json("summary.json", summary)
        hooks.end({**summary, **step})
        observer.finished({**summary, **step})
    finally:
        hooks.close()
        observer.stopped()
    return Result(run.module.eval(), masks, history, summary, state, None if late is None else _average(run, late))


def _average(run: Assembled, late: State) -> nn.Module | None:
    """Copy the model with the average's weights; None if the model cannot be copied."""
    try:
        module = copy.deepcopy(run.module)
    except Exception:  # whatever a user's own module raises
        return None
    run.layout.bind(module, late.weights.clone())
    return module.eval()


def _tell_judging(observer: Observer, hooks: Hooks, done: int, total: int) -> None:
    judging(observer, done, total)
    hooks.judging(done, total)


def _log_round(folder: RunFolder, played: Played) -> None:
    with phase("writing"):
        folder.append("history.jsonl", played.record.as_dict())
        if played.topology is not None:
            folder.append("topology.jsonl", played.topology)


def _save_round(
    folder: RunFolder,
    played: Played,
    run: Assembled,
    ledger: ClientRecords,
    pace: Pace,
    stopped: Mapping[str, Any] | None,
    leaving: bool,
) -> None:
    """Save a checkpoint when due, or when the process is `leaving`.

    Callbacks were told before, so a failure or a kill never skips one.
    """
    done = played.record.round + 1
    if pace.is_due(done) or done == run.experiment.rounds or stopped is not None or leaving:
        with phase("writing"):
            pace.timed(lambda: folder.save(played.state, done, ledger, run.experiment, run.identity, stopped))

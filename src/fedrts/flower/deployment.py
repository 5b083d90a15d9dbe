"""A run over Flower: the server's processes, and nodes on this machine if there are no others."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import tomli_w

import fedrts
from fedrts.audit.witness import Witness
from fedrts.client.order import called
from fedrts.config import CUSTOM, Experiment, foreign
from fedrts.data.partition import SITES
from fedrts.errors import InputError
from fedrts.flower import PROTOCOL, final, keys, openings, roster
from fedrts.flower.consent import digest
from fedrts.flower.engine import FlowerEngine, Paces
from fedrts.flower.fleet import Fleet
from fedrts.flower.keys import Authority
from fedrts.flower.limits import REFUSED
from fedrts.flower.link import Address, open_gate, opened
from fedrts.flower.normalisation import Normalisation, common, settled
from fedrts.flower.openings import Openings
from fedrts.flower.processes import child
from fedrts.flower.roster import Roster
from fedrts.flower.secret import SecretEngine
from fedrts.logs import tell, warning
from fedrts.runs.build import Assembled, with_samples
from fedrts.runs.feedback import feeds_back
from fedrts.runs.folder import RunFolder
from fedrts.server.collect import UNASKED
from fedrts.server.guard import Guard
from fedrts.server.rounds import TooFewError

_HERE = "node"
_NAMED = 5
"""Missing clients that are named one by one."""


@dataclass(frozen=True)
class Door:
    """The address to which nodes connect, and who may."""

    address: Address
    authority: Authority | None
    """None: anybody, without encryption."""
    witness: Witness = field(default_factory=Witness)
    """Told of what happens there."""


def _telling(witness: Witness) -> Callable[[str], None]:
    """Show and record who was refused, on connecting or later."""

    def say(text: str) -> None:
        tell(text)
        if text.startswith(REFUSED):
            with contextlib.suppress(InputError):  # a full disk stops the server by another word than a stranger's
                witness("refused", words=text.removeprefix(REFUSED))

    return say


@contextlib.contextmanager
def engaged(run: Assembled, folder: Path | None, data_dir: str | Path | None, door: Door | None) -> Iterator[Assembled]:
    """Yield the run with an engine whose clients are nodes; everything ends with the block."""
    experiment = run.experiment
    if CUSTOM in (experiment.model, experiment.data):
        raise InputError("nodes cannot build a model or data set that was given in Python: name them, or use another engine")
    if run.layout.frozen and (experiment.init or experiment.origin):
        raise InputError("frozen parameters do not travel, and nodes have no file of --init or --from: let the model load them itself")
    if door is None and experiment.clients.partition == SITES:
        raise InputError("clients.partition = 'sites' means data on other machines: use `fedrts server`")
    if door is None and folder is not None and (folder / roster.FILE).exists() and not (folder / f"{_HERE}-0.log").exists():
        raise InputError(f"nodes elsewhere take part in the run in {folder}: go on with the `fedrts server` command that began it")
    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedrts-")))
        say: Callable[[str], None] = _telling(door.witness) if door is not None else _only_refusals
        door, issued = (door, []) if door is not None else _private_door(temporary, experiment.engine.nodes, experiment.clients.total)
        link = stack.enter_context(opened(door.address, door.authority, folder / "superlink.log" if folder else None, say))
        known = Roster(
            experiment.clients.total,
            folder / roster.FILE if folder else None,
            keyed=bool(door.authority) and not issued,
            fixed=folder is not None and RunFolder(folder).begun,
        )
        sites = experiment.clients.partition == SITES
        fleet = Fleet(
            link, introduction(run), known, None if sites else run.plan.samples, run.data.fingerprint, door.authority, say, door.witness
        )
        if door.authority is None:
            say(warning("note", "without keys nobody can be told from anybody else: any node may stand for any client"))
        fleet.follow_keys()
        open_gate()
        door.witness("open", address=door.address.own)
        for number, key in enumerate(issued):
            command = _node_command(door, key, _share(number, len(issued), experiment.clients.total), data_dir, experiment)
            remembers = feeds_back(run.plan) or run.plan.summing is not None
            if folder is not None and remembers:  # what clients remember must be there when the run is resumed
                command += ["--state", str(folder / f"{_HERE}-{number}.site")]
            log = stack.enter_context(open(folder / f"{_HERE}-{number}.log" if folder else temporary / f"{number}.log", "ab"))
            stack.enter_context(child(command, stdin=-3, stdout=log, stderr=log))
        with _explained(fleet, folder):
            ready = _with_fleet(run, fleet, folder)
            yield ready
            if not issued:  # a run that was stopped does not come here: its nodes wait for it to go on
                with contextlib.suppress(httpx.HTTPError):
                    fleet.dismiss(final.encoded(ready) if experiment.clients.share_model else None)


def _with_fleet(run: Assembled, fleet: Fleet, folder: Path | None) -> Assembled:
    """Wait for nodes and for the sites' own statements."""
    experiment, guard = run.experiment, run.plan.guard
    there = fleet.gather(experiment.clients.total, experiment.engine.wait)
    if experiment.clients.partition == SITES:
        if vacant := fleet.roster.vacant:
            raise InputError(
                f"{experiment.clients.total - len(vacant)} of {experiment.clients.total} sites came within {experiment.engine.wait:g} s: "
                "start the others, or lower clients.total, then start the server again"
            )
        fleet.roster.fixed = True
        sites = [fleet.roster.entries[client] for client in range(experiment.clients.total)]
        held_out = {client: site.held_out for client, site in enumerate(sites) if site.held_out}
        run = with_samples(run, [site.samples for site in sites], held_out)
        if run.plan.summing is not None:
            _warn_of_claims(guard, run.plan.samples, fleet.say)
        if not held_out and not len(run.data.test_y):
            words = "nobody has data to test the model on: start a client with --set test=0.2, say, for its site to hold some out"
            fleet.say(warning("note", words))
    elif there < run.plan.needed(fleet.departed):
        came = f"{there} clients came within {experiment.engine.wait:g} s: too few for a round"
        raise InputError(f"{came}; start more nodes, then the same command again")
    engine = FlowerEngine(
        fleet,
        run.bench,
        run.plan.samples,
        run.plan.engine,
        run.plan.needed,
        experiment.engine.timeout,
        guard.deadline or float("inf"),
        experiment.engine.wait,
        ordered=guard.over_select == 0,
        paces=Paces(experiment.engine.patience),
    )
    if run.plan.summing is not None:
        engine = _in_secret(engine, run, folder)
    if experiment.clients.partition == SITES and (normalisation := _normalisation(engine, run, folder)) is not None:
        run.bench.data = normalisation.applied(run.bench.data)
        engine.facts["normalisation"] = normalisation.numbers
    return replace(run, plan=replace(run.plan, engine=engine))


def _warn_of_claims(guard: Guard, samples: Sequence[int], say: Callable[[str], None]) -> None:
    """Name the sites that claim more samples than `guard.max_claim`, if nothing caps them."""
    counted = guard.but(max_share=1.0).weights(dict(enumerate(samples)))
    if bold := [client for client, claimed in enumerate(samples) if claimed > counted[client]]:
        words = (
            f"{called(bold)}: {', '.join(f'{samples[client]:,}' for client in bold)} samples, more than guard.max_claim = "
            f"{guard.max_claim:g} medians; secure sums count them all: make sure that you know who claims so many"
        )
        say(warning("note", words, clients=bold))


def _normalisation(engine: FlowerEngine, run: Assembled, folder: Path | None) -> Normalisation | None:
    """Return the common normalisation of all sites, from each site's statistics or from their sum."""
    sites = [engine.fleet.roster.entries[client] for client in range(run.experiment.clients.total)]
    if isinstance(engine, SecretEngine):
        channels = {client: site.channels for client, site in enumerate(sites) if site.channels}
        found = settled(folder, partial(engine.statistics, run.plan, channels))
        if channels and found is None:
            words = f"{len(channels)} sites say what their images are like, too few for a sum: each normalises by its own"
            engine.fleet.say(warning("note", words))
        return found
    told = {client: part for client, site in enumerate(sites) if (part := Normalisation.told(list(site.statistics))) is not None}
    weights = run.plan.guard.weights({client: sites[client].samples for client in told})
    return settled(folder, partial(common, [(weights[client], part) for client, part in told.items()]))


def _in_secret(engine: FlowerEngine, run: Assembled, folder: Path | None) -> SecretEngine:
    """Return the engine that learns only sums; it keeps what it must not lose in the run folder."""
    kept = Openings(None) if folder is None else Openings(folder / openings.FOLDER, RunFolder(folder).replayed_from)
    same = {name: getattr(engine, name) for name in FlowerEngine.__dataclass_fields__}
    experiment = run.experiment
    return SecretEngine(
        **same, digest=digest(introduction(run)), table=experiment.secure, per_round=experiment.clients.per_round, openings=kept
    )


def introduction(run: Assembled) -> dict[str, Any]:
    """Return what every node receives: the experiment without the server's own settings."""
    servers = {"out", "init", "origin", "callbacks", "stop", "device", "engine", "guard", "checkpoint"}
    open_sums = set() if run.experiment.secure.aggregation else {"secure"}  # then nodes of before there was such a table know everything
    settings = run.experiment.model_dump(exclude_none=True, exclude=servers | open_sums)
    if run.bench.program is not None:  # equal bits need equal kernels
        settings["engine"] = run.experiment.engine.model_dump(include={"kernel", "isa"})
    shape, classes = list(run.data.input_shape), run.data.classes
    ours = {"protocol": PROTOCOL, "fedrts": fedrts.__version__}
    return {**ours, "experiment": tomli_w.dumps(settings), "input_shape": shape, "classes": classes}


def _share(number: int, nodes: int, clients: int) -> range:
    """Return the clients of one of several nodes on this machine."""
    return range(number, clients, nodes)


def _private_door(folder: Path, most: int, clients: int) -> tuple[Door, list[Path]]:
    """Open a door on this machine for nodes that we start ourselves, with keys that nobody else has."""
    nodes = min(most, clients)
    authority = Authority(folder / "authority")
    authority.init([])
    issued = [keys.issue(f"{_HERE}-{number}", folder / "keys") for number in range(nodes)]
    for number, (_, public) in enumerate(issued):
        authority.register(public, clients=_share(number, nodes, clients))
    return Door(Address.free(), authority), [private for private, _ in issued]


def _node_command(door: Door, key: Path, clients: range, data_dir: str | Path | None, experiment: Experiment) -> list[str]:
    assert door.authority is not None
    command = [
        sys.executable,
        "-m",
        "fedrts",
        "client",
        "--server",
        door.address.own,
        "--key",
        str(key),
        "--ca",
        str(door.authority.certificate),
    ]
    command += ["--partition", ",".join(map(str, clients)), "--device", experiment.device]
    command += ["--data", experiment.data] if ":" in experiment.data else []  # which is on this machine
    command += ["--allow", experiment.model] if ":" in experiment.model else []
    command += [word for path in foreign(experiment.model_dump()) for word in ("--allow", path)]  # as the user's own command does
    command += ["--drain", "0", "--accept", "any"]
    command += ["--min-samples", "1", "--min-batch", "1", "--max-epochs", "0", "--max-parameters", "0"]  # it is our own
    return command + (["--data-dir", str(data_dir)] if data_dir else [])


def _only_refusals(text: str) -> None:
    if text.startswith("refused"):
        tell(text)


@contextlib.contextmanager
def _explained(fleet: Fleet, folder: Path | None) -> Iterator[None]:
    """Turn a lost SuperLink and missing clients into one-line errors."""
    try:
        yield
    except TooFewError as error:
        missing = {client: reason for client, reason in error.missing.items() if reason != UNASKED}
        if not missing:
            raise
        names = "; ".join(f"{fleet.roster.called(client)}: {reason}" for client, reason in sorted(missing.items())[:_NAMED])
        more = f"; and {len(missing) - _NAMED} more" * (len(missing) > _NAMED)
        raise InputError(
            f"{str(error).partition(' (')[0]}, nothing of it was applied. Missing: {names}{more}. Bring them back, lower guard.quorum, "
            f"or go on without them (`fedrts roster {folder or 'RUN_DIR'} remove {min(missing)}`); then start the same command again"
        ) from error
    except httpx.HTTPError as error:
        raise InputError(
            f"the SuperLink does not answer any more ({error}): see superlink.log, then start the same command again"
        ) from error

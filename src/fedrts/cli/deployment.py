"""`fedrts server`, `fedrts client`, `fedrts roster` and `fedrts keys`: a federation across machines."""

from __future__ import annotations

import contextlib
import enum
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedrts.cli.app import Allow, AsJson, DataDir, FormatOfLogs, LevelOfLogs, Quiet, RunDir, app
from fedrts.cli.flags import Given, takes
from fedrts.cli.metrics import MetricsAt, metering
from fedrts.cli.run import interruptible
from fedrts.cli.tables import print_table
from fedrts.drain import Drain, Drained
from fedrts.errors import InputError
from fedrts.flower.host import Limits
from fedrts.logs import LogFormat, LogLevel, info, tell

if TYPE_CHECKING:
    from fedrts.flower.host import Host
    from fedrts.observe import Observer

DRAIN = 60.0
"""Seconds that a task at hand has to end, where nobody says otherwise."""

keys = typer.Typer(help="Certificates and keys of a federation.", no_args_is_help=True)
app.add_typer(keys, name="keys")

DrainFor = Annotated[
    float,
    typer.Option("--drain", metavar="SECONDS", help="On SIGTERM: seconds that the current task may take to finish; 0: abort it at once."),
]
KeyFolder = Annotated[Path, typer.Option("--dir", help="The coordinator's folder of certificates and keys.")]


@app.command()
@takes()
def server(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="The experiment; the server sends it to the nodes.")],
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address at which nodes reach this server.")] = "127.0.0.1:9092",
    tls: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder made by `fedrts keys init`; encrypts, and accepts only registered keys.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No encryption, no keys; for trials on one machine.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; default: runs/<name of the file>. An interrupted run in it continues.")
    ] = None,
    data_dir: DataDir = None,
    metrics: MetricsAt = None,
    drain: DrainFor = DRAIN,
    *,
    given: Given,
    log_format: FormatOfLogs = LogFormat.text,
    log_level: LevelOfLogs = LogLevel.info,
    quiet: Quiet = False,
) -> None:
    """Coordinate a federation: wait for nodes, then train. The same command continues after a stop or a crash."""
    from fedrts import api, config, flower
    from fedrts.runs.folder import RunFolder

    if (tls is None) != insecure:
        raise InputError("give either --tls DIR (see `fedrts keys init`) or --insecure")
    folder = out or Path("runs", experiment.stem)
    layers = given.layers(experiment)
    resolved = config.resolve(*layers, {"engine": "flower", "out": str(folder)})
    flower.prepare()
    from fedrts.audit.log import FILE as AUDIT
    from fedrts.audit.log import AuditLog
    from fedrts.audit.witness import Details, Witnesses
    from fedrts.flower.deployment import Door
    from fedrts.flower.keys import Authority, read_private_key, seal_of
    from fedrts.flower.link import Address
    from fedrts.observe import Several
    from fedrts.observe.told import Told

    authority = Authority(tls).checked() if tls else None
    log = AuditLog(folder / AUDIT, "server", None if authority is None else seal_of(read_private_key(authority.server_key)), tell)
    again, own = "the same command", {key for settings in layers for key in config.flat(settings)} - {"out", "engine", "engine.name"}
    begun = (folder / "experiment.toml").exists()
    changes = RunFolder(folder).revised(resolved, sorted(own)) if begun else {}
    if begun and RunFolder(folder).summary() is not None:
        tell(info("finished", f"{folder} is finished; `fedrts inspect {folder}` shows it"), "stdout", always=True)
        return
    draining = Drain(drain, tell)
    with contextlib.closing(log), metering(metrics, "server") as boards:
        witness = Witnesses(log, *boards, Details())
        door = Door(Address.of(address), authority, witness)

        def play(observer: Observer) -> api.Result:
            told = Several(observer, Told(witness))
            if not begun:
                return api.start(resolved, told, data_dir, door, drain=draining)
            trust = config.foreign(resolved.model_dump())
            return api.resume(folder, data_dir=data_dir, observer=told, door=door, changes=changes, trust=trust, drain=draining)

        interruptible(play, quiet, again, drain=draining)


@app.command()
def client(
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the server.")],
    data: Annotated[str | None, typer.Option(help="Data of this site, such as folder:/site/data; default: the experiment's.")] = None,
    partition: Annotated[
        str | None, typer.Option(metavar="I[,J…]", help="Numbers of the parts of the experiment's data to train on.")
    ] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="Private key of this node, made by `fedrts keys issue`.")] = None,
    ca: Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate of the server's authority (ca.pem).")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No encryption, no keys; for trials on one machine.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    allow: Allow = None,
    options: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Option of the data set; repeatable.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Stop answering when this much privacy (ε) is spent.")] = None,
    delta: Annotated[float, typer.Option(help="δ at which --epsilon is counted.")] = 1e-5,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIGEST", help="Accept the experiment with this digest; `any` accepts all, for trials; repeatable. Default: ask."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would leave this site and how many bytes, then exit without taking part.")
    ] = False,
    state: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for this site's state; default: NAME.site beside NAME.key.")
    ] = None,
    min_samples: Annotated[int, typer.Option(help="Refuse to send an update from fewer rows.")] = Limits.min_samples,
    min_batch: Annotated[int, typer.Option(help="Refuse to train on smaller batches.")] = Limits.min_batch,
    max_epochs: Annotated[int, typer.Option(help="Refuse more local epochs per round; 0: no limit.")] = Limits.max_epochs,
    max_parameters: Annotated[int, typer.Option(help="Refuse models with more parameters; 0: no limit.")] = Limits.max_parameters,
    max_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory limit of this process, such as 4GB.")] = None,
    peers: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of the other sites' public keys (NAME.pub) for secure sums; default: those that the server names."
        ),
    ] = None,
    keep_statistics: Annotated[
        bool,
        typer.Option(
            "--keep-statistics",
            help="Do not share the mean and standard deviation of this site's images, which normalise the images of all sites.",
        ),
    ] = False,
    patience: Annotated[float, typer.Option(help="Seconds to keep retrying while the server cannot be reached; 0: forever.")] = 0.0,
    withdraw: Annotated[bool, typer.Option("--withdraw", help="Tell the server that this site leaves the study, and exit.")] = False,
    data_dir: DataDir = None,
    metrics: MetricsAt = None,
    drain: DrainFor = DRAIN,
    log_format: FormatOfLogs = LogFormat.text,
    log_level: LevelOfLogs = LogLevel.info,
    quiet: Quiet = False,
) -> None:
    """Take part in a federation: train on this site's data, which never leaves it. Runs until the study ends.

    A node trains only with its owner's consent: on a terminal it shows the experiment and asks; elsewhere --accept names it.
    """
    from fedrts.flower.processes import end_with_parent

    end_with_parent()
    if insecure and (key or ca):
        raise InputError("--insecure goes with neither --key nor --ca")
    if not insecure and key is None:
        raise InputError("give --key FILE (see `fedrts keys issue`) and --ca FILE, or --insecure")
    if epsilon is not None and not epsilon > 0:
        raise InputError(f"--epsilon {epsilon:g}: it must be above 0")
    if not 0 < delta < 0.5:
        raise InputError(f"--delta {delta:g}: it must lie between 0 and 0.5, and should be far smaller")
    from fedrts import config
    from fedrts import data as sets
    from fedrts.flower.host import Host

    if patience < 0:
        raise InputError(f"--patience {patience:g}: it must be 0 (for ever) or above")
    config.validated(config.Experiment, {"device": device})  # what cannot be shows here, before any server
    if data is not None:
        sets.get(data)
    own, folder = sets.absolute(data) if data else None, str(data_dir) if data_dir else None
    scheme, _, path = (own or "").partition(":")
    if f"{scheme}:PATH" in sets.names() and not Path(path).exists():
        raise InputError(f"--data {data}: there is no {path}")
    limits = Limits(min_samples, min_batch, max_epochs, max_parameters, _size(max_memory))
    if wrong := [name for name, limit in vars(limits).items() if limit < 0]:
        raise InputError(f"--{wrong[0].replace('_', '-')} must be 0 or above")
    host = Host(
        own,
        config.from_assignments(options or []),
        _numbers(partition),
        folder,
        device,
        allow or [],
        epsilon,
        delta,
        accept=_digests(accept or []),
        limits=limits,
        state=state or (key.with_suffix(".site") if key else Path("fedrts.site")),
        dry_run=dry_run,
        peers=_peers(peers),
        keep_statistics=keep_statistics,
    )
    if withdraw and insecure:
        raise InputError("--withdraw needs --key: without one the server cannot know who withdraws")
    _serve(host, server, key, ca, insecure, patience or float("inf"), quiet, withdraw, metrics, drain)


def _serve(
    host: Host,
    address: str,
    key: Path | None,
    ca: Path | None,
    insecure: bool,
    patience: float,
    quiet: bool,
    withdraw: bool,
    metrics: str | None,
    drain: float,
) -> None:
    from fedrts import flower

    flower.prepare()
    from fedrts.audit.witness import Details, Witnesses
    from fedrts.flower.link import Address
    from fedrts.flower.node import Server, serve
    from fedrts.flower.policy import bound_memory

    if host.limits.max_memory:
        bound_memory(host.limits.max_memory)

    def say(text: str) -> None:
        if not quiet:
            tell(text)

    def show(text: str) -> bool:
        tell(info("experiment", text), "stdout", always=True)
        return False

    def ask(text: str) -> bool:
        print(f"{text}\nTake part? [y/N] ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    asking = show if host.dry_run else ask if sys.stdin is not None and sys.stdin.isatty() else None
    there, draining = Server(Address.of(address).own, key, ca, insecure), Drain(drain, say)
    try:
        with draining.listening(), metering(metrics, "node") as boards:
            for board in boards:
                board.limited(host.epsilon)
            serve(host, there, say, patience, asking, withdraw=withdraw, witness=Witnesses(*boards, Details()), drain=draining)
    except (Drained, KeyboardInterrupt) as stopped:
        if isinstance(stopped, Drained):
            say(info("stopped", "stopped; the same command takes part again"))
        sys.exit(130)


def _numbers(text: str | None, flag: str = "--partition") -> list[int]:
    if not text:
        return []
    try:
        numbers = [int(part) for part in text.split(",")]
        if min(numbers) < 0 or len(set(numbers)) < len(numbers):
            raise ValueError
        return numbers
    except ValueError as error:
        raise InputError(f"{flag} takes numbers such as 0 or 0,3, not '{text}'") from error


class Change(enum.StrEnum):
    list = "list"
    remove = "remove"
    readmit = "readmit"
    rename = "rename"


@app.command()
def roster(
    run_dir: RunDir,
    change: Annotated[Change, typer.Argument(help="List the clients; remove, readmit or rename one.")] = Change.list,
    client: Annotated[int | None, typer.Argument(metavar="[CLIENT]", help="Number of the client.")] = None,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="New name of the client.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the clients of a federation; remove, readmit or rename one. A running server notices within seconds."""
    from fedrts.flower import people

    if change != Change.list and client is None:
        raise InputError(f"say which client: `fedrts roster {run_dir} {change.value} CLIENT`")
    if (change == Change.rename) != (name is not None):
        raise InputError(f"a name goes with rename: `fedrts roster {run_dir} rename CLIENT NAME`")
    found = people.of(run_dir)
    if change == Change.list or client is None:
        rows = people.rows(run_dir, found)
        if not rows and not as_json:
            print(f"nobody has come to {run_dir} yet")
            return
        print_table(rows, as_json)
    elif name is not None:
        found.rename(client, name)
        print(f"{found.called(client)} has its name")
    elif change == Change.readmit:
        found.readmit(client)
        print(f"{found.called(client)} may take part again: start its node")
    else:
        found.leave(client, people.REMOVED)
        print(f"{found.called(client)} is removed: {people.consequence(run_dir)}")


def _digests(given: list[str]) -> list[str]:
    from fedrts.flower.host import digest_prefix

    return [digest_prefix(word) for word in given]


def _peers(folder: Path | None) -> list[bytes] | None:
    if folder is None:
        return None
    _prepared()
    from fedrts.flower.keys import read_peers

    return read_peers(folder)


def _size(text: str | None) -> int:
    from fedrts.flower.host import memory_size

    return memory_size(text) if text else 0


@keys.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the coordinator's certificates and keys.")],
    host: Annotated[list[str] | None, typer.Option(help="Name or address under which nodes reach the server; repeatable.")] = None,
    renew: Annotated[bool, typer.Option("--renew", help="Renew only the server certificate, under the same authority.")] = False,
) -> None:
    """Create a certificate authority and the server's certificate."""
    _prepared()
    from fedrts.flower.keys import Authority

    authority = Authority(folder)
    (authority.renew if renew else authority.init)(host or [])
    print(f"give every node {authority.certificate}; keep {folder / 'ca.key'} secret, best not on the server")


@keys.command()
def issue(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The node's name.")],
    folder: Annotated[Path, typer.Option("--dir", help="Where to write NAME.key and NAME.pub.")] = Path("."),
) -> None:
    """Create a node's key pair, preferably on the node itself."""
    _prepared()
    from fedrts.flower import keys as making

    private, public = making.issue(name, folder)
    print(f"{private} stays on the node; give {public} to the coordinator for `fedrts keys register`")


@keys.command()
def register(
    public: Annotated[Path, typer.Argument(metavar="NAME.pub", help="A node's public key.")],
    folder: KeyFolder = Path("."),
    name: Annotated[str | None, typer.Option(help="The node's name; default: the file's name.")] = None,
    clients: Annotated[
        str | None, typer.Option(metavar="I[,J…]", help="Client numbers to reserve for this node; a second call replaces them.")
    ] = None,
) -> None:
    """Register a node's public key; a running server notices within seconds."""
    _prepared()
    from fedrts.flower.keys import Authority, fingerprint, read_public_key

    numbers = _numbers(clients, "--clients") if clients is not None else None
    registered = Authority(folder).register(public, name, numbers)
    bound = f" for client{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}" if numbers else ""
    print(f"registered '{registered}' with key {fingerprint(read_public_key(public))}{bound}")


@keys.command()
def revoke(name: Annotated[str, typer.Argument(metavar="NAME", help="A registered node.")], folder: KeyFolder = Path(".")) -> None:
    """Revoke a node's key; a running server notices within seconds."""
    _prepared()
    from fedrts.flower.keys import Authority

    Authority(folder).revoke(name)
    print(f"revoked '{name}'")


@keys.command()
def rotate(key: Annotated[Path, typer.Argument(metavar="NAME.key", help="The node's current private key.")]) -> None:
    """Create a node's next key, signed by its current one; a running node switches to it by itself."""
    _prepared()
    from fedrts.flower import keys as making

    successor, public = making.rotate(key)
    print(f"{successor} stays on the node, which uses it once the coordinator has run `fedrts keys replace` with {public}")


@keys.command()
def replace(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A registered node.")],
    public: Annotated[Path, typer.Argument(metavar="NAME.next.pub", help="Its new public key, from `fedrts keys rotate`.")],
    folder: KeyFolder = Path("."),
    unsigned: Annotated[
        bool,
        typer.Option("--unsigned", help="Accept a key that the old one has not signed, after making sure whose it is; for lost keys."),
    ] = False,
) -> None:
    """Replace a node's key: its name, client numbers and history stay. A running server notices within seconds."""
    _prepared()
    from fedrts.flower.keys import Authority

    print(f"'{name}' has the key {Authority(folder).replace(name, public, unsigned)} now; its old key is refused")


def _prepared() -> None:
    from fedrts.errors import optional

    optional("cryptography", "flower")

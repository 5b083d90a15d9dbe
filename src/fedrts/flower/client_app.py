"""The same site as a Flower ClientApp, for those who run Flower's own SuperNode: a new process for every message.

`flower-supernode --node-config 'partition="0,3" data="digits" accept="1f0c…"'` says what `fedrts client` takes as options. What a
process must leave to the next one is in the context that Flower keeps (the experiment, the masks) and in the site's folder (`state`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedrts.errors import InputError
from fedrts.flower import FAREWELL, HELLO, WELCOME, WORK
from fedrts.flower.consent import told
from fedrts.flower.host import Host, Limits, digest_prefix, memory_size
from fedrts.flower.inside import ErrorCode
from fedrts.flower.messages import content, opened
from fedrts.flower.node import Worker, recorded
from fedrts.flower.policy import bound_memory
from fedrts.flower.state import Records
from fedrts.sparse.mask import Mask
from fedrts.wire.errors import WireError

app = ClientApp()
server = ServerApp()
"""Never called: `fedrts server` takes its place."""

_FACTS, _MASKS = "fedrts.experiment", "fedrts.masks"
_OTHERS = 60.0
"""Seconds to wait for the process of another message to end."""


@app.query(HELLO.partition(".")[2])
def hello(message: Message, context: Context) -> Message:
    """Return the site's introduction."""
    try:
        context.state[_FACTS] = ConfigRecord(opened(message)[0])
    except WireError:
        context.state.pop(_FACTS, None)
    try:
        with _working(context) as worker:
            return worker.reply(message)
    except (InputError, ValueError) as error:
        return _failed(message, error)


@app.query(WELCOME.partition(".")[2])
@app.query(FAREWELL.partition(".")[2])
def hear(message: Message, context: Context) -> Message:
    """Learn that the site takes part, or that the study is over. Flower's SuperNode keeps running."""
    print(dict(opened(message)[0]))
    return Message(content({}), reply_to=message)


@app.train(WORK.partition(".")[2])
def work(message: Message, context: Context) -> Message:
    """Carry out this order."""
    try:
        with _working(context) as worker:
            if _FACTS in context.state.config_records:
                worker.meet(dict(context.state.config_records[_FACTS]))
            site = worker.site
            if site is not None and _MASKS in context.state.array_records:
                sizes = site.run.layout.sizes
                for array in context.state.array_records[_MASKS].values():
                    site.masks.keep(Mask.unpacked(array.numpy(), sizes))
            reply = worker.reply(message)
            if site is not None:
                packed = {name.hex(): Array(mask.packed()) for name, mask in site.masks.items()}
                context.state[_MASKS] = ArrayRecord(packed)
            return reply
    except (InputError, ValueError) as error:
        return _failed(message, error)


@contextlib.contextmanager
def _working(context: Context) -> Iterator[Worker]:
    """Yield a worker with the records of its site; one process at a time has these."""
    host = _host(context)
    if host.limits.max_memory:
        bound_memory(host.limits.max_memory)
    records = Records.of(host.state, _OTHERS)
    try:
        worker = Worker(host, print, records=records)
        with recorded(worker, None):
            yield worker
    finally:
        records.close()


def _failed(message: Message, error: Exception) -> Message:
    """Return the reply to the server if the site's own settings are wrong."""
    print(error)
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, told(error, "it cannot take part")), reply_to=message)


def _host(context: Context) -> Host:
    """Read the owner's decisions from the SuperNode's --node-config."""
    config = {name: str(value) for name, value in context.node_config.items()}
    clients = [int(part) for part in config.get("partition", "").split(",") if part]
    allowed = [part for part in config.get("allow", "").split(",") if part]
    limits = {name: int(config[key]) for name in vars(Limits()) if (key := name.replace("_", "-")) in config and name != "max_memory"}
    limits["max_memory"] = memory_size(config["max-memory"]) if "max-memory" in config else 0
    return Host(
        config.get("data"),
        {},
        clients,
        config.get("data-dir"),
        config.get("device", "auto"),
        allowed,
        float(config["epsilon"]) if "epsilon" in config else None,
        float(config.get("delta", 1e-5)),
        accept=[digest_prefix(part) for part in config.get("accept", "").split(",") if part],
        limits=Limits(**limits),
        state=Path(config.get("state", "fedrts.site")),
    )

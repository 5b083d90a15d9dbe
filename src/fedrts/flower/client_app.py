"""The same site as a Flower ClientApp, for those who run Flower's own SuperNode: a new process for every message.

`flower-supernode --node-config 'partition="0,3" data="digits"'` says what `fedrts client` takes as options. What a process
must leave to the next one (the experiment, the masks) is in the context that Flower keeps.
"""

from __future__ import annotations

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedrts.flower import FAREWELL, HELLO, WELCOME, WORK
from fedrts.flower.host import Host
from fedrts.flower.messages import content, opened
from fedrts.flower.node import Worker
from fedrts.sparse.mask import Mask
from fedrts.wire.errors import WireError

app = ClientApp()
server = ServerApp()
"""Never called: `fedrts server` takes its place."""

_FACTS, _MASKS = "fedrts.experiment", "fedrts.masks"


@app.query(HELLO.partition(".")[2])
def hello(message: Message, context: Context) -> Message:
    """Who are you?"""
    try:
        context.state[_FACTS] = ConfigRecord(opened(message)[0])
    except WireError:
        context.state.pop(_FACTS, None)
    return Worker(_host(context), print).reply(message)


@app.query(WELCOME.partition(".")[2])
@app.query(FAREWELL.partition(".")[2])
def hear(message: Message, context: Context) -> Message:
    """You take part; or: it is over. Flower's SuperNode stays all the same."""
    print(dict(opened(message)[0]))
    return Message(content({}), reply_to=message)


@app.train(WORK.partition(".")[2])
def work(message: Message, context: Context) -> Message:
    """Do this order."""
    worker = Worker(_host(context), print)
    if _FACTS in context.state.config_records:
        worker.meet(dict(context.state.config_records[_FACTS]))
    site = worker.site
    if site is not None and _MASKS in context.state.array_records:
        sizes = site.run.layout.sizes
        for array in context.state.array_records[_MASKS].values():
            mask = Mask(torch.from_numpy(np.unpackbits(array.numpy(), count=sum(sizes)).astype(np.bool_)), sizes)
            site.masks[mask.fingerprint] = mask
    reply = worker.reply(message)
    if site is not None:
        packed = {name.hex(): Array(np.packbits(mask.bits.cpu().numpy())) for name, mask in site.masks.items()}
        context.state[_MASKS] = ArrayRecord(packed)
    return reply


def _host(context: Context) -> Host:
    """What the owner of the SuperNode decides, from its --node-config."""
    config = {name: str(value) for name, value in context.node_config.items()}
    clients = [int(part) for part in config.get("partition", "").split(",") if part]
    allowed = [part for part in config.get("allow", "").split(",") if part]
    return Host(config.get("data"), {}, clients, config.get("data-dir"), config.get("device", "auto"), allowed)

"""A site: its data, the clients it stands for, and the client program. Whatever connects it to a server is elsewhere.

The server names an experiment and sends weights; it never sends code. What the experiment names must be part of this
package, or of what the site's owner allows.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from torch import Tensor

import fedrts
from fedrts import config, guard
from fedrts.assemble import Assembled, build_model, federation, put_together
from fedrts.client import Order, Reply
from fedrts.config import Experiment
from fedrts.data.partition import SITES
from fedrts.engines.threads import threads_for
from fedrts.errors import InputError
from fedrts.flower.host import Host
from fedrts.flower.messages import Facts
from fedrts.privacy import Account, countable
from fedrts.sparse.mask import Mask
from fedrts.traffic import REMEMBERED
from fedrts.wire import codec
from fedrts.wire.errors import MaskMissingError, WireError
from fedrts.wire.fields import Frame


@dataclass
class Site:
    """A host that knows the experiment."""

    host: Host
    run: Assembled
    masks: dict[bytes, Mask] = field(default_factory=dict)
    """The last masks by fingerprint, the newest last."""
    before: Account = field(default_factory=Account)
    """What was given away in experiments before this one, whose clients may have held the same data under other numbers."""
    sent: dict[int, Account] = field(default_factory=dict)
    """What has left in this one, by client."""

    @staticmethod
    def of(host: Host, text: str, facts: Facts, before: Account | None = None) -> Site:
        """The site for an experiment as the server wrote it; `facts` say of which shape inputs are, and how many classes there are."""
        experiment = accepted(text, host)
        sites = experiment.clients.partition == SITES
        if sites == bool(host.clients):
            raise InputError(
                "the experiment counts on sites with data of their own: start the client without --partition"
                if sites
                else "the experiment divides one data set: say with --partition which parts are here"
            )
        local = {"partition": "iid", "total": 1, "per_round": 1, "min_size": 1}
        here = experiment.model_copy(update={"clients": experiment.clients.model_copy(update=local)}) if sites else experiment
        held, rows = federation(here, host.data_dir)
        shape, classes = tuple(facts["input_shape"]), int(facts["classes"])
        if held.input_shape != shape:
            raise InputError(f"the data here has inputs of shape {held.input_shape}, the experiment's are {shape}")
        if held.classes > classes or (held.classes < classes and experiment.data.startswith("folder:")):
            raise InputError(f"the data here has {held.classes} classes, the experiment's {classes}")
        if unknown := [client for client in host.clients if not 0 <= client < len(rows)]:
            raise InputError(f"--partition {unknown[0]}: the experiment has {len(rows)} clients, numbered from 0")
        held = replace(held, classes=classes)
        run = put_together(here, build_model(here, shape, classes), held, rows)
        run.bench.simulated = False
        return Site(host, run, before=before or Account())

    @property
    def given_away(self) -> Account:
        """By the client that has given most, and in all experiments."""
        return self.before + reduce(Account.either, self.sent.values(), Account())

    def introduction(self) -> dict[str, Any]:
        """Who we are: the clients that we stand for, with their numbers of samples."""
        clients = list(self.host.clients)
        samples = [len(self._rows(client)) for client in clients] if clients else [len(self.run.rows[0])]
        return {"fedrts": fedrts.__version__, "clients": clients, "samples": samples, "data": self.run.data.fingerprint}

    def answer(self, blobs: Mapping[int, bytes]) -> tuple[dict[str, Any], dict[int, bytes]]:
        """The encoded replies to encoded orders by client; the facts name those who lack the mask, and what failed."""
        replies: dict[int, bytes] = {}
        missing, failed, reasons = [], [], []
        for client, data in blobs.items():
            try:
                order = self.order(client, data)
                replies[client] = guard.encode_reply(self._carried_out(order, client), order)
            except MaskMissingError:
                missing.append(client)
            except (WireError, InputError) as error:
                failed.append(client)
                reasons.append(str(error))
        return {"missing": missing, "failed": failed, "reasons": reasons}, replies

    def order(self, client: int, data: bytes) -> Order:
        """What a download asks of a client: the exchange is built here, from the experiment, the round and the mask."""
        header, mask, reader = self._open(data)
        if header.client != client:
            raise WireError(f"an order to client {header.client} where {client} was meant")
        plan = self.run.plan
        if not -1 <= header.round < plan.rounds:
            raise WireError(f"round {header.round} is not one of this experiment")
        current = plan.round(header.round, mask, header.exchange)
        exchanges = plan.exchanges(current)
        if header.exchange >= len(exchanges):
            raise WireError(f"round {header.round} has no exchange {header.exchange}")
        exchange = exchanges[header.exchange]
        frame = Frame(self.run.layout, mask, self.run.bench.gradient.dtype)
        return Order(exchange, current, frame, codec.read_fields(reader, exchange.down, frame))

    def _open(self, data: bytes) -> tuple[codec.Header, Mask, Any]:
        """A download that counts on any of the masks that we hold, or on none."""
        device = self.run.bench.gradient.device
        wanted = codec.peek(data).mask
        candidates = sorted(self.masks.values(), key=lambda mask: mask.fingerprint == wanted)
        for held in [*reversed(candidates), None]:
            try:
                header, mask, reader = codec.open_download(data, self.run.layout, held)
            except MaskMissingError:
                continue
            mask = mask.to(device)
            self.masks.pop(mask.fingerprint, None)
            self.masks[mask.fingerprint] = mask
            while len(self.masks) > REMEMBERED:
                del self.masks[next(iter(self.masks))]
            return header, mask, reader
        raise MaskMissingError("the mask that the message is on is not here: ask for the whole")

    def _rows(self, client: int) -> Tensor:
        if self.host.clients and client not in self.host.clients:
            raise WireError(f"client {client} is not here")
        return self.run.rows[client if self.host.clients else 0].to(self.run.bench.gradient.device)

    def _carried_out(self, order: Order, client: int) -> Reply:
        bench = self.run.bench
        self._account(order, client)
        with threads_for(bench.batch_macs):
            return bench.work(order, client, self._rows(client))

    def _account(self, order: Order, client: int) -> None:
        """Count what is about to leave; an `InputError` where the owner's ε does not allow it."""
        up, protection = order.exchange.up, self.run.bench.protection
        holder = client if self.host.clients else 0  # all numbers stand for the same data where there is but one client
        now = self.sent.get(holder, Account()) + Account.of(protection, *countable(up))
        if self.host.epsilon is not None:
            protection.check(up, order.frame, limited=True)
            total = (self.before + now).epsilon(self.host.delta)
            if not total <= self.host.epsilon:
                spent = f"the ε = {self.host.epsilon:g} of this site is spent"
                raise InputError("this experiment has no bounded ε" if math.isinf(total) else spent)
        self.sent[holder] = now


def accepted(text: str, host: Host) -> Experiment:
    """The experiment that a server names, on this site's data and device; it may name no code but that of the package."""
    if not isinstance(text, str):
        raise InputError("the server's experiment is no text: it is no fedrts server, or one of another version")
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the server's experiment is no valid TOML: {error}") from error
    for key in ("versions", "out", "init"):
        settings.pop(key, None)
    topology = settings.get("topology", {})
    for name in (settings.get("model"), settings.get("method"), topology.get("prunable") if isinstance(topology, dict) else None):
        if isinstance(name, str) and ":" in name and name not in host.allowed:
            raise InputError(f"the experiment names code that is not part of fedrts: start the client with --allow {name} if you trust it")
    named = str(settings.get("data", ""))
    if host.data is None and ":" in named:
        raise InputError("the experiment names data on the server's machine: say with --data what is here")
    if host.data is not None:
        same = host.data == named or (":" in named and host.data.partition(":")[0] == named.partition(":")[0])
        options = {**(settings.get("data_options", {}) if same else {}), **host.options}
        settings |= {"data": host.data, "data_options": options}
    return config.resolve({**settings, "device": host.device, "engine": {"name": "serial"}})

"""A site: its data, the clients it stands for, and the client program. The connection to a server is elsewhere.

The server names an experiment and sends weights; it never sends code. What the experiment names must be part of this
package, or of what the site's owner allows.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor

import fedrts
from fedrts import config, logs, models
from fedrts import data as sets
from fedrts.client import envelope
from fedrts.client.figures import FigureForm
from fedrts.client.masks import LastMasks
from fedrts.client.order import Order, Reply, fingerprint
from fedrts.client.privacy import Account, Unpredictable, countable
from fedrts.client.summing import SumForm
from fedrts.config import Experiment
from fedrts.data.partition import SITES
from fedrts.engines import sparse_kernel
from fedrts.engines.threads import threads_for
from fedrts.errors import InputError, reason
from fedrts.flower import consent, policy
from fedrts.flower.confidant import Confidant, NodeKey, judged
from fedrts.flower.consent import DeclinedError
from fedrts.flower.host import Host
from fedrts.flower.messages import SUM, Facts, memory_facts, named_memories
from fedrts.flower.normalisation import Normalisation
from fedrts.flower.state import Records
from fedrts.logs import warning
from fedrts.registry import only_allowing
from fedrts.runs.build import Assembled, build_model, federation, put_together
from fedrts.secure.call import METRICS, STATISTICS, UPDATE, Call
from fedrts.secure.participant import WORDS
from fedrts.server.assessment import assessment
from fedrts.wire import codec
from fedrts.wire.errors import MaskMissingError, WireError
from fedrts.wire.fields import Field, Frame, Steps, carried

OF_THE_INPUTS = ("size", "augment", "length", "words", "target", "task", "drop", "categories", "units")
"""Options of data sets that say what an input is. Sites must agree on these; which rows take part is a site's own affair."""


@dataclass
class Site:
    """A site that knows the experiment."""

    host: Host
    run: Assembled
    digest: str
    """Names what the server asks."""
    per_round: int
    """Clients of a round."""
    federation: int
    """Clients of the federation: sums of metrics and of statistics are over all that have some."""
    records: Records = field(default_factory=Records)
    say: Callable[[str], None] = lambda text: None
    """To the owner."""
    masks: LastMasks = field(default_factory=LastMasks)
    normalisation: Normalisation | None = None
    """The common one, once the server has told it."""
    confidant: Confidant | None = None
    """Answers in its place where the server is to learn sums alone."""

    @staticmethod
    def of(
        host: Host,
        text: str,
        facts: Facts,
        records: Records | None = None,
        say: Callable[[str], None] = lambda text: None,
        identity: NodeKey | None = None,
    ) -> Site:
        """Build the site for the server's experiment; `facts` give the input shape and the number of classes."""
        with owners_rule(host):
            site = Site._of(host, text, facts, records or Records(), say)
        site.confidant = site._confidant(identity)
        return site

    @staticmethod
    def _of(host: Host, text: str, facts: Facts, records: Records, say: Callable[[str], None]) -> Site:
        digest = consent.digest({**facts, "experiment": text})
        with _told(None if host.data is None else host.data.partition(":")[2]):
            experiment = accepted(text, host)
        sites = experiment.clients.partition == SITES
        if sites == bool(host.clients):
            raise DeclinedError(
                "the experiment counts on sites with data of their own: start the client without --partition"
                if sites
                else "the experiment divides one data set: say with --partition which parts are here"
            )
        local = {"partition": "iid", "total": 1, "per_round": 1, "min_size": 1}
        here = experiment
        if sites:
            options = {**_holding_nothing_out(experiment.data), **experiment.data_options}
            here = experiment.model_copy(update={"clients": experiment.clients.model_copy(update=local), "data_options": options})
        shape, classes = tuple(facts["input_shape"]), int(facts["classes"])
        policy.check_training(experiment, host.limits)
        with _told():
            module = policy.built(partial(build_model, here, shape, classes), host.limits)  # nothing of the site is in it yet
        held, rows = federation(here, host.data_dir)
        if held.input_shape != shape:
            raise DeclinedError(
                f"the data here has inputs of shape {held.input_shape}, the experiment's are {shape}",
                "its inputs are not of the experiment's shape",
            )
        if held.classes > classes or (held.classes < classes and experiment.data.startswith("folder:")):
            raise DeclinedError(
                f"the data here has {held.classes} classes, the experiment's {classes}",
                "its data has not the experiment's number of classes",
            )
        if unknown := [client for client in host.clients if not 0 <= client < len(rows)]:
            raise DeclinedError(f"--partition {unknown[0]}: the experiment has {len(rows)} clients, numbered from 0")
        policy.check_rows([len(rows[client]) for client in host.clients or [0]], experiment.train.batch_size, host.limits)
        run = put_together(here, module, replace(held, classes=classes), rows, noise=Unpredictable)
        return Site(host, run, digest, experiment.clients.per_round, experiment.clients.total, records, say)

    def _confidant(self, identity: NodeKey | None) -> Confidant | None:
        """Return the part that takes part in secure sums; impossible without a key that stays with the process."""
        summing = self.run.bench.summing
        if summing is None:
            if self.host.peers is not None:
                raise DeclinedError("the experiment does not sum in secret, and this site's owner names its peers for that (--peers)")
            return None
        if identity is None:
            raise DeclinedError("secure.aggregation needs `fedrts client`, which stays the same process from message to message")
        if self.host.peers is None:
            self.say(warning("note", "the server names this site's peers: that hides updates from an honest server only; see --peers"))
        return Confidant(
            identity,
            summing,
            self.run.method,
            self.digest,
            self.per_round,
            not self.host.clients or self.host.peers is not None,
            self,
            self.host.peers,
        )

    # -- what it has for secure sums, see `confidant.Stake` ---------------------------------------------------------

    def samples(self, purpose: bytes, client: int) -> int:
        rows = len(self._rows(client))
        if self.host.clients:  # parts of one data set, of which the coordinator has the test rows
            return rows if purpose == UPDATE else 0
        return {UPDATE: rows, METRICS: self.held_out, STATISTICS: rows if self._described else 0}.get(purpose, 0)

    def opened(self, purpose: bytes, client: int) -> int:
        return self.records.opened(self.digest, self._holder(client), purpose)

    def note(self, purpose: bytes, client: int, round: int) -> None:
        self.records.open(self.digest, self._holder(client), round, purpose)

    @property
    def inputs(self) -> list[float]:
        return [] if self.normalisation is None else self.normalisation.numbers

    # -- who it is ----------------------------------------------------------------------------------------------------

    def introduction(self) -> dict[str, Any]:
        """Return the introduction: the clients that this site runs, with their numbers of samples."""
        clients = list(self.host.clients)
        samples = [len(self._rows(client)) for client in clients] if clients else [len(self.run.rows[0])]
        data = self.run.data.fingerprint  # which the server compares where it knows the data, and must not guess at where it does not
        told = {"fedrts": fedrts.__version__, "clients": clients, "samples": samples, "data": data if clients else self.records.keyed(data)}
        if clients:
            return told
        measured, secret = self._described, self.run.bench.summing is not None
        if secret:  # what they are is told in a sum
            return {**told, "held_out": self.held_out, "channels": 0 if measured is None else len(measured.mean)}
        return {**told, "held_out": self.held_out, "statistics": [] if measured is None else measured.numbers}

    @property
    def held_out(self) -> int:
        """The number of held-out samples on which this site evaluates the global model.

        It is 0 below the owner's minimum, where metrics would reveal single rows, and with a limited ε, which metrics do not respect.
        """
        protection, rows = self.run.bench.protection, len(self.run.data.test_y)
        limited = self.host.epsilon is not None or protection.noise or protection.index_epsilon
        return 0 if limited or rows < self.host.limits.min_samples else rows

    @cached_property
    def _described(self) -> Normalisation | None:
        """Return the input statistics for a common normalisation; empty if the owner objects or limits ε."""
        silent = self.host.keep_statistics or self.host.epsilon is not None
        return None if silent else Normalisation.measured(self.run.data)

    def normalise(self, numbers: object) -> None:
        """Normalise inputs by the common statistics that came with an order, from the first one on."""
        told = Normalisation.told(numbers)
        if told is None or told == self.normalisation:
            return
        if self.normalisation is not None:
            raise WireError("the server changes the normalisation of inputs in the middle of the study")
        self.run.bench.data = told.applied(self.run.bench.data)
        self.normalisation = told

    def answer(self, blobs: Mapping[int, bytes], told: Facts | None = None) -> tuple[dict[str, Any], dict[int, bytes]]:
        """The encoded replies to encoded orders by client; the facts name those who lack the mask, what failed, and memories.

        `told` is what the server says beside the orders.
        """
        told = told or {}
        counted, model = named_memories(told), told.get("model")
        replies: dict[int, bytes] = {}
        missing, failed, reasons = [], [], []
        kept: dict[int, int] = {}
        forgotten: list[int] = []
        for client, data in blobs.items():
            try:
                with owners_rule(self.host):
                    if self.confidant is not None:
                        replies[client] = self._in_secret(self.confidant, client, data, told)
                        continue
                    with _told():
                        order = self.order(client, data, model)
                    memory = self._memory(order, client, counted.get(client))
                    if memory is None and client in counted:
                        forgotten.append(client)
                    reply = self._carried_out(order, client, memory)
                    replies[client] = envelope.encode_reply(reply, order)
                    if reply.left is not None:
                        kept[client] = self.records.memories.keep(client, order.round.index, reply.left)
            except MaskMissingError:
                missing.append(client)
            except Exception as error:  # whatever it was, other clients of this site may fare better
                self.say(logs.error("failed", f"no answer for client {client}: {reason(error)}", client=client))
                failed.append(client)
                reasons.append(consent.told(error, "its work failed"))
        lost = {"forgotten": forgotten} if forgotten else {}
        return {"missing": missing, "failed": failed, "reasons": reasons, **memory_facts(kept), **lost}, replies

    def _in_secret(self, confidant: Confidant, client: int, data: bytes, told: Facts) -> bytes:
        """Answer a step of a secure sum. Errors in the step are reported to the server; errors in the work itself are not."""
        with _told():
            if told.get(SUM) != WORDS:
                return confidant.answer(told.get(SUM), client, data)
            dealt, ordered = confidant.ordered(client, data)
            call = confidant.called(client)
            if call.purpose == STATISTICS:
                return self._statistics(confidant, client, call, dealt)
            order = self.order(client, ordered, told.get("model"))
            form = self._form(confidant, client, call, order)
        message = self._carried_out(order, client, None).message
        with _told():
            if isinstance(form, FigureForm):
                return confidant.figures(client, form, carried(message["metrics"], Tensor).tolist(), dealt)
            return confidant.update(client, order, form, message, dealt)

    def _statistics(self, confidant: Confidant, client: int, call: Call, dealt: bytes) -> bytes:
        """Return this site's input statistics."""
        if self._described is None:
            raise WireError("its statistics are asked for, and it tells none")
        form = FigureForm.of_channels(len(self._described.mean), len(call.roster))
        confidant.check(client, form.digest(""))
        return confidant.figures(client, form, self._described.moments, dealt)

    def _form(self, confidant: Confidant, client: int, call: Call, order: Order) -> FigureForm | SumForm:
        """Return the meaning of the words that an order asks for, if this call may ask for them with it."""
        confidant.check_round(client, order)
        if call.purpose == UPDATE:
            if order.exchange.no_sum is not None:
                raise WireError("an order whose answer is no sum")
            update = confidant.summing.form(order, self.run.method, len(call.roster))
            confidant.check(client, update.digest(order))
            return update
        if order.exchange != assessment(self.run.plan.metric_names):
            raise WireError("metrics are asked for by an order of something else")
        if not self.run.plan.is_evaluated(order.round.index):
            raise WireError(f"metrics of round {order.round.index}, which the experiment does not evaluate")
        figures = FigureForm.of_metrics(self.run.plan.metrics, self.run.experiment.secure, len(call.roster))
        confidant.check(client, figures.digest(judged(order)))
        return figures

    def order(self, client: int, data: bytes, model: object = None) -> Order:
        """Decode a client's order; the exchange is built here, from the experiment, the round and the mask."""
        header, mask, reader = self.masks.open(data, self.run.layout, self.run.bench.device)
        if header.client != client:
            raise WireError(f"an order to client {header.client} where {client} was meant")
        plan = self.run.plan
        if not -1 <= header.round < plan.rounds:
            raise WireError(f"round {header.round} is not one of this experiment")
        current = plan.round(header.round, mask, header.exchange)
        exchanges = [*plan.exchanges(current), assessment(plan.metric_names)]
        if header.exchange >= len(exchanges):
            raise WireError(f"round {header.round} has no exchange {header.exchange}")
        exchange = exchanges[header.exchange]
        frame = Frame(self.run.layout, mask, self.run.bench.dtype)
        sent = codec.read_fields(reader, exchange.down, frame)
        for name, payload in sent.items():
            if isinstance(payload, Steps):
                sent[name] = self._caught_up(exchange.down[name], payload, header.round, frame, model)
        return Order(exchange, current, frame, sent)

    def _caught_up(self, entry: Field, payload: Steps, round: int, frame: Frame, name: object) -> Steps:
        """A model that came as steps from one before, as a whole: of the one that is here last come the steps since.

        `MaskMissingError` where that is not the server's model: then the client asks for the whole.
        """
        whole, memories = payload.whole, self.records.memories
        if whole is None:
            held = memories.model()
            behind = -1 if held is None else round - held[0]
            if held is None or not 0 <= behind <= len(payload.steps) or len(held[1]) != frame.layout.length:
                raise MaskMissingError("the model that the steps start from is not here: ask for the whole")
            since = Steps(None, payload.steps[len(payload.steps) - behind :])
            whole = carried(entry.open(since, replace(frame, reference=held[1].to(frame.mask.bits.device))), Tensor)
            if fingerprint(whole) != name:
                raise MaskMissingError("the steps lead to another model than the server's: ask for the whole")
        memories.keep_model(round, whole)
        return Steps(whole, ())

    def _rows(self, client: int) -> Tensor:
        if self.host.clients and client not in self.host.clients:
            raise WireError(f"client {client} is not here")
        return self.run.rows[client if self.host.clients else 0].to(self.run.bench.device)

    def _carried_out(self, order: Order, client: int, memory: Tensor | None) -> Reply:
        bench = self.run.bench
        with _told():
            rows = self._rows(client)
        self._account(order, client)
        if memory is not None:
            order = replace(order, residuals={client: memory})
        with self._frugal(), threads_for(bench.batch_macs):
            return bench.work(order, client, rows)

    @contextlib.contextmanager
    def _frugal(self) -> Iterator[None]:
        """Free all vectors as long as the model before and after an order, if clients compute in sparse kernels."""
        run = self.run
        if run.bench.program is None:
            yield
            return
        if len(run.setup.weights):  # which only the server starts from
            self.run = replace(run, setup=replace(run.setup, weights=run.setup.weights.new_empty(0)))
        run.bench.release()
        try:
            yield
        finally:
            run.bench.release()

    def _memory(self, order: Order, client: int, counted: int | None) -> Tensor | None:
        """Return a client's residual after the upload of this name, the last that counted; None: empty or lost."""
        if order.exchange.fed_back is None:
            return None
        memory = self.records.memories.recalled(client, order.round.index, counted)
        if memory is not None and len(memory) == order.frame.layout.parameters:
            return memory
        if counted is not None:
            words = f"what earlier uploads of client {client} have not told is lost here: it goes on without"
            self.say(warning("lost", words, client=client, round=order.round.index))
        return None

    @property
    def counts_privacy(self) -> bool:
        """Whether the privacy account applies."""
        return self.host.epsilon is not None or self.run.bench.protection.on

    def spent(self, client: int) -> float | None:
        """The ε that a client here has spent so far, at the owner's δ; None: unbounded."""
        epsilon = self.records.spent(self.digest, self._holder(client)).epsilon(self.host.delta)
        return epsilon if math.isfinite(epsilon) else None

    def _holder(self, client: int) -> int:
        """Return the holder of the data behind a client's number: all numbers share the same data if there is only one client."""
        return client if self.host.clients else 0

    def _account(self, order: Order, client: int) -> None:
        """Record the cost of what is about to leave, on disk; raise if the owner's ε does not allow it."""
        up, protection = order.exchange.up, self.run.bench.protection
        holder = self._holder(client)
        with _told():
            protection.check(up, order.frame, limited=self.host.epsilon is not None)
        more = Account.of(protection, *countable(up))
        if self.host.epsilon is not None:
            before = self.records.spent(self.digest, holder).epsilon(self.host.delta)
            total = (self.records.spent(self.digest, holder) + more).epsilon(self.host.delta)
            if not total <= self.host.epsilon:
                unbounded = "what left this site before" if math.isinf(before) else "this experiment"
                spent = f"the ε = {self.host.epsilon:g} of this site is spent"
                raise DeclinedError(f"{unbounded} has no bounded ε" if math.isinf(total) else spent)
        self.records.spend(self.digest, holder, more)


@contextlib.contextmanager
def _told(private: str | None = None) -> Iterator[None]:
    """Report errors about the server's own input to it, except for the word `private`."""
    try:
        yield
    except (DeclinedError, MaskMissingError):
        raise
    except (InputError, WireError) as error:
        raise DeclinedError(str(error), str(error).replace(private, "…") if private else None) from error


def _holding_nothing_out(name: str) -> dict[str, float]:
    """Return the option that makes a site train on all given data, for data sets that hold out a share by default."""
    return {"test": 0.0} if "test" in inspect.signature(sets.get(name)).parameters else {}


def accepted(text: str, host: Host) -> Experiment:
    """Return the server's experiment on this site's data and device; it may name only code from the package."""
    settings = config.written_out(consent.parsed(text))
    for key in ("out", "init", "origin", "callbacks", "stop"):
        settings.pop(key, None)
    if isinstance(train := settings.get("train"), dict):  # where the server steps is its own affair, and its own code
        settings["train"] = {key: value for key, value in train.items() if key != "server_optimizer"}
    named = str(settings.get("data", ""))
    if host.data is None and ":" in named and named not in host.allowed:
        raise InputError("the experiment names data on the server's machine: say with --data what is here")
    if host.data is not None:
        same = host.data == named or (":" in named and host.data.partition(":")[0] == named.partition(":")[0])
        settings |= {"data": host.data, "data_options": _options(settings) if same else {}}
    model = str(settings.get("model", ""))
    if models.models.is_path(model) and model not in host.allowed:
        raise InputError(
            f"the experiment names a model in a folder: have it here too, then start the client with --allow {shlex.quote(model)}"
        )
    if not host.clients:
        settings["data_options"] = {name: value for name, value in _options(settings).items() if name in OF_THE_INPUTS}
    settings["data_options"] = {**_options(settings), **host.options}
    with owners_rule(host):
        return config.resolve({**settings, "device": host.device, "engine": {"name": "serial", **_kernel(settings)}})


def owners_rule(host: Host) -> AbstractContextManager[None]:
    """Restrict a server's experiment to code from the package, code that the owner allows, and the owner's own data."""
    own = [] if host.data is None else [(sets.data.kind, host.data)]
    return only_allowing(host.allowed, lambda path: f"start the client with --allow {shlex.quote(path)} if you trust it", own)


def _kernel(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the server's kernel settings; the rest of how this site computes is its own choice."""
    given = settings.get("engine", {})
    return sparse_kernel.elsewhere(given) if isinstance(given, dict) else {}


def _options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the server's data options; anything but a table is left to the complete check."""
    given = settings.get("data_options", {})
    return dict(given) if isinstance(given, dict) else {}

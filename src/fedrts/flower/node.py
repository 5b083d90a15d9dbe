"""A node: a site that is connected to a server over Flower's Fleet API, and comes back whenever the connection is lost.

It is one process that stays warm between messages. Flower's own SuperNode works too (`client_app.py`), with a new process
for every message.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import safetensors.torch
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error, Message

import fedrts
from fedrts import logs
from fedrts.audit.log import FILE, AuditLog
from fedrts.audit.witness import Witness, Witnesses, entries, facts_entry
from fedrts.drain import Drain
from fedrts.errors import InputError, RefusedError, note, printable
from fedrts.files import write_atomically
from fedrts.flower import FAREWELL, HELLO, PROTOCOL, STRANGER, WELCOME, Say
from fedrts.flower.certificates import Certificates
from fedrts.flower.confidant import NodeKey
from fedrts.flower.consent import SHOWN, DeclinedError, described, digest, told
from fedrts.flower.host import ANY, Host
from fedrts.flower.inside import (
    HEARTBEAT_DEFAULT_INTERVAL,
    ErrorCode,
    FleetHttpClient,
    HeartbeatSender,
    Node,
    NodeAuthHttpInterceptor,
    ObjectPullError,
    ObjectPushError,
    RuntimeVersionHttpInterceptor,
    answering,
    fleet_pb2,
    generate_key_pairs,
    heartbeat_pb2,
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
    message_from_proto,
    named,
    no_object_id_recompute,
    packed,
    public_key_to_bytes,
    push_objects,
)
from fedrts.flower.keys import adopt, fingerprint, outdated, read_private_key, seal_of, successors, trusting
from fedrts.flower.limits import is_loopback
from fedrts.flower.messages import HEAD, SUM, Incoming, content, opened
from fedrts.flower.state import Records
from fedrts.logs import info, warning
from fedrts.secure.identity import public_key, signer
from fedrts.wire.errors import WireError

LONGEST_MESSAGE = 4 * 2**30
"""Bytes that a node takes from its server at most."""
_FETCHED = 5.0
"""Seconds that a node stays after its last answer: Flower drops answers of a node that is gone before the server fetches them."""
_POLL = 0.5
_PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds between two tries to connect."""
_UNANSWERED = 120.0
"""Seconds after which a withdrawal that nobody acknowledges is given up."""
_GOOD_ENDS = ("finished", "withdrawn", "looked")
"""Farewells after which all is well."""
_DAILY = 24 * 3600.0
"""Seconds between two looks at certificates."""
_RENEW = "the coordinator renews it with `fedrts keys init … --renew`"
_ANEW = "ask the coordinator for a new one"
_STALLED = 60.0
"""Seconds after which a message whose pieces do not come is given up."""

if TYPE_CHECKING:
    from fedrts.flower.site import Site

Ask = Callable[[str], bool]
"""Shows the owner what an experiment asks for, and waits for a yes or no."""


@dataclass(frozen=True)
class Server:
    """The server's address, and the credentials that this node presents."""

    address: str
    key: Path | None = None
    ca: Path | None = None
    insecure: bool = False

    def private_key(self) -> ec.EllipticCurvePrivateKey | None:
        """The node's key; None without one."""
        return None if self.key is None else read_private_key(self.key)

    def successor(self) -> ec.EllipticCurvePrivateKey | None:
        """The key that will follow the node's, where `fedrts keys rotate` made one."""
        if self.key is None or not (file := successors(self.key)[0]).exists():
            return None
        return read_private_key(file)

    def authority(self) -> bytes | None:
        """The certificate that must have signed the server's; None: those that the system trusts."""
        try:
            data = None if self.ca is None else self.ca.read_bytes()
            if data is not None:
                x509.load_pem_x509_certificates(data)
            return data
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read the certificate {self.ca}: {getattr(error, 'strerror', None) or error}") from error


def serve(
    host: Host,
    server: Server,
    say: Say = print,
    patience: float = float("inf"),
    ask: Ask | None = None,
    *,
    withdraw: bool = False,
    witness: Witness | None = None,
    drain: Drain | None = None,
) -> None:
    """Serve a server until the study ends. A lost connection is retried for `patience` seconds; a refusal is final.

    `withdraw`: only tell the server that this site takes part no more. `witness`: told of what happens, beside the site's own log.
    `drain`: who asks it to stop waits for the answer that is being worked on.
    """
    if server.insecure and not is_loopback(server.address.rpartition(":")[0].strip("[]")):
        note(f"--insecure to {server.address}: whoever is on the way can read and change everything; use --key and --ca")
    private = server.private_key()
    keys = (private, private.public_key()) if private is not None else generate_key_pairs()
    worker = Worker(host, say, ask, withdraws=withdraw, key=keys[0], drain=drain)
    with recorded(worker, private, witness):
        _stand_by(worker, server, OwnKey(server, keys), private is not None, patience, _UNANSWERED if withdraw else float("inf"))


@contextlib.contextmanager
def recorded(worker: Worker, key: ec.EllipticCurvePrivateKey | None, witness: Witness | None = None) -> Iterator[None]:
    """Record a worker's actions in the site's folder, signed if there is a key, and notify a `witness`."""
    folder, others = worker.records.path, [] if witness is None else [witness]
    if folder is None:
        worker.witness = Witnesses(*others)
        yield
        return
    with contextlib.closing(AuditLog(folder / FILE, "node", None if key is None else seal_of(key), worker.say)) as log:
        worker.witness = Witnesses(log, *others)
        yield


class OwnKey:
    """The key by which a node is known, and the one that may follow it."""

    def __init__(self, server: Server, keys: tuple[Any, Any]) -> None:
        self.server, self.keys = server, keys
        self._changing = False

    def follows(self, worker: Worker) -> bool:
        """Continue with the next key after the current one was refused; false if there is none, or it is refused too."""
        private = None if self._changing else self.server.successor()
        if private is None:
            return False
        self.keys, self._changing = (private, private.public_key()), True
        worker.say(info("key", f"the key {fingerprint(worker.public_key)} is refused: trying the one that follows it"))
        return True

    def accepted(self, worker: Worker) -> None:
        """The server knows the key: the one that follows takes the place of the other."""
        if not self._changing:
            return
        self._changing = False
        private = self.keys[0]
        worker.succeed(private)
        try:
            assert self.server.key is not None
            adopt(self.server.key)
        except (InputError, OSError) as error:
            words = f"the new key could not take the place of {self.server.key} ({error}): it stays beside it, and is found there"
            worker.say(warning("key", words))
        worker.say(info("key", f"this node has the key {fingerprint(worker.public_key)} now"))


def _stand_by(worker: Worker, server: Server, identity: OwnKey, registered: bool, patience: float, unanswered: float) -> None:
    say, tries, last = worker.say, 0, time.monotonic()
    certificates = Seen(server, worker)
    due = time.monotonic() + unanswered
    while True:
        try:
            with Connection(server, identity.keys, registered) as connection:
                identity.accepted(worker)
                say(info("connected", f"connected to {server.address}", server=server.address))
                certificates.look()
                worker.witness("connected", server=server.address)
                while worker.parting is None:
                    tries, last = 0, time.monotonic()
                    certificates.look()
                    try:
                        took = connection.handle(worker.reply)
                        if took and worker.drain.asked:
                            time.sleep(_FETCHED)
                    finally:
                        if not worker.is_needed:
                            worker.drain.end()  # the answer is sent
                    if not took:
                        time.sleep(_POLL)
                    if last > due:
                        raise InputError(f"{server.address} does not answer: if a node runs with this key, stop it first")
        except RefusedError:
            if not identity.follows(worker):
                raise
            continue
        except (httpx.HTTPError, ssl.SSLError, ObjectPullError, ObjectPushError, WireError, ConnectionError) as error:
            if "certificate verify failed" in str(error).lower():
                raise InputError(untrusted(server, str(error))) from error
            if tries == 0 and worker.parting is None:
                worker.witness("disconnected", server=server.address)
                words = f"no connection to {server.address} ({error or type(error).__name__}): trying again"
                say(warning("lost", words, server=server.address))
        if worker.parting is not None:
            worker.parting.obey(say)
            return
        if time.monotonic() - last > patience:
            raise InputError(f"{server.address} could not be reached for {patience:.0f} seconds")
        time.sleep(_PAUSES[min(tries, len(_PAUSES) - 1)])
        tries += 1


class Seen:
    """The certificates that a node sees: looked at when it connects, and every day."""

    def __init__(self, server: Server, worker: Worker) -> None:
        self.server, self.worker = server, worker
        self._due, self._known = float("-inf"), Certificates(worker.say, worker.witness, {"server": _RENEW, "authority": _ANEW})

    def look(self) -> None:
        """Warn of a certificate that expires soon."""
        if self.server.insecure or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _DAILY
        with contextlib.suppress(InputError):  # what is wrong with them shows where they are needed
            for file, certificate in _certificates(self.server):
                self._known.show("server" if file is None else "authority", certificate)


def untrusted(server: Server, error: str) -> str:
    """Explain why we do not talk to a server: its certificate, or its authority's."""
    for file, certificate in _certificates(server) if "expired" in error or "not yet valid" in error else ():
        if fault := outdated(certificate):
            remedy = _ANEW if file else _RENEW
            return f"{file or f'the certificate of {server.address}'} {fault}: {remedy}"
    return f"{server.address} is not who --ca vouches for: {error}"


def _certificates(server: Server) -> Iterator[tuple[Path | None, x509.Certificate]]:
    """Return the authority's certificates with their file, and the server's, which is only inspected."""
    for certificate in x509.load_pem_x509_certificates(server.authority() or b"") if server.ca else ():
        yield server.ca, certificate
    host, _, port = server.address.rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        yield None, x509.load_pem_x509_certificate(ssl.get_server_certificate((host.strip("[]"), int(port)), timeout=10).encode())


def refusal(error: httpx.HTTPStatusError) -> str:
    """Explain why a server refuses us."""
    text = " ".join(error.response.text.split())
    if "clock" in text:
        return printable(text)
    if "activate" in text or "not registered" in text:
        return "its key is not registered, or was revoked: ask the coordinator for `fedrts keys register`"
    if "must be registered" in text:
        return "it has no key, and the server wants one: use --key"
    if error.response.status_code == 401:
        return "its signature is not valid: is --key the right one?"
    return f"{error.response.status_code} {printable(text)}"


@dataclass(frozen=True)
class Parting:
    """The reason why a node disconnects."""

    why: str
    text: str

    def obey(self, say: Say) -> None:
        """Tell the owner; an end that is not successful is an error."""
        if self.why not in _GOOD_ENDS:
            raise RefusedError(self.text)
        say(info(self.why, self.text))


class Worker:
    """Answer messages in sequence; the site is built when the first server introduces itself."""

    def __init__(
        self,
        host: Host,
        say: Say,
        ask: Ask | None = None,
        records: Records | None = None,
        *,
        withdraws: bool = False,
        key: ec.EllipticCurvePrivateKey | None = None,
        drain: Drain | None = None,
    ) -> None:
        self.host, self.say, self.ask, self.withdraws = host, say, ask, withdraws
        self.identity = None if key is None else NodeKey(signer(key), public_key(key))
        self.public_key = b"" if key is None else public_key(key)
        """With which this node signs; None where it does not outlast a message."""
        self.records = Records.of(host.state) if records is None else records
        self.site: Site | None = None
        self.declined: dict[str, str] = {}
        """Experiments that the owner said no to, by digest, and in which words: nobody is asked twice."""
        self.parting: Parting | None = None
        """Set once there is nothing more to do here."""
        self.witness = Witness()
        self.drain = drain or Drain()

    def succeed(self, key: ec.EllipticCurvePrivateKey) -> None:
        """Switch this node to another key: it signs the log from now on, and the site is rebuilt with it."""
        self.identity, self.public_key, self.site = NodeKey(signer(key), public_key(key)), public_key(key), None
        self.witness.succeeded(seal_of(key))

    @property
    def is_needed(self) -> bool:
        """Is its answer only a part of what the server counts on? A secure sum in which its words are is opened with its shares."""
        return self.site is not None and self.site.confidant is not None and self.site.confidant.is_needed

    def reply(self, message: Message) -> Message:
        """Answer any message. Nothing that a server sends crashes the node, and no error reveals its data."""
        try:
            facts, blobs = opened(message)
            if message.metadata.message_type == HELLO:
                self.witness("hello", facts=facts_entry(facts))
                introduced = {"protocol": PROTOCOL, "fedrts": fedrts.__version__, **self.meet(facts)}
                self.witness("told", facts=facts_entry(introduced), what=sorted(introduced))
                return Message(content(introduced), reply_to=message)
            if message.metadata.message_type == FAREWELL:
                self.part(facts, blobs)
                return Message(content({}), reply_to=message)
            if self.site is None:
                return Message(content({STRANGER: True}), reply_to=message)
            if message.metadata.message_type == WELCOME:
                words = f"taking part in {self.site.run.experiment.method} on {self.site.run.experiment.data}"
                self.say(info("joined", words, experiment=self.site.digest))
                self.witness("taking part", experiment=self.site.digest)
                return Message(content({}), reply_to=message)
            self.drain.begin()
            started = time.monotonic()
            place = _place(facts)
            self.witness.heard(facts.get(HEAD))
            self.witness("asked", **place, clients=entries(blobs))
            self.site.normalise(facts.get("normalisation"))
            answer, replies = self.site.answer(blobs, facts)
            seconds = time.monotonic() - started
            words = f"worked for client {', '.join(map(str, blobs))} in {seconds:.1f} s"
            size = sum(map(len, replies.values()))
            self.say(info("worked", words, **place, clients=list(blobs), bytes=size, seconds=round(seconds, 3)))
            spent = {str(client): self.site.spent(client) for client in replies} if self.site.counts_privacy else {}
            told_of = {"failed": answer["failed"], "seconds": round(seconds, 3), **({"epsilon": spent} if spent else {})}
            self.witness("sent", **place, clients=entries(replies), **told_of)
            self.witness.seal()
            if head := self.witness.head:
                answer[HEAD] = head
            return Message(content(answer, replies), reply_to=message)
        except Exception as error:  # whatever it was, the next message may fare better
            self.say(logs.error("failed", f"failed: {error or type(error).__name__}"))
            self.witness("failed", kind=type(error).__name__)
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, told(error, "its work failed")), reply_to=message)

    def meet(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Learn the experiment and introduce ourselves if the owner accepts it; otherwise we are done here."""
        if self.withdraws:
            return {"withdraws": True}
        try:
            _check_version(facts)
            asked = digest(facts)
            if self.site is None or self.site.digest != asked:
                self.site = self._joined(asked, facts)
            return self.site.introduction()
        except Exception as error:
            self.parting = self.parting or Parting("refused", f"cannot take part: {error or type(error).__name__}")
            self.witness("declined", kind=type(error).__name__)
            return {"refused": told(error, "it cannot take part")}

    def _joined(self, asked: str, facts: dict[str, Any]) -> Site:
        """Return the site for an accepted experiment. Without consent the one accepted before stays in force."""
        from fedrts.flower.site import Site  # which takes seconds to import: the server need not wait for the connection

        if asked in self.declined:
            raise DeclinedError(self.declined[asked])
        named = self.host.consents(asked)
        if self.host.dry_run or not (named or self.records.accepts(asked)):
            site = self._shown(asked, facts)
        else:
            site = Site.of(self.host, facts["experiment"], facts, self.records, self.say, self.identity)
        if ANY in self.host.accept:
            self.records.begin(asked)
        else:
            self.records.accept(asked)
        self.witness("accepted", experiment=asked)
        return site

    def _shown(self, asked: str, facts: dict[str, Any]) -> Site:
        """Return the site for an experiment that the owner has seen and accepted."""
        from fedrts.flower.site import Site

        if self.ask is None:
            look = "look at it with --dry-run, then start the client with --accept"
            raise DeclinedError(f"its owner has not accepted the experiment {asked[:SHOWN]}: {look} {asked[:SHOWN]}")
        site = Site.of(self.host, facts["experiment"], facts, self.records, self.say, self.identity)
        agreed = self.ask(described(site, asked))
        if self.host.dry_run or not agreed:
            self.declined[asked] = "it only looks (dry run)" if self.host.dry_run else "its owner declined the experiment"
            self.parting = Parting("looked", "this was a dry run: the site took no part") if self.host.dry_run else None
            raise DeclinedError(self.declined[asked])
        return site

    def part(self, facts: dict[str, Any], blobs: dict[int, bytes]) -> None:
        """Handle the server's goodbye, with the final model if we may have it."""
        self.parting = Parting(str(facts.get("why")), f"the server says: {printable(facts.get('text', ''))}")
        self.witness("farewell", why=printable(facts.get("why")), clients=entries(blobs))
        folder = self.host.state
        if not blobs or self.site is None or not self.site.run.experiment.clients.share_model:
            return
        from fedrts.flower import final

        if folder is None:
            words = "the final model came, but there is no folder to keep it in: start the client with --state DIR"
            self.say(warning("model", words))
            return
        try:
            tensors = final.decoded(next(iter(blobs.values())), self.site.run)
            write_atomically(folder / "model.safetensors", safetensors.torch.save(tensors))
        except (WireError, InputError) as error:
            self.say(logs.error("model", f"the final model was not kept: {error}"))
        else:
            self.say(info("model", f"the final model is in {folder / 'model.safetensors'}"))


def _place(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the identity of a message, for the record, as far as the server states it."""
    place: dict[str, Any] = {name: facts[name] for name in ("round", "exchange") if isinstance(facts.get(name), int)}
    return place | ({"step": printable(facts[SUM], 32)} if SUM in facts else {})


def _check_version(facts: dict[str, Any]) -> None:
    """Check that the server and we understand each other; one from before version numbers names none."""
    theirs = facts.get("protocol")
    if theirs != PROTOCOL:
        version, number = printable(facts.get("fedrts", "of unknown version"), 32), printable(theirs or "none", 32)
        ours = f"this node fedrts {fedrts.__version__} (protocol {PROTOCOL})"
        raise DeclinedError(f"the server runs fedrts {version} (protocol {number}), {ours}: install the same fedrts on both")


class Connection:
    """An activated node: it receives messages, sends replies, and sends heartbeats meanwhile."""

    def __init__(self, server: Server, keys: tuple[Any, Any], registered: bool) -> None:
        version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
        scheme, trusted = ("http", False) if server.insecure else ("https", trusting(server.authority()))
        self.client = FleetHttpClient(
            f"{scheme}://{server.address}", interceptors=[version, NodeAuthHttpInterceptor(*keys)], verify=trusted
        )
        self.public, self.registered, self.address = public_key_to_bytes(keys[1]), registered, server.address
        self.heart: HeartbeatSender | None = None

    def __enter__(self) -> Connection:
        try:
            if not self.registered:
                self._register()
            request = fleet_pb2.ActivateNodeRequest(public_key=self.public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
            self.node = Node(node_id=self.client.ActivateNode(request).node_id)
        except httpx.HTTPStatusError as error:
            self.client.close()
            if error.response.status_code >= 500 or error.response.status_code in (408, 429):  # too slow, too many: later
                raise
            words = f"{self.address} refuses this node: {refusal(error)}"
            raise (InputError if "clock" in words else RefusedError)(words) from error  # a clock may be set right
        except BaseException:
            self.client.close()
            raise
        self.heart = HeartbeatSender(self._beat)
        self.heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.heart is not None and self.heart.is_running:
            self.heart.stop()
        with contextlib.suppress(httpx.HTTPError, RuntimeError):
            self.client.DeactivateNode(fleet_pb2.DeactivateNodeRequest(node_id=self.node.node_id))
        self.client.close()

    def handle(self, answer: Callable[[Message], Message]) -> bool:
        """Receive one message and answer it; false if there is none."""
        response = self.client.PullMessages(fleet_pb2.PullMessagesRequest(node=self.node))
        if not response.messages_list:
            return False
        header = message_from_proto(response.messages_list[0])
        run, name = header.metadata.run_id, header.metadata.message_id
        incoming = Incoming(name, response.message_object_trees[0], LONGEST_MESSAGE)
        pull = make_pull_object_fn_protobuf(self.client.PullObject, self.node, run)
        due = time.monotonic() + _STALLED
        while not incoming.advance(pull):
            if time.monotonic() > due:
                return True
            time.sleep(_POLL)
        make_confirm_message_received_fn_protobuf(self.client.ConfirmMessageReceived, self.node, run)(name)
        message = named(incoming.message(), name)
        self._send(answering(answer(message), message, self.node.node_id), run)
        return True

    def _send(self, reply: Message, run: int) -> None:
        with no_object_id_recompute():
            head, tree, pieces = packed(reply)
            request = fleet_pb2.PushMessagesRequest(
                node=self.node, messages_list=[head], message_object_trees=[tree], clientapp_runtime_list=[0.0]
            )
            response = self.client.PushMessages(request)
            push = make_push_object_fn_protobuf(self.client.PushObject, self.node, run, response.session_id)
            push_objects(pieces, push, object_ids_to_push=set(response.objects_to_push))

    def _register(self) -> None:
        try:
            self.client.RegisterNode(fleet_pb2.RegisterNodeFleetRequest(public_key=self.public))
        except httpx.HTTPStatusError as error:
            if "already in use" not in error.response.text:
                raise

    def _beat(self) -> bool:
        request = heartbeat_pb2.SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        try:
            return bool(self.client.SendNodeHeartbeat(request).success)
        except httpx.HTTPError:
            return False

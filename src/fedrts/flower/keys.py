"""Certificates and keys of a federation: an authority, the server's certificate, and a key for every node.

Elliptic curves P-384 throughout (what Flower's node authentication takes); private keys are readable by their owner alone.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import functools
import hashlib
import ipaddress
import json
import os
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from pydantic import TypeAdapter, ValidationError

from fedrts.audit.lines import Seal
from fedrts.errors import InputError, note
from fedrts.files import write_atomically
from fedrts.secure.identity import is_signed, public_key, signer

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HOST = re.compile(r"(\*\.)?([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.)*[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.?")
_AUTHORITY_DAYS, _SERVER_DAYS = 3650, 825
_SIGNED_BEGIN, _SIGNED_END = b"-----BEGIN FEDRTS SIGNATURE-----\n", b"-----END FEDRTS SIGNATURE-----\n"
_ALWAYS = ("localhost", "127.0.0.1", "::1")
SOON = datetime.timedelta(days=30)
"""How long before its end a certificate is worth a word."""


@dataclass(frozen=True)
class Seat:
    """The clients that a registered node may run."""

    order: int
    """Nodes were registered in this order."""
    clients: tuple[int, ...] = ()
    """Numbers that are its own; none: of sites it gets one."""
    former: tuple[str, ...] = ()
    """Fingerprints of the keys that its present one has replaced."""


_SEAT = TypeAdapter(Seat)


@dataclass(frozen=True)
class Authority:
    """The folder with everything that the coordinator keeps."""

    folder: Path

    @property
    def certificate(self) -> Path:
        """The certificate by which nodes recognise the server."""
        return self.folder / "ca.pem"

    @property
    def server_certificate(self) -> Path:
        return self.folder / "server.pem"

    @property
    def server_key(self) -> Path:
        return self.folder / "server.key"

    @property
    def nodes(self) -> Path:
        """Public keys of the nodes that may take part, NAME.pub."""
        return self.folder / "nodes"

    def checked(self) -> Authority:
        """Return itself if it is complete and its certificates are valid today."""
        for file in (self.certificate, self.server_certificate, self.server_key):
            if not file.exists():
                raise InputError(f"{self.folder} has no {file.name}: make one with `fedrts keys init {self.folder}`")
        _check_dates(self.certificate, "make a new authority with `fedrts keys init`, and give its ca.pem to all nodes")
        _check_dates(self.server_certificate, f"`{self.renewal}` makes a new one")
        return self

    def registered(self) -> dict[str, bytes]:
        """Return public keys (PEM) by the nodes' names."""
        return self.inspected()[0]

    def inspected(self) -> tuple[dict[str, bytes], dict[str, str]]:
        """Return public keys (PEM) by the nodes' names, and the problems of files without a key or with another node's."""
        names: dict[bytes, str] = {}
        faults: dict[str, str] = {}
        for file in sorted(self.nodes.glob("*.pub")):
            try:
                key = read_public_key(file)
            except InputError as error:
                faults[file.stem] = str(error)
                continue
            if key in names:
                faults[file.stem] = f"{file} holds the key of '{names[key]}': every node needs a key of its own"
            else:
                names[key] = file.stem
        return {name: key for key, name in names.items()}, faults

    def init(self, hosts: Sequence[str]) -> None:
        """Create an authority and a server certificate for these names and addresses (and those of this machine)."""
        if (self.folder / "ca.key").exists():
            raise InputError(f"{self.folder} holds an authority already: choose another folder, or renew its certificate with --renew")
        key, certificate = _authority()
        own, signed = _server_pair(key, certificate, hosts)  # a name that cannot be shows before there is anything
        try:
            self.nodes.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot make the folder {self.nodes}: {error.strerror}; choose another") from error
        _write_secret(self.folder / "ca.key", key)
        write_atomically(self.certificate, certificate.public_bytes(serialization.Encoding.PEM))
        self._write_server(own, signed)

    def renew(self, hosts: Sequence[str]) -> None:
        """Create a new certificate for the server, under the same authority."""
        try:
            key = _loaded((self.folder / "ca.key").read_bytes())
            issuer = x509.load_pem_x509_certificate(self.certificate.read_bytes())
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read the authority in {self.folder}: {error}") from error
        self._write_server(*_server_pair(key, issuer, hosts))

    @property
    def renewal(self) -> str:
        """The command that renews the server's certificate."""
        hosts = "".join(f" --host {host}" for host in _hosts(self.server_certificate))
        return f"fedrts keys init {self.folder} --renew{hosts}"

    def _write_server(self, own: Key, signed: x509.Certificate) -> None:
        """Write a matching key and certificate."""
        if self.server_certificate.exists():  # audit logs are checked with it
            _kept_aside(self.server_certificate, self.folder / "replaced", fingerprint(read_verifier(self.server_certificate)))
        _write_secret(self.server_key, own)
        write_atomically(self.server_certificate, signed.public_bytes(serialization.Encoding.PEM))

    def seats(self) -> dict[str, Seat]:
        """Return the seat of every registered node, by name."""
        found = {}
        for file in sorted(self.nodes.glob("*.json")):
            try:
                found[file.stem] = _SEAT.validate_json(file.read_bytes(), strict=True)
            except (OSError, ValidationError) as error:
                raise InputError(f"{file} is damaged: register the key again with --clients") from error
        return found

    def register(self, public_key: Path, name: str | None = None, clients: Sequence[int] | None = None) -> str:
        """Let the node with this public key take part and run these `clients`; return its name. Calling it again replaces the clients."""
        if not self.certificate.exists():
            raise InputError(f"{self.folder} holds no authority: name its folder with --dir, or make one with `fedrts keys init`")
        pem = read_public_key(public_key)
        name = checked_name(name or public_key.stem)
        for other, known in self.registered().items():
            if known.strip() == pem.strip() and (other != name or clients is None):
                raise InputError(f"this key is registered already, as '{other}'")
            if other == name and known.strip() != pem.strip():
                raise InputError(f"'{name}' has another key: `fedrts keys revoke {name}` first, or choose another --name")
        self.nodes.mkdir(exist_ok=True)
        self._seat(name, clients)
        write_atomically(self.nodes / f"{name}.pub", pem)
        return name

    def _seat(self, name: str, clients: Sequence[int] | None) -> None:
        """Record the order in which nodes were registered, and their clients."""
        seats = self.seats()
        for other, seat in seats.items():
            if other != name and (taken := sorted(set(seat.clients) & set(clients or ()))):
                raise InputError(f"client {taken[0]} is bound to '{other}': `fedrts keys revoke {other}` first, or choose another number")
        order = seats[name].order if name in seats else max((seat.order for seat in seats.values()), default=-1) + 1
        self._write_seat(name, Seat(order, tuple(clients or ()), seats[name].former if name in seats else ()))

    def _write_seat(self, name: str, seat: Seat) -> None:
        text = json.dumps({"order": seat.order, "clients": list(seat.clients), "former": list(seat.former)})
        write_atomically(self.nodes / f"{name}.json", text.encode())

    def replace(self, name: str, successor: Path, unsigned: bool = False) -> str:
        """Let a node continue with another key, signed by its current one; return the new fingerprint.

        `unsigned`: the present key is lost, and the coordinator has made sure by other means whose the new one is.
        """
        file, known = self.nodes / f"{checked_name(name)}.pub", self.registered()
        if name not in known:
            raise InputError(f"no node '{name}' is registered in {self.folder}; registered: {', '.join(known) or 'none'}")
        pem, signature = read_successor(successor)
        if (other := next((other for other, key in known.items() if key.strip() == pem.strip()), None)) is not None:
            raise InputError(f"this key is registered already, as '{other}'")
        before = fingerprint(known[name])
        if signature is not None and not is_signed(known[name], signature, _meant(before, pem)):
            raise InputError(
                f"the signature in {successor} is not by the key of '{name}', {before}: `fedrts keys rotate` at the node signs it"
            )
        if signature is None and not unsigned:
            raise InputError(
                f"{successor} is not signed by the key of '{name}': `fedrts keys rotate` at the node signs it; if that key is lost, make "
                "sure that the new one comes from them, and add --unsigned"
            )
        seat = self.seats().get(name) or Seat(max((seat.order for seat in self.seats().values()), default=-1) + 1)
        _kept_aside(file, self.folder / "replaced", before)
        self._write_seat(
            name, dataclasses.replace(seat, former=(*seat.former, before))
        )  # first: whose key it was is known before it is new
        write_atomically(file, pem)
        return fingerprint(pem)

    def revoke(self, name: str) -> None:
        """Revoke a node's permission; a running server notices within seconds."""
        file = self.nodes / f"{checked_name(name)}.pub"
        if not file.exists():
            raise InputError(f"no node '{name}' is registered in {self.folder}; registered: {', '.join(self.registered()) or 'none'}")
        revoked = self.folder / "revoked"
        revoked.mkdir(exist_ok=True)
        os.replace(file, revoked / file.name)
        file.with_suffix(".json").unlink(missing_ok=True)


def issue(name: str, folder: Path) -> tuple[Path, Path]:
    """Create a key for a node: NAME.key, which never leaves it, and NAME.pub for the coordinator."""
    private, public = (folder / f"{checked_name(name)}.{kind}" for kind in ("key", "pub"))
    if private.exists():
        raise InputError(f"{private} is there already: choose another name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}; choose another") from error
    key = _new_key()
    _write_secret(private, key, serialization.PrivateFormat.OpenSSH)  # which Flower's own SuperNode wants
    write_atomically(public, _public(key.public_key()))
    return private, public


def rotate(private: Path) -> tuple[Path, Path]:
    """Create a node's next key beside the current one: NAME.next.key, and NAME.next.pub for the coordinator, signed by the current key."""
    present, (successor, public) = read_private_key(private), successors(private)
    if successor.exists():
        raise InputError(f"{successor} is there already: give {public} to the coordinator, or remove both to make another")
    key = _new_key()
    pem = _public(key.public_key())
    signature = base64.encodebytes(signer(present)(_meant(fingerprint(public_key(present)), pem)))
    _write_secret(successor, key, serialization.PrivateFormat.OpenSSH)
    write_atomically(public, pem + _SIGNED_BEGIN + signature + _SIGNED_END)
    return successor, public


def successors(private: Path) -> tuple[Path, Path]:
    """Where the key that will follow NAME.key lies, with its public part."""
    return private.with_suffix(".next.key"), private.with_suffix(".next.pub")


def adopt(private: Path) -> None:
    """The key that followed NAME.key takes its name; of the old one only the public part is kept, by which audit logs are checked."""
    successor, _ = successors(private)
    before, after = (public_key(read_private_key(file)) for file in (private, successor))
    write_atomically(private.with_suffix(f".{fingerprint(before)}.pub"), before)
    write_atomically(private.with_suffix(".pub"), after)
    os.replace(successor, private)
    successors(private)[1].unlink(missing_ok=True)


def read_successor(file: Path) -> tuple[bytes, bytes | None]:
    """Return a public key (PEM) and its signature by the key that it replaces, if there is one."""
    try:
        text, _, signed = file.read_bytes().partition(_SIGNED_BEGIN)
        signature = base64.b64decode(b"".join(signed.removesuffix(_SIGNED_END).split()), validate=True) if signed else None
        return _public_key(text), signature
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"cannot read the public key {file}: {getattr(error, 'strerror', None) or error}") from error


def _meant(before: str, pem: bytes) -> bytes:
    """What a signature under a successor's key is under."""
    return f"fedrts key rotation: {before} is followed by {fingerprint(pem)}".encode()


def _kept_aside(file: Path, folder: Path, name: str) -> None:
    """Keep what is about to be replaced, under the fingerprint of its key."""
    try:
        folder.mkdir(exist_ok=True)
        write_atomically(folder / f"{file.stem}-{name}{file.suffix}", file.read_bytes())
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}") from error


def matching(certificate: Path, key: Path) -> str:
    """Why a certificate and a private key cannot be used together; empty where they can."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        return f"{certificate} and {key} do not go together ({getattr(error, 'reason', None) or error.__class__.__name__})"
    return ""


def fingerprint(public_key: bytes) -> str:
    """Return a short name for a public key (PEM)."""
    return hashlib.sha256(public_key.strip()).hexdigest()[:16]


def checked_name(name: str) -> str:
    """Check that a name is fit for a file."""
    if not _NAME.fullmatch(name):
        raise InputError(f"'{name}' is no name for a node: use letters, digits, '.', '_' and '-'")
    return name


def read_public_key(file: Path) -> bytes:
    """Read and check a node's public key (PEM)."""
    try:
        return _public_key(file.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"cannot read the public key {file}: {getattr(error, 'strerror', None) or error}") from error


def read_verifier(file: Path) -> bytes:
    """Read the public key (PEM) that checks signatures, from a file NAME.pub or a certificate such as server.pem."""
    try:
        data = file.read_bytes()
        if b"BEGIN CERTIFICATE" in data:
            key = x509.load_pem_x509_certificate(data).public_key()
            return _public_key(key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the key {file}: {getattr(error, 'strerror', None) or error}") from error
    return read_public_key(file)


def seal_of(key: ec.EllipticCurvePrivateKey) -> Seal:
    """Return the seal with which the holder of a private key signs an audit log."""
    return Seal(fingerprint(public_key(key)), signer(key))


def read_peers(folder: Path) -> list[bytes]:
    """Read the public keys (PEM) of a folder's files NAME.pub."""
    found = [read_public_key(file) for file in sorted(folder.glob("*.pub"))]
    if not found:
        raise InputError(f"--peers {folder}: there is no NAME.pub in it; the peers' owners give you theirs")
    return found


@functools.lru_cache(4096)  # a server looks at all of them every second
def _public_key(pem: bytes) -> bytes:
    key = serialization.load_pem_public_key(pem)
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1 | ec.SECP384R1 | ec.SECP521R1):
        raise ValueError("it is none of the curves P-256, P-384 or P-521; `fedrts keys issue` makes one")
    return _public(key)


def trusting(authority: bytes | None) -> ssl.SSLContext:
    """Return a TLS 1.3 context for servers certified by this certificate (PEM); None: by a usual authority."""
    if authority is None:
        import httpx

        context = httpx.create_ssl_context()
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=authority.decode("ascii"))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def outdated(certificate: x509.Certificate) -> str:
    """Return why a certificate is not valid now, such as `expired on …`; empty if it is valid."""
    now = datetime.datetime.now(datetime.UTC)
    if now > certificate.not_valid_after_utc:
        return f"expired on {date(certificate.not_valid_after_utc)} (this machine's clock says {date(now)})"
    if now < certificate.not_valid_before_utc:
        return f"is not valid before {date(certificate.not_valid_before_utc)} (this machine's clock says {date(now)}: set it)"
    return ""


def _check_dates(file: Path, remedy: str) -> None:
    """Raise for a certificate that is not valid now; warn of one that soon will not be."""
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the certificate {file}: {getattr(error, 'strerror', None) or error}") from error
    if fault := outdated(certificate):
        raise InputError(f"the certificate {file} {fault}: {remedy}")
    if datetime.datetime.now(datetime.UTC) > certificate.not_valid_after_utc - SOON:
        note(f"the certificate {file} expires on {date(certificate.not_valid_after_utc)}, and nodes refuse it then: {remedy}")


def date(moment: datetime.datetime) -> str:
    """Format a time for people, such as `2026-11-19 14:20 UTC`."""
    return f"{moment.astimezone(datetime.UTC):%Y-%m-%d %H:%M} UTC"


def _hosts(file: Path) -> list[str]:
    """Return the names and addresses of a server's certificate, without those of the machine itself."""
    try:
        names = x509.load_pem_x509_certificate(file.read_bytes()).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return []
    found = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    return [host for host in found if host not in _ALWAYS]


Key = ec.EllipticCurvePrivateKey


def read_private_key(file: Path) -> Key:
    """Read a node's private key, in OpenSSH's format or PKCS#8."""
    try:
        data = file.read_bytes()
        key = serialization.load_ssh_private_key(data, None) if b"OPENSSH" in data[:64] else serialization.load_pem_private_key(data, None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(f"cannot read the key {file}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(key, Key):
        raise InputError(f"{file} is no elliptic-curve private key: `fedrts keys issue` makes one")
    return key


def _loaded(pem: bytes) -> Key:
    key = serialization.load_pem_private_key(pem, None)
    if not isinstance(key, Key):
        raise ValueError("its key is of another kind")
    return key


def _new_key() -> Key:
    return ec.generate_private_key(ec.SECP384R1())


def _public(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _authority() -> tuple[Key, x509.Certificate]:
    """Create key and certificate of a new authority."""
    key, name = _new_key(), _called("fedrts federation")
    builder = _builder(name, name, key.public_key(), key.public_key(), _AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
    return key, builder.sign(key, hashes.SHA384())


def _server_pair(key: Key, issuer: x509.Certificate, hosts: Sequence[str]) -> tuple[Key, x509.Certificate]:
    """Create a server key and its certificate by the authority with this `key`, also valid for this machine."""
    own = _new_key()
    return own, _server_certificate(own, key, issuer, [*dict.fromkeys([*hosts, *_ALWAYS])])


def _server_certificate(own: Key, key: Key, issuer: x509.Certificate, hosts: Sequence[str]) -> x509.Certificate:
    names = [_named(host) for host in hosts]
    builder = _builder(_called(hosts[0]), issuer.subject, own.public_key(), key.public_key(), _SERVER_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(digital_signature=True), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(key, hashes.SHA384())


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, issuer_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(minutes=5))
    builder = builder.not_valid_after(now + datetime.timedelta(days=days))
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    return builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)


def _called(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _usage(**flags: bool) -> x509.KeyUsage:
    names = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "key_cert_sign")
    return x509.KeyUsage(**{**dict.fromkeys((*names, "crl_sign", "encipher_only", "decipher_only"), False), **flags})


def _named(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if len(host) > 253 or not _HOST.fullmatch(host):
            raise InputError(f"--host '{host}' is neither an address nor a name: names have letters, digits, '-' and '.'") from None
        return x509.DNSName(host)


def _write_secret(path: Path, key: Key, form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8) -> None:
    """Write a key to a file that only its owner can ever read, completely or not at all."""
    data = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            os.chmod(temporary, 0o600)
            file.write(data)
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error

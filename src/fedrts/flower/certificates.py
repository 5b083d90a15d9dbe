"""The certificates of a process's own end: noticed when they are renewed, and warned of before they expire.

certificates = Certificates(say, witness, "renew it with …")
certificates.show("server", certificate)      # now, after a change, and again every day
"""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509

from fedrts.audit.witness import Witness
from fedrts.errors import InputError
from fedrts.flower import Say
from fedrts.flower.keys import SOON, Authority, date, matching, read_private_key, seal_of
from fedrts.logs import info, warning

EXPIRES = "EXPIRES"
"""Lines that begin so warn of a certificate that will not be valid much longer."""
_AGAIN = 24 * 3600.0
"""Seconds after which a warning is repeated."""


@dataclass
class Certificates:
    """The certificates that this process knows, by name."""

    say: Say
    witness: Witness
    remedies: dict[str, str] = field(default_factory=dict)
    """By name, how each is renewed."""
    _told: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By name, the number of the certificate that was last shown, and when."""

    def show(self, name: str, certificate: x509.Certificate) -> None:
        """Put a certificate's end on record, and warn if that is soon; of the same one again after a day."""
        serial, now = certificate.serial_number, time.monotonic()
        known = self._told.get(name)
        if known is not None and known[0] == serial and now - known[1] < _AGAIN:
            return
        self._told[name] = serial, now
        ends = certificate.not_valid_after_utc
        if known is None or known[0] != serial:
            self.witness("certificate", name=name, serial=f"{serial:x}", expires=ends.isoformat())
        left = ends - datetime.datetime.now(datetime.UTC)
        if left < SOON:
            when = f"expires on {date(ends)}, in {left.days} days" if left.total_seconds() > 0 else f"expired on {date(ends)}"
            words = f"{EXPIRES}: the certificate of the {name} {when}: {self.remedies.get(name, 'renew it')}"
            self.say(warning("expires", words, name=name, expires=ends.isoformat()))


class Followed:
    """The certificates of an authority's folder while a server runs: one that is renewed is taken without a restart."""

    def __init__(self, authority: Authority, say: Say, witness: Witness) -> None:
        self.authority, self.say, self.witness = authority, say, witness
        renew = f"`{authority.renewal}` renews it, and the running server takes it"
        anew = "make a new authority in time, and give its ca.pem to all nodes"
        self.certificates = Certificates(say, witness, {"server": renew, "authority": anew})
        self._seen = self._stamps()
        self._fault = ""
        self._serial: int | None = None

    def look(self) -> None:
        """Notice a new certificate; the SuperLink notices it by itself."""
        try:
            authority, server = (
                x509.load_pem_x509_certificate(file.read_bytes())
                for file in (self.authority.certificate, self.authority.server_certificate)
            )
        except (OSError, ValueError):  # just being written, or damaged: the one in use stays
            return
        self.certificates.show("authority", authority)
        if self._serial is None:
            self._serial = server.serial_number
        if server.serial_number == self._serial:
            self.certificates.show("server", server)
        elif self._stamps() != self._seen:
            self._take(server)

    def _take(self, server: x509.Certificate) -> None:
        if fault := matching(self.authority.server_certificate, self.authority.server_key):
            if fault != self._fault:
                self._fault = fault
                self.say(warning("skipped", f"skipped: the new certificate of the server: {fault}"))
            return
        self._seen, self._serial, self._fault = self._stamps(), server.serial_number, ""
        self.say(info("renewed", f"the server's certificate was renewed: it is valid until {date(server.not_valid_after_utc)}"))
        self.certificates.show("server", server)
        try:
            self.witness.succeeded(seal_of(read_private_key(self.authority.server_key)))
        except InputError as error:
            self.say(warning("skipped", f"skipped: the new key of the server: {error}"))

    def _stamps(self) -> tuple[tuple[int, int], ...]:
        return tuple(stamp(file) for file in (self.authority.server_certificate, self.authority.server_key))


def stamp(file: Path) -> tuple[int, int]:
    """Return an identity of a file's version; (0, 0) if there is no file."""
    try:
        found = file.stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns

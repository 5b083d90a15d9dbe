"""What an audit log costs: a line, a megabyte of messages, a signed head; and its share of a small federation's round.

    python benchmarks/audit.py [--round-seconds 1.0] [--clients 10]

A round of n clients on n nodes writes 2n + 1 lines on the server, and hashes 2n messages; every five seconds a head is signed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from fedrts.audit.lines import Seal
from fedrts.audit.log import SIGNED, AuditLog
from fedrts.audit.witness import entries
from fedrts.secure.identity import signer

_MESSAGE = 105_000
"""Bytes of an encoded message of the default experiment at density 0.3."""


def seconds(work: Callable[[], object], times: int) -> float:
    """Return the mean seconds of one call."""
    started = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - started) / times


def main() -> None:
    """Measure, and print."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--round-seconds", type=float, default=1.0)
    asked.add_argument("--clients", type=int, default=10)
    given = asked.parse_args()
    message, megabyte = bytes(_MESSAGE), bytes(10**6)
    with tempfile.TemporaryDirectory() as folder:
        log = AuditLog(Path(folder) / "audit.jsonl", "server", Seal("key", signer(ec.generate_private_key(ec.SECP384R1()))))
        log("warm")
        line = seconds(lambda: log("received", round=3, exchange=0, key="0123456789abcdef", clients={"0": [1, "f" * 64]}), 5000)
        hashed = seconds(lambda: entries({0: megabyte}), 200)
        sealed = seconds(lambda: log.seal(always=True), 100)
        both = seconds(lambda: log("received", round=3, exchange=0, key="0123456789abcdef", clients=entries({0: message})), 2000)
        log.close()
    whole = 2 * given.clients * both + line + sealed * given.round_seconds / SIGNED
    print(f"a line {1e6 * line:.0f} µs; SHA-256 of a megabyte {1e3 * hashed:.2f} ms; a signed head {1e3 * sealed:.1f} ms")
    print(f"a round of {given.clients} clients, messages of {_MESSAGE:,} bytes: {1e3 * whole:.1f} ms,", end=" ")
    print(f"{whole / given.round_seconds:.2%} of {given.round_seconds:g} s")


if __name__ == "__main__":
    main()

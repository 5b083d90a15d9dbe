"""`fedrts audit`: check that a log is intact, and that a node's log and its server's agree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedrts.cli.app import app
from fedrts.errors import InputError

if TYPE_CHECKING:
    from fedrts.audit.lines import Head

audit = typer.Typer(help="Audit logs of servers and nodes.", no_args_is_help=True)
app.add_typer(audit, name="audit")

Keys = Annotated[
    list[Path] | None,
    typer.Option("--key", metavar="PUB", help="Public key that must have signed: NAME.pub of a node, server.pem of a server; repeatable."),
]
_SHOWN = 10
"""Messages under way that are named one by one."""


@audit.command()
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The audit.jsonl of a run folder or of a site's folder.")],
    key: Keys = None,
    head: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Earlier copy of audit.head; the log must still contain it; repeatable.")
    ] = None,
) -> None:
    """Check that no line of a log was changed, removed, inserted or reordered. Exit code 1 names the first wrong line."""
    from fedrts.audit.check import checked

    found = checked(_there(file), _keys(key), [_head(path) for path in head or []])
    signed = sum(bool(head.signature) for head in found.heads)
    by = "" if key is None else f" by {', '.join(dict.fromkeys(head.key for head in found.heads))}"
    print(f"{file}: {found.lines:,} lines hang together; {signed} of {len(found.heads)} heads are signed{by}")
    print(f"last line {found.lines}, hash {found.hash}; {found.unsigned:,} lines after the last signed head")
    if found.torn:
        print(f"note: a last line of {found.torn} bytes was not written to its end; the next start cuts it off, and says so")
    if key is None and signed:
        print("note: whose signatures these are was not checked: give --key PUB")


@audit.command()
def compare(
    node_log: Annotated[Path, typer.Argument(metavar="NODE_LOG", help="The audit.jsonl of the site's folder.")],
    server_log: Annotated[Path, typer.Argument(metavar="SERVER_LOG", help="The audit.jsonl of the run folder.")],
    key: Keys = None,
) -> None:
    """Check that a node and its server recorded the same messages. Exit code 1 names the first line that differs."""
    from fedrts.audit.check import compared

    found = compared(_there(node_log), _there(server_log), _keys(key))
    print(f"{found.agreed:,} messages have the same size and digest in both logs; {found.heads:,} heads given to each other fit")
    for words in found.under_way[:_SHOWN]:
        print(f"sent, and never received: {words}")
    if len(found.under_way) > _SHOWN:
        print(f"and {len(found.under_way) - _SHOWN:,} more were sent and never received")


def _there(file: Path) -> Path:
    if not file.is_file():
        raise InputError(f"there is no file {file}: give the audit.jsonl of a run folder, or of a site's folder")
    return file


def _keys(files: Sequence[Path] | None) -> dict[str, bytes] | None:
    """Read public keys, by fingerprint."""
    if not files:
        return None
    from fedrts.errors import optional

    optional("cryptography", "flower")
    from fedrts.flower.keys import fingerprint, read_verifier

    keys = [read_verifier(file) for file in files]
    return {fingerprint(key): key for key in keys}


def _head(file: Path) -> Head:
    from fedrts.audit.lines import Head

    found = Head.parsed(_there(file).read_bytes())
    if found is None:
        raise InputError(f"{file} is no head of an audit log: give a copy of audit.head")
    return found

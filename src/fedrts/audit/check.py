"""Checking audit logs: whether one is intact, and whether two logs of the same messages agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedrts.audit.lines import FIRST, HEAD, SUCCEEDED, Head, head_file, parsed
from fedrts.errors import InputError
from fedrts.files import require_plain

LONGEST = 2**24
"""Bytes of a line at most."""

LoggedLine = dict[str, Any]
LoggedMessage = tuple[Any, ...]
"""To which round, exchange, step of a sum and client it belongs; how long it is, and its digest."""


class AuditError(InputError):
    """A log differs from what was written; the message names the first wrong line."""

    code = 1

    def __init__(self, file: Path, line: int, fault: str) -> None:
        super().__init__(f"{file}, line {line}: {fault}")
        self.line = line


@dataclass
class Checked:
    """The facts about a log whose hash chain is intact."""

    file: Path
    lines: int = 0
    hash: str = FIRST
    """Hash of the last line."""
    heads: list[Head] = field(default_factory=list)
    torn: int = 0
    """Bytes of a last line that was not written to its end."""
    whole: int = 0
    """Bytes before them."""

    @property
    def unsigned(self) -> int:
        """The number of lines after the last signed head, not counting that head."""
        signed = [head for head in self.heads if head.signature]
        return max(0, self.lines - signed[-1].line - 1) if signed else self.lines


def raw_lines(file: Path) -> Iterator[bytes]:
    """Yield lines with their line ends; the last may lack one."""
    require_plain(file)
    try:
        with open(file, "rb") as log:
            while text := log.readline(LONGEST):
                yield text
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error


def chained(file: Path, found: Checked) -> Iterator[LoggedLine]:
    """Yield the lines of a log, each checked, and keep `found` up to date. An `AuditError` names the first wrong line."""
    for text in raw_lines(file):
        number = found.lines + 1
        if not text.endswith(b"\n"):
            found.torn = len(text)
            return
        content = parsed(text[:-1])
        if content is None:
            raise AuditError(file, number, "it was changed: its hash is not that of what it says")
        if content["line"] != number:
            raise AuditError(file, number, _displaced(number, content["line"]))
        if content["before"] != found.hash:
            at = max(1, number - 1)
            raise AuditError(file, at, f"it was changed or replaced: line {number} was written after another one")
        if content["event"] == HEAD:
            head = Head.parsed(content.get("of"))
            if head is None or (head.line, head.hash) != (found.lines, found.hash):
                raise AuditError(file, number, "it signs something else than the lines before it")
            found.heads.append(head)
        found.lines, found.hash, found.whole = number, content["hash"], found.whole + len(text)
        yield content


def _displaced(here: int, said: int) -> str:
    if said > here:
        gone = f"line {here} was" if said == here + 1 else f"lines {here} to {said - 1} were"
        return f"it was written as line {said}: {gone} removed, or lines are in another order"
    return f"it was written as line {said}: lines were inserted, or are in another order"


def checked(file: Path, keys: Mapping[str, bytes] | None = None, given: Sequence[Head] = ()) -> Checked:
    """Check a log; an `AuditError` names the line where it is damaged.

    `keys`: by name, the public keys (PEM) of which one must have signed every head; None: signatures are not looked at.
    `given`: heads that were given away, which must still be there.
    """
    found, hashes = Checked(file), {0: FIRST}
    known = [*given, *_beside(file)]
    wanted = {head.line for head in known}
    for content in chained(file, found):
        if content["line"] in wanted:
            hashes[content["line"]] = content["hash"]
        if content["event"] == HEAD and keys is not None:
            _check_signature(file, content["line"], found.heads[-1], keys)
    for head in known:
        if keys is not None and head.signature:
            _check_signature(file, head.line, head, keys)
        if head.line > found.lines:
            raise AuditError(
                file, found.lines + 1, f"it is missing, and so are all up to line {head.line}, which was signed for: the end was cut off"
            )
        if hashes[head.line] != head.hash:
            raise AuditError(file, head.line, "it is not the line that was signed for: the log was written anew up to here")
        if head.line == found.lines:  # a head is in the log before it is anywhere else
            raise AuditError(file, found.lines + 1, "it is missing: it was the head that signed all lines before it")
    if keys is not None and found.lines and not any(head.signature for head in found.heads):
        raise AuditError(file, found.lines, "neither it nor any line before it is a signed head: nobody vouches for this log")
    return found


def _beside(file: Path) -> list[Head]:
    """Read the last head, which is kept in its own file."""
    beside = head_file(file)
    if not beside.exists():
        return []
    require_plain(beside)
    head = Head.parsed(beside.read_bytes())
    if head is None:
        raise InputError(f"{beside} is damaged: restore it from a backup, or remove it (then nobody can tell whether the end was cut off)")
    return [head]


def _check_signature(file: Path, line: int, head: Head, keys: Mapping[str, bytes]) -> None:
    if not head.signature:
        raise AuditError(file, line, "this head is not signed")
    if head.key not in keys:
        raise AuditError(file, line, f"this head is signed with the key {head.key}, which --key does not name")
    if not head.is_signed(keys[head.key]):
        raise AuditError(file, line, f"the signature of this head is not by the key {head.key}: lines before it were written anew")


@dataclass
class Agreement:
    """What two logs say about the messages between them."""

    agreed: int = 0
    """Messages that both know, with the same bytes."""
    under_way: list[str] = field(default_factory=list)
    """Messages that only their sender knows: they were lost, or came too late."""
    heads: int = 0
    """Heads of the one that the other was given, and that fit."""


@dataclass
class _Side:
    """A log restricted to one node's messages."""

    file: Path
    hashes: dict[int, str] = field(default_factory=dict)
    sent: dict[LoggedMessage, int] = field(default_factory=dict)
    received: dict[LoggedMessage, int] = field(default_factory=dict)
    """Each with its line, of several that are alike the last one's."""
    given: list[tuple[int, Head]] = field(default_factory=list)
    """The other side's heads, and on which line each is."""
    keys: list[str] = field(default_factory=list)
    """The keys that have signed a node's log, one after the other; empty for a server."""


def compared(node: Path, server: Path, keys: Mapping[str, bytes] | None = None) -> Agreement:
    """Compare a node's log with its server's; an `AuditError` names the first line that the other side contradicts."""
    for file in (node, server):
        checked(file, keys)
    here = _read(node, None, ("sent", "told"), ("asked", "hello"))
    if not here.keys:
        raise InputError(f"{node} is no log of a node with a key: give the node's log first, then the server's")
    there = _read(server, here.keys, ("asked", "hello"), ("received", "told"))
    if not there.hashes or there.keys:
        raise InputError(f"{server} is no log of a server: give the node's log first, then the server's")
    result = Agreement()
    for receiver, sender in ((there, here), (here, there)):
        for message, line in receiver.received.items():
            if message not in sender.sent:
                raise AuditError(receiver.file, line, f"{_named(message)} came here, and {sender.file} does not say that it was sent so")
            result.agreed += 1
        result.under_way += [
            f"{_named(message)}: {receiver.file} does not have it" for message in sender.sent if message not in receiver.received
        ]
        for line, head in receiver.given:
            if sender.hashes.get(head.line) != head.hash:
                raise AuditError(receiver.file, line, f"here {sender.file} gave its line {head.line} as another one than it has now")
            result.heads += 1
    return result


def _read(file: Path, node: Sequence[str] | None, sent: Sequence[str], received: Sequence[str]) -> _Side:
    """Read a log's messages to and from the node with these keys; None: the log is the node's own."""
    side, found = _Side(file), Checked(file)
    for content in chained(file, found):
        side.hashes[content["line"]] = content["hash"]
        if content["event"] in ("began", SUCCEEDED) and content.get("key"):
            own = content.get("role") == "node" or bool(side.keys)
            side.keys += [content["key"]] if own else []
        if node is not None and content.get("key") not in node:
            continue
        for message in _messages(content):
            if content["event"] in sent:
                side.sent[message] = content["line"]
            elif content["event"] in received:
                side.received[message] = content["line"]
        if content["event"] == "given" and (head := Head.parsed(content.get("head"))) is not None:
            side.given.append((content["line"], head))
    return side


def _messages(content: LoggedLine) -> Iterator[LoggedMessage]:
    """Return the messages of a line: where each belongs, and its size and digest."""
    for client, entry in content.get("clients", {}).items() if isinstance(content.get("clients"), dict) else ():
        yield content.get("round"), content.get("exchange"), content.get("step", ""), client, *entry
    if "facts" in content:
        yield None, None, content["event"], "", *content["facts"]


def _named(message: LoggedMessage) -> str:
    round, exchange, step, client, size, digest = message
    what = f"client {client}'s message of round {round}, exchange {exchange}" if round is not None else "an introduction"
    return f"{what}{f' ({step})' if step and round is not None else ''} with {size:,} bytes and digest {digest[:16]}…"

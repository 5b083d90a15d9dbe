"""HTTP downloads: complete or not at all, resumed where the last try stopped."""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from fedrts.errors import InputError

ReportBytes = Callable[[str, int, int | None], None]
"""(what, bytes done, bytes in all if known): told of progress."""

_CHUNK = 1 << 20
_TRIES = 3
_TIMEOUT = 30.0


def download(url: str, target: Path, checksum: str | None, report: ReportBytes) -> None:
    """Download `url` to the file `target`; partial bytes stay in `target`.part until all are there and their checksum is right."""
    part = target.with_name(target.name + ".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(_TRIES):
        try:
            ended, total = _transfer(url, part, report)
        except urllib.error.HTTPError as error:
            raise InputError(f"{url} answered {error.code} {error.reason}: try again later, or get it elsewhere and use --from") from error
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            raise InputError(
                f"cannot download {url}: {getattr(error, 'reason', None) or error}; get {target.name} elsewhere and use --from PATH, "
                "or run it again, which goes on where it broke off"
            ) from error
        size = part.stat().st_size
        if size == total or (ended and total is None):
            break
        if (total is not None and size > total) or attempt == _TRIES - 1:
            wanted = "" if total is None else f" of {total:,}"
            raise InputError(f"{url} broke off at {size:,}{wanted} bytes: run it again, which goes on from there")
    try:
        verify(part, checksum, url)
    except InputError:
        part.unlink()  # going on from it would never come right
        raise
    os.replace(part, target)


def verify(file: Path, checksum: str | None, origin: str) -> None:
    """Refuse a file that differs from the one its publisher made."""
    if checksum is None:
        return
    kind, _, wanted = checksum.partition(":")
    with open(file, "rb") as opened:
        found = hashlib.file_digest(opened, kind).hexdigest()
    if found != wanted:
        raise InputError(f"{origin} is damaged or another file: its {kind} is {found}, published is {wanted}; get it again")


def _transfer(url: str, part: Path, report: ReportBytes) -> tuple[bool, int | None]:
    """Append the missing bytes of `url` to `part`; return whether the reply ended properly, and the expected size if known."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "fedrts"} | ({"Range": f"bytes={have}-"} if have else {}))
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # nothing lies beyond `have`: all is there, or more than all
            raise
        return True, _total(error.headers.get("Content-Range")) or have
    with response, open(part, "ab" if response.status == 206 else "wb") as file:
        if response.status == 206:
            total = _total(response.headers.get("Content-Range"))
        else:  # the whole from the start, whatever was asked for
            have, total = 0, int(response.headers["Content-Length"]) if "Content-Length" in response.headers else None
        ended = True
        while ended:
            try:
                block = response.read(_CHUNK)
            except http.client.IncompleteRead as error:
                block, ended = error.partial, False
            if not block:
                break
            file.write(block)
            have += len(block)
            report(part.stem, have, total)
        return ended, total


def _total(content_range: str | None) -> int | None:
    found = re.search(r"/(\d+)$", content_range or "")
    return int(found.group(1)) if found else None

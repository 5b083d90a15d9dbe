"""`fedrts watch`."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
from typing import Annotated

import typer

from fedrts.cli.app import RunDir, app
from fedrts.errors import InputError, note

_TOKEN = "FEDRTS_WATCH_TOKEN"
_SHORTEST = 16


@app.command()
def watch(
    run_dir: RunDir,
    address: Annotated[
        str,
        typer.Option(
            metavar="[HOST:]PORT", help="Address to serve; a port alone serves this machine only. Any other address needs a token."
        ),
    ] = "9465",
) -> None:
    """Serve the report of a run as a live page: curves, topology, who is connected, who was rejected and why. Ctrl-C ends it.

    An address that others can reach needs a token: FEDRTS_WATCH_TOKEN, or a new one that is printed.
    """
    from fedrts.runs.folder import RunFolder
    from fedrts.serving.http import Endpoint, serving
    from fedrts.watch.page import LivePage

    place = Endpoint.of(address, "--address")
    RunFolder(run_dir).experiment_file()
    given = os.environ.get(_TOKEN) or None
    if given is not None and len(given) < _SHORTEST:
        raise InputError(f"{_TOKEN} has {len(given)} characters: give {_SHORTEST} or more")
    token = given if given or place.is_local else secrets.token_urlsafe(24)
    stopped = threading.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: stopped.set())
    with serving(place, LivePage(run_dir), token) as at:
        shown = f"?token={token}" if token and token != given else f"?token=${_TOKEN}" if token else ""
        print(f"watching {run_dir} at {at.url}{shown}", flush=True)
        if not place.is_local:
            note("the page and its token travel unencrypted: put a proxy with TLS in front, or use an SSH tunnel to a local port")
        stopped.wait()
    sys.exit(130)

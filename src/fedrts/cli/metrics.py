"""`--metrics`, of every command that plays rounds or takes part in them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from fedrts.errors import note

if TYPE_CHECKING:
    from fedrts.meters.board import Board

MetricsAt = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="[HOST:]PORT",
        help="Show metrics to Prometheus there, with /healthz and /readyz; a port alone: to this machine only.",
    ),
]


@contextlib.contextmanager
def metering(address: str | None, role: str) -> Iterator[list[Board]]:
    """The board of this process, which can be read while the block runs; none where nobody asked for it."""
    if address is None:
        yield []
        return
    from fedrts.meters.board import Board
    from fedrts.serving.http import Endpoint

    board, place = Board(role), Endpoint.of(address, "--metrics")
    if not place.is_local:
        note(f"--metrics {address}: whoever reaches this address can read the metrics")
    with board.shown(place) as at:
        print(f"metrics at {at.url}metrics", file=sys.stderr, flush=True)
        yield [board]

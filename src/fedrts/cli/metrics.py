"""The flag `--metrics`, for every command that plays rounds or takes part in them."""

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
        help="Serve Prometheus metrics at this address, with /healthz and /readyz; a port alone serves this machine only.",
    ),
]


@contextlib.contextmanager
def metering(address: str | None, role: str) -> Iterator[list[Board]]:
    """Serve this process's metrics while the block runs; yield no board if no address is given."""
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

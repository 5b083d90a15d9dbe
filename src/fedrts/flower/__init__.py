"""Real federations over Flower, with the same rounds, methods, guard and client program; only our encoded bytes travel.

A server (`engine.py`, `fleet.py`, `superlink.py`) asks nodes (`node.py`, `site.py`) through Flower's SuperLink. Neither side sends code.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from fedrts.errors import note, optional

HELLO, WELCOME, WORK, FAREWELL = "query.hello", "query.welcome", "train.work", "query.farewell"
"""Kinds of message: who are you, you take part, do this order, and go."""
PROTOCOL = 2
"""The version of what server and nodes say to each other; both sides name theirs when they meet. Before 2 none was named."""
FLOWER = ("1.41", "1.42")
"""The versions of Flower that this has been tested with; what we use of its inside is in `inside.py`."""
STRANGER = "stranger"
"""The fact by which a node says that it was started anew, and has not been introduced to the experiment."""

Say = Callable[[str], None]
"""Tells a line to the person at this end."""


def prepare(home: Path | None = None) -> None:
    """Import Flower, silence its usage reports, and keep what it writes in `home`."""
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    os.environ.setdefault("FLWR_LOG_LEVEL", "WARNING")
    if home is not None:
        os.environ["FLWR_HOME"] = str(home)
    optional("cryptography", "flower")
    optional("flwr", "flower")
    if words := untested():
        note(words)


def untested() -> str:
    """Return a note about a Flower version that is untested with this package; empty for tested ones."""
    version = metadata.version("flwr")
    if ".".join(version.split(".")[:2]) in FLOWER:
        return ""
    after = f"{FLOWER[-1].partition('.')[0]}.{int(FLOWER[-1].partition('.')[2]) + 1}"
    return f"Flower {version} is none of the versions tested, {' and '.join(FLOWER)}: pip install 'flwr>={FLOWER[0]},<{after}'"

"""Real federations over Flower: the same rounds, methods, guard and client program; only our encoded bytes travel.

A server (`engine.py`, `fleet.py`, `superlink.py`) asks nodes (`node.py`, `site.py`) through Flower's SuperLink. Neither side sends code.
"""

from __future__ import annotations

import os
from pathlib import Path

from fedrts.errors import optional

HELLO, WORK = "query.hello", "train.work"
"""The two kinds of message: who are you, and do this order."""
STRANGER = "stranger"
"""The fact by which a node says that it was started anew, and has not been introduced to the experiment."""


def prepare(home: Path | None = None) -> None:
    """Flower is there, says nothing to anybody else, and keeps what it writes in `home`."""
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    os.environ.setdefault("FLWR_LOG_LEVEL", "WARNING")
    if home is not None:
        os.environ["FLWR_HOME"] = str(home)
    optional("cryptography", "flower")
    optional("flwr", "flower")

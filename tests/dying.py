"""A command of ours that kills itself where a test wants it: `python dying.py "3:mask,7:reveal" client …`.

Of a client: in round 3 when it is asked for masked words, and so on. Of a server: `5:kept` after a sum is on disk, `5:begun` when
enough have signed and nobody has revealed, `5:shares` when two have revealed. With `SIGNAL=SIGTERM` it is asked to stop instead.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from fedrts.cli import main
from fedrts.flower.openings import Openings
from fedrts.flower.site import Site
from fedrts.secure.opener import Opener


def once(name: str) -> None:
    """Die, where this death was wanted and has not been died before."""
    if name in wanted and not (marker := Path(os.environ["DEATHS"], f"{os.environ['WHO']}-{name.replace(':', '-')}")).exists():
        marker.touch()
        os.kill(os.getpid(), signal.Signals[os.environ.get("SIGNAL", "SIGKILL")])


def before(kind: type, method: str, name: Any) -> None:
    plain = getattr(kind, method)

    def dying(self: Any, *arguments: Any) -> Any:
        once(name(self, *arguments))
        return plain(self, *arguments)

    setattr(kind, method, dying)


wanted = sys.argv.pop(1).split(",")
before(Site, "_in_secret", lambda self, confidant, client, data, told: f"{told.get('round')}:{told.get('sum')}")
before(Openings, "begin", lambda self, round, data, purpose: f"{round}:begun")
before(Opener, "revealed", lambda self, client, data: f"{self.call.round}:shares" if len(self._revealed) == 2 else "")
kept = Openings.keep


def keep(self: Openings, found: Any) -> None:
    kept(self, found)
    once(f"{found.round}:kept")


Openings.keep = keep  # type: ignore
main()

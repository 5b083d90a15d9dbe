"""The metrics of one process: updated by events, like every witness, and read by Prometheus."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, cast

import fedrts
from fedrts.audit.log import CONFIGURED
from fedrts.audit.witness import Witness
from fedrts.errors import optional, printable
from fedrts.meters.names import METERS
from fedrts.server import phases
from fedrts.server.collect import EXCUSED, LATE, LATE_AGAIN
from fedrts.serving.http import Answer, Endpoint, Request, serving

_REASONS = 50
"""Reasons that are told apart; further ones are `other`, so that no client's words fill anybody's memory."""
_LONGEST_REASON = 80


class Board(Witness):
    """All metrics, each by its name without `_total`."""

    def __init__(self, role: str) -> None:
        client = optional("prometheus_client", "metrics")
        self.role, self.registry = role, client.CollectorRegistry()
        client.disable_created_metrics()
        self._meters = {}
        for meter in METERS:
            kind, registry = (client.Counter, self.registry) if meter.counts else (client.Gauge, None)
            self._meters[meter.name] = kind(meter.name, meter.help, meter.labels, registry=registry)
        self._unset = {meter.name for meter in METERS if not meter.counts}
        """What has no value yet is not shown: 0 would be one."""
        client.ProcessCollector(registry=self.registry)
        self._reasons: set[str] = set()
        self._spent: dict[str, float] = {}
        self.ready = False
        self._set("info", 1, fedrts.__version__, role)
        self._set("started_timestamp_seconds", time.time())
        self._set_ready(False)

    @property
    def text(self) -> bytes:
        """Return the text that Prometheus reads."""
        return cast(bytes, optional("prometheus_client", "metrics").generate_latest(self.registry))

    def __call__(self, event: str, **facts: Any) -> None:
        if event in self._told:
            self._told[event](self, facts)
        if event not in ("asked", "sent", "received", "round", CONFIGURED):
            self._add("events", 1, event)

    def _add(self, name: str, amount: float, *labels: str) -> None:
        meter = self._meters[f"fedrts_{name}"]
        (meter.labels(*labels) if labels else meter).inc(amount)

    def _set(self, name: str, value: float, *labels: str) -> None:
        meter = self._meters[f"fedrts_{name}"]
        if f"fedrts_{name}" in self._unset:
            self._unset.discard(f"fedrts_{name}")
            self.registry.register(meter)
        (meter.labels(*labels) if labels else meter).set(value)

    def _set_ready(self, ready: bool) -> None:
        self.ready = ready
        self._set("ready", ready)

    # -- on a server, and in a run ------------------------------------------------------------------------------------

    def _configured(self, facts: dict[str, Any]) -> None:
        settings = facts["settings"]
        self._set("rounds_planned", settings["rounds"])
        self._set("clients_expected", settings["clients.total"])

    def _started(self, facts: dict[str, Any]) -> None:
        self._set("rounds_done", facts["round"])
        self._set("density", facts["density"])
        self._set_ready(True)

    def _round(self, facts: dict[str, Any]) -> None:
        self._set("rounds_done", facts["round"] + 1)
        self._add("rounds", 1)
        self._add("round_seconds", facts["seconds"])
        self._set("last_round_timestamp_seconds", time.time())
        self._set("density", facts["density"])
        self._set("links_changed_ratio", facts["links_changed"])
        self._add("upload_bytes", facts["upload_bytes"])
        self._add("download_bytes", facts["download_bytes"])
        for name, value in facts["metrics"].items():
            self._set("metric", value, name)
        self._add("clients_asked", len({*facts["clients"], *(entry["client"] for entry in facts["rejected"])}))
        self._add("clients_answered", len(facts["clients"]))
        for entry in facts["rejected"]:
            reason = str(entry["reason"])
            if reason in (LATE, LATE_AGAIN):
                self._add("clients_late", 1)
            elif reason in EXCUSED:
                self._add("clients_missing", 1, reason)
            else:
                self._add("clients_rejected", 1, self._kind(reason))
        if "epsilon" in facts:
            self._set("epsilon_spent", _bounded(facts["epsilon"]))

    def _kind(self, reason: str) -> str:
        """Return a reason without the parts that differ between replies."""
        text = printable(re.sub(r"-?\d[\d.,]*(e[-+]?\d+)?", "#", reason), _LONGEST_REASON)
        text = text.partition(": ")[0] if text.startswith("its node says") else text
        if text not in self._reasons and len(self._reasons) >= _REASONS:
            return "other"
        self._reasons.add(text)
        return text

    def _present(self, facts: dict[str, Any]) -> None:
        if "here" in facts:
            self._set("clients_connected", facts["here"])

    def _open(self, facts: dict[str, Any]) -> None:
        self._set_ready(True)

    def _stopped(self, facts: dict[str, Any]) -> None:
        self._set_ready(False)

    # -- on a node ----------------------------------------------------------------------------------------------------

    def _connected(self, facts: dict[str, Any]) -> None:
        self._present(facts)
        if self.role == "node":
            self._set_ready(True)

    def _disconnected(self, facts: dict[str, Any]) -> None:
        self._present(facts)
        if self.role == "node":
            self._set_ready(False)

    def _asked(self, facts: dict[str, Any]) -> None:
        if self.role == "node":
            self._add("download_bytes", _bytes(facts))

    def _sent(self, facts: dict[str, Any]) -> None:
        self._add("upload_bytes", _bytes(facts))
        self._add("orders", len(facts["clients"]), "answered")
        self._add("orders", len(facts["failed"]), "failed")
        self._add("work_seconds", facts["seconds"])
        self._set("last_round_timestamp_seconds", time.time())
        self._set("rounds_done", facts.get("round", -1) + 1)
        if "epsilon" in facts:
            self._spent |= {client: _bounded(value) for client, value in facts["epsilon"].items()}
            self._set("epsilon_spent", max(self._spent.values()))

    def _certificate(self, facts: dict[str, Any]) -> None:
        self._set("certificate_expiry_timestamp_seconds", datetime.fromisoformat(facts["expires"]).timestamp(), facts["name"])

    def limited(self, epsilon: float | None) -> None:
        """Set the ε limit of this site; None: no limit."""
        if epsilon is not None:
            self._set("epsilon_limit", epsilon)

    # -- where it can be read -----------------------------------------------------------------------------------------

    @contextmanager
    def shown(self, address: Endpoint) -> Iterator[Endpoint]:
        """Serve metrics and time the phases of rounds during the block."""
        with serving(address, self.answer) as at, phases.timed(lambda phase, seconds: self._add("phase_seconds", seconds, phase)):
            yield at

    def answer(self, request: Request) -> Answer:
        """Answer `/metrics`, `/healthz`, `/readyz`."""
        if request.path == "/metrics":
            return Answer(200, self.text, "text/plain; version=0.0.4; charset=utf-8")
        if request.path == "/healthz":
            return Answer(200, b"alive\n")
        if request.path == "/readyz":
            return Answer(200, b"ready\n") if self.ready else Answer(503, b"not ready\n")
        return Answer(404, b"there are /metrics, /healthz and /readyz\n")

    _told: dict[str, Callable[[Board, dict[str, Any]], None]] = {
        CONFIGURED: _configured,
        "started": _started,
        "round": _round,
        "connected": _connected,
        "disconnected": _disconnected,
        "farewell": _present,
        "open": _open,
        "stopped": _stopped,
        "asked": _asked,
        "sent": _sent,
        "certificate": _certificate,
    }


def _bytes(facts: dict[str, Any]) -> int:
    return sum(entry[0] for entry in facts["clients"].values())


def _bounded(epsilon: float | None) -> float:
    return math.inf if epsilon is None else epsilon

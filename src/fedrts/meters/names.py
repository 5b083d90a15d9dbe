"""Every exported metric, declared once: the dashboard and the alert rules in deploy/ name only these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Exported:
    """A metric: Prometheus appends `_total` to the name of a counter."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...] = ()

    @property
    def counts(self) -> bool:
        return self.kind == "counter"


METERS = [
    Exported("fedrts_info", "gauge", "1; the version, and whether this is a server, a node or a run.", ("version", "role")),
    Exported("fedrts_ready", "gauge", "1 where the server takes nodes, the node is connected, or the run plays rounds."),
    Exported("fedrts_started_timestamp_seconds", "gauge", "When this process began."),
    Exported("fedrts_rounds_planned", "gauge", "Rounds of the experiment."),
    Exported("fedrts_rounds_done", "gauge", "Rounds that are over, also those before a restart. On a node: of the last order."),
    Exported("fedrts_rounds", "counter", "Rounds that this process has played."),
    Exported("fedrts_round_seconds", "counter", "Seconds of these rounds."),
    Exported("fedrts_last_round_timestamp_seconds", "gauge", "When the last round ended, or on a node the last order was answered."),
    Exported("fedrts_phase_seconds", "counter", "Seconds of the server by phase of a round; clients: waiting for them.", ("phase",)),
    Exported("fedrts_upload_bytes", "counter", "Encoded messages from clients to the server."),
    Exported("fedrts_download_bytes", "counter", "Encoded messages from the server to clients."),
    Exported("fedrts_metric", "gauge", "Metrics of the global model, as last evaluated.", ("metric",)),
    Exported("fedrts_density", "gauge", "Active and dense parameters over all."),
    Exported("fedrts_links_changed_ratio", "gauge", "Share of the links that the last round exchanged."),
    Exported("fedrts_clients_expected", "gauge", "Clients of the federation."),
    Exported("fedrts_clients_connected", "gauge", "Clients whose nodes are connected."),
    Exported("fedrts_clients_asked", "counter", "Clients asked, summed over rounds."),
    Exported("fedrts_clients_answered", "counter", "Clients whose replies count."),
    Exported("fedrts_clients_late", "counter", "Clients that were late."),
    Exported("fedrts_clients_missing", "counter", "Clients that were absent for another reason.", ("reason",)),
    Exported("fedrts_clients_rejected", "counter", "Replies that were rejected, by reason without its numbers.", ("reason",)),
    Exported("fedrts_epsilon_spent", "gauge", "Privacy ε given away by the client that gave most; +Inf: without bound."),
    Exported("fedrts_epsilon_limit", "gauge", "The ε at which this site stops to answer (--epsilon)."),
    Exported("fedrts_orders", "counter", "Orders that this node has answered for a client, or failed to.", ("outcome",)),
    Exported("fedrts_work_seconds", "counter", "Seconds that this node has worked for orders."),
    Exported("fedrts_certificate_expiry_timestamp_seconds", "gauge", "When a certificate expires.", ("certificate",)),
    Exported("fedrts_events", "counter", "What went on record: connections, refusals, keys, farewells.", ("event",)),
]
"""Beside these: process_… (memory, CPU time, open files) of the process, on Linux."""

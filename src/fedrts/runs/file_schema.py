"""What is read back from the untrusted files of a run folder; other keys may be present."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fedrts.errors import InputError
from fedrts.server.rounds import BINS
from fedrts.tables import Number
from fedrts.tasks.metrics import MetricFormat

Count = Annotated[int, Field(ge=0, lt=2**63)]


Histogram = Annotated[list[Count], Field(min_length=BINS, max_length=BINS)]


class Part(BaseModel):
    """A part of a file; infinite and missing numbers are null there."""

    model_config = ConfigDict(allow_inf_nan=False)


class ExperimentFacts(Part):
    method: str
    data: str
    model: str
    density: float
    rounds: Count
    seed: int
    tags: list[str] = []


class Rejected(Part):
    client: int
    reason: str


class JudgedSite(Part):
    client: Count
    samples: Count
    accuracy: float | None = None
    perplexity: float | None = None


class Federated(Part):
    mean: dict[str, float | None]
    mean_of_clients: dict[str, float | None]
    samples: Count
    clients: list[JudgedSite]
    missing: list[Rejected]
    bytes: Count


class HistoryLine(Part):
    round: Annotated[int, Field(ge=-1, lt=2**63)]
    outer: bool
    clients: list[Count]
    rejected: list[Rejected]
    accuracy: float | None
    perplexity: float | None = None
    links_changed: float
    upload_bytes: Count
    download_bytes: Count
    flops: float
    seconds: float
    federated: Federated | None = None


class TopologyLine(Part):
    round: Count
    overlap: float
    active: dict[str, Count]
    belief_active: Histogram | None = None
    belief_inactive: Histogram | None = None
    cut_off: dict[str, dict[str, Count]] | None = None
    against: dict[str, dict[str, Count]] | None = None
    silenced: dict[str, Count] | None = None


class Client(Part):
    client: Count
    samples: Count
    labels: list[Count] | None = None


class JudgedClass(Part):
    label: Count = Field(alias="class")
    accuracy: float | None


class JudgedClient(Part):
    accuracy: float | None = None
    perplexity: float | None = None
    expected_accuracy: float | None = None


class Fairness(Part):
    classes: list[JudgedClass] | None
    clients: list[JudgedClient] | None


class CellFailure(Part):
    reason: str


class MetricWords(Part):
    model_config = ConfigDict(extra="forbid")

    label: str
    format: MetricFormat
    lower_is_better: bool


class Stopped(Part):
    round: Count
    planned: Count
    by: str
    reason: str


class Summary(Part):
    digests: dict[str, str] = {}
    density: float
    accuracy_last10: float | None
    best_accuracy: float | None
    loss: float | None
    upload_bytes: Count
    download_bytes: Count
    comm_ratio: float
    paper_comm_mb: float
    flops: float
    seconds: float
    samples_per_second: float
    federated: Federated | None = None
    given: dict[str, str] = {}
    metrics: dict[str, MetricWords] = {}
    stopped: Stopped | None = None


class CheckpointHeader(Part):
    next_round: Annotated[int, Field(ge=-1, lt=2**63)]
    sizes: list[Count]


class Identity(Part):
    model: str
    clients: str
    data: str | None = None
    layers: list[str]


class CheckpointFacts(Part):
    experiment: dict[str, Any]
    logs: dict[str, Count]
    log_digests: dict[str, str] = {}
    identity: Identity
    stopped: Stopped | None = None


def check_metrics(names: Iterable[str], content: Iterable[Mapping[str, Any]], file: str) -> None:
    """Check that these keys are numbers or null wherever they occur."""
    keys = [key for name in names for key in (name, f"{name}_last10", f"best_{name}", f"valid_{name}", f"average_{name}")]
    check(list[dict[str, Number | None]], [{key: line[key] for key in keys if key in line} for line in content], file)


def check(kind: Any, content: object, file: str) -> None:
    """Refuse content that a report cannot use, and name the first problem."""
    try:
        TypeAdapter(kind).validate_python(content, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{file} is damaged: {place + ': ' if place else ''}{first['msg']}; restore it from a backup") from error

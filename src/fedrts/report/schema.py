"""What the report takes from the files of a run folder; other keys may be there."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from fedrts.errors import InputError


class Experiment(BaseModel):
    method: str
    data: str
    model: str
    density: float
    rounds: int
    seed: int


class Rejected(BaseModel):
    reason: str


class HistoryLine(BaseModel):
    round: int
    outer: bool
    rejected: list[Rejected]
    accuracy: float | None
    perplexity: float | None = None
    links_changed: float
    upload_bytes: int
    download_bytes: int
    flops: float


class TopologyLine(BaseModel):
    round: int
    overlap: float
    active: dict[str, int]
    belief_active: list[int] | None = None
    belief_inactive: list[int] | None = None


class Client(BaseModel):
    client: int
    samples: int
    labels: list[int] | None = None


class JudgedClass(BaseModel):
    accuracy: float | None


class JudgedClient(BaseModel):
    accuracy: float | None = None
    perplexity: float | None = None
    expected_accuracy: float | None = None


class Fairness(BaseModel):
    classes: list[JudgedClass] | None
    clients: list[JudgedClient] | None


class Failure(BaseModel):
    reason: str


class Summary(BaseModel):
    density: float
    accuracy_last10: float | None
    best_accuracy: float | None
    loss: float | None
    upload_bytes: int
    download_bytes: int
    comm_ratio: float
    paper_comm_mb: float
    flops: float
    seconds: float
    samples_per_second: float


def check(kind: Any, content: object, file: str) -> None:
    """Refuse what a report could not be made of, naming the first thing that is wrong."""
    try:
        TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{file} is damaged: {place + ': ' if place else ''}{first['msg']}") from error

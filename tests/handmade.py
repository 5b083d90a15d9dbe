"""Run folders written by hand, to the letter of the documentation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import tomli_w


def line(index: int, accuracy: float | None, **more: Any) -> dict[str, Any]:
    """One line of history.jsonl: 100 bytes up, 50 down, 1,000 FLOPs."""
    return {
        "round": index,
        "outer": index >= 0 and index % 5 == 0,
        "clients": [0, 1],
        "rejected": [],
        "loss": None if accuracy is None else 1 - accuracy,
        "accuracy": accuracy,
        "perplexity": None,
        "density": 0.2,
        "links_changed": 0.1 if index % 5 == 0 else 0.0,
        "upload_bytes": 100,
        "download_bytes": 50,
        "flops": 1000.0,
        "seconds": 0.5,
        **more,
    }


def belief(index: int, overlap: float = 0.9) -> dict[str, Any]:
    """One line of topology.jsonl."""
    return {
        "round": index,
        "overlap": overlap,
        "active": {"a.weight": 30, "b.weight": 10},
        "changed": {"a.weight": 3, "b.weight": 1},
        "belief_active": [0] * 10 + [4] * 10,
        "belief_inactive": [6] * 10 + [0] * 10,
    }


def fairness(clients: list[float], classes: list[float]) -> dict[str, Any]:
    return {
        "share": 1.0,
        "classes": [{"class": label, "samples": 5, "accuracy": value} for label, value in enumerate(classes)],
        "clients": [
            {"client": number, "samples": 8, "loss": 1.0, "accuracy": value, "expected_accuracy": value / 2}
            for number, value in enumerate(clients)
        ],
    }


def write(folder: Path, accuracies: Sequence[float | None], *, finished: bool = True, seed: int = 0, **settings: Any) -> Path:
    """A run whose rounds were evaluated to `accuracies`; returns its folder."""
    extra = {name: settings.pop(name) for name in ("history", "fairness", "summary") if name in settings}
    tables = {"clients": {"total": 2, "alpha": 0.5}, "train": {"lr": 0.1}, "engine": {"name": "serial"}}
    experiment = {"method": "fedrts", "data": "digits", "model": "mlp", "density": 0.2, "rounds": len(accuracies), "seed": seed, **tables}
    folder.mkdir(parents=True)
    content = {**experiment, **settings, "versions": {"fedrts": "0.1.0", "torch": "2.13.0"}}
    (folder / "experiment.toml").write_text(tomli_w.dumps(content), "utf-8")
    history = extra.get("history") or [line(index, accuracy) for index, accuracy in enumerate(accuracies)]
    (folder / "history.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in history), "utf-8")
    outer = [belief(entry["round"]) for entry in history if entry["outer"]]
    (folder / "topology.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in outer), "utf-8")
    clients = [{"client": 0, "samples": 8, "labels": [5, 3]}, {"client": 1, "samples": 4, "labels": [0, 4]}]
    (folder / "clients.json").write_text(json.dumps(clients), "utf-8")
    if not finished:
        return folder
    judged = extra.get("fairness", fairness([0.5, 0.7], [0.6, 0.8]))
    if judged is not None:
        (folder / "fairness.json").write_text(json.dumps(judged), "utf-8")
    masks = {"a.weight": np.ones((10, 6), bool), "b.weight": np.ones(100, bool)}
    (folder / "masks.safetensors").write_bytes(safetensors.numpy.save(masks))
    seen = [value for value in accuracies[-10:] if value is not None]
    summary = {
        "density": 0.2,
        "accuracy": accuracies[-1],
        "accuracy_last10": sum(seen) / len(seen) if seen else None,
        "best_accuracy": max(seen, default=None),
        "loss": 0.3,
        "upload_bytes": 100 * len(history),
        "download_bytes": 50 * len(history),
        "comm_ratio": 0.2,
        "paper_comm_mb": 1.5,
        "flops": 1000.0 * len(history),
        "seconds": 0.5 * len(history),
        "samples_per_second": 10.0,
        **extra.get("summary", {}),
    }
    (folder / "summary.json").write_text(json.dumps(summary), "utf-8")
    return folder

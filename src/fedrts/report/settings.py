"""Grouping of runs: problems (data and model), and in them settings (all keys except the seed), named by what differs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from fedrts.comparison.table import text_of
from fedrts.config import CUSTOM, usual_end
from fedrts.report.read import Run

_SAME_RESULT = {"recipe", "seed", "out", "device", "checkpoint.every", "eval.fairness", "eval.batch_size", "eval.metrics"}
"""Keys that tell no setting from another; nor does who ran the clients (`engine.`), apart from the precision."""
_OWN = "method_options."
"""Options of a method are compared among its own runs alone."""


@dataclass(frozen=True)
class Setting:
    """Runs that differ only in their seed."""

    label: str
    """What tells it from the others of its problem."""
    without_density: str
    runs: Sequence[Run]
    hue: int
    dash: int
    finished: bool

    @property
    def method(self) -> str:
        return self.runs[0].method

    @property
    def dense(self) -> bool:
        return self.runs[0].dense


@dataclass(frozen=True)
class Problem:
    """A data set and a model."""

    id: str
    title: str
    settings: Sequence[Setting]

    @property
    def finished(self) -> list[Setting]:
        return [setting for setting in self.settings if setting.finished]

    @property
    def runs(self) -> list[Run]:
        return [run for setting in self.settings for run in setting.runs]


def grouped(runs: Sequence[Run]) -> tuple[list[Problem], list[str]]:
    """Return the problems, and a line for every run that repeats another's setting and seed; only the first counts."""
    first: dict[str, Run] = {}
    repeats = []
    for run in runs:
        key = _text({**_compared(run), "seed": run.seed, "state": run.state, "problem": _problem(run), "data": _given(run, "data")})
        if first.setdefault(key, run) is not run:
            repeats.append(f"{run.path}: left out, it repeats {first[key].path} (same setting and seed)")
    by_problem: dict[str, list[Run]] = {}
    for run in first.values():
        by_problem.setdefault(_text({"problem": _problem(run)}), []).append(run)
    problems: list[Problem] = []
    for number, members in enumerate(part for together in by_problem.values() for part in _by_data(together)):
        data, model = (short(str(members[0].settings[key])) for key in ("data", "model"))
        slug = re.sub(r"[^a-z0-9]+", "-", f"{data}-{model}".lower()).strip("-")
        taken = any(problem.id == slug for problem in problems)
        title = " · ".join([data, model, *_told_apart(members[0])])
        problems.append(Problem(f"{slug}-{number}" if taken else slug, title, _settings(members)))
    return problems, repeats


def _problem(run: Run) -> list[Any]:
    """Return the problem of a run. A script's runs are identified by samples, labels, layers, and what the run states.

    Those of a script have no names: data go by their samples and labels, models by their layers, and both by what their run says.
    """
    data, model = run.settings["data"], run.settings["model"]
    labels = [sum(counts) for counts in zip(*(client.get("labels") or [] for client in run.clients), strict=True)]
    return [
        data,
        model,
        [sum(client["samples"] for client in run.clients), labels] if data == CUSTOM else None,
        run.links if model == CUSTOM else None,
        [_given(run, "model"), _given(run, "task")],
    ]


def _given(run: Run, what: str) -> str | None:
    """Return what was given in Python, as a finished run states it."""
    found: str | None = (run.summary or {}).get("given", {}).get(what)
    return found


def _by_data(runs: Sequence[Run]) -> list[list[Run]]:
    """Split runs of one problem in which one setting and seed has several data sets; others may have drawn theirs by the seed."""
    places = [_text({**_compared(run), "seed": run.seed, "state": run.state}) for run in runs]
    if len(set(places)) == len(runs):
        return [list(runs)]
    parts: dict[str | None, list[Run]] = {}
    for run in runs:
        parts.setdefault(_given(run, "data"), []).append(run)
    return list(parts.values())


def _told_apart(run: Run) -> list[str]:
    """Return words for a title if names are not enough."""
    samples = [f"{sum(client['samples'] for client in run.clients):,} samples"] if run.settings["data"] == CUSTOM else []
    links = [f"{sum(run.links.values()):,} links"] if run.settings["model"] == CUSTOM and run.links else []
    task = _given(run, "task")
    return samples + links + ([task.partition(" #")[0]] if task else [])


def differing(runs: Sequence[Run]) -> list[str]:
    """Return the keys in which runs of one problem differ: the method first, then the density."""
    keys = sorted({key for run in runs for key in _compared(run)})
    found = [key for key in keys if _differs(key, runs)]
    order = {"method": 0, "density": 1}
    return sorted(found, key=lambda key: (order.get(key, 2), key.startswith(_OWN), key))


def common(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the keys that all runs share, with their values."""
    shared = set.intersection(*(set(run.settings) for run in runs))
    first = runs[0].settings
    return {key: first[key] for key in first if key in shared and all(run.settings[key] == first[key] for run in runs)}


def unlikeness(run: Run, other: Run) -> int:
    """Return the number of keys in which two runs differ, not counting the method's."""
    mine, theirs = (
        {k: v for k, v in _compared(one).items() if k not in ("method", "density") and not k.startswith(_OWN)} for one in (run, other)
    )
    return sum(mine.get(key) != theirs.get(key) for key in mine.keys() | theirs.keys())


def _matters(key: str) -> bool:
    """Whether a key can change a run's result, apart from chance and rounding."""
    return key not in _SAME_RESULT and (not key.startswith("engine.") or key == "engine.precision")


def short(name: str) -> str:
    """Return a name without the path before it, for an import path, a file or a folder."""
    tail = name.rpartition(":")[2]
    return PurePath(tail).stem if tail != name or "/" in tail else name


def shown(value: object) -> str:
    """Format a setting's value for people."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return ", ".join(value) or "–"
    return text_of(value)


def _settings(runs: Sequence[Run]) -> list[Setting]:
    keys = differing(runs)
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_text({**_compared(run), "state": run.state}), []).append(run)
    ordered = sorted(groups.values(), key=lambda group: _rank(group[0], keys))
    several = "method" in keys
    hues = {
        text: number for number, text in enumerate(dict.fromkeys(run[0].method if several else _text(_compared(run[0])) for run in ordered))
    }
    rests = list(dict.fromkeys(_named(group[0], [key for key in keys if key != "method"]) for group in ordered if not group[0].dense))
    made = []
    for group in ordered:
        run = group[0]
        rest = _named(run, [key for key in keys if key != "method"])
        suffix = "" if run.finished else f" ({run.state})"
        made.append(
            Setting(
                (_named(run, keys) or short(run.method)) + suffix,
                (_named(run, [key for key in keys if key != "density"]) or short(run.method)) + suffix,
                sorted(group, key=lambda run: run.seed),
                hues[run.method if several else _text(_compared(run))],
                rests.index(rest) if several and rest in rests else 0,
                run.finished,
            )
        )
    return made


def _named(run: Run, keys: Iterable[str]) -> str:
    """Return `method density · key=value …` of these keys."""
    values = _compared(run)
    words = []
    for key in keys:
        if key not in values or (key == "density" and run.dense):
            continue
        if key == "tags":
            words += [f"#{tag}" for tag in values[key]]
            continue
        value = shown(values[key])
        words.append(short(value) if key == "method" else f"d={value}" if key == "density" else f"{key.rpartition('.')[2]}={value}")
    return " ".join(words)


def _rank(run: Run, keys: Sequence[str]) -> tuple[object, ...]:
    """Return the sort key: dense methods first, then by method, from dense to sparse."""
    others = [_text({"value": run.settings.get(key)}) for key in keys if key not in ("method", "density")]
    return (not run.dense, run.method, -float(run.settings["density"]), others, not run.finished)


def _differs(key: str, runs: Sequence[Run]) -> bool:
    if key == "topology.end" and all(run.settings.get(key) == usual_end(run.settings["rounds"]) for run in runs):
        return False  # the rounds say it
    if key.startswith(_OWN):
        by_method: dict[str, set[str]] = {}
        for run in runs:
            by_method.setdefault(run.method, set()).add(_text({"value": run.settings.get(key)}))
        return any(len(values) > 1 for values in by_method.values())
    considered = [run for run in runs if not run.dense] if key == "density" else runs
    return len({_text({"value": run.settings.get(key)}) for run in considered}) > 1


def _compared(run: Run) -> dict[str, Any]:
    return {key: value for key, value in run.settings.items() if _matters(key) and key not in ("data", "model")}


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, default=str)

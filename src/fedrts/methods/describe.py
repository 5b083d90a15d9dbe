"""Descriptions of the methods from their own declarations: what the server keeps, what clients do, what travels.

Tables made here cannot drift from the code; `docs/methods` holds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import nn

from fedrts import methods
from fedrts.methods.contract import Calibrate, Evaluate, Exchange, Means, ProbeCurvature, ProbeGradient, Rewire, Round, Setup, Train
from fedrts.sparse import random
from fedrts.sparse.layout import Layout
from fedrts.sparse.schedule import Schedule
from fedrts.wire.fields import Field, Frame, Indices, Largest, Masks, Missed, OnOwnMask, Signs, Values


@dataclass(frozen=True)
class Description:
    """A method in words, described by its exchanges."""

    name: str
    topology: str
    state: list[str]
    """What the server keeps between rounds, besides weights and mask."""
    rounds: Mapping[str, tuple[Exchange, ...]]
    """Exchanges of the `set-up`, an `inner` and an `outer` round."""
    options: Mapping[str, tuple[str, str]]
    """name → (default, meaning)."""
    dense: bool

    def sent(self, when: str, way: str) -> list[str]:
        """Return what travels `down` or `up` in each exchange of a round."""
        messages: list[Mapping[str, Field]] = [getattr(exchange, way) for exchange in self.rounds[when]]
        words = [", ".join(in_words(entry) for entry in message.values()) for message in messages]
        full = self.dense or when == "set-up"
        return [text.replace("weights on the mask", "all weights") if full else text for text in words]

    def work(self, when: str) -> list[str]:
        """Return what a client does in each exchange of a round."""
        return [", ".join(in_words(step) for step in exchange.steps) for exchange in self.rounds[when]]


def described(name: str) -> Description:
    """Return the method of that name, with its defaults, on a small network with BatchNorm."""
    kind = methods.get(name)
    method, setup, schedule = kind(), _example(), Schedule()
    state = method.begin(setup)
    exchanges = {"set-up": method.exchanges(Round.of(-1, schedule, state.mask, setup.layout))}
    for number, exchange in enumerate(exchanges["set-up"]):
        frame = Frame(setup.layout, state.mask)
        found = {key: torch.zeros(entry.most(frame) // frame.dtype.itemsize) for key, entry in exchange.up.items()}
        state = method.update(state, Means(found), Round.of(-1, schedule, state.mask, setup.layout, number), setup.rng)
    for when, index in (("inner", 1), ("outer", 0)):
        exchanges[when] = method.exchanges(Round.of(index, schedule, state.mask, setup.layout))
    return Description(
        name,
        kind.topology,
        list(state.memory),
        exchanges,
        {key: (_shown(info.default), info.description or "") for key, info in kind.model_fields.items() if key != "density"},
        kind.dense,
    )


def table(names: Sequence[str] | None = None) -> str:
    """Return these methods (default: all) as a Markdown table."""
    titles = ["method", "server keeps, besides W and m", "clients do", "down", "up", "active links"]
    rows = [titles, ["---"] * len(titles)]
    for name in names or methods.names():
        entry = described(name)
        rows.append(
            [
                f"[`{name}`]({name}.md)",
                ", ".join(entry.state) or "–",
                _by_round({when: "; then ".join(entry.work(when)) for when in entry.rounds}),
                _by_round({when: "; then ".join(entry.sent(when, "down")) for when in entry.rounds}),
                _by_round({when: "; then ".join(entry.sent(when, "up")) for when in entry.rounds}),
                entry.topology,
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def travels(name: str) -> str:
    """Return what one method sends in each kind of round, as a Markdown table."""
    rows = [["round", "down", "clients do", "up"], ["---"] * 4]
    entry = described(name)
    for when, exchanges in entry.rounds.items():
        labels = [when] if len(exchanges) == 1 else [f"{when}, exchange {number}" for number in range(1, len(exchanges) + 1)]
        rows += [list(row) for row in zip(labels, entry.sent(when, "down"), entry.work(when), entry.sent(when, "up"), strict=True)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def options(name: str) -> str:
    """Return one method's options as a Markdown table."""
    rows = [["option", "default", "meaning"], ["---"] * 3]
    rows += [[f"`{key}`", f"`{default}`", meaning] for key, (default, meaning) in described(name).options.items()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) if len(rows) > 2 else "None of its own."


@singledispatch
def in_words(thing: object) -> str:
    """Describe a step or a field in a few words."""
    return type(thing).__name__


@in_words.register
def _(step: Train) -> str:
    part = "" if (step.start, step.stop) == (0.0, 1.0) else f" ({step.start:g} to {step.stop:g} of the epochs)"
    recording = ", record squared gradients" if step.record else ""
    return f"train{part}{recording}{', with a penalty and rates of its own' if step.influence else ''}"


@in_words.register
def _(step: ProbeGradient) -> str:
    return "gradient of all links on one batch" if step.batches == "one" else "gradient of all links on all data"


@in_words.register
def _(step: ProbeCurvature) -> str:
    return f"Hessian times {step.along} on all data"


@in_words.register
def _(step: Calibrate) -> str:
    return "BatchNorm statistics of every candidate"


@in_words.register
def _(step: Evaluate) -> str:
    return "loss of every candidate"


@in_words.register
def _(step: Rewire) -> str:
    return "choose a mask of its own"


@in_words.register
def _(entry: Values) -> str:
    what = {
        "mask": f"{entry.of} on the mask",
        "active": f"{entry.of} of active links",
        "links": f"{entry.of} of all links",
        "all": f"all {entry.of}",
        "statistics": f"{entry.copies} × BatchNorm statistics",
        "scalars": f"{entry.copies} {entry.of}",
    }[entry.on]
    return what if entry.lossless else f"{what} ({entry.type}{f', a scale per {entry.scales}' if entry.format.scaled else ''})"


@in_words.register
def _(entry: Indices) -> str:
    return f"names {'and values ' if entry.values else ''}of the Q inactive links of largest {entry.of}"


@in_words.register
def _(entry: OnOwnMask) -> str:
    return f"{entry.of} on the client's own mask"


@in_words.register
def _(entry: Largest) -> str:
    what = f"names and changes of the {entry.share:.0%} of each layer's links that changed most"
    return what if entry.lossless else f"{what} ({entry.type})"


@in_words.register
def _(entry: Missed) -> str:
    return f"for every round since the client's last: {in_words(entry.step)}; all weights where that is less"


@in_words.register
def _(entry: Signs) -> str:
    return f"{entry.of}: a sign per link"


@in_words.register
def _(entry: Masks) -> str:
    return f"{entry.count} masks"


def _by_round(parts: Mapping[str, str]) -> str:
    """Merge the rounds' entries: common ones once, others with the name of their rounds."""
    lines = [f"*set-up:* {parts['set-up']}"] if parts["set-up"] else []
    if parts["inner"] == parts["outer"]:
        return "<br>".join([*lines, parts["inner"]])
    return "<br>".join([*lines, f"*inner:* {parts['inner']}", f"*outer:* {parts['outer']}"])


def _shown(default: object) -> str:
    return str(default).lower() if isinstance(default, bool) else f"{default:g}" if isinstance(default, float) else str(default)


def _example() -> Setup:
    """Return a small convolutional network at the start of a run."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8)
        )
        module.append(nn.Linear(8, 4))
    layout = Layout.of(module)
    return Setup(
        layout, layout.flatten(module.state_dict()), (1, 6, 6), rng=lambda purpose: random.key(purpose), module=module, budget="prunable"
    )

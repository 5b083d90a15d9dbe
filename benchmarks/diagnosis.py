"""Why a topology turns out as it does: votes, posteriors, the lives of links, and how near masks come to a dense model's largest weights.

    python benchmarks/diagnosis.py --out runs/diagnosis                                          # digits, about two minutes
    python benchmarks/diagnosis.py --data cifar10 --model resnet18_small --rounds 500 --device cuda --out runs/diagnosis_cifar10
    python benchmarks/diagnosis.py --variant "sure:fedrts:scale=100" --out runs/diagnosis        # one more beside those
    python benchmarks/diagnosis.py --render --out runs/diagnosis                                 # tables and plots of what is there

Every method is run with the same seed, clients and initial weights, and watched from outside. What is measured:

**Votes** (methods whose clients name links): by how many clients a link is named; the overlap of two clients' sets in one outer round,
and in successive ones, as the share of the smaller set; each against chance, which is the same number of names per layer at random.
**Posteriors** (methods that keep α and β): mean and spread of Beta(α, β) as drawn from, for links named by nobody, one, two, three or more
clients and for active ones outside and inside the core; how often a draw of a link named once is above one of a link named by nobody
(normal approximation); and how many clients had named the links that were then grown.
**Lives**: of the links grown in an outer round, the share still active k outer rounds later; of those dropped, the share that was grown in
the outer round before, and the same share of all active links (chance).
**Dense**: overlap of the mask with the K^l largest magnitudes of a dense model after as many rounds from the same weights, over layers that
are not full, against chance.
**Units**: over how many of a layer's outputs and inputs the links are spread, as the exponential of the entropy of their shares over the
number of units: 1 when all have as many, small where a few have nearly all. Layers that are not full; compare with a random mask.

Raw numbers lie in OUT/raw, one file a method; a run whose file is there with the same settings is not repeated. Tables are in
OUT/diagnosis.md, plots beside it where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from diagnosis_report import Raw, render
from fedrts import config
from fedrts.errors import InputError
from fedrts.methods.base import Method
from fedrts.methods.contract import Means, Rng, Round, State
from fedrts.runs.build import Assembled, assemble
from fedrts.server import rounds
from fedrts.sparse.mask import Mask
from fedrts.sparse.topk import top
from fedrts.wire.fields import Message, Selection

METHODS = ("fedrts", "fedcucb", "fedtiny", "feddst", "prunefl", "random")
DENSE = "fedavg"

# -- watching --------------------------------------------------------------------------------------------------------


@dataclass
class Watch:
    """What passes through a method in one round."""

    named: list[Tensor] = field(default_factory=list)
    """The links that each client named."""
    mean: Mapping[str, Tensor] = field(default_factory=dict)


def watched(method: Method, watch: Watch) -> Method:
    """The same method, by which `watch` sees every message and every mean."""

    class Watched(type(method)):  # type: ignore[misc]
        def contribution(self, message: Message, state: State, round: Round) -> Message:
            watch.named += [part.indices for part in message.values() if isinstance(part, Selection)]
            return super().contribution(message, state, round)  # type: ignore[no-any-return]

        def update(self, state: State, mean: Means, round: Round, rng: Rng) -> State:
            watch.mean = mean
            return super().update(state, mean, round, rng)  # type: ignore[no-any-return]

    found: Method = Watched(**method.model_dump())
    return found


def observe(run: Assembled, dense: Tensor | None) -> Raw:
    """Play a run and measure it; `dense [P]` are the links of a dense model."""
    watch = Watch()
    plan = replace(run.plan, method=watched(run.method, watch))
    state, lives, before = plan.method.begin(run.setup), Lives(), Ballot.none()
    history: list[Raw] = []
    outers: list[Raw] = []
    for played in rounds.play(plan, state, -1):
        line = played.record
        if line.round >= 0:
            history.append({"round": line.round, "accuracy": line.accuracy, "loss": line.loss, "links_changed": line.links_changed})
        if line.outer:
            current = plan.round(line.round, state.mask)
            ballot = Ballot(list(watch.named), state.mask)
            found: Raw = {"round": line.round, **lives.outer(state.mask, played.state.mask)}
            if ballot.sets:
                found["votes"] = ballot.counted() | {"successive": ballot.overlap_with(before), **ballot.grown(played.state.mask)}
            if ballot.sets and "alpha" in played.state.memory:
                found["posterior"] = posteriors(played.state, ballot, core_of(watch.mean, state.mask, current))
            if dense is not None:
                found["dense"] = overlap_with_dense(played.state.mask, dense)
            found["units"] = spread_over_units(played.state.mask, [entry.shape for entry in run.layout.layers])
            outers.append(found)
            before = ballot
        watch.named.clear()
        state = played.state
        print(f"\r{run.experiment.method} {line.round + 1}/{plan.rounds} ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    final = {"dense": overlap_with_dense(state.mask, dense)} if dense is not None else {}
    return {"history": history, "outers": outers, "survival": lives.survival(), "final": final}


def core_of(mean: Mapping[str, Tensor], mask: Mask, current: Round) -> Tensor:
    """bool `[P]`: the κ^l active links of largest average magnitude."""
    core = torch.zeros_like(mask.bits)
    core[mask.active] = top(mean["weights"][: mask.number].abs(), current.core, current.counts)
    return core


# -- votes -----------------------------------------------------------------------------------------------------------


@dataclass
class Ballot:
    """What the clients of an outer round named, among the links off `mask`."""

    sets: list[Tensor]
    mask: Mask

    @staticmethod
    def none() -> Ballot:
        return Ballot([], Mask(torch.zeros(0, dtype=torch.bool), []))

    @property
    def names(self) -> Tensor:
        """How many clients named each link `[P]`."""
        return torch.bincount(torch.cat(self.sets), minlength=len(self.mask.bits))

    def counted(self) -> Raw:
        """Inactive links by the number of clients that named them, and overlaps of clients, with what chance gives."""
        voters, sizes = len(self.sets), list(self.mask.sizes)
        inactive = (~self.mask.bits).split(sizes)
        tally = torch.bincount(self.names[~self.mask.bits], minlength=voters + 1).tolist()
        chance = [0.0] * (voters + 1)
        for free, part in zip(inactive, self.names.split(sizes), strict=True):
            there = int(free.count_nonzero())
            p = float(part.sum()) / voters / max(there, 1)
            for k in range(voters + 1):
                chance[k] += there * math.comb(voters, k) * p**k * (1 - p) ** (voters - k)
        return {
            "clients": voters,
            "links_by_votes": tally,
            "chance": chance,
            "overlap": self._overlap(combinations(self.sets, 2), ~self.mask.bits),
        }

    def overlap_with(self, before: Ballot) -> Raw | None:
        """Overlap of a client now with a client in the outer round before, among links inactive both times."""
        if not before.sets:
            return None
        return self._overlap(product(self.sets, before.sets), ~self.mask.bits & ~before.mask.bits)

    def grown(self, after: Mask) -> Raw:
        """How many clients had named the links that were then grown: none, one, two, three or more, as shares."""
        names = self.names[after.bits & ~self.mask.bits].clamp(max=3)
        return {"grown_by_votes": (torch.bincount(names, minlength=4) / max(len(names), 1)).tolist()}

    def _overlap(self, pairs: Any, free: Tensor) -> Raw:
        """Mean over pairs of |A ∩ B| / min(|A|, |B|) within `free`, and its expectation for random sets of the same sizes per layer."""
        sizes = list(self.mask.sizes)
        space = torch.tensor([int(part.count_nonzero()) for part in free.split(sizes)]).clamp(min=1)
        bits: dict[int, Tensor] = {}

        def of(indices: Tensor) -> tuple[Tensor, Tensor]:
            if id(indices) not in bits:
                bits[id(indices)] = torch.zeros_like(free).index_fill(0, indices, True) & free
            mine = bits[id(indices)]
            return mine, torch.tensor([int(part.count_nonzero()) for part in mine.split(sizes)])

        shares, chances = [], []
        for first, second in list(pairs)[:45]:
            (a, a_layers), (b, b_layers) = of(first), of(second)
            smaller = max(min(int(a_layers.sum()), int(b_layers.sum())), 1)
            shares.append(int((a & b).count_nonzero()) / smaller)
            chances.append(float((a_layers * b_layers / space).sum()) / smaller)
        return {"share": fmean(shares) if shares else None, "chance": fmean(chances) if chances else None}


# -- posteriors ------------------------------------------------------------------------------------------------------


def posteriors(state: State, ballot: Ballot, core: Tensor) -> Raw:
    """Beta(α, β) of groups of links as an outer round draws from it, before which `ballot.mask` was active."""
    alpha, beta, names, inactive = state["alpha"].double(), state["beta"].double(), ballot.names, ~ballot.mask.bits
    mean, total = alpha / (alpha + beta), alpha + beta
    spread = (mean * (1 - mean) / (total + 1)).sqrt()
    groups = {
        "no vote": inactive & (names == 0),
        "1 vote": inactive & (names == 1),
        "2 votes": inactive & (names == 2),
        "3+ votes": inactive & (names >= 3),
        "active, weak": ballot.mask.bits & ~core,
        "active, core": core,
    }
    found: Raw = {
        name: {"links": int(of.count_nonzero()), "mean": float(mean[of].mean()), "spread": float(spread[of].mean())}
        for name, of in groups.items()
        if bool(of.any())
    }
    threshold = float(mean[state.mask.bits].min()) if state.mask.number else None
    return {"groups": found, "least_active_mean": threshold, "told_apart": told_apart(found, "1 vote", "no vote")}


def told_apart(groups: Raw, better: str, worse: str) -> float | None:
    """P(a draw of a `better` link exceeds one of a `worse` link), of two normal distributions."""
    if better not in groups or worse not in groups:
        return None
    a, b = groups[better], groups[worse]
    distance = (a["mean"] - b["mean"]) / math.hypot(a["spread"], b["spread"])
    return 0.5 * (1 + math.erf(distance / math.sqrt(2)))


# -- lives -----------------------------------------------------------------------------------------------------------


class Lives:
    """When links became active, and how long they stay."""

    def __init__(self) -> None:
        self.cohorts: list[tuple[int, Tensor]] = []
        """(links grown, those of them never dropped since) of every outer round."""
        self.alive: list[list[float]] = []
        self.seen: Tensor | None = None

    def outer(self, before: Mask, after: Mask) -> Raw:
        dropped, grown = before.bits & ~after.bits, after.bits & ~before.bits
        latest = self.cohorts[-1][1] if self.cohorts else torch.zeros_like(grown)
        known = before.bits.clone() if self.seen is None else self.seen | before.bits
        self.seen = known
        found = {
            "dropped_just_grown": _share(dropped & latest, dropped),
            "active_just_grown": _share(before.bits & latest, before.bits),
            "grown_again": _share(grown & known, grown),
        }
        self.cohorts = [(size, links & after.bits) for size, links in self.cohorts]
        for (size, links), curve in zip(self.cohorts, self.alive, strict=True):
            curve.append(int(links.count_nonzero()) / max(size, 1))
        self.cohorts.append((int(grown.count_nonzero()), grown))
        self.alive.append([1.0])
        return found

    def survival(self) -> Raw:
        """By cohort: its size and the share alive after 0, 1, … further outer rounds."""
        return {"sizes": [size for size, _ in self.cohorts], "alive": self.alive}


def _share(part: Tensor, whole: Tensor) -> float | None:
    number = int(whole.count_nonzero())
    return int(part.count_nonzero()) / number if number else None


def overlap_with_dense(mask: Mask, dense: Tensor) -> Raw:
    """Share of the active links among the K^l largest `|dense| [P]` of their layers, full layers left out; and chance, Σ K²/n / Σ K."""
    best = top(dense.abs(), mask.counts, mask.sizes)
    open_layers = [k < n for k, n in zip(mask.counts, mask.sizes, strict=True)]
    both = [int(part.count_nonzero()) for part in (best & mask.bits).split(list(mask.sizes))]
    layers = [(b, k, n) for b, k, n, is_open in zip(both, mask.counts, mask.sizes, open_layers, strict=True) if is_open]
    active = max(sum(k for _, k, _ in layers), 1)
    return {"share": sum(b for b, _, _ in layers) / active, "chance": sum(k * k / n for _, k, n in layers) / active}


def spread_over_units(mask: Mask, shapes: Sequence[Sequence[int]]) -> Raw:
    """How evenly the active links of layers that are not full lie over outputs and inputs: exp(entropy) of their shares, over units."""
    found: dict[str, list[float]] = {"outputs": [], "inputs": []}
    for bits, shape, k, n in zip(mask.bits.split(list(mask.sizes)), shapes, mask.counts, mask.sizes, strict=True):
        if len(shape) < 2 or not 0 < k < n:
            continue
        links = bits.view(shape[0], shape[1], -1).sum(-1).double()
        for name, degree in (("outputs", links.sum(1)), ("inputs", links.sum(0))):
            share = degree[degree > 0] / k
            found[name].append(float(torch.exp(-(share * share.log()).sum())) / len(degree))
    return {name: fmean(values) if values else None for name, values in found.items()}


# -- running ---------------------------------------------------------------------------------------------------------


def settings_of(options: argparse.Namespace, method: str, own: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: getattr(options, name) for name in ("data", "model", "rounds", "density", "device", "seed")}
    given = {name: value for name, value in given.items() if value is not None}
    if method == DENSE:
        given["density"] = 1.0
    given["recipe"] = "paper"
    return config.merged(config.merged(given, config.from_assignments(options.set)), {"method": method, "method_options": dict(own)})


def variants(options: argparse.Namespace) -> dict[str, tuple[str, dict[str, Any]]]:
    """Label → (method, its options)."""
    found: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in options.methods.split(",") if name}
    for text in options.variant:
        label, method, *pairs = text.split(":")
        found[label] = (method, config.from_assignments(f"method_options.{pair}" for pair in pairs).get("method_options", {}))
    return found


def played(file: Path, settings: config.Tree, data_dir: Path | None, dense: Tensor | None) -> None:
    """One run, measured, into `file`, unless that is there already."""
    if file.exists() and json.loads(file.read_text())["settings"] == json.loads(json.dumps(settings)):
        print(f"{file.stem}: already there", file=sys.stderr)
        return
    run = assemble(config.resolve(settings), data_dir)
    result = {"settings": settings, "engine": run.plan.engine.label, **observe(run, dense)}
    file.write_text(json.dumps(result) + "\n")


def dense_links(options: argparse.Namespace, raw: Path) -> Tensor:
    """The links `[P]` of a dense model after as many rounds, from the same initial weights; kept beside the raw numbers."""
    settings = settings_of(options, DENSE, {})
    settings["rounds"] = options.dense_rounds or config.resolve(settings).rounds
    file, note = raw / "dense.pt", raw / "dense.json"
    if file.exists() and note.exists() and json.loads(note.read_text())["settings"] == json.loads(json.dumps(settings)):
        found: Tensor = torch.load(file, weights_only=True)
        return found.to(config.resolve(settings).device)
    run = assemble(config.resolve(settings), options.data_dir)
    state = run.method.begin(run.setup)
    for step in rounds.play(run.plan, state, -1):
        state = step.state
        print(f"\rdense {step.record.round + 1}/{run.plan.rounds} ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    links = state.weights[: run.layout.links]
    torch.save(links.cpu(), file)
    note.write_text(json.dumps({"settings": settings, "accuracy": step.record.accuracy}) + "\n")
    return links


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS), help="names, separated by commas (default: %(default)s)")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="LABEL:METHOD:KEY=VALUE…", help="a method with options of its own"
    )
    parser.add_argument("--data", default="digits")
    parser.add_argument("--model", default="auto")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="any other key of the experiment")
    parser.add_argument("--dense-rounds", type=int, help="of the dense model (default: as many as the others)")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of raw numbers, tables and plots")
    parser.add_argument("--render", action="store_true", help="run nothing; tables and plots again, of the raw numbers")
    options = parser.parse_args()
    raw: Path = options.out / "raw"
    try:
        if not options.render:
            raw.mkdir(parents=True, exist_ok=True)
            dense = dense_links(options, raw)
            for label, (method, own) in variants(options).items():
                played(raw / f"run_{label}.json", settings_of(options, method, own), options.data_dir, dense)
        render(options.out)
    except InputError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()

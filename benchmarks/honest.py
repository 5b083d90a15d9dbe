"""How near honest clients come to the guard's bounds: every data set, model and method here, under both recipes.

    python benchmarks/honest.py                 # what is not in the raw file yet, and the table; FEDRTS_DATA has the downloaded data sets
    python benchmarks/honest.py --only svhn     # the problems whose name has this in it
    python benchmarks/honest.py --render        # the table of what is in the raw file

Seed 200, default guard. Writes benchmarks/results/raw/honest.json after every run, and benchmarks/results/honest.md. Large models
play a few rounds with a few clients, whose shares are small enough for a CPU but who take as many steps as the recipe's.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes
from torch import Tensor

import fedrts
from fedrts import config
from fedrts.client.optimizers import LocalOptimizer
from fedrts.errors import Note
from fedrts.files import write_atomically
from fedrts.runs.build import assemble
from fedrts.server import guard as guards
from fedrts.server import rounds as loop
from fedrts.server.client_records import ClientRecords
from fedrts.server.guard import Guard
from fedrts.server.outliers import UPDATE, Excess, Suspicion, excesses
from fedrts.wire.checks import Measurements

HERE = Path(__file__).parent
RAW, TABLE = HERE / "results/raw/honest.json", HERE / "results/honest.md"
FILES = HERE.parent / "build/honest"
"""Where tables are written that are played as a user's own."""
SEED = 200
RECIPES = ("paper", "tuned")
FEW = ("fedrts", "fedavg")
KINDS = (*FEW, "feddst", "prunefl", "fedpaq", "fedtopk", "fedmef", "fedtiny", "fedsgc", "random", "snip")
"""Methods whose clients train otherwise or upload something else."""
EVERY = (*KINDS, *(name for name in fedrts.methods.names() if name not in KINDS))


class Signs(LocalOptimizer):
    """A step of one length in every coordinate: the largest updates that an optimiser makes."""

    def step(self, weights: Tensor, gradient: Tensor, rates: Tensor, taken: Tensor, past: Mapping[str, Tensor]) -> None:
        weights.addcmul_(gradient.sign(), rates, value=-1)


def _few(rounds: int, **settings: Any) -> dict[str, Any]:
    """So many rounds, each of which may change the topology."""
    return {"rounds": rounds, "topology": {"interval": 1, "end": rounds}, **settings}


def _large(total: int, **settings: Any) -> dict[str, Any]:
    """A large data set on a CPU: small shares in small batches, so that a client takes twenty to forty steps."""
    return _few(2, density=0.1, clients={"total": total, "per_round": 3}, train={"batch_size": 16}, **settings)


def _table(name: str) -> dict[str, Any]:
    """A table of one's own: the column `target` of a CSV file by the others, with the classes or numbers it has."""
    return {"data": f"csv:{FILES / name}.csv", "data_options": {"target": "target"}, **_few(10, clients={"total": 10})}


def write_tables() -> None:
    """Write the tables that scikit-learn brings along as CSV files."""
    FILES.mkdir(parents=True, exist_ok=True)
    for name, load in (("breast_cancer", load_breast_cancer), ("diabetes", load_diabetes)):
        found = load()
        rows = np.column_stack([found.data, found.target])
        np.savetxt(FILES / f"{name}.csv", rows, fmt="%.10g", delimiter=",", header=",".join([*found.feature_names, "target"]), comments="")


DIGITS: dict[str, Any] = {"data": "digits", "rounds": 20}
SMALL: dict[str, Any] = {"model": "resnet18_small", "model_options": {"width": 8}}
GPT: dict[str, Any] = {"model": "gpt2_32m", "model_options": {"width": 64, "layers": 2, "heads": 4, "positions": 64}}
PROBLEMS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "digits, mlp": ({**DIGITS, **_few(10), "clients": {"total": 10}}, EVERY),
    "digits, cnn": ({**DIGITS, **_few(4), "model": "cnn", "clients": {"total": 10}}, EVERY),
    "sentences, tiny_gpt": ({"data": "sentences", **_few(5)}, EVERY),
    "a table of 2 classes, tabular": (_table("breast_cancer"), FEW),
    "a table of numbers, tabular": (_table("diabetes"), FEW),
    "svhn, cnn": ({"data": "svhn", **_large(586, model="cnn")}, KINDS),
    "fashion_mnist, cnn": ({"data": "fashion_mnist", **_large(600, model="cnn")}, KINDS),
    "tinystories (1,000 words), gpt2 of width 64": (
        {"data": "tinystories", "data_options": {"length": 64, "words": 1000}, **_large(100, **GPT)},
        KINDS,
    ),
    "tinystories, gpt2_32m": ({"data": "tinystories", "data_options": {"length": 64}, **_large(120, model="gpt2_32m")}, FEW),
    "cifar10, resnet18_small of width 8": ({"data": "cifar10", **_large(800, **SMALL)}, KINDS),
    "tinyimagenet (20 classes), cnn": ({"data": "tinyimagenet", **_large(160, model="cnn")}, KINDS),
    "digits, mlp, whole runs": ({**DIGITS, "rounds": 50}, FEW),
    "digits, mlp, density 0.05": ({**DIGITS, "density": 0.05}, FEW),
    "digits, resnet18_small of width 8": ({**DIGITS, **_few(6), **SMALL, "train": {"epochs": 1}}, FEW),
    "cifar10, shufflenet_v2": ({"data": "cifar10", **_large(800, model="shufflenet_v2")}, FEW),
    "cifar10, shufflenet_v2, density 0.2": ({"data": "cifar10", **_large(800, model="shufflenet_v2"), "density": 0.2}, FEW),
    "cifar10, resnet18": ({"data": "cifar10", **_large(1000, model="resnet18")}, FEW),
    "digits, mlp, sizes from 16 up": ({**DIGITS, "clients": {"partition": "quantity", "alpha": 0.2}}, FEW),
    "digits, mlp, two labels a client": ({**DIGITS, "clients": {"partition": "shards"}}, FEW),
    "digits, mlp, int2 with feedback": ({**DIGITS, "wire": {"value_type": "int2", "feedback": True}}, FEW),
    "digits, mlp, one client a round": ({**DIGITS, "clients": {"per_round": 1}}, FEW),
    "digits, mlp, steps by sign": ({**DIGITS, "train": {"optimizer": "honest:Signs", "lr": 0.01}}, FEW),
    "digits, mlp, adamw": ({**DIGITS, "train": {"optimizer": "adamw"}}, FEW),
    "digits, mlp, noise of 4 clips": ({**DIGITS, "privacy": {"clip": 1.0, "noise": 4.0}}, FEW),
}
"""Settings and methods by name; every method where a data set or a model is new, a few where honest clients differ most."""
Cells = dict[str, dict[str, Any]]


class Margins:
    """How near honest replies come to the guard's bounds, while it is in place of what measures them."""

    def __init__(self) -> None:
        self.norm = self.undo = self.median = self.against = 0.0
        self.suspicion = Suspicion(Guard().strikes)

    def excesses(self, measured: Mapping[str, Mapping[int, float]], samples: Mapping[int, int], norm: float) -> dict[int, Excess]:
        found = excesses(measured, samples, norm)
        self.norm = max([self.norm, *(size / max(norm, 1.0) for size in measured.get(UPDATE.name, {}).values())])
        self.median = max([self.median, *(excess.ratio for excess in found.values())])
        self.suspicion.add({client: excess.ratio / Guard().large_bound for client, excess in found.items()})
        self.against = max([self.against, *self.suspicion.weights.values()])
        return found

    def undone(self, undo_bound: float, norm: float, updates: Measurements) -> np.ndarray:
        for size, along in updates.tolist():
            if -along > guards._BACKWARDS * size * norm:  # elsewhere it may go back as far as it likes
                self.undo = max(self.undo, -along / norm / max(norm, 1.0))
        return _undone(undo_bound, norm, updates)


_undone = guards._undone


def played(settings: Mapping[str, Any], recipe: str, method: str) -> dict[str, Any]:
    """One run without evaluations: how near its replies came to each bound, and who was refused."""
    run = assemble(config.resolve(config.from_keywords({**settings, "recipe": recipe, "method": method, "seed": SEED, "device": "cpu"})))
    plan, margins, stopped, replies, rejected = run.plan, Margins(), None, 0, 0
    ledger, state = ClientRecords.of(plan.guard), run.method.begin(run.setup)
    with (
        patch.object(loop, "excesses", margins.excesses),
        patch.object(guards, "_undone", margins.undone),
        patch.object(type(plan), "is_evaluated", lambda *_: False),
    ):
        try:
            for each in loop.play(plan, state, -1, ledger):
                replies += len(each.record.clients)
                rejected += len(each.record.rejected)
        except loop.TooFewError as error:
            stopped = str(error)
            rejected += len(error.refused)
    return {
        "rounds": plan.rounds,
        "replies": replies,
        "refused": rejected,
        "quarantined": sorted(ledger.strikes.quarantined),
        **{name: round(getattr(margins, name), 4) for name in ("norm", "undo", "median", "against")},
        "stopped": stopped,
    }


def rows(found: Cells) -> Iterator[str]:
    """The table: of every problem and recipe the largest of each margin over all methods."""
    guard = Guard()
    bounds = f"size ({guard.norm_bound:g}) | back ({guard.undo_bound:g}) | medians ({guard.median_bound:g}) | against ({guard.strikes})"
    yield f"| problem | recipe | methods | rounds | replies | refused | {bounds} | stopped |"
    yield f"| --- | --- |{' ---: |' * 8} --- |"
    for name in PROBLEMS:
        for recipe in RECIPES:
            runs = {key.split(" | ")[2]: run for key, run in found.items() if key.startswith(f"{name} | {recipe} | ")}
            if not runs:
                continue
            most = [f"{max(run[what] for run in runs.values()):.2f}" for what in ("norm", "undo", "median", "against")]
            replies, refused = (sum(run[what] for run in runs.values()) for what in ("replies", "refused"))
            stopped = ", ".join(method for method, run in runs.items() if run["stopped"])
            length = next(iter(runs.values()))["rounds"]
            yield f"| {name} | {recipe} | {len(runs)} | {length} | {replies:,} | {refused} | {' | '.join(most)} | {stopped} |"


HEAD = """# Honest clients and the guard's bounds

`FEDRTS_DATA=… python benchmarks/honest.py`, seed 200, default guard. `methods` counts those that were played. The largest
values of all their replies, with the bound in brackets:

| column | what it says |
| --- | --- |
| refused | replies that did not count, those of a round that ended a run included |
| size | norm of an update, in multiples of max(‖W‖, 1) |
| back | its way back along the model where its cosine is 0.25 or more, in the same unit |
| medians | its norm in medians of its round, or 0.00 where it is below 0.2 · max(‖W‖, 1); statistics alike, with their slack |
| against | what large replies weighed against a client (a single one weighs 2 at most) |
| stopped | methods whose run ended because no reply of a round was usable |

Large data sets are played for two rounds at density 0.1, three clients a round.

Honest replies are refused in one case: `fedrts` with `shufflenet_v2` at density 0.1, where training diverges. After the first
change of the mask many channels are constant over a batch (links that begin at 0; filters of which only taps outside of a 1×1
image are active), and BatchNorm divides by their deviation: in one round a client's weights grow more than a hundredfold, or
its statistics exceed 1e9. The run stops and names the clients and the reasons. At the default density of 0.2 none is refused.

Not in the table: CINIC-10, whose model and recipe are those of CIFAR-10.

"""


def document(found: Cells) -> str:
    """The page of results."""
    return HEAD + "\n".join(rows(found)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="problems whose name has this in it")
    parser.add_argument("--render", action="store_true", help="the table of the runs that are there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", Note)
    found: Cells = json.loads(RAW.read_text("utf-8")) if RAW.is_file() else {}
    if not given.render:
        write_tables()
    cells = [
        (method, name, recipe) for method in EVERY for name, (_, methods) in PROBLEMS.items() if method in methods for recipe in RECIPES
    ]
    for method, name, recipe in () if given.render else cells:
        if given.only not in name or (key := f"{name} | {recipe} | {method}") in found:
            continue
        found[key] = played(PROBLEMS[name][0], recipe, method)
        print(key, {what: value for what, value in found[key].items() if value}, flush=True)
        write_atomically(RAW, json.dumps(found, indent=0, ensure_ascii=False).encode())
    write_atomically(TABLE, document(found).encode())


if __name__ == "__main__":
    main()

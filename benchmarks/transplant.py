"""Is it the mask or the search for it? The masks that runs ended with, given to new runs, which keep them from their first round on.

    python benchmarks/transplant.py --runs runs/transplant --out benchmarks/results/transplant/norms    # digits, a network with norms
    python benchmarks/transplant.py --render --out benchmarks/results/transplant/norms                  # the table again

Donors are played with every seed, then recipients: the same clients, batches and first weights, and the mask of the donor's last model, of
a dense one the K^l largest magnitudes. A recipient as good as its donor says that the mask is what was gained; one as good as a random one,
that it was the search, on whose way weights found their places. What is finished in the folder `--runs` is not repeated, so that several
processes can share the seeds. OUT/raw.json has the results, OUT/transplant.md the table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors.torch import load_file

import fedrts
from evidence import as_lines, run_of, versions_of
from fedrts import config
from fedrts.comparison.table import Results, differences_table, means_table, words_on_test
from fedrts.errors import InputError
from fedrts.methods.base import Sparse
from fedrts.methods.contract import Setup
from fedrts.sparse.mask import Mask

DONORS = ("fedrts", "fedmef", "fedavg")
CONTROL = "random"
RECIPIENT = "transplant:Transplanted"
SETTINGS = ("topology.interval=5", "model_options.width=8", "train.lr=0.1")
METRIC = "accuracy_last10"


class Transplanted(Sparse):
    """A fixed mask: of every layer the links that are largest in the model of a finished run."""

    donor: Annotated[str, Field(description="folder of the run")] = ""

    def initial_mask(self, setup: Setup) -> Mask:
        model, masks = (load_file(Path(self.donor) / f"{file}.safetensors") for file in ("model", "masks"))
        names = [entry.name for entry in setup.layout.layers]
        scores = torch.cat([torch.where(masks[name], model[name].abs(), -1.0).flatten() for name in names])  # an active link may be 0
        return Mask.top(scores.to(setup.weights.device), setup.counts(self.density), setup.layout.sizes)


def recipient_of(donor: str) -> str:
    """What it is called."""
    return f"mask of {donor}"


def folder(options: argparse.Namespace, label: str, seed: int) -> Path:
    return Path(options.runs) / f"{label.replace(' ', '_')}-s{seed}"


def common(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that all runs share."""
    given = {name: getattr(options, name) for name in ("data", "model", "rounds", "density", "device")}
    return config.merged({"recipe": "paper", **given}, config.from_assignments(options.set))


def cells(options: argparse.Namespace) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Label, seed and settings of every run, donors first."""
    for seed in options.seeds:
        for method in (CONTROL, *options.donors):
            full = {"density": 1.0} if config.method_class(method).dense else {}
            yield method, seed, config.merged(common(options), {"method": method, "seed": seed, **full})
        for donor in options.donors:
            own = {"method": RECIPIENT, "seed": seed, "method_options": {"donor": str(folder(options, donor, seed))}}
            yield recipient_of(donor), seed, config.merged(common(options), own)


def play(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs that are not finished; the results of all."""
    check_folder(options.runs, common(options))
    found = []
    for label, seed, settings in cells(options):
        path = folder(options, label, seed)
        if not (path / "summary.json").exists():
            print(f"{label}, seed {seed}", file=sys.stderr, flush=True)
            if path.exists():
                fedrts.resume(path, data_dir=options.data_dir)
            else:
                fedrts.run(**settings, out=str(path), data_dir=options.data_dir)
        run = run_of(path)
        found.append(run | {"summary": run["summary"] | {"method": label}})
    return found


def check_folder(runs: Path, settings: Mapping[str, Any]) -> None:
    """Its runs must have these settings: what is finished there is taken as it is."""
    file = runs / "settings.json"
    if not file.exists():
        runs.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings) + "\n", "utf-8")
    elif json.loads(file.read_text("utf-8")) != settings:
        raise InputError(f"{runs} holds runs with other settings: choose another folder --runs, or delete it")


def render(raw: Mapping[str, Any]) -> str:
    """The table and how sure its differences are."""
    rows = [run["summary"] for run in raw["runs"]]
    results = Results.of(rows, [], METRIC)
    parts = [
        "# Masks without their search",
        f"`{raw['command']}`",
        f"{versions_of(raw['runs'])}. Mean of the last ten rounds, ± standard error.",
    ]
    parts += [means_table(results, len({row["seed"] for row in rows})), words_on_test(results, CONTROL)]
    parts += [differences_table(results, reference) for reference in (CONTROL, *raw["donors"])]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers, names = (lambda text: [int(part) for part in text.split(",")]), (lambda text: text.split(","))
    parser.add_argument("--donors", type=names, default=list(DONORS), help=f"methods, separated by commas (default: {','.join(DONORS)})")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--model", default="resnet18_small")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2, 3, 4], help="separated by commas (default: 0,1,2,3,4)")
    parser.add_argument("--set", action="append", metavar="TABLE.KEY=VALUE", help=f"other keys (default: {' '.join(SETTINGS)})")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/transplant"), help="folder of the runs (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder of results and table")
    parser.add_argument("--render", action="store_true", help="play nothing; the table again")
    options = parser.parse_args()
    options.set = options.set or list(SETTINGS)
    file: Path = options.out / "raw.json"
    try:
        if not options.render:
            raw = {"command": _command(), "donors": options.donors, "runs": play(options)}
            options.out.mkdir(parents=True, exist_ok=True)
            file.write_text(as_lines(raw), "utf-8")
        (options.out / "transplant.md").write_text(render(json.loads(file.read_text("utf-8"))), "utf-8")
    except InputError as error:
        parser.exit(2, f"error: {error}\n")


def _command() -> str:
    return " ".join(["python", "benchmarks/transplant.py", *sys.argv[1:]])


if __name__ == "__main__":
    main()

"""Our engines beside others on the same work, as one table.

    python benchmarks/speed.py [--only pfl]… [--device cuda] [--data-dir DIR] [--out benchmarks/results/speed.md]
    python benchmarks/speed.py --python pfl=/path/to/python --python flower=/path/to/python     # rivals in environments of their own
    python benchmarks/speed.py --render --out benchmarks/results/speed.md                       # the table again, of the raw results

Every row plays whole rounds (sampling, training, server) without evaluation and without checkpoints; the median of rounds after warm-up
counts. Rivals (benchmarks/rivals/) run as processes of their own; one that is not installed is listed as such. Raw results lie, one file
a section and device, in raw/ beside the table.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fedrts
from fedrts import config
from fedrts.errors import InputError, Note
from fedrts.observe import Silent
from fedrts.runs.build import federation
from fedrts.server.rounds import Record
from rivals import plain
from rivals.laps import Laps

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "speed.md"
Result = dict[str, Any]
QUIET = {"recipe": "paper", "eval": {"every": 10**9}, "checkpoint": {"every": 10**9}, "rounds": 500}
"""The first rounds of a long run are played: too few to be evaluated or saved."""
PAPER = {"data": "cifar10", "clients": {"total": 100, "per_round": 10}}


@dataclass(frozen=True)
class Row:
    """Who does the work, and how."""

    who: str
    """`serial`, `batched` and `auto` are our engines, `plain` is the plain loop, anything else a script in rivals/."""
    method: str = "fedavg"
    precision: str = "float32"
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """Some work, and who does it. Ratios are to the first row."""

    title: str
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]
    devices: tuple[str, ...] = ("cuda",)
    """On which it is measured unless asked for by name."""
    tokens: bool = False


def engines(*precisions: str, method: str = "fedavg") -> tuple[Row, ...]:
    return tuple(Row("batched", method, precision) for precision in precisions)


RESNET = (
    *(Row("plain", precision=precision) for precision in ("float32", "tf32", "bf16")),
    Row("serial"),
    *engines("float32", "tf32", "bf16"),
    *engines("float32", "tf32", "bf16", method="fedrts"),
)
SECTIONS = {
    "pfl": Section(
        "pfl-research's CIFAR-10 benchmark: 1000 users × 50 images, 50 a round, batches of 10, its CNN without dropout",
        {
            "data": "cifar10",
            "data_options": {"augment": False},
            "model": "rivals.nets:two_conv",
            "clients": {"total": 1000, "per_round": 50, "partition": "iid"},
            "train": {"epochs": 1, "batch_size": 10, "lr": 0.1},
        },
        (
            Row("pfl_cifar10"),
            Row("pfl_cifar10", arguments=("--dropout",)),
            Row("plain"),
            Row("serial"),
            *engines("float32", "tf32", "bf16"),
        ),
    ),
    "resnet18_small": Section(
        "resnet18_small on CIFAR-10: 10 of 100 clients, 5 epochs, batches of 64", {**PAPER, "model": "resnet18_small"}, RESNET
    ),
    "resnet18": Section(
        "resnet18 with the CIFAR stem on CIFAR-10: 10 of 100 clients, 5 epochs, batches of 64",
        {**PAPER, "model": "resnet18", "model_options": {"stem": "cifar"}},
        RESNET,
    ),
    "gpt2_32m": Section(
        "gpt2_32m on TinyStories: 10 of 20 clients, 1 epoch, batches of 16 stories",
        {"data": "tinystories", "model": "gpt2_32m", "clients": {"total": 20, "per_round": 10}, "train": {"epochs": 1}},
        (
            *(Row("plain", precision=precision) for precision in ("float32", "tf32", "bf16")),
            *engines("float32", "tf32", "bf16"),
            *engines("tf32", "bf16", method="fedrts"),
        ),
        tokens=True,
    ),
    "digits": Section(
        "The default experiment: an MLP on handwritten digits, 10 of 20 clients, 5 epochs, batches of 16",
        {"data": "digits"},
        (Row("plain"), Row("serial"), Row("batched"), Row("serial", "fedrts"), Row("batched", "fedrts"), Row("auto", "fedrts")),
        devices=("cpu",),
    ),
    "flower": Section(
        "Flower's simulation on Ray: an MLP on handwritten digits in 20 equal parts, 10 clients a round, 5 epochs, batches of 16",
        {"data": "digits", "clients": {"total": 20, "per_round": 10, "partition": "iid"}},
        (Row("flower_digits"), Row("plain"), Row("serial"), Row("batched"), Row("auto", "fedrts")),
        devices=("cpu",),
    ),
}


class Enough(Exception):  # noqa: N818
    """All rounds that were wanted are timed."""


class Stopwatch(Silent):
    """Takes the times of a run and ends it when there are enough."""

    def __init__(self, laps: Laps, sizes: list[int], epochs: int, batch_size: int) -> None:
        self.laps, self.label = laps, ""
        self.samples = [epochs * (size // batch_size * batch_size or size) for size in sizes]

    def started(self, experiment: config.Experiment, facts: dict[str, Any], first_round: int) -> None:
        self.label = facts["engine"]
        self.laps.start()

    def played(self, record: Record) -> None:
        if record.round >= 0 and self.laps.lap(sum(self.samples[client] for client in record.clients)):
            raise Enough


def ours(row: Row, settings: config.Tree, laps: Laps) -> Result:
    """Laps of one of our engines, through `fedrts.run`."""
    asked = config.resolve(settings, {"method": row.method, "device": laps.device})
    _, rows = federation(asked)
    watch = Stopwatch(laps, [len(part) for part in rows], asked.train.epochs, asked.train.batch_size)
    engine = {"name": row.who, "precision": row.precision}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", Note)
        with contextlib.suppress(Enough):
            fedrts.run(out=f"{folder}/run", observer=watch, engine=engine, device=laps.device, method=row.method, **settings)
    remarks = [str(warning.message) for warning in caught if issubclass(warning.category, Note)]
    return {**laps.result(), "who": f"fedrts, {watch.label}", "remarks": remarks}


def rival(row: Row, device: str, options: argparse.Namespace) -> Result:
    """What the script of a rival says."""
    interpreter = dict(entry.split("=", 1) for entry in options.python).get(row.who.partition("_")[0], sys.executable)
    command = [interpreter, str(HERE / "rivals" / f"{row.who}.py"), "--device", device, "--seconds", str(options.seconds), *row.arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"error": f"{row.who}.py ended with {done.returncode}: {last}"}
    return dict(json.loads(lines[-1]))


def measured(row: Row, section: Section, device: str, options: argparse.Namespace) -> Result:
    """One row; whatever goes wrong with it is its result."""
    if device.startswith("cuda"):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    settings = config.merged(QUIET, section.settings)
    eager = row.who in ("plain", "serial")
    laps = Laps(device, warm_up=1 if eager else 3, least=3 if eager else 5, seconds=options.seconds)
    try:
        if row.who == "plain":
            found: Result = {"who": "plain loop", **plain.timed({**settings, "method": row.method}, row.precision, laps)}
        elif row.who in ("serial", "batched", "auto"):
            found = ours(row, settings, laps)
        else:
            found = rival(row, device, options)
    except (RuntimeError, OSError, InputError, subprocess.TimeoutExpired) as error:
        found = {"error": str(error).partition("\n")[0]}
    torch.backends.cudnn.benchmark = False  # the streamed kernel turns it on
    return {"who": row.who, "method": row.method, "precision": row.precision, **found}


def hardware(device: str) -> str:
    if device.startswith("cuda"):
        return f"one {torch.cuda.get_device_name(device)}"
    return f"{os.cpu_count()} cores of a shared {platform.machine()} machine"


def tokens_a_sample(section: Section) -> int:
    if not section.tokens:
        return 1
    held, _ = federation(config.resolve(config.merged(QUIET, section.settings)))
    return int(held.input_shape[0])


def measure(name: str, device: str, options: argparse.Namespace) -> Result:
    """A section's results; written after every row, so that nothing is lost."""
    section = SECTIONS[name]
    file = options.out.parent / "raw" / f"speed_{name}_{device.partition(':')[0]}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    result: Result = {
        "section": name,
        "title": section.title,
        "hardware": hardware(device),
        "versions": f"fedrts {fedrts.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "command": f"python benchmarks/speed.py --only {name} --device {device} --seconds {options.seconds:g} --repeat {options.repeat}",
        "unit": "tokens" if section.tokens else "samples",
        "rows": [],
    }
    try:
        result["per_sample"] = tokens_a_sample(section)
    except InputError as error:
        return {**result, "rows": [{"who": name, "method": "", "precision": "", "error": str(error)}]}
    rows = [row for row in section.rows if device != "cpu" or row.precision == "float32"]
    found: list[list[Result]] = [[] for _ in rows]
    for turn in range(options.repeat):
        for row, mine in zip(rows, found, strict=True):
            print(f"{name}: {row.who} {row.method} {row.precision}, turn {turn + 1} of {options.repeat}", file=sys.stderr, flush=True)
            mine.append(measured(row, section, device, options))
            result["rows"] = [pooled(some) for some in found if some]
            file.write_text(json.dumps(result, indent=1) + "\n")
    return result


def pooled(turns: list[Result]) -> Result:
    """One result of all turns of a row; of the last one alone where it has no times."""
    timed = [turn for turn in turns if "times" in turn]
    if not timed or "times" not in turns[-1]:
        return turns[-1]
    times, samples = ([value for turn in timed for value in turn[name]] for name in ("times", "samples"))
    return {**turns[-1], **Laps.summed_up(times, samples), "device_memory": turns[-1]["device_memory"]}


def table(result: Result) -> Iterator[str]:
    """A section as Markdown."""
    unit, factor = result["unit"], result.get("per_sample", 1)
    yield f"\n## {result['title']}\n\nOn {result['hardware']}; {result['versions']}. `{result['command']}`\n"
    yield f"| who | method | precision | {unit}/s, median | × first row | {unit}/s, mean | ms a round | device memory | rounds timed |"
    yield "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    first = result["rows"][0].get("samples_per_second") if result["rows"] else None
    for row in result["rows"]:
        start = f"| {row['who']} | {row['method']} | {row['precision']} |"
        if "samples_per_second" not in row:
            yield f"{start} {row.get('missing') or row.get('error')} | – | – | – | – | – |"
            continue
        speed, memory = row["samples_per_second"], row["device_memory"]
        ratio = f"{speed / first:.2f}" if first else "–"
        held = f"{memory / 2**20:,.0f} MiB" if memory else "–"
        both = f"{speed * factor:,.0f} | {ratio} | {row['mean_samples_per_second'] * factor:,.0f}"
        yield f"{start} {both} | {row['round_seconds'] * 1e3:,.1f} | {held} | {row['rounds']} |"
    remarks = {remark for row in result["rows"] for remark in row.get("remarks", [])}
    yield from [f"\nNote: {remark}." for remark in sorted(remarks)]


INTRODUCTION = """# Speed

`python benchmarks/speed.py`: the same work each: whole rounds of sampling, local training and server update, end to end, without
evaluation and without checkpoints on every side. Numbers are medians over rounds after warm-up; raw times are in `raw/speed_*.json`.
Samples count as often as they are trained on. Device memory is what the allocator of PyTorch reserved at most, data included. The plain
loop (`rivals/plain.py`) is FedAvg; FedRTS also probes gradients, draws and re-wires in every
tenth round, which the mean shows and the median does not. Ratios compare rows of one table only. On the two cores other work went on
at a lower priority."""


def render(out: Path) -> str:
    """The whole document, of all raw results beside it."""
    known = [json.loads(file.read_text()) for file in sorted((out.parent / "raw").glob("speed_*.json"))]
    order = list(SECTIONS)
    known.sort(key=lambda result: (order.index(result["section"]) if result["section"] in order else len(order), result["hardware"]))
    return "\n".join([INTRODUCTION, *(line for result in known for line in table(result))]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=SECTIONS, default=[], help="a section; may be repeated")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data-dir", help="folder of data sets (default: FEDRTS_DATA)")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long the rounds of a row are timed")
    parser.add_argument("--repeat", type=int, default=1, help="turns that the rows of a section take: more for a noisy machine")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a rival may take")
    parser.add_argument("--python", action="append", default=[], metavar="RIVAL=PATH", help="interpreter of pfl or flower; may be repeated")
    parser.add_argument("--out", type=Path, help="Markdown file to write; raw results go to raw/ beside it")
    parser.add_argument("--render", action="store_true", help="measure nothing, write the table of the raw results again")
    options = parser.parse_args()
    if options.data_dir:
        os.environ["FEDRTS_DATA"] = options.data_dir
    kind = options.device.partition(":")[0]
    names = options.only or [name for name, section in SECTIONS.items() if kind in section.devices]
    with tempfile.TemporaryDirectory() as scratch:
        written, options.out = options.out, options.out or Path(scratch, "speed.md")
        if not options.render:
            for name in names:
                print("\n".join(table(measure(name, options.device, options))), flush=True)
        if written or options.render:
            written = written or RESULTS
            written.write_text(render(written))


if __name__ == "__main__":
    main()

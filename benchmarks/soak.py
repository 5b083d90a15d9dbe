"""A federation that is given a bad time: nodes and server killed at random, the network cut, one node up and down all the time.

    python benchmarks/soak.py                                     # as `make test-all` plays it: 200 rounds, ten nodes
    python benchmarks/soak.py --rounds 2000 --kills 200           # longer
    python benchmarks/soak.py --minutes 600                       # one federation after the other, each with the next seed

Afterwards the final model must be, bit for bit, that of a serial replay of the history's `clients`; memory and file descriptors of every
process flat; the audit logs whole; and the metrics, read throughout, those of the history. Exit code 1 names what does not hold.
Writes FILE.md and FILE.json (`--out`); benchmarks/results/soak.md is one such run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

import fedrts
from fedrts.testing.soak import Generation, Ordeal, Soaked, soaked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Ordeal):
        kind = float if isinstance(field.default, float) else int
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default, help=f"default {field.default}")
    parser.add_argument("--minutes", type=float, default=0.0, help="go on with the next seed until so much time is over")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep run folders and logs here; default: a folder that is removed")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write FILE.md and FILE.json")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and nothing is left running
    settings = {field.name: getattr(options, field.name) for field in fields(Ordeal)}
    began, done = time.monotonic(), list[Soaked]()
    while not done or time.monotonic() - began < 60 * options.minutes:
        with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
            folder = Path(temporary) if options.keep is None else options.keep / f"seed-{settings['seed']}"
            folder.mkdir(parents=True, exist_ok=True)
            done.append(soaked(folder, Ordeal(**settings), lambda text: print(text, file=sys.stderr, flush=True)))
        settings["seed"] += 1
        print("\n".join(table(done[-1])), flush=True)
        if done[-1].faults:
            break
    if options.out is not None:
        options.out.with_suffix(".md").write_text(document(done), "utf-8")
        options.out.with_suffix(".json").write_text(json.dumps([figures(one) for one in done], indent=1) + "\n", "utf-8")
    for fault in done[-1].faults:
        print(f"does not hold: {fault}", file=sys.stderr)
    sys.exit(bool(done[-1].faults))


def grown(generations: list[Generation]) -> dict[str, Any]:
    """How much the processes of a role grew: the oldest, and the worst of those that lived long enough to tell."""
    long = [one for one in generations if one.observed >= 60]
    oldest = max(generations, key=lambda one: one.observed)
    return {
        "processes": len(generations),
        "long enough": len(long),
        "oldest_s": round(oldest.observed),
        "peak_mb": round(max(max(one.memory, default=0.0) for one in generations), 1),
        "oldest_mb_per_minute": round(oldest.slope(oldest.memory), 3),
        "worst_mb_per_minute": round(max((one.slope(one.memory) for one in long), default=0.0), 3),
        "minutes_and_mb_per_minute": sorted([round(one.observed / 60, 1), round(one.slope(one.memory), 3)] for one in long),
        "oldest_mb": [round(megabytes, 1) for megabytes in oldest.memory[::30]],
        "most_descriptors": max(max(one.descriptors, default=0) for one in generations),
        "worst_descriptors_per_minute": round(max((one.slope([float(n) for n in one.descriptors]) for one in long), default=0.0), 3),
    }


def figures(one: Soaked) -> dict[str, Any]:
    """All of it, for programs."""
    roles = sorted({generation.role.partition(" ")[0] for generation in one.generations})
    by_role = {role: grown([generation for generation in one.generations if generation.role.startswith(role)]) for role in roles}
    counts = {name: dict(value) for name, value in vars(one).items() if isinstance(value, Counter)}
    told = {
        name: value for name, value in vars(one).items() if isinstance(value, int | float | list) and name not in ("generations", "load")
    }
    load = [round(found, 1) for found in (min(one.load), sum(one.load) / len(one.load), max(one.load))] if one.load else []
    return {"settings": asdict(one.settings), "load": load, **told, **counts, "growth": by_role}


def table(one: Soaked) -> list[str]:
    found, settings = figures(one), one.settings
    scraped = one.scraped
    rows = [
        ("rounds, nodes, seed", f"{settings.rounds}, {settings.nodes}, {settings.seed}"),
        ("minutes", f"{one.seconds / 60:.1f}"),
        ("load of the machine: least, mean, most", ", ".join(f"{load:g}" for load in found["load"])),
        ("SIGKILLs of nodes", one.kills["node"]),
        ("SIGKILLs of the server", one.kills["server"]),
        ("times the flapping node went down", one.flaps),
        *((f"network cut: {kind}", count) for kind, count in sorted(one.cuts.items())),
        *((f"replies missing: {reason}", count) for reason, count in sorted(one.missing.items())),
        ("scrapes answered, of processes that were up", f"{scraped['answered']:,} of {scraped['answered'] + scraped['unanswered']:,}"),
        ("rounds whose counters agree with the history", one.counted),
        ("lines of audit logs that hang together", f"{one.audited:,}"),
        ("messages that node and server log alike", f"{one.agreed:,}"),
        ("does not hold", "; ".join(one.faults) or "nothing"),
    ]
    lines = ["| | |", "| --- | ---: |", *(f"| {name} | {value} |" for name, value in rows), ""]
    titles = ["process", "started", "watched (s)", "peak (MB)", "MB a minute", "worst", "descriptors", "more a minute"]
    lines += ["| " + " | ".join(titles) + " |", "| --- |" + " ---: |" * (len(titles) - 1)]
    for role, growth in found["growth"].items():
        cells = ["processes", "oldest_s", "peak_mb", "oldest_mb_per_minute", "worst_mb_per_minute", "most_descriptors"]
        lines.append(f"| {role} | " + " | ".join(f"{growth[cell]}" for cell in (*cells, "worst_descriptors_per_minute")) + " |")
    return [*lines, ""]


def document(done: list[Soaked]) -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    head = f"""# A federation that is given a bad time

`python benchmarks/soak.py {shlex.join(sys.argv[1:])}`
on {cores} cores of a shared virtual machine ({platform.machine()}, {platform.system()}), fedrts {fedrts.__version__},
torch {torch.__version__}.

Server and nodes are killed with SIGKILL in rounds and after pauses drawn by the seed, and started again within three seconds. The network
is cut for one to ten seconds, for one node at a time. One more node goes down every dozen seconds, by SIGKILL or SIGTERM, and comes back.
Then the final model and masks are, bit for bit, those of a serial replay of the history's `clients`; `fedrts audit verify` and
`fedrts audit compare` pass for server and nodes; and the counters of `/metrics`, read every second, are sums over the history's lines.

"Watched" is the oldest process, once it is warm; "MB a minute" is the slope of its resident memory (least squares), and
"worst" the steepest one of all processes that were watched for a minute or more. No process may grow by more than
{done[0].settings.memory_slope:g} MB a minute, taken over at least five minutes: memory of a flat one comes and goes by a megabyte.

"""
    return head + "\n".join(line for one in done for line in table(one))


if __name__ == "__main__":
    main()

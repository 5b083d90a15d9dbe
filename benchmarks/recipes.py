"""What supports the tuned recipe: learning rates on choosing seeds, and both recipes on reporting seeds.

    python benchmarks/recipes.py rates      # seeds 200 to 202: the tuned recipe with each rate
    python benchmarks/recipes.py parts      # seeds 200 to 202: the tuned recipe without each of its parts
    python benchmarks/recipes.py bits       # seeds 200 to 204: the tuned recipe with each value type
    python benchmarks/recipes.py compare    # seeds 0 to 4: both recipes as they are
    python benchmarks/recipes.py average    # what the average of late models takes of a round

Prints Markdown tables; benchmarks/results/recipes.md is one run of each. The last ten rounds count, on the test set; of language also
the perplexity of the last model. All runs are of the default method, on the CPU.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import fedrts
from fedrts import config
from fedrts.runs.build import assemble
from fedrts.server import rounds as loop
from fedrts.server.averaging import LateAverage

CHOOSING, REPORTING = (200, 201, 202), (0, 1, 2, 3, 4)
PROBLEMS: dict[str, dict[str, Any]] = {
    "digits, mlp, density 0.2": {"data": "digits"},
    "digits, mlp, density 0.05": {"data": "digits", "density": 0.05},
    "digits, cnn, density 0.2": {"data": "digits", "model": "cnn"},
    "sentences, tiny_gpt, density 0.2": {"data": "sentences"},
}
RATES = {"digits, mlp": (0.3, 0.5, 0.8, 1.2, 1.8), "digits, cnn": (0.5, 0.8, 1.2, 1.8, 2.7), "sentences": (0.2, 0.3, 0.45, 0.6, 0.8, 1.0)}
PARTS: dict[str, dict[str, Any]] = {
    "the tuned recipe": {},
    "the dense model's first weights": {"topology": {"init_scale": "dense"}},
    "a constant rate": {"train": {"schedule": "constant"}},
    "float32": {"wire": {"value_type": "float32"}},
}
BITS = (("float32", None), ("int8", None), ("int6", None), ("int4", None), ("int4", "int8"), ("int2", None), ("int2", "int8"))
"""Value types, and those of downloads alone."""
Summary = dict[str, Any]


def played(seeds: Sequence[int], settings: dict[str, Any]) -> list[Summary] | None:
    """The summaries of a run for each seed; None where one diverges."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return [fedrts.run(**settings, device="cpu", seed=seed, out=f"{folder}/{seed}").summary for seed in seeds]
        except fedrts.InputError:  # too few replies were finite
            return None


def row(words: Sequence[str], found: list[Summary] | None) -> str:
    """Accuracy, perplexity, accuracy of the average of late models, MB and seconds."""
    if found is None:
        return f"| {' | '.join(words)} | diverges | | | | |"

    def mean(key: str, form: str) -> str:
        values = [summary[key] for summary in found if summary.get(key) is not None]
        if not values:
            return ""
        error = statistics.stdev(values) / len(values) ** 0.5
        return f"{statistics.mean(values):{form}} ± {error:{form}}"

    sent = statistics.mean(summary["upload_bytes"] + summary["download_bytes"] for summary in found) / 1e6
    seconds = statistics.mean(summary["seconds"] for summary in found)
    cells = [mean("accuracy_last10", ".4f"), mean("perplexity", ".3f"), mean("average_accuracy", ".4f"), f"{sent:.1f}", f"{seconds:.1f}"]
    return f"| {' | '.join([*words, *cells])} |"


def heading(*words: str) -> str:
    columns = [*words, "accuracy", "perplexity", "average of late models", "MB", "s"]
    return f"| {' | '.join(columns)} |\n{'| --- ' * len(columns)}|"


def rates() -> Iterable[str]:
    """A table of rates for every problem."""
    yield heading("problem", "rate")
    for name, settings in PROBLEMS.items():
        for rate in next(values for kind, values in RATES.items() if name.startswith(kind)):
            yield row([name, f"{rate:g}"], played(CHOOSING, {**settings, "lr": rate}))


def parts() -> Iterable[str]:
    """What each part of the recipe does."""
    yield heading("problem", "with")
    for name, settings in PROBLEMS.items():
        for words, changed in PARTS.items():
            yield row([name, words], played(CHOOSING, {**settings, **changed}))


def bits() -> Iterable[str]:
    """What fewer bits cost in as many rounds at the same density."""
    yield heading("problem", "values")
    for name, settings in PROBLEMS.items():
        for value_type, down in BITS:
            wire = {"value_type": value_type} | ({} if down is None else {"download_type": down})
            words = value_type if down is None else f"{value_type}, downloads {down}"
            yield row([name, words], played((*CHOOSING, 203, 204), {**settings, "wire": wire}))


def compare() -> Iterable[str]:
    """Both recipes on seeds by which nothing was chosen."""
    yield heading("problem", "recipe")
    for name, settings in PROBLEMS.items():
        for recipe in ("paper", "tuned"):
            yield row([name, recipe], played(REPORTING, {**settings, "recipe": recipe}))


def average() -> Iterable[str]:
    """Seconds of entering a model into the average, over those of the whole round that made it."""
    yield "| problem | ms of a round | ms of the average | share |\n| --- | ---: | ---: | ---: |"
    for name, settings in PROBLEMS.items():
        run = assemble(config.resolve({**config.from_keywords(settings), "device": "cpu", "eval": {"every": 10**6}}))
        state, plan = run.method.begin(run.setup), replace(run.plan, rounds=10**6)
        late = LateAverage("ema")
        rounds, entering = [], []
        for index in range(12):
            started = time.perf_counter()
            after = loop.play_round(plan, state, index).state
            made = time.perf_counter()
            state = late.enter(state, after, index)
            rounds.append(made - started)
            entering.append(time.perf_counter() - made)
        whole, part = (1e3 * statistics.median(times[2:]) for times in (rounds, entering))
        yield f"| {name} | {whole:.1f} | {part:.3f} | {part / whole:.2%} |"


def main() -> None:
    tables = {"rates": rates, "parts": parts, "bits": bits, "compare": compare, "average": average}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=tables)
    for line in tables[parser.parse_args().table]():
        print(line, flush=True)


if __name__ == "__main__":
    main()

"""A regret study as words, tables and files."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import fedrts
from fedrts.bandit.study import Study
from fedrts.errors import InputError, note, optional
from fedrts.files import csv_text, require_plain, write_atomically


def read_means(path: Path) -> tuple[float, ...]:
    """Read means from a text file: numbers in [0, 1], one per line."""
    require_plain(path)
    try:
        means = tuple(float(line) for line in path.read_text("utf-8").split())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read means from '{path}': {getattr(error, 'strerror', None) or error}") from error
    if not means:
        raise InputError(f"'{path}' holds no means: write numbers in [0, 1] into it, one a line")
    if not all(0 <= mean <= 1 for mean in means):
        raise InputError(f"'{path}' holds a mean outside [0, 1]")
    return means


def words(found: Study) -> list[str]:
    """Say in plain sentences what the theorem states about this bandit."""
    theorem, steps = found.bound, found.settings.steps
    if np.isnan(theorem.epsilon):
        lines = [
            "The theorem's bound does not exist here: two of the best arms, or one of them and another, are equally good. It is vacuous."
        ]
    elif found.settings.epsilon and np.isinf(theorem.logarithmic):
        lines = ["The theorem's bound does not exist here: ε is not below every Δ_{s,k}/(2LK). It is vacuous."]
    elif not np.isfinite(theorem.after(steps)):
        lines = [f"The theorem's bound has 1/ε⁶ in it, and with ε = {theorem.epsilon:.3g} no number is as large. It is vacuous."]
    else:
        lines = [
            f"The theorem (U = {found.settings.universal:g}, L = {found.settings.lipschitz:g}, ε = {theorem.epsilon:.3g}): "
            f"Reg({steps:,}) ≤ {theorem.logarithmic:.4g} · log T + {theorem.constant:.4g} = {theorem.after(steps):.4g}."
        ]
        trivial = f"T · Δ_max = {theorem.trivial(steps):.4g}, which holds for any policy"
        if theorem.vacuous(steps):
            power = theorem.speaks_from()
            when = f"something from about 10^{power:g} steps on" if np.isfinite(power) else "nothing before 10^308 steps"
            lines.append(f"That is vacuous: it is above {trivial}. It says {when}.")
        else:
            lines.append(f"That is below {trivial}.")
    if found.slope is not None:
        lines.append(f"No policy can grow more slowly than {found.slope:.4g} · log T in the long run (Bernoulli arms, linear reward).")
    return lines


def rows(found: Study, brief: bool = False) -> list[dict[str, str]]:
    """Return one row per policy, as text; `brief` fits 80 columns."""
    result = []
    for name, curve in found.curves.items():
        shown = {f"R² {law}": f"{fit.r2:.3f}" for law, fit in curve.fits.items()}
        shown |= {} if brief else {"doubling": f"{curve.doubling:.2f}", "per log t": f"{curve.fits['log t'].slope:,.0f}"}
        if curve.law == "stopped":
            shown = dict.fromkeys(shown, "–")
        result.append({"policy": name, "regret": f"{curve.mean[-1]:,.0f} ± {curve.error[-1]:,.0f}", "grows like": curve.law, **shown})
    return result


def write(found: Study, folder: Path) -> list[Path]:
    """Write regret.csv, regret.md, regret.json and, if matplotlib is installed, regret.png."""
    check_out(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "regret.csv": _csv(found),
        "regret.md": _markdown(found),
        "regret.json": json.dumps({**found.summary(), "version": fedrts.__version__}, indent=2) + "\n",
    }
    content = {name: text.encode() for name, text in files.items()}
    try:
        content["regret.png"] = _png(found)
    except InputError as error:
        note(f"no regret.png: {error}")
    for name, data in content.items():
        write_atomically(folder / name, data)
    return [folder / name for name in content]


def check_out(folder: Path) -> None:
    """Check that the folder can take a study, before hours are spent on one."""
    if (folder / "regret.json").exists():
        raise InputError(f"{folder} holds a regret study already: choose another --out")
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise InputError(f"cannot write to {folder}: {there} is {'not writable' if there.is_dir() else 'a file'}; choose another --out")


def _csv(found: Study) -> str:
    lines = (
        [name, int(step), f"{m:.6g}", f"{e:.6g}"]
        for name, curve in found.curves.items()
        for step, m, e in zip(found.at, curve.mean, curve.error, strict=True)
    )
    return csv_text([["policy", "step", "regret", "standard_error"], *lines])


def _markdown(found: Study) -> str:
    s = found.settings
    table = [list(rows(found)[0]), *[list(row.values()) for row in rows(found)]]
    table.insert(1, ["---"] * len(table[0]))
    means = f"means {s.gap:g} apart between the best {s.pick} and the others" if s.means is None else "means of the user"
    lines = [
        "# Regret",
        "",
        f"{s.arms:,} independent arms, {s.pick} played a step, {s.steps:,} steps, {s.repetitions} repetitions, {means}, "
        f"reward `{s.reward}`, an outcome the mean of {s.clients} Bernoulli draw{'s' * (s.clients > 1)}. Only arms played are observed. "
        f"Seed {s.seed}, fedrts {fedrts.__version__}, {found.seconds:.1f} s.",
        "",
        *["| " + " | ".join(row) + " |" for row in table],
        "",
        "Regret is the mean over repetitions ± its standard error. "
        f"Laws a + b·g(t) are fitted by least squares to the mean regret from step {found.fit_from:,} on, at points even in log t. "
        "Doubling: regret of the last doubling of time over that of the one before; log t gives 1, √t 1.41, t 2.",
        "",
        *words(found),
    ]
    return "\n".join(lines) + "\n"


def _png(found: Study) -> bytes:
    """Plot regret over steps with a logarithmic step axis, where log T is a straight line; and with both axes logarithmic."""
    optional("matplotlib", "plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    styles: Sequence[str] = ("-", "--", "-.", ":", (0, (1, 1, 4, 1)))  # type: ignore[assignment]
    for column, scale in ((1, "linear"), (2, "log")):
        axes = figure.add_subplot(1, 2, column)
        top = max(float(curve.mean[-1]) for name, curve in found.curves.items() if name != "random")
        for number, (name, curve) in enumerate(found.curves.items()):
            (line,) = axes.plot(found.at, curve.mean, linestyle=styles[number % len(styles)], label=name)
            axes.fill_between(found.at, curve.mean - curve.error, curve.mean + curve.error, alpha=0.25, color=line.get_color(), linewidth=0)
        axes.set(xscale="log", yscale=scale, xlabel="step t", ylabel="cumulative regret", title=f"{scale} regret")
        if scale == "linear":
            axes.set_ylim(0, 1.1 * top)
        axes.legend(fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()

"""Whether clients use the sparse kernel (`engine.kernel = "sparse"`), and on which instruction set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from fedrts import trees
from fedrts.client.workbench import Workbench
from fedrts.data.contract import Data
from fedrts.engines.kinds import kind
from fedrts.engines.obstacles import sample
from fedrts.engines.settings import EngineSettings, IsaName
from fedrts.errors import InputError, note
from fedrts.programs import library
from fedrts.programs.library import NoKernelsError
from fedrts.programs.parts import UnknownPartError
from fedrts.programs.program import LinkProgram
from fedrts.trees import Tensors

if TYPE_CHECKING:
    from fedrts.config import Experiment

WORTH = {"portable": 0.0, "avx2": 0.15, "avx512": 0.3}
"""Densities up to which `auto` takes these kernels, by instruction set (benchmarks/felt.py)."""
LARGE = 2_000_000
"""Links from which on only half of that density pays: resnet18 gains nothing at 0.2."""


def resolved(asked: EngineSettings, experiment: Experiment, bench: Workbench) -> EngineSettings:
    """`asked` with the sparse kernel decided: taken with its instruction set, or left for dense ones, and a note says why.

    Who names an instruction set, as the folder of a run does, gets that one or an `InputError`.
    """
    if asked.kernel == "sparse":
        return required(asked, bench)
    if asked.kernel != "auto" or asked.isa != "auto" or not worth_a_look(asked, experiment, bench):
        return asked
    try:
        isa = best_isa()
    except NoKernelsError as error:
        if library.installed():
            note(f"clients compute densely: {error}")
        return asked
    worth = WORTH[isa] / (2 if bench.layout.links > LARGE else 1)
    if density(experiment) > worth or reason_against(bench, isa) is not None:
        return asked
    return asked.but(kernel="sparse", isa=isa)


def worth_a_look(asked: EngineSettings, experiment: Experiment, bench: Workbench) -> bool:
    """Whether `auto` may use the sparse kernel at all."""
    return kind(asked.name).chooses and bench.device.type == "cpu" and density(experiment) <= max(WORTH.values())


def density(experiment: Experiment) -> float:
    """Return the largest share of links that clients will have."""
    return max(experiment.density, experiment.topology.density_start or 0.0)


def best_isa() -> IsaName:
    """Return the best instruction set of this machine; raise `NoKernelsError` without a library."""
    return cast(IsaName, library.kernels().isas[-1])


def required(asked: EngineSettings, bench: Workbench) -> EngineSettings:
    """Return the settings for a sparse kernel that the user requires."""
    dense = asked.but(kernel="auto", isa="auto")
    if bench.device.type != "cpu":
        note(f"clients compute densely: engine.kernel = 'sparse' is for CPUs, and they train on {bench.device}")
        return dense
    try:
        isas = library.kernels().isas
    except NoKernelsError as error:
        if asked.isa != "auto":
            raise InputError(f"engine.kernel = 'sparse' on {asked.isa}: {error}") from error
        note(f"clients compute densely: {error}")
        return dense
    if asked.isa != "auto" and asked.isa not in isas:
        raise InputError(f"engine.isa = '{asked.isa}': this processor has {', '.join(isas)}; choose one of them in a new run")
    isa = asked.isa if asked.isa != "auto" else best_isa()
    if (reason := reason_against(bench, isa)) is not None:
        note(f"clients compute densely: the sparse kernel does not know {reason}")
        return dense
    return asked.but(isa=isa)


def possible(bench: Workbench) -> IsaName | None:
    """Return the instruction set on which a bench's clients can use the sparse kernel; None: on none."""
    try:
        isa = best_isa()
    except NoKernelsError:
        return None
    return isa if bench.device.type == "cpu" and reason_against(bench, isa) is None else None


def elsewhere(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the part of a server's `[engine]` that a node follows: the sparse kernel, on the server's instruction set if possible."""
    if settings.get("kernel") != "sparse":
        return {}
    try:
        there = settings.get("isa") in library.kernels().isas
    except NoKernelsError:
        there = False
    return {"kernel": "sparse", **({"isa": str(settings["isa"])} if there else {})}


def reason_against(bench: Workbench, isa: str) -> str | None:
    """Return the part of the model or task that the kernels do not support; None: they support all."""
    try:
        read(bench, isa)
    except UnknownPartError as error:
        return str(error)
    return None


def read(bench: Workbench, isa: str) -> LinkProgram:
    """Read the program of a bench's model."""
    if bench.data.apart is not None:
        raise UnknownPartError(f"such data: {bench.data.apart}")
    _, x, y = sample(bench)
    _check_rows(bench.data, x)
    return LinkProgram.read(bench.module, bench.layout, bench.data.task, x, y, isa)


def _check_rows(data: Data, x: Tensors) -> None:
    """Check what a sample does not show: labels that a loss ignores, and test inputs of another size."""
    if data.labels is not None and len(data.labels) and int(data.labels.min()) < 0:
        raise UnknownPartError("labels below 0")
    for rows in (data.test_x, data.valid_x):
        if rows is not None and isinstance(x, Tensor) and trees.count(rows):
            there = data.inputs(trees.at(rows, slice(0, 1)))
            if isinstance(there, Tensor) and there.shape[1:] != x.shape[1:]:
                raise UnknownPartError(f"inputs of two sizes, {list(x.shape[1:])} and {list(there.shape[1:])}")


def program_of(settings: EngineSettings, bench: Workbench) -> LinkProgram | None:
    """Return the program that decided settings ask for; None: dense kernels."""
    return read(bench, settings.isa) if settings.kernel == "sparse" else None


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

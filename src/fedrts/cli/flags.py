"""Flags that stand for keys of an experiment. Each is declared once, and every command that takes flags passes them all on.

Importing the keys with their types and meanings takes seconds, so flags repeat both; tests/unit/test_flags.py checks that they agree.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fedrts.config import Tree


@dataclass(frozen=True)
class Flag:
    """A flag with the name, type and description of its key. A flag that is left out leaves the key's default."""

    key: str
    type: type[Any]
    help: str
    metavar: str | None = None

    @property
    def parameter(self) -> Any:
        """The annotation of this flag in a command's signature."""
        return Annotated[self.type | None, typer.Option(metavar=self.metavar, help=self.help)]


FLAGS = {
    "method": Flag("method", str, "A name from `fedrts methods`."),
    "data": Flag(
        "data", str, "A name from `fedrts data`, folder:PATH, npz:PATH, csv:FILE, parquet:FILE, or an import path pkg.module:name."
    ),
    "model": Flag("model", str, "A name from `fedrts models`, hf:FOLDER (transformers), an import path, or auto (fits the data)."),
    "density": Flag("density", float, "Share of all parameters that stay active (d')."),
    "rounds": Flag("rounds", int, "Rounds of training (T_max)."),
    "clients": Flag("clients.total", int, "Clients in the federation."),
    "per_round": Flag("clients.per_round", int, "Clients that take part in each round."),
    "partition": Flag(
        "clients.partition", str, "dirichlet (skewed labels), quantity (skewed sizes), iid, shards (few labels), sites (own data)."
    ),
    "alpha": Flag("clients.alpha", float, "Dirichlet concentration: lower is more heterogeneous."),
    "epochs": Flag("train.epochs", int, "Passes over the local data in a round."),
    "batch_size": Flag("train.batch_size", int, "Samples per step."),
    "lr": Flag("train.lr", float, "Learning rate in the first round."),
    "recipe": Flag(
        "recipe",
        str,
        "Defaults for what you do not set: tuned (measured for this data and model) or paper (the published setting).",
        "tuned|paper",
    ),
    "seed": Flag("seed", int, "Seed for all randomness."),
    "engine": Flag(
        "engine.name",
        str,
        "serial: one client at a time; batched: clients side by side; flower: on nodes; ray: on actors; auto: the faster one.",
    ),
    "device": Flag("device", str, "auto, cpu, cuda or cuda:N."),
    "precision": Flag("engine.precision", str, "Precision of training: float32, tf32 or bf16 (both on GPUs; weights stay float32)."),
    "value_type": Flag(
        "wire.value_type", str, "How values travel: float32 (lossless), float16, or int8, int6, int4, int2 (unbiased rounding), both ways."
    ),
    "init": Flag("init", Path, "Safetensors file of initial weights; default: random weights.", "FILE"),
    "out": Flag("out", Path, "Run folder; default: runs/<time>-<data>-<method>-<seed>."),
}


@dataclass(frozen=True)
class Given:
    """The settings that a command line gives for an experiment."""

    flags: Mapping[str, Any]
    """By name, those that were given."""
    assignments: Sequence[str]

    def layers(self, file: Path | None = None) -> list[Tree]:
        """Return the settings of the experiment file, the flags and `--set`, in that order; later layers win."""
        from fedrts import config

        values = {FLAGS[name].key: str(value) if isinstance(value, Path) else value for name, value in self.flags.items()}
        return [config.from_file(file) if file else {}, config.nested(values), config.from_assignments(self.assignments)]


Assignments = Annotated[list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Any other key; repeatable.")]


def takes(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command take these flags and `--set`; they replace its parameter `given`, which receives their values."""

    def declared(command: Callable[..., None]) -> Callable[..., None]:
        keyword = inspect.Parameter.KEYWORD_ONLY
        annotations = {name: FLAGS[name].parameter for name in names} | {"assignments": Assignments}
        flags = [inspect.Parameter(name, keyword, default=None, annotation=annotations[name]) for name in annotations]
        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [flag for entry in own for flag in (flags if entry.name == "given" else [entry.replace(kind=keyword)])]

        @functools.wraps(command)
        def called(*, assignments: list[str] | None, **values: Any) -> None:
            given = {name: value for name in names if (value := values.pop(name)) is not None}
            command(given=Given(given, assignments or []), **values)

        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return called

    return declared

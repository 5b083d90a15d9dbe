"""Flags that stand for keys: in the keys' own words and types, and none that is declared is ignored."""

import contextlib
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from fedrts import (
    cli,  # noqa: F401  # registers the commands
    config,
)
from fedrts.cli.app import app
from fedrts.cli.flags import FLAGS
from fedrts.tables import Table

OTHER = {
    "method": "random",
    "data": "sentences",
    "model": "cnn",
    "density": 0.3,
    "rounds": 60,
    "clients": 12,
    "per_round": 3,
    "partition": "iid",
    "alpha": 0.7,
    "epochs": 2,
    "batch_size": 8,
    "lr": 0.05,
    "recipe": "paper",
    "seed": 7,
    "engine": "serial",
    "device": "cpu",
    "precision": "bf16",
    "value_type": "float16",
    "init": "/start.safetensors",
    "out": "elsewhere",
}
"""A value of each flag that is not the key's default, nor that of the digits."""

NEEDED = {
    "run": [],
    "compare": ["--methods", "random", "--out", "compared", "--quiet"],
    "cost": [],
    "plan": ["--budget", "20MB"],
    "data show": ["digits"],
    "server": ["experiment.toml", "--insecure"],
}
"""What else the commands that take keys must be told."""

NO_KEYS = {("compare", "metric"), ("compare", "out"), ("data show", "out"), ("server", "out"), ("server", "address")}
NO_KEYS |= {("plan", "budget"), ("run", "budget"), ("compare", "budget"), ("plan", "per_round"), ("plan", "deadline")}
NO_KEYS |= {("run", "metrics"), ("server", "metrics")}
"""Options with the name of a key that mean something else: a comparison's metric and folder, a picture, a server's, budgets,
and where metrics can be read."""


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command by its words."""
    yield " ".join(path), command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


TAKING = {
    path: [parameter for parameter in command.params if parameter.param_type_name == "option"]
    for path, command in commands(typer.main.get_command(app))
    if any(parameter.name == "assignments" for parameter in command.params)
}
"""The options of each command that takes keys of an experiment: it has `--set`."""

SETTING = [(path, option.name) for path, options in TAKING.items() for option in options if option.name in FLAGS]
SETTING = [place for place in SETTING if place not in NO_KEYS]


class Resolved(Exception):
    """The experiment of a command, which ends there."""


@pytest.fixture
def resolved(tmp_path, monkeypatch):
    """The flat keys of the experiment that a command line means."""
    resolve = config.resolve

    def caught(*layers: config.Tree) -> None:
        raise Resolved(config.flat(resolve(*layers).model_dump()))

    def call(command: str, *arguments: str) -> dict[str, Any]:
        with pytest.raises(Resolved) as found:
            app([*command.split(), *NEEDED[command], *arguments], standalone_mode=False)
        return dict(found.value.args[0])

    monkeypatch.setattr(config, "resolve", caught)
    monkeypatch.setattr("fedrts.config.resolution._device", str)  # `auto` stays what it is
    monkeypatch.setattr("fedrts.cli.compare.as_interruption", lambda words: contextlib.nullcontext())
    monkeypatch.chdir(tmp_path)
    Path("experiment.toml").write_text("rounds = 50\n", "utf-8")
    return call


@pytest.mark.parametrize(("command", "name"), SETTING)
def test_a_flag_sets_its_key(resolved, command, name):
    key = FLAGS[name].key
    assert resolved(command)[key] != OTHER[name]
    assert resolved(command, f"--{name.replace('_', '-')}", str(OTHER[name]))[key] == OTHER[name]


@pytest.mark.parametrize("command", TAKING)
def test_an_assignment_sets_its_key_and_wins_over_a_flag(resolved, command):
    assert (
        resolved(
            command,
            "--set",
            "topology.interval=3",
        )["topology.interval"]
        == 3
    )
    if (command, "clients") in SETTING:
        assert resolved(command, "--set", "clients.total=13", "--clients", "12")["clients.total"] == 13


def test_every_flag_is_taken_by_a_command():
    assert {name for _, name in SETTING} == set(FLAGS) == set(OTHER)


def fields(kind: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of an experiment, with its declaration."""
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Table):
            yield from fields(field.annotation, f"{name}.")
        else:
            yield f"{prefix}{name}", field


KEYS = dict(fields(config.Experiment))


@pytest.mark.parametrize("command", TAKING)
def test_an_option_with_the_name_of_a_key_is_declared_once(command):
    """Its declaration is the one in the table: an option of a command's own would have to be handed on by hand, or be forgotten."""
    names = {key.rpartition(".")[2] for key in KEYS} | set(config.SHORT)
    for option in TAKING[command]:
        if option.name in names and (command, option.name) not in NO_KEYS:
            assert option.help == FLAGS[option.name].help


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_is_of_the_type_and_in_the_words_of_its_key(name):
    flag, field = FLAGS[name], KEYS[FLAGS[name].key]
    assert f"{field.description}.".lower() in flag.help.lower()
    assert flag.type in (plain(field.annotation), Path if name in ("init", "out") else None)


def plain(annotation: Any) -> Any:
    """The type of a key's values."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        (annotation,) = (part for part in arguments if part is not type(None))
        return plain(annotation)
    if origin is typing.Annotated:
        return plain(arguments[0])
    return type(arguments[0]) if origin is typing.Literal else annotation


def test_short_names_mean_the_same_in_python():
    assert {name: ".".join(key) for name, key in config.SHORT.items() if name in FLAGS} == {
        name: flag.key for name, flag in FLAGS.items() if name in config.SHORT
    }


@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_flag_leaves_the_engine_of_the_file(resolved, command):
    """`engine = "serial"` is short for a table: a flag for another key of it does not replace that table."""
    Path("experiment.toml").write_text('engine = "serial"\n', "utf-8")
    found = resolved(command, "experiment.toml", "--precision", "bf16")
    assert (found["engine.name"], found["engine.precision"]) == ("serial", "bf16")

"""Fill the generated parts of the documentation from the code: the methods' declarations, the experiment's keys, the commands, the badges.

    python docs/generate.py            # rewrite what is stale
    python docs/generate.py --check    # name what is stale and exit 1

A generated part stands between `<!-- generated: WHAT -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

sys.path.insert(0, str(Path(__file__).parent))
from wrap import wrapped

from fedrts import __version__, cli, config, data, methods
from fedrts.methods import describe
from fedrts.tables import Named
from fedrts.testing import accepted

FOLDER = Path(__file__).parent
PART = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->)", re.S)
SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}

Makers = dict[str, Callable[[], str]]


def pages() -> dict[str, Makers]:
    """What is generated on each page, by the name in its marker."""
    names = [name for name in methods.names() if name not in undocumented()]
    made: dict[str, Makers] = {"methods/README.md": {"table": lambda: describe.table(names)}}
    for name in names:
        made[f"methods/{name}.md"] = {
            "travels": lambda name=name: describe.travels(name),  # type: ignore[misc]
            "options": lambda name=name: describe.options(name),  # type: ignore[misc]
        }
    return (
        made
        | {"configuration.md": {"keys": keys}, "recipes.md": {"recipes": recipes}, "commands.md": {"commands": commands}}
        | {"python.md": {"accepted": lambda: markdown(accepted.table())}, "badges.svg": {"badges": badges}}
    )


def undocumented() -> list[str]:
    """Methods without a page: they are being written. Before a release all have one (`make test-all`)."""
    return [name for name in methods.names() if not (FOLDER / "methods" / f"{name}.md").exists()]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its heading."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    """Text for a table: no column ends in it, and what stands in angle brackets outside code is no HTML."""
    parts = text.replace("|", "\\|").split("`")
    return "`".join(part.replace("<", "&lt;") if number % 2 == 0 else part for number, part in enumerate(parts))


# -- the README's badges --------------------------------------------------------------------------------------------


def badges() -> str:
    """The badges of the README, drawn from the project's own files, so that `--check` notices one that is no longer true."""
    settings = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text("utf-8"))
    coverage = re.findall(r"--cov-fail-under=(\d+)", (FOLDER.parent / "Makefile").read_text("utf-8"))
    facts = [
        ("fedrts", __version__),
        ("Python", settings["project"]["requires-python"].replace(">=", "≥ ")),
        ("licence", settings["project"]["license"]),
        *([("types", "mypy --strict")] if settings["tool"]["mypy"]["strict"] else []),
        *[("coverage", f"≥ {floor} %") for floor in coverage],
    ]
    lines: list[str] = []
    left = 0
    for name, value in facts:
        split, right = left + 7 * len(name) + 10, left + 7 * (len(name) + len(value)) + 20
        for text, colour, start, end in ((name, "#555", left, split), (value, "#00796b", split, right)):
            lines.append(f'<rect x="{start}" width="{end - start}" height="20" fill="{colour}"/>')
            lines.append(f'<text x="{(start + end) / 2}" y="14">{text}</text>')
        left = right + 6
    return "\n".join(lines)


# -- the experiment's keys ------------------------------------------------------------------------------------------


def keys() -> str:
    """Every key of an experiment, table by table."""
    fields = config.Experiment.model_fields
    tables = {name: field.annotation for name, field in fields.items() if _is_table(field.annotation)}
    parts = [_section("Top level", "", config.Experiment, skip=set(tables))]
    parts += [_section(f"[{name}]", f"{name}.", kind) for name, kind in tables.items()]
    return "\n\n".join(parts)


def _section(title: str, prefix: str, kind: Any, skip: set[str] | None = None) -> str:
    rows = [["key", "type", "default", "meaning"]]
    for name, field in kind.model_fields.items():
        if name in (skip or ()):
            continue
        assert field.description, f"{prefix}{name} has no description"
        default = "" if field.default_factory is not None else _shown(field.default)
        rows.append([f"`{prefix}{name}`", _type(field), default, field.description])
    return f"### {title}\n\n{(kind.__doc__ or '').splitlines()[0]}\n\n{markdown(rows)}"


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _type(field: Any) -> str:
    """`int ≥ 1`, `a`, `b` or `c`, …"""
    if registry := next((mark.registry for mark in field.metadata if isinstance(mark, Named)), None):
        own = [name for name in registry.names() if registry.get(name).__module__.startswith("fedrts.")]  # others may be registered too
        return ", ".join(f"`{name}`" for name in own) + " or an import path"
    signs = [*_bounds(field.metadata), *(sign for part in typing.get_args(field.annotation) for sign in _bounds(_metadata(part)))]
    return " ".join([_name(field.annotation), " and ".join(signs)]).strip()


def _metadata(annotation: Any) -> list[Any]:
    return list(getattr(annotation, "__metadata__", ()))


def _bounds(metadata: Sequence[Any]) -> list[str]:
    return [f"{sign} {getattr(limit, key):g}" for limit in metadata for key, sign in SIGNS.items() if getattr(limit, key, None) is not None]


def _name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _name(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_name(part) for part in arguments if part is not type(None))
    if origin is list:
        return f"list of {_name(arguments[0])}"
    return {int: "int", float: "float", str: "text", bool: "bool"}.get(annotation, "table")


def _shown(default: object) -> str:
    return "" if default is None else f"`{str(default).lower()}`" if isinstance(default, bool) else f"`{default}`"


def recipes() -> str:
    """What the data sets change in the built-in defaults: in both recipes, and in the tuned one for a model."""
    names = [name for name in data.names() if data.data.get(name).__module__.startswith("fedrts.data.")]  # others may be registered too
    settings = {name: {"model": data.recipe(name).model, **config.flat(data.recipe(name).settings)} for name in names}
    rows = [["data", "both recipes", "tuned"]]
    for name, own in settings.items():
        tuned = [f"{model}: {_listed(config.flat(more))}" for model, more in data.recipe(name).tuned.items()]
        rows.append([f"`{name}`", _listed(own), "; ".join(tuned)])
    return markdown(rows)


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"`{key} = {value}`" for key, value in settings.items())


# -- the commands ---------------------------------------------------------------------------------------------------


def commands() -> str:
    """Every command with its arguments and options."""
    return "\n\n".join(_command(path, command) for path, command in leaves("fedrts", typer.main.get_command(cli.app)))


def leaves(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """(words, command) of everything that can be called."""
    inner = getattr(command, "commands", {})
    if not inner or command.invoke_without_command:
        yield path, command
    for name, child in inner.items():
        yield from leaves(f"{path} {name}", child)


def _command(path: str, command: Any) -> str:
    rows = [["argument or option", "default", "meaning"]]
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            shown = (parameter.metavar or parameter.name.upper()).strip("[]")
            rows.append([f"`{shown}`", "" if parameter.required else "none", parameter.help or ""])
        else:
            value = "" if parameter.is_flag else f" {_value(parameter)}"
            default = (
                "required"
                if parameter.required
                else ""
                if parameter.is_flag or parameter.default in (None, [])
                else f"`{parameter.default}`"
            )
            rows.append([f"`{parameter.opts[0]}{value}`", default, parameter.help or ""])
    text = " ".join((command.help or "").split())
    return f"## {path}\n\n{text}\n\n{markdown(rows)}"


def _value(option: Any) -> str:
    """How the value of an option is written."""
    if choices := getattr(option.type, "choices", None):
        return "|".join(str(getattr(choice, "value", choice)) for choice in choices)
    return str(option.metavar or {"integer": "N", "float": "X", "path": "PATH"}.get(option.type.name.partition(" ")[0], "TEXT"))


# -- filling --------------------------------------------------------------------------------------------------------


def filled(text: str, made: Makers) -> str:
    """`text` with each generated part as it is now; every one of `made` must have exactly one place."""
    found = [name for _, name, _, _ in PART.findall(text)]
    if sorted(found) != sorted(made):
        raise SystemExit(f"generated parts {found} where {list(made)} belong")
    return PART.sub(lambda part: f"{part[1]}{wrapped(made[part[2]]())}\n{part[4]}", text)


def main(arguments: Sequence[str] | None = None, folder: Path = FOLDER) -> int:
    """The exit status: 1 if `--check` finds something stale."""
    parser = argparse.ArgumentParser(description="Fill the generated parts of the documentation.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something is stale")
    check = parser.parse_args(arguments).check
    for name in undocumented():
        print(f"methods/{name}.md is not there yet: copy another method's page", file=sys.stderr)
    stale = False
    for page, made in pages().items():
        path = folder / page
        text = path.read_text("utf-8")
        now = filled(text, made)
        if now == text:
            continue
        stale = True
        print(f"{page} is stale" if check else f"{page} rewritten")
        if not check:
            path.write_text(now, "utf-8")
    return int(check and stale)


if __name__ == "__main__":
    raise SystemExit(main())

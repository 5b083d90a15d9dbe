"""Presets: the runs of a table or figure of the paper, as plain TOML files beside this module."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from fedrts import config
from fedrts.comparison.grid import Grid, check_method
from fedrts.comparison.keys import summary_key
from fedrts.comparison.table import key_of
from fedrts.errors import InputError, nearest
from fedrts.files import require_plain
from fedrts.tables import Table

ScaleName = Literal["paper", "small"]
PUBLISHED = ("megabytes", "flops", "memory", "gigabytes")
"""What may be published of costs, beside the metrics."""


class PresetPart(Table):
    """One grid of a preset; a panel of a figure."""

    name: str = Field(description="its folder, and its heading")
    experiment: dict[str, Any] = Field(default_factory=dict, description="settings of its own")
    instead: dict[str, Any] | None = Field(None, description="settings where the files of its data set are not there")
    remark: str = Field("", description="said under its heading")


class Scale(Table):
    """A preset at one size."""

    methods: list[str]
    densities: list[float] = Field(default_factory=list)
    seeds: list[int]
    grid: dict[str, list[Any]] = Field(default_factory=dict, description="other keys and their values")
    experiment: dict[str, Any] = Field(default_factory=dict, description="settings of all parts")
    options: dict[str, dict[str, Any]] = Field(default_factory=dict, description="method_options of single methods, by name")
    costs_of: dict[str, Any] = Field(default_factory=dict, description="settings of the costs on paper, where they are others")
    parts: list[PresetPart]

    def grid_of(self, settings: Mapping[str, Any]) -> Grid:
        """Return the grid of a part that has these settings."""
        base = config.merged(config.merged({"recipe": "paper"}, self.experiment), settings)
        return Grid(base, self.methods, self.densities, self.seeds, self.grid, options=self.options)


class Preset(Table):
    """A table or figure of the paper."""

    title: str
    figure: Literal["", "lines", "curves"] = Field("", description="lines: a metric by `x`; curves: accuracy by bytes and FLOPs")
    x: str = Field("density", description="of lines: density, or a key of the grid")
    metrics: list[str] = Field(min_length=1, description="keys of summary.json, a table each")
    target: str | None = Field(None, description="method whose accuracy is to be reached, for a table of costs until then")
    ratio_to: str | None = Field(None, description="method to whose traffic of an outer round that of the others is related")
    costs: bool = Field(False, description="with a table of costs on paper")
    claims: list[str] = Field(default_factory=list, description="what the paper says")
    remark: str = ""
    published: list[dict[str, Any]] = Field(default_factory=list, description="method, density, part and grid keys, and what was published")
    paper: Scale
    small: Scale

    def scale(self, name: ScaleName) -> Scale:
        return self.paper if name == "paper" else self.small

    def published_for(self, key: str, where: Mapping[str, Any]) -> float | None:
        """Return the published value of `key` from the entry that agrees with `where` in all its fields."""
        for entry in self.published:
            if key in entry and all(key_of(entry.get(name, value)) == key_of(value) for name, value in where.items()):
                return float(entry[key])
        return None


def names() -> list[str]:
    """Return the names of all presets of the package."""
    return sorted(file.name.removesuffix(".toml") for file in _folder().iterdir() if file.name.endswith(".toml"))


def text(name: str) -> str:
    """Return the text of a preset of the package, or of your own file."""
    if name.endswith(".toml"):
        require_plain(name)
        try:
            return Path(name).read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read the preset '{name}': {getattr(error, 'strerror', None) or error}") from error
    if name not in names():
        raise InputError(f"there is no preset '{name}'{nearest(name, names())}")
    return str((_folder() / f"{name}.toml").read_text("utf-8"))


def parsed(content: str, name: str) -> Preset:
    """Parse the text of a preset; the first mistake is one line."""
    try:
        preset = config.validated(Preset, config.parsed_toml(content, name))
        for metric in preset.metrics:
            summary_key(metric)
        for scale in (preset.paper, preset.small):
            _check_parts([part.name for part in scale.parts])
            for key, named in (("target", [preset.target]), ("ratio_to", [preset.ratio_to]), ("options", scale.options)):
                for method in named:
                    if method is not None:
                        check_method(method, scale.methods, key)
            if preset.figure == "lines" and preset.x not in ("density", *scale.grid):
                raise InputError(f"x = '{preset.x}' is neither density nor a key of the grid")
            if preset.figure == "lines" and not all(_is_number(value) for value in scale.grid.get(preset.x, [])):
                raise InputError(f"x = '{preset.x}' has values that are no numbers: lines need numbers, or leave `figure` out")
        for entry in preset.published:
            for key in entry.keys() & {*preset.metrics, *PUBLISHED}:
                if not _is_number(entry[key]):
                    raise InputError(f"published {key} = {entry[key]!r} is no number")
    except InputError as error:
        raise InputError(f"preset '{name}': {error}") from error
    return preset


def _check_parts(names: list[str]) -> None:
    if not names:
        raise InputError("a scale without parts: give at least one")
    if wrong := next((name for name in names if not re.fullmatch(r"\w[\w .-]*", name)), None):
        raise InputError(f"a part is called '{wrong}', which is no name for a folder: take letters, digits, spaces, '.', '_' and '-'")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"two parts are called '{twice}': each needs a folder of its own")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def load(name: str) -> Preset:
    """Load the preset of that name or file."""
    return parsed(text(name), name)


def _folder() -> Any:
    return importlib.resources.files(__package__) / "presets"

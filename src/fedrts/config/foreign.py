"""Settings that lead to code outside the package."""

from __future__ import annotations

from fedrts import data, models
from fedrts.config.tree import Tree, flat
from fedrts.engines.kinds import KINDS, kind
from fedrts.registry import IMPORT_PATH


def foreign(settings: Tree) -> list[str]:
    """Return the import paths among settings, whatever their key, and the address of a Ray cluster.

    A text may look like an import path and be none: this is for telling the user, and for trusting one's own settings.
    """
    entries = [(key, entry) for key, value in flat(settings).items() for entry in (value if isinstance(value, list) else [value])]
    texts = [(key, entry) for key, entry in entries if isinstance(entry, str) and key != "tags"]
    paths = {"data": data.data.paths(), "model": models.models.paths()}
    found = [value for key, value in texts if IMPORT_PATH.fullmatch(value) and not value.startswith(paths.get(key, ()))]
    named = dict(texts)
    engine = named.get("engine.name")
    found += kind(engine).foreign(named.get("engine.address", "")) if engine in KINDS else []
    return list(dict.fromkeys(found))

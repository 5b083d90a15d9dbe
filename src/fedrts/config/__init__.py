"""The experiment: one typed tree built from files, flags and keywords.

Defaults are the paper's setting; a data set's recipe overrides them; then come the experiment file and, last, flags or keywords.
"""

from __future__ import annotations

from fedrts.config.foreign import foreign
from fedrts.config.resolution import CUSTOM, combined, complete, make_method, method_class, recipe_settings, resolve, with_newer_keys
from fedrts.config.sources import (
    SHORT,
    from_assignments,
    from_file,
    from_keywords,
    from_method,
    parsed_toml,
    plain,
    written_out,
)
from fedrts.config.tables import Clients, Experiment, Training, usual_end
from fedrts.config.tree import Tree, flat, merged, nested
from fedrts.config.validation import check_options, validated

__all__ = [
    "CUSTOM",
    "SHORT",
    "Clients",
    "Experiment",
    "Training",
    "Tree",
    "check_options",
    "combined",
    "complete",
    "flat",
    "foreign",
    "from_assignments",
    "from_file",
    "from_keywords",
    "from_method",
    "make_method",
    "merged",
    "method_class",
    "nested",
    "parsed_toml",
    "plain",
    "recipe_settings",
    "resolve",
    "usual_end",
    "validated",
    "with_newer_keys",
    "written_out",
]

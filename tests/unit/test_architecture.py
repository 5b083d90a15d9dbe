"""The rules of the house, checked: imports point one way, and no method is named outside methods/."""

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import get_args

import pytest

import fedrts
from fedrts import methods
from fedrts.client import optimizers, schedules
from fedrts.engines.kinds import KINDS, EngineKind, kind
from fedrts.engines.settings import EngineName
from fedrts.server import optimizer, reducers
from fedrts.sparse import falling
from fedrts.tasks import metrics
from fedrts.wire.value_types import FORMATS, ValueType

SOURCE = Path(fedrts.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
ROOT = SOURCE.parents[1]

LAYERS = ["errors", "logs", "files", "drain", "registry", "trees", "tables", "serving"]
LAYERS += ["sparse", "bandit", "wire", "secure", "audit", "methods", "tasks", "data", "models", "programs", "client", "server", "engines"]
LAYERS += ["callbacks", "config"]
LAYERS += ["runs", "costs", "planning", "meters", "observe", "flower", "api", "export", "comparison", "reproduction", "report", "watch"]
LAYERS += ["cli", "__main__"]
LAYERS += ["testing"]
"""From the ground up: a module may import its own package and those before it."""


def imported(tree: ast.AST) -> set[str]:
    """The fedrts packages that a file imports at run time (imports for type checkers do not count)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fedrts":
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "fedrts" else [node.module]
            found |= {name.split(".")[1] for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fedrts.")}
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_point_one_way(file):
    package = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    if package == "__init__":
        return
    assert package in LAYERS, f"say in LAYERS where {package} belongs"
    allowed = set(LAYERS[: LAYERS.index(package) + 1]) | {"__version__"}
    assert imported(ast.parse(file.read_text("utf-8"))) <= allowed


def test_no_module_waits_for_itself():
    """Inside a package too, imports at the top of a file go round no circle."""
    modules = {".".join(("fedrts", *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): file for file in FILES}
    graph = {name: _at_the_top(file, set(modules)) - {name} for name, file in modules.items()}
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the circle


def _at_the_top(file: Path, modules: set[str]) -> set[str]:
    found = set()
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & modules or {node.module} & modules
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & modules
    return found - {"fedrts"}


def test_contributing_shows_the_rooms_as_they_are():
    """One line a package, from the ground up, in the words of its own first line."""
    text = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text("utf-8")
    table = text.split("## Where things are")[1].split("\n## ")[0]
    assert [line for line in table.splitlines() if line.startswith("| `")] == [f"| `{name}` | {_first_line(name)} |" for name in LAYERS]


def _first_line(name: str) -> str:
    package = SOURCE / name / "__init__.py"
    source = package if package.exists() else SOURCE / f"{name}.py"
    words = ast.get_docstring(ast.parse(source.read_text("utf-8")))
    assert words, f"{source} has no docstring"
    return words.splitlines()[0]


def test_flower_is_used_from_inside_in_one_file():
    """All others import its public packages alone, and no name with an underscore."""
    public = {"flwr", "flwr.app", "flwr.clientapp", "flwr.serverapp"}
    for file in FILES:
        if file.relative_to(SOURCE).parts == ("flower", "inside.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            named = [node.module] if isinstance(node, ast.ImportFrom) else []
            named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found = {name for name in named if name and name.split(".")[0] == "flwr"}
            assert found <= public, f"{file} imports {found - public}"


def test_no_method_is_named_outside_its_folder():
    names = set(methods.names()) - {"fedrts"}  # which is the package's name too
    names |= {methods.get(name).__name__ for name in methods.names()}
    names -= {"random"}  # which is a word
    for file in FILES:
        if "methods" in file.relative_to(SOURCE).parts:
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            match node:
                case ast.Name(id=word) | ast.Attribute(attr=word) | ast.Constant(value=word):
                    assert word not in names, f"{file}:{node.lineno} names the method {word!r}"


def test_a_name_means_one_thing():
    """No class and no type alias has the name of another."""
    places = defaultdict(list)
    for file in FILES:
        for name in _types(ast.parse(file.read_text("utf-8"))):
            places[name].append(str(file.relative_to(SOURCE)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def _types(tree: ast.Module) -> set[str]:
    """The classes and type aliases of a module: by our habit, and nothing else, they begin with a capital and go on in small letters."""
    found = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    return found | {target.id for target in targets if isinstance(target, ast.Name) and re.match(r"_?[A-Z]\w*[a-z]", target.id)}


@dataclass(frozen=True)
class Listed:
    """The names of one list, and where they may be told apart: in the files of their entries."""

    names: set[str]
    files: set[str]
    holders: str
    """What is compared where a name is a word of other lists too."""
    shared: frozenset[str] = frozenset()
    """Such names."""

    def told_apart(self, tree: ast.AST) -> list[int]:
        """Lines that compare with a name, match it, or look it up among others."""
        found = []
        for node in ast.walk(tree):
            if not isinstance(node, ast.Compare | ast.MatchValue | ast.Dict):
                continue
            words = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and each.value in self.names}
            own = words - self.shared
            held = bool(words) and re.search(self.holders, ast.unparse(node)) is not None
            match node:
                case ast.Compare() | ast.MatchValue() if own or held:
                    found.append(node.lineno)
                case ast.Dict() if len({key.value for key in node.keys if isinstance(key, ast.Constant)} & own) > 1:
                    found.append(node.lineno)
        return found


ENGINE_FILES = {f"engines/{name}.py" for name in ("kinds", "settings", "choice", "serial", "ray")} | {"flower/nodes.py"}
LISTS = {
    "engine": Listed(set(get_args(EngineName)), ENGINE_FILES, r"(engine|asked|settings|found)\.name", frozenset({"auto"})),
    "reducer": Listed(set(reducers.names()), {"server/reducers.py"}, "reducer", frozenset({"mean"})),
    "server optimiser": Listed(set(optimizer.names()), {"server/optimizer.py"}, "server_optimizer", frozenset(optimizer.names())),
    "local optimiser": Listed(
        set(optimizers.names()), {"client/optimizers.py"}, r"(train|training|settings)\.optimizer", frozenset(optimizers.names())
    ),
    "schedule": Listed(set(schedules.names()), {"client/schedules.py"}, r"\bschedule\b", frozenset({"step", "constant"})),
    "metric": Listed(set(metrics.names()), {"tasks/__init__.py", "tasks/metrics.py"}, "metric", frozenset({"loss"})),
    "density schedule": Listed(set(falling.names()), {"sparse/falling.py"}, "density_schedule", frozenset({"cosine", "linear"})),
    "value type": Listed(set(get_args(ValueType)), {"wire/value_types.py"}, r"\btype\b|value_type", frozenset({"float32"})),
}


@pytest.mark.parametrize("name", LISTS)
def test_no_entry_of_a_list_is_told_by_its_name_outside_its_file(name):
    """What others need to know of an entry it carries itself: a new one is in one place, and none is silently taken for another."""
    listed = LISTS[name]
    for file in FILES:
        where = file.relative_to(SOURCE).as_posix()
        lines = [] if where in listed.files else listed.told_apart(ast.parse(file.read_text("utf-8")))
        assert not lines, f"{where}, lines {lines}: asks which {name} it is; let the entry say what is needed"


@pytest.mark.parametrize(
    ("name", "code", "found"),
    [
        ("engine", "if run.experiment.engine.name == 'ray': pass", True),
        ("engine", "if asked.name in ('auto', 'made up'): pass", True),
        ("engine", "if asked.kernel == 'auto': pass", False),
        ("engine", "settings.but(name='serial')", False),
        ("engine", "match name:\n  case 'flower': pass", True),
        ("reducer", "if guard.reducer != 'mean': pass", True),
        ("reducer", "trim = {'median': 0.5, 'clip': 0}[name]", True),
        ("reducer", "state['mean'] == 1", False),
        ("server optimiser", "if train.server_optimizer == 'adam': pass", True),
        ("server optimiser", "if train.optimizer == 'adam': pass", False),
        ("local optimiser", "if train.optimizer == 'adam': pass", True),
        ("local optimiser", "if train.server_optimizer == 'adam': pass", False),
        ("schedule", "if train.schedule == 'constant': pass", True),
        ("schedule", "{'cosine': 1, 'exponential': 2}[name]", True),
        ("schedule", "if kind == 'step': pass", False),
        ("metric", "if metric.name == 'loss': pass", True),
        ("metric", "if 'accuracy' in found: pass", True),
        ("metric", "digits = {'accuracy': 4, 'perplexity': 2}[key]", True),
        ("metric", "line['accuracy'] is None", True),
        ("metric", "summary.get('accuracy')", False),
        ("metric", "if name == 'loss': pass", False),
        ("density schedule", "if topology.density_schedule == 'cosine': pass", True),
        ("density schedule", "if train.schedule == 'cosine': pass", False),
        ("value type", "if entry.type == 'float32': pass", True),
        ("value type", "if asked.precision == 'float32': pass", False),
    ],
)
def test_that_test_finds_what_it_should(name, code, found):
    assert bool(LISTS[name].told_apart(ast.parse(code))) is found


def test_no_docstring_starts_with_of():
    """A docstring names its subject: "Bytes of a value", not "Of a value"."""
    files = (file for folder in ("src", "tests", "benchmarks", "examples", "kernels", "docs") for file in (ROOT / folder).rglob("*.py"))
    assert [str(file.relative_to(ROOT)) for file in files if re.search(r'^\s*r?"""Of ', file.read_text("utf-8"), re.M)] == []


def test_every_name_of_a_table_has_its_entry():
    assert set(KINDS) == set(get_args(EngineName))
    assert all(isinstance(kind(name), EngineKind) for name in KINDS)
    assert set(FORMATS) == set(get_args(ValueType))


def test_every_method_is_short():
    for file in (SOURCE / "methods").glob("*.py"):
        if file.stem in ("contract", "base", "describe"):
            continue
        assert len(file.read_text("utf-8").splitlines()) <= 120, file


def test_nothing_is_there_for_tests_alone():
    """A public name without a decorator that hands it to somebody is mentioned where it is used, or it is of no use."""
    root = SOURCE.parents[1]
    mentioning = [*FILES, *(root / "benchmarks").rglob("*.py"), root / "docs" / "generate.py"]
    words = Counter(word for file in mentioning for word in re.findall(r"\w+", file.read_text("utf-8")))
    harmless = {"property", "cached_property", "staticmethod", "contextmanager", "dataclass"}
    unused = [
        f"{file.relative_to(SOURCE)}: {node.name}"
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and words[node.name] == 1
        if {ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in node.decorator_list} <= harmless
    ]
    assert unused == []


def test_importing_the_package_and_asking_for_help_imports_nothing_heavy():
    code = "import sys, fedrts, fedrts.cli; fedrts.cli.app(['run', '--help'], standalone_mode=False)\n"
    code += "print([m for m in ('torch', 'numpy', 'pydantic', 'sklearn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_benchmarks_import_nothing_from_tests():
    root = Path(__file__).parents[2]
    ours = {path.stem for path in (root / "benchmarks").rglob("*.py")}
    foreign = {"tests"} | {path.stem for path in (root / "tests").iterdir()} - ours
    for file in (root / "benchmarks").rglob("*.py"):
        text = file.read_text("utf-8")
        modules = {node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
        modules |= {alias.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for alias in node.names}
        assert not {module.split(".")[0] for module in modules} & foreign, f"{file}: what both need belongs into fedrts.testing"
        assert '"tests"' not in text, f"{file} looks for modules in tests/"

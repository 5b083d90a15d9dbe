"""The experiment: files, flags and keywords build one object; every mistake is one line that names the key and the remedy."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrts import api, cli, config
from fedrts.config import Experiment, from_assignments, from_file, from_keywords, resolve
from fedrts.errors import InputError, Note
from fedrts.runs.build import assemble
from fedrts.runs.folder import RunFolder


def settings(**changes: Any) -> dict[str, Any]:
    """A complete set of choices, none of them a default."""
    return {
        "method": "fedrts_gamma0",
        "model": "cnn",
        "data": "digits",
        "density": 0.3,
        "rounds": 40,
        "seed": 7,
        "init": "/start.safetensors",
        "out": "somewhere",
        "device": "cpu",
        "engine": {"name": "serial"},
        "clients": {"total": 12, "per_round": 5, "partition": "iid", "alpha": 0.7, "min_size": 3},
        "train": {
            "epochs": 2,
            "batch_size": 8,
            "lr": 0.05,
            "optimizer": "adam",
            "amsgrad": True,
            "weight_decay": 0.001,
            "schedule": "cosine",
            "lr_end": 0.5,
        },
        "topology": {"interval": 4, "end": 21, "adjust": 0.25, "first_outer": 4, "budget": "prunable", "layer_density": "er"},
        "eval": {"every": 3, "batch_size": 100},
        "checkpoint": {"every": "30s"},
        "method_options": {"scale": 3.0, "update_after_end": True},
        "model_options": {"width": 8, "prune_output": True},
        **changes,
    }


TOML = """
method = "fedrts_gamma0"
model = "cnn"
data = "digits"
density = 0.3
rounds = 40
seed = 7
init = "/start.safetensors"
out = "somewhere"
device = "cpu"
engine = "serial"
[clients]
total = 12
per_round = 5
partition = "iid"
alpha = 0.7
min_size = 3
[train]
epochs = 2
batch_size = 8
lr = 0.05
optimizer = "adam"
amsgrad = true
weight_decay = 0.001
schedule = "cosine"
lr_end = 0.5
[topology]
interval = 4
end = 21
adjust = 0.25
first_outer = 4
budget = "prunable"
layer_density = "er"
[eval]
every = 3
batch_size = 100
[checkpoint]
every = "30s"
[method_options]
scale = 3
update_after_end = true
[model_options]
width = 8
prune_output = true
"""

FLAGS = [
    *("--method=fedrts_gamma0", "--model=cnn", "--data=digits", "--density=0.3", "--rounds=40", "--seed=7", "--out=somewhere"),
    *("--device=cpu", "--engine=serial", "--clients=12", "--per-round=5", "--epochs=2", "--batch-size=8", "--lr=0.05"),
    *("--set=clients.partition=iid", "--set=clients.alpha=0.7", "--set=clients.min_size=3", "--set=train.optimizer=adam"),
    *("--set=train.amsgrad=true", "--set=train.weight_decay=1e-3", "--set=topology.interval=4", "--set=topology.end=21"),
    *("--set=topology.adjust=0.25", "--set=topology.first_outer=4", '--set=topology.budget="prunable"', "--set=topology.layer_density=er"),
    *("--set=eval.every=3", "--set=eval.batch_size=100", "--set=checkpoint.every=30s", "--set=method_options.scale=3.0"),
    *("--init=/start.safetensors", "--set=train.schedule=cosine", "--set=train.lr_end=0.5"),
    *("--set=method_options.update_after_end=true", "--set=model_options.width=8", "--set=model_options.prune_output=true"),
]

KEYWORDS = {
    **{key: value for key, value in settings().items() if key not in ("engine", "clients", "train")},
    "engine": "serial",
    "clients": 12,
    "per_round": 5,
    "epochs": 2,
    "batch_size": 8,
    "lr": 0.05,
    "train": {"optimizer": "adam", "amsgrad": True, "weight_decay": 0.001, "schedule": "cosine", "lr_end": 0.5},
}
"""With short names where there are any; the rest of `clients` can only be said by the table, which the test adds."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Experiment]:
    """What would have been run, instead of running it."""
    caught: list[Experiment] = []
    monkeypatch.setattr(api, "start", lambda resolved, observer, data_dir=None, **_: caught.append(resolved))
    return caught


def by_command(monkeypatch: pytest.MonkeyPatch, started: list[Experiment], *arguments: str) -> Experiment:
    monkeypatch.setattr(sys, "argv", ["fedrts", "run", *arguments])
    monkeypatch.setattr("fedrts.cli.run.interruptible", lambda play, *_: play(None))
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    return started.pop()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a user's own module into the current folder; returns its name, another one for every test."""
    monkeypatch.chdir(tmp_path)
    name = f"own_{tmp_path.name}"

    def write(text: str) -> str:
        Path(f"{name}.py").write_text(text, "utf-8")
        return name

    yield write
    sys.modules.pop(name, None)


# -- one object, whichever way it is said ---------------------------------------------------------------------------


def test_file_flags_and_keywords_build_the_same_experiment(tmp_path, monkeypatch, started):
    file = tmp_path / "experiment.toml"
    file.write_text(TOML, "utf-8")
    expected = resolve(settings())
    rest = {"clients": {"partition": "iid", "alpha": 0.7, "min_size": 3}}
    assert resolve(from_file(file)) == expected
    assert resolve(rest, from_keywords(KEYWORDS)) == expected
    assert by_command(monkeypatch, started, *FLAGS) == expected
    assert by_command(monkeypatch, started, str(file)) == expected
    api.run(file)
    assert started.pop() == expected
    api.run(**settings())
    assert started.pop() == expected


def test_every_choice_of_that_experiment_arrived():
    dumped = config.flat(resolve(settings()).model_dump())
    asked = config.flat(settings())
    assert {key: dumped[key] for key in asked} == asked
    defaults = config.flat(Experiment().model_dump())
    assert [key for key in asked if asked[key] == defaults.get(key) and key != "data"] == []


def test_keyword_none_means_not_given():
    assert from_keywords({"lr": None, "clients": None, "density": None}) == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rounds=7", {"rounds": 7}),
        ("train.lr=1e-3", {"train": {"lr": 0.001}}),
        ("method_options.update_after_end=true", {"method_options": {"update_after_end": True}}),
        ("model_options.hidden=[32, 16]", {"model_options": {"hidden": [32, 16]}}),
        ("data=digits", {"data": "digits"}),
        ('data="digits"', {"data": "digits"}),
        ("out=a=b", {"out": "a=b"}),
        ("model=pkg.module:name", {"model": "pkg.module:name"}),
        ("a.b.c=1", {"a": {"b": {"c": 1}}}),
    ],
)
def test_assignment(text, expected):
    assert from_assignments([text]) == expected


def test_assignments_of_one_table_add_up_and_the_last_wins():
    texts = ["train.lr=1.0", "train.epochs=3", "train.lr=2.0"]
    assert from_assignments(texts) == {"train": {"lr": 2.0, "epochs": 3}}


# -- precedence -----------------------------------------------------------------------------------------------------

OWN_DATA = """
import torch
from fedrts.data.contract import Data, Recipe

def load(size: int = 60) -> Data:
    x = torch.arange(size * 4).reshape(size, 4) / size
    y = torch.arange(size) % 3
    return Data(x, y, x[:9], y[:9], classes=3)

def with_recipe() -> Data:
    return load()

with_recipe.recipe = Recipe(model="mlp", settings={"rounds": 9, "train": {"lr": 0.125}})
"""


def test_later_sources_win(module, monkeypatch, started):
    name = module(OWN_DATA)
    Path("file.toml").write_text(f'data = "{name}:with_recipe"\n[train]\nepochs = 4\nlr = 0.25\n', "utf-8")
    bare, recipe = resolve({"data": f"{name}:load"}), resolve({"data": f"{name}:with_recipe"})
    of_file = by_command(monkeypatch, started, "file.toml")
    of_flags = by_command(monkeypatch, started, "file.toml", "--lr", "0.5")
    of_keywords = resolve(from_file("file.toml"), from_keywords({"lr": 0.5}))
    assert [e.train.lr for e in (bare, recipe, of_file, of_flags, of_keywords)] == [0.1, 0.125, 0.25, 0.5, 0.5]
    assert [e.rounds for e in (bare, recipe, of_file, of_flags, of_keywords)] == [500, 9, 9, 9, 9]
    assert [e.train.epochs for e in (bare, recipe, of_file, of_flags, of_keywords)] == [5, 5, 4, 4, 4]


def test_the_recipe_is_that_of_the_data_chosen_last(module):
    name = module(OWN_DATA)
    assert resolve({"data": "digits"}, {"data": f"{name}:with_recipe"}).train.lr == 0.125


def test_the_recipe_of_digits():
    e = resolve({"recipe": "paper"})
    assert (e.data, e.model, e.method, e.density, e.rounds) == ("digits", "mlp", "fedrts", 0.2, 50)
    assert (e.clients.total, e.clients.per_round, e.clients.partition, e.clients.alpha) == (20, 10, "dirichlet", 0.5)
    assert (e.train.lr, e.train.batch_size, e.train.epochs, e.train.optimizer, e.eval.every) == (0.2, 16, 5, "sgd", 1)
    later = (e.train.schedule, e.train.average, e.topology.init_scale, e.wire.value_type)
    assert later == ("constant", "off", "dense", "float32"), "the published setting"


TUNED = {"topology.init_scale": "sparse", "train.schedule": "cosine", "train.average": "tail", "wire.value_type": "int8"}


@pytest.mark.parametrize(
    ("asked", "rate"),
    [
        ({}, 0.8),
        ({"model": "cnn"}, 1.2),
        ({"data": "sentences"}, 0.6),
        ({"data": "cifar10", "model": "resnet18_small"}, 1.0),
        ({"data": "cifar10"}, 0.1),
        ({"data": "fashion_mnist"}, 0.1),
        ({"lr": 0.3}, 0.3),
        ({"train": {"optimizer": "adam"}}, 0.001),
        ({"train": {"optimizer": "adamw", "lr": 0.01}}, 0.01),
        ({"train": {"optimizer": "sgd"}}, 0.8),
    ],
)
def test_the_tuned_recipe_is_the_default(asked, rate):
    """It fills in what is not said, by data and model, and goes by no method."""
    e = resolve(from_keywords(asked))
    assert e == resolve(from_keywords({**asked, "recipe": "tuned"}))
    assert e.train.lr == rate
    few = {"wire.value_type": "int4"} if (e.data, e.model) == ("digits", "mlp") else {}
    assert {key: value for key, value in config.flat(e.model_dump()).items() if key in TUNED} == TUNED | few
    for method in ("random", "fedavg", "feddst"):
        other = resolve(from_keywords({**asked, "method": method}))
        assert (other.train, other.topology, other.wire) == (e.train, e.topology, e.wire)


def test_what_is_said_wins_over_both_recipes():
    said = {"topology": {"init_scale": "dense"}, "train": {"schedule": "step", "average": "ema"}, "wire": {"value_type": "float16"}}
    e = resolve(said)
    found = (e.topology.init_scale, e.train.schedule, e.train.average, e.wire.value_type)
    assert found == ("dense", "step", "ema", "float16")


def test_a_file_of_before_there_were_recipes_means_the_papers(tmp_path):
    """A run's own file says by which versions it was made; a hand-written one that names no recipe means today's default."""
    (tmp_path / "run.toml").write_text('data = "digits"\n[train]\nlr = 0.2\n[versions]\nfedrts = "0.1.0"\n', "utf-8")
    (tmp_path / "own.toml").write_text('data = "digits"\n[train]\nlr = 0.2\n', "utf-8")
    old, own = (resolve(from_file(tmp_path / name)) for name in ("run.toml", "own.toml"))
    assert (old.recipe, old.wire.value_type, old.train.average) == ("paper", "float32", "off")
    assert (own.recipe, own.wire.value_type, own.train.average) == ("tuned", "int4", "tail")


def test_a_recipe_that_there_is_not():
    with pytest.raises(InputError, match=r"recipe must be 'tuned' or 'paper' \(got 'papr'\)"):
        resolve({"recipe": "papr"})


def test_engine_as_a_word_and_as_a_table_merge():
    assert resolve({"engine": {"name": "auto"}}, {"engine": "serial"}) == resolve({"engine": "serial"})


@pytest.mark.parametrize(
    ("asked", "per_round"), [({"total": 4}, 4), ({"total": 10}, 10), ({"total": 11}, 10), ({"alpha": 1.0}, 10), ({"total": 1}, 1)]
)
@pytest.mark.parametrize("data", ["digits", "load"])
def test_default_per_round_shrinks_to_the_federation(asked, per_round, data, module):
    name = f"{module(OWN_DATA)}:load" if data == "load" else data
    assert resolve({"data": name, "clients": asked}).clients.per_round == per_round


def test_given_per_round_never_shrinks():
    with pytest.raises(InputError, match=r"clients\.per_round = 9 must not exceed clients\.total = 4"):
        resolve({"clients": {"total": 4, "per_round": 9}})
    assert resolve({"clients": {"total": 4, "per_round": 2}}).clients.per_round == 2


# -- mistakes -------------------------------------------------------------------------------------------------------


def test_input_errors_are_value_errors():
    assert issubclass(InputError, ValueError)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        *((f"density={value}", ["density", "> 0", "≤ 1", value]) for value in ("0", "-1", "1.5", "nan", "inf")),
        ("density=dense", ["density", "> 0", "≤ 1", "dense"]),
        ("rounds=0", ["rounds", "≥ 1", "0"]),
        ("rounds=1.5", ["rounds", "≥ 1", "1.5"]),
        ("rounds=many", ["rounds", "≥ 1", "many"]),
        ("rounds=[3]", ["rounds", "≥ 1", "[3]"]),
        ("seed=-1", ["seed", "≥ 0", "-1"]),
        ("seed=9223372036854775808", ["seed", "≥ 0", "9223372036854775808"]),
        ("device=tpu", ["device", "auto", "cpu", "cuda", "tpu"]),
        ("method=3", ["method", "string", "3"]),
        ("data=3", ["data", "string", "3"]),
        ("clients.total=0", ["clients.total", "≥ 1", "0"]),
        ("clients.per_round=0", ["clients.per_round", "≥ 1", "0"]),
        ("clients.per_round=21", ["clients.per_round = 21", "clients.total = 20"]),
        ("clients.alpha=0", ["clients.alpha", "> 0", "0"]),
        ("clients.alpha=inf", ["clients.alpha", "> 0", "inf"]),
        ("clients.partition=idd", ["clients.partition", "'dirichlet'", "'iid'", "idd"]),
        ("clients.min_size=0", ["clients.min_size", "≥ 1"]),
        ("train.lr=0", ["train.lr", "> 0", "0"]),
        ("train.lr=-0.1", ["train.lr", "> 0", "-0.1"]),
        ("train.lr=nan", ["train.lr", "> 0", "nan"]),
        ("train.lr=fast", ["train.lr", "> 0", "fast"]),
        ("train.lr.x=1", ["train.lr", "> 0"]),
        ("train.epochs=0", ["train.epochs", "≥ 1"]),
        ("train.batch_size=0", ["train.batch_size", "≥ 1"]),
        ("train.momentum=1", ["train.momentum", "≥ 0", "< 1"]),
        ("train.weight_decay=-1", ["train.weight_decay", "≥ 0"]),
        ("train.optimizer=sdg", ["train.optimizer", "'sgd'", "'adam'", "sdg"]),
        ("train=3", ["train", "3"]),
        ("topology.interval=0", ["topology.interval", "≥ 1"]),
        ("topology.end=0", ["topology.end", "≥ 1"]),
        ("topology.end=51", ["topology.end = 51", "rounds = 50"]),
        ("topology.adjust=1.1", ["topology.adjust", "≥ 0", "≤ 1"]),
        ("topology.first_outer=3", ["topology.first_outer", "0", "topology.interval = 10", "3"]),
        ("topology.first_outer=-1", ["topology.first_outer", "≥ 0"]),
        ("topology.budget=some", ["topology.budget", "'all'", "'prunable'"]),
        ("topology.layer_density=ekr", ["topology.layer_density", "'erk'", "'er'", "'uniform'"]),
        ("topology.init_mask=ones", ["topology.init_mask", "'random'", "'magnitude'"]),
        ("eval.every=0", ["eval.every", "≥ 1"]),
        ("eval.batch_size=0", ["eval.batch_size", "≥ 1"]),
        ("engine=sreial", ["engine", "'auto'", "'serial'", "sreial"]),
        *(
            (f"checkpoint.every={value}", ["checkpoint.every", "≥ 1", "'30s'", "'auto'"])
            for value in ("0", "-3", "soon", "s", "1.5", "1.5s", "-1s", "3m")
        ),
        ("method_options.gamma=2", ["method_options.gamma", "≥ 0", "≤ 1", "2"]),
        ("method_options.gamma=nan", ["method_options.gamma", "≥ 0", "≤ 1", "nan"]),
        ("method_options.scale=0", ["method_options.scale", "> 0", "0"]),
        ("method_options.scale=inf", ["method_options.scale", "finite", "'clients'"]),
        ("method_options.update_after_end=sometimes", ["method_options.update_after_end", "boolean", "sometimes"]),
        ("method_options.density=0.5", ["method_options.density", "top level"]),
        ("method_options=3", ["method_options", "3"]),
        ("model_options.prune_output=3", ["model_options.prune_output", "true or false", "3"]),
    ],
)
def test_bad_value(bad, words):
    with pytest.raises(InputError) as error:
        resolve(from_assignments([bad]))
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize("key", ["rounds", "seed", "density", "clients.total", "train.lr", "checkpoint.every", "method_options.gamma"])
def test_true_is_no_number(key):
    with pytest.raises(InputError, match=key):
        resolve(from_assignments([f"{key}=true"]))


@pytest.mark.parametrize("bad", ["device=tpu", "train=3", "method_options=3", "checkpoint.every=1.5", "engine=3"])
def test_messages_use_the_words_of_the_experiment_file(bad):
    """Not those of the validation library, whose sentences and class names mean nothing to a user."""
    with pytest.raises(InputError) as error:
        resolve(from_assignments([bad]))
    for jargon in ("String should", "Input should", "Value error", "instance of", "dictionary", ".int ", ".str "):
        assert jargon not in str(error.value)


@pytest.mark.parametrize(
    ("bad", "key", "remedy"),
    [
        ("densty=0.1", "densty", "density"),
        ("roudns=3", "roudns", "rounds"),
        ("topolgy.interval=3", "topolgy", "topology"),
        ("train.lrr=0.1", "train.lrr", "train.lr"),
        ("train.batchsize=1", "train.batchsize", "train.batch_size"),
        ("clients.totl=3", "clients.totl", "clients.total"),
        ("checkpoint.evry=3", "checkpoint.evry", "checkpoint.every"),
        ("method_options.gama=0.1", "method_options.gama", "method_options.gamma"),
        ("model_options.hiden=[3]", "model_options.hiden", "model_options.hidden"),
        ("model_options.prune_ouput=true", "model_options.prune_ouput", "model_options.prune_output"),
    ],
)
def test_unknown_key_names_the_nearest(bad, key, remedy):
    with pytest.raises(InputError) as error:
        resolve(from_assignments([bad]))
    assert str(error.value) == f"unknown key '{key}'; did you mean '{remedy}'?"


@pytest.mark.parametrize(
    ("bad", "known"),
    [
        ("xyz=1", ["density", "topology", "train"]),
        ("train.xyz=1", ["batch_size", "epochs", "lr"]),
        ("method_options.xyz=1", ["gamma", "scale"]),
        ("model_options.xyz=1", ["hidden", "prune_output"]),
        ("data_options.xyz=1", ["validation"]),
    ],
)
def test_unknown_key_far_from_all_lists_what_there_is(bad, known):
    key = bad.partition("=")[0]
    with pytest.raises(InputError) as error:
        resolve(from_assignments([bad]))
    message, listed = str(error.value).split("; known: ")
    assert message == f"unknown key '{key}'"
    assert set(known) <= set(listed.split(", "))


def test_options_of_another_model_are_unknown():
    assert resolve({"model": "cnn", "model_options": {"width": 4}}).model_options == {"width": 4}
    with pytest.raises(InputError, match=r"unknown key 'model_options\.width'"):
        resolve({"model": "mlp", "model_options": {"width": 4}})


@pytest.mark.parametrize(
    ("key", "typo", "right"),
    [("method", "fedrst", "fedrts"), ("method", "fedvag", "fedavg"), ("model", "mpl", "mlp"), ("data", "digit", "digits")],
)
def test_unknown_name_names_the_nearest(key, typo, right):
    with pytest.raises(InputError, match=f"'{typo}'; did you mean '{right}'"):
        resolve({key: typo})


@pytest.mark.parametrize("bad", ["train.lr", "=3", " =3", ""])
def test_assignment_without_key_or_value(bad):
    with pytest.raises(InputError, match=r"--set takes table\.key=value"):
        from_assignments([bad])


def test_toml_that_is_none(tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text("density = \n", "utf-8")
    with pytest.raises(InputError, match=r"bad\.toml' is no valid TOML: .*line 1"):
        from_file(file)


def test_file_that_cannot_be_read(tmp_path):
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.toml", tmp_path, binary):
        with pytest.raises(InputError) as error:
            from_file(path)
        assert f"cannot read the experiment file '{path}'" in str(error.value)


def test_device_that_is_not_there():
    with pytest.raises(InputError, match=r"device 'cuda:99' is not there.*--device cpu"):
        resolve({"device": "cuda:99"})


# -- auto, and back again -------------------------------------------------------------------------------------------


def test_auto_is_decided(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    resolved = resolve({"model": "auto", "device": "auto", "engine": "auto", "rounds": 50})
    assert (resolved.model, resolved.device, resolved.topology.end) == ("mlp", "cpu", 30)
    assert resolved.engine.name == "auto", "decided with the model at hand"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert resolve({"device": "auto"}).device == "cuda"


@pytest.mark.parametrize(("rounds", "end"), [(1, 1), (2, 1), (3, 1), (4, 2), (5, 3), (50, 30), (500, 300)])
def test_end_of_the_topology(rounds, end):
    assert resolve({"rounds": rounds}).topology.end == end


def test_end_is_exactly_three_fifths():
    wrong = [rounds for rounds in range(1, 3000) if Experiment(rounds=rounds).end != max(1, 3 * rounds // 5)]
    assert wrong == []


def test_options_are_written_out():
    assert resolve().method_options == {
        "gamma": 0.5,
        "scale": 10.0,
        "scope": "layer",
        "score": "magnitude",
        "update_after_end": False,
        "discount": 1.0,
        "candidates": "all",
        "keep": "none",
        "patience": 0,
        "start": 0.0,
    }
    assert resolve({"method": "fedrts_gamma1"}).method_options["gamma"] == 1.0


@pytest.mark.parametrize(
    "asked",
    [
        {},
        settings(),
        {"method": "fedavg"},
        {"method": "random", "rounds": 1, "clients": {"total": 1}},
        {"model_options": {"hidden": [32, 16]}, "checkpoint": {"every": 3}},
        {"model_options": {"hidden": (32, 16)}},
        {"topology": {"prunable": "somewhere:rule"}, "out": 'ä "quoted" \\ path\nof two lines'},
        {"seed": 2**63 - 1, "density": 0.1 + 0.2, "train": {"lr": 1e-300, "weight_decay": 5e-324}},
    ],
)
def test_resolved_file_read_back_is_the_same_experiment(asked, tmp_path):
    resolved = resolve(asked)
    folder = RunFolder(tmp_path / "run")
    folder.create(resolved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve(from_file(folder.experiment_file())) == resolved


@given(
    density=st.floats(min_value=0, max_value=1, exclude_min=True),
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    rounds=st.integers(1, 10**6),
    total=st.integers(1, 10**5),
    every=st.one_of(st.just("auto"), st.integers(1, 100), st.integers(0, 100).map(lambda seconds: f"{seconds}s")),
    method=st.sampled_from(["fedrts", "fedrts_gamma0", "random"]),
)
def test_any_experiment_survives_its_file(tmp_path_factory, density, lr, rounds, total, every, method):
    given = {"density": density, "lr": lr, "rounds": rounds, "clients": total, "method": method, "checkpoint": {"every": every}}
    resolved = resolve(from_keywords(given))
    assert (resolved.density, resolved.train.lr, resolved.clients.per_round) == (density, lr, min(10, total))
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    folder.create(resolved)
    assert resolve(from_file(folder.experiment_file())) == resolved


def test_resolved_file_is_complete(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create(resolve())
    written = set(config.flat(from_file(folder.experiment_file())))
    missing = set(config.flat(Experiment().model_dump())) - written
    null = {"guard.max_claim", "init", "out", "secure.threshold", "topology.density_start", "topology.prunable", "train.schedule_rounds"}
    null |= {"wire.download_type", "origin", "stop.patience", "stop.metric"}
    assert missing == null, "TOML has none"
    text = folder.experiment_file().read_text("utf-8")
    assert text.count('"auto"') == 4  # checkpoint.every: a pace, no decision; engine.name, kernel and isa: decided when the model is there
    assert "[versions]" in text


# -- dense methods --------------------------------------------------------------------------------------------------


def test_dense_method_says_once_that_it_ignores_the_density():
    with pytest.warns(Note) as caught:
        resolved = resolve({"method": "fedavg", "density": 0.3})
    assert [str(warning.message) for warning in caught] == ["fedavg is a dense method: density 0.3 is ignored"]
    assert resolved.density == 1.0


@pytest.mark.parametrize("asked", [{"method": "fedavg"}, {"method": "fedavg", "density": 1.0}, {"method": "fedrts", "density": 0.3}])
def test_no_note_without_a_density_that_is_ignored(asked):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve(asked).density == (0.3 if asked["method"] == "fedrts" else 1.0)


@pytest.mark.parametrize("density", [0, 1.5])
def test_dense_method_still_checks_the_density(density):
    with pytest.raises(InputError, match="density must be"):
        resolve({"method": "fedavg", "density": density})


# -- one's own, by import path --------------------------------------------------------------------------------------

OWN_MODEL = """
from torch import nn
from fedrts.methods.base import Sparse

def net(input_shape, classes, width=6):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], width), nn.ReLU(), nn.Linear(width, classes))

class Mine(Sparse):
    "A method of one's own."
    strength: float = 2.5
"""


def test_model_data_and_method_by_import_path(module):
    name = module(OWN_DATA + OWN_MODEL)
    paths = {key: f"{name}:{thing}" for key, thing in (("data", "load"), ("model", "net"), ("method", "Mine"))}
    resolved = resolve({**paths, "density": 0.9, "clients": {"total": 3}, "model_options": {"width": 5}, "data_options": {"size": 40}})
    assert {key: getattr(resolved, key) for key in paths} == paths
    assert resolved.method_options == {"strength": 2.5}
    run = assemble(resolved)
    assert type(run.method).__name__ == "Mine"
    assert run.layout.sizes == (4 * 5,)
    assert (len(run.data.y), run.data.classes) == (40, 3)


def test_auto_picks_the_model_of_ones_own_recipe(module):
    assert resolve({"data": f"{module(OWN_DATA)}:with_recipe", "model": "auto"}).model == "mlp"


def test_importing_leaves_no_trace_in_the_search_path(module):
    before = list(sys.path)
    resolve({"data": f"{module(OWN_DATA)}:load"})
    assert sys.path == before


def test_data_options_of_ones_own_are_checked(module):
    name = module(OWN_DATA)
    with pytest.raises(InputError, match=r"unknown key 'data_options\.sise'; did you mean 'data_options\.size'"):
        resolve({"data": f"{name}:load", "data_options": {"sise": 3}})


@pytest.mark.parametrize("key", ["data", "method", "model"])
@pytest.mark.parametrize("path", ["there.is.no.such.module:x", "math:no_such_name", "math:", ":x", "..x:y", "math:pi"])
def test_import_path_that_leads_nowhere(key, path):
    """Whether it is followed at once or when the run is put together, the error names it."""
    with pytest.raises(InputError) as error:
        assemble(resolve({key: path}))
    assert f"'{path}'" in str(error.value)


def test_model_options_of_ones_own_model_are_checked(module):
    name = module(OWN_DATA + OWN_MODEL)
    with pytest.raises(InputError, match=r"unknown key 'model_options\.widht'; did you mean 'model_options\.width'"):
        resolve({"data": f"{name}:load", "model": f"{name}:net", "model_options": {"widht": 5}, "clients": {"total": 3}})

"""Code that a stranger names does not run: a server's experiment at a site, somebody's run folder here."""

from __future__ import annotations

import contextlib
import io
import shlex
import shutil
import sys
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch

import fedrts
from fedrts import cli, config
from fedrts.comparison.grid import Grid
from fedrts.comparison.tuning import used
from fedrts.errors import InputError
from fedrts.observe import Silent
from fedrts.registry import import_path, only_allowing
from fedrts.runs import checkpoint
from fedrts.runs.build import assemble
from fedrts.runs.folder import RunFolder

PLANTED = """
from pathlib import Path

import torch
from torch import nn

from fedrts.data.contract import Data
from fedrts.methods.base import Sparse
from fedrts.server.optimizer import FedAvgM
from fedrts.server.reducers import Sorted

Path("pwned").touch()

def load(size=90):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(size) % 3
    x = torch.randn(size, 6, generator=generator) + y.view(-1, 1)
    return Data(x[:60], y[:60], x[60:], y[60:], classes=3)

def net(input_shape, classes, width=8):
    return nn.Sequential(nn.Linear(input_shape[0], width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))

def rank(weights):
    return weights.abs()

def rule(name, parameter):
    return parameter.dim() > 1 and not name.startswith("4")

class Method(Sparse):
    "A method of somebody's."

class Trimmed(Sorted):
    "A reducer of somebody's."

class Steps(FedAvgM):
    "A server optimiser of somebody's."
"""
TINY: dict[str, Any] = {
    "rounds": 3,
    "clients": {"total": 4, "per_round": 2, "partition": "iid", "min_size": 1},
    "train": {"epochs": 1, "batch_size": 8},
}
TINY |= {"device": "cpu", "density": 0.7, "checkpoint": {"every": 1}, "engine": "serial", "topology": {"interval": 2}}
KEYS = {
    "data": "planted:load",
    "model": "planted:net",
    "method": "planted:Method",
    "method_options.score": "planted:rank",
    "guard.reducer": "planted:Trimmed",
    "train.server_optimizer": "planted:Steps",
    "topology.prunable": "planted:rule",
}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module `planted`, which leaves a file where it is imported; commands run there."""
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "pwned"
    sys.modules.pop("planted", None)


def forgotten(mark: Path) -> None:
    """As in a process of its own, in which nothing was imported yet."""
    sys.modules.pop("planted", None)
    mark.unlink(missing_ok=True)


def command(*arguments: object) -> tuple[int, str]:
    """The exit code of a command and what it printed, in this process."""
    said = io.StringIO()
    before, sys.argv = sys.argv, ["fedrts", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("default")
            cli.main()
    except SystemExit as end:
        return int(str(end.code)), said.getvalue()
    finally:
        sys.argv = before
    raise AssertionError("a command ends with a code")


# -- a server's experiment at a site ----------------------------------------------------------------------------------


def told(**settings: Any) -> dict[str, Any]:
    """What a server says of an experiment of the toy images."""
    pytest.importorskip("flwr", reason="fedrts[flower] is not installed")
    from fedrts.flower.deployment import introduction

    base = {**TINY, "data": "digits", "model": "mlp", "method": "fedrts", "engine": {"name": "flower"}}
    return introduction(assemble(config.resolve(base, settings)))


def changed(said: dict[str, Any], key: str, value: str) -> dict[str, Any]:
    settings = config.flat(tomllib.loads(said["experiment"]))
    return {**said, "experiment": tomli_w.dumps(config.nested({**settings, key: value}))}


@pytest.mark.parametrize("key", [key for key in KEYS if key != "train.server_optimizer"])
def test_no_key_of_a_servers_experiment_runs_code_at_a_site(planted: Path, key: str) -> None:
    """`method_options.score` was not on the list of keys that were checked, and ran."""
    said = changed(told(), key, KEYS[key])
    from federating import trusting
    from fedrts.flower.site import Site, accepted

    host = trusting(clients=[0])
    words = r"names data on the server's machine" if key == "data" else rf"'{KEYS[key]}' is not part of fedrts .*--allow {KEYS[key]} if"
    with pytest.raises(InputError, match=words) as refused:
        Site.of(host, said["experiment"], said)
    assert "\n" not in str(refused.value)
    if key != "topology.prunable":  # which is looked up when there is a model
        with pytest.raises(InputError, match=words):
            accepted(said["experiment"], host)
    assert not planted.exists()
    assert "planted" not in sys.modules


def test_how_the_server_steps_is_no_affair_of_a_site(planted: Path) -> None:
    """It needs no permission there, for it does not run there."""
    said = changed(told(), "train.server_optimizer", "planted:Steps")
    from federating import trusting
    from fedrts.flower.site import Site

    Site.of(trusting(clients=[0]), said["experiment"], said)
    assert not planted.exists()
    assert "planted" not in sys.modules


def test_a_node_that_is_named_foreign_code_refuses_and_goes_on(planted: Path) -> None:
    said = told()
    from federating import trusting
    from fedrts.flower.node import Worker

    heard: list[str] = []
    worker = Worker(trusting(clients=[0]), heard.append)
    assert "--allow planted:rank" in worker.meet(changed(said, "method_options.score", "planted:rank"))["refused"]
    assert "refused" not in worker.meet(said)
    assert not planted.exists()


def test_a_site_takes_the_code_that_its_owner_allows(planted: Path) -> None:
    said = changed(told(), "method_options.score", "planted:rank")
    from federating import trusting
    from fedrts.flower.site import Site

    method: Any = Site.of(trusting(clients=[0], allowed=["planted:rank"]), said["experiment"], said).run.method
    assert method.score == "planted:rank"


def test_orders_are_carried_out_under_the_owners_rule_too(planted: Path) -> None:
    """A score is looked up again in every round: the rule holds there, not only when the experiment is taken."""
    said = changed(told(), "method_options.score", "planted:rank")
    from federating import trusting
    from fedrts.flower.site import Site
    from fedrts.wire import codec
    from helping import order_of

    site = Site.of(trusting(clients=[0], allowed=["planted:rank"]), said["experiment"], said)
    run = site.run
    state = run.method.begin(run.setup)
    order = order_of(run, run.plan.exchanges(run.plan.round(0, state.mask))[0], state, 0)
    header = codec.Header(codec.Kind.DOWNLOAD, bytes.fromhex(run.layout.fingerprint), state.mask.fingerprint, 0, 0, 0)
    blob = codec.encode(header, order.exchange.down, order.sent, order.frame, None)
    facts, replies = site.answer({0: blob})
    assert (list(replies), facts["failed"]) == ([0], [])
    site.host = replace(site.host, allowed=())
    facts, replies = site.answer({0: blob})
    assert (list(replies), facts["failed"]) == ([], [0])
    assert "--allow planted:rank" in facts["reasons"][0]


def test_a_sites_own_data_is_its_own_affair_and_nothing_but_data(planted: Path) -> None:
    """The owner's --data may be an import path; a server cannot have it called as something else, with arguments of its own."""
    said = {**told(data="planted:load", clients={"total": 1, "per_round": 1}), "input_shape": [6], "classes": 3}
    from federating import trusting
    from fedrts.flower.site import Site

    host = trusting(data="planted:load", clients=[0])
    assert Site.of(host, said["experiment"], said).run.data.classes == 3
    for key in ("model", "method_options.score"):
        with pytest.raises(InputError, match="--allow planted:load"):
            Site.of(host, changed(said, key, "planted:load")["experiment"], said)


def test_nodes_on_this_machine_may_run_what_the_users_own_command_names(planted: Path) -> None:
    pytest.importorskip("flwr", reason="fedrts[flower] is not installed")
    from fedrts.flower.deployment import Door, _node_command
    from fedrts.flower.keys import Authority
    from fedrts.flower.link import Address

    experiment = config.resolve(TINY, config.nested({**KEYS, "method": "fedrts", "engine.name": "flower"}))
    words = _node_command(Door(Address("127.0.0.1", 1), Authority(Path("authority"))), Path("a.key"), range(2), None, experiment)
    flags = list(pairwise(words))
    assert ("--data", "planted:load") in flags
    for path in ("planted:net", "planted:rank", "planted:rule"):
        assert ("--allow", path) in flags


# -- what raises when it is imported ----------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["import sys; sys.exit(0)", "raise SystemExit", "raise GeneratorExit", "raise BaseException('what')"])
def test_a_module_that_ends_the_program_when_it_is_imported_does_not(planted: Path, line: str) -> None:
    (planted.parent / "planted.py").write_text(line)
    with pytest.raises(InputError, match=r"^cannot import the model 'planted:net': it raises \w+") as error:
        fedrts.run(**{**TINY, "model": "planted:net"})
    assert "\n" not in str(error.value)
    assert command("run", "--model", "planted:net") == (2, f"error: {error.value}\n")


def test_ctrl_c_while_a_module_is_imported_is_still_heard(planted: Path) -> None:
    (planted.parent / "planted.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        import_path("planted:net", "model")


def test_a_rule_inside_a_rule_can_only_narrow_it(planted: Path) -> None:
    with only_allowing(["planted:net", "planted:rank"]):
        with only_allowing(["planted:net", "planted:rule"]):
            assert callable(import_path("planted:net", "model"))
            for path in ("planted:rank", "planted:rule"):
                with pytest.raises(InputError, match=f"--allow {path}"):
                    import_path(path, "score")
        assert callable(import_path("planted:rank", "score"))
    assert callable(import_path("planted:rule", "rule")), "the user's own word needs no permission"


# -- somebody's run folder --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of names of the package alone; tests work on copies."""
    out = tmp_path_factory.mktemp("runs") / "run"
    fedrts.run(**TINY, data="digits", model="mlp", model_options={"hidden": [8]}, method="fedrts", out=out)
    return out


def given(finished: Path, to: Path, key: str, value: str, *, unfinished: bool = False) -> Path:
    """A copy of a run whose experiment names something else."""
    shutil.copytree(finished, to)
    settings = config.flat(tomllib.loads((to / "experiment.toml").read_text()))
    (to / "experiment.toml").write_text(tomli_w.dumps(config.nested({**settings, key: value})))
    if unfinished:
        (to / "summary.json").unlink()
        (to / "model.safetensors").unlink()
    return to


OPENING = {
    "evaluate": ["evaluate"],
    "evaluate on other data": ["evaluate", "--data", "digits"],
    "export onnx": ["export", "--format", "onnx"],
    "export an unfinished one": ["export"],
    "export an unfinished one densely": ["export", "--format", "dense"],
    "resume": ["resume", "--quiet"],
}


@pytest.mark.parametrize("how", OPENING)
@pytest.mark.parametrize(("key", "path"), [*KEYS.items(), ("data", "subprocess:Popen")])
def test_no_command_runs_code_that_a_folder_names(planted: Path, finished: Path, how: str, key: str, path: str) -> None:
    folder = given(finished, planted.parent / "theirs", key, path, unfinished="unfinished" in how or how == "resume")
    code, said = command(OPENING[how][0], folder, *OPENING[how][1:])
    assert (code, said.count("\n")) == (2, 1), said
    assert f"--allow {path} (in Python trust=True)" in said
    assert not planted.exists()
    assert "planted" not in sys.modules


@pytest.mark.parametrize("key", KEYS)
def test_load_and_resume_run_no_code_that_a_folder_names(planted: Path, finished: Path, key: str) -> None:
    folder = given(finished, planted.parent / "theirs", key, KEYS[key], unfinished=True)
    for opened in (fedrts.load, fedrts.resume):
        for trust in (False, [], ["planted:other"]):
            with pytest.raises(InputError, match=rf"'{KEYS[key]}' is not part of fedrts .*--allow {KEYS[key]} .*trust=True"):
                opened(folder, trust=trust)
    with pytest.raises(InputError, match="--allow"):
        fedrts.load(folder, model=torch.nn.Linear(2, 2))
    assert not planted.exists()


def test_looking_at_a_folder_needs_no_trust(planted: Path, finished: Path) -> None:
    """`inspect`, `report`, and the tensors of a finished run: no code is needed for them, and none runs."""
    folder = given(finished, planted.parent / "theirs", "model", "planted:net")
    for words in (["inspect", folder], ["report", folder, "--no-png"], ["export", folder], ["export", folder, "--format", "dense"]):
        code, said = command(*words)
        assert code == 0, said
    (folder / "summary.json").unlink()
    for words in (["inspect", folder], ["report", folder, "--no-png"]):
        assert command(*words)[0] == 0
    assert not planted.exists()


def test_what_a_folder_says_cannot_break_the_line_that_refuses_it(planted: Path, finished: Path) -> None:
    folder = given(finished, planted.parent / "theirs", "model", "a:b\n\x1b[2Jerror: all is well; rm -rf ~")
    code, said = command("evaluate", folder)
    assert (code, said.count("\n"), "\x1b" in said) == (2, 1, False)
    assert "--allow 'a:b" in said, "a hint that is pasted is one word to the shell"


class Stop(Exception):
    """A run is cut off."""


class Stopper(Silent):
    def played(self, record: Any) -> None:
        if record.round == 1:
            raise Stop


OWN = {**TINY, **config.nested({key: path for key, path in KEYS.items() if key != "method"}), "method": "fedrts"}
OWN["topology"] = {"interval": 2, "prunable": "planted:rule"}
OWN["train"] = {**TINY["train"], "server_optimizer": "planted:Steps"}


def test_ones_own_code_in_ones_own_folder(planted: Path) -> None:
    with pytest.raises(Stop):
        fedrts.run(**OWN, out="mine", observer=Stopper())
    forgotten(planted)
    allowed = [word for key, path in KEYS.items() if key != "method" for word in ("--allow", path)]
    code, said = command("resume", "mine")
    assert code == 2
    assert set(shlex.split(said)) >= set(allowed), "one refusal names all that is needed"
    assert not planted.exists()
    assert command("resume", "mine", *allowed[2:])[0] == 2
    hint = next(line for line in command("inspect", "mine", "--json")[1].splitlines() if "continue with" in line)
    again = shlex.split(hint.partition("fedrts ")[2].rstrip('",'))
    assert command(*again, "--quiet") == (0, ""), "the hint works as it stands"
    forgotten(planted)
    for words in (["evaluate", "mine"], ["export", "mine", "--format", "onnx"]):
        assert command(*words)[0] == 2
        assert not planted.exists()
    for words in (["evaluate", "mine"], ["export", "mine"]):
        code, said = command(*words, *allowed)
        assert code == 0, said
    for trust in (True, list(KEYS.values())):
        assert isinstance(fedrts.load("mine", trust=trust), torch.nn.Module)
    assert fedrts.resume("mine", trust=True).summary["rounds"] == 3


def test_an_interrupted_run_says_how_to_go_on_with_ones_own_code(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fedrts.api, "start", interrupted)
    code, said = command("run", "--model", "planted:net", "--data", "planted:load", "--out", "a folder", "--clients", 4, "--quiet")
    assert (code, said) == (130, "interrupted; continue with: fedrts resume 'a folder' --allow planted:net --allow planted:load\n")


def test_a_path_that_the_user_gives_is_the_users_own(planted: Path) -> None:
    """`--data PATH` of `evaluate` is no word of the folder's."""
    fedrts.run(**{**OWN, "method_options": {}, "topology": {"interval": 2}}, out="mine")
    assert command("evaluate", "mine", "--data", "planted:load", "--allow", "planted:net")[0] == 2, "the folder's word is not the user's"
    np.savez("own.npz", x=torch.randn(60, 6).numpy(), y=(torch.arange(60) % 3).numpy())
    fedrts.run(**TINY, data="npz:own.npz", model="mlp", model_options={"hidden": [8]}, method="fedrts", out="plain")
    assert command("evaluate", "plain", "--data", "planted:load")[0] == 0


def test_resuming_connects_to_nobodys_cluster(finished: Path, tmp_path: Path) -> None:
    """What a Ray cluster sends back is unpickled: an address in a folder is code as well."""
    folder = given(finished, tmp_path / "theirs", "engine.address", "ray.evil.example:6379", unfinished=True)
    settings = (folder / "experiment.toml").read_text()
    (folder / "experiment.toml").write_text(settings.replace('name = "serial"', 'name = "ray"'))
    shutil.rmtree(folder / "checkpoint")
    code, said = command("resume", folder, "--quiet")
    assert (code, said.count("\n")) == (2, 1), said
    assert "the Ray cluster 'ray.evil.example:6379' is not part of fedrts" in said
    assert "--allow ray.evil.example:6379" in said


# -- folders that comparisons and servers go on in --------------------------------------------------------------------


def test_settings_that_an_earlier_version_wrote_name_no_code_but_that_of_now(planted: Path) -> None:
    """Missing defaults of a checkpoint, of compare.toml and of a cell are filled in; this once followed any path."""
    now = config.flat(config.resolve({**TINY, "method": "fedrts"}).model_dump(mode="json"))
    for key, path in KEYS.items():
        old = {name: value for name, value in now.items() if name != "eval.every" and value is not None} | {key: path}
        assert (config.with_newer_keys(old, now) == old) == (key != "topology.prunable")  # which is not looked up for defaults
        assert not planted.exists()
    now["model"] = old["model"] = "planted:net"
    assert "eval.every" in config.with_newer_keys(old, now), "one's own stays"
    assert planted.exists()


def test_a_planted_cell_runs_no_code_when_a_comparison_goes_on(planted: Path, finished: Path) -> None:
    base = {**TINY, "data": "digits", "model": "mlp", "model_options": {"hidden": [8]}}
    (cell,) = Grid(base, ["fedrts"]).cells()
    Path("cells").mkdir()
    given(finished, Path("cells") / cell.name, "data", "planted:load", unfinished=True)
    with pytest.raises(InputError, match="--allow planted:load"):
        used([cell], Path("cells"))
    assert not planted.exists()


def test_a_comparison_of_ones_own_code_goes_on(planted: Path) -> None:
    settings = {key: value for key, value in OWN.items() if key != "method"}
    first = fedrts.compare(methods=["fedrts"], out="compared", **settings)
    assert not first.failures, first.failures
    for file in ("summary.json", "model.safetensors"):
        (first.out / "runs" / first.cells[0].name / file).unlink()
    forgotten(planted)
    again = fedrts.compare(methods=["fedrts"], out="compared", **settings)
    assert not again.failures, again.failures
    assert [row["accuracy"] for row in again.rows] == [row["accuracy"] for row in first.rows]


def test_a_server_goes_on_in_a_folder_without_running_what_is_planted_there(planted: Path, finished: Path) -> None:
    folder = given(finished, planted.parent / "theirs", "method_options.score", "planted:rank", unfinished=True)
    settings = config.from_file(finished / "experiment.toml")
    resolved = config.resolve(settings)
    with pytest.raises(InputError, match=r"holds a run of another experiment \(method_options\.score is 'planted:rank'"):
        RunFolder(folder).revised(resolved, ["method_options.score"])
    assert RunFolder(folder).revised(resolved, ["rounds"]) == {}
    with pytest.raises(InputError, match="--allow planted:rank"):
        fedrts.resume(folder, trust=config.foreign(resolved.model_dump()))
    assert checkpoint.load(folder / "checkpoint") is not None
    assert not planted.exists()

"""Ray's actors against the serial engine: the same client program over shares of a round, and sums instead of replies."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedrts
from fedrts.engines import ray as engine_module
from fedrts.engines.ray import connected, shares, spread
from fedrts.engines.serial import SerialEngine
from fedrts.engines.settings import EngineSettings
from fedrts.errors import InputError
from fedrts.observe import Silent
from fedrts.programs import library
from fedrts.server import rounds
from fedrts.server.client_records import ClientRecords
from fedrts.tasks import Classification
from fedrts.testing.agreement import OFTEN, agree, in_double, unequal
from helping import instruction_sets

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # before Ray is imported, as `connected` has it
ray = pytest.importorskip("ray", reason="Ray is an extra: pip install 'fedrts[ray]'")

pytestmark = pytest.mark.timeout(600)  # Ray starts processes that import torch, one after the other: on a busy machine that takes minutes

TWO = EngineSettings(name="ray", kernel="vectorised", slots=2, workers=1, actors=2, cpus=0.5)


@pytest.fixture(scope="module", autouse=True)
def started():
    """One Ray for all tests here: starting it takes seconds. Its actors may use the sparse kernels, where they are told to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(library.OFF, "1")
        with connected(TWO.but(actors=2, cpus=2.0), 2**28) as module:
            patch.undo()
            yield module


def played(engine, run, setup):
    return list(rounds.play(replace(run.plan, engine=engine), run.method.begin(setup), -1))


SECURE = {"secure": {"aggregation": True}}
KERNELS = {"topology": {**OFTEN, "unit": "kernel"}}
FALLING = {"topology": {**OFTEN, "density_start": 0.9}}
PAIRS = [("fedrts", "cnn"), ("feddst", "mlp"), ("fedavg", "tiny_gpt"), ("fedtiny", "cnn")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "model", "keywords"),
    [*((*pair, {}) for pair in PAIRS), ("feddst", "mlp", FALLING), ("fedrts", "mlp", SECURE), ("fedrts", "cnn", KERNELS)],
)
def test_two_actors_agree_with_one_client_after_the_other(method, model, keywords):
    """Outer rounds included; and an actor that was killed between two rounds changes no bit."""
    run = unequal(method, model, **keywords)
    bench, setup = in_double(run)
    with spread(TWO, bench, run.rows, 64) as engine:
        found = played(engine, run, setup)
        if model == "cnn":  # Ray copies what is as small as the toy text
            for access in ray.get([actor.__ray_call__.remote(_access) for actor in engine.actors]):
                assert access.endswith("s"), "the data lies in memory that actors share"
        first = ray.get(engine.actors[0].__ray_call__.remote(_process))
        os.kill(first, signal.SIGKILL)
        again = played(engine, run, setup)
        assert ray.get(engine.actors[0].__ray_call__.remote(_process)) != first
    agree(played(SerialEngine(bench, run.rows, 64), run, setup), found)
    assert any(one.record.outer for one in found)
    for a, b in zip(found, again, strict=True):
        assert torch.equal(a.state.weights, b.state.weights)
        assert a.state.mask == b.state.mask


@pytest.mark.slow
@pytest.mark.parametrize(("method", "wire"), [("fedtopk", {}), ("fedrts", {"value_type": "int4", "feedback": True})])
def test_what_clients_remember_is_what_it_is_in_one_process(toy, method, wire):
    """One client after the other in two actors: the bits of the serial engine, and its memories."""
    run = toy(method, "mlp", wire=wire, clients={"total": 5, "per_round": 3})
    here, there = (ClientRecords.of(run.plan.guard) for _ in range(2))
    expected = list(rounds.play(run.plan, run.method.begin(run.setup), -1, here))
    with spread(TWO.but(slots=0), run.bench, run.rows, 64) as engine:
        found = []
        for step in rounds.play(replace(run.plan, engine=engine), run.method.begin(run.setup), -1, there):
            found.append(step)
            if step.record.round == 1:
                os.kill(ray.get(engine.actors[0].__ray_call__.remote(_process)), signal.SIGKILL)
    same = ("clients", "rejected", "upload_bytes", "download_bytes", "flops")
    for a, b in zip(expected, found, strict=True):
        assert [getattr(a.record, key) for key in same] == [getattr(b.record, key) for key in same]
        torch.testing.assert_close(a.state.values, b.state.values, rtol=0, atol=0)
    assert sorted(here.residuals) == sorted(there.residuals)
    assert all(torch.equal(here.residuals[client], there.residuals[client]) for client in here.residuals)
    assert any(residual.count_nonzero() for residual in there.residuals.values())


@pytest.mark.slow
@pytest.mark.skipif(not instruction_sets(), reason="fedrts-kernels has no library")
@pytest.mark.parametrize("slots", [0, 3])
def test_sparse_kernels_give_the_bits_of_one_process_in_actors_too(toy, monkeypatch, slots):
    """Outer rounds included; an actor that is killed between two rounds comes back with the same kernel."""
    monkeypatch.setenv(library.OFF, "1")
    outer = {"interval": 2, "end": 2}
    isa = instruction_sets()[0]  # not the best of this machine: actors go by the settings
    here = toy("feddst", "cnn", rounds=3, topology=outer, engine={"name": "serial", "kernel": "sparse", "isa": isa})
    expected = played(here.plan.engine, here, here.setup)
    there = toy(
        "feddst", "cnn", rounds=3, topology=outer, engine={"name": "ray", "kernel": "sparse", "isa": isa, "slots": slots, "cpus": 0.5}
    )
    settings = there.experiment.engine
    assert (settings.kernel, settings.isa) == ("sparse", isa)
    found = []
    with spread(settings, there.bench, there.rows, 64) as engine:
        for step in rounds.play(replace(there.plan, engine=engine), there.method.begin(there.setup), -1):
            found.append(step)
            if len(found) == 1:
                assert set(ray.get([actor.__ray_call__.remote(_isa) for actor in engine.actors])) == {isa}
                os.kill(ray.get(engine.actors[0].__ray_call__.remote(_process)), signal.SIGKILL)
    assert any(one.record.outer for one in found)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a.state.values, b.state.values)
        assert a.state.mask == b.state.mask


class Mortal(nn.Module):
    """Kills its process once, in the middle of a client's training, if the file `marker` is there."""

    def __init__(self, marker):
        super().__init__()
        self.marker = str(marker)
        self.calls = 0
        self.inside, self.outside = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        self.calls += 1
        if float(x.detach().sum()) < 1e30 and self.calls > 5 and os.path.exists(self.marker):  # looks at numbers: clients take turns
            os.unlink(self.marker)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.outside(self.inside(x).relu())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
def test_an_actor_killed_in_the_middle_of_its_share_changes_no_bit(tmp_path):
    generator = torch.Generator().manual_seed(3)
    sets = [TensorDataset(torch.randn(size, 6, generator=generator), torch.arange(size) % 3) for size in (30, 8, 17, 24, 41)]
    marker = tmp_path / "die"

    class Executioner(Silent):
        def played(self, record):
            if record.round == 1:
                marker.touch()

    def trained(observer=None):
        torch.manual_seed(0)
        common: dict[str, Any] = {
            "engine": {"name": "ray", "cpus": 0.5},
            "batch_size": 8,
            "density": 0.5,
            "topology": {"interval": 2, "end": 4},
        }
        return fedrts.train(model=Mortal(marker), clients=sets, test=sets[0], rounds=4, lr=0.1, observer=observer, **common)

    whole, bereaved = trained(), trained(Executioner())
    assert not marker.exists()  # it has died
    assert torch.equal(whole.state.weights, bereaved.state.weights)
    assert whole.state.mask == bereaved.state.mask
    same = ("clients", "rejected", "loss", "upload_bytes", "download_bytes", "flops")
    assert [[line[key] for key in same] for line in whole.history] == [[line[key] for key in same] for line in bereaved.history]


@pytest.mark.parametrize(
    ("guard", "word"),
    [
        ({"reducer": "median"}, "guard.reducer = 'median' needs every client's weights"),
        ({"reducer": "trimmed_mean"}, "guard.reducer = 'trimmed_mean' needs every client's weights"),
        ({"deadline": 5.0}, "guard.deadline"),
        ({"over_select": 0.5}, "guard.over_select"),
    ],
)
def test_what_needs_every_client_is_refused(toy, guard, word):
    with pytest.raises(InputError, match=word):
        toy("fedrts", engine="ray", guard=guard)


def test_no_gpu_no_share_of_it(toy):
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match=r"engine\.gpus"):
            toy("fedrts", engine={"name": "ray", "gpus": 0.5})


@pytest.mark.slow
def test_clipping_votes_dropouts_and_rejections_are_those_of_one_process(toy, monkeypatch):
    """A sum that is no mean, a cap on votes, clients that vanish: what actors judge is what the server would have judged."""
    monkeypatch.setattr(engine_module, "FAN_IN", 2)  # five tallies: added in twos, twice
    guard = {"reducer": "clip", "norm_bound": 0.01, "max_share": 0.3}
    run = toy("fedrts", "mlp", clients={"total": 7, "per_round": 6, "dropout": 0.3}, guard=guard)
    bench, setup = in_double(run)
    with spread(TWO.but(actors=5, cpus=0.2), bench, run.rows, 64) as engine:
        found = played(engine, run, setup)
        nobody = replace(run.plan, guard=run.plan.guard.model_copy(update={"reducer": "mean", "norm_bound": 1e-9}), engine=engine)
        with pytest.raises(InputError, match=r"fewer than .* usable replies .* above the bound"):
            rounds.play_round(nobody, run.method.begin(setup), 0)
    for a, b in zip(played(SerialEngine(bench, run.rows, 64), run, setup), found, strict=True):
        torch.testing.assert_close(a.state.weights, b.state.weights, rtol=0, atol=1e-9)
        assert (a.record.clients, a.record.upload_bytes) == (b.record.clients, b.record.upload_bytes)
        assert sorted(a.record.rejected, key=str) == sorted(b.record.rejected, key=str)


class Stumbling(Classification):
    """A task whose loss cannot be had of some samples."""

    def loss(self, module, x, y, **how):
        if float(x.max()) > 1e6:
            raise RuntimeError("stumbled")
        return super().loss(module, x, y, **how)


def test_an_error_in_an_actor_names_its_client_and_round():
    run = unequal("fedavg", "mlp")
    client, data = run.plan.sample(1)[-1], run.data
    x = data.x.clone()
    x[run.rows[client]] = 1e7
    run.bench.data = replace(data, x=x, task=Stumbling())
    with spread(TWO.but(slots=0), run.bench, run.rows, 64) as engine, pytest.raises(RuntimeError, match="stumbled") as caught:
        rounds.play_round(replace(run.plan, engine=engine), run.method.begin(run.setup), 1)
    assert f"round 1, client {client}\n" in f"{caught.value}\n"


def _isa(worker):
    """The instruction set of an actor's sparse kernels, once it has worked."""
    return worker.engine.bench.program.isa


def _process(worker):
    return os.getpid()


def _access(worker):
    """How the memory of an actor's inputs is mapped: the last letter is `s` where it is shared, `p` where it is private."""
    address = worker.engine.bench.data.x.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < stop:
            return line.split()[1]
    return ""


def test_shares_are_balanced_complete_and_never_empty():
    steps = [5, 1, 1, 1, 9, 3, 0, 2]
    parts = shares(steps, 3)
    assert sorted(place for part in parts for place in part) == list(range(8))
    assert max(sum(max(steps[place], 1) for place in part) for part in parts) <= 9
    assert shares([4, 4], 5) == [[0], [1]]
    assert shares([], 5) == []


def test_actors_are_as_important_as_the_run_itself(started):
    """Ray makes its workers nicer than everything else (15): beside a busy loop per core rounds took thirty times as long."""
    nice = started.get(started.remote(num_cpus=0)(lambda: os.getpriority(os.PRIO_PROCESS, 0)).remote())
    assert nice == os.getpriority(os.PRIO_PROCESS, 0)


def test_ray_listens_on_loopback_only(started):
    assert started.util.get_node_ip_address() == "127.0.0.1"


@pytest.mark.slow
@pytest.mark.parametrize(("how", "kernel"), [(signal.SIGINT, "auto"), (signal.SIGTERM, "auto"), (signal.SIGTERM, "sparse")])
def test_an_interrupted_run_leaves_no_process_and_resumes_to_the_same_bits(tmp_path, how, kernel, monkeypatch):
    monkeypatch.setenv(library.OFF, "1" if kernel == "sparse" else "0")
    base = [sys.executable, "-m", "fedrts"]
    settings = ["--engine", "ray", "--rounds", "8", "--set", "train.epochs=1", "--set", "eval.every=1", "--quiet"]
    settings += ["--set", f"engine.kernel={kernel}"]
    subprocess.run([*base, "run", *settings, "--out", str(tmp_path / "whole")], check=True)
    cut = subprocess.Popen([*base, "run", *settings, "--out", str(tmp_path / "cut")], stderr=subprocess.PIPE, text=True)
    history = tmp_path / "cut" / "history.jsonl"
    while not (history.exists() and history.read_text().count("\n") >= 2):
        time.sleep(0.01)
        assert cut.poll() is None
    cut.send_signal(how)
    _, said = cut.communicate(timeout=300)
    assert (cut.returncode, "fedrts resume" in said) == (130, True), said
    assert not [name for name in _processes() if f"--out {tmp_path}" in name or f"--raylet-pid={cut.pid}" in name]
    subprocess.run([*base, "resume", str(tmp_path / "cut"), "--quiet"], check=True)
    for name in ("model.safetensors", "masks.safetensors", "topology.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def _processes():
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            yield (folder / "cmdline").read_text().replace("\0", " ")


@pytest.mark.slow
def test_cells_of_a_comparison_are_tasks_with_the_same_resume_rules(tmp_path):
    common: dict[str, Any] = {"methods": ["fedrts", "random"], "seeds": (0,), "rounds": 2, "epochs": 1}
    spread_out = fedrts.compare(**common, jobs=2, engine="ray", out=tmp_path / "ray")
    fedrts.compare(**common, out=tmp_path / "here")
    assert not spread_out.failures
    for name in ("fedrts-d0.2-s0", "random-d0.2-s0"):
        first, second = (tmp_path / kind / "runs" / name / "model.safetensors" for kind in ("ray", "here"))
        assert first.read_bytes() == second.read_bytes()
    (tmp_path / "ray" / "runs" / "random-d0.2-s0" / "summary.json").unlink()
    kept = tmp_path / "ray" / "runs" / "fedrts-d0.2-s0" / "summary.json"
    before = kept.stat().st_mtime_ns
    assert not fedrts.compare(**common, jobs=2, engine="ray", out=tmp_path / "ray").failures  # only what is missing is played
    assert (tmp_path / "ray" / "runs" / "random-d0.2-s0" / "summary.json").exists()
    assert kept.stat().st_mtime_ns == before

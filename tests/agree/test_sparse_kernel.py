"""`engine.kernel = "sparse"`: whole federations in kernels that compute active links alone, against dense ones and against each other."""

import tomllib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fedrts
from fedrts import methods
from fedrts.engines import choice, sparse_kernel
from fedrts.engines.kinds import kind
from fedrts.engines.settings import EngineSettings
from fedrts.errors import InputError, Note
from fedrts.observe.console import ConsoleObserver
from fedrts.programs import library
from fedrts.server import rounds
from fedrts.sparse.dispatch import Watching
from helping import order_of

fedrts_kernels = pytest.importorskip("fedrts_kernels")
if not fedrts_kernels.FILE.exists():
    pytest.skip("fedrts-kernels has no library: there was no C compiler", allow_module_level=True)
ISAS = fedrts_kernels.load().isas
SPARSE: dict[str, Any] = {"kernel": "sparse"}
OUTER = {"interval": 2, "end": 2}
"""Rounds 0 and 2 change the topology."""


@pytest.fixture(autouse=True)
def kernels_on(monkeypatch):
    monkeypatch.setenv(library.OFF, "1")


def played(run):
    """The last state and the records of the rounds."""
    state, records = run.method.begin(run.setup), []
    if run.method.exchanges(run.plan.round(-1, state.mask)):
        state = rounds.play_round(run.plan, state, -1).state
    for step in rounds.play(run.plan, state, 0):
        state = step.state
        records.append({**step.record.as_dict(), "seconds": 0})
    return state, records


@pytest.mark.parametrize(("model", "unit"), [("cnn", "kernel"), ("mlp", "block:2×2")])
def test_masks_of_whole_arms_are_masks(toy, model, unit):
    state, records = played(toy("fedrts", model, engine=SPARSE, topology={**OUTER, "unit": unit}, rounds=3))
    dense, expected = played(toy("fedrts", model, topology={**OUTER, "unit": unit}, rounds=3))
    assert state.mask.sizes.grouped
    assert [record["upload_bytes"] for record in records] == [record["upload_bytes"] for record in expected]
    assert records[0]["links_changed"] > 0
    if state.mask == dense.mask:
        torch.testing.assert_close(state.weights, dense.weights, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("method", methods.names())
def test_every_method_takes_the_steps_of_the_dense_kernels(toy, method):
    """One round: the same weights up to rounding, the same bytes and FLOPs."""
    for model in ("mlp", "cnn"):
        dense, sparse = (toy(method, model, rounds=1, topology={"interval": 1, "end": 1}, engine=engine) for engine in ({}, SPARSE))
        assert sparse.bench.program is not None
        (before, lines), (after, found) = played(dense), played(sparse)
        for key in ("upload_bytes", "download_bytes", "flops", "clients"):
            assert [line[key] for line in lines] == [line[key] for line in found]
        torch.testing.assert_close(after.weights, before.weights, rtol=2e-3, atol=2e-4)
        assert lines[-1]["loss"] == pytest.approx(found[-1]["loss"], rel=1e-3)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"train": {"momentum": 0.9, "weight_decay": 0.01, "proximal": 0.1, "clip": 1.0}},
    "adam": {"train": {"optimizer": "adam", "lr": 0.01, "proximal": 0.1}},
    "smoothing": {"train": {"smoothing": 0.1, "schedule": "cosine"}},
    "more clients than samples": {"train": {"batch_size": 64}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_training_is_that_of_the_dense_kernels(toy, name):
    dense, sparse = (toy("fedrts", "cnn", rounds=3, topology=OUTER, engine=engine, **OPTIONS[name]) for engine in ({}, SPARSE))
    assert sparse.bench.program is not None
    (before, _), (after, _) = played(dense), played(sparse)
    moved = float((before.weights - dense.setup.weights).norm())
    assert float((after.weights - before.weights).norm()) < 0.02 * moved


@pytest.mark.parametrize(("method", "isa"), [("fedrts", ISAS[-1]), *(("feddst", isa) for isa in ISAS)])
def test_engines_and_threads_change_no_bit(toy, method, isa):
    """`feddst`: masks of one's own. Nothing here depends on gradients of inactive links, which dense kernels compute."""
    serial, lines = played(toy(method, "cnn", rounds=3, topology=OUTER, engine={**SPARSE, "isa": isa}))
    for workers in (1, 2, 5):
        engine = {"name": "batched", "workers": workers, **SPARSE, "isa": isa}
        run = toy(method, "cnn", rounds=3, topology=OUTER, engine=engine)
        assert "sparse" in run.plan.engine.label
        state, found = played(run)
        assert torch.equal(state.values, serial.values)
        assert state.mask == serial.mask
        assert found == lines


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_learns_the_same(toy, isa):
    run = toy("fedrts", "cnn", rounds=2, topology=OUTER, engine={**SPARSE, "isa": isa})
    assert run.experiment.engine.isa == isa
    best = played(toy("fedrts", "cnn", rounds=2, topology=OUTER, engine=SPARSE))[0]
    torch.testing.assert_close(played(run)[0].values, best.values, rtol=1e-3, atol=1e-3)


def test_evaluation_is_that_of_the_dense_model(toy):
    run, dense = toy("fedrts", "cnn", engine=SPARSE), toy("fedrts", "cnn")
    state = run.method.begin(run.setup)
    found, expected = run.plan.engine.evaluate(state), dense.plan.engine.evaluate(state)
    assert found == pytest.approx(expected, rel=1e-5)


def engine_of(folder):
    return tomllib.loads((folder / "experiment.toml").read_text("utf-8"))["engine"]


def test_a_folder_names_its_kernel_and_is_refused_where_that_is_not(tmp_path, monkeypatch):
    fedrts.run(rounds=1, epochs=1, density=0.2, device="cpu", engine=SPARSE, out=tmp_path / "run", checkpoint={"every": 1})
    (tmp_path / "run" / "summary.json").unlink()  # as if it had been killed
    assert {key: engine_of(tmp_path / "run")[key] for key in ("kernel", "isa")} == {"kernel": "sparse", "isa": ISAS[-1]}
    monkeypatch.setenv(library.OFF, "0")
    with pytest.raises(InputError, match=f"engine.kernel = 'sparse' on {ISAS[-1]}: .* turns fedrts-kernels off"):
        fedrts.resume(tmp_path / "run")
    monkeypatch.setenv(library.OFF, "1")
    monkeypatch.setattr(library.kernels(), "isas", ("portable",))
    if ISAS[-1] != "portable":
        with pytest.raises(InputError, match=f"engine.isa = '{ISAS[-1]}': this processor has portable"):
            fedrts.resume(tmp_path / "run")


def test_without_the_library_clients_compute_densely_and_are_told_so(toy, monkeypatch):
    monkeypatch.setenv(library.OFF, "0")
    with pytest.warns(Note, match="clients compute densely: .* turns fedrts-kernels off"):
        run = toy("fedrts", "mlp", engine=SPARSE)
    assert run.experiment.engine.kernel == "auto"
    assert run.bench.program is None


def test_an_install_without_a_compiler_says_so_once(toy, monkeypatch):
    library._found.cache_clear()

    def nothing(*arguments):
        raise OSError("cannot open shared object file")

    monkeypatch.setattr(fedrts_kernels, "load", nothing)
    monkeypatch.setattr(fedrts_kernels, "FILE", fedrts_kernels.FILE.with_name("missing.so"))
    try:
        with pytest.warns(Note, match="clients compute densely: fedrts-kernels was installed without a C compiler"):
            toy("fedrts", "mlp", density=0.2, topology={"budget": "prunable"}, engine="auto")
    finally:
        library._found.cache_clear()


def test_a_model_with_an_unknown_part_computes_densely_and_is_told_which(toy):
    bench = toy("fedrts", "mlp").bench
    bench.module[2] = nn.GELU()
    with pytest.warns(Note, match=r"clients compute densely: the sparse kernel does not know GELU\(.*\) at '2'"):
        assert choice.decided(sparse_kernel.required(EngineSettings(**SPARSE), bench), bench, 3).kernel == "vectorised"
    with pytest.warns(Note, match="clients compute densely: the sparse kernel does not know the task Language"):
        assert toy("fedrts", "tiny_gpt", engine=SPARSE).bench.program is None


def test_rows_that_a_sample_does_not_show(toy):
    """Labels that a loss leaves out, and test images of another size, which the dense model takes."""
    bench = toy("fedrts", "cnn").bench
    left_out, larger = bench.data.y.clone(), torch.nn.functional.pad(bench.data.test_x, (0, 2))
    left_out[3] = -100
    assert sparse_kernel.reason_against(bench, ISAS[-1]) is None
    for changed, said in (({"y": left_out}, "labels below 0"), ({"test_x": larger}, "inputs of two sizes")):
        assert said in str(sparse_kernel.reason_against(replace(bench, data=replace(bench.data, **changed)), ISAS[-1]))


@pytest.mark.parametrize(
    ("density", "isa", "taken"),
    [
        (0.1, "avx512", True),
        (0.3, "avx512", True),
        (0.31, "avx512", False),
        (0.1, "avx2", True),
        (0.2, "avx2", False),
        (0.1, "portable", False),
    ],
)
def test_auto_takes_the_kernel_where_it_is_faster(toy, monkeypatch, density, isa, taken):
    monkeypatch.setattr(sparse_kernel, "best_isa", lambda: isa)
    monkeypatch.setattr(sparse_kernel, "reason_against", lambda bench, isa: None)
    run = toy("fedrts", "mlp")
    experiment = run.experiment.model_copy(update={"density": density})
    for name in ("auto", "serial", "batched", "flower"):
        asked = EngineSettings(name=name)
        found = sparse_kernel.resolved(asked, experiment, run.bench)
        assert found == (asked.but(kernel="sparse", isa=isa) if taken and name == "auto" else asked)


def test_a_default_run_takes_it(tmp_path):
    fedrts.run(rounds=1, epochs=1, density=0.1, device="cpu", out=tmp_path / "run")
    expected = ("batched", "sparse") if sparse_kernel.WORTH[ISAS[-1]] >= 0.1 else ("batched", "vectorised")
    assert (engine_of(tmp_path / "run")["name"], engine_of(tmp_path / "run")["kernel"]) == expected


def test_tuning_measures_it_too(toy):
    run = toy("fedrts", "mlp")
    kernels = {settings.kernel for settings in choice.Auto().candidates(EngineSettings(), run.bench, 3)}
    assert kernels == {"auto", "vectorised", "streamed", "sparse"}
    (only,) = kind("serial").candidates(EngineSettings(name="serial", kernel="sparse"), run.bench, 3)
    assert only.isa == ISAS[-1]


class Largest(Watching):
    """Remembers how many floats the largest tensor has that comes into being."""

    def __init__(self):
        super().__init__()
        self.floats = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.is_floating_point():
            self.floats = max(self.floats, found.untyped_storage().nbytes() // found.element_size())
        return found


@pytest.mark.parametrize("training", [{}, {"momentum": 0.9, "proximal": 0.1, "clip": 1.0}])
def test_a_client_in_an_inner_round_makes_no_dense_vector(toy, training):
    run = toy("fedrts", "mlp", density=0.1, model_options={"hidden": [300, 300]}, engine=SPARSE, train=training)
    state = run.method.begin(run.setup)
    largest = {}
    for index, expected in ((1, False), (0, True)):  # an inner round, and an outer one with its probe of all links
        (exchange,) = run.plan.exchanges(run.plan.round(index, state.mask))
        order = order_of(run, exchange, state, index)
        with Largest() as seen:
            run.bench.work(order, 0, run.rows[0])
        largest[index] = seen.floats
        assert (seen.floats >= run.layout.links) is expected
    assert largest[1] <= 1.5 * len(state.values)


def test_a_run_tells_the_time_of_a_step_beside_a_dense_one_and_keeps_its_model(tmp_path, capsys):
    keywords: dict[str, Any] = {"rounds": 2, "epochs": 1, "density": 0.2, "device": "cpu", "engine": SPARSE}
    told = fedrts.run(**keywords, out=tmp_path / "told", observer=ConsoleObserver())
    assert "time of a client's step" in capsys.readouterr().out
    quiet = fedrts.run(**keywords, out=tmp_path / "run")
    for name, tensor in quiet.model.state_dict().items():
        assert torch.equal(tensor, told.model.state_dict()[name])
    assert "step_ms" not in (tmp_path / "run" / "summary.json").read_text("utf-8")

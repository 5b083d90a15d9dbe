"""Runs are put together and named by what differs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from fedrts.report import tables
from fedrts.report.read import find
from fedrts.report.settings import common, differing, grouped, short, unlikeness
from fedrts.tasks.metrics import ACCURACY
from handmade import write


def problems(tmp_path, *runs):
    for number, run in enumerate(runs):
        write(tmp_path / f"{number:03}", **{"accuracies": [0.1, 0.2], **run})
    return grouped(find([tmp_path]).runs)


def labels(tmp_path, *runs):
    (problem,), _ = problems(tmp_path, *runs)
    return [setting.label for setting in problem.settings]


def test_one_setting_is_named_by_its_method(tmp_path):
    assert labels(tmp_path, {"seed": 0}, {"seed": 1}) == ["fedrts"]


def test_methods_and_densities_from_dense_to_sparse(tmp_path):
    runs = [{"method": method, "density": density} for method in ("random", "fedrts", "fedavg") for density in (0.1, 0.2)]
    assert labels(tmp_path, *runs) == ["fedavg", "fedrts d=0.2", "fedrts d=0.1", "random d=0.2", "random d=0.1"]


def test_the_density_of_dense_methods_tells_nothing(tmp_path):
    assert labels(tmp_path, {"method": "fedavg", "density": 0.2}, {"density": 0.3}) == ["fedavg", "fedrts"]


def test_only_keys_that_differ_are_named(tmp_path):
    found = labels(tmp_path, {"clients": {"total": 2, "alpha": 0.5}}, {"clients": {"total": 2, "alpha": 0.1}})
    assert found == ["alpha=0.1", "alpha=0.5"]


def test_a_methods_options_are_compared_with_its_own_runs_alone(tmp_path):
    runs = [{"method_options": {"gamma": 0.5}}, {"method": "random"}, {"method": "fedtiny", "method_options": {"abns": True}}]
    assert labels(tmp_path / "a", *runs) == ["fedrts", "fedtiny", "random"]
    found = labels(tmp_path / "b", *runs, {"method_options": {"gamma": 0.9}})
    assert found == ["fedrts gamma=0.5", "fedrts gamma=0.9", "fedtiny", "random"]


def test_engine_device_and_folder_are_no_settings(tmp_path):
    runs = [{"seed": 0, "device": "cpu", "out": "a"}, {"seed": 1, "device": "cuda", "out": "b", "engine": {"name": "batched"}}]
    assert labels(tmp_path, *runs) == ["fedrts"]


def test_what_was_decided_for_an_engine_is_no_setting_but_its_precision_is(tmp_path):
    tables = [
        {"name": "batched", "kernel": "vectorised", "slots": 10, "workers": 2},
        {"name": "batched", "kernel": "streamed", "workers": 1},
    ]
    (problem,), _ = problems(tmp_path / "same", *({"seed": seed, "engine": table} for seed, table in enumerate(tables)))
    assert [len(setting.runs) for setting in problem.settings] == [2]
    assert len(labels(tmp_path / "other", {"engine": {"precision": "bf16"}}, {"engine": {"precision": "float32"}})) == 2


def test_a_repeated_seed_counts_once_and_is_said(tmp_path):
    (problem,), repeats = problems(tmp_path, {"seed": 0}, {"seed": 1}, {"seed": 0})
    assert [run.seed for run in problem.runs] == [0, 1]
    assert repeats == [f"{tmp_path / '002'}: left out, it repeats {tmp_path / '000'} (same setting and seed)"]


def test_unfinished_runs_stand_apart(tmp_path):
    (problem,), _ = problems(tmp_path, {"seed": 0}, {"seed": 1, "finished": False})
    assert [setting.label for setting in problem.settings] == ["fedrts", "fedrts (unfinished)"]
    assert [setting.label for setting in problem.finished] == ["fedrts"]


def test_data_and_model_make_problems(tmp_path):
    found, _ = problems(tmp_path, {}, {"model": "cnn"}, {"data": "folder:/a/b/photos.d"}, {"data": "pkg.module:rings"})
    assert {problem.title for problem in found} == {"digits · mlp", "digits · cnn", "photos · mlp", "rings · mlp"}
    assert len({problem.id for problem in found}) == 4


def test_ids_stay_apart_where_names_do_not(tmp_path):
    found, _ = problems(tmp_path, {"data": "npz:/a/x.npz"}, {"data": "npz:/b/x.npz"})
    assert len({problem.id for problem in found}) == 2


def test_methods_have_a_hue_and_other_keys_a_dash(tmp_path):
    (problem,), _ = problems(
        tmp_path, *({"method": m, "density": d} for m in ("fedrts", "random") for d in (0.2, 0.1)), {"method": "fedavg"}
    )
    looks = {setting.label: (setting.hue, setting.dash) for setting in problem.settings}
    assert looks == {"fedavg": (0, 0), "fedrts d=0.2": (1, 0), "fedrts d=0.1": (1, 1), "random d=0.2": (2, 0), "random d=0.1": (2, 1)}


def test_what_differs_and_what_is_common(tmp_path):
    (problem,), _ = problems(tmp_path, {"density": 0.2}, {"density": 0.1, "train": {"lr": 0.5}})
    assert differing(problem.runs) == ["density", "train.lr"]
    assert common(problem.runs)["clients.total"] == 2
    assert "train.lr" not in common(problem.runs)
    assert unlikeness(*problem.runs) == 1


def test_short_names():
    assert [short(name) for name in ("digits", "npz:/a/b.npz", "pkg.mod:make", "tiny_gpt")] == ["digits", "b", "make", "tiny_gpt"]
    assert short(str(Path("my") / "model.py")) == "model"


def test_what_a_script_gave_is_told_apart_by_what_it_is(tmp_path):
    """Two models, or two data sets, both called custom."""
    given: dict[str, Any] = {"data": "custom", "model": "custom"}
    first, other, more = (write(tmp_path / name, [0.1, 0.2], **given) for name in ("first", "other", "more"))
    (other / "masks.safetensors").write_bytes(safetensors.numpy.save({"a.weight": np.ones((10, 6), bool)}))
    (more / "clients.json").write_text(json.dumps([{"client": 0, "samples": 7, "labels": [3, 4]}]), "utf-8")
    write(tmp_path / "seed", [0.1, 0.2], seed=1, **given)
    found, repeats = grouped(find([tmp_path]).runs)
    assert repeats == []
    assert [[run.path.rpartition("/")[2] for run in problem.runs] for problem in found] == [["first", "seed"], ["more"], ["other"]]
    assert [problem.title for problem in found] == [
        "custom · custom · 12 samples · 160 links",
        "custom · custom · 7 samples · 160 links",
        "custom · custom · 12 samples · 60 links",
    ]
    assert first.exists()


def test_keys_that_an_earlier_version_did_not_know_have_their_defaults(tmp_path):
    (problem,), _ = problems(tmp_path, {"train": {"lr": 0.1}}, {"train": {"lr": 0.1, "proximal": 0.0}, "seed": 1})
    assert [len(setting.runs) for setting in problem.settings] == [2]


def test_values_that_look_alike_are_two_settings(tmp_path):
    assert set(labels(tmp_path, {"train": {"lr": 0.2}}, {"train": {"lr": 0.2000001}})) == {"lr=0.2", "lr=0.2000001"}


def given(task, data="d", model="m"):
    return {"given": {"model": model, "data": data, "task": task}}


def test_two_tasks_of_a_script_are_two_problems(tmp_path):
    """The same clients, the same layers, another loss."""
    custom = {"data": "custom", "model": "custom", "accuracies": [0.1, 0.2]}
    tasks = [("cross_entropy #1", 0), ("mse_loss #2", 0), ("cross_entropy #1", 1)]
    found, repeats = problems(tmp_path, *({**custom, "seed": seed, "summary": given(task)} for task, seed in tasks))
    assert repeats == []
    assert [(problem.title.rpartition(" · ")[2], [run.seed for run in problem.runs]) for problem in found] == [
        ("cross_entropy", [0, 1]),
        ("mse_loss", [0]),
    ]


def test_other_data_of_the_same_sizes_are_no_repeat_and_seeds_may_draw_theirs(tmp_path):
    custom = {"data": "custom", "model": "custom"}
    drawn = [{**custom, "seed": seed, "summary": given("t #1", data=f"d{seed}")} for seed in (0, 1)]
    (problem,), _ = problems(tmp_path / "drawn", *drawn)
    assert [run.seed for run in problem.runs] == [0, 1]
    found, repeats = problems(tmp_path / "two", *({**custom, "summary": given("t #1", data=name)} for name in "ab"))
    assert (len(found), repeats) == (2, [])
    _, repeats = problems(tmp_path / "same", *({**custom, "summary": given("t #1")} for _ in range(2)))
    assert len(repeats) == 1


def test_tags_tell_settings_apart(tmp_path):
    runs = [{}, {"tags": []}, {"tags": ["after", "fix"]}]
    (problem,), repeats = problems(tmp_path, *runs)
    assert [setting.label for setting in problem.settings] == ["#after #fix", "fedrts"]
    assert len(repeats) == 1, "an older run without the key has no tags"
    table = tables.runs(problem, ACCURACY)
    place = [column.title for column in table.columns].index("tags")
    assert [row[place] for row in table.rows] == ["after, fix", "–"]

"""Run folders become plain structures; what is damaged becomes one line."""

import json

import pytest

from fedrts.errors import InputError
from fedrts.report.content import compose
from fedrts.report.read import find, read
from fedrts.report.settings import grouped
from fedrts.runs.folder import RunFolder
from handmade import line, write


def test_a_run_is_read_as_it_stands(tmp_path):
    run = read(write(tmp_path / "a", [0.1, None, 0.3], seed=4, density=0.1))
    assert (run.method, run.seed, run.dense, run.finished, run.played) == ("fedrts", 4, False, True, 3)
    assert run.settings["density"] == 0.1
    assert run.settings["train.lr"] == 0.1
    assert run.versions == {"fedrts": "0.1.0", "torch": "2.13.0"}
    assert [entry["accuracy"] for entry in run.history] == [0.1, None, 0.3]
    assert run.links == {"a.weight": 60, "b.weight": 100}
    assert run.clients[1]["labels"] == [0, 4]


def test_a_dense_method_has_density_one_whatever_its_file_says(tmp_path):
    run = read(write(tmp_path / "a", [0.1], method="fedavg", density=0.2))
    assert run.dense
    assert run.settings["density"] == 1.0


def test_a_method_that_is_not_here_is_dense_by_its_result(tmp_path):
    assert read(write(tmp_path / "a", [0.1], method="their.package:Method", summary={"density": 1.0})).dense
    assert not read(write(tmp_path / "b", [0.1], method="their.package:Method", summary={"density": 0.3})).dense


def test_reading_a_folder_runs_no_code_that_it_names(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.chdir(tmp_path)
    assert not read(write(tmp_path / "a", [0.1], method="planted:X")).dense


def test_runs_are_found_below_a_folder_once(tmp_path):
    for name in ("x/runs/one", "x/runs/two", "y"):
        write(tmp_path / name, [0.1])
    write(tmp_path / "x/.trash/three", [0.1])
    found = find([tmp_path / "x", tmp_path / "y", tmp_path / "x/runs/one"])
    assert [run.path for run in found.runs] == [str(tmp_path / name) for name in ("x/runs/one", "x/runs/two", "y")]
    assert found.problems == []


def test_a_torn_last_line_does_not_count_and_the_run_is_unfinished(tmp_path):
    folder = write(tmp_path / "a", [0.1, 0.2, 0.3], finished=False)
    with open(folder / "history.jsonl", "a") as log:
        log.write('{"round": 3, "acc')
    run = read(folder)
    assert (run.played, run.finished) == (3, False)
    (problem,) = compose(find([tmp_path])).problems
    assert problem == f"{folder}: unfinished after 3 of 3 rounds; fedrts resume {folder}"


def test_a_run_that_runs_now_is_running(tmp_path):
    folder = write(tmp_path / "a", [0.1, 0.2, 0.3], finished=False, rounds=5)
    with RunFolder(folder).writing():
        report = compose(find([tmp_path]))
    (runs,) = (table for table in report.tables if table.id.endswith("-runs"))
    assert report.problems == [f"{folder}: running after 3 of 5 rounds"]
    assert runs.rows[0][1:4] == ["fedrts (running)", 0, "running, round 3 of 5"]
    (problem,) = compose(find([tmp_path])).problems
    assert problem == f"{folder}: unfinished after 3 of 5 rounds; fedrts resume {folder}"


def test_running_and_unfinished_runs_are_told_apart(tmp_path):
    write(tmp_path / "a", [0.1], finished=False, seed=1)
    running = write(tmp_path / "b", [0.1], finished=False)
    with RunFolder(running).writing():
        (problem,), _ = grouped(find([tmp_path]).runs)
    assert sorted(setting.label for setting in problem.settings) == ["fedrts (running)", "fedrts (unfinished)"]


def test_a_run_of_sites_goes_on_by_its_server(tmp_path):
    folder = write(tmp_path / "a", [0.1], finished=False, clients={"total": 2, "partition": "sites"})
    (problem,) = compose(find([tmp_path])).problems
    assert problem.endswith(f"; fedrts server {folder / 'experiment.toml'} --out {folder} --tls DIR")


def half(text):
    return text[: len(text) // 2]


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("experiment.toml", lambda text: text.replace("=", "", 1), "experiment.toml is damaged: Expected"),
        ("experiment.toml", lambda text: text.replace('method = "fedrts"\n', ""), "experiment.toml is damaged: method: Field required"),
        ("experiment.toml", lambda text: text.replace("seed = 1", 'seed = "one"'), "experiment.toml is damaged: seed: "),
        ("history.jsonl", lambda text: half(text) + "\n" + text, "history.jsonl is damaged"),
        ("history.jsonl", lambda text: text.replace('"flops"', '"flips"'), "history.jsonl is damaged: 0.flops: Field required"),
        ("history.jsonl", lambda text: "[1]\n", "history.jsonl is damaged: 0: "),
        ("history.jsonl", lambda text: text.replace('"accuracy": 0.1', '"accuracy": NaN', 1), "0.accuracy: Input should be a finite"),
        ("history.jsonl", lambda text: text.replace('"flops": 1000.0', '"flops": 1e999', 1), "0.flops: Input should be a finite number"),
        ("history.jsonl", lambda text: text.replace('_bytes": 100', '_bytes": 1' + "0" * 400, 1), "0.upload_bytes: Input should be less"),
        ("history.jsonl", lambda text: "[" * 100_000 + "\n", "history.jsonl is damaged: maximum recursion"),
        ("topology.jsonl", lambda text: text.replace("[0, 0, ", "[0, ", 1), "topology.jsonl is damaged: 0.belief_active: "),
        ("clients.json", lambda text: text.replace("[0, 4]", "null"), "clients.json is damaged: its clients do not have the same"),
        ("clients.json", lambda text: text.replace("[0, 4]", "[4]"), "clients.json is damaged: its clients do not have the same"),
        ("topology.jsonl", lambda text: "nonsense\n", "topology.jsonl is damaged"),
        ("topology.jsonl", lambda text: text.replace('"overlap": 0.9', '"overlap": "much"'), "topology.jsonl is damaged: 0.overlap: "),
        ("clients.json", half, "clients.json is damaged"),
        ("fairness.json", half, "fairness.json is damaged"),
        ("summary.json", half, "summary.json is damaged"),
        ("summary.json", lambda text: "{}", "summary.json is damaged: density: Field required"),
    ],
)
def test_a_damaged_folder_is_one_line_and_the_rest_is_reported(tmp_path, name, damage, says):
    write(tmp_path / "good", [0.1] * 3)
    bad = write(tmp_path / "bad", [0.1] * 3, seed=1)
    (bad / name).write_text(damage((bad / name).read_text("utf-8")), "utf-8")
    found = find([tmp_path])
    assert [run.path for run in found.runs] == [str(tmp_path / "good")]
    (problem,) = found.problems
    assert problem.startswith(f"{bad}: left out: ")
    assert says in problem
    assert "\n" not in problem
    assert problem in compose(found).problems


def test_masks_that_are_no_masks(tmp_path):
    folder = write(tmp_path / "a", [0.1])
    (folder / "masks.safetensors").write_bytes(b"none")
    assert "masks.safetensors" in find([tmp_path]).problems[0]


def test_a_folder_without_runs_is_said_and_a_missing_one_refused(tmp_path):
    assert "no run folder in it" in find([tmp_path]).problems[0]
    with pytest.raises(InputError, match="there is no folder"):
        find([tmp_path / "nowhere"])


def test_rejected_replies_are_failures_and_drop_outs_are_not(tmp_path):
    reasons = ["values that are not finite", "dropped out", "late", "values that are not finite", "wrong round"]
    history = [line(0, 0.1, rejected=[{"client": 0, "reason": reason} for reason in reasons])]
    folder = write(tmp_path / "a", [0.1], history=history)
    (problem,) = compose(find([tmp_path])).problems
    assert problem == f"{folder}: 3 rejected replies: 2 × values that are not finite; 1 × wrong round"


def test_an_old_run_without_fairness_has_a_report(tmp_path):
    write(tmp_path / "a", [0.1] * 3, fairness=None)
    report = compose(find([tmp_path]))
    assert not any("fairness" in table.id for table in report.tables)
    assert report.figures


def test_a_run_that_has_only_begun(tmp_path):
    folder = write(tmp_path / "a", [], finished=False, rounds=5)
    for name in ("history.jsonl", "topology.jsonl", "clients.json"):
        (folder / name).unlink()
    (problem,) = compose(find([tmp_path])).problems
    assert "unfinished after 0 of 5 rounds" in problem
    json.dumps([figure.id for figure in compose(find([tmp_path])).figures])


def test_a_comparison_tells_its_failed_cells_and_keeps_its_trials_to_itself(tmp_path):
    write(tmp_path / "set" / "runs" / "one", [0.1])
    write(tmp_path / "set" / "tuning" / "two", [0.1], seed=5)
    write(tmp_path / "tuning" / "three", [0.1], seed=6)  # somebody's folder of that name is no comparison's
    (tmp_path / "set" / "compare.toml").write_text("", "utf-8")
    (tmp_path / "set" / "failures.json").write_text(json.dumps({"four": {"reason": "it\ndiverged"}}), "utf-8")
    found = find([tmp_path])
    assert [run.seed for run in found.runs] == [0, 6]
    assert found.problems == [f"{tmp_path / 'set'}: cell four failed: it diverged"]
    (tmp_path / "set" / "failures.json").write_text("{", "utf-8")
    (problem,) = find([tmp_path]).problems
    assert "failures.json is damaged" in problem

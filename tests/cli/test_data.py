"""`fedrts data …`, `--data-dir`, and data of one's own on the command line."""

import json
import sys
import tomllib

import numpy as np
import pytest

import official
from fedrts import data

SMALL = [
    "--rounds",
    "2",
    "--epochs",
    "1",
    "--clients",
    "3",
    "--batch-size",
    "4",
    "--set",
    "clients.min_size=1",
    "--set",
    "clients.partition=iid",
]


def one_line(ended, *words):
    assert ended.code == 2
    assert ended.err.count("\n") == 1
    assert ended.err.startswith("error: ")
    for word in words:
        assert word in ended.err


def test_the_list_says_whose_files_are_there(fedrts, tmp_path):
    official.cifar10(tmp_path)
    rows = {row["name"]: row for row in json.loads(fedrts("data", "--json", "--data-dir", tmp_path).out)}
    assert set(official.ALL) | {"digits", "folder:PATH", "npz:PATH"} <= set(rows)
    assert (rows["cifar10"]["files"], rows["svhn"]["files"], rows["digits"]["files"]) == ("there", "missing", "-")
    assert rows["cifar10"]["options"] == {"augment": True}
    assert "size" in rows["folder:PATH"]["options"]
    assert "path" not in rows["folder:PATH"]["options"]
    assert all(row["what it is"] for row in rows.values())


@pytest.mark.parametrize("name", official.IMAGES)
def test_a_run_evaluation_and_resumption_on_every_image_set(fedrts, tmp_path, name, monkeypatch):
    monkeypatch.delenv("FEDRTS_DATA", raising=False)
    home, out = tmp_path / "home", tmp_path / "run"
    official.ALL[name](home)
    ended = fedrts("run", *SMALL, "--data", name, "--model", "cnn", "--data-dir", home, "--out", out, "--quiet")
    assert (ended.code, ended.err) == (0, "")
    assert str(home) not in (out / "experiment.toml").read_text()
    summary = json.loads((out / "summary.json").read_text())
    evaluated = json.loads(fedrts("evaluate", out, "--data-dir", home, "--json").out)
    assert evaluated["accuracy"] == summary["accuracy"]
    assert evaluated["loss"] == pytest.approx(summary["loss"], rel=1e-6)
    (out / "summary.json").unlink()
    monkeypatch.setenv("FEDRTS_DATA", str(home))
    assert fedrts("resume", out, "--quiet").code == 0
    again = json.loads((out / "summary.json").read_text())
    assert {**again, "seconds": 0, "samples_per_second": 0} == {**summary, "seconds": 0, "samples_per_second": 0}
    monkeypatch.delenv("FEDRTS_DATA")
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    one_line(fedrts("evaluate", out), name, "fedrts data prepare")


def test_stories_train_a_small_language_model(fedrts, tmp_path):
    official.tinystories(tmp_path)
    options = ["--model", "tiny_gpt", "--set", "model_options.width=8", "--set", "data_options.length=8"]
    flags = ["--rounds", "2", "--epochs", "1", "--clients", "2", "--density", "0.6", "--data-dir", tmp_path, "--out", tmp_path / "run"]
    ended = fedrts("run", "--data", "tinystories", *options, *flags, "--quiet")
    assert ended.code == 0, ended.err
    assert "samples give each of 2 clients at least 1" in ended.err
    experiment = tomllib.loads((tmp_path / "run" / "experiment.toml").read_text())
    assert (experiment["clients"]["partition"], experiment["clients"]["alpha"], experiment["train"]["batch_size"]) == ("quantity", 5.0, 16)
    assert experiment["clients"]["min_size"] == 16
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["perplexity"] > 1


def test_a_missing_data_set_leaves_no_folder(fedrts, tmp_path):
    ended = fedrts("run", "--data", "cifar10", "--model", "cnn", "--data-dir", tmp_path / "none", "--out", tmp_path / "run")
    one_line(ended, "cifar10", "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", str(tmp_path / "none" / "cifar-10-batches-bin"))
    assert not (tmp_path / "run").exists()


def test_prepare_from_a_folder_then_run(fedrts, tmp_path):
    official.cifar10(tmp_path / "given")
    ended = fedrts("data", "prepare", "cifar10", "--from", tmp_path / "given", "--data-dir", tmp_path / "home")
    assert (ended.code, ended.out) == (0, f"cifar10 is ready in {tmp_path}/home: 20 training and 4 test samples, 10 classes\n")
    before = fedrts("data", "--data-dir", tmp_path / "other", "prepare", "cifar10", "--from", tmp_path / "given")
    assert (before.code, (tmp_path / "other" / "cifar-10-batches-bin").is_dir()) == (0, True), "the option may stand before the command too"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["prepare", "cifar"], ["cifar", "did you mean 'cifar10'"]),
        (["prepare", "digits"], ["digits", "no preparation"]),
        (["prepare", "cifar10", "--from", "none.tar.gz"], ["none.tar.gz"]),
        (["show", "digits", "--clients", "5000"], ["clients"]),
        (["show", "digits", "--partition", "odd"], ["clients.partition", "shards"]),
        (["show", "digits", "--partition", "shards", "--set", "clients.classes_per_client=11"], ["classes_per_client"]),
        (["show", "digits", "--alpha", "0"], ["clients.alpha"]),
        (["show", "digits", "--out", "picture.txt"], ["picture.txt", ".png"]),
        (["show", "digits", "--out", "none/picture.png"], ["none"]),
        (["show", "npz:none.npz"], ["none.npz"]),
        (["show", "folder:none"], ["none"]),
    ],
)
def test_mistakes_are_one_line(fedrts, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    one_line(fedrts("data", *arguments, "--data-dir", tmp_path), *words)
    assert not list(tmp_path.iterdir())


def test_show_draws_who_holds_what(fedrts, tmp_path):
    out = tmp_path / "who.png"
    ended = fedrts("data", "show", "digits", "--clients", "7", "--alpha", "0.3", "--seed", "2", "--out", out)
    assert ended.code == 0, ended.err
    assert out.read_bytes().startswith(b"\x89PNG")
    rows = [line.split("│")[1:4] for line in ended.out.splitlines() if line.startswith("│")]
    assert [int(row[0]) for row in rows] == list(range(7))
    assert sum(int(row[1]) for row in rows) == 1438
    other = fedrts("data", "show", "digits", "--clients", "7", "--alpha", "0.3", "--seed", "3").out
    assert other != fedrts("data", "show", "digits", "--clients", "7", "--alpha", "0.3", "--seed", "2").out


def test_show_is_what_a_run_does(fedrts, run_dir):
    clients = json.loads((run_dir / "clients.json").read_text())
    shown = fedrts("data", "show", "digits", "--clients", "6", "--seed", "3").out
    rows = [line.split("│")[2] for line in shown.splitlines() if line.startswith("│")]
    assert [int(samples) for samples in rows] == [client["samples"] for client in clients]


def test_show_of_text_has_sizes_only(fedrts, tmp_path):
    ended = fedrts(
        "data",
        "show",
        "toy_text",
        "--set",
        "clients.partition=quantity",
        "--clients",
        "4",
        "--set",
        "clients.min_size=3",
        "--out",
        tmp_path / "a.svg",
    )
    assert ended.code == 0, ended.err
    assert "labels" not in ended.out
    assert (tmp_path / "a.svg").read_text().count("<path") > 4


@pytest.mark.parametrize(
    ("arguments", "module", "extra"),
    [
        (["data", "show", "digits", "--out", "a.png"], "matplotlib", "plot"),
        (["run", "--data", "cinic10", "--model", "cnn"], "PIL", "images"),
        (["run", "--data", "svhn", "--model", "cnn"], "scipy", "images"),
        (["run", "--data", "tinystories", "--model", "tiny_gpt"], "tokenizers", "text"),
    ],
)
def test_a_missing_extra_is_named(fedrts, tmp_path, monkeypatch, arguments, module, extra):
    name = arguments[2]
    official.ALL.get(name, lambda home: None)(tmp_path)
    for loaded in [key for key in sys.modules if key.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    one_line(fedrts(*arguments, "--data-dir", tmp_path), module, f"pip install 'fedrts[{extra}]'")


def test_a_damaged_file_on_the_command_line(fedrts, tmp_path):
    official.svhn(tmp_path)
    (tmp_path / "svhn" / "train_32x32.mat").write_bytes(b"not a mat file")
    one_line(fedrts("run", "--data", "svhn", "--model", "cnn", "--data-dir", tmp_path, "--out", tmp_path / "run"), "train_32x32.mat")


# -- one's own ------------------------------------------------------------------------------------------------------


@pytest.fixture
def arrays(tmp_path):
    rng = np.random.default_rng(0)
    y = np.arange(200) % 3
    np.savez(tmp_path / "mine.npz", x=(rng.normal(size=(200, 6)) + y[:, None]).astype(np.float32), y=y)
    return f"npz:{tmp_path}/mine.npz"


def test_arrays_train_and_evaluate(fedrts, tmp_path, arrays, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = fedrts("run", "--data", arrays, *SMALL, "--lr", "0.1", "--quiet")
    assert ended.code == 0, ended.err
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.endswith("-mine-fedrts-0")
    accuracy = json.loads((run / "summary.json").read_text())["accuracy"]
    assert accuracy > 0.4
    assert json.loads(fedrts("evaluate", run, "--data", arrays, "--json").out)["accuracy"] == accuracy
    assert fedrts("data", "show", arrays, "--clients", "4").code == 0


def test_images_train_and_evaluate(fedrts, tmp_path):
    for number, kind in enumerate(("cat", "dog", "hen")):
        for index in range(10):
            official.save(np.full((12, 12, 3), 40 + 80 * number + index, np.uint8), tmp_path / "in" / kind / f"{index}.png")
    flags = ["--data-dir", tmp_path / "home", "--out", tmp_path / "run", "--quiet", "--set", "data_options.size=8"]
    ended = fedrts("run", "--data", f"folder:{tmp_path}/in", *SMALL, *flags)
    assert ended.code == 0, ended.err
    ended = fedrts("evaluate", tmp_path / "run", "--data", f"folder:{tmp_path}/in", "--data-dir", tmp_path / "home")
    assert ended.code == 0, ended.err
    one_line(
        fedrts("run", "--data", f"folder:{tmp_path}/in", "--set", "data_options.sise=8", *flags[:4]),
        "sise",
        "did you mean 'data_options.size'",
    )


def test_every_recipe_resolves_to_the_papers_setting():
    from fedrts import config

    for name in ("cifar10", "cinic10", "svhn", "tinyimagenet"):
        experiment = config.resolve({"data": name, "recipe": "paper"})
        assert experiment.model == "resnet18"
        assert (experiment.clients.total, experiment.clients.per_round, experiment.rounds, experiment.train.epochs) == (100, 10, 500, 5)
        assert (experiment.train.lr, experiment.train.batch_size) == (0.01, 64)
        assert (experiment.clients.partition, experiment.clients.alpha, experiment.clients.min_size) == ("dirichlet", 0.5, 10)
    text = config.resolve({"data": "tinystories", "recipe": "paper"})
    assert (text.model, text.train.batch_size, text.clients.partition, text.clients.alpha) == ("gpt2_32m", 16, "quantity", 5.0)
    assert config.resolve({"data": "fashion_mnist"}).model == "cnn"
    assert data.recipe("npz:any.npz").model == "mlp"


def test_a_missing_value_in_a_table_is_refused_with_its_row(fedrts, tmp_path):
    lines = ["age,sex,outcome", *(f"{20 + row},{'fm'[row % 2]},{row % 2}" for row in range(12)), "31,f,"]
    (tmp_path / "a.csv").write_text("\n".join(lines), "utf-8")
    ended = fedrts("run", "--data", f"csv:{tmp_path / 'a.csv'}", "--set", "data_options.target=outcome", "--out", tmp_path / "run")
    assert ended.code == 2
    assert ended.err.count("\n") == 1
    assert "row 13 has no value in the column 'outcome'" in ended.err
    assert not (tmp_path / "run").exists()

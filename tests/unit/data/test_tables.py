"""Tables: CSV and Parquet files and frames become numbers, the same way for all clients; what is missing is named by its row."""

import json
import uuid
from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

import fedrts
from fedrts import config, data
from fedrts.data import own
from fedrts.data.tabular import Columns, Encoding, read
from fedrts.errors import InputError
from fedrts.tasks import Classification
from fedrts.tasks.named import Regression

HEADING = "age,sex,site,outcome"
LINES = [f"{20 + row},{'fm'[row % 2]},{'ABC'[row % 3]},{['no', 'yes'][row % 5 > 2]}" for row in range(30)]


def saved(path, heading=HEADING, lines=LINES):
    path.write_text("\n".join([heading, *lines]) + "\n", "utf-8")
    return f"csv:{path}"


def test_words_become_columns_and_a_target_of_words_labels(tmp_path):
    held = data.load(saved(tmp_path / "a.csv"), {"target": "outcome", "client": "site", "test": 0.2})
    assert held.x.shape == (24, 3)
    assert held.test_x.shape == (6, 3)
    assert set(map(tuple, held.x[:, 1:].tolist())) == {(1.0, 0.0), (0.0, 1.0)}
    assert held.classes == 2
    assert held.owner_names == ("A", "B", "C")
    rows = (held.x[:, 0] - 20).long()
    assert held.owners is not None
    assert torch.equal(held.owners, rows % 3), "every row keeps its client"
    assert torch.equal(held.y, (rows % 5 > 2).long())
    read_ = held.inputs(held.x)
    assert read_[:, 0].mean().abs() < 1e-5
    assert read_[:, 0].std(correction=0) == pytest.approx(1, abs=1e-5)
    assert torch.equal(read_[:, 1:], held.x[:, 1:])


def test_numbers_are_a_regression_and_several_of_0_and_1_are_labels(tmp_path):
    numbers = saved(tmp_path / "a.csv", "x,z,u,v", [f"{row / 7},{row * row / 3},{row % 2},{(row // 2) % 2}" for row in range(20)])
    held = data.load(numbers, {"target": "z", "test": 0.0})
    assert isinstance(held.task, Regression)
    assert held.classes == 1
    assert held.task.centre[0] == pytest.approx(np.mean([row * row / 3 for row in range(20)]))
    several = data.load(numbers, {"target": "u,v"})
    assert several.classes == 2
    assert several.y.shape == (16, 2)
    assert list(several.task.metrics) == ["f1", "f1_micro", "auroc"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("lines", "options", "words"),
    [
        ([*LINES[:6], "41,,A,yes", *LINES], {"target": "outcome"}, r"row 7 has no value in the column 'sex'"),
        ([*LINES[:2], "NaN,f,A,yes", "na,f,A,no"], {"target": "outcome"}, r"row 3 has no value in the column 'age' \(nor have 1 others\)"),
        ([*LINES[:2], "30,None,A,yes"], {"target": "outcome"}, r"row 3 has no value in .* the word 'None' counts as missing"),
        ([*LINES[:2], "30,f,,yes"], {"target": "outcome", "client": "site"}, r"row 3 has no value in the column 'site'"),
        ([*LINES[:2], "30,f"], {"target": "outcome"}, r"row 3 has 2 values, the heading names 4"),
        (LINES, {"target": "income"}, r"no column 'income' for target: there is age, sex, site, outcome"),
        (LINES, {}, r"needs data_options\.target"),
        (LINES, {"target": "outcome", "drop": "wage"}, r"no column 'wage' for data_options\.drop"),
        (LINES, {"target": "outcome", "task": "regresion"}, "did you mean 'regression'"),
        (LINES, {"target": "outcome", "task": "regression"}, "holds words, and numbers are wanted"),
        (LINES, {"target": "outcome", "categories": {"sex": ["f"]}}, r"row 2 has 'm' in the column 'sex', which is none of f"),
        (LINES, {"target": "outcome", "categories": {"colour": ["f"]}}, "the column 'colour'"),
        (LINES, {"target": "site", "client": "site"}, "are both 'site'"),
        ([], {"target": "outcome"}, "has no rows"),
    ],
)
def test_mistakes_are_one_line(tmp_path, lines, options, words):
    with pytest.raises(InputError, match=words) as caught:
        data.load(saved(tmp_path / "a.csv", lines=lines), options)
    assert "\n" not in str(caught.value)


def test_files_of_another_kind_are_one_line(tmp_path):
    with pytest.raises(InputError, match="';' between its columns: save it with commas"):
        data.load(saved(tmp_path / "a.csv", "age;outcome", ["3;no"]), {"target": "outcome"})
    with pytest.raises(InputError, match="names a file"):
        data.load(f"csv:{tmp_path}", {"target": "outcome"})


def test_given_categories_make_the_same_columns_of_other_rows(tmp_path):
    options = {"target": "outcome", "drop": ["site"], "categories": {"sex": ["f", "m", "x"], "outcome": ["no", "yes", "open"]}}
    whole, part = (data.load(saved(tmp_path / f"{count}.csv", lines=LINES[:count]), options) for count in (30, 9))
    assert whole.input_shape == part.input_shape == (4,)
    assert whole.classes == part.classes == 3


def test_the_clients_of_a_run_are_those_of_the_column(tmp_path):
    given = {"data": saved(tmp_path / "a.csv"), "data_options": {"target": "outcome", "client": "site"}}
    resolved = config.resolve(given)
    assert (resolved.model, resolved.clients.total, resolved.clients.partition) == ("tabular", 3, "column")
    result = fedrts.run(**given, rounds=1, out=tmp_path / "run")
    assert [client["name"] for client in json.loads((tmp_path / "run" / "clients.json").read_text())] == ["A", "B", "C"]
    assert result.summary["accuracy"] is not None
    with pytest.raises(InputError, match=r"clients\.total = 5, and the data name 3"):
        fedrts.run(**given, rounds=1, out=tmp_path / "other", clients=5)
    with pytest.raises(InputError, match=r"partition = 'column' needs data that say whose"):
        fedrts.run(data="digits", rounds=1, out=tmp_path / "third", clients={"partition": "column"})


def test_parquet_is_read_as_csv_is(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="fedrts[parquet] is not installed")
    arrow = pytest.importorskip("pyarrow")
    name = saved(tmp_path / "a.csv")
    columns = read(tmp_path / "a.csv").columns
    parquet.write_table(arrow.table({key: array.tolist() for key, array in columns.items()}), tmp_path / "a.parquet")
    options = {"target": "outcome", "client": "site"}
    first, second = data.load(name, options), data.load(f"parquet:{tmp_path / 'a.parquet'}", options)
    assert first.fingerprint == second.fingerprint
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match="no readable Parquet file"):
        data.load(f"parquet:{tmp_path / 'b.parquet'}", options)


def test_categories_are_those_of_all_tables():
    first, second = (
        Columns({"colour": np.array(words, dtype=object), "y": np.array([1.5, 2.5])}, "here") for words in (["r", "g"], ["b", "r"])
    )
    encoding = Encoding.of([first, second], ["y"])
    assert encoding.categories == {"colour": ("b", "g", "r")}
    assert encoding.encoded(second)[0].tolist() == [[1, 0, 0], [0, 0, 1]]


FEW: dict[str, Any] = {
    "clients": {"x": np.arange(24.0), "site": np.repeat([0, 1, 2], 8), "years": np.tile([10, 20, 30, 40], 6)},
    "client": "site",
}
"""A target of few whole numbers, which might be classes."""


@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
@pytest.mark.parametrize(
    ("given", "targets"),
    [
        ({"task": "regression"}, torch.tensor([10.0, 20.0, 30.0, 40.0])),
        ({"loss": lambda output, target: (output[:, 0] - target).square().mean()}, torch.tensor([10, 20, 30, 40])),
        ({}, torch.tensor([0, 1, 2, 3])),
    ],
    ids=["regression", "own loss", "classes"],
)
def test_few_whole_numbers_are_classes_only_where_nothing_else_is_said(given, targets):
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4 if not given else 1))
    reading = own.Reading("site", "years", task=given.get("task"), as_given="loss" in given)
    sets, names = own.listed(FEW["clients"], "site")
    held = own.federate(sets, 0.25, Classification(), reading, names).data
    assert torch.equal(held.y.unique(), targets)
    result = fedrts.train(model=model, **FEW, target="years", test=0.25, method="fedavg", rounds=1, lr=0.001, **given)
    assert len(result.history) == 1
    if "task" in given:
        assert result.summary["mae"] > 4, "in years"


@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"words": [[1, 2]] * 6}, "the column 'words' holds a list in each row"),
        ({"years": ["old", "new"] * 3, "task": "regression"}, "the column 'years' holds words, and numbers are wanted"),
        ({"words": [date(2024, 5, day) for day in range(1, 7)]}, "the column 'words' holds times: make it numbers or words"),
        ({"words": [uuid.UUID(int=5)] * 6}, "the column 'words' holds a UUID in each row"),
        ({"words": [1j] * 6}, "the column 'words' holds values of type complex128"),
        ({"words": [1.0, 2.0, 3.0, 4.0, float("inf"), 6.0]}, "clients: row 5 has no finite number in the column 'words'"),
        ({"words": ["a", "b", "c", "d", "e", None]}, "clients: row 6 has no value in the column 'words'"),
        ({"rows": 0}, "clients is empty"),
        ({"rename": {"x": "years"}}, "clients has two columns 'years'"),
    ],
    ids=["lists", "words", "dates", "objects", "complex", "infinite", "missing", "empty", "twice"],
)
def test_frames_that_cannot_be_read_are_one_line(change, words):
    frame = pytest.importorskip("pandas", reason="pandas is not installed").DataFrame(
        {"site": [0, 0, 0, 1, 1, 1], "x": range(6), "years": range(6)}
    )
    for column in {"words", "years"} & set(change):
        frame[column] = change[column]
    frame = frame[: change.get("rows", 6)].rename(columns=change.get("rename", {}))
    given: dict[str, Any] = {"clients": frame, "client": "site", "target": "years", "test": frame, "task": change.get("task")}
    with pytest.raises(InputError, match=words) as caught:
        fedrts.train(model=torch.nn.Linear(1, 1), rounds=1, method="fedavg", **given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("numbers", [[1, 2.5, 3, 4], [Decimal(1), Decimal("2.5"), Decimal(3), Decimal(4)]], ids=["mixed", "decimals"])
def test_objects_that_are_all_numbers_are_numbers(numbers):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame({"site": [0, 0, 1, 1], "x": pandas.Series(numbers, dtype=object), "y": [0, 1, 0, 1]})
    sets, names = own.listed(frame, "site")
    held = own.federate(sets, frame, Classification(), own.Reading("site", "y"), names).data
    assert held.x.tolist() == [[1.0], [2.5], [3.0], [4.0]]


@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
def test_a_test_table_may_have_the_column_of_clients():
    given: dict[str, Any] = {"clients": FEW["clients"], "client": "site", "target": "years", "rounds": 1, "method": "fedavg"}
    result = fedrts.train(model=torch.nn.Linear(1, 1), test=FEW["clients"], task="regression", lr=1e-6, **given)
    assert len(result.history) == 1


# -- new rows for a trained model ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    """A run on a table of numbers and words with clients, and its rows."""
    folder = tmp_path_factory.mktemp("hospitals")
    random = np.random.default_rng(3)
    rows = [(random.normal(50, 9), random.choice(["no", "yes"]), random.normal(-3, 0.1), random.choice(["a", "b", "c"])) for _ in range(90)]
    lines = ["age,smoker,level,hospital,outcome", *(f"{a:.6f},{s},{v:.6f},{h},{int(a > 50)}" for a, s, v, h in rows)]
    (folder / "rows.csv").write_text("\n".join(lines), "utf-8")
    options = {"target": "outcome", "client": "hospital"}
    fedrts.run(data=f"csv:{folder / 'rows.csv'}", data_options=options, rounds=1, device="cpu", out=folder / "run")
    return folder


def test_new_rows_are_encoded_as_those_of_training(hospitals):
    """By the training rows' mean and deviation, in the columns' own order, whatever the order and kind of the new table."""
    trained = data.load(f"csv:{hospitals / 'rows.csv'}", {"target": "outcome", "client": "hospital"})
    whole = read(hospitals / "rows.csv")
    mean, deviation = trained.x.double().mean(0), trained.x.double().std(0, correction=0)
    words = np.array([[word == "no", word == "yes"] for word in whole.columns["smoker"]], dtype=np.float64)
    age, level = (np.asarray(whole.columns[name], dtype=np.float64) for name in ("age", "level"))
    expected = np.stack([(age - mean[0].item()) / deviation[0].item(), *words.T, (level - mean[3].item()) / deviation[3].item()], axis=1)
    torch.testing.assert_close(
        fedrts.inputs(hospitals / "run", hospitals / "rows.csv"), torch.from_numpy(expected).float(), rtol=1e-4, atol=1e-4
    )
    turned = {"note": np.array(["", "?"]), **{name: whole.columns[name][:2] for name in ("level", "age", "smoker")}}
    found = fedrts.inputs(hospitals / "run", turned)
    torch.testing.assert_close(found, torch.from_numpy(expected[:2]).float(), rtol=1e-4, atol=1e-4)
    assert fedrts.load(hospitals / "run")(found).shape == (2, 2)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"age": [1.0], "smoker": ["yes"]}, "no column 'level' for the model"),
        ({"age": [1.0], "smoker": ["often"], "level": [1.0]}, "'often' in the column 'smoker'"),
        ({"age": [1.0], "smoker": [""], "level": [1.0]}, "no value in the column 'smoker'"),
        ("nowhere.csv", "no file nowhere.csv"),
    ],
)
def test_new_rows_that_do_not_fit_are_one_line(hospitals, table, words):
    given = {name: np.array(values) for name, values in table.items()} if isinstance(table, dict) else table
    with pytest.raises(InputError) as caught:
        fedrts.inputs(hospitals / "run", given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_on_no_table_has_no_encoding(tmp_path):
    fedrts.run(method="random", model_options={"hidden": [8]}, rounds=1, device="cpu", out=tmp_path / "run")
    with pytest.raises(InputError, match="trained on 'digits', no table"):
        fedrts.inputs(tmp_path / "run", tmp_path / "rows.csv")

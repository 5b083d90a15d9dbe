"""A metric of one's own: one file beside the experiment, no registration, and everything knows it; regression without right answers."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fedrts
from fedrts.errors import InputError, Note
from fedrts.tasks.metrics import Metric, metric
from outside import Beside, command

MINE = '''
import torch

from fedrts.data.contract import Data
from fedrts.tasks.metrics import Metric, metric
from outside import Beside, command


@metric("worst class recall", lower_is_better=False, format="percent")
def recall(output, target):
    """The share of right answers in the class that has the smallest one."""
    return min(float((output[target == label].argmax(1) == label).float().mean()) for label in target.unique())


class Doubt:
    """The mean of 1 - the largest probability, added up batch by batch."""

    def __init__(self):
        self.sum = self.samples = 0

    def update(self, output, target):
        self.sum += float((1 - output.softmax(1).amax(1)).sum())
        self.samples += len(target)

    def compute(self):
        return self.sum / self.samples


doubt = Metric("doubt", "doubt", lower_is_better=True, meter=Doubt)


def plain(output, target):
    return 1.0


class Segmentation:
    """Two classes by pixel: no accuracy, and a metric that the task itself measures."""

    metrics = ("loss", Metric("dice", "Dice coefficient", lower_is_better=False, format="percent"), "mae")

    def loss(self, module, x, y, *, temperature=1.0, twice=False):
        return torch.nn.functional.binary_cross_entropy_with_logits(module(x) / temperature, y)

    def evaluate(self, module, x, y, batch_size):
        module.eval()
        with torch.no_grad():
            output = torch.cat([module(part) for part in x.split(batch_size)])
        seen = (output > 0).float()
        dice = 2 * float((seen * y).sum()) / max(float((seen + y).sum()), 1.0)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(output, y)
        return {"loss": float(loss), "dice": dice, "mae": float((output.sigmoid() - y).abs().mean())}


def pictures():
    torch.manual_seed(0)
    x = torch.rand(120, 16)
    return Data(x[:80], (x[:80] > 0.5).float(), x[80:], (x[80:] > 0.5).float(), classes=16, task=Segmentation())
'''
TINY = ["--rounds", "3", "--clients", "4", "--per-round", "3", "--epochs", "1", "--device", "cpu", "--engine", "serial"]
TINY += ["--set", "model_options.hidden=[8]"]
DIGITS = ["--data", "digits", "--set", "density=0.5", "--set", "eval.metrics=mine:recall,mine:doubt", *TINY]
PICTURES = ["--data", "mine:pictures", "--model", "mlp", "--set", "density=0.7", "--set", "clients.partition=iid", *TINY]


@pytest.fixture(autouse=True)
def mine(beside: Beside) -> None:
    beside("mine", MINE)


def done(*words: str) -> str:
    code, said = command(*words)
    assert code == 0, said
    return said


def table(file: str) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(file).read_text("utf-8").splitlines()))


def lines(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "history.jsonl").read_text("utf-8").splitlines()]


def summary_of(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "summary.json").read_text("utf-8"))
    return found


def scalars(folder: str) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(Path(folder) / "tensorboard"))
    events.Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_it_reaches_every_file_of_a_run():
    said = done("run", *DIGITS, "--set", "data_options.validation=0.2", "--tensorboard", "--out", "run")
    assert re.search(r"worst class recall +│ +0\.\d{4}", said)
    history, summary = lines("run"), summary_of("run")
    recall, doubt = ([line[name] for line in history] for name in ("recall", "doubt"))
    assert summary["recall"] == recall[-1]
    assert summary["doubt_last10"] == pytest.approx(sum(doubt) / 3)
    assert summary["best_recall"] == max(history, key=lambda line: line["valid_recall"])["recall"]
    assert summary["best_doubt"] == min(history, key=lambda line: line["valid_doubt"])["doubt"]
    assert scalars("run")["test/recall"] == pytest.approx(recall)
    assert scalars("run")["test/valid_doubt"] == pytest.approx([line["valid_doubt"] for line in history])
    assert list(summary["metrics"]) == ["accuracy", "loss", "recall", "doubt"]
    assert summary["metrics"]["doubt"] == {"label": "doubt", "format": "number", "lower_is_better": True}
    with torch.no_grad():
        held = fedrts.data.load("digits", {"validation": 0.2})
        output = fedrts.load("run", trust=True)(held.inputs(held.test_x))
    hits = {int(label): (output.argmax(1) == label)[held.test_y == label].double().mean() for label in held.test_y.unique()}
    assert summary["recall"] == pytest.approx(float(min(hits.values())))
    assert summary["doubt"] == pytest.approx(float(1 - output.softmax(1).amax(1).mean()), rel=1e-5)


def test_it_changes_nothing_else():
    done("run", *DIGITS, "--out", "more", "--quiet")
    done("run", *DIGITS, "--set", "eval.metrics=[]", "--out", "usual", "--quiet")
    usual, more = lines("usual"), lines("more")
    assert [{key: value for key, value in line.items() if key != "seconds"} for line in usual] == [
        {key: line[key] for key in same if key != "seconds"} for same, line in zip(usual, more, strict=True)
    ]
    forms = {form.format(name) for name in ("recall", "doubt") for form in ("{}", "{}_last10", "best_{}", "average_{}")}
    assert summary_of("more").keys() - summary_of("usual").keys() == forms | {"metrics"}
    assert Path("more/model.safetensors").read_bytes() == Path("usual/model.safetensors").read_bytes()


def test_it_is_compared_the_right_way_round():
    grid = ["--methods", "random,fedrts", "--seeds", "0,1", "--jobs", "1", "--out", "compared"]
    done("compare", *grid, *DIGITS, "--metric", "doubt_last10")
    rows = table("compared/results.csv")
    assert "metrics" not in rows[0]
    means = {method: sum(float(row["doubt_last10"]) for row in rows if row["method"] == method) / 2 for method in ("random", "fedrts")}
    least = min(means, key=lambda method: means[method])
    text = Path("compared/results.md").read_text("utf-8")
    assert text.startswith("# Test doubt, mean of the last ten rounds\n")
    assert re.search(rf"\| {least} \|.*\*\*{means[least]:.4g} ± ", text), "less doubt is better"
    code, said = command("compare", *grid, *DIGITS, "--metric", "recal_last10")
    assert (code, said) == (2, "error: there is no metric 'recal_last10'; did you mean 'recall_last10'?\n")
    done("compare", *grid, *DIGITS)
    assert Path("compared/results.md").read_text("utf-8").startswith("# Test accuracy, mean of the last ten rounds\n")


def test_it_is_reported_without_its_code():
    done("run", *DIGITS, "--out", "runs/a", "--quiet")
    Path("mine.py").unlink()
    done("report", "runs", "--no-png")
    (row,) = table("runs/report/digits-mlp-results.csv")
    assert float(row["worst class recall"]) == pytest.approx(summary_of("runs/a")["recall_last10"])
    curve = table("runs/report/digits-mlp-doubt-rounds.csv")
    assert [float(point["test doubt"]) for point in curve] == [line["doubt"] for line in lines("runs/a")]
    page = Path("runs/report.html").read_text("utf-8")
    assert "Worst class recall against rounds" in page
    assert '"percent"' in page
    assert "mine:recall" in page, "among the settings"


def test_a_folder_cannot_run_it_where_it_is_not_allowed():
    done("run", *DIGITS, "--out", "run", "--quiet")
    code, said = command("evaluate", "run")
    assert code == 2
    assert "--allow mine:recall --allow mine:doubt" in said
    found = json.loads(done("evaluate", "run", "--json", "--allow", "mine:recall", "--allow", "mine:doubt"))
    assert found == {name: summary_of("run")[name] for name in ("loss", "accuracy", "recall", "doubt")}
    assert json.loads(done("inspect", "run", "--json"))["recall_last10"] == summary_of("run")["recall_last10"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("f2", r"eval\.metrics must be 'accuracy', 'auroc', .*'rmse' or an import path MODULE:NAME \(got 'f2'\)"),
        ("mine:plain", r"'mine:plain' is no metric: it must be a fedrts\.tasks\.metrics\.Metric"),
        ("absent:dice", "cannot import the metric 'absent:dice'"),
        ("perplexity", "the metric 'perplexity' cannot be added to a task"),
        ("mae", r"the metric 'mae' of outputs \[\d+, 10\] and targets \[\d+\] cannot be measured: .* differ in form"),
    ],
)
def test_a_name_that_is_none_is_one_line(names: str, words: str):
    code, said = command("run", *DIGITS, "--set", f"eval.metrics={names}", "--out", "run", "--quiet")
    assert (code, said.count("\n")) == (2, 1), said
    assert re.search(words, said), said


@pytest.mark.filterwarnings("ignore:.*may lie beyond:UserWarning")
def test_a_task_without_accuracy_leads_by_its_own(tmp_path: Path):
    """A data set with a task of its own: its first metric leads, in tables, tuning and target."""
    grid = ["--methods", "random,fedavg", "--densities", "0.7", "--seeds", "0,1", "--jobs", "1", "--out", "compared"]
    done("compare", *grid, *PICTURES, "--tune-lr", "0.0001,0.5")
    text = Path("compared/results.md").read_text("utf-8")
    assert text.startswith("# Test Dice coefficient, mean of the last ten rounds\n")
    assert "valid. Dice coefficient at 0.5" in text
    rows = table("compared/results.csv")
    assert {row["train.lr"] for row in rows} == {"0.5"}
    assert {(row["accuracy"], row["accuracy_last10"]) for row in rows} == {("", "")}
    cells = sorted(str(path.parent) for path in Path("compared/runs").rglob("summary.json"))
    assert list(summary_of(cells[0])["metrics"]) == ["dice", "loss", "mae"]
    assert not any("valid_mae" not in line or "valid_accuracy" in line for line in lines(cells[0]))
    done("report", "compared", "--no-png")
    (chapter,) = Path("compared/report").glob("*-target.csv")
    assert {row["setting"] for row in table(str(chapter))} == {"fedavg", "random"}
    assert "with Dice coefficient" in Path("compared/report.md").read_text("utf-8")
    code, said = command("compare", *grid, *PICTURES, "--tune-lr", "0.0001,0.5", "--metric", "dise")
    assert (code, said.splitlines()[-1]) == (2, "error: there is no metric 'dise'; did you mean 'dice'?")


@pytest.mark.filterwarnings("ignore:.*may lie beyond:UserWarning")
def test_rates_are_tuned_to_the_lowest_where_lower_is_better():
    """Before accuracy in the list, doubt leads: the rate that leaves least of it is taken."""
    words = ["--set", "eval.metrics=mine:doubt,accuracy", "--tune-lr", "0.0001,0.3", "--seeds", "0", "--jobs", "1", "--out", "tuned"]
    done("compare", "--methods", "random", *DIGITS, *words)
    text = Path("tuned/results.md").read_text("utf-8")
    scores = re.search(r"\| 0\.3 \| (\S+) \| (\S+) \|", text)
    assert scores, text
    assert float(scores[1]) > float(scores[2])


# -- regression -----------------------------------------------------------------------------------------------------


def site(seed: int, count: int = 60) -> TensorDataset:
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :2].sum(1, keepdim=True))


def trained(**more: Any) -> fedrts.api.Result:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))
    common: dict[str, Any] = {"clients": [site(seed) for seed in range(4)], "test": site(9), "loss": F.mse_loss, "density": 0.6}
    return fedrts.train(**{**common, "model": model, "method": "random", "rounds": 12, "lr": 0.05, "batch_size": 8, **more})


def test_regression_needs_no_right_answers(capsys: pytest.CaptureFixture[str]):
    result = trained(metrics=["mae", "r2"], out="runs/a", observer=fedrts.observe.console.ConsoleObserver())
    x, y = site(9).tensors
    with torch.no_grad():
        errors = (result.model(x) - y).double()
    assert result.summary["mae"] == pytest.approx(float(errors.abs().mean()), rel=1e-6)
    assert result.summary["r2"] == pytest.approx(1 - float(errors.square().sum() / (y.double() - y.double().mean()).square().sum()))
    assert result.summary["best_mae"] == min(line["mae"] for line in result.history if line["mae"] is not None)
    assert result.history[0]["mae"] is None, "a round that was not evaluated"
    assert {result.summary[name] for name in ("accuracy", "accuracy_last10", "best_accuracy", "perplexity")} == {None}
    assert f"mae {result.summary['mae']:.4g} after 12 rounds" in repr(result)
    said = capsys.readouterr().out
    assert f"mae {result.summary['mae']:.4g} ·" in said
    assert "test mean absolute error" in said
    fairness = json.loads(Path("runs/a/fairness.json").read_text("utf-8"))
    assert fairness["classes"] is None
    assert {"mae", "r2", "loss"} <= fairness["clients"][0].keys()
    trained(metrics=["mae", "r2"], out="runs/b", method="fedavg", density=None)
    done("report", "runs", "--no-png")
    (row,) = [row for row in table("runs/report/custom-custom-results.csv") if row["setting"] == "random"]
    assert float(row["mean absolute error"]) == result.summary["mae_last10"]
    assert float(row["best"]) == result.summary["best_mae"]
    targets = {row["setting"]: row for row in table("runs/report/custom-custom-target.csv")}
    assert {float(row["target"]) for row in targets.values()} == {summary_of("runs/b")["mae_last10"]}
    assert float(targets["fedavg"]["rounds"]) == 12, "errors fall: a mean of ten rounds is lowest at the end"
    assert json.loads(done("inspect", "runs/a", "--json"))["mae"] == result.summary["mae"]


def test_classes_are_judged_only_where_right_answers_count():
    x, y = site(9).tensors
    label = TensorDataset(x, (y[:, 0] > 0).long())
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))
    task = fedrts.tasks.Prediction(metrics=("f1",))
    trained(model=model, clients=[label] * 3, test=label, loss=None, task=task, rounds=2, out="run")
    fairness = json.loads(Path("run/fairness.json").read_text("utf-8"))
    assert fairness["classes"] is None
    assert all("expected_accuracy" not in entry and 0 <= entry["f1"] <= 1 for entry in fairness["clients"])


def test_without_any_metric_the_loss_leads_and_that_is_said():
    with pytest.warns(Note, match="judged by its loss"):
        result = trained(out="run")
    assert f"loss {result.summary['loss']:.4f} after" in repr(result)
    losses = [line["loss"] for line in result.history[-10:]]
    assert result.summary["loss_last10"] == pytest.approx(sum(losses) / 10)
    assert result.summary["best_loss"] == min(losses)
    done("report", "run", "--no-png")
    (row,) = table("run/report/custom-custom-results.csv")
    assert float(row["loss"]) == result.summary["loss_last10"]


def test_a_run_with_metrics_resumes_to_the_same_lines():
    class Stop(Exception):
        """A run is cut off."""

    class Stopper(fedrts.observe.Silent):
        def played(self, record):
            if record.round == 6:
                raise Stop

    whole = trained(metrics=["mae"])
    with pytest.raises(Stop):
        trained(metrics=["mae"], out="run", observer=Stopper())
    done("report", "run", "--no-png")
    assert Path("run/report/custom-custom-mae-rounds.csv").exists(), "an unfinished run shows it too"
    with pytest.raises(InputError, match=r"is not that of the checkpoint .*: give the same \(and metrics\)"):
        trained(metrics=["mae", "r2"], out="run", resume=True)
    resumed = trained(metrics=["mae"], out="run", resume=True)
    assert [line["mae"] for line in resumed.history] == [line["mae"] for line in whole.history]


def test_what_is_no_metric_is_one_line():
    def plain(output, target):
        return 1.0

    with pytest.raises(InputError, match=r"'plain' is no metric: .*@fedrts\.tasks\.metrics\.metric"):
        trained(metrics=[plain])
    with pytest.raises(InputError, match="there is no metric 'maes'; did you mean 'mae'"):
        trained(metrics=["maes"])
    with pytest.raises(InputError, match="give a list"):
        trained(metrics="mae")
    with pytest.raises(InputError, match="cannot have the name 'seconds'"):
        Metric("seconds", "seconds", lower_is_better=True)

    @metric("broken", lower_is_better=True)
    def broken(output, target):
        raise RuntimeError("no\nidea")

    with pytest.raises(InputError, match="the metric 'broken' cannot be measured: no"):
        trained(metrics=[broken])


def test_what_a_task_gives_is_recorded_and_what_it_lacks_is_said():
    class Own(fedrts.tasks.Prediction):
        gives: dict[str, Any] = {}

        def evaluate(self, module, x, y, batch_size):
            return {"loss": 1.0, **self.gives}

    def own(**gives: Any) -> fedrts.api.Result:
        task = Own(F.mse_loss)
        object.__setattr__(task, "gives", gives)
        return trained(task=task, loss=None, rounds=2)

    with pytest.warns(Note, match="gives 'spread', which nothing declares"):
        result = own(spread=0.25)
    assert (result.summary["spread"], result.history[-1]["spread"]) == (0.25, 0.25)
    assert result.summary["metrics"]["spread"] == {"label": "spread", "format": "number", "lower_is_better": False}
    with pytest.warns(Note, match="gives 'samples', which is left out"):
        assert "samples" not in own(samples=3).summary
    assert own(r2=np.float32(0.5)).summary["r2"] == 0.5
    assert own(r2=0.5).summary["metrics"]["r2"]["label"] == "R²", "a declared name needs no word"
    with pytest.raises(InputError, match=r"gives tensor\(1\.\) for 'r2': give a number"):
        own(r2=torch.ones(()))
    with pytest.warns(Note, match="the metric 'r2' is nan on these data"):
        assert own(r2=float("nan")).history[-1]["r2"] is None
    with pytest.raises(InputError, match="the task Own brings its own metrics: let its evaluate give f1"):
        trained(task=Own(F.mse_loss), loss=None, eval={"metrics": ["f1"]})
    with pytest.raises(InputError, match="gives no mae: it needs a loss"):
        trained(task=Own(F.mse_loss, metrics=("mae",)), loss=None)

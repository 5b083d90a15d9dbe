"""Metrics: the ready-made ones against scikit-learn, batch by batch; what is declared once reaches all who ask."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from torch import Tensor

from fedrts.comparison.keys import comparable, summary_key
from fedrts.errors import InputError
from fedrts.report.read import find
from fedrts.runs.folder import RunFolder
from fedrts.runs.summary import _judged
from fedrts.server.rounds import Record
from fedrts.tasks import metrics
from fedrts.tasks.metrics import ACCURACY, LOSS, PERPLEXITY, Metric, leading, of_run, told_of
from handmade import line, write


def measured(name: str, output: Tensor, target: Tensor, batch: int = 7) -> float:
    meter = metrics.get(name)()
    for pair in zip(output.split(batch), target.split(batch), strict=True):
        meter.update(*pair)
    return meter.compute()


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(count: int, classes: int) -> Tensor:
    return torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(3))


REGRESSION: dict[str, Any] = {
    "mae": reference.mean_absolute_error,
    "mse": reference.mean_squared_error,
    "rmse": lambda true, found: math.sqrt(reference.mean_squared_error(true, found)),
    "r2": reference.r2_score,
}


@pytest.mark.parametrize("name", REGRESSION)
@pytest.mark.parametrize("shape", [(40,), (40, 1), (40, 3)])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_errors_are_scikit_learns(name, shape, batch):
    target, output = 3 * numbers(*shape) + 1000, 3 * numbers(*shape) + 1000 + numbers(*shape, seed=1)
    assert measured(name, output, target, batch) == pytest.approx(REGRESSION[name](target, output), rel=1e-9)


def test_a_column_of_outputs_may_stand_for_plain_targets_and_other_forms_do_not():
    target, output = numbers(20), numbers(20, seed=1)
    assert measured("mae", output[:, None], target) == measured("mae", output, target)
    with pytest.raises(InputError, match="differ in form"):
        measured("mae", numbers(20, 2), target)


def test_explained_variance_of_far_away_targets_keeps_its_digits():
    target = numbers(60) + 1e8
    output = target + 0.1 * numbers(60, seed=1)
    assert measured("r2", output, target) == pytest.approx(reference.r2_score(target, output), rel=1e-6)


def test_explained_variance_where_there_is_none():
    alike = torch.ones(8)
    assert measured("r2", alike, alike) == reference.r2_score(alike, alike) == 1
    assert measured("r2", alike + 1, alike) == reference.r2_score(alike, alike + 1) == 0
    assert math.isnan(measured("r2", alike[:1], alike[:1]))


@pytest.mark.parametrize("classes", [2, 4, 12])
@pytest.mark.parametrize("batch", [1, 9, 100])
def test_f1_is_the_mean_over_classes(classes, batch):
    """Some of 12 classes are never predicted, or never present."""
    output, target = numbers(40, classes), labels(40, min(classes, 10))
    assert measured("f1", output, target, batch) == pytest.approx(reference.f1_score(target, output.argmax(1), average="macro"))


def test_f1_of_pixels_and_of_logits():
    output, target = numbers(10, 3, 4, 5), labels(200, 3).view(10, 4, 5)
    assert measured("f1", output, target) == pytest.approx(
        reference.f1_score(target.flatten(), output.argmax(1).flatten(), average="macro")
    )
    logits, truth = numbers(40, 1), labels(40, 2).double()[:, None]
    assert measured("f1", logits, truth) == pytest.approx(reference.f1_score(truth.flatten(), logits.flatten() > 0, average="macro"))


@pytest.mark.parametrize("digits", [1, 9])
def test_the_area_under_the_curve(digits):
    """Rounded scores have ties."""
    scores, target = numbers(50).round(decimals=digits), labels(50, 2)
    wanted = reference.roc_auc_score(target, scores)
    assert measured("auroc", scores, target) == pytest.approx(wanted)
    assert measured("auroc", scores[:, None], target[:, None].double()) == pytest.approx(wanted)
    assert measured("auroc", torch.stack([-scores, scores], 1), target) == pytest.approx(wanted)


def test_the_area_under_the_curves_of_several_classes():
    output, target = numbers(60, 4), labels(60, 4)
    shares = output.softmax(1).numpy()
    assert measured("auroc", output, target) == pytest.approx(reference.roc_auc_score(target, shares, multi_class="ovr", average="macro"))
    three = target.clamp(max=2)
    areas = [reference.roc_auc_score(three == label, shares[:, label]) for label in range(3)]
    assert measured("auroc", output, three) == pytest.approx(np.mean(areas)), "a class without samples is left out"
    assert math.isnan(measured("auroc", numbers(5), torch.ones(5)))


def test_accuracy_can_be_measured_beside_others():
    output, target = numbers(40, 3), labels(40, 3)
    assert measured("accuracy", output, target) == reference.accuracy_score(target, output.argmax(1))


# -- declarations ---------------------------------------------------------------------------------------------------


def test_values_are_written_with_digits_that_suit():
    assert (ACCURACY.text(0.93456), ACCURACY.text(0.93456, decimals=3), ACCURACY.text(0.00001)) == ("0.9346", "0.935", "0.0000")
    assert (LOSS.text(0.5), LOSS.text(2e-5), LOSS.text(0.0)) == ("0.5000", "2e-05", "0.0000")
    assert (PERPLEXITY.text(23.456), PERPLEXITY.text(1e6), PERPLEXITY.text(-1.5, signed=True)) == ("23.46", "1e+06", "-1.50")
    assert metrics.get("mae").text(0.000123456, signed=True) == "+0.0001235"


def test_a_share_outside_its_range_is_impossible():
    assert ACCURACY.impossible(1.5) == "an accuracy of 1.5"
    assert metrics.get("f1").impossible(-0.1) == "an F1 of -0.1"
    assert ACCURACY.impossible(1.0) is metrics.get("r2").impossible(-7.0) is None


def test_no_metric_takes_the_place_of_another_key(tmp_path):
    """All keys of a line and of a summary that are no metrics are taken."""
    run = RunFolder(write(tmp_path / "run", [0.1, 0.2]))
    ours = set(metrics.names())
    fields = {name for name in Record.__dataclass_fields__ if not name.startswith("valid_")} - ours
    summary = {key for key in run.summary() or {} if not key.endswith("_last10") and not key.startswith("best_")} - ours
    assert fields | summary <= metrics.TAKEN
    for name in ("rounds", "best_mae", "valid_mae", "mae_last10", "a-b", "a b", "2nd", ""):
        with pytest.raises(InputError, match="cannot have the name"):
            Metric(name, "label", lower_is_better=False)


def test_the_first_metric_beside_the_loss_leads():
    mae = metrics.get("mae")
    assert leading([LOSS, mae, ACCURACY]) is mae
    assert leading([LOSS]) is LOSS
    assert told_of([LOSS, ACCURACY, PERPLEXITY]) == {}, "as earlier versions wrote it"
    assert list(told_of([LOSS, mae])) == ["mae", "loss"]
    assert list(told_of([LOSS])) == ["loss"]


def test_the_best_round_is_the_validation_splits():
    history: list[dict[str, Any]] = [
        {"accuracy": 0.5, "valid_accuracy": 0.9, "mae": 3.0, "valid_mae": 1.0},
        {"accuracy": 0.7, "valid_accuracy": 0.2, "mae": 1.0, "valid_mae": None},
        {"accuracy": None, "mae": 2.0, "valid_mae": math.nan},
    ]
    declared = [LOSS, ACCURACY, metrics.get("mae")]
    by_valid, by_test = (_judged(declared, {"loss": 4.0, "mae": 2.0}, history, valid) for valid in (True, False))
    assert (by_valid["best_accuracy"], by_valid["best_mae"]) == (0.5, 3.0)
    assert (by_test["best_accuracy"], by_test["best_mae"]) == (0.7, 1.0)
    assert (by_valid["accuracy_last10"], by_valid["mae_last10"], by_valid["accuracy"], by_valid["loss"]) == (0.6, 2.0, None, 4.0)
    assert by_valid.keys() == {*("loss", "accuracy", "accuracy_last10", "best_accuracy"), *("mae", "mae_last10", "best_mae")}


def test_a_metric_is_comparable_in_three_forms_and_the_right_way_round():
    own = Metric("dice", "Dice", lower_is_better=False)
    known = comparable([own])
    assert {"dice", "dice_last10", "best_dice", "mae_last10", "accuracy_last10", "flops"} <= known.keys()
    assert [known[name].lower_is_better for name in ("dice", "best_mae", "loss", "accuracy", "flops", "samples_per_second")] == [
        *(False, True, True, False, True, False)
    ]
    with pytest.raises(InputError, match="no metric 'dyce'; did you mean 'dice'"):
        summary_key("dyce", [own])


# -- folders of others ----------------------------------------------------------------------------------------------

WORDS = {"label": "Dice", "format": "percent", "lower_is_better": False}


def told(folder: Any, value: Any = 0.5, **words: Any) -> RunFolder:
    history = [line(index, None, dice=0.1 * index) for index in range(3)]
    dice = {"metrics": {"dice": {**WORDS, **words}}, "dice": value, "dice_last10": value, "best_dice": 0.2}
    return RunFolder(write(folder, [None] * 3, history=history, fairness=None, summary=dice))


def test_a_summary_says_what_its_metrics_are(tmp_path):
    (found,) = of_run(told(tmp_path / "run").summary())
    assert (found.label, found.format, found.lower_is_better) == ("Dice", "percent", False)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("0.5", {}),
        ([1], {}),
        (0.5, {"format": "html"}),
        (0.5, {"label": 3}),
        (0.5, {"lower_is_better": "no"}),
        (0.5, {"code": "mine:dice"}),
    ],
)
def test_a_summary_that_says_it_wrongly_is_left_out_of_a_report(tmp_path, value, words):
    told(tmp_path / "run", value, **words)
    found = find([tmp_path])
    assert not found.runs
    assert "summary.json is damaged" in found.problems[0]


@pytest.mark.parametrize("wrong", ['"<b>"', "NaN", "[1]"])
def test_a_history_that_says_it_wrongly_is_left_out_of_a_report(tmp_path, wrong):
    run = told(tmp_path / "run")
    file = run.path / "history.jsonl"
    file.write_text(file.read_text("utf-8").replace('"dice": 0.1', f'"dice": {wrong}'), "utf-8")
    found = find([tmp_path])
    assert not found.runs
    assert "history.jsonl is damaged" in found.problems[0]


def test_an_unfinished_run_shows_numbers_that_nobody_declared(tmp_path):
    history = [line(index, None, dice=0.1 * index, **{"no name": 1, "words": "x"}) for index in range(3)]
    write(tmp_path / "run", [None] * 3, finished=False, history=history)
    (run,) = find([tmp_path]).runs
    assert [metric.name for metric in run.metrics] == ["dice"]
    assert json.dumps([entry.as_dict() for entry in run.metrics]) == json.dumps(
        [{"label": "dice", "format": "number", "lower_is_better": False}]
    )


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_of_several_labels_a_sample_f1_and_auroc_are_scikit_learns(batch):
    output = numbers(50, 4)
    target = (output + 2 * numbers(50, 4, seed=1) > 0.5).float()
    assert measured("f1", output, target, batch) == pytest.approx(reference.f1_score(target, output > 0, average="macro"))
    assert measured("f1_micro", output, target, batch) == pytest.approx(reference.f1_score(target, output > 0, average="micro"))
    assert measured("auroc", output, target, batch) == pytest.approx(reference.roc_auc_score(target, output, average="macro"))


def test_micro_f1_of_one_class_a_sample_is_the_accuracy():
    output, target = numbers(40, 3), labels(40, 3)
    assert measured("f1_micro", output, target) == pytest.approx(reference.f1_score(target, output.argmax(1), average="micro"))
    assert measured("f1_micro", output, target) == pytest.approx(measured("accuracy", output, target))


def test_an_object_with_update_and_compute_is_a_metric_of_its_own_direction():
    class WorstError:
        higher_is_better = False

        def __init__(self):
            self.worst = 0.0

        def update(self, output, target):
            self.worst = max(self.worst, float((output - target).abs().max()))

        def compute(self):
            return self.worst

    given = WorstError()
    found = metrics.declaration(given)
    assert (found.name, found.lower_is_better) == ("worst_error", True)
    meter = found()
    meter.update(torch.tensor([1.0]), torch.tensor([3.0]))
    assert meter.compute() == 2
    assert given.worst == found().compute() == 0, "every test set has a copy of its own"
    del WorstError.higher_is_better
    with pytest.raises(InputError, match="does not say which direction is better"):
        metrics.declaration(given)

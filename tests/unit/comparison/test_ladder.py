"""Which learning rates are tried: the grid widens on the side of its best until that lies inside, and never without end."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrts.comparison.ladder import MOST, STEP, around, best, edge, wider
from fedrts.comparison.tuning import Chosen, score
from fedrts.runs.folder import RunFolder
from fedrts.tasks.metrics import ACCURACY, LOSS

OWN = 0.1
RUNGS = [OWN * 3.0**k for k in range(-9, 10)]


def climbed(own: float, score: Callable[[float], float | None], lower_is_better: bool = False) -> dict[float, float | None]:
    """The rates that are tried where a trial comes to `score`."""
    tried = {rate: score(rate) for rate in around(own)}
    while (rate := wider(tried, lower_is_better)) is not None:
        assert rate not in tried
        tried[rate] = score(rate)
        assert len(tried) <= MOST
    return tried


def hill(peak: float, left: float, right: float) -> Callable[[float], float]:
    """A curve over the logarithm of the rate that rises to `peak` (in rungs from OWN) and then falls, each side as steep as it likes."""

    def height(rate: float) -> float:
        away = math.log(rate / OWN, 3) - peak
        return -away * right if away > 0 else away * left

    return height


steep = st.floats(0.1, 10.0)


@given(st.floats(-4.4, 4.4), steep, steep, st.booleans())
def test_the_best_ends_inside_and_is_the_best_of_all(peak, left, right, lower_is_better):
    """Compared with the whole ladder, of which the search sees a few rungs."""
    height = hill(peak, left, right)
    score = (lambda rate: -height(rate)) if lower_is_better else height
    top = max(range(-9, 10), key=lambda k: height(RUNGS[k + 9]))
    if abs(top) > 4:  # steeper on one side than on the other: its neighbour would be an eighth rate
        return
    tried = climbed(OWN, score, lower_is_better)
    found = best(tried, lower_is_better)
    assert found is not None
    assert edge(tried, found) is None
    assert min(tried) < found < max(tried)
    assert height(found) == pytest.approx(height(RUNGS[top + 9]), abs=0.05)  # rates have three digits


@given(st.floats(-20, 20), steep, steep)
def test_no_more_rates_than_declared_and_the_best_of_those_is_kept(peak, left, right):
    tried = climbed(OWN, hill(peak, left, right))
    assert 3 <= len(tried) <= MOST
    if abs(peak) > 6:
        assert len(tried) == MOST
        assert edge(tried, best(tried)) == ("largest" if peak > 0 else "smallest")


@given(st.floats(0.3, 30))
def test_rates_that_diverge_are_worse_than_any_score(limit):
    """Beyond the limit everything fails; below it the larger rate is the better."""
    tried = climbed(OWN, lambda rate: rate if rate < limit else None)
    found = best(tried)
    assert found is not None
    if len(tried) < MOST:
        assert tried[min(rate for rate in tried if rate > found)] is None
        assert found * STEP >= limit * 0.99


def test_where_nothing_trains_smaller_rates_are_tried_to_the_end():
    tried = climbed(OWN, lambda _: None)
    assert list(tried) == [0.1, 0.0333, 0.3, 0.0111, 0.0037, 0.00123, 0.00041]
    assert best(tried) is None
    assert edge(tried, None) is None
    found = climbed(OWN, lambda rate: rate if rate < 0.002 else None)
    assert (best(found), len(found)) == (0.00123, 7)


def test_the_rates_themselves():
    assert around(0.1) == (0.1, 0.0333, 0.3)
    assert around(0.123456) == (0.123456, 0.0412, 0.37)
    assert climbed(0.1, lambda rate: 0.5) == {0.1: 0.5, 0.0333: 0.5, 0.3: 0.5}  # nothing to choose: the experiment's own
    assert wider({0.1: 0.5, 0.0333: 0.6, 0.3: None}) == 0.0111
    assert wider({0.1: 0.5, 0.0333: 0.6, 0.3: None}, lower_is_better=True) is None
    assert wider({0.1: 0.5, 0.0333: 0.4, 0.3: 0.6}) == 0.9


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ({0.1: 0.5, 0.2: 0.6}, "random-d0.5: the best learning rate, 0.2, is the largest tried"),
        ({0.2: 0.5, 0.1: 0.6}, "0.1, is the smallest tried"),
        ({0.1: 0.5}, "0.1, is the only one tried"),
        ({0.2: 0.5, 0.1: 0.6, 0.05: None}, None),
        ({0.1: 0.5, 0.2: 0.6, 0.3: 0.5}, None),
        ({0.1: None, 0.2: None}, None),
    ],
)
def test_a_line_where_the_best_is_at_the_end(scores, words):
    said = Chosen("random-d0.5", scores, best(scores)).remark
    assert (said is None) == (words is None)
    assert said is None or (words in said and said.endswith("use --tune-lr auto, or name more rates"))


def test_the_line_of_rates_that_nobody_named():
    scores = {rate: -rate for rate in RUNGS[:MOST]}
    said = Chosen("fedavg", scores, best(scores, True), LOSS, auto=True).remark
    assert said is not None
    assert said.startswith("fedavg: after 7 trials the best learning rate, ")
    assert f"start from it, with --lr {RUNGS[MOST - 1]:g}" in said


def test_no_line_where_runs_keep_another_rate_than_the_best():
    assert Chosen("fedavg", {0.1: 0.5, 0.2: 0.6}, 0.1, ACCURACY).remark is None


@pytest.mark.parametrize(
    ("values", "expected"), [([0.9] * 5 + [0.1] * 10, 0.1), ([None] * 5 + [0.1] * 10, 0.1), ([0.9] * 14 + [None], None), ([0.2, 0.4], 0.3)]
)
def test_a_trial_that_was_not_finite_in_one_of_its_last_ten_rounds_counts_as_failed(tmp_path, monkeypatch, values, expected):
    monkeypatch.setattr(RunFolder, "summary", lambda _: {})
    monkeypatch.setattr(RunFolder, "history", lambda _: [{} if value is None else {"valid_accuracy": value} for value in values])
    found, metric = score(tmp_path)
    assert metric is ACCURACY
    assert found == (None if expected is None else pytest.approx(expected))

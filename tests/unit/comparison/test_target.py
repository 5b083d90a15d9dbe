"""The first round whose mean over ten rounds reaches a target, and what was spent until then."""

import pytest

from fedrts.comparison.target import cost_to_target, smoothed


def line(round, accuracy, sent=1, flops=10.0):
    return {"round": round, "accuracy": accuracy, "upload_bytes": sent, "download_bytes": 2 * sent, "flops": flops}


def test_by_hand():
    history = [line(-1, None, sent=100, flops=1000.0)] + [line(t, t / 20) for t in range(20)]
    points = smoothed(history)
    assert [point.round for point in points] == list(range(9, 20))
    assert points[0].accuracy == pytest.approx(4.5 / 20)  # rounds 0 to 9
    assert points[-1].accuracy == pytest.approx(14.5 / 20)
    found = cost_to_target(history, 10.5 / 20)
    assert found is not None
    assert (found.round, found.bytes, found.flops) == (15, 300 + 16 * 3, 1000.0 + 16 * 10.0)


def test_one_good_round_is_not_enough():
    history = [line(t, 0.9 if t == 12 else 0.5) for t in range(20)]
    assert cost_to_target(history, 0.6) is None
    assert cost_to_target(history, 0.54) is not None


def test_never_reached():
    assert cost_to_target([line(t, 0.5) for t in range(20)], 0.51) is None
    assert cost_to_target([], 0.1) is None


def test_rounds_that_were_not_evaluated():
    """The mean is over the evaluations in the last ten rounds; the cost over all rounds."""
    history = [line(t, t / 100 if (t + 1) % 5 == 0 else None) for t in range(30)]
    points = smoothed(history)
    assert [point.round for point in points] == [9, 14, 19, 24, 29]
    assert points[1].accuracy == pytest.approx((0.09 + 0.14) / 2)
    assert points[1].bytes == 15 * 3


def test_exactly_the_target_counts():
    assert cost_to_target([line(t, 0.5) for t in range(10)], 0.5) is not None

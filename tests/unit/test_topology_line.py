"""Lines of topology.jsonl, and which rounds are evaluated, against a count by hand."""

import pytest
import torch

from fedrts.methods.contract import State
from fedrts.server.rounds import describe
from fedrts.sparse.mask import Mask


def state_of(active, sizes):
    bits = torch.zeros(sum(sizes), dtype=torch.bool)
    bits[list(active)] = True
    return State(torch.zeros(len(active)), Mask(bits, sizes))


@pytest.mark.parametrize(
    ("before", "after", "overlap", "grown"),
    [
        ((0, 1, 2, 3), (0, 1, 2, 5), 3 / 4, 1),
        ((0, 1, 2), (4, 5, 6), 0.0, 3),
        ((0, 1, 2), (0, 1, 2), 1.0, 0),
        ((0, 1, 2, 3), (0, 1), 2 / 4, 0),
        ((0, 1), (0, 1, 2, 3), 2 / 2, 2),
        ((), (0,), 0.0, 1),
    ],
)
def test_overlap_is_the_share_of_the_links_before_that_are_still_there(toy, before, after, overlap, grown):
    run = toy("random", "mlp")
    sizes = run.layout.sizes
    line = describe(run.plan, state_of(before, sizes), state_of(after, sizes), 3)
    assert line["overlap"] == pytest.approx(overlap, abs=1e-12)
    assert line["changed"] == {entry.name: grown if place == 0 else 0 for place, entry in enumerate(run.layout.layers)}
    assert line["active"] == {entry.name: len(after) if place == 0 else 0 for place, entry in enumerate(run.layout.layers)}
    assert line["round"] == 3


@pytest.mark.parametrize(("every", "expected"), [(5, [4, 9, 14, 19, *range(20, 30)]), (1, list(range(30))), (50, list(range(20, 30)))])
def test_every_fifth_round_is_evaluated_and_the_last_ten(toy, every, expected):
    plan = toy("random", "mlp", rounds=30, eval={"every": every}).plan
    assert [index for index in range(-1, 30) if plan.is_evaluated(index)] == expected

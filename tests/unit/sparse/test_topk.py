import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedrts.sparse import topk
from fedrts.sparse.topk import _largest_on_device, top, top_indices


def reference(scores: list[float], k: list[int], sizes: list[int]) -> list[bool]:
    """The k largest of every layer by sorting, the lowest index first among equals, NaN as −∞."""
    chosen, start = [False] * len(scores), 0
    for count, size in zip(k, sizes, strict=True):
        layer = range(start, start + size)
        rank = sorted(layer, key=lambda i: (-scores[i] if scores[i] == scores[i] else float("inf"), i))
        for i in rank[:count]:
            chosen[i] = True
        start += size
    return chosen


VALUES = st.sampled_from([0.0, -0.0, 0.5, 1.0, 1.5, -2.0, 3.25, float("nan"), float("inf"), -float("inf")])


@st.composite
def problems(draw, values=VALUES):
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    k = [draw(st.integers(0, size)) for size in sizes]
    scores = draw(st.lists(values | st.floats(width=32, allow_nan=False), min_size=sum(sizes), max_size=sum(sizes)))
    return scores, k, sizes


@given(problems())
def test_top_equals_sorting(problem):
    scores, k, sizes = problem
    finite = [s for s in scores if s == s and abs(s) != float("inf")]
    tensor = torch.tensor(scores, dtype=torch.float32)
    chosen = top(tensor, k, sizes)
    assert [int(part.sum()) for part in chosen.split(sizes)] == k
    if len(finite) == len(scores):
        assert chosen.tolist() == reference(tensor.tolist(), k, sizes)


@given(problems(st.sampled_from([0.0, 1.0, 2.0, float("nan")])))
def test_ties_and_nan(problem):
    scores, k, sizes = problem
    assert top(torch.tensor(scores), k, sizes).tolist() == reference(torch.tensor(scores).tolist(), k, sizes)


@given(problems(st.sampled_from([0.0, -0.0, 1.0, -2.0, float("nan"), float("inf")])), st.sampled_from([torch.float32, torch.float64]))
def test_the_operations_for_other_devices_agree(problem, dtype):
    scores, k, sizes = problem
    tensor = torch.tensor(scores, dtype=dtype)
    assert torch.equal(_largest_on_device(tensor, k, sizes), top(tensor, k, sizes))
    both = torch.stack([tensor, tensor.flip(0)])
    assert torch.equal(_largest_on_device(both, k, sizes), top(both, k, sizes))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@given(problem=problems(st.sampled_from([0.0, 1.0, 1.5, -2.0, float("nan"), float("inf")])))
def test_short_types_are_chosen_from_as_their_numbers(problem, dtype):
    scores, k, sizes = problem
    tensor = torch.tensor(scores).to(dtype)
    assert torch.equal(top(tensor, k, sizes), top(tensor.float(), k, sizes))


def test_leading_axes_are_independent_clients():
    scores = torch.rand(3, 2, 12)
    together = top(scores, [2, 3], [5, 7])
    for a in range(3):
        for b in range(2):
            assert torch.equal(together[a, b], top(scores[a, b], [2, 3], [5, 7]))


def test_large_layers_with_many_ties():
    sizes = [200_000, 150_000, 50_000]
    scores = torch.randint(0, 1000, (400_000,)).float()  # many ties
    chosen = top(scores, [50_000, 1, 50_000], sizes)
    order = torch.argsort(scores[:200_000], descending=True, stable=True)[:50_000]
    assert torch.equal(chosen[:200_000].nonzero().squeeze(), order.sort().values)
    assert int(chosen[200_000:350_000].sum()) == 1
    assert bool(chosen[350_000:].all())


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="do not fit"):
        top(torch.rand(5), [1], [4])


def test_top_indices_chooses_among_candidates_only():
    scores = torch.tensor([9.0, 1.0, 5.0, 7.0, 3.0, 8.0])
    mask = torch.tensor([False, True, True, True, True, False])
    assert top_indices(scores, [1, 2], mask, [3, 3]).tolist() == [2, 3, 4]
    with pytest.raises(ValueError, match="cannot choose"):
        top_indices(scores, [3, 0], mask, [3, 3])


@pytest.mark.parametrize("k", [(3, 0, 7), (1, 5, 20)])
def test_threads_choose_the_same(monkeypatch, k):
    scores = torch.randint(0, 6, (2, 35), generator=torch.Generator().manual_seed(1)).float()
    alone = topk.top(scores, k, (5, 10, 20))
    monkeypatch.setattr(topk, "_MANY", 1)
    assert torch.equal(topk.top(scores, k, (5, 10, 20)), alone)
    assert alone.sum() == 2 * sum(k)

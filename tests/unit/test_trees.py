"""Trees of tensors: rows, names, and how a module is called with them."""

import pytest
import torch
from torch import nn

from fedrts import trees
from fedrts.data.ragged import Ragged, Samples

X = torch.arange(12.0).view(6, 2)
TREE = {"a": X, "b": (X + 1, {"c": X + 2})}


class By(nn.Module):
    """Tells how it was called."""

    def __init__(self, forward):
        super().__init__()
        self.forward = forward


def test_rows_of_all_leaves():
    found = trees.at(TREE, torch.tensor([3, 1]))
    assert found["a"].tolist() == X[[3, 1]].tolist()
    assert found["b"][1]["c"].tolist() == (X[[3, 1]] + 2).tolist()
    assert [trees.count(part) for part in trees.split(TREE, 4)] == [4, 2]
    again = trees.joined(list(trees.split(TREE, 4)))
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(again), trees.leaves(TREE), strict=True))
    assert list(trees.named("x", TREE)) == ["x['a']", "x['b'][0]", "x['b'][1]['c']"]
    assert list(trees.named("x", X)) == ["x"], "of one tensor the name is as it always was"


@pytest.mark.parametrize(
    ("forward", "given", "expected"),
    [
        (lambda x: ("whole", x), X, ("whole", X)),
        (lambda left, right: ("by position", left, right), (X, 1), ("by position", X, 1)),
        (lambda left, right=None: ("by position", left, right), (X, 1), ("by position", X, 1)),
        (lambda pair: ("whole", pair), (X, 1), ("whole", (X, 1))),
        (lambda a, b: ("by name", a, b), {"b": 1, "a": 2}, ("by name", 2, 1)),
        (lambda **names: ("by name", names), {"b": 1}, ("by name", {"b": 1})),
        (lambda batch: ("whole", batch), {"b": 1, "a": 2}, ("whole", {"b": 1, "a": 2})),
    ],
)
def test_a_module_is_called_by_position_by_name_or_with_the_whole(forward, given, expected):
    assert trees.called(By(forward), given) == expected


def test_a_forward_that_takes_neither_says_so_in_its_own_words():
    with pytest.raises(TypeError, match="unexpected keyword argument 'a'"):
        trees.called(By(lambda left, right: None), {"a": 1, "b": 2})


def test_ragged_rows_are_collated_batch_by_batch_and_once():
    calls = []

    def pad(samples):
        calls.append(len(samples))
        longest = max(map(len, samples))
        return torch.tensor([sample + [0] * (longest - len(sample)) for sample in samples]), torch.tensor(
            [sum(sample) for sample in samples]
        )

    source = Samples([[1], [2, 3], [4, 5, 6]], pad, lambda batch: batch)
    x, y = (Ragged(source, torch.arange(3), half) for half in (0, 1))
    some = torch.tensor([1, 0])
    assert trees.opened(trees.at(x, some)).tolist() == [[2, 3], [1, 0]]
    assert trees.opened(trees.at(y, some)).tolist() == [5, 1]
    assert calls == [2], "both halves are of one batch"
    assert [trees.opened(part).shape[1] for part in trees.split(x, 2)] == [2, 3]
    other = Samples([[1], [2, 3], [4, 5, 7]], pad, lambda batch: batch)
    assert source.digest != other.digest

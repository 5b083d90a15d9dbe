import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedrts.sparse.mask import Mask


@st.composite
def masks(draw):
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    bits = draw(st.lists(st.booleans(), min_size=sum(sizes), max_size=sum(sizes)))
    return Mask(torch.tensor(bits), sizes)


@given(masks(), st.integers(0, 5), st.integers(0, 3))
def test_compact_and_expand_are_inverse_on_the_mask(mask, rest, clients):
    shape = (clients, len(mask.bits) + rest) if clients else (len(mask.bits) + rest,)
    vector = torch.randn(shape)
    compact = mask.compact(vector)
    assert compact.shape[-1] == mask.number + rest
    full = mask.expand(compact)
    kept = torch.cat([mask.bits, torch.ones(rest, dtype=torch.bool)])
    assert torch.equal(full, torch.where(kept, vector, torch.zeros(())))
    assert torch.equal(mask.compact(full), compact)


@given(masks())
def test_counts_and_indices(mask):
    assert mask.counts == tuple(int(part.sum()) for part in mask.bits.split(list(mask.sizes)))
    assert torch.equal(mask.active.sort().values, mask.bits.nonzero().squeeze(-1))
    assert sorted(mask.active.tolist() + mask.inactive.tolist()) == list(range(len(mask.bits)))


def test_expanded_values_are_the_receivers_own():
    full = Mask.full([4])
    values = torch.zeros(6)
    full.expand(values)[0] = 1
    full.compact(values)[1] = 1
    assert values.count_nonzero() == 0


@given(st.data(), st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_the_best_of_all_layers(data, sizes):
    """The best one of each layer, then the largest of what is left."""
    links = sum(sizes)
    scores = data.draw(st.lists(st.integers(0, 10**6).map(float), min_size=links, max_size=links, unique=True))
    number = data.draw(st.integers(len(sizes), links))
    starts = [sum(sizes[:layer]) for layer in range(len(sizes))]
    chosen = {max(range(start, start + size), key=scores.__getitem__) for start, size in zip(starts, sizes, strict=True)}
    left = sorted(set(range(links)) - chosen, key=scores.__getitem__, reverse=True)
    expected = chosen | set(left[: number - len(sizes)])
    assert set(Mask.top_of_all(torch.tensor(scores), number, sizes).active.tolist()) == expected


def test_gained_counts_new_links_only():
    before, after = (Mask(torch.tensor(bits, dtype=torch.bool), [4]) for bits in ([1, 1, 0, 0], [1, 0, 1, 0]))
    assert after.gained(before) == 1
    assert before.gained(before) == 0


@pytest.mark.parametrize("bits", [torch.ones(5), torch.ones(4, dtype=torch.bool), torch.ones(1, 5, dtype=torch.bool)])
def test_a_mask_is_a_vector_of_bits_over_all_layers(bits):
    with pytest.raises(ValueError, match=r"a mask over layers of \[3, 2\] cannot be"):
        Mask(bits, [3, 2])
